"""Cosines over pairs of tokens, and their statistics over sequences.

Shapes: R rows of heads (1 for X), N tokens, P pairs, F features.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from bf16forensics.evidence.observe_results import PairStatistics

#: Most pairs drawn from a sequence, and the seed they are drawn with.
PAIRS_DRAWN = 256
SEED = 0
#: Values of one head kept for a median, over all sequences together.
_KEPT = 1024
#: Tokens converted to float64 at once.
_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PairValues:
    """One quantity over the pairs of one sequence, [R] each."""

    #: int64: pairs for which it is defined, and pairs for which it is not.
    pairs: np.ndarray
    undefined: np.ndarray
    #: float64: sum, smallest (inf without a pair), largest (-inf without a pair).
    total: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray
    #: float32 [R, V] evenly spaced values, NaN where not defined.
    kept: np.ndarray


def kept_values(num_sequences: int) -> int:
    """Values of a sequence to keep for a median, so that a run keeps about 1,024 in all; at least one."""
    return max(1, _KEPT // max(num_sequences, 1))


def draw_pairs(tokens: torch.Tensor, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of different tokens: all where there are at most 256, else 256 drawn by a seed and the sequence.

    Args:
        tokens: bool [N], tokens that may be drawn.
        sequence: number of the sequence, which with the seed decides about the pairs.

    Returns:
        int64 [P] positions of the first and of the second token, on the device of `tokens`; none with fewer than two.
    """
    positions = tokens.nonzero()[:, 0]
    count = len(positions)
    if count * (count - 1) // 2 <= PAIRS_DRAWN:
        first, second = torch.triu_indices(count, count, 1)
    else:
        generator = np.random.Generator(np.random.PCG64([SEED, sequence]))
        first = torch.from_numpy(generator.integers(0, count, PAIRS_DRAWN))
        second = torch.from_numpy(generator.integers(0, count - 1, PAIRS_DRAWN))
        second = second + (second >= first)
    return positions[first.to(positions.device)], positions[second.to(positions.device)]


def lengths(vectors: torch.Tensor) -> torch.Tensor:
    """Euclidean norms over the last axis, float64."""
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)


def next_cosines(vectors: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Cosine of each token with the one after it; NaN where a vector is zero or not finite.

    Args:
        vectors: [R, N, F], any floating dtype.
        norms: float64 [R, N] their lengths.

    Returns:
        float64 [R, N - 1].
    """
    dots = norms.new_zeros((norms.shape[0], max(norms.shape[1] - 1, 0)))
    for start in range(0, dots.shape[1], _TOKENS):
        tokens = vectors[:, start : start + _TOKENS + 1].double()
        dots[:, start : start + _TOKENS] = (tokens[:, 1:] * tokens[:, :-1]).sum(-1)
    return _cosine(dots, norms[:, 1:], norms[:, :-1])


def drawn_cosines(vectors: torch.Tensor, norms: torch.Tensor, pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cosine of each pair, float64 [R, P]; NaN where a vector is zero or not finite. Arguments as `next_cosines`."""
    first, second = pairs
    dots = (vectors[:, first].double() * vectors[:, second].double()).sum(-1)
    return _cosine(dots, norms[:, first], norms[:, second])


def sign_products(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """float64 [P, C] sign of x[first] * x[second], 0 where either is zero. x: [N, C]."""
    return torch.sign(x[first]).double() * torch.sign(x[second]).double()


def equal_signs(products: torch.Tensor) -> torch.Tensor:
    """float64 [P] share of positive ones among the products [P, C] that are not 0; NaN where all are."""
    nonzero = products.abs().sum(-1)
    return (products.sum(-1) + nonzero) / (2 * nonzero)


def _cosine(dots: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # 0 / 0 is NaN, as it should be; rounding must not lift a cosine above 1.
    return (dots / (first * second)).clamp_(-1.0, 1.0)


def pair_values(values: torch.Tensor, counted: torch.Tensor, keep: int) -> PairValues:
    """Reduces a quantity over the pairs of one sequence.

    Args:
        values: float64 [R, P], NaN where not defined.
        counted: bool [R or 1, P], pairs of which both tokens take part.
        keep: most values to keep for a median.
    """
    found = values.cpu().numpy()
    taking = np.broadcast_to(counted.cpu().numpy(), found.shape)
    defined = taking & np.isfinite(found)
    size = min(keep, found.shape[1])
    evenly = np.arange(size) * found.shape[1] // max(size, 1)
    return PairValues(
        pairs=defined.sum(1),
        undefined=(taking & ~defined).sum(1),
        total=np.where(defined, found, 0.0).sum(1),
        lowest=np.where(defined, found, math.inf).min(1, initial=math.inf),
        highest=np.where(defined, found, -math.inf).max(1, initial=-math.inf),
        kept=np.where(defined[:, evenly], found[:, evenly], math.nan).astype(np.float32),
    )


class PairSeries:
    """Statistics of one quantity over sequences, which must be added in order."""

    def __init__(self) -> None:
        """Starts empty."""
        self._all: list[PairValues] = []
        self._sum: PairValues | None = None

    def add(self, new: PairValues) -> None:
        """Adds one sequence."""
        old = self._sum
        self._all.append(new)
        if old is None:
            self._sum = new
            return
        self._sum = PairValues(
            pairs=old.pairs + new.pairs,
            undefined=old.undefined + new.undefined,
            total=old.total + new.total,
            lowest=np.minimum(old.lowest, new.lowest),
            highest=np.maximum(old.highest, new.highest),
            kept=new.kept,
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._sum is None

    def result(self, row: int) -> PairStatistics:
        """The statistics of one row."""
        found = self._sum
        if found is None or found.pairs[row] == 0:
            return undefined_pairs(0 if found is None else int(found.undefined[row]))
        kept = np.concatenate([values.kept[row] for values in self._all]).astype(np.float64)
        low, high = float(found.lowest[row]), float(found.highest[row])
        known = kept[~np.isnan(kept)]
        return PairStatistics(
            pairs=int(found.pairs[row]),
            undefined=int(found.undefined[row]),
            mean=float(found.total[row]) / int(found.pairs[row]),
            # What is kept was rounded to FP32.
            median=min(max(float(np.median(known)), low), high) if known.size else math.nan,
            minimum=low,
            maximum=high,
        )


def undefined_pairs(undefined: int = 0) -> PairStatistics:
    """Statistics without a pair."""
    nan = math.nan
    return PairStatistics(pairs=0, undefined=undefined, mean=nan, median=nan, minimum=nan, maximum=nan)
