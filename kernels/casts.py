"""Triton's own conversion to BF16, to be observed: no kernel here rounds by it, because the interpreter truncates."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _cast_bf16_kernel(p_x, p_out, num_elements, BLOCK: tl.constexpr):
    i_block = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_x = i_block * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < num_elements
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
    tl.store(p_out + o_x, b_x.to(tl.bfloat16), mask=m_x)


def cast_bf16(tensor: torch.Tensor) -> torch.Tensor:
    """Convert an FP32 tensor by `.to(tl.bfloat16)`: rounded on hardware, truncated by the interpreter.

    Args:
        tensor: Any shape, FP32, contiguous; on a GPU, or on the CPU under Triton's interpreter.

    Returns:
        Same shape, BF16.

    Raises:
        ValueError: another dtype, or not contiguous.
    """
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous FP32 tensor, got {tensor.dtype} with strides {tensor.stride()}")
    out = torch.empty_like(tensor, dtype=torch.bfloat16)
    if tensor.numel():
        grid = (triton.cdiv(tensor.numel(), _BLOCK),)
        _cast_bf16_kernel[grid](tensor, out, tensor.numel(), BLOCK=_BLOCK)
    return out
