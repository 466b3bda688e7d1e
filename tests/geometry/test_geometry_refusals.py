"""What a geometry and an additive mask refuse, and how additive masks split."""

import math
from typing import Any

import pytest
import torch

from bf16forensics.errors import InputError
from bf16forensics.geometry.geometry import Geometry, split_additive_mask


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"window": 0}, "window"),
        ({"window": -3}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": -50.0}, "softcap"),
        ({"softcap": math.inf}, "softcap"),
        ({"softcap": math.nan}, "softcap"),
    ],
)
def test_impossible_numbers(given: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        Geometry(**{"scale": 1.0, **given})
    assert "\n" not in str(caught.value)
    assert str(next(iter(given.values()))) in str(caught.value)


@pytest.mark.parametrize("given", [{"scale": 1e-30}, {"window": 1}, {"softcap": 1e-3}, {"softcap": 1e30}])
def test_neighbours_that_are_possible(given: dict[str, Any]) -> None:
    Geometry(**{"scale": 1.0, **given})


#: What people write to hide a pair, by the dtype of the mask.
HIDING = {
    "fp32-inf": (torch.float32, -math.inf),
    "fp32-lowest": (torch.float32, torch.finfo(torch.float32).min),
    "fp32-lowest-of-bf16": (torch.float32, torch.finfo(torch.bfloat16).min),
    "fp64-lowest": (torch.float64, torch.finfo(torch.float64).min),
    "fp64-lowest-of-fp32": (torch.float64, torch.finfo(torch.float32).min),
    "bf16-inf": (torch.bfloat16, -math.inf),
    "bf16-lowest": (torch.bfloat16, torch.finfo(torch.bfloat16).min),
    "bf16-from-fp32-lowest": (torch.bfloat16, torch.finfo(torch.float32).min),
    "fp16-lowest": (torch.float16, torch.finfo(torch.float16).min),
    "fp16-inf": (torch.float16, -math.inf),
}


@pytest.mark.parametrize("name", HIDING)
def test_values_that_hide_a_pair(name: str) -> None:
    dtype, value = HIDING[name]
    mask = torch.zeros(1, 2, 3, dtype=torch.float32 if dtype != torch.float64 else dtype)
    mask[0, 1, 2] = value
    mask[0, 0, 0] = 0.5
    keep, bias = split_additive_mask(mask.to(dtype))
    assert keep is not None
    assert keep.tolist() == [[[True, True, True], [True, True, False]]]
    assert bias is not None
    assert bias.tolist() == [[[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_planes_of_the_lowest_number_overflow_and_still_hide(dtype: torch.dtype) -> None:
    lowest = torch.full((1, 1, 2), torch.finfo(dtype).min, dtype=dtype)
    both = lowest + lowest
    assert both.isinf().all()
    keep, bias = split_additive_mask(both)
    assert keep is not None
    assert not keep.any()
    assert bias is None


@pytest.mark.parametrize("value", [-1e30, -65504.0, -3e38, 12.5])
def test_finite_values_are_a_bias(value: float) -> None:
    keep, bias = split_additive_mask(torch.tensor([[[0.0, value]]]))
    assert keep is None
    assert bias is not None
    assert bias[0, 0, 1].item() == torch.tensor(value).item()


def test_a_mask_of_zeros_is_no_mask() -> None:
    assert split_additive_mask(torch.zeros(1, 3, 3)) == (None, None)
    assert split_additive_mask(torch.full((1, 3, 3), -0.0)) == (None, None)


def test_the_mask_is_not_changed() -> None:
    mask = torch.tensor([[[0.0, -math.inf, 1.0]]])
    before = mask.clone()
    split_additive_mask(mask)
    assert torch.equal(mask, before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_and_plus_infinity_are_refused(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="NaN or \\+inf"):
        split_additive_mask(torch.tensor([[[0.0, value]]]).to(dtype))
