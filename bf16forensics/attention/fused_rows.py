"""What the fused kernels leave by row, as the dual pass hands it out: the maxima, delta and its errors.

Shapes: H query heads, G key/value heads, N queries, M keys, D head size of q and k.
"""

import torch

from bf16forensics.attention.fused_inputs import seen_keys
from bf16forensics.attention.result import DeltaRows, RowMaxima
from bf16forensics.kernels.fused_types import FusedForward, FusedInputs, RowCounts
from bf16forensics.recipe.model import Recipe


def fused_maxima(inputs: FusedInputs, forward: FusedForward, counts: RowCounts) -> RowMaxima:
    """The counts of every row beside what high precision says of them, on the device of the kernels."""
    visible, first = seen_keys(inputs)
    seen = visible > 0
    raw_max = forward.row_max_raw.double()
    # A sum of products in another order may exceed the maximum by its last bits.
    below = (_raw_products_with(inputs, first).double() - raw_max).clamp(max=0.0)
    sink = torch.exp(below * inputs.scale) / forward.row_sum_hp.double()
    largest = raw_max.abs()
    if forward.lowest_raw is not None:
        largest = torch.maximum(largest, forward.lowest_raw.double().abs())
    shape = raw_max.shape
    return RowMaxima(
        ones_fp32=counts.ones_fp32.long(),
        ones_rounded=counts.ones_rounded.long(),
        near=counts.near.long(),
        shared=counts.shared.long(),
        visible=visible.expand(shape).contiguous(),
        sink=sink.masked_fill(~seen, 0.0),
        score_abs_max=(largest * inputs.scale).masked_fill(~seen, 0.0),
        swamped=counts.swamped,
    )


def _raw_products_with(inputs: FusedInputs, first: torch.Tensor) -> torch.Tensor:
    """q.k of every query with one key of its own, [H, N] FP32; `first` is int64 [1 or H, N]."""
    heads = inputs.q.shape[0]
    of_head = torch.arange(heads, device=first.device) // (heads // inputs.k.shape[0])
    keys = inputs.k[of_head[:, None], first.expand(heads, -1)]
    return (inputs.q.float() * keys.float()).sum(-1)


def fused_delta(forward: FusedForward, counts: RowCounts, recipe: Recipe) -> DeltaRows | None:
    """delta and its errors, float64 on the device of the kernels; None without dO.

    In rows anchored at their top key the differences are those from it. In the others the error of an FP32 delta of O
    is dO . (O_lp - O_hp), which keeps the digits that a difference of the two deltas loses.
    """
    consistent, magnitude = forward.delta_consistent, forward.magnitude
    if forward.delta_lp is None or forward.delta_hp is None or forward.delta_err is None:
        return None
    if consistent is None or magnitude is None:
        return None
    delta_lp, delta_hp, delta_err = (t.double() for t in (forward.delta_lp, forward.delta_hp, forward.delta_err))
    anchored = counts.top >= 0
    is_plain = (recipe.delta_source, recipe.delta_products, recipe.delta) == ("o", "fp32", "fp32")
    if not is_plain:
        delta_err = torch.where(anchored, delta_err, delta_lp - delta_hp)
    own_p = torch.where(
        anchored,
        counts.hp_offset.double() - counts.consistent_offset.double(),
        delta_hp - consistent.double(),
    )
    return DeltaRows(
        delta_lp=delta_lp,
        delta_hp=delta_hp,
        delta_err=delta_err,
        defect=delta_err + own_p,
        p_row_sum=forward.p_row_sum.double(),
        magnitude=magnitude.double(),
    )
