"""Rounding and codes for NumPy arrays: the vector twin of `scalar`.

The results assume the floating-point unit as Python starts it: round to nearest, subnormals not flushed.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, FP16, FP32, FP64, FloatFormat
from bf16forensics.floats.scalar import MODES, float_from_code
from bf16forensics.floats.stochastic import RandomSource, goes_up

_WIDE = {np.dtype(np.float32): FP32, np.dtype(np.float64): FP64}
_CODE_DTYPE: dict[str, type[np.unsignedinteger[Any]]] = {
    "e4m3": np.uint8,
    "e5m2": np.uint8,
    "bf16": np.uint16,
    "fp16": np.uint16,
    "fp32": np.uint32,
    "fp64": np.uint64,
}


def round_to(
    x: NDArray[Any],
    fmt: FloatFormat,
    mode: str = "rne",
    *,
    overflow: str | None = None,
    random: RandomSource | None = None,
) -> NDArray[Any]:
    """Round every element to a format in one rounding; float64 goes to BF16 directly, never by way of FP32.

    NaN stays NaN, signed zeros stay, subnormals of the format are kept. Infinities, and values that overflow, become
    what `overflow` says; see `scalar.encode`, which specifies every case. An empty array stays empty.

    Args:
        x: Any shape, float32 or float64.
        fmt: The format.
        mode: "rne", "rz", "rna" or "stochastic".
        overflow: "nonfinite" or "saturate"; None for the format's own, which saturates FP8 alone.
        random: For "stochastic", and for no other mode. A generator, which makes the rounding exactly unbiased and
            serves elements in row-major order; or random bits, an unsigned array of the shape of `x`: an element r of
            k bits stands for r / 2**k.

    Returns:
        A new array, same shape and dtype as `x`.

    Raises:
        InputError: unknown mode or overflow, another dtype, random numbers that are missing, not asked for or of
            another shape or dtype, or a largest value to saturate at that the dtype cannot hold.
    """
    wide = _wide_format(x)
    if mode not in MODES:
        raise InputError(f"unknown rounding mode {mode!r}; use one of {', '.join(MODES)}")
    if (mode == "stochastic") != (random is not None):
        raise InputError(f"random numbers go with rounding mode 'stochastic' and only with it, got mode {mode!r}")
    beyond = fmt.value_beyond(overflow)
    if fmt.fraction_bits >= wide.fraction_bits:
        return _only_limited(x, fmt, wide, beyond)
    values = _cast(x, np.float64)
    magnitude = np.abs(values)
    is_finite = np.isfinite(magnitude)
    magnitude = np.where(is_finite, magnitude, 0.0)
    step_exponent = step_exponents(magnitude, fmt)
    # Scaling by a power of two is exact here: in units of its own step a value is below 2**(fraction_bits + 1).
    num_steps = _to_integers(np.ldexp(magnitude, -step_exponent), mode, random)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(num_steps, step_exponent)
    rounded = np.where(rounded > fmt.max_finite, fmt.max_finite if mode == "rz" else beyond, rounded)
    rounded = np.where(is_finite, rounded, beyond)
    return np.where(np.isnan(values), x, _cast(np.copysign(rounded, values), x.dtype))


def codes_from_array(x: NDArray[Any], fmt: FloatFormat) -> NDArray[Any]:
    """Return the codes of values that a format can hold; NaN gives the format's positive quiet NaN.

    Args:
        x: Any shape, float32 or float64.
        fmt: The format.

    Returns:
        Same shape; uint8, uint16, uint32 or uint64 by the width of the format.

    Raises:
        InputError: another dtype, or a value that the format cannot hold.
    """
    _wide_format(x)
    values = _cast(x, np.float64)
    is_nan = np.isnan(values)
    is_held = (round_to(values, fmt, overflow="nonfinite") == values) | is_nan
    if not is_held.all():
        raise InputError(f"{values[~is_held].flat[0]!r} is not a {fmt.name} value; round it first")
    codes: NDArray[Any]
    if fmt.bits == 8:
        codes = _narrow_codes(np.where(is_nan, 0.0, values), fmt)
    elif fmt is FP64:
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
    if fmt.bits == 8:
        return np.asarray(_values_of_codes(fmt)[codes])
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


def _only_limited(x: NDArray[Any], fmt: FloatFormat, wide: FloatFormat, beyond: float) -> NDArray[Any]:
    if not np.isfinite(beyond):
        return x.copy()
    if fmt.max_finite > wide.max_finite:
        raise InputError(f"{x.dtype.name} cannot hold the largest {fmt.name} value; convert the array to float64")
    return x.clip(-beyond, beyond)


def _to_integers(num_steps: NDArray[np.float64], mode: str, random: RandomSource | None) -> NDArray[np.float64]:
    if mode == "rne":
        return np.rint(num_steps)
    whole = np.trunc(num_steps)
    if mode == "rna":
        return whole + (num_steps - whole >= 0.5)
    return whole if random is None else whole + goes_up(num_steps - whole, random)


def _narrow_codes(values: NDArray[np.float64], fmt: FloatFormat) -> NDArray[np.uint8]:
    is_finite = np.isfinite(values)
    magnitude = np.where(is_finite, np.abs(values), 0.0)
    step_exponent = step_exponents(magnitude, fmt)
    num_steps = np.ldexp(magnitude, -step_exponent).astype(np.int32)
    codes = ((step_exponent - fmt.step_exponent_min) << fmt.fraction_bits) + num_steps
    codes = np.where(is_finite, codes, fmt.largest_code)
    return np.where(np.signbit(values), codes | fmt.sign_mask, codes).astype(np.uint8)


@cache
def _values_of_codes(fmt: FloatFormat) -> NDArray[np.float64]:
    return np.array([float_from_code(code, fmt) for code in range(1 << fmt.bits)])


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
