"""The order in which heads are looked at."""

import math
from collections.abc import Sequence

from bf16forensics.evidence.results import HeadEvidence


def rank(heads: Sequence[HeadEvidence]) -> tuple[HeadEvidence, ...]:
    """Orders heads from the most to the least suspicious.

    First by rho of the defect part, then by its bias. Heads without a gradient of W_Q follow, by |clustered t| of the
    delta defect, then by rows with repeated maxima. Heads whose rho is not finite come last, in that second order. A
    ratio to a mean gradient never ranks anything: it explodes where the gradient vanishes. Ties go by layer and head.
    """
    return tuple(sorted(heads, key=_key))


def _key(head: HeadEvidence) -> tuple[float, ...]:
    group, rho, bias = 1, 0.0, 0.0
    if head.dw_q is not None:
        defect = head.dw_q.defect
        if math.isfinite(defect.rho):
            group, rho = 0, defect.rho
            bias = defect.bias if math.isfinite(defect.bias) else -math.inf
        else:
            group = 2
    t = math.nan if head.delta_defect is None else abs(head.delta_defect.clustered.t)
    # |t| is infinite where every sequence has the same sum: the largest, not the least defined.
    t = -1.0 if math.isnan(t) else t
    return (group, -rho, -bias, -t, -(head.counts.rows_repeated_max or 0), head.layer, head.head)
