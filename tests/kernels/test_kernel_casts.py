"""Triton's own conversion to BF16, which is only observed."""

import numpy as np
import pytest
import torch

from bf16forensics.floats import arrays
from bf16forensics.floats.formats import BF16


@pytest.fixture
def casts():
    pytest.importorskip("triton")
    from bf16forensics.kernels import casts

    return casts


@pytest.mark.parametrize("shape", [(0,), (1,), (4096,), (4097,), (3, 111)], ids=str)
def test_values_of_the_format_stay(casts, device, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = casts.cast_bf16(x.float().to(device))
    assert (found.shape, found.dtype) == (x.shape, torch.bfloat16)
    assert (found.cpu().view(torch.int16) == x.view(torch.int16)).all()


@pytest.mark.gpu
def test_hardware_rounds_to_nearest_even(casts):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = np.array([-4.703990459442139, -4.703125, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 3.4e38], dtype=np.float32)
    found = casts.cast_bf16(torch.from_numpy(x).cuda()).float().cpu().numpy()
    assert found.tolist() == arrays.round_to(x, BF16).tolist()


@pytest.mark.parametrize("wrong", [torch.ones(2, dtype=torch.float64), torch.ones(2, 3).T], ids=["fp64", "strided"])
def test_other_tensors_are_refused(casts, wrong):
    with pytest.raises(ValueError, match="expected a contiguous FP32 tensor"):
        casts.cast_bf16(wrong)
