"""Steps of a format: the ulp at a value, and how many representable values lie between two.

Everywhere: zero and magnitudes below the smallest normal number have the smallest subnormal as ulp; at a power of two
the ulp is the step above it; finite magnitudes beyond the largest finite number have the step of the largest binade;
infinity and NaN have none, and give NaN.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError
from bf16forensics.floats.arrays import codes_from_array, step_exponents
from bf16forensics.floats.formats import FP64, FloatFormat
from bf16forensics.floats.scalar import code_from_float


def ulp(x: float, fmt: FloatFormat) -> float:
    """Return the spacing of the binade that holds |x|; NaN for infinity and NaN."""
    if not math.isfinite(x):
        return math.nan
    _, exponent = math.frexp(x)
    binade = exponent - 1 if x else fmt.exponent_min
    return math.ldexp(1.0, min(max(binade, fmt.exponent_min), fmt.exponent_max) - fmt.fraction_bits)


def ulp_array(x: NDArray[Any], fmt: FloatFormat) -> NDArray[np.float64]:
    """Return the ulp of a format at every element.

    Args:
        x: Any shape, any real dtype that float64 holds.
        fmt: The format.

    Returns:
        Same shape, float64.
    """
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    is_finite = np.isfinite(magnitude)
    exponent = step_exponents(np.where(is_finite, magnitude, 0.0), fmt)
    exponent = np.minimum(exponent, fmt.exponent_max - fmt.fraction_bits)
    return np.where(is_finite, np.ldexp(1.0, exponent), np.nan)


def ordered_int(code: int, fmt: FloatFormat) -> int:
    """Map a code to an integer that grows by one from each value to the next; both zeros give 0.

    Infinity is one step beyond the largest finite value, in the formats that have it.

    Raises:
        InputError: the code is a NaN, which has no place in the order, or does not fit the format.
    """
    if not 0 <= code < 1 << fmt.bits:
        raise InputError(f"{code:#x} is not a {fmt.name} code; a code has {fmt.bits} bits")
    magnitude = code & (fmt.sign_mask - 1)
    if magnitude > fmt.largest_code:
        raise InputError(f"{code:#x} is a NaN of {fmt.name}; it has no place in the order")
    return -magnitude if code & fmt.sign_mask else magnitude


def distance_steps(a: float, b: float, fmt: FloatFormat) -> int:
    """Return how many steps of a format lead from a up to b; negative when b is below a.

    -0 and +0 are the same value, 0 steps apart.

    Raises:
        InputError: a or b is NaN, or the format cannot hold it.
    """
    return ordered_int(code_from_float(b, fmt), fmt) - ordered_int(code_from_float(a, fmt), fmt)


def distance_steps_array(a: NDArray[Any], b: NDArray[Any], fmt: FloatFormat) -> NDArray[np.int64]:
    """Return how many steps of a format lead from each a up to each b; shapes broadcast. See `distance_steps`.

    Raises:
        InputError: an element is NaN, the format cannot hold it, or the format is "fp64", whose distances do not fit
            64-bit integers.
    """
    if fmt is FP64:
        raise InputError("distances between fp64 values do not fit int64; use distance_steps for single values")
    return _ordered_array(b, fmt) - _ordered_array(a, fmt)


def _ordered_array(x: NDArray[Any], fmt: FloatFormat) -> NDArray[np.int64]:
    codes = codes_from_array(x, fmt).astype(np.int64)
    magnitude = codes & (fmt.sign_mask - 1)
    if (magnitude > fmt.largest_code).any():
        raise InputError(f"NaN has no place in the order of {fmt.name}; mask such elements first")
    return np.where(codes & fmt.sign_mask, -magnitude, magnitude)
