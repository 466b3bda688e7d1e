"""The jit rounding helpers, bit for bit against the specification."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from bf16forensics.floats import arrays
from bf16forensics.floats.formats import BF16


@pytest.fixture
def rounding():
    pytest.importorskip("triton")
    from bf16forensics.kernels import rounding

    return rounding


def boundary_values():
    """Return every BF16 code of either sign followed by lower halves around none, half and all."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1).view(np.float32)


def bits_equal(found, expected):
    found = found.cpu().numpy()
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all(), f"{np.count_nonzero(~same)} differ, first at {np.flatnonzero(~same)[0]}"


def test_every_boundary_rounds_as_specified(rounding, device):
    x = boundary_values()
    bits_equal(rounding.round_bf16(torch.from_numpy(x).to(device)), arrays.round_to(x, BF16))


def test_nan_stays_nan_in_the_bits(rounding, device):
    """The result's top half alone must be a NaN, because that is what a store as BF16 keeps."""
    codes = np.array([0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], dtype=np.uint32)
    found = rounding.round_bf16(torch.from_numpy(codes.view(np.float32)).to(device)).cpu().numpy().view(np.uint32)
    assert ((found & 0x7FFFFFFF) > 0x7F800000).all()
    assert (found & 0xFFFF == 0).all()
    assert (found >> 31 == codes >> 31).all()


def test_a_value_that_truncation_gets_wrong(rounding, device):
    x = torch.tensor([-4.703990459442139, -4.703125], device=device)
    assert rounding.round_bf16(x).tolist() == [-4.71875, -4.6875]


@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (4096,), (4097,), (3, 111)], ids=str)
def test_shapes(rounding, device, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = rounding.round_bf16(x.to(device))
    assert found.shape == shape
    bits_equal(found.reshape(-1), arrays.round_to(x.numpy().reshape(-1), BF16))


def test_split_gives_two_bf16_terms(rounding, device):
    x = boundary_values()
    x = x[np.isfinite(x) & (np.abs(x) > 2.0**-100) & (np.abs(x) < 2.0**127)]
    high, low = (t.cpu().numpy() for t in rounding.split_bf16_terms(torch.from_numpy(x).to(device)))
    expected = arrays.round_to(x, BF16)
    bits_equal(torch.from_numpy(high), expected)
    bits_equal(torch.from_numpy(low), arrays.round_to(x - expected, BF16))
    left = np.abs(x.astype(np.float64) - high - low)
    assert (left <= 2.0**-17 * np.abs(x)).all()


def test_split_of_a_special_value_cannot_look_finite(rounding, device):
    codes = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF], dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        high, low = rounding.split_bf16_terms(torch.from_numpy(codes.view(np.float32)).to(device))
    assert not (high + low).isfinite().any()


def test_other_tensors_are_refused(rounding):
    for launcher in (rounding.round_bf16, rounding.split_bf16_terms):
        with pytest.raises(ValueError, match=r"expected a contiguous FP32 tensor, got torch\.float64"):
            launcher(torch.ones(2, dtype=torch.float64))
        with pytest.raises(ValueError, match="contiguous"):
            launcher(torch.ones(2, 3).T)


def test_importing_the_package_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import bf16forensics.kernels"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
