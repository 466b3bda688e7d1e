"""Accumulators that add one product after the other, or one tile after the other.

Shapes: K keys of the walk, T tiles.
"""

import numpy as np
from numpy.typing import NDArray

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.exact_prefix import exact_prefixes, round_float, rounded_sums
from bf16forensics.evidence.trace.running_sum import RunningSums, exact_products, shifted, stored_format
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import FP32


def _require_one_tile(walk: RowWalk, accumulator: str) -> None:
    if walk.tile[-1] != 0:
        raise InputError(
            f"accumulator {accumulator} follows a walk of one tile; recipe {walk.recipe} has {int(walk.tile[-1]) + 1}"
        )


def fp32_prefix(walk: RowWalk, feature: int) -> RunningSums:
    """The FP32 sum of a walk of one tile, each prefix of it rounded once.

    Raises:
        InputError: the walk has several tiles.

    Reference: arXiv 2510.04212, equation 5.
    """
    _require_one_tile(walk, "fp32-prefix")
    products = _fp32_products(walk, feature)
    prefix = _fp32_sums(products)
    fmt = stored_format(walk)
    return RunningSums(
        lp=round_to(prefix, fmt),
        hp=prefix,
        stored=fmt,
        rounds_once=True,
        group=np.arange(len(prefix)),
        before=shifted(prefix),
        addend=products.astype(np.float64),
        end=float(prefix[-1]),
    )


def _fp32_products(walk: RowWalk, feature: int) -> NDArray[np.float32]:
    with np.errstate(over="ignore", under="ignore"):
        return np.multiply(walk.p_operand, walk.v[:, feature], dtype=np.float32)


def _fp32_sums(products: NDArray[np.float32]) -> NDArray[np.float64]:
    """Running sums along the last axis, one FP32 addition after the other."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add.accumulate(products, axis=-1).astype(np.float64)


def each_addition(walk: RowWalk, feature: int) -> RunningSums:
    """The sum of a walk of one tile, stored in the format of O-bar after each addition.

    Raises:
        InputError: the walk has several tiles.
    """
    _require_one_tile(walk, "bf16-each-add")
    products = exact_products(walk, feature)
    fmt = stored_format(walk)
    lp = rounded_sums(products, fmt)
    return RunningSums(
        lp=lp,
        hp=exact_prefixes(products, walk.tile, walk.tile_alpha).nearest,
        stored=fmt,
        rounds_once=False,
        group=np.arange(len(lp)),
        before=shifted(lp),
        addend=products,
        end=float(lp[-1]),
    )


def exact_sum(walk: RowWalk, feature: int) -> RunningSums:
    """The sum without rounding (see `exact_prefixes`), each prefix of it rounded once."""
    products = exact_products(walk, feature)
    prefix = exact_prefixes(products, walk.tile, walk.tile_alpha)
    fmt = stored_format(walk)
    return RunningSums(
        lp=round_to(prefix.odd, fmt),
        hp=prefix.nearest,
        stored=fmt,
        rounds_once=True,
        group=np.arange(len(products)),
        before=shifted(prefix.nearest) * _alpha_before(walk),
        addend=products,
        end=float(round_to(prefix.odd[-1:], FP32)[0]),
    )


def _alpha_before(walk: RowWalk) -> NDArray[np.float64]:
    """The factor that the sum is multiplied by right before each key: its tile's at the first key, else 1."""
    starts = np.diff(walk.tile, prepend=-1) != 0
    starts[0] = False
    return np.where(starts, walk.tile_alpha[walk.tile].astype(np.float64), 1.0)


def by_tile(walk: RowWalk, feature: int) -> RunningSums:
    """Each tile's product, each rescaling and each accumulation rounds, in FP32 and then to the stored format.

    Reference: why-low-precision-training-fails@02f0ab6 attention.py; `Recipe.o_bar_at` "tile".
    """
    fmt = stored_format(walk)
    first = np.flatnonzero(np.diff(walk.tile, prepend=-1))
    column = np.arange(len(walk.tile)) - first[walk.tile]
    rows = np.zeros((len(first), int(column.max()) + 1), np.float32)
    rows[walk.tile, column] = _fp32_products(walk, feature)
    prefixes = round_to(_fp32_sums(rows), fmt)
    whole = prefixes[:, -1]
    base = np.zeros(len(whole))
    stored = 0.0
    # Products and sums of two FP32 numbers in float64, then FP32: as in FP32 alone (53 >= 2 * 24 + 2 bits).
    with np.errstate(over="ignore"):
        for index, product in enumerate(whole.tolist()):
            if index:
                stored = round_float(float(np.float32(stored * float(walk.tile_alpha[index]))), fmt)
                base[index] = stored
            stored = float(np.float32(stored + product))
            if not np.isfinite(stored):
                break
            stored = round_float(stored, fmt)
        summed = (base[walk.tile] + prefixes[walk.tile, column]).astype(np.float32)
    lp = round_to(summed.astype(np.float64), fmt)
    return RunningSums(
        lp=lp,
        hp=exact_prefixes(exact_products(walk, feature), walk.tile, walk.tile_alpha).nearest,
        stored=fmt,
        rounds_once=False,
        group=walk.tile,
        before=base[walk.tile],
        addend=whole[walk.tile],
        end=float(lp[-1]),
    )
