"""The key tiles of a block of rows, one after the other: anchors, factors, P-bar and its cast, row sums.

These are the steps of a recipe's softmax up to the operand of the product with V. The forward pass multiplies them;
the walk of one row writes them down.

Shapes: H heads, R rows, K keys of the block, T keys of a tile.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bf16forensics.attention.exponential import exponential
from bf16forensics.attention.fexp import fused_multiply_add, lanes_of, sum_rows
from bf16forensics.attention.scores import LOG2_E, LpScores
from bf16forensics.attention.tiles import TilePlan
from bf16forensics.emulate.rounding import round_to
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TileStep:
    """What a key tile adds to a block of rows, and what stands after it. FP32."""

    #: [start, end) of the tile's keys, relative to the block's first key.
    start: int
    end: int
    #: [H, R] factor of everything summed before the tile; 0 where nothing was.
    alpha: torch.Tensor
    #: [H, R] anchor of P-bar and maximum of the row after the tile, in the units of `LpScores.values`; -inf where
    #: the row has seen no key.
    anchor: torch.Tensor
    row_max: torch.Tensor
    #: [H, R, T] P-bar before its cast; P where the recipe casts after the division.
    p_bar: torch.Tensor
    #: [H, R, T] the operand of the product with V.
    operand: torch.Tensor
    #: [H, R] row sum after the tile, as stored.
    row_sum: torch.Tensor


def tile_steps(scores: LpScores, plan: TilePlan, recipe: Recipe) -> Iterator[TileStep]:
    """The steps of a block of rows, in the order of visits.

    A recipe that casts P after the division takes one step over all keys, whatever its tiles.

    Args:
        scores: [H, R, K] masked scores of the block.
        plan: the key tiles in the order of visits.
        recipe: rounding points.

    Yields:
        One step a tile. NaN scores give NaN rows.
    """
    if recipe.p_bar_cast == "after":
        yield _whole_row(scores, plan, recipe)
        return
    heads, rows, _ = scores.values.shape
    anchor = scores.values.new_full((heads, rows), -torch.inf)
    row_max = anchor
    row_sum = scores.values.new_zeros((heads, rows))
    offset = log2_offset(recipe)
    for start, end in plan.tiles:
        tile = scores.values[..., start:end]
        tile_max = tile.amax(-1)
        anchor, alpha = _rescaling(anchor, torch.maximum(anchor, tile_max), scores.unit, recipe)
        row_max = anchor if recipe.anchored_at_maximum else torch.maximum(row_max, tile_max)
        cubic = plan.cubic_of(start, end, tile.device)
        p_bar = exponential(tile, finite_anchor(anchor), scores.unit, recipe, log2_offset=offset, cubic=cubic)
        tile_sum = sum_rows(round_to(p_bar, recipe.row_sum_input), recipe.row_sum_order)
        row_sum = _longer_sum(alpha, row_sum, tile_sum, recipe)
        yield TileStep(
            start=start,
            end=end,
            alpha=alpha,
            anchor=anchor,
            row_max=row_max,
            p_bar=p_bar,
            operand=round_to(p_bar, recipe.p_bar),
            row_sum=row_sum,
        )


def _whole_row(scores: LpScores, plan: TilePlan, recipe: Recipe) -> TileStep:
    """The whole row at once: P = P-bar / l is cast."""
    row_max = scores.values.amax(-1)
    anchor, offset = finite_anchor(row_max), log2_offset(recipe)
    cubic = plan.cubic_of(0, scores.values.shape[-1], row_max.device)
    p_bar = exponential(scores.values, anchor, scores.unit, recipe, log2_offset=offset, cubic=cubic)
    row_sum = round_to(sum_rows(round_to(p_bar, recipe.row_sum_input), recipe.row_sum_order), recipe.row_sum)
    p = normalised(scores, row_max, row_sum, p_bar, recipe)
    return TileStep(
        start=0,
        end=scores.values.shape[-1],
        alpha=torch.zeros_like(row_sum),
        anchor=row_max,
        row_max=row_max,
        p_bar=p,
        operand=round_to(p, recipe.p_bar),
        row_sum=row_sum,
    )


def finite_anchor(row_max: torch.Tensor) -> torch.Tensor:
    """The anchor to subtract: 0 where the row has seen no key, so that exp(-inf - anchor) is 0 and not NaN."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def log2_offset(recipe: Recipe) -> float:
    """What the factor of P-bar adds to exponents of base 2."""
    return math.log2(float(recipe.p_scale))


def divide(o_bar: torch.Tensor, row_sum: torch.Tensor, recipe: Recipe, value_scale: float = 1.0) -> torch.Tensor:
    """O-bar / l times the descale factor of v, as the recipe divides; a row sum of 0 counts as 1."""
    safe = row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
    if recipe.division == "reciprocal":
        return o_bar * (1.0 / safe if value_scale == 1.0 else 1.0 / safe * value_scale)
    return o_bar / safe if value_scale == 1.0 else o_bar / safe * value_scale


def normalised(
    scores: LpScores, row_max: torch.Tensor, row_sum: torch.Tensor, p_bar: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """P = P-bar / l in FP32; 0 in rows that see no key.

    Where nothing is rounded below FP32 on the way from the scores to P, a framework calls its fused softmax, whose
    exponential and sum differ from the separate operations in the last bit: the same one is called here.
    """
    unrounded = (recipe.shifted, recipe.row_sum_input, recipe.row_sum) == ("fp32", "fp32", "fp32")
    plain = recipe.exponential == "exp" and recipe.division == "divide" and scores.unit == 1.0
    if not (unrounded and plain and recipe.p_bar_cast == "after"):
        return divide(p_bar, row_sum, recipe)
    return torch.softmax(scores.values, -1).masked_fill_((row_max == -torch.inf)[..., None], 0.0)


def _rescaling(
    anchor: torch.Tensor, new_max: torch.Tensor, unit: float, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """The anchor after a tile and the factor of everything summed before it; both [H, R]."""
    finite = finite_anchor(new_max)
    alpha = exponential(anchor[..., None], finite, unit, recipe)[..., 0]
    if recipe.rescale_threshold == "0":
        return new_max, alpha
    # Exponents of base 2: how far the old anchor lags.
    lag = (anchor - finite) * (unit * LOG2_E)
    kept = lag >= -float(recipe.rescale_threshold)
    if recipe.exponential == "exp2-cubic" and recipe.shifted == "fp32":
        alpha = torch.exp2(lag)
    return torch.where(kept, anchor, new_max), alpha.masked_fill(kept, 1.0)


def _longer_sum(alpha: torch.Tensor, before: torch.Tensor, tile_sum: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The running row sum after a tile, as stored."""
    if lanes_of(recipe.row_sum_order) is not None:
        return round_to(fused_multiply_add(alpha, before, tile_sum), recipe.row_sum)
    return round_to(alpha * before + tile_sum, recipe.row_sum)
