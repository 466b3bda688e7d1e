"""Factors of products, checked and taken apart into values and exponents before they are multiplied many times."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import FP32, FloatFormat, format_named

#: Exponent of zero: below every other, and the sum of two fits int16.
_NO_EXPONENT = -10_000


@dataclass(frozen=True, slots=True)
class Factors:
    """One side of the products, taken apart once; products run along the first axis."""

    #: float64 [K, ...]; zero where the value is not finite.
    values: NDArray[np.float64]
    #: int16 [K, ...]: exponent by the format, far below all others for zero.
    exponents: NDArray[np.int16]
    #: float64 [K, ...], infinities and NaN included; None where all values are finite.
    nonfinite: NDArray[np.float64] | None

    @property
    def all_values(self) -> NDArray[np.float64]:
        """float64 [K, ...], as they were before infinities and NaN became zero."""
        return self.values if self.nonfinite is None else self.nonfinite

    def spread(self, shape: tuple[int, ...]) -> "Factors":
        """Return the factors for a wider shape [K, ...] without copying them."""
        missing = (1,) * (len(shape) - self.values.ndim)
        return self._each(lambda x: np.broadcast_to(x.reshape(x.shape[0], *missing, *x.shape[1:]), shape))

    def part(self, index: tuple[slice, ...]) -> "Factors":
        """Return the factors at a slice of each of the leading axes."""
        return self._each(lambda x: x[index])

    def _each(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Factors":
        nonfinite = None if self.nonfinite is None else change(self.nonfinite)
        return Factors(change(self.values), change(self.exponents), nonfinite)


def factors_of(x: NDArray[np.float32], fmt: FloatFormat) -> Factors:
    """Take values of a format apart. Any shape; `common_format` checks that they are values of it."""
    values = _as_float64(x)
    is_finite = np.isfinite(values)
    if is_finite.all():
        return Factors(values, _exponents(x, fmt), None)
    finite = np.where(is_finite, x, np.float32(0))
    return Factors(finite.astype(np.float64), _exponents(finite, fmt), values)


def common_format(
    a: NDArray[np.float32], b: NDArray[np.float32], formats: tuple[str, ...], name: str | None = None
) -> FloatFormat:
    """Return the format that the factors of products are in.

    Values that several formats hold are taken for the first of them. That matters for the subnormals of the later
    ones alone: 2**-20 has exponent -14 in FP16 and -20 in BF16.

    Args:
        a: Any shape, float32.
        b: Any shape, float32.
        formats: Names to choose from, in this order.
        name: One of them, or None to take the first that holds all values.

    Raises:
        InputError: a name that is not among them, or values that no one format holds.
    """
    if name is not None and name not in formats:
        raise InputError(f"factors are {' or '.join(formats)} here, not {name!r}")
    tried = formats if name is None else (name,)
    for one in tried:
        fmt = format_named(one)
        outside = np.concatenate([_outside(x, fmt) for x in (a, b)])
        if not outside.size:
            return fmt
    raise InputError(
        f"factors must be values of one format, {' or '.join(tried)}; {float(outside[0])!r} is no {tried[-1]} value: "
        f"round a and b first"
    )


def as_float32(x: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Return an array of FP32 values as float32.

    Raises:
        InputError: another dtype than float32 or float64, or a value that FP32 cannot hold.
    """
    if x.dtype == np.float32:
        return x
    if x.dtype != np.float64:
        raise InputError(f"{name} is {x.dtype.name}; convert it to float32 or float64 first")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = x.astype(np.float32)
        is_other = (narrow != x) & ~np.isnan(x)
    if is_other.any():
        raise InputError(f"{float(x[is_other].flat[0])!r} in {name} is no fp32 value; round it first")
    return narrow


def broadcast_shape(c_shape: tuple[int, ...], a: NDArray[Any], b: NDArray[Any]) -> tuple[int, ...]:
    """Return the shape of the results: that of `c`, `a` and `b` broadcast, the last axis of `a` and `b` left out.

    Raises:
        InputError: shapes that do not fit, or factors without an axis of products.
    """
    if a.ndim and b.ndim and a.shape[-1] == b.shape[-1]:
        try:
            return np.broadcast_shapes(c_shape, a.shape[:-1], b.shape[:-1])
        except ValueError:
            pass
    raise InputError(f"shapes do not fit: c {c_shape}, a {a.shape}, b {b.shape}; a and b end in one axis of products")


def _exponents(x: NDArray[np.float32], fmt: FloatFormat) -> NDArray[np.int16]:
    field = ((x.view(np.uint32) >> np.uint32(FP32.fraction_bits)) & np.uint32(0xFF)).astype(np.int16)
    exponent = np.maximum(field - np.int16(FP32.bias), np.int16(fmt.exponent_min))
    return np.where(x == 0, np.int16(_NO_EXPONENT), exponent)


def _as_float64(x: NDArray[np.float32]) -> NDArray[np.float64]:
    # NumPy warns of a signalling NaN, which is an ordinary NaN here.
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def _outside(x: NDArray[np.float32], fmt: FloatFormat) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        return x[(round_to(x, fmt, overflow="nonfinite") != x) & ~np.isnan(x)]
