"""P_hp K from a known log-sum-exp: the carrier of a delta error, where the forward kernel has no registers for it."""

import triton
import triton.language as tl
from bf16forensics.kernels.forward_parts import (
    chained_product,
    key_span,
    load_block,
    program_rows,
    rounded_operand,
    store_block,
)
from bf16forensics.kernels.fused_parts import LOG2_E, finite, product, visible_pairs


@triton.jit
def carrier_kernel(
    p_q, p_k, p_q_group, p_k_group, p_keep, p_lse, p_carrier,
    keep_stride, num_heads, heads_per_group, num_queries, num_keys, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, IEEE: tl.constexpr,
    NATIVE: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """P_hp is rounded to BF16 (not with IEEE products); the matrix unit adds up all keys in one chain."""
    i_head, first_row, _ = program_rows(num_heads, num_queries, ROWS)
    p_k += i_head // heads_per_group * num_keys * HEAD
    p_keep += i_head * keep_stride
    # [ROWS]
    o_row = first_row + tl.arange(0, ROWS)
    start, end, whole = key_span(
        first_row, num_queries, num_keys, window, ROWS, CAUSAL, WINDOW, OTHERS=(WINDOW or GROUPS) or KEEP
    )
    b_lse = tl.load(p_lse + i_head * num_queries + o_row, mask=o_row < num_queries, other=0.0)
    b_lse = finite(b_lse) * LOG2_E
    factor = scale * LOG2_E
    # [ROWS, SIZE]
    b_q = load_block(p_q + i_head * num_queries * HEAD, first_row, num_queries, ROWS, HEAD, SIZE, True)
    b_carrier = tl.full((ROWS, SIZE), 0.0, tl.float32)
    first = start // KEYS
    between = tl.maximum(whole // KEYS, first)
    last = tl.cdiv(end, KEYS)
    for PHASE in tl.static_range(2):
        for i_block in range(first if PHASE == 0 else between, between if PHASE == 0 else last):
            # [KEYS, SIZE]
            b_k = load_block(p_k, i_block * KEYS, num_keys, KEYS, HEAD, SIZE, PHASE == 1)
            # [ROWS, KEYS]
            b_p = tl.exp2(product(b_q, tl.trans(b_k), IEEE) * factor - b_lse[:, None])
            if PHASE == 1:
                o_key = i_block * KEYS + tl.arange(0, KEYS)
                b_visible = visible_pairs(
                    o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window,
                    CAUSAL, WINDOW, GROUPS, KEEP,
                )  # fmt: skip
                b_p = tl.where(b_visible, b_p, 0.0)
            b_carrier = chained_product(b_carrier, rounded_operand(b_p, IEEE, NATIVE), b_k, IEEE)
    store_block(p_carrier + i_head * num_queries * HEAD, b_carrier, first_row, num_queries, ROWS, HEAD, SIZE)
