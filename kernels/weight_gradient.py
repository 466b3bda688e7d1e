"""Products of stages of dQ with X over the tokens: the gradients of W_Q of many heads, in FP32 quality.

Each stage is split into three BF16 terms in registers, X into three beforehand. A product is taken of all terms that
reach 2**-24 of it: of every term of a stage where X is BF16 already (three products), of six pairs where it is not.
Whether it is one is read from memory by the kernel, so nobody waits for the answer.
"""

import torch
import triton
import triton.language as tl
from bf16forensics.kernels.fused_parts import as_operand, product, to_bf16

#: Tokens of a block, after which the matrix unit's sum is added to one in FP32 registers; features and columns of X of
#: a program. One instruction of a Hopper GPU takes 64 features; with more columns the registers do not suffice.
_TOKENS = 64
_FEATURES = 64
_COLUMNS = 128
_WARPS = 4
_STAGES = 2


@triton.jit
def _split(b_s, NATIVE: tl.constexpr):
    """Three BF16 terms, largest first, each in FP32; what they leave is below 2**-24 of the value."""
    b_high = to_bf16(b_s, NATIVE)
    b_middle = to_bf16(b_s - b_high, NATIVE)
    b_low = to_bf16((b_s - b_high) - b_middle, NATIVE)
    return b_high, b_middle, b_low


@triton.jit
def _load_stage(p_stage, o_token, o_feature, num_tokens, num_features):
    """[FEATURES, TOKENS] of one stage, from memory that is [N, D]."""
    m_stage = (o_token[None, :] < num_tokens) & (o_feature[:, None] < num_features)
    return tl.load(p_stage + o_token[None, :] * num_features + o_feature[:, None], mask=m_stage, other=0.0)


@triton.jit
def _weight_gradient_kernel(
    p_stages, p_x, p_rest, p_out, num_tokens, num_features, num_columns, x_term_stride,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    i_columns = tl.program_id(0)
    i_features = tl.program_id(1)
    i_stage = tl.program_id(2).to(tl.int64)
    p_stage = p_stages + i_stage * num_tokens * num_features
    # [FEATURES], [COLUMNS]
    o_feature = i_features * FEATURES + tl.arange(0, FEATURES)
    o_column = i_columns * COLUMNS + tl.arange(0, COLUMNS)
    m_column = o_column < num_columns
    # [FEATURES, COLUMNS]
    b_out = tl.full((FEATURES, COLUMNS), 0.0, tl.float32)
    # The small products first. 0 tokens of them where X has one term.
    num_rest = tl.load(p_rest)
    for i_first in range(0, num_rest, TOKENS):
        # [TOKENS]
        o_token = (i_first + tl.arange(0, TOKENS)).to(tl.int64)
        m_x = (o_token[:, None] < num_rest) & m_column[None, :]
        p_block = p_x + o_token[:, None] * num_columns + o_column[None, :]
        b_high, b_middle, b_low = _split(_load_stage(p_stage, o_token, o_feature, num_tokens, num_features), NATIVE)
        # [TOKENS, COLUMNS]
        b_x_low = tl.load(p_block + x_term_stride + x_term_stride, mask=m_x, other=0.0)
        b_x_middle = tl.load(p_block + x_term_stride, mask=m_x, other=0.0)
        # [FEATURES, COLUMNS]
        b_part = product(as_operand(b_high, NATIVE), b_x_low, IEEE)
        b_part += product(as_operand(b_middle, NATIVE), b_x_middle, IEEE)
        b_part += product(as_operand(b_high, NATIVE), b_x_middle, IEEE)
        b_out = tl.fma(b_part, 1.0, b_out)
    for i_first in range(0, num_tokens, TOKENS):
        # [TOKENS]
        o_token = (i_first + tl.arange(0, TOKENS)).to(tl.int64)
        m_x = (o_token[:, None] < num_tokens) & m_column[None, :]
        # [FEATURES, TOKENS]
        b_high, b_middle, b_low = _split(_load_stage(p_stage, o_token, o_feature, num_tokens, num_features), NATIVE)
        # [TOKENS, COLUMNS]
        b_x = tl.load(p_x + o_token[:, None] * num_columns + o_column[None, :], mask=m_x, other=0.0)
        # [FEATURES, COLUMNS]
        b_part = product(as_operand(b_low, NATIVE), b_x, IEEE)
        b_part += product(as_operand(b_middle, NATIVE), b_x, IEEE)
        b_part += product(as_operand(b_high, NATIVE), b_x, IEEE)
        # `+` would be folded into the matrix unit's own sum, which truncates.
        b_out = tl.fma(b_part, 1.0, b_out)
    p_block_out = p_out + (i_stage * num_features + o_feature[:, None]) * num_columns + o_column[None, :]
    tl.store(p_block_out, b_out, mask=(o_feature[:, None] < num_features) & m_column[None, :])


def weight_gradients(stages: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """sum over the tokens of stage[T]^T x[T] for every stage.

    Non-finite entries give NaN or infinity in what they touch. Zeros where there are no tokens.

    Args:
        stages: [S, N, D] FP32, contiguous; on a GPU, or on the CPU under Triton's interpreter.
        x: [N, C] FP32 or BF16, contiguous, on the same device.

    Returns:
        [S, D, C] FP32, within about 2**-23 of sum |stage| |x|. Bitwise reproducible on one device.

    Raises:
        ValueError: other shapes or dtypes, or not contiguous.
    """
    _check(stages, x)
    num_stages, num_tokens, num_features = stages.shape
    num_columns = x.shape[1]
    is_native = stages.is_cuda
    out = torch.empty((num_stages, num_features, num_columns), dtype=torch.float32, device=stages.device)
    if not out.numel() or not num_tokens:
        return out.zero_()
    terms = _terms(x.float())
    rest = ((terms[1] != 0).any() * num_tokens).to(torch.int32)
    operands = terms.bfloat16() if is_native else terms
    grid = (triton.cdiv(num_columns, _COLUMNS), triton.cdiv(num_features, _FEATURES), num_stages)
    _weight_gradient_kernel[grid](
        stages, operands, rest, out, num_tokens, num_features, num_columns, x.numel(),
        TOKENS=_TOKENS, FEATURES=_FEATURES, COLUMNS=_COLUMNS, NATIVE=is_native, IEEE=not is_native,
        num_warps=_WARPS, num_stages=_STAGES, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _terms(x: torch.Tensor) -> torch.Tensor:
    """[3, N, C] FP32 holding BF16 values: x in three terms, largest first."""
    high = x.bfloat16().float()
    middle = (x - high).bfloat16().float()
    return torch.stack([high, middle, (x - high - middle).bfloat16().float()])


def _check(stages: torch.Tensor, x: torch.Tensor) -> None:
    if stages.dtype != torch.float32 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"expected stages in FP32 and X in FP32 or BF16, got {stages.dtype} and {x.dtype}")
    if stages.ndim != 3 or x.ndim != 2 or stages.shape[1] != x.shape[0]:
        raise ValueError(f"expected [S, N, D] and [N, C], got {tuple(stages.shape)} and {tuple(x.shape)}")
    if not stages.is_contiguous() or not x.is_contiguous():
        raise ValueError("expected contiguous stages and X")
