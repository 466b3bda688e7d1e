"""Rounding and codes for NumPy arrays: the vector twin of `scalar`.

The results assume the floating-point unit as Python starts it: round to nearest, subnormals not flushed.
"""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, FP16, FP32, FP64, FloatFormat
from bf16forensics.floats.scalar import MODES

_WIDE = {np.dtype(np.float32): FP32, np.dtype(np.float64): FP64}
_CODE_DTYPE: dict[str, type[np.unsignedinteger[Any]]] = {
    "bf16": np.uint16,
    "fp16": np.uint16,
    "fp32": np.uint32,
    "fp64": np.uint64,
}


def round_to(x: NDArray[Any], fmt: FloatFormat, mode: str = "rne") -> NDArray[Any]:
    """Round every element to a format in one rounding; float64 goes to BF16 directly, never by way of FP32.

    NaN stays NaN, infinities and signed zeros stay, subnormals of the format are kept. A value beyond the largest
    finite one becomes infinity in "rne" and the largest finite one in "rz". An empty array stays empty.

    Args:
        x: Any shape, float32 or float64.
        fmt: The format.
        mode: "rne" or "rz".

    Returns:
        A new array, same shape and dtype as `x`.

    Raises:
        InputError: unknown mode, or another dtype.
    """
    wide = _wide_format(x)
    if mode not in MODES:
        raise InputError(f"unknown rounding mode {mode!r}; use one of {', '.join(MODES)}")
    if fmt.fraction_bits >= wide.fraction_bits:
        return x.copy()
    values = _cast(x, np.float64)
    magnitude = np.abs(values)
    is_finite = np.isfinite(magnitude)
    magnitude = np.where(is_finite, magnitude, 0.0)
    step_exponent = step_exponents(magnitude, fmt)
    # Scaling by a power of two is exact here: in units of its own step a value is below 2**(fraction_bits + 1).
    num_steps = np.ldexp(magnitude, -step_exponent)
    num_steps = np.rint(num_steps) if mode == "rne" else np.trunc(num_steps)
    beyond = np.inf if mode == "rne" else fmt.max_finite
    with np.errstate(over="ignore"):
        rounded = np.ldexp(num_steps, step_exponent)
    rounded = np.where(rounded > fmt.max_finite, beyond, rounded)
    return np.where(is_finite, _cast(np.copysign(rounded, values), x.dtype), x)


def codes_from_array(x: NDArray[Any], fmt: FloatFormat) -> NDArray[Any]:
    """Return the codes of values that a format can hold; NaN gives the format's positive quiet NaN.

    Args:
        x: Any shape, float32 or float64.
        fmt: The format.

    Returns:
        Same shape; uint16, uint32 or uint64 by the width of the format.

    Raises:
        InputError: another dtype, or a value that the format cannot hold.
    """
    _wide_format(x)
    values = _cast(x, np.float64)
    is_nan = np.isnan(values)
    is_held = (round_to(values, fmt) == values) | is_nan
    if not is_held.all():
        raise InputError(f"{values[~is_held].flat[0]!r} is not a {fmt.name} value; round it first")
    if fmt is FP64:
        codes = values.view(np.uint64)
    elif fmt is BF16:
        codes = (_cast(values, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        narrow = np.float16 if fmt is FP16 else np.float32
        codes = _cast(values, narrow).view(_CODE_DTYPE[fmt.name])
    return np.where(is_nan, codes.dtype.type(fmt.quiet_nan_code), codes)


def array_from_codes(codes: NDArray[Any], fmt: FloatFormat) -> NDArray[np.float64]:
    """Return the values of codes as float64, which holds every value of every format.

    Args:
        codes: Any shape; the unsigned dtype of the format's width.
        fmt: The format.

    Raises:
        InputError: another dtype.
    """
    expected = np.dtype(_CODE_DTYPE[fmt.name])
    if codes.dtype != expected:
        raise InputError(f"{fmt.name} codes are {expected.name}, got {codes.dtype.name}; convert the array")
    if fmt is BF16:
        return _cast(bf16_from_codes(codes), np.float64)
    if fmt is FP16:
        return _cast(codes.view(np.float16), np.float64)
    return _cast(codes.view(np.float32 if fmt is FP32 else np.float64), np.float64)


def bf16_from_codes(codes: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values of BF16 codes as float32, NaN payloads included. Any shape; uint16 in, float32 out.

    Raises:
        InputError: another dtype.
    """
    if codes.dtype != np.uint16:
        raise InputError(f"bf16 codes are uint16, got {codes.dtype.name}; convert the array")
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _cast(x: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    # NumPy warns of a signalling NaN, which is an ordinary NaN here.
    with np.errstate(invalid="ignore"):
        return x.astype(dtype)


def _wide_format(x: NDArray[Any]) -> FloatFormat:
    wide = _WIDE.get(x.dtype)
    if wide is None:
        raise InputError(f"cannot round an array of {x.dtype.name}; convert it to float32 or float64 first")
    return wide


def step_exponents(magnitude: NDArray[np.float64], fmt: FloatFormat) -> NDArray[np.int32]:
    """Return e where 2**e is the spacing of the binade of each magnitude, as if exponents had no upper end.

    Args:
        magnitude: Any shape, float64, finite and not negative.
        fmt: The format.
    """
    # frexp puts the significand into [0.5, 1), so its exponent is one above the binade's.
    _, exponent = np.frexp(magnitude)
    exponent = np.where(magnitude == 0, fmt.exponent_min, exponent - 1)
    return np.maximum(exponent, fmt.exponent_min).astype(np.int32) - np.int32(fmt.fraction_bits)
