"""What the fused kernels have in common: roundings, products, visibility, scores and exponentials.

Kernels are launched with `enable_fp_fusion=False`: a product and a sum round separately unless `tl.fma` says so, as the
recipes have it.
"""

import triton
import triton.language as tl
from bf16forensics.kernels.rounding import round_to_bf16_bits

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def to_bf16(b_x, NATIVE: tl.constexpr):
    """The nearest BF16 value, ties to even, as FP32. NATIVE: by the hardware's conversion, two values at a time."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }
            """,
            "=f,=f,f,f", [b_x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return round_to_bf16_bits(b_x)


@triton.jit
def split_bf16_operands(b_x, NATIVE: tl.constexpr):
    """Two BF16 terms of FP32 values as operands of products: the nearest one and that of what it leaves."""
    if NATIVE:
        # Two values at a time. One block with two results is more than Triton 3.2 takes.
        b_high = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [b_x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        b_low = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 word;
            .reg .f32 first, second;
            shl.b32 word, $3, 16;
            mov.b32 first, word;
            and.b32 word, $3, 0xffff0000;
            mov.b32 second, word;
            sub.rn.f32 first, $1, first;
            sub.rn.f32 second, $2, second;
            cvt.rn.bf16x2.f32 $0, second, first;
            }
            """,
            "=r,f,f,r", [b_x, b_high], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
        return b_high, b_low
    else:
        b_high = round_to_bf16_bits(b_x)
        return b_high, round_to_bf16_bits(b_x - b_high)


@triton.jit
def stored(b_x, ROUNDS: tl.constexpr, NATIVE: tl.constexpr):
    """A value as a rounding point stores it: BF16 or FP32; the result is FP32."""
    if ROUNDS:
        return to_bf16(b_x, NATIVE)
    else:
        return b_x


@triton.jit
def as_operand(b_x, NATIVE: tl.constexpr):
    """FP32 values that BF16 can hold, as operand of a product: BF16 for the matrix unit, FP32 for the interpreter."""
    if NATIVE:
        return b_x.to(tl.bfloat16)
    else:
        return b_x


@triton.jit
def product(b_a, b_b, IEEE: tl.constexpr):
    """a b in FP32. BF16 operands go to the matrix unit, FP32 ones are multiplied in IEEE FP32."""
    if IEEE:
        return tl.dot(b_a, b_b, input_precision="ieee", out_dtype=tl.float32)
    else:
        return tl.dot(b_a, b_b, out_dtype=tl.float32)


@triton.jit
def visible_pairs(
    o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """bool [ROWS, KEYS]: which pairs are visible; keys beyond the last one and rows beyond the last one are not.

    `p_keep` points at the plane of the head.
    """
    o_last = o_row + (num_keys - num_queries)
    b_visible = (o_key[None, :] < num_keys) & (o_row[:, None] < num_queries)
    if CAUSAL:
        b_visible = b_visible & (o_key[None, :] <= o_last[:, None])
    if WINDOW:
        b_visible = b_visible & (o_key[None, :] > o_last[:, None] - window)
        if not CAUSAL:
            b_visible = b_visible & (o_key[None, :] < o_last[:, None] + window)
    if GROUPS:
        b_q_group = tl.load(p_q_group + o_row, mask=o_row < num_queries, other=-2)
        b_k_group = tl.load(p_k_group + o_key, mask=o_key < num_keys, other=-1)
        b_visible = b_visible & (b_q_group[:, None] == b_k_group[None, :])
    if KEEP:
        o_pair = o_row[:, None].to(tl.int64) * num_keys + o_key[None, :]
        b_keep = tl.load(p_keep + o_pair, mask=b_visible, other=0)
        b_visible = b_visible & (b_keep != 0)
    return b_visible


@triton.jit
def lp_scores(b_raw, scale, SCALE_IN: tl.constexpr, SCORES: tl.constexpr, NATIVE: tl.constexpr):
    """The recipe's stored scores from the raw products (of scaled operands where SCALE_IN is "operands")."""
    b_s = stored(b_raw, SCORES, NATIVE)
    if SCALE_IN == "scores":
        b_s = stored(b_s * scale, SCORES, NATIVE)
    return b_s


@triton.jit
def finite(b_max):
    """The anchor to subtract: 0 where the row has seen no key."""
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def lp_exponential(b_s, b_anchor, unit, SHIFTED: tl.constexpr, EXP2: tl.constexpr, NATIVE: tl.constexpr):
    """P-bar of the recipe: exp of (S - anchor) unit, both broadcast against each other; unit turns S into nats."""
    if EXP2 and not SHIFTED:
        return tl.exp2(b_s * (unit * LOG2_E) - b_anchor * (unit * LOG2_E))
    b_shifted = stored(b_s - b_anchor, SHIFTED, NATIVE)
    if EXP2:
        return tl.exp2(b_shifted * (unit * LOG2_E))
    elif NATIVE:
        # What `tl.exp` is, but for subnormal results, which take it three more instructions.
        return tl.exp2(b_shifted * unit * LOG2_E)
    else:
        return tl.exp(b_shifted * unit)
