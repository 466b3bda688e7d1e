"""Sums of float64 terms without any rounding but one, to FP32 at the end, whatever their magnitudes and signs."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError

#: Bits of a digit, and as many terms as keep sums of digits exact float64 integers.
_DIGIT_BITS = 32
_MAX_TERMS = 1 << 20


def exact_sums(terms: NDArray[np.float64], *, running: bool = False) -> NDArray[np.float32]:
    """Return the exact sums over the first axis, each rounded once to FP32, to nearest with ties to even.

    A sum of zero is +0; a negative sum that rounds to zero is -0. NaN, or infinities of both signs, give NaN; otherwise
    an infinite term gives itself. Sums of 2**128 - 2**103 or more are infinite.

    Args:
        terms: [K, ...], at most 2**20 along K; zero, or magnitudes within 2**-900 and 2**900.
        running: Return all sums of the first 1, 2, ..., K terms.

    Returns:
        float32 [...], or [K, ...] when `running`. Sums of no terms are zero.

    Raises:
        InputError: more terms.
    """
    if len(terms) > _MAX_TERMS:
        raise InputError(f"an exact sum takes {_MAX_TERMS:,} terms, got {len(terms):,}; add fewer at a time")
    is_finite = np.isfinite(terms)
    rest = np.where(is_finite, terms, 0.0)
    shape = terms.shape if running else terms.shape[1:]
    # Digits come from the most significant down; each is a signed integer below 2**_DIGIT_BITS.
    digits: list[NDArray[np.int64]] = []
    exponent = _digit_exponent(rest)
    for digit in _digits(rest, exponent):
        total = digit.cumsum(axis=0) if running else digit.sum(axis=0)
        digits.append(total.astype(np.int64))
    sums = _rounded(digits, exponent - _DIGIT_BITS * (len(digits) - 1), shape)
    if is_finite.all():
        return sums
    with np.errstate(invalid="ignore"):
        special = np.where(is_finite, 0.0, terms)
        total = special.cumsum(axis=0) if running else special.sum(axis=0)
    return np.where(total == 0, sums, total.astype(np.float32))


def _digit_exponent(terms: NDArray[np.float64]) -> int:
    """Return the exponent of the unit of the first digit."""
    largest = float(np.abs(terms).max(initial=0.0))
    return int(np.frexp(largest)[1]) - _DIGIT_BITS


def _digits(rest: NDArray[np.float64], exponent: int) -> Iterator[NDArray[np.float64]]:
    """Take the terms apart, digit by digit, until nothing is left; `rest` is used up."""
    digit = np.empty_like(rest)
    while rest.any():
        np.multiply(rest, 2.0**-exponent, out=digit)
        np.trunc(digit, out=digit)
        yield digit
        digit *= 2.0**exponent
        rest -= digit
        exponent -= _DIGIT_BITS


def _rounded(digits: list[NDArray[np.int64]], exponent: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Round sums of digits once; the last digit's unit is 2**exponent, and each before it has the next higher one."""
    is_negative = _carried(digits, shape)[-1] < 0
    magnitude = np.stack(_carried([np.where(is_negative, -digit, digit) for digit in digits], shape))
    is_used = magnitude != 0
    top = np.maximum(len(magnitude) - 1 - is_used[::-1].argmax(axis=0), 1)[np.newaxis]
    high = np.take_along_axis(magnitude, top, axis=0)[0].astype(np.uint64)
    low = np.take_along_axis(magnitude, top - 1, axis=0)[0].astype(np.uint64)
    used_from_low = np.take_along_axis(is_used.cumsum(axis=0), top - 1, axis=0)[0]
    has_more = used_from_low > (low != 0)
    # Two digits hold at least 33 bits of the sum; whether anything follows them becomes one more bit. Such a number
    # rounds to FP32's 24 bits as the whole sum does, and half of the digits' bits go where float64 lacks the room.
    both = (high << np.uint64(_DIGIT_BITS)) | low
    is_wide = high >> np.uint64(_DIGIT_BITS // 2) != 0
    has_more |= is_wide & (both & np.uint64((1 << _DIGIT_BITS // 2) - 1) != 0)
    both = np.where(is_wide, both >> np.uint64(_DIGIT_BITS // 2), both)
    odd = (both << np.uint64(1)) | has_more.astype(np.uint64)
    # The stack starts with a digit of zero below the last one.
    unit = exponent + _DIGIT_BITS * (top[0] - 2) - 1 + np.where(is_wide, _DIGIT_BITS // 2, 0)
    value = np.ldexp(odd.astype(np.float64), unit)
    with np.errstate(over="ignore"):
        return np.where(is_negative, -value, value).astype(np.float32)


def _carried(digits: list[NDArray[np.int64]], shape: tuple[int, ...]) -> list[NDArray[np.int64]]:
    """Return digits in [0, 2**_DIGIT_BITS), least significant first, between a zero and a signed rest above them."""
    carry = np.zeros(shape, np.int64)
    carried = [carry]
    for digit in reversed(digits):
        total = digit + carry
        carried.append(total & ((1 << _DIGIT_BITS) - 1))
        carry = total >> _DIGIT_BITS
    return [*carried, carry]
