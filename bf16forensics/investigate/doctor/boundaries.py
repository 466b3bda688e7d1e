"""Values at every boundary of a format, and what they round to, by construction and not by a rounding.

Codes of one sign are consecutive integers over consecutive values. So between a code and the next, the place of a value
(on the code, below, on or above the middle) and the parity of the code decide every rounding mode.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16forensics.floats.arrays import array_from_codes
from bf16forensics.floats.formats import FP32, FloatFormat

#: Random bits of stochastic rounding in these tests.
NUM_RANDOM_BITS = 16
_SEED = 20240607


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Inputs to a rounding, [n] each, and what decides their results."""

    #: float32 or float64; six values between a code and the next, both signs, then special values.
    values: NDArray[np.floating]
    #: Code of the largest value of the format that is not above |value|; beyond the range the largest finite code.
    low: NDArray[np.int64]
    #: Distance from that value in steps, float64 in [0, 1): exact. Infinite for values at the next step or beyond.
    rest: NDArray[np.float64]
    #: uint16 random bits for stochastic rounding.
    random: NDArray[np.uint16]
    fmt: FloatFormat

    def expected(self, mode: str, overflow: str | None = None) -> NDArray[np.float64]:
        """What every value rounds to.

        Args:
            mode: "rne", "rz", "rna" or "stochastic" (with `random`).
            overflow: "nonfinite" or "saturate"; None for the format's own.

        Returns:
            [n] float64; NaN where the value is NaN or where overflow gives it.
        """
        if mode == "rne":
            is_up = (self.rest > 0.5) | ((self.rest == 0.5) & (self.low % 2 == 1))
        elif mode == "rna":
            is_up = self.rest >= 0.5
        elif mode == "rz":
            is_up = np.zeros(len(self.rest), dtype=bool)
        else:
            is_up = self.random < np.ldexp(self.rest, NUM_RANDOM_BITS)
        code = self.low + is_up
        beyond = self.fmt.value_beyond(overflow)
        result = _magnitudes(self.fmt, code.clip(max=self.fmt.max_finite_code))
        result = np.where(code > self.fmt.max_finite_code, beyond, result)
        result = np.where(np.isinf(self.values), beyond, result)
        return np.where(np.isnan(self.values), np.nan, np.copysign(result, self.values))


def boundaries(fmt: FloatFormat, wide: FloatFormat) -> Boundaries:
    """Builds the values between all neighbours of a format; of FP32, those above 40 codes of every binade.

    Args:
        fmt: the format to round to, narrower than `wide`.
        wide: FP32 or FP64, in which the values are.
    """
    codes = _codes(fmt)
    low = _magnitudes(fmt, codes)
    # The value one step beyond the largest finite one does not exist in the format, and is exact in FP64.
    step = np.ldexp(1.0, np.maximum(codes >> fmt.fraction_bits, 1) - fmt.bias - fmt.fraction_bits)
    dtype = np.float32 if wide is FP32 else np.float64
    middle = (low + 0.5 * step).astype(dtype)
    high = low + step
    zero, infinity = dtype(0.0), dtype(np.inf)
    with np.errstate(over="ignore"):
        is_beyond_wide = ~np.isfinite(high.astype(dtype))
        below_high = np.nextafter(high.astype(dtype), zero)
    columns = (
        low.astype(dtype),
        np.nextafter(low.astype(dtype), infinity),
        np.nextafter(middle, zero),
        middle,
        np.nextafter(middle, infinity),
        # The largest number of the wide format lies below an infinite `high`.
        np.where(is_beyond_wide, np.finfo(dtype).max, below_high),
    )
    magnitudes = np.stack(columns, axis=1)
    rest = (magnitudes.astype(np.float64) - low[:, None]) / step[:, None]
    special = np.array([np.inf, np.finfo(dtype).max], dtype=dtype)
    special = special[special.astype(np.float64) >= high[-1]]
    values = np.concatenate([magnitudes.reshape(-1), special])
    values = np.concatenate([values, -values, np.array([np.nan], dtype=dtype)])
    places = np.concatenate([rest.reshape(-1), np.full(len(special), np.inf)])
    lows = np.concatenate([np.repeat(codes, len(columns)), np.full(len(special), fmt.max_finite_code)])
    random = np.random.default_rng(_SEED).integers(0, 1 << NUM_RANDOM_BITS, size=len(values), dtype=np.uint16)
    return Boundaries(
        values=values,
        low=np.concatenate([lows, lows, [0]]),
        rest=np.concatenate([places, places, [0.0]]),
        random=random,
        fmt=fmt,
    )


def differing(found: NDArray[np.floating], expected: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell where results differ in their bits, signs of zero included; a NaN of any payload equals another.

    Args:
        found: [n], float32 or float64.
        expected: [n], float64.
    """
    wide = found.astype(np.float64)
    both_nan = np.isnan(wide) & np.isnan(expected)
    return (wide.view(np.uint64) != expected.view(np.uint64)) & ~both_nan


def _codes(fmt: FloatFormat) -> NDArray[np.int64]:
    """Codes of one sign whose upper neighbourhood is tried, ending with the largest finite one."""
    if fmt.bits <= 16:
        return np.arange(fmt.max_finite_code + 1, dtype=np.int64)
    # In every binade the ends and the middle, of the whole fraction and of its lower half: where carries run.
    binades = np.arange(1 << fmt.exponent_bits, dtype=np.int64) << fmt.fraction_bits
    tops = np.array([0, 1, 2, 0x3F, 0x40, 0x55, 0x7E, 0x7F], dtype=np.int64) << (fmt.fraction_bits - 7)
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=np.int64)
    codes = (binades[:, None, None] + tops[:, None] + lows).reshape(-1)
    return codes[codes <= fmt.max_finite_code]


def _magnitudes(fmt: FloatFormat, codes: NDArray[np.int64]) -> NDArray[np.float64]:
    width = np.dtype(f"uint{fmt.bits}")
    return array_from_codes(codes.astype(width), fmt)
