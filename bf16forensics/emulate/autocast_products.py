"""Matrix products of BF16 tensors as tensor cores form them: FP32 sums of exact products, rounded once to BF16.

The products run in FP32 on the CPU, forward and backward; torch's own BF16 products on a CPU are slower and, depending
on the machine, accumulate otherwise. Each function follows the steps of its namesake in aten/src/ATen/native of PyTorch
(Linear.cpp, LinearAlgebra.cpp, cuda/Blas.cpp) as far as they decide where a value is rounded. A bias vector is added in
FP32 before the rounding, in the epilogue of cuBLASLt; to a whole matrix the product is added after it rounded (read off
an H200, torch 2.11: 99.998 % of the elements of baddbmm, all of addmm).

Operands are BF16 already; argument names are those of torch, so that calls by keyword work.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bf16forensics.errors import InputError


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a.float(), b.float())


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients by a and b, which are saved and the last two operands of a Function; each rounded once."""
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[-2:]
    return (
        _multiplied(gradient, b.mT).bfloat16() if needs_a else None,
        _multiplied(a.mT, gradient).bfloat16() if needs_b else None,
    )


class _Product(torch.autograd.Function):
    """[..., n, k] times [..., k, m], leading sizes equal."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _multiplied(a, b).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(ctx, gradients[0])


class _BiasedProduct(torch.autograd.Function):
    """beta * bias + alpha * (a times b); the bias broadcasts. One rounding; `apart` rounds the product before."""

    @staticmethod
    def forward(
        ctx: Any, beta: float, alpha: float, apart: bool, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.beta, ctx.alpha, ctx.bias_shape = beta, alpha, bias.shape
        total = _multiplied(a, b)
        if alpha != 1:
            total *= alpha
        if apart:
            total = total.bfloat16().float()
        if beta != 0:
            total += bias.float() if beta == 1 else bias.float() * beta
        return total.bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A factor other than 1 multiplies a rounded product: autograd's formulas apply it in an operation of its own.
        parts = [part if part is None or ctx.alpha == 1 else part * ctx.alpha for part in _gradients(ctx, gradients[0])]
        of_bias = None
        if ctx.needs_input_grad[3]:
            scaled = gradients[0] if ctx.beta == 1 else gradients[0] * ctx.beta
            of_bias = scaled.float().sum_to_size(ctx.bias_shape).bfloat16()
        return None, None, None, of_bias, *parts


def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """torch.matmul.

    Where one operand is a matrix or a vector, the other's leading dimensions become rows of one product; otherwise
    leading dimensions broadcast, and the gradient of a broadcast operand is a BF16 sum of rounded products.
    """
    if other.dim() == 1:
        return matmul(input, other[:, None]).squeeze(-1)
    if input.dim() == 1:
        return matmul(input[None], other).squeeze(-2)
    if other.dim() == 2:
        rows = input.reshape(-1, input.shape[-1])
        return _Product.apply(rows, other).reshape(*input.shape[:-1], other.shape[-1])
    if input.dim() == 2:
        return matmul(other.mT, input.mT).mT
    leading = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    a, b = (t.expand(*leading, *t.shape[-2:]) for t in (input, other))
    product: torch.Tensor = _Product.apply(a, b)
    return product


def mm(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """torch.mm."""
    product: torch.Tensor = _Product.apply(input, mat2)
    return product


def bmm(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """torch.bmm."""
    product: torch.Tensor = _Product.apply(input, mat2)
    return product


def mv(input: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """torch.mv."""
    return mm(input, vec[:, None])[:, 0]


def addmm(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """torch.addmm."""
    whole = input.shape == (mat1.shape[0], mat2.shape[1])
    product: torch.Tensor = _BiasedProduct.apply(beta, alpha, whole, input, mat1, mat2)
    return product


def addmv(
    input: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """torch.addmv."""
    column = input if input.dim() == 0 else input[:, None]
    product: torch.Tensor = _BiasedProduct.apply(beta, alpha, False, column, mat, vec[:, None])
    return product[:, 0]


def baddbmm(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """torch.baddbmm."""
    product: torch.Tensor = _BiasedProduct.apply(beta, alpha, True, input, batch1, batch2)
    return product


def addbmm(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """torch.addbmm: one product after the other is added, so that the sum rounds after each."""
    total = input
    for index, (a, b) in enumerate(zip(batch1, batch2, strict=True)):
        total = addmm(total, a, b, beta=beta if index == 0 else 1, alpha=alpha)
    return total


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch.nn.functional.linear.

    A bias is part of the product, except where the input is neither a matrix nor contiguous: then the product rounds,
    and so does the sum.
    """
    if bias is None:
        return matmul(input, weight.mT)
    if input.dim() == 2 or input.is_contiguous():
        rows = input.reshape(-1, input.shape[-1])
        return addmm(bias, rows, weight.mT).reshape(*input.shape[:-1], weight.shape[0])
    return matmul(input, weight.mT) + bias


def einsum(equation: str, *operands: Any) -> torch.Tensor:
    """torch.einsum of two operands, in letters.

    Raises:
        InputError: an equation whose roundings depend on the order of several steps: more than two operands, a letter
            twice in one operand, a letter summed in one operand alone, a size of 1 that broadcasts.
    """
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        operands = tuple(operands[0])
    first, second, result = _letters(equation, operands)
    if all(letter in result for letter in first + second):
        # Nothing is summed: an elementwise product.
        return _aligned(operands[0], first, result) * _aligned(operands[1], second, result)
    product: torch.Tensor = _Einsum.apply(first, second, result, *operands)
    return product


class _Einsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: str, second: str, result: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.letters = first, second, result
        return torch.einsum(f"{first},{second}->{result}", a.float(), b.float()).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        first, second, result = ctx.letters
        gradient = gradients[0].float()
        needs_a, needs_b = ctx.needs_input_grad[-2:]
        return (
            None, None, None,
            torch.einsum(f"{result},{second}->{first}", gradient, b.float()).bfloat16() if needs_a else None,
            torch.einsum(f"{result},{first}->{second}", gradient, a.float()).bfloat16() if needs_b else None,
        )  # fmt: skip


def _letters(equation: Any, operands: tuple[Any, ...]) -> tuple[str, str, str]:
    """The letters of two operands and of the result, an ellipsis written out."""
    refusal = InputError(
        f"amp-bf16 does not emulate torch.einsum of {equation!r} on these shapes: its roundings depend on the order of "
        "several steps; use --activations fp32"
    )
    if not isinstance(equation, str):
        raise refusal
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not len(terms) == len(operands) == 2:
        raise refusal
    unused = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
    free = "".join(unused[: max(t.dim() - len(s.replace("...", "")) for t, s in zip(operands, terms, strict=True))])
    if not arrow:
        seen = sorted(inputs.replace(",", "").replace(".", ""))
        result = "..." + "".join(letter for letter in seen if seen.count(letter) == 1)
    first, second, result = (term.replace("...", free) for term in (*terms, result))
    sizes: dict[str, int] = {}
    for term, operand in zip((first, second), operands, strict=True):
        if len(term) != operand.dim() or len(set(term)) != len(term):
            raise refusal
        for letter, size in zip(term, operand.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise refusal
    alone = set(first) ^ set(second)
    if not alone <= set(result) or not set(result) <= set(sizes):
        raise refusal
    return first, second, result


def _aligned(operand: torch.Tensor, letters: str, result: str) -> torch.Tensor:
    """The operand with one dimension a letter of the result, size 1 where it lacks the letter."""
    present = [letter for letter in result if letter in letters]
    ordered = operand.permute([letters.index(letter) for letter in present])
    return ordered[tuple(slice(None) if letter in letters else None for letter in result)]
