"""Scores of a block of rows, in the recipe's arithmetic or in high precision.

Shapes: H heads, R rows of the block, K keys of the block, D head size.
"""

import math
from dataclasses import dataclass

import torch

from bf16forensics.emulate.rounding import round_to
from bf16forensics.floats.formats import format_named
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


def round_visible(values: torch.Tensor, fmt_name: str) -> torch.Tensor:
    """`round_to` for values in which -inf stands for an invisible pair: it stays, where FP8 formats would saturate."""
    rounded = round_to(values, fmt_name)
    if format_named(fmt_name).overflow != "saturate":
        return rounded
    return torch.where(values == -torch.inf, values, rounded)


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
    #: [H, R, K] tanh(S / cap) of the soft-cap as the recipe stores it, and the cap; None without soft-cap.
    tanh: torch.Tensor | None = None
    softcap: float | None = None


def product(a: torch.Tensor, b: torch.Tensor, arithmetic: str) -> torch.Tensor:
    """Batched product under an arithmetic model, FP32 in and out.

    Args:
        a: [H, R, J] FP32.
        b: [H, J, K] FP32.
        arithmetic: "fp32" accumulates in FP32; "exact" accumulates in float64 (the products of BF16 values are exact
            there) and rounds once to FP32; "torch-blocks" is "fp32" for whoever passes whole blocks.
    """
    if arithmetic == "exact":
        return torch.matmul(a.double(), b.double()).float()
    return torch.matmul(a, b)


def add_product(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, arithmetic: str) -> torch.Tensor:
    """base + a b in FP32: in one addition to the finished product, or as part of it for "torch-blocks".

    Args:
        base: [H, R, K] FP32.
        a: [H, R, J] FP32.
        b: [H, J, K] FP32.
        arithmetic: as for `product`.
    """
    if arithmetic == "torch-blocks":
        return torch.baddbmm(base, a, b)
    return base + product(a, b, arithmetic)


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
        scores = round_to(_raw_scores(q * root, k * root, geometry, recipe, block), recipe.scores)
    else:
        scores = round_to(_raw_scores(q, k, geometry, recipe, block), recipe.scores)
        if not folds_scale(recipe, geometry):
            scores = round_to(scores * scale, recipe.scores)
    tanh = None
    if geometry.softcap is not None:
        tanh = round_to(torch.tanh(round_to(scores / geometry.softcap, recipe.scores)), recipe.scores)
        scores = round_to(geometry.softcap * tanh, recipe.scores)
    if bias is not None:
        scores = round_to(scores + bias.float(), recipe.scores)
    geometry.hide(scores, block.rows, block.num_queries, block.keys[0], block.num_keys)
    unit = scale if folds_scale(recipe, geometry) else 1.0
    return LpScores(values=scores, unit=unit, tanh=tanh, softcap=geometry.softcap)


def _raw_scores(q: torch.Tensor, k: torch.Tensor, geometry: Geometry, recipe: Recipe, block: Block) -> torch.Tensor:
    """q k^T, [H, R, K] FP32: one product, or one for each key tile where the recipe says so."""
    if recipe.arithmetic != "torch-blocks":
        return product(q, k.transpose(-1, -2), recipe.arithmetic)
    has_edge = geometry.causal or geometry.window is not None
    tile_k = recipe.tile(q.shape[-1], block.num_keys, has_edge)[1]
    borders = tuple(range(tile_k - block.keys[0] % tile_k, k.shape[1], tile_k))
    tiles = torch.tensor_split(k, borders, dim=1)
    return torch.cat([product(q, tile.transpose(-1, -2), recipe.arithmetic) for tile in tiles], dim=-1)


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
    visible = geometry.visible(block.rows, block.keys, block.num_queries, block.num_keys, scores.device)
    return HpScores(values=scores, slope=slope, visible=visible, visible_until=until)
