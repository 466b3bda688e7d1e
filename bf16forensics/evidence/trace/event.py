"""One addition of a trace, as its operands: what `bits` explains."""

from dataclasses import dataclass

import numpy as np

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.cumulative import check_accumulator, finite_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """The addition with which a key enters the running sum; every number is exact."""

    #: Canonical name, and the position of the key in the sequence.
    accumulator: str
    key: int
    feature: int
    #: Operands of the key's product.
    p_bar: float
    v: float
    is_one: bool
    #: The sum before the addition, after any rescaling: an FP32 value, but for "exact", which has the nearest float64.
    before: float
    #: What is added: the product of the key; for "tile:N" the rounded product of its whole tile; for a matrix unit the
    #: exact products of its whole block, in order.
    addends: tuple[float, ...]
    #: Positions of the keys that the addends come from, in order; one for each addend of a matrix unit, all keys of
    #: the tile for "tile:N".
    keys: tuple[int, ...]
    #: What the accumulator holds after it, and the format that holds it.
    after: float
    stored: str


def event_at(walk: RowWalk, feature: int, accumulator: str, key: int) -> TraceEvent:
    """The addition with which a key's product enters the running sum of a feature.

    Args:
        walk: of the recipe that `walk_recipe_of` names for the accumulator.
        feature: column of V.
        accumulator: see `ACCUMULATOR_NAMES`.
        key: position in the sequence.

    Returns:
        The event. For "fp32-prefix", the one of the paper: the FP32 prefix before the key, its product, and the FP32
        sum of both rounded once to the stored format.

    Raises:
        InputError: the row does not see the key, or as `cumulative`.

    Reference: arXiv 2510.04212, section 3.3.2.
    """
    name = check_accumulator(accumulator)
    sums = finite_sums(walk, feature, name)
    found = np.flatnonzero((walk.keys == key) & walk.visible)
    if not len(found):
        seen = walk.keys[walk.visible]
        among = f"; it sees {len(seen)} keys between {seen.min()} and {seen.max()}" if len(seen) else ""
        raise InputError(f"the row does not see key {key}{among}")
    at = int(found[0])
    members = np.flatnonzero((sums.group == sums.group[at]) & walk.visible)
    if sums.addend is None:
        products = walk.p_operand[members].astype(np.float64) * walk.v[members, feature].astype(np.float64)
        addends = tuple(products.tolist())
    else:
        addends = (float(sums.addend[at]),)
    return TraceEvent(
        accumulator=name,
        key=key,
        feature=feature,
        p_bar=float(walk.p_operand[at]),
        v=float(walk.v[at, feature]),
        is_one=bool(walk.is_one[at]),
        before=float(sums.before[at]),
        addends=addends,
        keys=tuple(walk.keys[members].tolist()),
        after=float(sums.lp[members[-1]]),
        stored=sums.stored.name,
    )
