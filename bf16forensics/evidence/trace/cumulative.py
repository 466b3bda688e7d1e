"""One token and feature along the keys: the running sum of P-bar V, its error, and the steps of the error.

Shapes: K keys of a walk, E features.
"""

import numpy as np
from numpy.typing import NDArray

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.accumulators import (
    ACCUMULATOR_NAMES,
    check_accumulator,
    meaning,
    running_sums,
    walk_recipe_of,
)
from bf16forensics.evidence.trace.results import CumulativeTrace, Jump
from bf16forensics.evidence.trace.running_sum import RunningSums
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import format_named
from bf16forensics.floats.ulp import ulp_array

__all__ = ["ACCUMULATOR_NAMES", "check_accumulator", "cumulative", "finite_sums", "walk_recipe_of"]

#: Jumps that a trace keeps, and those that are looked at for P-bar = 1.
_MOST_JUMPS = 1000
_TOP_JUMPS = 10


def cumulative(
    walk: RowWalk,
    feature: int,
    accumulator: str,
    o_hp: float,
    *,
    run: RowWalk | None = None,
) -> CumulativeTrace:
    """The running sum of one feature of a row under an accumulator.

    Args:
        walk: of the recipe that `walk_recipe_of` names for the accumulator.
        feature: column of V.
        accumulator: see `ACCUMULATOR_NAMES`.
        o_hp: high-precision O of the row and feature.
        run: walk of the run's own recipe, for its tile borders and its O; None: `walk` itself.

    Returns:
        The trace over the visible keys in the order of the walk.

    Raises:
        InputError: unknown accumulator, a feature out of range, a walk that is not the accumulator's, a row that sees
            no key, P-bar or V not finite or not of the 16 bits that a matrix unit takes, a sum that overflows.

    Reference: arXiv 2510.04212, equation 5 and figure 6, for "fp32-prefix".
    """
    name = check_accumulator(accumulator)
    run = walk if run is None else run
    sums = finite_sums(walk, feature, name)
    visible = walk.visible
    if not visible.any():
        raise InputError(f"recipe {walk.recipe}: the row sees no key; trace a row that does")
    keys, p_bar, v = walk.keys[visible], walk.p_operand[visible], walk.v[visible, feature]
    lp, hp = sums.lp[visible], sums.hp[visible]
    error = lp - hp
    is_one = walk.is_one[visible]
    tile_end = _ends(_run_tiles(walk, run)[visible])
    exists = _exists(walk, run, sums, tile_end)
    half_ulp = ulp_array(hp, sums.stored) / 2 if sums.rounds_once else None
    jumps = _jumps(error, keys, p_bar, v, is_one, exists)
    return CumulativeTrace(
        feature=feature,
        accumulator=name,
        meaning=meaning(walk, name),
        walk_recipe=walk.recipe,
        keys=keys,
        p_bar=p_bar,
        v=v,
        is_one=is_one,
        tile_end=tile_end,
        exists=exists,
        running_lp=lp,
        running_hp=hp,
        error=error,
        half_ulp=half_ulp,
        bound_exceeded=None if half_ulp is None else int((np.abs(error) > half_ulp).sum()),
        jumps=jumps,
        top_jumps_at_ones=sum(jump.is_one for jump in jumps[:_TOP_JUMPS]),
        top_jumps=min(len(jumps), _TOP_JUMPS),
        o_accumulator=_output(walk, sums.end),
        o_lp=float(run.o[feature]),
        o_hp=float(o_hp),
    )


def finite_sums(walk: RowWalk, feature: int, accumulator: str) -> RunningSums:
    """The running sums of a feature over all keys of the walk, or one line that says why there are none.

    Args:
        walk: of the accumulator's recipe.
        feature: column of V.
        accumulator: canonical name.

    Raises:
        InputError: as `cumulative`.
    """
    if not 0 <= feature < walk.v.shape[1]:
        raise InputError(f"feature {feature} is out of range; V has features 0 to {walk.v.shape[1] - 1}")
    for name, values in (("P-bar", walk.p_operand), ("V", walk.v[:, feature])):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise InputError(
                f"recipe {walk.recipe}: {name} of key {int(walk.keys[bad[0]])}, feature {feature} is not finite, so "
                "there is no running sum; look for overflow in q, k or v"
            )
    sums = running_sums(walk, feature, accumulator)
    bad = np.flatnonzero(~np.isfinite(sums.lp))
    if len(bad):
        raise InputError(
            f"accumulator {accumulator}: the running sum of feature {feature} overflows {sums.stored.name} at key "
            f"{int(walk.keys[bad[0]])}; choose a recipe with a wider format, or accumulator sm90"
        )
    return sums


def _ends(group: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The last key of each run of equal groups."""
    return np.diff(group, append=group[-1] + 1) != 0


def _run_tiles(walk: RowWalk, run: RowWalk) -> NDArray[np.int64]:
    """int64 [K]: the tile of each key of `walk` whose ends count: its own, or where it has one, the run's."""
    if walk is run or walk.tile[-1] != 0:
        return walk.tile
    of_key = np.full(int(max(walk.keys.max(), run.keys.max())) + 1, -1, np.int64)
    of_key[run.keys] = run.tile
    return of_key[walk.keys]


def _exists(walk: RowWalk, run: RowWalk, sums: RunningSums, tile_end: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The visible keys after which the computation that is modelled holds the sum."""
    if not sums.rounds_once:
        return _ends(sums.group[walk.visible])
    order = np.argsort(run.keys, kind="stable")
    if bool((np.diff(run.tile[order]) >= 0).all()) or walk.tile[-1] != 0 or walk is run:
        return tile_end
    # The run visits its tiles in another order than this walk, so that only the whole sum is common to both.
    last = np.zeros_like(tile_end)
    last[-1] = True
    return last


def _jumps(
    error: NDArray[np.float64],
    keys: NDArray[np.int64],
    p_bar: NDArray[np.float32],
    v: NDArray[np.float32],
    is_one: NDArray[np.bool_],
    exists: NDArray[np.bool_],
) -> tuple[Jump, ...]:
    """Steps of the error other than 0, largest first, equal ones in the order of visits."""
    steps = np.diff(error, prepend=0.0)
    ranked = np.argsort(-np.abs(steps), kind="stable")[:_MOST_JUMPS]
    return tuple(
        Jump(
            position=position,
            key=int(keys[position]),
            size=float(steps[position]),
            p_bar=float(p_bar[position]),
            v=float(v[position]),
            is_one=bool(is_one[position]),
            exists=bool(exists[position]),
        )
        for position in ranked.tolist()
        if steps[position] != 0.0
    )


def _output(walk: RowWalk, end: float) -> float:
    """O from the sum of a whole row by the recipe's roundings and division, each in FP32."""
    o_bar = np.array([end], np.float32)
    if walk.o_bar_format != "fp32":
        o_bar = round_to(o_bar, format_named(walk.o_bar_format))
    one, scale = np.float32(1.0), np.float32(walk.value_scale)
    row_sum = np.float32(walk.row_sum) if walk.row_sum else one
    if walk.division == "reciprocal":
        o = o_bar * (one / row_sum * scale)
    elif walk.division == "divide":
        o = o_bar / row_sum * scale
    else:
        o = o_bar * scale
    return float(round_to(o, format_named(walk.o_format))[0])
