"""What the statistics need of the gradients of all sequences: inner products and lengths, head by head.

Shapes: F heads, n sequences, D head size, C width, S recorded steps.
"""

import math
from dataclasses import dataclass

import numpy as np

from bf16forensics.evidence.gradient import SummedParts
from bf16forensics.evidence.store import GradientStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """The sequences of one recorded step."""

    step: int | None
    #: Positions among all sequences, ascending; at least one.
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGrams:
    """Inner products over sequences of one head, float64 [n, n] each."""

    hp: np.ndarray
    defect: np.ndarray
    total: np.ndarray
    #: <hp_i, defect_j> and <hp_i, total_j>.
    hp_defect: np.ndarray
    hp_total: np.ndarray

    @property
    def finite(self) -> bool:
        """Whether every inner product is finite."""
        return all(bool(np.isfinite(m).all()) for m in (self.hp, self.defect, self.total))

    def undefined(self) -> "HeadGrams":
        """The same with nothing known, for a head whose gradients overflowed."""
        unknown = np.full_like(self.hp, math.nan)
        return HeadGrams(hp=unknown, defect=unknown, total=unknown, hp_defect=unknown, hp_total=unknown)


#: Parts of the mean error whose lengths and shares are wanted.
MEAN_PARTS = ("full", "scores", "defect", "cast_ds", "cast_dq", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProducts:
    """Lengths and inner products of one head beside its Gram matrices."""

    #: |mean gradient|.
    norm: float
    #: |mean| of each of `MEAN_PARTS`, and its inner product with the mean total error.
    lengths: dict[str, float]
    along_total: dict[str, float]
    #: Sum over sequences of |gradient along the mean key|^2 times |mean key|^2, and of |gradient|^2; of the defect and
    #: of the gradient.
    flat_defect: tuple[float, float]
    flat_hp: tuple[float, float]
    #: |mean key|^2.
    key_square: float
    #: |sum of the rank-one terms of the defect|^2, with their signs and without.
    coherent: float
    coherent_direction: float
    #: Sums over rows of the lengths of these terms and of their squares.
    weight_sum: float
    weight_square_sum: float
    #: For each step |mean gradient|, |mean defect part|, |mean total error|.
    steps: tuple[tuple[float, float, float], ...]


def head_grams(store: GradientStore, head: int, num_sequences: int) -> HeadGrams:
    """Gram matrices of one head's stored gradients."""
    hp, defect, total = (store.vectors(kind, head, num_sequences) for kind in GradientStore.KINDS)
    # Gradients that overflowed make products that are not finite, which `finite` tells.
    with np.errstate(invalid="ignore", over="ignore"):
        return HeadGrams(
            hp=hp @ hp.T,
            defect=defect @ defect.T,
            total=total @ total.T,
            hp_defect=hp @ defect.T,
            hp_total=hp @ total.T,
        )


def head_products(
    store: GradientStore,
    head: int,
    num_sequences: int,
    sums: SummedParts,
    head_in_layer: int,
    key_mean: np.ndarray,
    steps: tuple[StepSpan, ...],
) -> HeadProducts:
    """Lengths and inner products of one head's stored gradients.

    Args:
        store: gradients of all heads.
        head: index of the head in the store.
        num_sequences: n, at least one.
        sums: the layer's sums of the parts that are not stored by sequence.
        head_in_layer: index of the head in `sums`.
        key_mean: [D] mean key as the head's W_Q sees it.
        steps: recorded steps to be listed.
    """
    n = num_sequences
    hp, defect, total = (store.vectors(kind, head, n) for kind in GradientStore.KINDS)
    summed = ("full", "scores", "cast_ds", "cast_dq")
    parts = {name: getattr(sums, name)[head_in_layer].reshape(-1) / n for name in summed}
    parts |= {"defect": defect.mean(0), "total": total.mean(0)}
    shape = sums.full.shape[1:]
    return HeadProducts(
        norm=float(np.linalg.norm(hp.mean(0))),
        lengths={name: float(np.linalg.norm(parts[name])) for name in MEAN_PARTS},
        along_total={name: float(parts[name] @ parts["total"]) for name in MEAN_PARTS},
        flat_defect=_flat(defect.reshape(n, *shape), key_mean),
        flat_hp=_flat(hp.reshape(n, *shape), key_mean),
        key_square=float(key_mean @ key_mean),
        coherent=float((defect.sum(0) ** 2).sum()),
        coherent_direction=float((sums.direction[head_in_layer] ** 2).sum()),
        weight_sum=float(sums.weight_sum[head_in_layer]),
        weight_square_sum=float(sums.weight_square_sum[head_in_layer]),
        steps=tuple(_step_lengths(list(span.sequences), hp, defect, total) for span in steps),
    )


def _flat(gradients: np.ndarray, key_mean: np.ndarray) -> tuple[float, float]:
    """Power of the gradients [n, D, C] along the mean key times |mean key|^2, and their power."""
    along = np.einsum("d,ndc->nc", key_mean, gradients)
    return float((along**2).sum()), float((gradients**2).sum())


def _step_lengths(
    chosen: list[int], hp: np.ndarray, defect: np.ndarray, total: np.ndarray
) -> tuple[float, float, float]:
    norm, of_defect, of_total = (float(np.linalg.norm(part[chosen].mean(0))) for part in (hp, defect, total))
    return norm, of_defect, of_total
