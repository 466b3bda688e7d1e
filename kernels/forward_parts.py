"""What the kernels of the fused forward pass have in common: which key tiles a program visits, how it loads blocks.

Shapes: N queries, M keys; a program has ROWS consecutive query rows of one head, and blocks of KEYS keys.
"""

import triton
import triton.language as tl
from bf16forensics.kernels.fused_parts import as_operand, finite, to_bf16

#: Gaps in nats up to which a key is a candidate, and from which it is none; in between it is one in part. No P-bar that
#: rounds to 1 has a gap above 0.00196.
SURE_NATS = tl.constexpr(2.2e-3)
NEVER_NATS = tl.constexpr(3.5e-3)
#: What several roundings of the scores add to a gap, for a maximum of one nat.
GAP_NOISE = tl.constexpr(2.0**-21)


#: Planes of the rows' results, FP32 [planes, H, N].
LSE_LP = tl.constexpr(0)
LSE_HP = tl.constexpr(1)
MAX_LP = tl.constexpr(2)
MAX_RAW = tl.constexpr(3)
ROW_SUM_HP = tl.constexpr(4)
P_ROW_SUM = tl.constexpr(5)
LOWEST = tl.constexpr(6)
DELTA_LP = tl.constexpr(7)
DELTA_HP = tl.constexpr(8)
DELTA_ERR = tl.constexpr(9)
DELTA_CONSISTENT = tl.constexpr(10)
MAGNITUDE = tl.constexpr(11)


@triton.jit
def program_rows(num_heads, num_queries, ROWS: tl.constexpr):
    """Head and first row of this program. The last rows of a head come first: under a causal mask they take longest."""
    num_blocks = tl.cdiv(num_queries, ROWS)
    i_head = tl.program_id(0) // num_blocks
    i_block = num_blocks - 1 - tl.program_id(0) % num_blocks
    return i_head.to(tl.int64), i_block * ROWS, i_block


@triton.jit
def key_span(
    first_row, num_queries, num_keys, window, ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """[start, end) of the keys that rows of a program may see, and the key before which every row sees every key.

    OTHERS: there are masks beside the causal one, so that the latter is `start`.
    """
    offset = num_keys - num_queries
    last_row = tl.minimum(first_row + ROWS, num_queries) - 1
    start = 0
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, tl.maximum(last_row + offset + 1, 0))
    if WINDOW:
        start = tl.maximum(first_row + offset - window + 1, 0)
        if not CAUSAL:
            end = tl.minimum(num_keys, tl.maximum(last_row + offset + window, 0))
    start = tl.minimum(start, end)
    whole = end
    if CAUSAL:
        whole = tl.minimum(end, tl.maximum(first_row + offset + 1, 0))
    if OTHERS:
        whole = start
    return start, end, whole


@triton.jit
def load_block(
    p_x, first, num_rows, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """[ROWS, PADDED] of a matrix [num_rows, SIZE] from row `first` on; 0 beyond it. MASKED: it may end earlier.

    Offsets inside a matrix are 32-bit numbers, which leave registers for accumulators.
    """
    # [ROWS], [PADDED]
    o_row = tl.arange(0, ROWS)
    o_feature = tl.arange(0, PADDED)
    p_block = p_x + (first * SIZE + (o_row[:, None] * SIZE + o_feature[None, :]))
    if MASKED and PADDED != SIZE:
        m_x = (first + o_row < num_rows)[:, None] & (o_feature < SIZE)[None, :]
        return tl.load(p_block, mask=m_x, other=0.0)
    elif MASKED:
        m_x = tl.broadcast_to((first + o_row < num_rows)[:, None], (ROWS, PADDED))
        return tl.load(p_block, mask=m_x, other=0.0)
    elif PADDED != SIZE:
        m_x = tl.broadcast_to((o_feature < SIZE)[None, :], (ROWS, PADDED))
        return tl.load(p_block, mask=m_x, other=0.0)
    else:
        return tl.load(p_block)


@triton.jit
def store_block(p_x, b_x, first, num_rows, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Writes [ROWS, PADDED] to a matrix [num_rows, SIZE] from row `first` on, what of it lies inside."""
    # [ROWS], [PADDED]
    o_row = tl.arange(0, ROWS)
    o_feature = tl.arange(0, PADDED)
    m_x = (first + o_row < num_rows)[:, None] & (o_feature < SIZE)[None, :]
    tl.store(
        p_x + (tl.full((), 0, tl.int64) + first) * SIZE + (o_row[:, None] * SIZE + o_feature[None, :]), b_x, mask=m_x
    )


@triton.jit
def load_plane(p_rows, PLANE: tl.constexpr, i_head, o_row, num_heads, num_queries):
    """[ROWS] of one plane; 0 beyond the last row."""
    o_x = (i_head + PLANE * num_heads) * num_queries + o_row
    return tl.load(p_rows + o_x, mask=o_row < num_queries, other=0.0)


@triton.jit
def store_plane(p_rows, b_x, PLANE: tl.constexpr, i_head, o_row, num_heads, num_queries):
    """Writes [ROWS] of one plane."""
    o_x = (i_head + PLANE * num_heads) * num_queries + o_row
    tl.store(p_rows + o_x, b_x, mask=o_row < num_queries)


@triton.jit
def chained_product(b_sum, b_a, b_b, IEEE: tl.constexpr):
    """sum + a b, the sum being the matrix unit's own accumulator; operands as for `product`."""
    if IEEE:
        return tl.dot(b_a, b_b, b_sum, input_precision="ieee")
    else:
        return tl.dot(b_a, b_b, b_sum)


@triton.jit
def rounded_operand(b_p, IEEE: tl.constexpr, NATIVE: tl.constexpr):
    """The operand of a product of one BF16 term; FP32 values stay as they are where products are IEEE FP32."""
    if IEEE:
        return b_p
    else:
        return as_operand(to_bf16(b_p, NATIVE), NATIVE)


@triton.jit
def candidate_limit(b_max, unit):
    """The score up to which no key counts as 1 at a maximum; `unit` turns scores into nats. -inf where no key is."""
    return b_max - (NEVER_NATS / unit + tl.abs(b_max) * GAP_NOISE)


@triton.jit
def may_count(b_s, b_limit, unit, NATIVE: tl.constexpr):
    """1.0 for scores that may count, 0.0 for those below the limit, something in between for those in between.

    A multiplication and an addition that saturate, where a comparison would take three instructions of a slower unit.
    """
    slope = unit * (1.0 / (NEVER_NATS - SURE_NATS))
    if NATIVE:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [b_s, slope, -finite(b_limit) * slope],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        b_above = (b_s - finite(b_limit)) * slope
        return tl.minimum(tl.maximum(b_above, 0.0), 1.0)


@triton.jit
def log_or_infinite(b_sum):
    """log of a row sum, -inf where it is 0."""
    b_log = tl.log(tl.where(b_sum == 0.0, 1.0, b_sum))
    return tl.where(b_sum == 0.0, float("-inf"), b_log)
