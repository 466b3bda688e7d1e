"""The forward pass in one sweep over the keys: the recipe's product with V and the high-precision one share P-bar.

P-bar = hi + lo in two BF16 terms. hi V is what the recipe multiplies; hi V + lo V is the high-precision product. The
same kernel without a recipe (LP off) is the high-precision half of recipes whose scores are no FP32 numbers.

Shapes: N queries, M keys, D and E head sizes; blocks of ROWS queries, KEYS keys (a key tile of the recipe), SIZE and
SIZE_V features.
"""

import triton
import triton.language as tl
from bf16forensics.kernels.forward_parts import (
    DELTA_CONSISTENT,
    DELTA_ERR,
    DELTA_HP,
    DELTA_LP,
    LOWEST,
    LSE_HP,
    LSE_LP,
    MAGNITUDE,
    MAX_LP,
    MAX_RAW,
    P_ROW_SUM,
    ROW_SUM_HP,
    candidate_limit,
    chained_product,
    key_span,
    load_block,
    load_plane,
    log_or_infinite,
    may_count,
    program_rows,
    store_block,
    store_plane,
)
from bf16forensics.kernels.fused_parts import (
    LOG2_E,
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
def forward_kernel(
    p_q, p_k, p_v, p_do, p_q_group, p_k_group, p_keep, p_o_lp, p_o_hp, p_rows, p_candidates, p_carrier, p_features,
    keep_stride, num_heads, heads_per_group, num_queries, num_keys, window, scale, root,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
    LP: tl.constexpr, SCALE_IN: tl.constexpr, EXP2: tl.constexpr, P_BAR: tl.constexpr, ROW_SUM_INPUT: tl.constexpr,
    ROW_SUM: tl.constexpr, O_BAR: tl.constexpr, O: tl.constexpr, RECIPROCAL: tl.constexpr, LSE: tl.constexpr,
    DESCENDING: tl.constexpr, DELTA_FROM_DP: tl.constexpr, DELTA_PRODUCTS: tl.constexpr, DELTA: tl.constexpr,
    P_SAVED: tl.constexpr, SAME_P: tl.constexpr,
    WITH_DO: tl.constexpr, WITH_CARRIER: tl.constexpr, WITH_LOWEST: tl.constexpr, WITH_FEATURES: tl.constexpr,
    IEEE: tl.constexpr, NATIVE: tl.constexpr, HEAD: tl.constexpr, HEAD_V: tl.constexpr, SIZE: tl.constexpr,
    SIZE_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """LP off: O_lp, its log-sum-exp, rowsum(P_lp), candidates and (unless SAME_P) the consistent delta are there."""
    i_head, first_row, i_block = program_rows(num_heads, num_queries, ROWS)
    i_group = i_head // heads_per_group
    p_k += i_group * num_keys * HEAD
    p_v += i_group * num_keys * HEAD_V
    p_keep += i_head * keep_stride
    # [ROWS]
    o_row = first_row + tl.arange(0, ROWS)
    start, end, whole = key_span(
        first_row, num_queries, num_keys, window, ROWS, CAUSAL, WINDOW, OTHERS=(WINDOW or GROUPS) or KEEP
    )
    # Scores in units of `unit`, products in units of `unit_hp`.
    unit = 1.0
    if SCALE_IN == "exponent":
        unit = scale
    unit_hp = scale
    if SCALE_IN == "operands":
        unit_hp = 1.0
    # [ROWS, SIZE]
    b_q = load_block(p_q + i_head * num_queries * HEAD, first_row, num_queries, ROWS, HEAD, SIZE, True)
    # Where P-bar is one FP32 operand for both products there is no lo.
    SPLIT: tl.constexpr = not (IEEE and (not P_BAR or not LP))
    # [ROWS, SIZE_V], [ROWS, SIZE]
    b_hi_v = tl.full((ROWS, SIZE_V), 0.0, tl.float32)
    b_lo_v = tl.full((ROWS, SIZE_V), 0.0, tl.float32)
    b_pk = tl.full((ROWS, SIZE), 0.0, tl.float32)
    # [ROWS]
    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    b_max_raw = tl.full((ROWS,), float("-inf"), tl.float32)
    b_lowest = tl.full((ROWS,), float("inf"), tl.float32)
    b_sum = tl.full((ROWS,), 0.0, tl.float32)
    b_sum_lp = tl.full((ROWS,), 0.0, tl.float32)
    b_candidates = tl.full((ROWS,), 0.0, tl.float32)

    first = start // KEYS
    between = tl.maximum(whole // KEYS, first)
    last = tl.cdiv(end, KEYS)
    # Tiles with an edge in them and tiles without, in the recipe's order.
    FIRST: tl.constexpr = 1 if DESCENDING else 0
    for MASKED in tl.static_range(FIRST, 2 - 3 * FIRST, 1 - 2 * FIRST):
        begin = between if MASKED else first
        until = last if MASKED else between
        for i_visit in range(until - begin):
            first_key = (begin + i_visit) * KEYS
            if DESCENDING:
                first_key = (until - 1 - i_visit) * KEYS
            # [KEYS, SIZE], [KEYS, SIZE_V]
            b_k = load_block(p_k, first_key, num_keys, KEYS, HEAD, SIZE, MASKED)
            b_v = load_block(p_v, first_key, num_keys, KEYS, HEAD_V, SIZE_V, MASKED)
            # [ROWS, KEYS]
            if SCALE_IN == "operands":
                b_s = product(b_q * root, tl.trans(b_k * root), IEEE)
                b_raw = product(b_q, tl.trans(b_k), IEEE)
            else:
                b_s = product(b_q, tl.trans(b_k), IEEE)
                b_raw = b_s
            if MASKED:
                o_key = first_key + tl.arange(0, KEYS)
                b_visible = visible_pairs(
                    o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window,
                    CAUSAL, WINDOW, GROUPS, KEEP,
                )  # fmt: skip
                if WITH_LOWEST:
                    b_lowest = tl.minimum(b_lowest, tl.min(tl.where(b_visible, b_raw, float("inf")), 1))
                b_s = tl.where(b_visible, b_s, float("-inf"))
                b_raw = tl.where(b_visible, b_raw, float("-inf"))
            elif WITH_LOWEST:
                b_lowest = tl.minimum(b_lowest, tl.min(b_raw, 1))
            # [ROWS]. Roundings keep the order, so the largest score is that of the largest product.
            b_before = b_max
            b_max = tl.maximum(b_before, tl.max(b_s, 1))
            if SCALE_IN == "operands":
                b_max_raw = tl.maximum(b_max_raw, tl.max(b_raw, 1))
            b_limit = candidate_limit(b_max, unit_hp)
            b_candidates = tl.where(b_before >= b_limit, b_candidates, 0.0)
            b_candidates += tl.sum(may_count(b_s, b_limit[:, None], unit_hp, NATIVE), 1)
            if LP:
                b_anchor = finite(lp_scores(b_max, scale, SCALE_IN, False, NATIVE))
                b_alpha = lp_exponential(
                    lp_scores(b_before, scale, SCALE_IN, False, NATIVE), b_anchor, unit, False, EXP2, NATIVE
                )
                b_p = lp_exponential(
                    lp_scores(b_s, scale, SCALE_IN, False, NATIVE), b_anchor[:, None], unit, False, EXP2, NATIVE
                )
            else:
                b_anchor = finite(b_max)
                b_alpha = tl.exp2((b_before - b_anchor) * (unit_hp * LOG2_E))
                b_p = tl.exp2((b_s - b_anchor[:, None]) * (unit_hp * LOG2_E))
            b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
            if ROW_SUM or ROW_SUM_INPUT:
                b_tile = tl.sum(stored(b_p, ROW_SUM_INPUT, NATIVE), 1)
                b_sum_lp = stored(b_sum_lp * b_alpha + b_tile, ROW_SUM, NATIVE)
            # The chain of a tile ends in a sum of FP32 registers: the matrix unit truncates. (`+` would be folded into
            # the chain.) What lo V and P K lose that way is 2^-9 of it, or does not matter.
            if SPLIT and IEEE:
                b_hi = to_bf16(b_p, NATIVE)
                b_lo = b_p - b_hi
            elif SPLIT:
                b_hi, b_lo = split_bf16_operands(b_p, NATIVE)
            else:
                b_hi = b_p
            if SPLIT:
                b_lo_v = chained_product(b_lo_v * b_alpha[:, None], b_lo, b_v, IEEE)
            if WITH_CARRIER:
                b_pk = chained_product(b_pk * b_alpha[:, None], b_hi, b_k, IEEE)
            b_hi_v = tl.fma(b_hi_v, b_alpha[:, None], product(b_hi, b_v, IEEE))

    # [ROWS]
    m_row = o_row < num_queries
    m_seen = b_max > float("-inf")
    p_candidates += i_head * num_queries + o_row
    b_safe = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_o_hp = tl.div_rn(b_hi_v + b_lo_v, tl.broadcast_to(b_safe[:, None], (ROWS, SIZE_V)))
    p_head = i_head * num_queries * HEAD_V
    store_block(p_o_hp + p_head, b_o_hp, first_row, num_queries, ROWS, HEAD_V, SIZE_V)
    store_plane(p_rows, finite(b_max) * unit_hp + log_or_infinite(b_sum), LSE_HP, i_head, o_row, num_heads, num_queries)
    store_plane(p_rows, b_sum, ROW_SUM_HP, i_head, o_row, num_heads, num_queries)
    if SCALE_IN == "operands":
        store_plane(p_rows, b_max_raw, MAX_RAW, i_head, o_row, num_heads, num_queries)
    else:
        store_plane(p_rows, b_max, MAX_RAW, i_head, o_row, num_heads, num_queries)
    if WITH_LOWEST:
        store_plane(p_rows, b_lowest, LOWEST, i_head, o_row, num_heads, num_queries)
    if WITH_CARRIER:
        p_out = p_carrier + i_head * num_queries * HEAD
        store_block(p_out, b_pk / b_safe[:, None], first_row, num_queries, ROWS, HEAD, SIZE)
    b_candidates = tl.where(m_seen, tl.ceil(b_candidates), 0.0).to(tl.int32)
    if LP:
        if not (ROW_SUM or ROW_SUM_INPUT):
            b_sum_lp = b_sum
        b_safe_lp = tl.where(b_sum_lp == 0.0, 1.0, b_sum_lp)
        b_o_bar = b_hi_v
        if not P_BAR:
            b_o_bar += b_lo_v
        b_o_bar = stored(b_o_bar, O_BAR, NATIVE)
        # [ROWS, SIZE_V]
        if RECIPROCAL:
            b_o_lp = b_o_bar * tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), b_safe_lp)[:, None]
        else:
            b_o_lp = tl.div_rn(b_o_bar, tl.broadcast_to(b_safe_lp[:, None], (ROWS, SIZE_V)))
        b_o_lp = stored(b_o_lp, O, NATIVE)
        store_block(p_o_lp + p_head, b_o_lp, first_row, num_queries, ROWS, HEAD_V, SIZE_V)
        # [ROWS]
        b_max_lp = lp_scores(b_max, scale, SCALE_IN, False, NATIVE)
        b_lse = stored(finite(b_max_lp) * unit + log_or_infinite(b_sum_lp), LSE, NATIVE)
        if P_SAVED:
            b_p_row_sum = tl.div_rn(b_sum, b_safe_lp)
        else:
            b_p_row_sum = b_sum * recipe_probability(finite(b_max_lp), finite(b_lse), unit, EXP2)
        store_plane(p_rows, b_max_lp, MAX_LP, i_head, o_row, num_heads, num_queries)
        store_plane(p_rows, b_lse, LSE_LP, i_head, o_row, num_heads, num_queries)
        store_plane(p_rows, b_p_row_sum, P_ROW_SUM, i_head, o_row, num_heads, num_queries)
    else:
        b_candidates = tl.maximum(b_candidates, tl.load(p_candidates, mask=m_row, other=0))
    tl.store(p_candidates, b_candidates, mask=m_row)

    if WITH_DO:
        # [ROWS, SIZE_V]
        b_do = load_block(p_do + p_head, first_row, num_queries, ROWS, HEAD_V, SIZE_V, True).to(tl.float32)
        if not LP:
            b_o_lp = load_block(p_o_lp + p_head, first_row, num_queries, ROWS, HEAD_V, SIZE_V, True).to(tl.float32)
            b_p_row_sum = load_plane(p_rows, P_ROW_SUM, i_head, o_row, num_heads, num_queries)
        b_product = b_do * b_o_lp
        b_each = b_do * (b_o_lp - b_o_hp)
        # [ROWS]
        b_delta_hp = tl.sum(b_do * b_o_hp, 1)
        b_consistent = b_delta_hp
        if not SAME_P:
            b_consistent = load_plane(p_rows, DELTA_CONSISTENT, i_head, o_row, num_heads, num_queries)
        if DELTA_FROM_DP:
            b_delta_lp = b_consistent * b_p_row_sum
        else:
            b_delta_lp = tl.sum(stored(b_product, DELTA_PRODUCTS, NATIVE), 1)
        store_plane(p_rows, stored(b_delta_lp, DELTA, NATIVE), DELTA_LP, i_head, o_row, num_heads, num_queries)
        store_plane(p_rows, b_delta_hp, DELTA_HP, i_head, o_row, num_heads, num_queries)
        store_plane(p_rows, tl.sum(b_each, 1), DELTA_ERR, i_head, o_row, num_heads, num_queries)
        store_plane(p_rows, tl.sum(tl.abs(b_product), 1), MAGNITUDE, i_head, o_row, num_heads, num_queries)
        if SAME_P:
            store_plane(p_rows, b_consistent, DELTA_CONSISTENT, i_head, o_row, num_heads, num_queries)
        if WITH_FEATURES:
            # [SIZE_V]. Rows beyond the last one have a dO of 0.
            o_feature = tl.arange(0, SIZE_V)
            num_blocks = tl.cdiv(num_queries, ROWS)
            p_out = p_features + (i_head * num_blocks + i_block) * HEAD_V + o_feature
            tl.store(p_out, tl.sum(b_each, 0), mask=o_feature < HEAD_V)
