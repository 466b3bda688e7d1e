"""delta, its errors, and dQ in stages from hp to lp, for one block of rows.

Everything large is computed as a difference from a top key j, as in `hp.py`: with D_k = dP_k - dP_j,
rowsum(P D) is small exactly when the row is saturated, so no cancellation of large numbers remains.

Shapes: H heads, R rows, K keys, D and E head sizes.
"""

from dataclasses import dataclass

import torch

from bf16forensics.attention.hp import HpRows, gather_rows
from bf16forensics.attention.lp import (
    LpRows,
    add_tile,
    delta_products,
    product_scale,
    round_delta,
    score_gradient,
)
from bf16forensics.attention.result import DeltaRows, QueryGradients
from bf16forensics.attention.scores import LpScores, product
from bf16forensics.attention.tiles import TilePlan
from bf16forensics.emulate.rounding import round_to
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientInputs:
    """What the backward pass of a block needs."""

    lp: LpRows
    hp: HpRows
    #: [H, R, K] scores by the recipe, and the FP32 P of its backward pass.
    scores: LpScores
    p_lp: torch.Tensor
    #: [H, R, K] derivative of the hp score by the scaled product, or None for 1.
    slope: torch.Tensor | None
    #: [H, K, D] keys in FP32 and in the reference dtype.
    k: torch.Tensor
    k_hp: torch.Tensor
    #: [H, K, E] values in the reference dtype.
    v_hp: torch.Tensor
    #: [H, R, E] output gradient in FP32 and in the reference dtype.
    do: torch.Tensor
    do_hp: torch.Tensor
    #: Softmax scale.
    scale: float
    #: The recipe's key tiles.
    plan: TilePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBlock:
    """delta and dQ of one block."""

    delta: DeltaRows
    dq: QueryGradients


def query_gradients(inputs: GradientInputs, recipe: Recipe) -> DeltaBlock:
    """delta, defect and dQ of a block of rows; see `DeltaRows` and `QueryGradients` for the stages.

    Reference: arXiv 2510.04212, equations 1 to 3; flash-attention@0251105 flash_bwd_kernel.h for dS and dQ.
    """
    hp, scale = inputs.hp, inputs.scale
    do64 = inputs.do.double()
    dp_raw = torch.matmul(inputs.do_hp, inputs.v_hp.transpose(-1, -2))
    seen = hp.row_max > -torch.inf
    dp_top = (do64 * gather_rows(inputs.v_hp, hp.top).double()).sum(-1) * seen

    # High precision: delta - dP_j = dO . (O - v_j).
    hp_offset = (do64 * hp.o_minus_top).sum(-1)
    slope_top = None if inputs.slope is None else _pick(inputs.slope, hp.top).double()
    # Shifting by the product's own entry makes the top key's difference exactly 0: an FP32 product and the float64 dP_j
    # differ by more than a saturated row's whole excess.
    shifted = dp_raw - _pick(dp_raw, hp.top)[..., None]
    p_others = hp.p_others if inputs.slope is None else hp.p_others * inputs.slope
    weighted = torch.matmul(p_others * shifted, inputs.k_hp).double()
    key_top = gather_rows(inputs.k_hp, hp.top).double()
    p_top = hp.p_top if slope_top is None else hp.p_top * slope_top
    carrier_hp = scale * (torch.matmul(p_others, inputs.k_hp).double() + p_top[..., None] * key_top)
    dq_hp = scale * weighted - hp_offset[..., None] * carrier_hp

    # The recipe: its own P and dP; delta from its own O.
    dp_lp = round_to(dp_raw.float(), recipe.dp)
    dp_difference = shifted if recipe.dp == "fp32" else dp_lp.to(dp_raw.dtype) - dp_top.to(dp_raw.dtype)[..., None]
    p_lp = inputs.p_lp.to(dp_raw.dtype)
    p_row_sum = p_lp.sum(-1).double()
    excess_each = p_lp * dp_difference
    excess = excess_each.sum(-1).double()
    safe_sum = p_row_sum.masked_fill(p_row_sum == 0, 1.0)
    consistent_offset = excess / safe_sum
    delta_lp, magnitude = _delta(inputs, recipe, excess + p_row_sum * dp_top)
    lp_offset = delta_lp - dp_top
    if inputs.scores.tanh is not None:
        slope = (1.0 - inputs.scores.tanh * inputs.scores.tanh).to(dp_raw.dtype)
        p_lp = p_lp * slope
        excess_each = excess_each * slope
    carrier_lp = scale * torch.matmul(p_lp, inputs.k_hp).double()
    dq_consistent = scale * torch.matmul(excess_each, inputs.k_hp).double() - consistent_offset[..., None] * carrier_lp
    dq_cast, dq_lp = _cast_gradients(inputs, recipe, dp_lp, delta_lp)
    return DeltaBlock(
        delta=DeltaRows(
            delta_lp=delta_lp,
            delta_hp=(dp_top + hp_offset) * seen,
            delta_err=(lp_offset - hp_offset) * seen,
            defect=(lp_offset - consistent_offset) * seen,
            p_row_sum=p_row_sum,
            magnitude=magnitude,
        ),
        dq=QueryGradients(
            hp=dq_hp,
            consistent=dq_consistent,
            cast_ds=dq_cast,
            lp=dq_lp,
            carrier_hp=carrier_hp,
            carrier_lp=carrier_lp,
        ),
    )


def _pick(values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    return torch.gather(values, -1, top[..., None])[..., 0]


def _delta(inputs: GradientInputs, recipe: Recipe, from_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """delta by the recipe and the scale of its terms, sum |dO * O|; both [H, R] float64."""
    magnitude = (inputs.do.double() * inputs.lp.o.double()).abs().sum(-1)
    exact = from_p if recipe.delta_source == "dp" else delta_products(inputs.do, inputs.lp.o, recipe).sum(-1)
    return round_delta(exact, recipe), magnitude


def _cast_gradients(
    inputs: GradientInputs, recipe: Recipe, dp_lp: torch.Tensor, delta_lp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dQ from the rounded dS, before and after dQ itself is rounded; [H, R, D] float64 each.

    Where the buffer rounds after every key tile, "before" keeps the buffer in FP32.
    """
    ds = score_gradient(inputs.p_lp, dp_lp, delta_lp, inputs.scores, inputs.scale, recipe)
    scale = product_scale(recipe, inputs.scale)
    if recipe.gradients_at == "end":
        dq = product(ds, inputs.k, recipe.arithmetic) * scale
        return dq.double(), round_to(dq, recipe.dq).double()
    shape = (*inputs.do.shape[:-1], inputs.k.shape[-1])
    buffer, unrounded = ds.new_zeros(shape), ds.new_zeros(shape)
    rows = slice(None)
    for start, end in inputs.plan.tiles:
        tile = product(ds[..., start:end], inputs.k[:, start:end], recipe.arithmetic) * scale
        add_tile(unrounded, rows, tile, recipe.dq, "end")
        add_tile(buffer, rows, tile, recipe.dq, recipe.gradients_at)
    return unrounded.double(), buffer.double()
