"""Holm's step-down correction: family-wise p values for tests made on several heads at once."""

import math
from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Adjusts p values for their number, whatever their dependence.

    NaN entries are not tests: they stay NaN and do not count in the family, so that one undefined head neither helps
    nor hurts the others. An empty sequence gives an empty tuple.

    Args:
        p_values: two-sided p values in [0, 1] or NaN.

    Returns:
        Adjusted p values in the same order, each at least the raw one and at most 1.

    Reference:
        S. Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    order = sorted((index for index, p in enumerate(p_values) if not math.isnan(p)), key=lambda index: p_values[index])
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for position, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - position) * p_values[index]))
        adjusted[index] = highest
    return tuple(adjusted)
