"""One block of rows through a recipe: the forward pass, and the steps of the backward pass that round.

This is the specification of a recipe: every rounding of `Recipe` appears here, or in `scores.py`, exactly once.

Shapes: H heads, R rows, K keys, E head size of V.
"""

import math
from dataclasses import dataclass

import torch

from bf16forensics.attention.cubic import fused_multiply_subtract
from bf16forensics.attention.exponential import exponential
from bf16forensics.attention.fexp import fused_multiply_add, lanes_of, library_log, sum_rows
from bf16forensics.attention.scores import LOG2_E, LpScores, add_product, exp_, product, round_visible
from bf16forensics.attention.tiles import TilePlan
from bf16forensics.emulate.rounding import round_to
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class LpRows:
    """What the forward pass of a recipe leaves behind for a block of rows."""

    #: [H, R, E] output in FP32 holding values of the recipe's output format; 0 in rows that see no key.
    o: torch.Tensor
    #: [H, R] row maximum, in the units of `LpScores.values`; -inf in rows that see no key.
    row_max: torch.Tensor
    #: [H, R] final anchor m of P-bar, same units: the maximum, unless the recipe's `rescale_threshold` let it lag.
    anchor: torch.Tensor
    #: [H, R] row sum as stored.
    row_sum: torch.Tensor
    #: [H, R] log-sum-exp in nats as stored; -inf in rows that see no key.
    lse: torch.Tensor


def _finite(row_max: torch.Tensor) -> torch.Tensor:
    """The anchor to subtract: 0 where the row has seen no key, so that exp(-inf - anchor) is 0 and not NaN."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def _rescaling(
    anchor: torch.Tensor, new_max: torch.Tensor, unit: float, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """The anchor after a tile and the factor of everything summed before it; both [H, R]."""
    finite = _finite(new_max)
    alpha = exponential(anchor[..., None], finite, unit, recipe)[..., 0]
    if recipe.rescale_threshold == "0":
        return new_max, alpha
    # Exponents of base 2: how far the old anchor lags.
    lag = (anchor - finite) * (unit * LOG2_E)
    kept = lag >= -float(recipe.rescale_threshold)
    if recipe.exponential == "exp2-cubic" and recipe.shifted == "fp32":
        alpha = torch.exp2(lag)
    return torch.where(kept, anchor, new_max), alpha.masked_fill(kept, 1.0)


def _log2_offset(recipe: Recipe) -> float:
    return math.log2(float(recipe.p_scale))


def _divide(o_bar: torch.Tensor, row_sum: torch.Tensor, recipe: Recipe, value_scale: float = 1.0) -> torch.Tensor:
    safe = row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
    if recipe.division == "reciprocal":
        return o_bar * (1.0 / safe if value_scale == 1.0 else 1.0 / safe * value_scale)
    return o_bar / safe if value_scale == 1.0 else o_bar / safe * value_scale


def _log_sum_exp(anchor: torch.Tensor, row_sum: torch.Tensor, unit: float, recipe: Recipe) -> torch.Tensor:
    plain = row_sum if recipe.p_scale == "1" else row_sum * (1.0 / float(recipe.p_scale))
    log = library_log(plain) if recipe.exponential == "fexp_u20" else torch.log(plain)
    return round_visible(_finite(anchor) * unit + log, recipe.lse)


def _longer_sum(alpha: torch.Tensor, before: torch.Tensor, tile_sum: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The running row sum after a tile, as stored."""
    if lanes_of(recipe.row_sum_order) is not None:
        return round_to(fused_multiply_add(alpha, before, tile_sum), recipe.row_sum)
    return round_to(alpha * before + tile_sum, recipe.row_sum)


def forward_rows(scores: LpScores, v: torch.Tensor, plan: TilePlan, recipe: Recipe, value_scale: float = 1.0) -> LpRows:
    """Runs the recipe's softmax and product with V over a block of rows.

    Args:
        scores: [H, R, K] masked scores of the block.
        v: [H, K, E] FP32 values of the block's keys.
        plan: the key tiles in the order of visits.
        recipe: rounding points.
        value_scale: descale factor of v, which multiplies O.

    Returns:
        Output and row statistics. A row without visible keys gives O = 0, lse = -inf. NaN scores give NaN rows.
    """
    if recipe.p_bar_cast == "after":
        return _forward_normalised(scores, v, plan, recipe, value_scale)
    heads, rows, _ = scores.values.shape
    anchor = scores.values.new_full((heads, rows), -torch.inf)
    row_max = anchor
    row_sum = scores.values.new_zeros((heads, rows))
    o_bar = scores.values.new_zeros((heads, rows, v.shape[-1]))
    offset = _log2_offset(recipe)
    for start, end in plan.tiles:
        tile = scores.values[..., start:end]
        tile_max = tile.amax(-1)
        anchor, alpha = _rescaling(anchor, torch.maximum(anchor, tile_max), scores.unit, recipe)
        row_max = anchor if recipe.anchored_at_maximum else torch.maximum(row_max, tile_max)
        cubic = plan.cubic_of(start, end)
        p_bar = exponential(tile, _finite(anchor), scores.unit, recipe, log2_offset=offset, cubic=cubic)
        tile_sum = sum_rows(round_to(p_bar, recipe.row_sum_input), recipe.row_sum_order)
        row_sum = _longer_sum(alpha, row_sum, tile_sum, recipe)
        operands = round_to(p_bar, recipe.p_bar), v[:, start:end], recipe.arithmetic
        if recipe.o_bar_at == "tile":
            o_bar = round_to(o_bar * alpha[..., None], recipe.o_bar)
            o_bar = round_to(o_bar + round_to(product(*operands), recipe.o_bar), recipe.o_bar)
        else:
            o_bar = add_product(o_bar * alpha[..., None], *operands)
    if recipe.o_bar_at == "end":
        o_bar = round_to(o_bar, recipe.o_bar)
    return LpRows(
        o=round_to(_divide(o_bar, row_sum, recipe, value_scale), recipe.o),
        row_max=row_max,
        anchor=anchor,
        row_sum=row_sum,
        lse=_log_sum_exp(anchor, row_sum, scores.unit, recipe),
    )


def _forward_normalised(
    scores: LpScores, v: torch.Tensor, plan: TilePlan, recipe: Recipe, value_scale: float
) -> LpRows:
    """The whole row at once: P = P-bar / l is cast, then multiplied."""
    row_max = scores.values.amax(-1)
    anchor, offset = _finite(row_max), _log2_offset(recipe)
    p_bar = exponential(scores.values, anchor, scores.unit, recipe, log2_offset=offset, cubic=plan.cubic)
    row_sum = round_to(sum_rows(round_to(p_bar, recipe.row_sum_input), recipe.row_sum_order), recipe.row_sum)
    p = round_to(_normalised(scores, row_max, row_sum, p_bar, recipe), recipe.p_bar)
    o_bar = round_to(product(p, v, recipe.arithmetic), recipe.o_bar)
    o = o_bar if value_scale == 1.0 else o_bar * value_scale
    lse = _log_sum_exp(row_max, row_sum, scores.unit, recipe)
    return LpRows(o=round_to(o, recipe.o), row_max=row_max, anchor=row_max, row_sum=row_sum, lse=lse)


def _normalised(
    scores: LpScores, row_max: torch.Tensor, row_sum: torch.Tensor, p_bar: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """P = P-bar / l in FP32; 0 in rows that see no key.

    Where nothing is rounded below FP32 on the way from the scores to P, a framework calls its fused softmax, whose
    exponential and sum differ from the separate operations in the last bit: the same one is called here.
    """
    unrounded = (recipe.shifted, recipe.row_sum_input, recipe.row_sum) == ("fp32", "fp32", "fp32")
    plain = recipe.exponential == "exp" and recipe.division == "divide" and scores.unit == 1.0
    if not (unrounded and plain and recipe.p_bar_cast == "after"):
        return _divide(p_bar, row_sum, recipe)
    return torch.softmax(scores.values, -1).masked_fill_((row_max == -torch.inf)[..., None], 0.0)


def backward_probabilities(scores: LpScores, rows: LpRows, recipe: Recipe) -> torch.Tensor:
    """P as the recipe's backward pass has it, [H, R, K] FP32; 0 in rows that see no key.

    `p_source` "lse" recomputes exp(S - lse), "saved" takes the forward pass's own P before its cast; neither uses a
    polynomial. The rows of this P need not add up to 1: their sum is part of the evidence.
    """
    if recipe.p_source == "saved":
        anchor, offset = _finite(rows.anchor), _log2_offset(recipe)
        p_bar = exponential(scores.values, anchor, scores.unit, recipe, log2_offset=offset)
        return _normalised(scores, rows.row_max, rows.row_sum, p_bar, recipe)
    lse = _finite(rows.lse)[..., None]
    if recipe.exponential == "exp2-cubic":
        return torch.exp2(fused_multiply_subtract(scores.values, scores.unit * LOG2_E, lse * LOG2_E))
    if recipe.exponential == "exp2":
        return torch.exp2((scores.values * (scores.unit * LOG2_E)).sub_(lse * LOG2_E))
    values = scores.values if scores.unit == 1.0 else scores.values * scores.unit
    return exp_(values - lse)


def delta_products(do: torch.Tensor, o: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """dO * O as the recipe rounds it before adding, [H, R, E] float64."""
    return round_to(do.double() * o.double(), recipe.delta_products)


def round_delta(exact: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """delta from an exact sum, rounded once to the recipe's format, [H, R] float64.

    The order in which a kernel adds FP32 products moves the result by less than 2^-22 of sum |dO * O|, which is the
    limit below which no sign is counted.
    """
    return round_to(exact, recipe.delta)


def score_gradient(
    p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor, scores: LpScores, scale: float, recipe: Recipe
) -> torch.Tensor:
    """dS = P * (dP - delta) as the operand of the products with K and Q, [H, R, K] FP32.

    Args:
        p: [H, R, K] FP32 P of the backward pass.
        dp: [H, R, K] FP32 dP by the recipe.
        delta: [H, R] float64 delta by the recipe.
        scores: of the block; its soft-cap's slope is applied.
        scale: softmax scale, applied here if the recipe's `ds_scale` says so; see `product_scale`.
        recipe: format of dS.
    """
    ds = _softmax_gradient(p, dp, delta, recipe)
    tanh, cap = scores.tanh, scores.softcap
    if recipe.ds_scale == "gradients":
        return round_to(ds if tanh is None else ds * (1.0 - tanh * tanh), recipe.ds)
    # Autograd's way back through cap * tanh(S / cap) and S = scale * q.k: each step stores its result.
    ds = round_to(ds, recipe.ds)
    if tanh is not None and cap is not None:
        ds = round_to(ds * cap, recipe.ds)
        ds = round_to(ds * (1.0 - tanh * tanh), recipe.ds)
        ds = round_to(ds / cap, recipe.ds)
    return round_to(ds * scale, recipe.ds)


def _softmax_gradient(p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """P * (dP - delta) in FP32.

    Where a softmax differentiates itself in FP32, the framework's own function is called, as in `_normalised`: its FP32
    sum of delta differs from the exact one in the last bits.
    """
    if (recipe.p_source, recipe.delta_source, recipe.delta) == ("saved", "dp", "fp32"):
        return torch._softmax_backward_data(dp, p, -1, torch.float32)
    return p * (dp - delta.float()[..., None])


def product_scale(recipe: Recipe, scale: float) -> float:
    """The factor of the products of dS with K and Q: the softmax scale, unless dS carries it already."""
    return scale if recipe.ds_scale == "gradients" else 1.0


def add_tile(buffer: torch.Tensor, where: slice, tile: torch.Tensor, storage: str, gradients_at: str) -> None:
    """Adds a tile to rows of a gradient buffer [H, rows, D], in place.

    Args:
        buffer: FP32.
        where: the rows.
        tile: FP32.
        storage: format of the gradient.
        gradients_at: "tile" rounds the tile and the sum; "buffer" the sum; "end" leaves the rounding to the end.
    """
    if gradients_at == "tile":
        buffer[:, where] = round_to(buffer[:, where] + round_to(tile, storage), storage)
    elif gradients_at == "buffer":
        buffer[:, where] = round_to(buffer[:, where] + tile, storage)
    else:
        buffer[:, where] += tile
