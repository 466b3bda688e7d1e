"""Elementwise operations on BF16 tensors where a CPU rounds elsewhere than a GPU.

Everything else of this kind computes in FP32 and rounds once on both: tested on every BF16 number. The formulas are
those of aten/src/ATen/native/cuda of PyTorch: ActivationGeluKernel.cu, BinaryMiscBackwardOpsKernels.cu,
BinaryDivTrueKernel.cu and the generated kernels of add.
"""

import math
from typing import Any

import torch

_SQRT_HALF = math.sqrt(0.5)
_TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)


class _Gelu(torch.autograd.Function):
    """x * (1 + erf(x / sqrt 2)) / 2 in FP32. A CPU may hand this to a library with a polynomial of its own."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        wide = values.float()
        return (wide * 0.5).mul_(torch.erf(wide * _SQRT_HALF).add_(1.0)).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        wide = values.float()
        cdf = torch.erf(wide * _SQRT_HALF).add_(1.0).mul_(0.5)
        pdf = torch.exp((wide * wide).mul_(-0.5)) * (_TWO_OVER_SQRT_PI * _SQRT_HALF * 0.5)
        return (gradients[0].float() * (wide * pdf).add_(cdf)).bfloat16()


class _Erf(torch.autograd.Function):
    """erf in FP32: the vectorised BF16 one of a CPU is 0 for small operands. Autograd's formula goes back in BF16."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return torch.erf(values.float()).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        return _TWO_OVER_SQRT_PI * torch.exp(-values.pow(2)) * gradients[0]


class _Tanh(torch.autograd.Function):
    """The CUDA kernel of its gradient rounds every step to BF16; a CPU rounds once."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        result = torch.tanh(values)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return gradients[0] * (1.0 - result * result)


class _Sigmoid(torch.autograd.Function):
    """As `_Tanh`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        result = torch.sigmoid(values)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return gradients[0] * (1.0 - result) * result


def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """torch.nn.functional.gelu of a BF16 tensor."""
    if approximate != "none":
        return torch.nn.functional.gelu(input, approximate=approximate)
    result: torch.Tensor = _Gelu.apply(input)
    return result


def erf(input: torch.Tensor) -> torch.Tensor:
    """torch.erf of a BF16 tensor."""
    result: torch.Tensor = _Erf.apply(input)
    return result


def tanh(input: torch.Tensor) -> torch.Tensor:
    """torch.tanh of a BF16 tensor."""
    result: torch.Tensor = _Tanh.apply(input)
    return result


def sigmoid(input: torch.Tensor) -> torch.Tensor:
    """torch.sigmoid of a BF16 tensor."""
    result: torch.Tensor = _Sigmoid.apply(input)
    return result


def add(input: Any, other: Any, *, alpha: float = 1) -> torch.Tensor:
    """torch.add where a number takes part: it stays FP32, while a CPU rounds it to BF16 first."""
    return torch.add(_wide(input), _wide(other), alpha=alpha).bfloat16()


def sub(input: Any, other: Any, *, alpha: float = 1) -> torch.Tensor:
    """torch.sub, as `add`."""
    return torch.sub(_wide(input), _wide(other), alpha=alpha).bfloat16()


def rsub(input: Any, other: Any, *, alpha: float = 1) -> torch.Tensor:
    """torch.rsub, as `add`."""
    return torch.rsub(_wide(input), _wide(other), alpha=alpha).bfloat16()


def div(input: torch.Tensor, other: float) -> torch.Tensor:
    """torch.div by a number, BF16 or FP32: a product with its FP32 reciprocal."""
    reciprocal = 1.0 / torch.tensor(float(other), dtype=torch.float32)
    return input * reciprocal.item()


def _wide(operand: Any) -> Any:
    return operand.float() if isinstance(operand, torch.Tensor) else operand
