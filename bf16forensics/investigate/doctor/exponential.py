"""The exponential and the logarithm that recipes compute with: exact where ones are counted, close elsewhere."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bf16forensics.floats.formats import FP32
from bf16forensics.floats.ulp import ulp_array
from bf16forensics.investigate.doctor.result import EXPONENTIALS, FAIL, NOTED, PASS, Check

#: Steps of FP32 within which hardware exponentials are specified (ex2.approx: relative error 2^-22).
LIMIT_ULP = 2.0
#: Odd, so that the elements left over at the end of vector registers are among those measured.
_NUM_POINTS = 200_003
_SEED = 7


def exponential_checks(device: str) -> Iterator[Check]:
    """Compares exp, exp2 and log of FP32 tensors with FP64 on a fixed grid, on one device."""
    spread = np.random.default_rng(_SEED).uniform(-1.0, 1.0, _NUM_POINTS)
    even = np.linspace(-1.0, 0.0, _NUM_POINTS)
    # Results stay normal numbers: below, the tool takes zero.
    yield _check("exp2", device, torch.exp2, np.exp2, 125.0 * even, at=0.0)
    yield _check("exp", device, torch.exp, np.exp, 87.0 * even, at=0.0)
    yield _check("log", device, torch.log, np.log, np.exp2(100.0 * spread), at=1.0)


def _check(
    name: str,
    device: str,
    function: Callable[[Tensor], Tensor],
    exact: Callable[..., NDArray[np.float64]],
    grid: NDArray[np.float64],
    *,
    at: float,
) -> Check:
    x = np.append(grid, at).astype(np.float32)
    found = function(torch.from_numpy(x).to(device)).cpu().numpy().astype(np.float64)
    expected = exact(x.astype(np.float64))
    error = float((np.abs(found - expected) / ulp_array(expected, FP32)).max())
    is_anchored = bool(found[-1] == expected[-1])
    # A whole row at the maximum goes through vector code, where a single element may not.
    whole = function(torch.full((4096,), at, device=device)).double().cpu().numpy()
    is_anchored = is_anchored and bool((whole == expected[-1]).all())
    point = f"{name}({at:g})"
    status = FAIL if not is_anchored else PASS if error <= LIMIT_ULP else NOTED
    return Check(
        group=EXPONENTIALS,
        name=f"torch.{name}, FP32",
        where=device,
        status=status,
        observed=(
            f"largest error {error:.2f} ulp of {len(x):,} points; {point} is {'' if is_anchored else 'not '}exact"
        ),
        expected=f"at most {LIMIT_ULP:g} ulp, as the hardware's; {point} exact",
        what_it_means=(
            "P-bar of a row's maximum is not 1: rows with ones are miscounted."
            if not is_anchored
            else "Not a kernel's own bits: a BF16 rounding of P-bar may flip, in about 1 of 10,000 elements."
        ),
    )
