"""One block of rows through a recipe: the forward pass, and the steps of the backward pass that round.

This is the specification of a recipe: every rounding of `Recipe` appears here, in `steps.py` or in `scores.py`,
exactly once.

Shapes: H heads, R rows, K keys, E head size of V.
"""

from dataclasses import dataclass

import torch

from bf16forensics.attention.cubic import fused_multiply_subtract
from bf16forensics.attention.exponential import exponential
from bf16forensics.attention.fexp import library_log
from bf16forensics.attention.scores import LOG2_E, LpScores, add_product, exp_, product, round_visible
from bf16forensics.attention.steps import divide, finite_anchor, log2_offset, normalised, tile_steps
from bf16forensics.attention.tiles import TilePlan
from bf16forensics.emulate.rounding import round_to
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRounding:
    """The rounding that ends the sum of a row: of O-bar where the recipe rounds it, else of O. FP32 [H, R, E]."""

    #: The value before. Where O-bar rounds at every tile: a chain beside it that does not.
    before: torch.Tensor
    #: The value after.
    after: torch.Tensor


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
    #: None unless asked for.
    final: FinalRounding | None = None


def _log_sum_exp(anchor: torch.Tensor, row_sum: torch.Tensor, unit: float, recipe: Recipe) -> torch.Tensor:
    plain = row_sum if recipe.p_scale == "1" else row_sum * (1.0 / float(recipe.p_scale))
    log = library_log(plain) if recipe.exponential == "fexp_u20" else torch.log(plain)
    return round_visible(finite_anchor(anchor) * unit + log, recipe.lse)


def forward_rows(
    scores: LpScores,
    v: torch.Tensor,
    plan: TilePlan,
    recipe: Recipe,
    value_scale: float = 1.0,
    *,
    keep_final: bool = False,
) -> LpRows:
    """Runs the recipe's softmax and product with V over a block of rows.

    Args:
        scores: [H, R, K] masked scores of the block.
        v: [H, K, E] FP32 values of the block's keys.
        plan: the key tiles in the order of visits.
        recipe: rounding points.
        value_scale: descale factor of v, which multiplies O.
        keep_final: whether the result holds what the final rounding did.

    Returns:
        Output and row statistics. A row without visible keys gives O = 0, lse = -inf. NaN scores give NaN rows.
    """
    heads, rows, _ = scores.values.shape
    anchor = row_max = scores.values.new_full((heads, rows), -torch.inf)
    row_sum = scores.values.new_zeros((heads, rows))
    o_bar = scores.values.new_zeros((heads, rows, v.shape[-1]))
    by_tile = recipe.o_bar_at == "tile" and recipe.p_bar_cast == "before"
    # Beside an O-bar that rounds at every tile.
    chain = o_bar if by_tile and keep_final else None
    for step in tile_steps(scores, plan, recipe):
        anchor, row_max, row_sum = step.anchor, step.row_max, step.row_sum
        alpha = step.alpha[..., None]
        operands = step.operand, v[:, step.start : step.end], recipe.arithmetic
        if recipe.p_bar_cast == "after":
            o_bar = product(*operands)
        elif by_tile:
            added = product(*operands)
            chain = None if chain is None else chain * alpha + added
            o_bar = round_to(o_bar * alpha, recipe.o_bar)
            o_bar = round_to(o_bar + round_to(added, recipe.o_bar), recipe.o_bar)
        else:
            o_bar = add_product(o_bar * alpha, *operands)
    unrounded = chain if by_tile else o_bar
    if not by_tile:
        o_bar = round_to(o_bar, recipe.o_bar)
    if recipe.p_bar_cast == "after":
        quotient = o_bar if value_scale == 1.0 else o_bar * value_scale
    else:
        quotient = divide(o_bar, row_sum, recipe, value_scale)
    o = round_to(quotient, recipe.o)
    final = None
    if keep_final and unrounded is not None:
        pair = (quotient, o) if recipe.o_bar == "fp32" else (unrounded, o_bar)
        final = FinalRounding(before=pair[0], after=pair[1])
    lse = _log_sum_exp(anchor, row_sum, scores.unit, recipe)
    return LpRows(o=o, row_max=row_max, anchor=anchor, row_sum=row_sum, lse=lse, final=final)


def backward_probabilities(scores: LpScores, rows: LpRows, recipe: Recipe) -> torch.Tensor:
    """P as the recipe's backward pass has it, [H, R, K] FP32; 0 in rows that see no key.

    `p_source` "lse" recomputes exp(S - lse), "saved" takes the forward pass's own P before its cast; neither uses a
    polynomial. The rows of this P need not add up to 1: their sum is part of the evidence.
    """
    if recipe.p_source == "saved":
        anchor, offset = finite_anchor(rows.anchor), log2_offset(recipe)
        p_bar = exponential(scores.values, anchor, scores.unit, recipe, log2_offset=offset)
        return normalised(scores, rows.row_max, rows.row_sum, p_bar, recipe)
    lse = finite_anchor(rows.lse)[..., None]
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
