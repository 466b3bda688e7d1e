"""Products over the tokens of stages of dQ with X: on the CPU by the library, on a GPU by the kernel.

Shapes: S stages of all heads, N queries, D head size, C width of X.
"""

from importlib.util import find_spec

import torch

from bf16forensics.attention.kernel_rounding import is_interpreting


def token_products(stages: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """sum over the tokens of stage[T]^T x[T] for every stage, in FP32.

    On a GPU the kernel multiplies split terms on the matrix unit. Without Triton, or where it interprets kernels, the
    library's FP32 product takes its place, which is as exact and slower. NaN and infinities spread to what they touch.

    Args:
        stages: [S, N, D] FP32, on any device.
        x: [N, C] FP32, on the same device.

    Returns:
        [S, D, C] FP32.
    """
    if stages.is_cuda and find_spec("triton") is not None and not is_interpreting():
        from bf16forensics.kernels.weight_gradient import weight_gradients

        # Triton launches on the current device.
        with torch.cuda.device_of(stages):
            return weight_gradients(stages.contiguous(), x.contiguous())
    return _by_library(stages, x)


def _by_library(stages: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    num_stages, queries, size = stages.shape
    stacked = stages.permute(0, 2, 1).reshape(num_stages * size, queries)
    return (stacked @ x).view(num_stages, size, x.shape[-1])
