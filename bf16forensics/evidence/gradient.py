"""From a dual pass to the gradient of each head's W_Q and to its error, part by part.

With alpha the scale and everything but delta the same on both sides, dW_Q(hp) - dW_Q(lp) =
alpha sum_T (delta_lp - delta_hp)[T] (P K)[T]^T X[T]. The parts below are all "lp minus hp", so the delta part enters
with a minus sign. The gradient is local: dO is given, and an error that travels through dX is not in it. Where q is
more than W_Q x (QK-norm, rotation), every term is carried back through the derivative of q first.

Shapes: H query heads, N queries, D head size, C width of X.

Reference: arXiv 2510.04212, equation 2.
"""

from dataclasses import dataclass

import numpy as np
import torch

from bf16forensics.attention.result import DeltaRows, QueryGradients
from bf16forensics.attention.token_products import token_products
from bf16forensics.capture.path import QueryPath

#: Matrices of one layer: on the CPU arrays, on any other device tensors.
Matrices = np.ndarray | torch.Tensor


def weight_gradient(dq: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW_Q = sum over T of dq[T]^T x[T] for every head, in the dtype of its operands.

    Args:
        dq: [H, N, D] gradient of the queries.
        x: [N, C] input of the projection.

    Returns:
        [H, D, C].
    """
    heads, queries, size = dq.shape
    stacked = dq.permute(0, 2, 1).reshape(heads * size, queries)
    return (stacked @ x).view(heads, size, x.shape[-1])


def delta_part(carrier: torch.Tensor, error: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """-sum over T of error[T] carrier[T]^T x[T]: what an error of delta does to dW_Q (lp minus hp).

    Args:
        carrier: [H, N, D] alpha P K.
        error: [H, N] delta_lp minus the other delta.
        x: [N, C].

    Returns:
        [H, D, C].
    """
    return weight_gradient(-carrier * error[..., None], x)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientParts:
    """dW_Q of one sequence and the parts of its error, float32 [H, D, C] each (lp minus hp).

    NumPy arrays where the record lies on the CPU. From any other device they stay there.
    """

    hp: Matrices
    #: Everything: scores + defect + cast_ds + cast_dq.
    total: Matrices
    #: delta error against full hp, carried by hp's P K.
    full: Matrices
    #: The recipe's P and dP, with a delta that is consistent with them.
    scores: Matrices
    #: delta defect, carried by the recipe's P K.
    defect: Matrices
    cast_ds: Matrices
    cast_dq: Matrices
    #: sum of |defect| carrier^T x: coherence of the directions without the signs.
    direction: Matrices
    #: float64 [H]: sums over rows of w = |defect| |carrier| |x| and of w^2.
    weight_sum: Matrices
    weight_square_sum: Matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedParts:
    """The parts of one sequence of which only the sum over the batch is wanted; fields as in `GradientParts`."""

    full: Matrices
    scores: Matrices
    cast_ds: Matrices
    cast_dq: Matrices
    direction: Matrices
    weight_sum: Matrices
    weight_square_sum: Matrices


#: Matrices of `SummedParts`.
SUMMED_MATRICES = ("full", "scores", "cast_ds", "cast_dq", "direction")


def summed_parts(parts: GradientParts, into: Matrices) -> SummedParts:
    """Copies of what is to be summed, so that the memory of the rest can be given back.

    Args:
        parts: of one layer of one sequence.
        into: float32 [5, H, D, C] to be filled with the matrices, on their device; the result's are views of it.
    """
    for target, name in zip(into, SUMMED_MATRICES, strict=True):
        target[...] = getattr(parts, name)
    sums = {name: _copy(getattr(parts, name)) for name in ("weight_sum", "weight_square_sum")}
    return SummedParts(**dict(zip(SUMMED_MATRICES, into, strict=True)), **sums)


def _copy(sums: Matrices) -> Matrices:
    return sums.clone() if isinstance(sums, torch.Tensor) else sums.copy()


def gradient_parts(
    delta: DeltaRows, dq: QueryGradients, x: torch.Tensor, path: QueryPath | None = None
) -> GradientParts:
    """The telescope hp -> consistent -> recipe's delta -> dS cast -> dQ cast, as gradients of W_Q.

    Differences are taken in float64 before the products, which then run in FP32: their relative error of 1e-6 is far
    below what the statistics resolve. `weight_gradient` in float64 is what the identities are tested with. (A dual pass
    on a GPU has no float64 stages: there the stages are FP32, and their differences have the noise of two of them.)

    Args:
        delta: delta and its errors, on the device of everything else.
        dq: dQ in stages.
        x: [N, C] input of the projection.
        path: from the projection's output to q; None where they are the same.
    """
    defect_rows = -dq.carrier_lp * delta.defect[..., None]
    with_delta = dq.consistent + defect_rows
    rows = (
        dq.hp,
        -dq.carrier_hp * delta.delta_err[..., None],
        dq.consistent - dq.hp,
        defect_rows,
        dq.cast_ds - with_delta,
        dq.lp - dq.cast_ds,
        dq.carrier_lp * delta.defect.abs()[..., None],
    )
    heads = dq.hp.shape[0]
    stages = torch.stack([part.float() for part in rows])
    lengths = torch.linalg.vector_norm(rows[-1], dim=-1, dtype=torch.float64)
    if path is not None:
        stages = path.pull_back(stages).float()
        lengths = stages[-1].double().norm(dim=-1)
    products = token_products(stages.flatten(0, 1), x.float())
    weight = lengths * torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    sums = weight.sum(1), weight.square().sum(1)
    if products.device.type == "cpu":
        return _parts(products.numpy(), heads, *(each.numpy() for each in sums))
    return _parts(products, heads, *sums)


def _parts(products: Matrices, heads: int, weight_sum: Matrices, weight_square_sum: Matrices) -> GradientParts:
    """The products [7 H, D, C] of the stages by name."""
    hp, full, scores, defect, cast_ds, cast_dq, direction = (
        products[start : start + heads] for start in range(0, len(products), heads)
    )
    return GradientParts(
        hp=hp,
        total=scores + defect + cast_ds + cast_dq,
        full=full,
        scores=scores,
        defect=defect,
        cast_ds=cast_ds,
        cast_dq=cast_dq,
        direction=direction,
        weight_sum=weight_sum,
        weight_square_sum=weight_square_sum,
    )
