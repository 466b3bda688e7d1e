"""Rounding to BF16 inside a kernel, the same on hardware and in Triton's interpreter.

Kernels here never round by `.to(tl.bfloat16)`: the interpreter truncates there. They round on the bits, after which
that cast is exact. Any device that Triton compiles for; integer arithmetic only, so the result is bitwise
reproducible and does not depend on flushing of subnormals.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def round_to_bf16_bits(b_x):
    """Round an FP32 block to the nearest BF16 value, ties to even; the result is FP32.

    NaN stays NaN, infinities and signed zeros stay, subnormals are kept, overflow gives infinity.
    """
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_odd = (b_bits >> 16) & 1
    # A carry runs on from the fraction into the exponent, up to infinity.
    b_rounded = (b_bits + 0x7FFF + b_odd) & 0xFFFF0000
    # The same carry would turn some NaNs into infinity, or into a number of the other sign.
    b_is_nan = (b_bits & 0x7FFFFFFF) > 0x7F800000
    b_quiet = (b_bits | 0x00400000) & 0xFFFF0000
    return tl.where(b_is_nan, b_quiet, b_rounded).to(tl.float32, bitcast=True)


@triton.jit
def split_bf16(b_x):
    """Split an FP32 block into a BF16 value and the BF16 rounding of what it leaves; both are FP32.

    high + low differs from x by at most 2**-17 |x| while the low term stays normal in BF16. NaN and infinity give a
    NaN low term, so that a product over both terms cannot look finite.
    """
    b_high = round_to_bf16_bits(b_x)
    b_low = round_to_bf16_bits(b_x - b_high)
    return b_high, b_low


@triton.jit
def _round_bf16_kernel(p_x, p_out, num_elements, BLOCK: tl.constexpr):
    i_block = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_x = i_block * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < num_elements
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
    tl.store(p_out + o_x, round_to_bf16_bits(b_x), mask=m_x)


@triton.jit
def _split_bf16_kernel(p_x, p_high, p_low, num_elements, BLOCK: tl.constexpr):
    i_block = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_x = i_block * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < num_elements
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
    # [BLOCK]
    b_high, b_low = split_bf16(b_x)
    tl.store(p_high + o_x, b_high, mask=m_x)
    tl.store(p_low + o_x, b_low, mask=m_x)


_BLOCK = 4096


def round_bf16(tensor: torch.Tensor) -> torch.Tensor:
    """Round an FP32 tensor to BF16 values through `round_to_bf16_bits`.

    Args:
        tensor: Any shape, FP32, contiguous; on a GPU, or on the CPU under Triton's interpreter.

    Returns:
        Same shape, FP32, holding BF16 values. Bitwise reproducible.

    Raises:
        ValueError: another dtype, or not contiguous.
    """
    _check(tensor)
    out = torch.empty_like(tensor)
    if tensor.numel():
        grid = (triton.cdiv(tensor.numel(), _BLOCK),)
        _round_bf16_kernel[grid](tensor, out, tensor.numel(), BLOCK=_BLOCK)
    return out


def split_bf16_terms(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an FP32 tensor into two BF16 terms through `split_bf16`.

    Args:
        tensor: Any shape, FP32, contiguous; on a GPU, or on the CPU under Triton's interpreter.

    Returns:
        (high, low): same shape, FP32, holding BF16 values. Bitwise reproducible.

    Raises:
        ValueError: another dtype, or not contiguous.
    """
    _check(tensor)
    high, low = torch.empty_like(tensor), torch.empty_like(tensor)
    if tensor.numel():
        grid = (triton.cdiv(tensor.numel(), _BLOCK),)
        _split_bf16_kernel[grid](tensor, high, low, tensor.numel(), BLOCK=_BLOCK)
    return high, low


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous FP32 tensor, got {tensor.dtype} with strides {tensor.stride()}")
