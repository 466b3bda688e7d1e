"""What every accumulator gives: the running sum of one feature along the keys of a row walk, with its reference.

Everything here has all K keys of the walk, invisible ones included: blocks and tiles are counted with them, and their
products are 0.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.floats.formats import FloatFormat, format_named


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSums:
    """One accumulator along the walk; arrays of K entries in the order of visits."""

    #: float64: what the accumulator holds if the row ended after the key, and its reference.
    lp: NDArray[np.float64]
    hp: NDArray[np.float64]
    #: Format that `lp` is stored in, and whether each value is one rounding of `hp` (or of the exact sum).
    stored: FloatFormat
    rounds_once: bool
    #: int64: keys with the same number end up in one value that the computation holds.
    group: NDArray[np.int64]
    #: float64: what the addition that ends the key's group starts from, and the single addend (None: the products).
    before: NDArray[np.float64]
    addend: NDArray[np.float64] | None
    #: Value of the whole walk before the recipe's own rounding of O-bar.
    end: float


def stored_format(walk: RowWalk) -> FloatFormat:
    """The format that a stored running sum has: O-bar's where the recipe rounds it, else the output's."""
    return format_named(walk.o_format if walk.o_bar_format == "fp32" else walk.o_bar_format)


def exact_products(walk: RowWalk, feature: int) -> NDArray[np.float64]:
    """float64 [K] P-bar * V of one feature; exact, because both are float32 numbers."""
    return walk.p_operand.astype(np.float64) * walk.v[:, feature].astype(np.float64)


def shifted(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The value before each position; 0 before the first."""
    return np.concatenate([[0.0], values[:-1]])
