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
from bf16forensics.floats.formats import FloatFormat
from bf16forensics.floats.ulp import ulp_array

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
    places_an_ulp = np.ldexp(1.0, bits_dropped) * odd
    with np.errstate(invalid="ignore"):
        place = np.abs(residue) * places_an_ulp
        place -= np.floor(place)
        off_grid = np.where(place == 0.5, 0.0, np.rint(place) - place)
        error = np.where(bits_dropped == 0, off_grid, np.where(place == 0, 0.0, 0.5 - place))
        return np.asarray(error / places_an_ulp * np.sign(residue))


@dataclass(frozen=True, slots=True, kw_only=True)
class TieTerms:
    """One rounding an element; same shape each. Undefined where `defined` is False: floats are NaN there."""

    #: bool: the value before the rounding is finite and not 0, and so is finite what it is made of.
    defined: NDArray[np.bool_]
    #: int64 d: 0 to `MOST_BITS`.
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
    sound = np.where(defined, before, 1.0)
    ulp = ulp_array(sound, fmt)
    along = np.where(defined, main, 0.0)
    sign = np.sign(np.where(along == 0, sound, along))
    away = np.sign(sound)
    bits = _bits(ulp, grid)
    residue = (sound - along) / ulp * sign
    error = (np.where(defined, after, 1.0) - sound) / ulp * away
    heard = (np.abs(sound - along) > noise * np.abs(sound)) | np.equal(odd, 1)
    law = tie_law_array(bits, np.where(heard, residue, 0.0), odd) * (sign * away)
    places = np.abs(along) / ulp
    undefined = np.where(defined, 0.0, np.nan)
    return TieTerms(
        defined=defined,
        bits_dropped=bits,
        residue=residue + undefined,
        error=error + undefined,
        law=law + undefined,
        halfway=defined & (places - np.floor(places) == 0.5),
    )


def _bits(ulp: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.int64]:
    """Powers of two from the grid up to the ulp; 0 where the grid is coarser, or infinite."""
    known = np.isfinite(grid)
    exponent = np.frexp(ulp)[1].astype(np.int64) - np.frexp(np.where(known, grid, 1.0))[1]
    return np.asarray(np.where(known, np.clip(exponent, 0, MOST_BITS), 0))
