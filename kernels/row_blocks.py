"""What the kernels that look at rows a second time have in common: which keys a block of rows sees, its products.

Rows may be any rows of a head, in ascending order; a row number of N or more stands for no row.

Shapes: N queries, M keys, D and E head sizes of q/k and v; a block has ROWS rows, KEYS keys and SIZE features, a power
of two that is at least the head size.
"""

import math

import torch
import triton
import triton.language as tl
from bf16forensics.kernels.fused_parts import LOG2_E, as_operand, product, split_bf16_operands, to_bf16, visible_pairs
from bf16forensics.kernels.fused_types import FusedInputs, FusedRecipe

#: Smallest side of a block of a product.
_SMALLEST = 16


@triton.jit
def key_range(first_row, last_row, num_queries, num_keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[start, end) of the keys that causal mask and window leave to rows first_row to last_row."""
    offset = num_keys - num_queries
    start = 0
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, last_row + offset + 1)
    if WINDOW:
        start = tl.maximum(0, first_row + offset - window + 1)
        if not CAUSAL:
            end = tl.minimum(num_keys, last_row + offset + window)
    return start, tl.maximum(end, 0)


@triton.jit
def load_features(p_x, o_row, num_rows, first_feature, size, FEATURES: tl.constexpr):
    """[ROWS, FEATURES] of a matrix [num_rows, size], from a feature on; 0 beyond it and where a row is negative."""
    # [FEATURES]
    o_feature = first_feature + tl.arange(0, FEATURES)
    m_x = ((o_row >= 0) & (o_row < num_rows))[:, None] & (o_feature < size)[None, :]
    return tl.load(p_x + o_row[:, None].to(tl.int64) * size + o_feature[None, :], mask=m_x, other=0.0)


@triton.jit
def load_rows(p_x, o_row, num_rows, size, SIZE: tl.constexpr):
    """[ROWS, SIZE] of a matrix [num_rows, size]; 0 beyond it and where a row is negative."""
    return load_features(p_x, o_row, num_rows, 0, size, SIZE)


@triton.jit
def store_features(p_x, b_x, o_row, num_rows, first_feature, size, FEATURES: tl.constexpr):
    """Writes [ROWS, FEATURES] to a matrix [num_rows, size], from a feature on, what of it lies inside."""
    # [FEATURES]
    o_feature = first_feature + tl.arange(0, FEATURES)
    m_x = (o_row < num_rows)[:, None] & (o_feature < size)[None, :]
    tl.store(p_x + o_row[:, None].to(tl.int64) * size + o_feature[None, :], b_x, mask=m_x)


@triton.jit
def store_rows(p_x, b_x, o_row, num_rows, size, SIZE: tl.constexpr):
    """Writes [ROWS, SIZE] to a matrix [num_rows, size], what of it lies inside."""
    store_features(p_x, b_x, o_row, num_rows, 0, size, SIZE)


@triton.jit
def score_products(
    b_q, b_k, o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, root,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SCALE_IN: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """Raw products q.k and the products that the recipe's scores are made of, [ROWS, KEYS]; -inf where not visible.

    The two differ only where the recipe multiplies q and k by `root` first.
    """
    b_visible = visible_pairs(
        o_row, o_key, p_q_group, p_k_group, p_keep, num_queries, num_keys, window, CAUSAL, WINDOW, GROUPS, KEEP
    )
    b_raw = tl.where(b_visible, product(b_q, tl.trans(b_k), IEEE), float("-inf"))
    if SCALE_IN == "operands":
        b_own = tl.where(b_visible, product(b_q * root, tl.trans(b_k * root), IEEE), float("-inf"))
    else:
        b_own = b_raw
    return b_raw, b_own


@triton.jit
def recipe_probability(b_s, b_lse, unit, EXP2: tl.constexpr):
    """P of the recipe's backward pass where it is recomputed: exp(S unit - lse), both broadcast; lse in nats."""
    if EXP2:
        return tl.exp2(b_s * (unit * LOG2_E) - b_lse * LOG2_E)
    else:
        return tl.exp(b_s * unit - b_lse)


@triton.jit
def add_product(b_sum, b_p, b_x, IEEE: tl.constexpr, NATIVE: tl.constexpr):
    """sum + p x in FP32 quality: p in two BF16 terms, the small one first; p [ROWS, KEYS], x [KEYS, SIZE].

    The matrix unit adds up the keys of this block and no more.
    """
    if IEEE:
        b_part = product(b_p, b_x, IEEE)
    else:
        b_high, b_low = split_bf16_operands(b_p, NATIVE)
        b_part = product(b_low, b_x, IEEE)
        b_part += product(b_high, b_x, IEEE)
    # `+` would be folded into the matrix unit's own sum, which truncates.
    return tl.fma(b_part, 1.0, b_sum)


@triton.jit
def add_rounded_product(b_sum, b_p, b_x, IEEE: tl.constexpr, NATIVE: tl.constexpr):
    """sum + bf16(p) x; where operands are multiplied in IEEE FP32, p is not rounded."""
    if IEEE:
        b_part = product(b_p, b_x, IEEE)
    else:
        b_part = product(as_operand(to_bf16(b_p, NATIVE), NATIVE), b_x, IEEE)
    return tl.fma(b_part, 1.0, b_sum)


def padded_size(size: int) -> int:
    """The features of a block that holds a head size."""
    return max(_SMALLEST, triton.next_power_of_2(size))


def pipeline_stages(size: int) -> int:
    """How many blocks of keys are under way at once: one where two fill the shared memory of many GPUs."""
    return 2 if size <= 128 else 1


def score_unit(inputs: FusedInputs, recipe: FusedRecipe) -> float:
    """The factor that turns the recipe's scores into nats."""
    return inputs.scale if recipe.scale_in == "exponent" else 1.0


def operand_arguments(inputs: FusedInputs) -> dict[str, object]:
    """The tensors and sizes that every kernel over rows and keys takes, by the names of its arguments."""
    heads, num_queries, head_size = inputs.q.shape
    groups, num_keys = inputs.k.shape[:2]
    keep = inputs.keep
    return {
        "p_q": inputs.q,
        "p_k": inputs.k,
        # A pointer that is not there is not read.
        "p_q_group": inputs.q if inputs.q_group is None else inputs.q_group,
        "p_k_group": inputs.q if inputs.k_group is None else inputs.k_group,
        "p_keep": inputs.q if keep is None else keep,
        "keep_stride": 0 if keep is None or keep.shape[0] == 1 else num_queries * num_keys,
        "num_heads": heads,
        "heads_per_group": heads // max(groups, 1),
        "num_queries": num_queries,
        "num_keys": num_keys,
        "head_size": head_size,
        "window": inputs.window,
        "scale": inputs.scale,
        "root": math.sqrt(inputs.scale),
    }


def operand_constants(inputs: FusedInputs, recipe: FusedRecipe) -> dict[str, object]:
    """The compile-time constants that every kernel over rows and keys takes, and its fixed options."""
    return {
        "CAUSAL": inputs.causal,
        "WINDOW": inputs.window > 0,
        "GROUPS": inputs.q_group is not None,
        "KEEP": inputs.keep is not None,
        "SCALE_IN": recipe.scale_in,
        "EXP2": recipe.exp2,
        "SCORES": recipe.scores,
        "SHIFTED": recipe.shifted,
        "IEEE": inputs.ieee,
        "NATIVE": inputs.q.is_cuda,
        "enable_fp_fusion": False,
    }


def readable(values: torch.Tensor) -> torch.Tensor:
    """A tensor that kernels can read: the interpreter does not take BF16."""
    return values if values.is_cuda else values.float()
