"""The recipe's forward pass where it is no by-product of the high-precision one: key tile after key tile.

Each tile is swept twice: for its maximum, then to add it up. Beside O this gives the row sum of the P of the recipe's
backward pass and the delta consistent with it.

Shapes: N queries, M keys, D and E head sizes; blocks of ROWS queries, KEYS keys, SIZE and SIZE_V features; a tile has
any number of keys.
"""

import triton
import triton.language as tl
from bf16forensics.kernels.forward_parts import (
    DELTA_CONSISTENT,
    LSE_LP,
    MAX_LP,
    P_ROW_SUM,
    candidate_limit,
    chained_product,
    key_span,
    load_block,
    log_or_infinite,
    may_count,
    program_rows,
    rounded_operand,
    store_block,
    store_plane,
)
from bf16forensics.kernels.fused_parts import (
    finite,
    lp_exponential,
    lp_scores,
    product,
    split_bf16_operands,
    stored,
    to_bf16,
    visible_pairs,
)
from bf16forensics.kernels.row_blocks import recipe_probability


@triton.jit
def _products(
    b_q, p_k, first_key, end_key, o_row, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SCALE_IN: tl.constexpr,
    IEEE: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[ROWS, KEYS] products that the scores are made of; -inf where not visible and from `end_key` on."""
    b_k = load_block(p_k, first_key, num_keys, KEYS, HEAD, SIZE, MASKED)
    if SCALE_IN == "operands":
        b_k = b_k * root
    b_raw = product(b_q, tl.trans(b_k), IEEE)
    if MASKED:
        o_key = first_key + tl.arange(0, KEYS)
        b_visible = visible_pairs(
            o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, CAUSAL, WINDOW, GROUPS, KEEP
        )
        b_raw = tl.where(b_visible & (o_key < end_key)[None, :], b_raw, float("-inf"))
    return b_raw


@triton.jit
def _rounded_product(b_p, b_v, P_BAR: tl.constexpr, IEEE: tl.constexpr, NATIVE: tl.constexpr):
    """P-bar V of one block by the recipe's operand; a P-bar that does not round is two BF16 terms."""
    if P_BAR and IEEE:
        b_part = product(to_bf16(b_p, NATIVE), b_v, IEEE)
    elif P_BAR:
        b_part = product(rounded_operand(b_p, IEEE, NATIVE), b_v, IEEE)
    elif IEEE:
        b_part = product(b_p, b_v, IEEE)
    else:
        b_hi, b_lo = split_bf16_operands(b_p, NATIVE)
        b_part = chained_product(product(b_lo, b_v, IEEE), b_hi, b_v, IEEE)
    return b_part


@triton.jit
def lp_forward_kernel(
    p_q, p_k, p_v, p_do, p_q_group, p_k_group, p_keep, p_o_lp, p_rows, p_candidates,
    keep_stride, num_heads, heads_per_group, num_queries, num_keys, window, scale, root, tile,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
    SCALE_IN: tl.constexpr, EXP2: tl.constexpr, SCORES: tl.constexpr, SHIFTED: tl.constexpr, P_BAR: tl.constexpr,
    ROW_SUM_INPUT: tl.constexpr, ROW_SUM: tl.constexpr, O_BAR: tl.constexpr, BY_TILE: tl.constexpr, O: tl.constexpr,
    RECIPROCAL: tl.constexpr, LSE: tl.constexpr, DESCENDING: tl.constexpr, P_SAVED: tl.constexpr,
    CHAIN: tl.constexpr, WITH_CONSISTENT: tl.constexpr,
    IEEE: tl.constexpr, NATIVE: tl.constexpr, HEAD: tl.constexpr, HEAD_V: tl.constexpr, SIZE: tl.constexpr,
    SIZE_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """CHAIN: the matrix unit's accumulator holds the sum (of a tile, with BY_TILE); P-bar must round."""
    i_head, first_row, _ = program_rows(num_heads, num_queries, ROWS)
    i_group = i_head // heads_per_group
    p_k += i_group * num_keys * HEAD
    p_v += i_group * num_keys * HEAD_V
    p_keep += i_head * keep_stride
    # [ROWS]
    o_row = first_row + tl.arange(0, ROWS)
    start, end, whole = key_span(
        first_row, num_queries, num_keys, window, ROWS, CAUSAL, WINDOW, OTHERS=(WINDOW or GROUPS) or KEEP
    )
    unit = 1.0
    if SCALE_IN == "exponent":
        unit = scale
    # P of the backward pass: P-bar at the last anchor, rounded as it was (FINAL); P-bar without the rounding of S - m
    # (SMOOTH); or P-bar as the forward pass has it.
    FINAL: tl.constexpr = P_SAVED and SHIFTED
    SMOOTH: tl.constexpr = SHIFTED and not P_SAVED
    # [ROWS, SIZE]
    b_q = load_block(p_q + i_head * num_queries * HEAD, first_row, num_queries, ROWS, HEAD, SIZE, True)
    if SCALE_IN == "operands":
        b_q = b_q * root
    p_head = i_head * num_queries * HEAD_V
    # [ROWS, SIZE_V]
    b_o_bar = tl.full((ROWS, SIZE_V), 0.0, tl.float32)
    if WITH_CONSISTENT:
        b_do = load_block(p_do + p_head, first_row, num_queries, ROWS, HEAD_V, SIZE_V, True)
    # [ROWS]
    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    b_sum = tl.full((ROWS,), 0.0, tl.float32)
    b_back_sum = tl.full((ROWS,), 0.0, tl.float32)
    b_back_dp = tl.full((ROWS,), 0.0, tl.float32)
    b_candidates = tl.full((ROWS,), 0.0, tl.float32)
    if FINAL:
        b_largest = b_max
        for i_key in range(start, end, KEYS):
            # [ROWS, KEYS]
            b_raw = _products(
                b_q, p_k, i_key, end, o_row, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
                CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE, HEAD, SIZE, KEYS, True,
            )  # fmt: skip
            b_largest = tl.maximum(b_largest, tl.max(b_raw, 1))
        b_final = finite(lp_scores(b_largest, scale, SCALE_IN, SCORES, NATIVE))

    num_before = start // tile
    num_tiles = tl.cdiv(end, tile) - num_before
    for i_visit in range(num_tiles):
        i_tile = num_before + i_visit
        if DESCENDING:
            i_tile = num_before + num_tiles - 1 - i_visit
        first = i_tile * tile
        # Whole blocks that no row sees are left out.
        first += tl.maximum(start - first, 0) // KEYS * KEYS
        until = tl.minimum((i_tile + 1) * tile, end)
        edge = first + tl.maximum(tl.minimum(until, whole) - first, 0) // KEYS * KEYS
        # [ROWS]
        b_before = b_max
        for PHASE in tl.static_range(2):
            for i_key in range(first if PHASE == 0 else edge, edge if PHASE == 0 else until, KEYS):
                # [ROWS, KEYS]
                b_raw = _products(
                    b_q, p_k, i_key, until, o_row, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
                    CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE, HEAD, SIZE, KEYS, PHASE == 1,
                )  # fmt: skip
                b_max = tl.maximum(b_max, tl.max(b_raw, 1))
        # Roundings keep the order, so the largest score is that of the largest product.
        b_anchor_before = lp_scores(b_before, scale, SCALE_IN, SCORES, NATIVE)
        b_new = lp_scores(b_max, scale, SCALE_IN, SCORES, NATIVE)
        b_anchor = finite(b_new)
        b_alpha = lp_exponential(b_anchor_before, b_anchor, unit, SHIFTED, EXP2, NATIVE)
        b_alpha_back = b_alpha
        if SMOOTH:
            b_alpha_back = lp_exponential(b_anchor_before, b_anchor, unit, False, EXP2, NATIVE)
        b_limit = candidate_limit(b_new, unit)
        b_candidates = tl.where(b_anchor_before >= b_limit, b_candidates, 0.0)
        if not FINAL:
            b_back_sum = b_back_sum * b_alpha_back
            b_back_dp = b_back_dp * b_alpha_back
        b_tile_sum = tl.full((ROWS,), 0.0, tl.float32)
        # [ROWS, SIZE_V]
        if BY_TILE:
            b_added = tl.full((ROWS, SIZE_V), 0.0, tl.float32)
        else:
            b_added = b_o_bar * b_alpha[:, None]
        for PHASE in tl.static_range(2):
            for i_key in range(first if PHASE == 0 else edge, edge if PHASE == 0 else until, KEYS):
                # [ROWS, KEYS]
                b_raw = _products(
                    b_q, p_k, i_key, until, o_row, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
                    CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE, HEAD, SIZE, KEYS, PHASE == 1,
                )  # fmt: skip
                # [KEYS, SIZE_V]
                b_v = load_block(p_v, i_key, num_keys, KEYS, HEAD_V, SIZE_V, PHASE == 1)
                # [ROWS, KEYS]
                b_s = lp_scores(b_raw, scale, SCALE_IN, SCORES, NATIVE)
                b_p = lp_exponential(b_s, b_anchor[:, None], unit, SHIFTED, EXP2, NATIVE)
                b_tile_sum += tl.sum(stored(b_p, ROW_SUM_INPUT, NATIVE), 1)
                b_candidates += tl.sum(may_count(b_s, b_limit[:, None], unit, NATIVE), 1)
                if CHAIN:
                    if IEEE:
                        b_operand = to_bf16(b_p, NATIVE)
                    else:
                        b_operand = rounded_operand(b_p, IEEE, NATIVE)
                    b_added = chained_product(b_added, b_operand, b_v, IEEE)
                else:
                    # `+` would be folded into the matrix unit's own sum, which truncates.
                    b_added = tl.fma(_rounded_product(b_p, b_v, P_BAR, IEEE, NATIVE), 1.0, b_added)
                if FINAL:
                    b_back = lp_exponential(b_s, b_final[:, None], unit, True, EXP2, NATIVE)
                elif SMOOTH:
                    b_back = lp_exponential(b_s, b_anchor[:, None], unit, False, EXP2, NATIVE)
                else:
                    b_back = b_p
                b_back_sum += tl.sum(b_back, 1)
                if WITH_CONSISTENT:
                    b_back_dp += tl.sum(b_back * product(b_do, tl.trans(b_v), IEEE), 1)
        b_sum = stored(b_alpha * b_sum + b_tile_sum, ROW_SUM, NATIVE)
        if BY_TILE:
            b_o_bar = to_bf16(b_o_bar * b_alpha[:, None], NATIVE)
            b_o_bar = to_bf16(b_o_bar + to_bf16(b_added, NATIVE), NATIVE)
        else:
            b_o_bar = b_added

    if not BY_TILE:
        b_o_bar = stored(b_o_bar, O_BAR, NATIVE)
    # [ROWS]
    b_safe = tl.where(b_sum == 0.0, 1.0, b_sum)
    # [ROWS, SIZE_V]
    if RECIPROCAL:
        b_o = b_o_bar * tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), b_safe)[:, None]
    else:
        b_o = tl.div_rn(b_o_bar, tl.broadcast_to(b_safe[:, None], (ROWS, SIZE_V)))
    store_block(p_o_lp + p_head, stored(b_o, O, NATIVE), first_row, num_queries, ROWS, HEAD_V, SIZE_V)
    # [ROWS]
    b_max_lp = lp_scores(b_max, scale, SCALE_IN, SCORES, NATIVE)
    b_lse = stored(finite(b_max_lp) * unit + log_or_infinite(b_sum), LSE, NATIVE)
    if P_SAVED:
        b_p_row_sum = tl.div_rn(b_back_sum, b_safe)
    else:
        b_p_row_sum = b_back_sum * recipe_probability(finite(b_max_lp), finite(b_lse), unit, EXP2)
    store_plane(p_rows, b_max_lp, MAX_LP, i_head, o_row, num_heads, num_queries)
    store_plane(p_rows, b_lse, LSE_LP, i_head, o_row, num_heads, num_queries)
    store_plane(p_rows, b_p_row_sum, P_ROW_SUM, i_head, o_row, num_heads, num_queries)
    if WITH_CONSISTENT:
        b_consistent = b_back_dp / tl.where(b_back_sum == 0.0, 1.0, b_back_sum)
        store_plane(p_rows, b_consistent, DELTA_CONSISTENT, i_head, o_row, num_heads, num_queries)
    b_candidates = tl.where(b_max > float("-inf"), tl.ceil(b_candidates), 0.0).to(tl.int32)
    tl.store(p_candidates + i_head * num_queries + o_row, b_candidates, mask=o_row < num_queries)
