"""Scores of a block of rows, in the recipe's arithmetic or in high precision.

Shapes: H heads, R rows of the block, K keys of the block, D head size.
"""

import math
from dataclasses import dataclass

import torch

from bf16forensics.emulate.rounding import round_to
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.model import Recipe

LOG2_E = math.log2(math.e)


#: Exponents below this give less than the smallest normal number of the dtype.
_EXPONENT_FLOOR = {torch.float32: -87.0, torch.float64: -708.0}


def exp_(values: torch.Tensor) -> torch.Tensor:
    """exp of a fresh tensor, in place; results below twice the smallest normal number are 0, NaN stays NaN.

    Vector libraries leave their fast path when a result underflows, and in a saturated head most results do.
    """
    floor = _EXPONENT_FLOOR[values.dtype]
    return torch.threshold_(values.clamp_(min=floor).exp_(), 2.0 * math.exp(floor), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows and keys of one block, [start, end)."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    #: N and M of the whole call.
    num_queries: int
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LpScores:
    """Scores as the recipe holds them when the maximum is subtracted."""

    #: [H, R, K] FP32; -inf where the pair is not visible.
    values: torch.Tensor
    #: Factor that turns a difference of `values` into nats; 1.0 when the scale has been applied already.
    unit: float


def product(a: torch.Tensor, b: torch.Tensor, arithmetic: str) -> torch.Tensor:
    """Batched product under an arithmetic model, FP32 in and out.

    Args:
        a: [H, R, J] FP32.
        b: [H, J, K] FP32.
        arithmetic: "fp32" accumulates in FP32; "exact" accumulates in float64 (the products of BF16 values are exact
            there) and rounds once to FP32.
    """
    if arithmetic == "exact":
        return torch.matmul(a.double(), b.double()).float()
    return torch.matmul(a, b)


def folds_scale(recipe: Recipe, geometry: Geometry) -> bool:
    """Whether the scale stays inside the exponential, so that scores are stored unscaled."""
    plain = geometry.softcap is None and geometry.bias is None
    return recipe.scale_placement == "exponent" and recipe.scores == "fp32" and plain


def lp_scores(
    q: torch.Tensor, k: torch.Tensor, geometry: Geometry, recipe: Recipe, block: Block, bias: torch.Tensor | None
) -> LpScores:
    """Scores of a block by the recipe, rounded wherever the recipe stores them.

    Args:
        q: [H, R, D] FP32 queries of the block.
        k: [H, K, D] FP32 keys of the block.
        geometry: masks, scale and modifiers.
        recipe: rounding points.
        block: where the block lies.
        bias: [1 or H, R, K] additive bias or None.

    Returns:
        Masked scores. NaN in an operand gives NaN scores.
    """
    scale = geometry.scale
    if recipe.scale_placement == "operands":
        root = math.sqrt(scale)
        scores = round_to(product(q * root, (k * root).transpose(-1, -2), recipe.arithmetic), recipe.scores)
    else:
        scores = round_to(product(q, k.transpose(-1, -2), recipe.arithmetic), recipe.scores)
        if not folds_scale(recipe, geometry):
            scores = round_to(scores * scale, recipe.scores)
    if geometry.softcap is not None:
        scores = round_to(geometry.softcap * torch.tanh(scores / geometry.softcap), recipe.scores)
    if bias is not None:
        scores = round_to(scores + bias.float(), recipe.scores)
    geometry.hide(scores, block.rows, block.num_queries, block.keys[0], block.num_keys)
    return LpScores(values=scores, unit=scale if folds_scale(recipe, geometry) else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HpScores:
    """Scores in high precision."""

    #: [H, R, K] FP32 or float64, scaled, capped and biased; -inf where the pair is not visible.
    values: torch.Tensor
    #: [H, R, K] derivative of the score by the scaled product (soft-cap); None when it is 1 everywhere.
    slope: torch.Tensor | None
    #: [H or 1, R, K] bool visibility, None when all visible.
    visible: torch.Tensor | None
    #: Column before which every pair is visible; K when all are.
    visible_until: int


def hp_scores(
    q: torch.Tensor, k: torch.Tensor, geometry: Geometry, block: Block, bias: torch.Tensor | None
) -> HpScores:
    """Scores of a block without any rounding beyond the dtype of q and k (FP32 or float64).

    Args:
        q: [H, R, D].
        k: [H, K, D].
        geometry: masks, scale and modifiers.
        block: where the block lies.
        bias: [1 or H, R, K] additive bias or None.
    """
    scores = torch.matmul(q * geometry.scale, k.transpose(-1, -2))
    slope = None
    if geometry.softcap is not None:
        capped = torch.tanh(scores / geometry.softcap)
        slope = 1.0 - capped * capped
        scores = geometry.softcap * capped
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    until = geometry.hide(scores, block.rows, block.num_queries, block.keys[0], block.num_keys)
    visible = geometry.visible(block.rows, block.keys, block.num_queries, block.num_keys)
    return HpScores(values=scores, slope=slope, visible=visible, visible_until=until)
