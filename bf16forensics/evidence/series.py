"""A signed per-row quantity of many heads, streamed sequence by sequence into `SignedStatistics`.

Only sums, the sum of each sequence and the largest 1 % of the rows are kept, so memory does not grow with the rows.

Shapes: F heads, N rows of a sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from bf16forensics.evidence.results import ClusteredStatistics, RobustStatistics, SignedStatistics
from bf16forensics.evidence.sign_flips import UNDEFINED_SUM_TEST, SumTest
from bf16forensics.evidence.statistics import mean_and_error, student_two_sided

_TRIMMED_SHARE = 0.01
#: Points of a running sum over query positions.
_POINTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesTotals:
    """The running sums of one quantity; float64 [F] unless said otherwise."""

    #: int64 [F] rows that count.
    rows: np.ndarray
    #: Sums of the values, of their squares and of their magnitudes.
    total: np.ndarray
    square: np.ndarray
    absolute: np.ndarray
    #: int64 [F, 3] rows above, below and within the floor.
    signs: np.ndarray
    #: For each sequence, its sum.
    by_sequence: tuple[np.ndarray, ...]
    #: [F, N] sums over sequences by position.
    by_token: np.ndarray
    #: [F, K] the rows of largest magnitude, in any order.
    largest: np.ndarray


def kept_rows(max_rows: int) -> int:
    """Rows of largest magnitude that are kept apart of so many in all."""
    return max(1, math.ceil(max_rows * _TRIMMED_SHARE))


class SignedSeries:
    """Accumulates one signed quantity for a fixed set of heads."""

    def __init__(self, num_heads: int, max_rows: int) -> None:
        """Args: num_heads F; max_rows: no fewer than the rows that will ever be added, for the share kept apart."""
        self._keep = kept_rows(max_rows)
        self._largest = np.zeros((num_heads, 0))
        self._rows = np.zeros(num_heads, np.int64)
        self._sum = np.zeros(num_heads)
        self._square = np.zeros(num_heads)
        self._absolute = np.zeros(num_heads)
        self._signs = np.zeros((num_heads, 3), np.int64)
        self._by_sequence: list[np.ndarray] = []
        self._by_token = np.zeros((num_heads, 0))
        #: What all heads have in common with one another, from the first result until something is added.
        self._found: _Found | None = None

    def add(self, values: np.ndarray, rows: np.ndarray, floor: np.ndarray) -> None:
        """Adds one sequence.

        Args:
            values: [F, N] float64, 0 where `rows` is False.
            rows: [F, N] bool, rows that count.
            floor: [F, N] |value| up to which a row's sign does not count.
        """
        self._found = None
        self._rows += rows.sum(1)
        total = values.sum(1)
        self._sum += total
        self._by_sequence.append(total)
        self._square += (values**2).sum(1)
        self._absolute += np.abs(values).sum(1)
        self._signs[:, 0] += ((values > floor) & rows).sum(1)
        self._signs[:, 1] += ((values < -floor) & rows).sum(1)
        self._signs[:, 2] += ((np.abs(values) <= floor) & rows).sum(1)
        missing = values.shape[1] - self._by_token.shape[1]
        if missing > 0:
            self._by_token = np.pad(self._by_token, ((0, 0), (0, missing)))
        self._by_token[:, : values.shape[1]] += values
        pool = np.concatenate([self._largest, values], axis=1)
        keep = min(self._keep, pool.shape[1])
        order = np.argpartition(-np.abs(pool), keep - 1, axis=1)[:, :keep]
        self._largest = np.take_along_axis(pool, order, axis=1)

    def load(self, totals: SeriesTotals) -> None:
        """Takes over sums that were accumulated elsewhere, in the place of all that was added."""
        self._found = None
        self._rows, self._sum, self._square = totals.rows, totals.total, totals.square
        self._absolute, self._signs = totals.absolute, totals.signs
        self._by_sequence = list(totals.by_sequence)
        self._by_token, self._largest = totals.by_token, totals.largest

    def sequence_sums(self) -> np.ndarray:
        """float64 [F, n]: the sum of each sequence so far."""
        return np.stack(self._by_sequence, axis=1) if self._by_sequence else np.zeros((len(self._sum), 0))

    def result(
        self, head: int, test: SumTest = UNDEFINED_SUM_TEST, steps: Sequence[Sequence[int]] = ()
    ) -> SignedStatistics:
        """The statistics of one head; nan where there are too few rows or sequences.

        Args:
            head: index of the head.
            test: sign-flip test of its sums within the family of all heads.
            steps: positions of the sequences of each recorded step, in order.
        """
        rows = int(self._rows[head])
        if rows == 0:
            return undefined_statistics(len(self._by_sequence))
        total = float(self._sum[head])
        if self._found is None:
            self._found = _found(self.sequence_sums(), self._by_token)
        mean = total / rows
        variance = max(float(self._square[head]) - rows * mean * mean, 0.0) / (rows - 1) if rows > 1 else math.nan
        error = math.sqrt(variance / rows) if rows > 1 else math.nan
        return SignedStatistics(
            sum=total,
            mean=mean,
            standard_error=error,
            z=_ratio(mean, error),
            positive=int(self._signs[head, 0]),
            negative=int(self._signs[head, 1]),
            zero=int(self._signs[head, 2]),
            running_tokens=tuple(self._found.running[head]),
            running_steps=tuple(accumulate(sum(self._found.sums[head][i] for i in step) for step in steps)),
            clustered=_clustered(self._found, head, test),
            robust=self._robust(head, rows),
        )

    def _robust(self, head: int, rows: int) -> RobustStatistics:
        absolute, square = float(self._absolute[head]), float(self._square[head])
        values = self._largest[head]
        order = np.argsort(-np.abs(values), kind="stable")
        dropped = float(values[order[: math.ceil(rows * _TRIMMED_SHARE)]].sum())
        remaining = float(self._sum[head]) - dropped
        # What is left of a sum after taking away nearly all of it is rounding noise below this.
        noise = 1e-12 * absolute
        return RobustStatistics(
            n_effective=absolute**2 / square if square > 0 else math.nan,
            largest_share=float(np.abs(values[order[0]])) / absolute if absolute > 0 else math.nan,
            sign_without_top_1_percent=0 if abs(remaining) <= noise else int(math.copysign(1, remaining)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Figures of every head."""

    #: [F, n] sums of the sequences, [F] their mean and its standard error.
    sums: list[list[float]]
    mean: list[float]
    error: list[float]
    #: [F, P] running sum at up to 16 evenly spaced positions, the last position among them.
    running: list[list[float]]


def _found(sums: np.ndarray, by_token: np.ndarray) -> _Found:
    size = by_token.shape[1]
    points = min(_POINTS, size)
    ends = [-(-size * (i + 1) // points) - 1 for i in range(points)]
    mean, error = mean_and_error(sums)
    return _Found(
        sums=sums.tolist(),
        mean=mean.tolist(),
        error=error.tolist(),
        running=np.cumsum(by_token, axis=1)[:, ends].tolist(),
    )


def _ratio(value: float, error: float) -> float:
    """value / error; 0 when both are 0, infinite when only the error is."""
    if math.isnan(error):
        return math.nan
    if error == 0:
        return 0.0 if value == 0 else math.copysign(math.inf, value)
    return value / error


def _clustered(found: _Found, head: int, test: SumTest) -> ClusteredStatistics:
    mean, error, number = found.mean[head], found.error[head], len(found.sums[head])
    t = _ratio(mean, error)
    return ClusteredStatistics(
        sequences=number,
        mean=mean,
        standard_error=error,
        t=t,
        p=student_two_sided(t, number - 1),
        p_flip=test.p,
        p_adjusted=test.p_adjusted,
    )


def undefined_statistics(sequences: int) -> SignedStatistics:
    """Statistics of a quantity that no row defines: nan and zero counts."""
    nan = math.nan
    return SignedStatistics(
        sum=nan,
        mean=nan,
        standard_error=nan,
        z=nan,
        positive=0,
        negative=0,
        zero=0,
        running_tokens=(),
        running_steps=(),
        clustered=ClusteredStatistics(
            sequences=sequences, mean=nan, standard_error=nan, t=nan, p=nan, p_flip=nan, p_adjusted=nan
        ),
        robust=RobustStatistics(n_effective=nan, largest_share=nan, sign_without_top_1_percent=0),
    )
