"""The error of the rounding that ends a sum of a few large numbers and many small ones, and its law.

The main sum, of the large numbers, lies on a grid of 2^-d ulp: d of its bits lie below the last one that is kept. A
q-th of it, q odd, lies on a grid of 2^-d / q. The residue r, all the rest in ulp, is small. Where r is 0, halves go to
even and nothing is left on average. Any r > 0 takes every half up, and that is a bias.

The law. For main sums that are uniform on a grid with steps of s = 2^-d / q ulp and 0 < r < s / 2, the mean error is
b = s / 2 - r for d >= 1, where half an ulp lies on the grid, and b = -r for d = 0, where it does not. A larger r only
moves the main sum along the grid: b = s / 2 - (r mod s), and for d = 0 the distance from r to the nearest multiple of
s. b(-r) = -b(r). Where r is a multiple of s (d >= 1), or half of an odd one (d = 0), halves go to even again: b = 0.

Signs: the residue counts along the main sum, the error away from zero.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import FP64, FloatFormat

#: The most bits dropped that are told apart; of 2^-64 ulp nothing can be seen.
MOST_BITS = 64


def tie_law(bits_dropped: int, residue: float, odd: int = 1) -> float:
    """The mean error b in ulp, away from zero for small residues that are, from an exact one rounded once.

    Args:
        bits_dropped: d, 0 to `MOST_BITS`.
        residue: r in ulp; NaN and infinities give NaN.
        odd: q, an odd positive number.

    Raises:
        InputError: d or q out of range.
    """
    if not 0 <= bits_dropped <= MOST_BITS or odd < 1 or odd % 2 == 0:
        raise InputError(f"the law takes 0 to {MOST_BITS} bits and an odd divisor; got {bits_dropped} and {odd}")
    if not math.isfinite(residue):
        return math.nan
    step = Fraction(1, odd << bits_dropped)
    place = abs(Fraction(residue)) / step
    place -= math.floor(place)
    half = Fraction(1, 2)
    if bits_dropped:
        error = half - place if place else Fraction(0)
    else:
        error = Fraction(0) if place == half else (place > half) - place
    return math.copysign(1.0, residue) * float(error * step)


def tie_law_array(
    bits_dropped: NDArray[np.int64], residue: NDArray[np.float64], odd: NDArray[np.int64] | int = 1
) -> NDArray[np.float64]:
    """`tie_law` of every element; shapes broadcast.

    For q = 1 the same numbers; else within 2^-50 ulp of them, but where r is that close to a jump of the law.

    Raises:
        InputError: d or q out of range.
    """
    if ((bits_dropped < 0) | (bits_dropped > MOST_BITS)).any() or (np.less(odd, 1) | (np.remainder(odd, 2) == 0)).any():
        raise InputError(f"the law takes 0 to {MOST_BITS} bits and odd divisors; an element is out of range")
    return _law(np.ldexp(1.0, bits_dropped), residue, odd)


def _law(steps: NDArray[np.float64], residue: NDArray[np.float64], odd: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """The law of grids with 2^d `steps` an ulp, before their division by q."""
    places_an_ulp = steps * odd
    with np.errstate(invalid="ignore"):
        place = np.abs(residue) * places_an_ulp
        place -= np.floor(place)
        error = 0.5 - place
        error *= place != 0
        is_coarse = np.broadcast_to(steps == 1, error.shape)
        if is_coarse.any():
            np.copyto(error, (np.rint(place) - place) * (place != 0.5), where=is_coarse)
        error /= places_an_ulp
        error *= np.sign(residue)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class TieTerms:
    """One rounding an element; same shape each. Undefined where `defined` is False: floats are NaN there."""

    #: bool: the value before the rounding is finite and not 0, and so is finite what it is made of.
    defined: NDArray[np.bool_]
    #: int64 d: 0 to `MOST_BITS`; 0 where undefined.
    bits_dropped: NDArray[np.int64]
    #: float64 r in ulp, + with the sign of the main sum (or of the value itself where the main sum is 0).
    residue: NDArray[np.float64]
    #: float64 in ulp, + away from zero: what the rounding did, and the law b(d, r).
    error: NDArray[np.float64]
    law: NDArray[np.float64]
    #: bool: the main sum alone lies halfway between two values of the format.
    halfway: NDArray[np.bool_]


def tie_terms(
    main: NDArray[np.float64],
    grid: NDArray[np.float64],
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    fmt: FloatFormat,
    odd: NDArray[np.int64] | int = 1,
    noise: float = 0.0,
) -> TieTerms:
    """Takes roundings apart.

    A quotient by an odd number is rounded before it comes here, except where it can be held, which is where it lies
    halfway: there is no residue there, whatever `noise` moved the others. Below it the law takes r as 0.

    Args:
        main: float64 [...] main sums.
        grid: float64 [...] a power of two that divides `main * odd` whatever the large numbers' last bits are; inf
            where all of them are 0.
        before: float64 [...] values before the rounding.
        after: float64 [...] values after it.
        fmt: the format of the rounding; its ulp is that at `before`.
        odd: [...] what the sum of the large numbers was divided by, powers of two apart.
        noise: what the operations before moved `before` by, relative to it, where `odd` is not 1.

    Returns:
        One entry an element; an empty array stays empty.
    """
    defined = np.isfinite(before) & (before != 0) & np.isfinite(after) & np.isfinite(main)
    whole = bool(defined.all())
    if not whole:
        main, grid = np.where(defined, main, 0.0), np.where(defined, grid, np.inf)
        before, after = np.where(defined, before, 1.0), np.where(defined, after, 1.0)
    ulp = steps_at(before, fmt)
    sign = np.sign(main if main.all() else np.where(main == 0, before, main))
    away = np.sign(before)
    beyond = before - main
    # Adding +0 leaves no zero negative.
    residue = beyond / ulp * sign + 0.0
    error = (after - before) / ulp * away + 0.0
    # The grid may be as fine as it likes, or infinite.
    with np.errstate(over="ignore"):
        steps = np.clip(ulp / grid, 1.0, 2.0**MOST_BITS)
    heard = residue
    if np.not_equal(odd, 1).any():
        heard = residue * ((np.abs(beyond) > noise * np.abs(before)) | np.equal(odd, 1))
    law = _law(steps, heard, odd) * (sign * away) + 0.0
    places = np.abs(main) / ulp
    if not whole:
        for values in (residue, error, law):
            values[~defined] = np.nan
    return TieTerms(
        defined=defined,
        bits_dropped=np.frexp(steps)[1].astype(np.int64) - 1,
        residue=residue,
        error=error,
        law=law,
        halfway=places - np.floor(places) == 0.5,
    )


def steps_at(values: NDArray[np.float64], fmt: FloatFormat) -> NDArray[np.float64]:
    """`ulp_array` of values that are finite, by their bits: several times as fast. Infinite ones count as the largest.

    Args:
        values: float64 [...]; not NaN.
        fmt: the format.
    """
    exponent_only = np.int64(((1 << FP64.exponent_bits) - 1) << FP64.fraction_bits)
    binade = (np.ascontiguousarray(values).view(np.int64) & exponent_only).view(np.float64)
    return np.asarray(np.clip(binade, 2.0**fmt.exponent_min, 2.0**fmt.exponent_max) * 2.0**-fmt.fraction_bits)
