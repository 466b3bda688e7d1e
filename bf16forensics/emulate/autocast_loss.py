"""Cross-entropy of BF16 logits as CUDA autocast computes it.

Autocast casts the operands of log_softmax to FP32 only where the call names no dtype, and cross_entropy names its
input's (aten/src/ATen/native/LossNLL.cpp). So the log-probabilities of BF16 logits are rounded to BF16, up to 0.03 for
a loss near 10, the mean over rows is FP32, and the backward pass takes its probabilities from the rounded values.
Logits that the model casts to FP32 itself, as transformers does, are not touched by this.
"""

from typing import Any

import torch
from torch.nn import functional

from bf16forensics.errors import InputError


class _LogSoftmax(torch.autograd.Function):
    """log_softmax of BF16 values, FP32 inside, BF16 out."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, dim: int) -> torch.Tensor:
        output = torch.log_softmax(logits.float(), dim).bfloat16()
        ctx.save_for_backward(output)
        ctx.dim = dim
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (output,) = ctx.saved_tensors
        gradient = gradients[0].float()
        return (gradient - output.float().exp() * gradient.sum(ctx.dim, keepdim=True)).bfloat16(), None


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of BF16 logits and class indices; FP32.

    Raises:
        InputError: class probabilities, label smoothing, or the deprecated arguments.
    """
    if target.is_floating_point() or label_smoothing or size_average is not None or reduce is not None:
        raise InputError(
            "amp-bf16 does not emulate cross_entropy of BF16 logits with class probabilities or label smoothing; "
            "use --activations fp32"
        )
    log_probabilities = _LogSoftmax.apply(input, 1 if input.dim() > 1 else 0)
    wide = None if weight is None else weight.float()
    return functional.nll_loss(log_probabilities.float(), target, wide, ignore_index=ignore_index, reduction=reduction)
