"""A second look at the few rows that need one: exact counts at the maximum, and rows anchored at their top key.

The forward pass says which rows may have a second key at their maximum, and which are saturated. These are listed head
by head on the device, without anyone waiting for how many there are; programs beyond the end of a list return at once.

Shapes: H query heads, N queries, M keys; ROWS, KEYS and SIZE of a block as in `row_blocks`.
"""

import torch
import triton
import triton.language as tl
from bf16forensics.kernels.anchored_rows import anchor_rows
from bf16forensics.kernels.fused_parts import finite, lp_exponential, lp_scores
from bf16forensics.kernels.fused_types import MOST_ONES, FusedForward, FusedInputs, FusedRecipe, RowCounts
from bf16forensics.kernels.row_blocks import (
    key_range,
    load_rows,
    operand_arguments,
    operand_constants,
    padded_size,
    pipeline_stages,
    score_products,
    score_unit,
)

#: P-bar at or above this rounds to 1 in BF16: it lies halfway between 1 - 2^-8 and 1, and 1 is even.
ROUNDS_TO_ONE = tl.constexpr(1.0 - 2.0**-9)
#: Gap in nats of a "near" key.
NEAR_NATS = tl.constexpr(1e-3)
#: Probability of the top key above which a row is anchored at it.
SATURATED = tl.constexpr(1.0 - 2.0**-8)
#: Rows of a head that are listed together.
_LISTED = 1024


@triton.jit
def _list_kernel(
    p_candidates, p_row_sum, p_counts, p_offsets, p_swamped, p_rows, p_numbers, num_heads, num_queries, plane,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Every row's results as if it needed no second look, and the lists of those that do; `plane` rows in all."""
    i_head = tl.program_id(0).to(tl.int64)
    num_several = 0
    num_saturated = 0
    for i_first in range(0, num_queries, LISTED):
        # [LISTED]
        o_row = i_first + tl.arange(0, LISTED)
        m_row = o_row < num_queries
        o_x = i_head * num_queries + o_row
        b_sum = tl.load(p_row_sum + o_x, mask=m_row, other=0.0)
        b_several = tl.load(p_candidates + o_x, mask=m_row, other=0) > 1
        # A row that sees no key has a sum of 0.
        b_seen = b_sum != 0.0
        b_saturated = m_row & b_seen & (b_sum * SATURATED < 1.0)
        # Pointers are added to, plane by plane: a multiple of `plane` may need more than 32 bits.
        p_x = p_counts + o_x
        for _ in tl.static_range(4):
            tl.store(p_x, b_seen.to(tl.int32), mask=m_row)
            p_x += plane
        tl.store(p_x, tl.full((LISTED,), -1, tl.int32), mask=m_row)
        p_x = p_offsets + o_x
        for _ in tl.static_range(3):
            tl.store(p_x, tl.full((LISTED,), 0.0, tl.float32), mask=m_row)
            p_x += plane
        tl.store(p_swamped + o_x, tl.full((LISTED,), 0, tl.uint8), mask=m_row)
        p_list = p_rows + i_head * num_queries
        o_list = num_several + tl.cumsum(b_several.to(tl.int32), 0) - 1
        tl.store(p_list + o_list, o_row, mask=b_several)
        num_several += tl.sum(b_several.to(tl.int32), 0)
        o_list = num_saturated + tl.cumsum(b_saturated.to(tl.int32), 0) - 1
        tl.store(p_list + plane + o_list, o_row, mask=b_saturated)
        num_saturated += tl.sum(b_saturated.to(tl.int32), 0)
    tl.store(p_numbers + i_head, num_several)
    tl.store(p_numbers + num_heads + i_head, num_saturated)


@triton.jit
def _count_kernel(
    p_q, p_k, p_q_group, p_k_group, p_keep, p_rows, p_numbers, p_counts, p_ones_keys,
    keep_stride, num_heads, heads_per_group, num_queries, num_keys, head_size, window, scale, root, unit,
    plane,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SCALE_IN: tl.constexpr,
    EXP2: tl.constexpr, SCORES: tl.constexpr, SHIFTED: tl.constexpr, IEEE: tl.constexpr, NATIVE: tl.constexpr,
    WITH_KEYS: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    # The first blocks of all heads come first: most programs behind them have nothing to do.
    i_head = (tl.program_id(0) % num_heads).to(tl.int64)
    i_first = tl.program_id(0) // num_heads * ROWS
    num_listed = tl.load(p_numbers + i_head)
    if i_first >= num_listed:
        return
    p_k += i_head // heads_per_group * num_keys * head_size
    p_keep += i_head * keep_stride
    # [ROWS]
    o_listed = i_first + tl.arange(0, ROWS)
    m_row = o_listed < num_listed
    o_row = tl.load(p_rows + i_head * num_queries + o_listed, mask=m_row, other=num_queries)
    first_row = tl.min(o_row, 0)
    last_row = tl.max(tl.where(m_row, o_row, -1), 0)
    start, end = key_range(first_row, last_row, num_queries, num_keys, window, CAUSAL, WINDOW)
    # [ROWS, SIZE]
    b_q = load_rows(p_q + i_head * num_queries * head_size, o_row, num_queries, head_size, SIZE)

    # The maxima of this kernel's own products: it counts right whatever the last bits of other kernels' are.
    b_max_raw = tl.full((ROWS,), float("-inf"), tl.float32)
    b_max_own = tl.full((ROWS,), float("-inf"), tl.float32)
    for i_key in range(start, end, KEYS):
        # [KEYS]
        o_key = i_key + tl.arange(0, KEYS)
        b_k = load_rows(p_k, o_key, num_keys, head_size, SIZE)
        # [ROWS, KEYS]
        b_raw, b_own = score_products(
            b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
            CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE,
        )  # fmt: skip
        b_max_raw = tl.maximum(b_max_raw, tl.max(b_raw, 1))
        b_max_own = tl.maximum(b_max_own, tl.max(b_own, 1))
    # Roundings keep the order, so the largest score is that of the largest product.
    b_anchor = finite(lp_scores(b_max_own, scale, SCALE_IN, SCORES, NATIVE))

    b_exact = tl.full((ROWS,), 0, tl.int32)
    b_rounded = tl.full((ROWS,), 0, tl.int32)
    b_near = tl.full((ROWS,), 0, tl.int32)
    b_shared = tl.full((ROWS,), 0, tl.int32)
    for i_key in range(start, end, KEYS):
        # [KEYS]
        o_key = i_key + tl.arange(0, KEYS)
        b_k = load_rows(p_k, o_key, num_keys, head_size, SIZE)
        # [ROWS, KEYS]
        b_raw, b_own = score_products(
            b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
            CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE,
        )  # fmt: skip
        b_s = lp_scores(b_own, scale, SCALE_IN, SCORES, NATIVE)
        b_p = lp_exponential(b_s, b_anchor[:, None], unit, SHIFTED, EXP2, NATIVE)
        b_exact += tl.sum((b_p == 1.0).to(tl.int32), 1)
        b_rounded += tl.sum((b_p >= ROUNDS_TO_ONE).to(tl.int32), 1)
        b_near += tl.sum(((b_anchor[:, None] - b_s) * unit <= NEAR_NATS).to(tl.int32), 1)
        b_shared += tl.sum((b_raw == b_max_raw[:, None]).to(tl.int32), 1)
    p_x = p_counts + i_head * num_queries + o_row
    tl.store(p_x, b_exact, mask=m_row)
    tl.store(p_x + plane, b_rounded, mask=m_row)
    tl.store(p_x + plane + plane, b_near, mask=m_row)
    tl.store(p_x + plane + plane + plane, b_shared, mask=m_row)

    if WITH_KEYS:
        # Only now is it known which rows have no more of them than are listed.
        b_wanted = (b_rounded > 1) & (b_rounded <= MOST)
        end = tl.where(tl.max(b_wanted.to(tl.int32), 0) > 0, end, start)
        p_row_keys = p_ones_keys + (i_head * num_queries + o_row) * MOST
        b_found = tl.full((ROWS,), 0, tl.int32)
        for i_key in range(start, end, KEYS):
            # [KEYS]
            o_key = i_key + tl.arange(0, KEYS)
            b_k = load_rows(p_k, o_key, num_keys, head_size, SIZE)
            # [ROWS, KEYS]
            b_raw, b_own = score_products(
                b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
                CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE,
            )  # fmt: skip
            b_s = lp_scores(b_own, scale, SCALE_IN, SCORES, NATIVE)
            b_p = lp_exponential(b_s, b_anchor[:, None], unit, SHIFTED, EXP2, NATIVE)
            b_one = (b_p >= ROUNDS_TO_ONE).to(tl.int32)
            o_place = b_found[:, None] + tl.cumsum(b_one, 1) - 1
            b_found += tl.sum(b_one, 1)
            o_keys = tl.broadcast_to(o_key[None, :], (ROWS, KEYS))
            tl.store(p_row_keys[:, None] + o_place, o_keys, mask=(b_one > 0) & b_wanted[:, None])


def count_and_anchor(
    inputs: FusedInputs, recipe: FusedRecipe, forward: FusedForward, *, o_err: torch.Tensor | None, with_keys: bool
) -> RowCounts:
    """Exact counts in rows with several candidates for their maximum, and saturated rows as differences from their top.

    Args:
        inputs: of the call.
        recipe: its constants.
        forward: of the same call. In rows whose top key has a probability above 1 - 2^-8, `o_hp`, `delta_hp`,
            `delta_err` and `delta_consistent` are overwritten with what the anchored form gives, in place.
        o_err: FP32 [H, N, E], O_lp - O_hp, overwritten in the same rows; None for nobody who wants it.
        with_keys: whether the keys of rows with 2 to `MOST_ONES` ones are listed.

    Returns:
        Counts against the maxima of these rows' own products, which may differ from the forward pass's in the last
        bits. Rows that see no key have counts of 0. Bitwise reproducible; nothing waits for the device.

    Reference: `count_ones` of the package's reference for the counts, `reference_rows` and `query_gradients` for the
    anchored form.
    """
    heads, num_queries, head_size = inputs.q.shape
    device = inputs.q.device
    counts = torch.empty((5, heads, num_queries), dtype=torch.int32, device=device)
    offsets = torch.empty((3, heads, num_queries), dtype=torch.float32, device=device)
    swamped = torch.empty((heads, num_queries), dtype=torch.uint8, device=device)
    ones_keys = None
    if with_keys:
        ones_keys = torch.full((heads, num_queries, MOST_ONES), -1, dtype=torch.int32, device=device)
    if heads and num_queries:
        rows = torch.empty((2, heads, num_queries), dtype=torch.int32, device=device)
        numbers = torch.empty((2, heads), dtype=torch.int32, device=device)
        _list_kernel[(heads,)](
            forward.candidates, forward.row_sum_hp, counts, offsets, swamped, rows, numbers, heads, num_queries,
            heads * num_queries, LISTED=_LISTED, num_warps=4,
        )  # fmt: skip
        size = padded_size(head_size)
        block_rows, block_keys = (32, 32) if inputs.ieee else (64, 64)
        _count_kernel[(heads * triton.cdiv(num_queries, block_rows),)](
            **operand_arguments(inputs),
            p_rows=rows,
            p_numbers=numbers,
            p_counts=counts,
            p_ones_keys=counts if ones_keys is None else ones_keys,
            unit=score_unit(inputs, recipe),
            plane=heads * num_queries,
            **operand_constants(inputs, recipe),
            WITH_KEYS=with_keys,
            MOST=MOST_ONES,
            ROWS=block_rows,
            KEYS=block_keys,
            SIZE=size,
            num_warps=4,
            num_stages=pipeline_stages(size),
        )
        anchor_rows(inputs, recipe, forward, o_err, rows[1], numbers[1], counts[4], offsets, swamped)
    return RowCounts(
        ones_fp32=counts[0],
        ones_rounded=counts[1],
        near=counts[2],
        shared=counts[3],
        top=counts[4],
        dp_top=offsets[0],
        hp_offset=offsets[1],
        consistent_offset=offsets[2],
        swamped=swamped.view(torch.bool),
        ones_keys=ones_keys,
    )
