"""Running sums of products without rounding, and sums that round once an addition.

Products of two float32 numbers have at most 48 significant bits and exponents above -300, so that float64 holds them.
Their sums are taken in integers on the grid of the lowest bit, which Python has in any length: nothing is lost before
the one rounding to float64 at the end.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16forensics.floats.formats import FloatFormat

_FLOAT64_BITS = 53
#: Bits of a sum that are kept beside a sticky one: enough for a correct rounding to float64.
_KEPT_BITS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Running sums, float64 [K] each."""

    #: Nearest float64 to the exact sum.
    nearest: NDArray[np.float64]
    #: The exact sum truncated to 53 bits, the last one set where something was cut off. Rounding it to a format of at
    #: most 51 bits gives what rounding the exact sum once gives.
    odd: NDArray[np.float64]


def exact_prefixes(products: NDArray[np.float64], tile: NDArray[np.int64], tile_alpha: NDArray[np.float32]) -> Prefixes:
    """Running sums of products where everything summed so far is multiplied by a factor before each tile.

    Exact up to the first factor other than 1; each such factor costs one rounding of the sum to float64 before it and
    one after it, so that the relative error stays below 2^-52 a rescaling.

    Args:
        products: [K] finite products of float32 numbers, each exact in float64.
        tile: [K] index of each product's tile, never falling.
        tile_alpha: [T] factor of everything before tile t; the first has nothing to multiply.
    """
    first = np.flatnonzero(np.diff(tile, prepend=-1))
    starts = [0, *(i for i in first.tolist() if i > 0 and tile_alpha[tile[i]] != 1.0)]
    nearest, odd = np.empty_like(products), np.empty_like(products)
    base = 0.0
    for start, end in zip(starts, [*starts[1:], len(products)], strict=True):
        if start > 0:
            # Tiles skipped by `starts` have a factor of 1.
            base = float(nearest[start - 1]) * float(tile_alpha[tile[start]])
        nearest[start:end], odd[start:end] = _sums(base, products[start:end])
    return Prefixes(nearest=nearest, odd=odd)


def _sums(base: float, products: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    fractions, exponents = np.frexp(np.concatenate([[base], products]))
    whole = np.ldexp(fractions, _FLOAT64_BITS).astype(np.int64)
    used = whole != 0
    lowest = int(exponents[used].min()) if used.any() else 0
    shifts = np.where(used, exponents - lowest, 0)
    total = 0
    nearest: list[float] = []
    odd: list[float] = []
    for index, (value, shift) in enumerate(zip(whole.tolist(), shifts.tolist(), strict=True)):
        total += value << shift
        if index == 0:
            continue
        near, cut = _to_float64(total, lowest - _FLOAT64_BITS)
        nearest.append(near)
        odd.append(cut)
    return nearest, odd


def _to_float64(total: int, exponent: int) -> tuple[float, float]:
    """total * 2^exponent as the nearest float64, and truncated with a sticky last bit."""
    magnitude, sign = abs(total), -1.0 if total < 0 else 1.0
    magnitude, exponent = _shortened(magnitude, exponent, _KEPT_BITS + 1)
    nearest = math.ldexp(sign * float(magnitude), exponent)
    magnitude, exponent = _shortened(magnitude, exponent, _FLOAT64_BITS)
    return nearest, math.ldexp(sign * float(magnitude), exponent)


def _shortened(magnitude: int, exponent: int, bits: int) -> tuple[int, int]:
    excess = magnitude.bit_length() - bits
    if excess <= 0:
        return magnitude, exponent
    kept = magnitude >> excess
    if kept << excess != magnitude:
        kept |= 1
    return kept, exponent + excess


def round_float(value: float, fmt: FloatFormat) -> float:
    """A finite float64 rounded once to a format, to nearest, ties to even.

    `floats.scalar.round_to` for a loop over the keys of a row, without fractions.
    """
    if abs(value) < 2.0 * fmt.max_finite:
        _, exponent = math.frexp(value)
        step = max(exponent - 1, fmt.exponent_min) - fmt.fraction_bits
        rounded = math.ldexp(round(math.ldexp(value, -step)), step)
        if abs(rounded) <= fmt.max_finite:
            return math.copysign(rounded, value)
    return math.copysign(fmt.value_beyond(), value)


def rounded_sums(products: NDArray[np.float64], fmt: FloatFormat) -> NDArray[np.float64]:
    """A running sum stored in a format after each addition.

    Each addition is one rounding of the exact sum of what is stored and the next product.

    Args:
        products: [K] finite products of float32 numbers, each exact in float64.
        fmt: a format of at most 51 significant bits.

    Returns:
        float64 [K] values of `fmt`; infinite from the first overflow on.
    """
    running = 0.0
    stored: list[float] = []
    for product in products.tolist():
        if math.isfinite(running):
            running = round_float(_odd_sum(running, product), fmt)
        stored.append(running)
    return np.array(stored, dtype=np.float64)


def _odd_sum(a: float, b: float) -> float:
    """a + b truncated to 53 bits, or rounded the other way, so that the last bit is set where the sum is inexact.

    The error of the float64 sum is exact by the two-sum of Knuth; where there is one and the last bit is not set, the
    neighbour on the error's side has it set.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    if error == 0.0 or int(math.ldexp(math.frexp(total)[0], _FLOAT64_BITS)) % 2:
        return total
    return math.nextafter(total, math.copysign(math.inf, error))
