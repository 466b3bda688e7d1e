"""Counting at the row maximum. Masked pairs never count.

Shapes: H heads, R rows, K keys.
"""

from dataclasses import dataclass

import torch

from bf16forensics.attention.exponential import exponential
from bf16forensics.attention.lp import LpRows
from bf16forensics.attention.scores import LpScores
from bf16forensics.recipe.model import Recipe

#: P-bar at or above this rounds to 1 in BF16: 1 - 2^-9 lies halfway between 1 - 2^-8 and 1, and 1 is even.
ROUNDS_TO_ONE = 1.0 - 2.0**-9
#: Gap in nats of a "near" key.
NEAR_NATS = 1e-3
#: Gap in nats that no P-bar rounding to 1 exceeds (the true limit is 0.00196; BF16 gaps and FP32 noise stay inside).
_CANDIDATE_NATS = 4e-3
#: Two float64 scores this close, relative to the maximum, count as the same: the order of a sum decides below it.
_FP64_TIE = 2.0**-44


@dataclass(frozen=True, slots=True, kw_only=True)
class LpOnes:
    """int64 [H, R] each; 0 in rows that see no key."""

    fp32_exact: torch.Tensor
    rounded: torch.Tensor
    near: torch.Tensor


def count_ones(scores: LpScores, rows: LpRows, recipe: Recipe) -> LpOnes:
    """Counts P-bar = 1 (FP32 and after rounding to BF16) and near-maxima from the recipe's own scores.

    P-bar is exp(S - final row maximum), before normalisation, whatever the recipe casts.

    Args:
        scores: [H, R, K] masked scores.
        rows: the recipe's forward pass over the block.
        recipe: its exponential and its rounding of S - m.
    """
    # A recipe that rescales on a threshold only leaves an older maximum behind.
    row_max = rows.row_max if recipe.anchored_at_maximum else scores.values.amax(-1)
    empty = row_max == -torch.inf
    anchor = row_max.masked_fill(empty, 0.0)
    candidates = (scores.values >= (anchor - _CANDIDATE_NATS / scores.unit)[..., None]).sum(-1)
    one = (~empty).long()
    exact, rounded, near = one.clone(), one.clone(), one.clone()
    several = candidates > 1
    if several.any():
        gaps = scores.values[several]
        p_bar = exponential(gaps, anchor[several], scores.unit, recipe)
        exact[several] = (p_bar == 1.0).sum(-1)
        rounded[several] = (p_bar >= ROUNDS_TO_ONE).sum(-1)
        distance = (anchor[several][..., None] - gaps) * scores.unit
        near[several] = (distance <= NEAR_NATS).sum(-1)
    return LpOnes(fp32_exact=exact, rounded=rounded, near=near)


def count_shared_maximum(scores: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """Keys whose high-precision score is the row maximum, int64 [H, R].

    FP32 scores must be equal; float64 scores may differ by 2^-44 of the maximum, which the order of a sum can do.

    Args:
        scores: [H, R, K] masked scores, FP32 or float64.
        row_max: [H, R] float64 maximum; -inf in rows that see no key.
    """
    slack = row_max.abs() * _FP64_TIE if scores.dtype == torch.float64 else torch.zeros_like(row_max)
    limit = (row_max - slack).nan_to_num(neginf=torch.inf)
    return (scores >= limit.to(scores.dtype)[..., None]).sum(-1)
