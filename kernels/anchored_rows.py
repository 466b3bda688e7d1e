"""Saturated rows in high precision, as differences from the value of their top key.

In such a row O differs from the value v_j of its top key j by less than an FP32 sum of O can resolve. With
p_k = exp(S_k - S_j) and l' = the sum of p_k over k != j: O - v_j = (sum_{k != j} p_k v_k - l' v_j) / (1 + l').

Shapes: H query heads, N queries, M keys, E head size of v; ROWS, KEYS and SIZE of a block as in `row_blocks`.
"""

import torch
import triton
import triton.language as tl
from bf16forensics.kernels.fused_parts import LOG2_E, finite, lp_exponential, lp_scores, product
from bf16forensics.kernels.fused_types import FusedForward, FusedInputs, FusedRecipe
from bf16forensics.kernels.row_blocks import (
    add_product,
    key_range,
    load_rows,
    operand_arguments,
    operand_constants,
    padded_size,
    pipeline_stages,
    readable,
    recipe_probability,
    score_products,
    score_unit,
    store_rows,
)

#: Tenths of the features in which O_lp equals the value of the top key, above which a row is swamped.
SWAMPED_TENTHS = tl.constexpr(9)
#: Beyond every key.
_NO_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def _anchor_kernel(
    p_q, p_k, p_q_group, p_k_group, p_keep, p_v, p_do, p_rows, p_number, p_o_lp, p_lse_lp, p_delta_lp,
    p_o_hp, p_o_err, p_delta_hp, p_delta_err, p_delta_consistent, p_top, p_offsets, p_swamped,
    keep_stride, num_heads, heads_per_group, num_queries, num_keys, head_size, value_size, window, scale, root, unit,
    plane,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SCALE_IN: tl.constexpr,
    EXP2: tl.constexpr, SCORES: tl.constexpr, SHIFTED: tl.constexpr, IEEE: tl.constexpr, NATIVE: tl.constexpr,
    P_SAVED: tl.constexpr, OWN_P: tl.constexpr, PLAIN_DELTA: tl.constexpr, DELTA: tl.constexpr, O_ERR: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
):  # fmt: skip
    # The first blocks of all heads come first: most programs behind them have nothing to do.
    i_head = (tl.program_id(0) % num_heads).to(tl.int64)
    i_first = tl.program_id(0) // num_heads * ROWS
    num_listed = tl.load(p_number + i_head)
    if i_first >= num_listed:
        return
    p_k += i_head // heads_per_group * num_keys * head_size
    p_v += i_head // heads_per_group * num_keys * value_size
    p_keep += i_head * keep_stride
    # [ROWS]
    o_listed = i_first + tl.arange(0, ROWS)
    m_row = o_listed < num_listed
    o_row = tl.load(p_rows + i_head * num_queries + o_listed, mask=m_row, other=num_queries)
    o_x = i_head * num_queries + o_row
    first_row = tl.min(o_row, 0)
    last_row = tl.max(tl.where(m_row, o_row, -1), 0)
    start, end = key_range(first_row, last_row, num_queries, num_keys, window, CAUSAL, WINDOW)
    # [ROWS, SIZE]
    b_q = load_rows(p_q + i_head * num_queries * head_size, o_row, num_queries, head_size, SIZE)

    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    b_max_own = tl.full((ROWS,), float("-inf"), tl.float32)
    b_top = tl.full((ROWS,), -1, tl.int32)
    for i_key in range(start, end, KEYS):
        # [KEYS]
        o_key = i_key + tl.arange(0, KEYS)
        b_k = load_rows(p_k, o_key, num_keys, head_size, SIZE)
        # [ROWS, KEYS]
        b_raw, b_own = score_products(
            b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
            CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE,
        )  # fmt: skip
        # [ROWS]
        b_block_max = tl.max(b_raw, 1)
        b_first = tl.min(tl.where(b_raw == b_block_max[:, None], o_key[None, :], _NO_KEY), 1)
        b_top = tl.where(b_block_max > b_max, b_first, b_top)
        b_max = tl.maximum(b_max, b_block_max)
        if OWN_P:
            b_max_own = tl.maximum(b_max_own, tl.max(b_own, 1))
    b_max = finite(b_max)
    b_anchor = finite(lp_scores(b_max_own, scale, SCALE_IN, SCORES, NATIVE))

    # [ROWS, SIZE_V]
    b_sum_pv = tl.full((ROWS, SIZE_V), 0.0, tl.float32)
    # [ROWS]
    b_others = tl.full((ROWS,), 0.0, tl.float32)
    b_own_sum = tl.full((ROWS,), 0.0, tl.float32)
    b_excess = tl.full((ROWS,), 0.0, tl.float32)
    b_lse = tl.full((ROWS,), 0.0, tl.float32)
    b_dp_top = tl.full((ROWS,), 0.0, tl.float32)
    if DELTA:
        # [ROWS, SIZE_V]
        b_do = load_rows(p_do + i_head * num_queries * value_size, o_row, num_queries, value_size, SIZE_V)
        b_v_top = load_rows(p_v, b_top, num_keys, value_size, SIZE_V)
        b_dp_top = tl.sum(b_do.to(tl.float32) * b_v_top.to(tl.float32), 1)
        b_lse = finite(tl.load(p_lse_lp + o_x, mask=m_row, other=0.0))
    for i_key in range(start, end, KEYS):
        # [KEYS]
        o_key = i_key + tl.arange(0, KEYS)
        b_k = load_rows(p_k, o_key, num_keys, head_size, SIZE)
        # [ROWS, KEYS]
        b_raw, b_own = score_products(
            b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
            CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE,
        )  # fmt: skip
        b_is_top = o_key[None, :] == b_top[:, None]
        b_p = tl.where(b_is_top, 0.0, tl.exp2((b_raw - b_max[:, None]) * (scale * LOG2_E)))
        b_others += tl.sum(b_p, 1)
        # [KEYS, SIZE_V]
        b_v = load_rows(p_v, o_key, num_keys, value_size, SIZE_V)
        b_sum_pv = add_product(b_sum_pv, b_p, b_v, IEEE, NATIVE)
        if OWN_P:
            # [ROWS, KEYS]
            b_s = lp_scores(b_own, scale, SCALE_IN, SCORES, NATIVE)
            if P_SAVED:
                b_own_p = lp_exponential(b_s, b_anchor[:, None], unit, SHIFTED, EXP2, NATIVE)
            else:
                b_own_p = recipe_probability(b_s, b_lse[:, None], unit, EXP2)
            b_difference = tl.where(b_is_top, 0.0, product(b_do, tl.trans(b_v), IEEE) - b_dp_top[:, None])
            b_own_sum += tl.sum(b_own_p, 1)
            b_excess += tl.sum(b_own_p * b_difference, 1)

    # Loaded again, so that the loop has the registers.
    b_v_top = load_rows(p_v, b_top, num_keys, value_size, SIZE_V).to(tl.float32)
    b_o_minus_top = (b_sum_pv - b_others[:, None] * b_v_top) / (1.0 + b_others)[:, None]
    p_head = i_head * num_queries * value_size
    store_rows(p_o_hp + p_head, b_v_top + b_o_minus_top, o_row, num_queries, value_size, SIZE_V)
    b_o_lp = load_rows(p_o_lp + p_head, o_row, num_queries, value_size, SIZE_V).to(tl.float32)
    b_lp_minus_top = b_o_lp - b_v_top
    if O_ERR:
        store_rows(p_o_err + p_head, b_lp_minus_top - b_o_minus_top, o_row, num_queries, value_size, SIZE_V)
    m_equal = (b_lp_minus_top == 0.0) & (tl.arange(0, SIZE_V) < value_size)[None, :]
    b_equal = tl.sum(m_equal.to(tl.int32), 1)
    tl.store(p_swamped + o_x, (b_equal * 10 > value_size * SWAMPED_TENTHS).to(tl.uint8), mask=m_row)
    tl.store(p_top + o_x, b_top, mask=m_row)
    if DELTA:
        b_do = load_rows(p_do + i_head * num_queries * value_size, o_row, num_queries, value_size, SIZE_V)
        b_hp_offset = tl.sum(b_do.to(tl.float32) * b_o_minus_top, 1)
        if PLAIN_DELTA:
            # The digits that delta itself has lost.
            b_lp_offset = tl.sum(b_do.to(tl.float32) * b_lp_minus_top, 1)
        else:
            b_lp_offset = tl.load(p_delta_lp + o_x, mask=m_row, other=0.0) - b_dp_top
        b_consistent = b_hp_offset
        if OWN_P:
            b_consistent = b_excess / tl.where(b_own_sum == 0.0, 1.0, b_own_sum)
        tl.store(p_delta_hp + o_x, b_dp_top + b_hp_offset, mask=m_row)
        tl.store(p_delta_err + o_x, b_lp_offset - b_hp_offset, mask=m_row)
        tl.store(p_delta_consistent + o_x, b_dp_top + b_consistent, mask=m_row)
        p_x = p_offsets + o_x
        tl.store(p_x, b_dp_top, mask=m_row)
        tl.store(p_x + plane, b_hp_offset, mask=m_row)
        tl.store(p_x + plane + plane, b_consistent, mask=m_row)


def anchor_rows(
    inputs: FusedInputs,
    recipe: FusedRecipe,
    forward: FusedForward,
    o_err: torch.Tensor | None,
    rows: torch.Tensor,
    numbers: torch.Tensor,
    top: torch.Tensor,
    offsets: torch.Tensor,
    swamped: torch.Tensor,
) -> None:
    """Overwrites the listed rows of what the forward pass left, and writes what `RowCounts` has of them, in place.

    Args:
        inputs: of the call.
        recipe: its constants.
        forward: of the same call.
        o_err: FP32 [H, N, E], O_lp - O_hp, or None.
        rows: int32 [H, N], the rows of each head, in order.
        numbers: int32 [H], how many of them count.
        top: int32 [H, N].
        offsets: FP32 [3, H, N]: dO . v_top, dO . (O_hp - v_top), and the same for the recipe's backward P.
        swamped: uint8 [H, N].
    """
    heads, num_queries, head_size = inputs.q.shape
    value_size = inputs.v.shape[-1]
    do, unused = inputs.do, forward.row_sum_hp
    has_delta = do is not None and forward.delta_lp is not None
    size, size_v = padded_size(head_size), padded_size(value_size)
    block_rows, block_keys = (32, 32) if inputs.ieee else (64, 64 if max(size, size_v) <= 64 else 32)
    _anchor_kernel[(heads * triton.cdiv(num_queries, block_rows),)](
        **operand_arguments(inputs),
        p_v=inputs.v,
        p_do=unused if do is None else do,
        p_rows=rows,
        p_number=numbers,
        p_o_lp=readable(forward.o_lp),
        p_lse_lp=forward.lse_lp,
        p_delta_lp=unused if forward.delta_lp is None else forward.delta_lp,
        p_o_hp=forward.o_hp,
        p_o_err=unused if o_err is None else o_err,
        p_delta_hp=unused if forward.delta_hp is None else forward.delta_hp,
        p_delta_err=unused if forward.delta_err is None else forward.delta_err,
        p_delta_consistent=unused if forward.delta_consistent is None else forward.delta_consistent,
        p_top=top,
        p_offsets=offsets,
        p_swamped=swamped,
        value_size=value_size,
        unit=score_unit(inputs, recipe),
        plane=heads * num_queries,
        **operand_constants(inputs, recipe),
        P_SAVED=recipe.p_saved,
        OWN_P=has_delta and not recipe.same_p,
        PLAIN_DELTA=not (recipe.delta_from_dp or recipe.delta_products or recipe.delta),
        DELTA=has_delta,
        O_ERR=o_err is not None,
        ROWS=block_rows,
        KEYS=block_keys,
        SIZE=size,
        SIZE_V=size_v,
        num_warps=8 if size_v > 128 else 4,
        num_stages=pipeline_stages(max(size, size_v)),
    )
