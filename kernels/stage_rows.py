"""The kernel behind dQ in stages: one P, its dS, their products with K.

A stage is a sum over keys of dS_k k with dS = P (dP - delta). In rows anchored at their top key j everything is a
difference from it: dS = P ((dP - dP_j) - (delta - dP_j)), where the first difference is exactly 0 at j.

Shapes: N queries, M keys, D and E head sizes of q/k and v; ROWS, KEYS and SIZE of a block as in `row_blocks`.
"""

import triton
import triton.language as tl
from bf16forensics.kernels.fused_parts import LOG2_E, finite, lp_exponential, lp_scores, product, stored, to_bf16
from bf16forensics.kernels.row_blocks import (
    add_product,
    add_rounded_product,
    key_range,
    load_features,
    load_rows,
    recipe_probability,
    score_products,
    store_features,
)


@triton.jit
def _own_sum(
    p_k, b_q, b_anchor, o_row, start, end, p_q_group, p_k_group, p_keep, num_queries, num_keys, head_size, window,
    scale, root, unit,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SCALE_IN: tl.constexpr,
    EXP2: tl.constexpr, SCORES: tl.constexpr, SHIFTED: tl.constexpr, IEEE: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """[ROWS]: rowsum of the recipe's P-bar."""
    b_sum = tl.full((ROWS,), 0.0, tl.float32)
    for i_key in range(start, end, KEYS):
        # [KEYS]
        o_key = i_key + tl.arange(0, KEYS)
        b_k = load_rows(p_k, o_key, num_keys, head_size, SIZE)
        # [ROWS, KEYS]
        _, b_own = score_products(
            b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
            CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE,
        )  # fmt: skip
        b_s = lp_scores(b_own, scale, SCALE_IN, SCORES, NATIVE)
        b_sum += tl.sum(lp_exponential(b_s, b_anchor[:, None], unit, SHIFTED, EXP2, NATIVE), 1)
    return b_sum


@triton.jit
def stage_kernel(
    p_q, p_k, p_q_group, p_k_group, p_keep, p_v, p_do,
    p_row_max, p_row_sum, p_row_max_lp, p_lse_lp, p_p_row_sum, p_top, p_shift, p_offset, p_lp_offset,
    p_stage, p_carrier, p_scaled_stage, p_scaled_carrier, p_cast, p_lp,
    keep_stride, num_heads, heads_per_group, num_queries, num_keys, head_size, value_size, window, scale, root, unit,
    tile_k,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SCALE_IN: tl.constexpr,
    EXP2: tl.constexpr, SCORES: tl.constexpr, SHIFTED: tl.constexpr, IEEE: tl.constexpr, NATIVE: tl.constexpr,
    P_SAVED: tl.constexpr, OWN_P: tl.constexpr, DS: tl.constexpr, DQ: tl.constexpr, BY_TILE: tl.constexpr,
    DESCENDING: tl.constexpr, SCALED: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """One block of rows and FEATURES features of dQ, which are as many as its sums leave registers for."""
    num_slices = tl.cdiv(head_size, FEATURES)
    i_head = (tl.program_id(0) // num_slices % num_heads).to(tl.int64)
    first_feature = tl.program_id(0) % num_slices * FEATURES
    # The last rows first: they see the most keys under a causal mask.
    first_row = (tl.cdiv(num_queries, ROWS) - 1 - tl.program_id(0) // num_slices // num_heads) * ROWS
    p_k += i_head // heads_per_group * num_keys * head_size
    p_v += i_head // heads_per_group * num_keys * value_size
    p_keep += i_head * keep_stride
    # [ROWS]
    o_row = first_row + tl.arange(0, ROWS)
    m_row = o_row < num_queries
    o_x = i_head * num_queries + o_row
    last_row = tl.minimum(first_row + ROWS, num_queries) - 1
    start, end = key_range(first_row, last_row, num_queries, num_keys, window, CAUSAL, WINDOW)
    # [ROWS, SIZE], [ROWS, SIZE_V]
    b_q = load_rows(p_q + i_head * num_queries * head_size, o_row, num_queries, head_size, SIZE)
    b_do = load_rows(p_do + i_head * num_queries * value_size, o_row, num_queries, value_size, SIZE_V)
    # [ROWS]
    b_top = tl.load(p_top + o_x, mask=m_row, other=-1)
    b_shift = tl.load(p_shift + o_x, mask=m_row, other=0.0)
    b_offset = tl.load(p_offset + o_x, mask=m_row, other=0.0)
    b_rho = tl.load(p_p_row_sum + o_x, mask=m_row, other=0.0)
    b_lp_offset = b_offset
    if CAST:
        b_lp_offset = tl.load(p_lp_offset + o_x, mask=m_row, other=0.0)
    # P is exp(S - anchor) times a factor of the row: exact at the maximum, however large the scores are.
    b_lse = b_offset
    if not OWN_P:
        b_anchor = finite(tl.load(p_row_max + o_x, mask=m_row, other=0.0))
        b_sum = tl.load(p_row_sum + o_x, mask=m_row, other=0.0)
        b_factor = tl.where(b_sum == 0.0, 0.0, 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum))
    elif P_SAVED:
        b_anchor = finite(tl.load(p_row_max_lp + o_x, mask=m_row, other=0.0))
        b_sum = _own_sum(
            p_k, b_q, b_anchor, o_row, start, end, p_q_group, p_k_group, p_keep, num_queries, num_keys, head_size,
            window, scale, root, unit, CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, EXP2, SCORES, SHIFTED, IEEE, NATIVE,
            ROWS, KEYS, SIZE,
        )  # fmt: skip
        b_factor = b_rho / tl.where(b_sum == 0.0, 1.0, b_sum)
    else:
        b_anchor = b_offset
        b_factor = b_rho
        b_lse = finite(tl.load(p_lse_lp + o_x, mask=m_row, other=0.0))

    # [ROWS, FEATURES]
    b_stage = tl.full((ROWS, FEATURES), 0.0, tl.float32)
    b_carrier = tl.full((ROWS, FEATURES), 0.0, tl.float32)
    b_cast = tl.full((ROWS, FEATURES), 0.0, tl.float32)
    b_lp = tl.full((ROWS, FEATURES), 0.0, tl.float32)
    # [ROWS]
    b_p_top = tl.full((ROWS,), 0.0, tl.float32)
    first_tile = 0
    num_tiles = 1
    if BY_TILE:
        first_tile = start // tile_k
        num_tiles = tl.cdiv(end, tile_k) - first_tile
    for i_tile in range(num_tiles):
        tile_start = start
        tile_end = end
        if BY_TILE:
            i_visited = first_tile + i_tile
            if DESCENDING:
                i_visited = first_tile + num_tiles - 1 - i_tile
            tile_start = tl.maximum(start, i_visited * tile_k)
            tile_end = tl.minimum(end, (i_visited + 1) * tile_k)
        b_tile = tl.full((ROWS, FEATURES), 0.0, tl.float32)
        for i_key in range(tile_start, tile_end, KEYS):
            # [KEYS]
            o_key = i_key + tl.arange(0, KEYS)
            b_k = load_rows(p_k, o_key, num_keys, head_size, SIZE)
            b_v = load_rows(p_v, o_key, num_keys, value_size, SIZE_V)
            # [KEYS, FEATURES]
            b_k_slice = b_k
            if FEATURES < SIZE:
                b_k_slice = load_features(p_k, o_key, num_keys, first_feature, head_size, FEATURES)
            # [ROWS, KEYS]
            b_raw, b_own = score_products(
                b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
                CAUSAL, WINDOW, GROUPS, KEEP, SCALE_IN, IEEE,
            )  # fmt: skip
            if not OWN_P:
                b_p = tl.exp2((b_raw - b_anchor[:, None]) * (scale * LOG2_E)) * b_factor[:, None]
            else:
                b_s = lp_scores(b_own, scale, SCALE_IN, SCORES, NATIVE)
                if P_SAVED:
                    b_p = lp_exponential(b_s, b_anchor[:, None], unit, SHIFTED, EXP2, NATIVE) * b_factor[:, None]
                else:
                    b_p = recipe_probability(b_s, b_lse[:, None], unit, EXP2)
            if BY_TILE:
                # The last block of a tile may reach into the next one.
                b_p = tl.where((o_key < tile_end)[None, :], b_p, 0.0)
            b_is_top = o_key[None, :] == b_top[:, None]
            # The products come in an order that keeps few blocks alive at once.
            # The top key's own entry, which may be all there is, does not go through a BF16 term.
            b_p_top += tl.sum(tl.where(b_is_top, b_p, 0.0), 1)
            b_carrier = add_rounded_product(b_carrier, tl.where(b_is_top, 0.0, b_p), b_k_slice, IEEE, NATIVE)
            b_difference = tl.where(b_is_top, 0.0, product(b_do, tl.trans(b_v), IEEE) - b_shift[:, None])
            if CAST:
                b_p_lp = b_p
                if not OWN_P:
                    b_p_lp = b_p * b_rho[:, None]
                b_ds = stored(b_p_lp * (b_difference - b_lp_offset[:, None]), DS, NATIVE)
                if DS:
                    b_tile = add_rounded_product(b_tile, b_ds, b_k_slice, IEEE, NATIVE)
                else:
                    b_tile = add_product(b_tile, b_ds, b_k_slice, IEEE, NATIVE)
            b_stage = add_product(b_stage, b_p * (b_difference - b_offset[:, None]), b_k_slice, IEEE, NATIVE)
        if CAST:
            if BY_TILE:
                b_tile = b_tile * scale
                b_cast += b_tile
                b_lp = to_bf16(b_lp + to_bf16(b_tile, NATIVE), NATIVE)
            else:
                b_cast = b_tile * scale

    p_head = i_head * num_queries * head_size
    b_stage = b_stage * scale
    store_features(p_stage + p_head, b_stage, o_row, num_queries, first_feature, head_size, FEATURES)
    if SCALED:
        b_stage = b_stage * b_rho[:, None]
        store_features(p_scaled_stage + p_head, b_stage, o_row, num_queries, first_feature, head_size, FEATURES)
    b_k_top = load_features(p_k, b_top, num_keys, first_feature, head_size, FEATURES).to(tl.float32)
    b_carrier = (b_carrier + b_p_top[:, None] * b_k_top) * scale
    store_features(p_carrier + p_head, b_carrier, o_row, num_queries, first_feature, head_size, FEATURES)
    if SCALED:
        b_carrier = b_carrier * b_rho[:, None]
        store_features(p_scaled_carrier + p_head, b_carrier, o_row, num_queries, first_feature, head_size, FEATURES)
    if CAST:
        store_features(p_cast + p_head, b_cast, o_row, num_queries, first_feature, head_size, FEATURES)
        if not BY_TILE:
            b_lp = stored(b_cast, DQ, NATIVE)
        store_features(p_lp + p_head, b_lp, o_row, num_queries, first_feature, head_size, FEATURES)
