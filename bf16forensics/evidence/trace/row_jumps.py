"""Where the steps of the cumulative error lie in a whole row, over all its features.

Shapes: K keys of a walk, E features.
"""

import numpy as np

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.accumulators import MATRIX_UNITS
from bf16forensics.evidence.trace.cumulative import finite_sums
from bf16forensics.evidence.trace.results import RowJumps

#: Jumps that are looked at for P-bar = 1.
_TOP_JUMPS = 10


def row_jumps(walk: RowWalk, accumulator: str) -> RowJumps | None:
    """Ranks the steps of the cumulative errors of all features of a row together.

    A single feature has no more large steps than the row has keys at P-bar = 1; all features together show whether the
    large ones sit there.

    Args:
        walk: of the recipe that `walk_recipe_of` names for the accumulator.
        accumulator: canonical name.

    Returns:
        None for the matrix units, whose sums have no step at a key, and where the sum of a feature overflows.
    """
    if accumulator in MATRIX_UNITS:
        return None
    visible = walk.visible
    steps = np.empty((walk.v.shape[1], int(visible.sum())))
    for feature in range(len(steps)):
        try:
            sums = finite_sums(walk, feature, accumulator)
        except InputError:
            return None
        steps[feature] = np.abs(np.diff((sums.lp - sums.hp)[visible], prepend=0.0))
    sizes = steps.ravel()
    ranked = np.argsort(-sizes, kind="stable")[:_TOP_JUMPS]
    top = ranked[sizes[ranked] > 0.0]
    is_one = np.broadcast_to(walk.is_one[visible], steps.shape).ravel()
    total = float(sizes.sum())
    return RowJumps(
        top=len(top),
        top_at_ones=int(is_one[top].sum()),
        share_at_ones=float(sizes[is_one].sum()) / total if total else float("nan"),
        share_of_keys=float(walk.is_one[visible].mean()),
    )
