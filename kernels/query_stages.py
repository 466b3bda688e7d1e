"""dQ in stages from high precision to a recipe, and the carriers of a delta error, without a matrix of N x N.

Shapes: H query heads, N queries, D head size of q and k.
"""

import torch
import triton
from bf16forensics.kernels.fused_types import FusedForward, FusedInputs, FusedRecipe, QueryStages, RowCounts
from bf16forensics.kernels.row_blocks import (
    operand_arguments,
    operand_constants,
    padded_size,
    pipeline_stages,
    score_unit,
)
from bf16forensics.kernels.stage_rows import stage_kernel

#: Features of dQ of one program: the sums of all stages of one P then fit into its registers.
_FEATURES = 64


def query_stages(inputs: FusedInputs, recipe: FusedRecipe, forward: FusedForward, counts: RowCounts) -> QueryStages:
    """dQ in stages and the carriers; see `QueryGradients` of the package for what each stage is.

    dS of the high-precision and of the consistent stage is multiplied in two BF16 terms, P of the carriers in one but
    for the top key of anchored rows, which is exact; all in IEEE FP32 where the inputs say so. What P_lp has in common
    with P_hp is computed once where the recipe allows it: there the consistent stage and the carrier by the recipe are
    those of high precision times rowsum(P_lp).

    Args:
        inputs: of the call, with dO.
        recipe: its constants.
        forward: of the same call, after `count_and_anchor`.
        counts: of the same call.

    Returns:
        Zeros in rows that see no key. Bitwise reproducible.

    Raises:
        ValueError: no dO.

    Reference: arXiv 2510.04212, equations 1 to 3; flash-attention@0251105 flash_bwd_kernel.h for dS and dQ.
    """
    delta_hp, delta_lp = forward.delta_hp, forward.delta_lp
    consistent, error = forward.delta_consistent, forward.delta_err
    if inputs.do is None or delta_hp is None or delta_lp is None or consistent is None or error is None:
        raise ValueError("expected inputs with dO and a forward pass with delta")
    anchored = counts.top >= 0
    # delta less what dP is shifted by: nothing in rows without an anchor.
    offset = torch.where(anchored, counts.hp_offset, delta_hp)
    lp_offset = torch.where(anchored, error + counts.hp_offset, delta_lp)
    names = ("hp", "consistent", "cast_ds", "lp", "carrier_hp", "carrier_lp")
    stages = {name: torch.empty(inputs.q.shape, dtype=torch.float32, device=inputs.q.device) for name in names}
    if not inputs.q.numel():
        return QueryStages(**stages)
    same = recipe.same_p
    _launch(
        inputs, recipe, forward, counts, offset, lp_offset,
        {"stage": stages["hp"], "carrier": stages["carrier_hp"], "cast": stages["cast_ds"], "lp": stages["lp"],
         "scaled_stage": stages["consistent"], "scaled_carrier": stages["carrier_lp"]},
        own_p=False, cast=same,
    )  # fmt: skip
    if not same:
        own_offset = torch.where(anchored, counts.consistent_offset, consistent)
        _launch(
            inputs, recipe, forward, counts, own_offset, lp_offset,
            {"stage": stages["consistent"], "carrier": stages["carrier_lp"], "cast": stages["cast_ds"],
             "lp": stages["lp"], "scaled_stage": stages["consistent"], "scaled_carrier": stages["carrier_lp"]},
            own_p=True, cast=True,
        )  # fmt: skip
    return QueryStages(**stages)


def _launch(
    inputs: FusedInputs,
    recipe: FusedRecipe,
    forward: FusedForward,
    counts: RowCounts,
    offset: torch.Tensor,
    lp_offset: torch.Tensor,
    written: dict[str, torch.Tensor],
    *,
    own_p: bool,
    cast: bool,
) -> None:
    """The stages of one P."""
    heads, num_queries, head_size = inputs.q.shape
    value_size = inputs.v.shape[-1]
    size = padded_size(head_size)
    features = min(size, _FEATURES)
    block_rows, block_keys = (32, 32) if inputs.ieee else (64, 64 if size <= 64 else 32)
    num_blocks = triton.cdiv(num_queries, block_rows) * triton.cdiv(head_size, features)
    stage_kernel[(heads * num_blocks,)](
        **operand_arguments(inputs),
        p_v=inputs.v,
        p_do=inputs.do,
        p_row_max=forward.row_max_raw,
        p_row_sum=forward.row_sum_hp,
        p_row_max_lp=forward.row_max_lp,
        p_lse_lp=forward.lse_lp,
        p_p_row_sum=forward.p_row_sum,
        p_top=counts.top,
        p_shift=counts.dp_top,
        p_offset=offset,
        p_lp_offset=lp_offset,
        **{f"p_{name}": tensor for name, tensor in written.items()},
        value_size=value_size,
        unit=score_unit(inputs, recipe),
        # Without tiles of its own a row is one tile.
        tile_k=recipe.tile_k or max(inputs.k.shape[1], 1),
        **operand_constants(inputs, recipe),
        P_SAVED=recipe.p_saved,
        OWN_P=own_p,
        DS=recipe.ds,
        DQ=recipe.dq,
        BY_TILE=recipe.dq_by_tile,
        DESCENDING=recipe.descending,
        SCALED=not own_p and cast,
        CAST=cast,
        ROWS=block_rows,
        KEYS=block_keys,
        SIZE=size,
        SIZE_V=padded_size(value_size),
        FEATURES=features,
        num_warps=4,
        num_stages=pipeline_stages(max(size, padded_size(value_size))),
    )
