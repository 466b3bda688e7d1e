"""Counting at the row maximum. Masked pairs never count.

Shapes: H heads, R rows, K keys.
"""

from dataclasses import dataclass

import torch

from bf16forensics.attention.exponential import exponential
from bf16forensics.attention.hp import HpRows
from bf16forensics.attention.lp import LpRows
from bf16forensics.attention.result import RowMaxima
from bf16forensics.attention.scores import HpScores, LpScores
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
    """int64 [H, R] each unless said otherwise; 0 in rows that see no key."""

    fp32_exact: torch.Tensor
    rounded: torch.Tensor
    near: torch.Tensor
    #: bool [n, K]: which keys of the n rows with `rounded` of 2 or more have it, rows in order; None for no such row.
    marks: torch.Tensor | None


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
    marks = None
    if several.any():
        gaps = scores.values[several]
        p_bar = exponential(gaps, anchor[several], scores.unit, recipe)
        exact[several] = (p_bar == 1.0).sum(-1)
        ones = p_bar >= ROUNDS_TO_ONE
        counts = ones.sum(-1)
        rounded[several] = counts
        if (counts > 1).any():
            marks = ones[counts > 1]
        distance = (anchor[several][..., None] - gaps) * scores.unit
        near[several] = (distance <= NEAR_NATS).sum(-1)
    return LpOnes(fp32_exact=exact, rounded=rounded, near=near, marks=marks)


def marked_keys(scores: LpScores, ones: LpOnes, head: int, row: int) -> torch.Tensor:
    """bool [K]: the keys of one row that `LpOnes.rounded` counts.

    Args:
        scores: [H, R, K] masked scores.
        ones: counted from these scores.
        head: index on the first axis.
        row: index on the second.
    """
    repeated = ones.rounded > 1
    if ones.marks is not None and repeated[head, row]:
        before = repeated.flatten()[: head * repeated.shape[1] + row].sum()
        return ones.marks[before]
    marked = torch.zeros(scores.values.shape[-1], dtype=torch.bool)
    # A single one is the maximum itself.
    marked[scores.values[head, row].argmax()] = bool(ones.rounded[head, row] > 0)
    return marked


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


def row_maxima(ones: LpOnes, hp_s: HpScores, hp: HpRows, lp_minus_top: torch.Tensor) -> RowMaxima:
    """The counts of a block of rows beside what high precision says of them.

    Args:
        ones: counted from the recipe's own scores.
        hp_s: scores in high precision.
        hp: the block in high precision.
        lp_minus_top: [H, R, E] float64 O_lp minus the value of the row's top key.
    """
    heads, rows, num_keys = hp_s.values.shape
    seen = hp.row_max > -torch.inf
    if hp_s.visible is None:
        visible = torch.full((heads, rows), num_keys)
        first = torch.zeros((heads, rows), dtype=torch.long)
    else:
        visible = hp_s.visible.sum(-1).expand(heads, rows).contiguous()
        first = hp_s.visible.to(torch.uint8).argmax(-1).expand(heads, rows)
    p_first = torch.gather(hp.p_others, -1, first[..., None])[..., 0].double()
    largest = torch.maximum(hp.row_max.abs(), _lowest(hp_s).abs())
    return RowMaxima(
        ones_fp32=ones.fp32_exact,
        ones_rounded=ones.rounded,
        near=ones.near,
        shared=count_shared_maximum(hp_s.values, hp.row_max),
        visible=visible,
        sink=torch.where(first == hp.top, hp.p_top, p_first) * seen,
        score_abs_max=largest.masked_fill(~seen, 0.0),
        swamped=((lp_minus_top == 0).double().mean(-1) > 0.9) & seen,
    )


def _lowest(scores: HpScores) -> torch.Tensor:
    """float64 [H, R]: smallest visible score of each row; inf in rows that see no key."""
    until = scores.visible_until
    lowest = scores.values.new_full(scores.values.shape[:-1], torch.inf)
    if until > 0:
        lowest = scores.values[..., :until].amin(-1)
    if scores.visible is not None and until < scores.values.shape[-1]:
        rest = torch.where(scores.visible[..., until:], scores.values[..., until:], torch.inf)
        lowest = torch.minimum(lowest, rest.amin(-1))
    return lowest.double()
