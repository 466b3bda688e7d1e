"""The part of the observation that needs X: its cosines and signs, its largest columns, and the whole matrices.

Shapes: H query heads, N queries, D head size, C width of X, P pairs.
"""

from dataclasses import dataclass

import numpy as np
import torch

from bf16forensics.attention.dual import ELEMENTS_PER_BLOCK
from bf16forensics.evidence.gradient import weight_gradient
from bf16forensics.evidence.observe_pairs import (
    PairValues,
    drawn_cosines,
    equal_signs,
    lengths,
    next_cosines,
    pair_values,
    sign_products,
)

#: Tokens of X worked on at once.
_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """PK of one record and its cosines."""

    #: float64 [H, N, D], 0 outside `rows`; and their lengths [H, N].
    vectors: torch.Tensor
    norms: torch.Tensor
    #: bool [H, N] rows that take part.
    rows: torch.Tensor
    #: float64 [H, N - 1] cosine of each row with the next, and bool: both take part.
    next: torch.Tensor
    next_rows: torch.Tensor
    #: float64 [H, P] cosine of each drawn pair, and bool: both take part.
    drawn: torch.Tensor
    drawn_rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class InputValues:
    """What needs X, of one sequence."""

    #: One row each: cosine of X, and share of equal signs.
    next: PairValues
    drawn: PairValues
    signs_next: PairValues
    signs_drawn: PairValues
    #: [C] sum of |X| (float64), tokens above and below zero (int64); and the number of tokens.
    absolute: np.ndarray
    positive: np.ndarray
    negative: np.ndarray
    tokens: int
    #: [H] cosine of the whole matrices.
    matrix_next: PairValues
    matrix_drawn: PairValues
    #: [H, C] sum of the column-wise cosine over neighbours (float64), and pairs for which it is defined (int64).
    column_sum: np.ndarray
    column_pairs: np.ndarray
    #: float64 [H] numerator and denominator of the coherence.
    coherent: np.ndarray
    weight: np.ndarray


def input_values(
    x: torch.Tensor, carriers: Carriers, seen: torch.Tensor, pairs: tuple[torch.Tensor, torch.Tensor], keep: int
) -> InputValues:
    """Compares X and the whole matrices between tokens.

    Args:
        x: [N, C] input of the query projection, finite.
        carriers: PK of the same record.
        seen: bool [N], tokens that take part in any head.
        pairs: positions of the drawn pairs.
        keep: values to keep for a median.
    """
    norms = lengths(x)[None]
    next_, drawn = next_cosines(x[None], norms), drawn_cosines(x[None], norms, pairs)
    both = (seen[1:] & seen[:-1])[None]
    drawn_both = (seen[pairs[0]] & seen[pairs[1]])[None]
    signs_next, column_sum, column_pairs = _columns(x, carriers)
    coherent, weight = _coherence(x, norms[0], carriers)
    taken = x[seen]
    return InputValues(
        next=pair_values(next_, both, keep),
        drawn=pair_values(drawn, drawn_both, keep),
        signs_next=pair_values(signs_next, both, keep),
        signs_drawn=pair_values(equal_signs(sign_products(x, *pairs))[None], drawn_both, keep),
        absolute=taken.abs().sum(0, dtype=torch.float64).cpu().numpy(),
        positive=(taken > 0).sum(0).cpu().numpy(),
        negative=(taken < 0).sum(0).cpu().numpy(),
        tokens=len(taken),
        matrix_next=pair_values(carriers.next * next_, carriers.next_rows, keep),
        matrix_drawn=pair_values(carriers.drawn * drawn, carriers.drawn_rows, keep),
        column_sum=column_sum.cpu().numpy(),
        column_pairs=column_pairs.long().cpu().numpy(),
        coherent=coherent.cpu().numpy(),
        weight=weight.cpu().numpy(),
    )


def _columns(x: torch.Tensor, carriers: Carriers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Share of equal signs between neighbours [1, N - 1]; sum and number of the column-wise cosines, float64 [H, C]."""
    defined = (carriers.next_rows & torch.isfinite(carriers.next)).double()
    cosines = torch.where(defined > 0, carriers.next, 0.0)
    heads, count = cosines.shape
    total, number = x.new_zeros((2, heads, x.shape[1]), dtype=torch.float64)
    signs = x.new_zeros(count, dtype=torch.float64)
    for start in range(0, count, _TOKENS):
        end = min(start + _TOKENS, count)
        first = torch.arange(start, end, device=x.device)
        products = sign_products(x, first, first + 1)
        total += cosines[:, start:end] @ products
        number += defined[:, start:end] @ products.abs()
        signs[start:end] = equal_signs(products)
    return signs[None], total, number


def _coherence(x: torch.Tensor, x_norms: torch.Tensor, carriers: Carriers) -> tuple[torch.Tensor, torch.Tensor]:
    """|sum of the matrices|^2 - sum w^2 and (sum w)^2 - sum w^2, float64 [H]; w = |PK||X|."""
    heads, queries, size = carriers.vectors.shape
    width = x.shape[1]
    by_pairs = queries * (width + heads * size) < width * heads * size
    total = _square_by_pairs(x, carriers.vectors) if by_pairs else _square_of_sum(x, carriers.vectors)
    weights = carriers.norms * x_norms
    own = weights.square().sum(1)
    return total - own, weights.sum(1).square() - own


def _square_of_sum(x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """|sum of the matrices|^2, float64 [H], from the sum itself."""
    heads, queries, size = vectors.shape
    total = torch.zeros(heads, size, x.shape[1], device=x.device)
    for start in range(0, queries, _TOKENS):
        tokens = slice(start, start + _TOKENS)
        total += weight_gradient(vectors[:, tokens].float(), x[tokens].float())
    return total.double().square().sum((1, 2))


def _square_by_pairs(x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The same as a sum over pairs of tokens of (PK . PK')(X . X'): cheaper where tokens are few."""
    heads, queries, _ = vectors.shape
    x, vectors = x.float(), vectors.float()
    total = torch.zeros(heads, dtype=torch.float64, device=x.device)
    at_once = max(1, ELEMENTS_PER_BLOCK // (heads * max(queries, 1)))
    for start in range(0, queries, at_once):
        tokens = slice(start, start + at_once)
        products = (vectors[:, tokens] @ vectors.transpose(1, 2)).mul_(x[tokens] @ x.T)
        total += products.sum((1, 2), dtype=torch.float64)
    return total
