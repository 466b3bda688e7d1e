"""Long series in few columns, so that no spike is lost."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What each column of a drawing holds; nan throughout for a column without a finite value."""

    #: float64 [C] least and largest finite value, and the last one in the order of the series.
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    last: NDArray[np.float64]
    #: int64 [C + 1]: column c holds the values starts[c] to starts[c + 1] - 1, at least one.
    starts: NDArray[np.int64]


def envelope(values: NDArray[np.float64], columns: int) -> Envelope:
    """Splits a series into `columns` runs of nearly equal length.

    Args:
        values: [K], K at least 1; values that are not finite are left out.
        columns: wanted; K of them where there are fewer values.
    """
    columns = min(columns, len(values))
    starts = (np.arange(columns + 1, dtype=np.int64) * len(values)) // columns
    finite = np.isfinite(values)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts[:-1])
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts[:-1])
    empty = low > high
    # Position of the last finite value up to each one; that of an earlier column where a column has none.
    position = np.maximum.accumulate(np.where(finite, np.arange(len(values)), 0))
    last = values[position[starts[1:] - 1]]
    return Envelope(
        low=np.where(empty, np.nan, low),
        high=np.where(empty, np.nan, high),
        last=np.where(empty, np.nan, last),
        starts=starts,
    )


def marked(marks: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Columns in which anything is marked; `starts` as in `Envelope`."""
    return np.logical_or.reduceat(marks, starts[:-1])
