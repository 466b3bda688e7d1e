"""A head by token, and a token by feature: which rows and which entries of dO * (O_lp - O_hp) the delta error is.

Shapes: S sequences, N queries, E features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16forensics.evidence.trace.results import FeatureContribution, SignCell, SignTable, TokenError, TokenTrace
from bf16forensics.floats.formats import format_named
from bf16forensics.floats.ulp import ulp_array

#: Rows that a ranking keeps.
_MOST_TOKENS = 1000
#: Signs of (dO, error) in the order of `SignTable.cells`.
_SIGNS = ((1, 1), (-1, -1), (1, -1), (-1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """The rows of one head in one sequence; arrays [N], float64 unless said otherwise."""

    #: Number of the sequence in the run, and its training step; None when unknown.
    sequence: int
    step: int | None
    #: bool: rows analysed (neither padding nor fully masked, nor left out).
    rows: NDArray[np.bool_]
    #: int64 visible keys, and keys with P-bar = 1 after rounding to BF16 (None where the anchor is not the maximum).
    visible: NDArray[np.int64]
    ones: NDArray[np.int64] | None
    #: delta_lp - delta_hp, the defect, and |error| below which a sign does not count; None without a delta.
    delta_err: NDArray[np.float64] | None
    defect: NDArray[np.float64] | None
    sign_floor: NDArray[np.float64] | None
    #: Largest |O_lp - O_hp| of the row in ulp of O's format, and (int64) its feature.
    o_err_max_ulp: NDArray[np.float64]
    o_err_feature: NDArray[np.int64]

    @property
    def size(self) -> NDArray[np.float64]:
        """What rows are ranked by: |delta_err|, or without it the largest error of O in ulp; -1 in rows left out."""
        size = self.o_err_max_ulp if self.delta_err is None else np.abs(self.delta_err)
        return np.where(self.rows, size, -1.0)

    def token_error(self, index: int, token: int) -> TokenError:
        """One row, where `index` is the position of the sequence among those traced."""
        no_delta = self.delta_err is None or self.defect is None or self.sign_floor is None
        delta_err = math.nan if self.delta_err is None else float(self.delta_err[token])
        return TokenError(
            index=index,
            sequence=self.sequence,
            step=self.step,
            token=token,
            delta_err=delta_err,
            defect=math.nan if self.defect is None else float(self.defect[token]),
            visible=int(self.visible[token]),
            ones=None if self.ones is None else int(self.ones[token]),
            sign_counts=not no_delta and bool(self._signed[token]),
            o_err_max_ulp=float(self.o_err_max_ulp[token]),
            o_err_feature=int(self.o_err_feature[token]),
        )

    @property
    def _signed(self) -> NDArray[np.bool_]:
        if self.delta_err is None or self.sign_floor is None:
            return np.zeros_like(self.rows)
        return self.rows & (np.abs(self.delta_err) > self.sign_floor)

    @property
    def positive(self) -> int:
        """Rows whose delta error is positive beyond the order of an FP32 sum."""
        return 0 if self.delta_err is None else int((self._signed & (self.delta_err > 0)).sum())

    @property
    def negative(self) -> int:
        """Rows whose delta error is negative beyond the order of an FP32 sum."""
        return 0 if self.delta_err is None else int((self._signed & (self.delta_err < 0)).sum())


def ranked_tokens(sequences: Sequence[HeadRows], most: int = _MOST_TOKENS) -> tuple[TokenError, ...]:
    """The rows analysed, largest |delta_err| first (without a delta: largest error of O in ulp); ties in their order.

    Args:
        sequences: in the order traced.
        most: rows kept.
    """
    sizes = [rows.size for rows in sequences]
    index = np.concatenate([np.full(len(size), i) for i, size in enumerate(sizes)] or [np.zeros(0, np.int64)])
    token = np.concatenate([np.arange(len(size)) for size in sizes] or [np.zeros(0, np.int64)])
    size = np.concatenate(sizes or [np.zeros(0)])
    order = np.argsort(-size, kind="stable")[: min(most, int((size >= 0).sum()))]
    return tuple(sequences[int(index[i])].token_error(int(index[i]), int(token[i])) for i in order.tolist())


def delta_errors(sequences: Sequence[HeadRows]) -> NDArray[np.float64]:
    """delta_err of every row, [S, N of the longest]; nan in rows left out and without a delta."""
    longest = max((len(rows.rows) for rows in sequences), default=0)
    found = np.full((len(sequences), longest), np.nan)
    for index, rows in enumerate(sequences):
        if rows.delta_err is not None:
            found[index, : len(rows.rows)] = np.where(rows.rows, rows.delta_err, np.nan)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenVectors:
    """One row by feature, float64 [E] each."""

    #: None without dO.
    do: NDArray[np.float64] | None
    o_lp: NDArray[np.float64]
    o_hp: NDArray[np.float64]
    #: O_lp - O_hp as the dual pass computes it: as a difference from the top key, beyond the precision of either.
    o_err: NDArray[np.float64]


def token_trace(token: TokenError, vectors: TokenVectors, output_format: str) -> TokenTrace:
    """Splits the delta error of a row into the contributions of its features and a remainder.

    The remainder is delta_err - contributions in float64, so that the two add up to delta_err but for the last bit of
    the larger one.

    Args:
        token: the row.
        vectors: with dO.
        output_format: format of O, whose ulp the errors are counted in.

    Reference: arXiv 2510.04212, section 3.3.1 and figure 5 (b) to (d).
    """
    do = np.zeros_like(vectors.o_err) if vectors.do is None else vectors.do
    each = do * vectors.o_err
    in_ulp = vectors.o_err / ulp_array(vectors.o_hp, format_named(output_format))
    features = tuple(
        FeatureContribution(
            feature=feature,
            do=float(do[feature]),
            o_lp=float(vectors.o_lp[feature]),
            o_hp=float(vectors.o_hp[feature]),
            o_err=float(vectors.o_err[feature]),
            o_err_ulp=float(in_ulp[feature]),
            contribution=float(each[feature]),
        )
        for feature in np.argsort(-np.abs(each), kind="stable").tolist()
    )
    total = math.fsum(each.tolist())
    return TokenTrace(
        token=token,
        features=features,
        signs=sign_table(do, vectors.o_err),
        contributions=total,
        remainder=token.delta_err - total,
    )


def sign_table(do: NDArray[np.float64], o_err: NDArray[np.float64]) -> SignTable:
    """Which signs of dO and of the error of O meet in one row; both [E] and finite."""
    sign_do, sign_err, each = np.sign(do), np.sign(o_err), do * o_err
    cells = []
    for wanted_do, wanted_err in _SIGNS:
        here = (sign_do == wanted_do) & (sign_err == wanted_err)
        cells.append(
            SignCell(
                sign_do=wanted_do,
                sign_err=wanted_err,
                features=int(here.sum()),
                contribution=math.fsum(each[here].tolist()),
            )
        )
    counted = sum(cell.features for cell in cells)
    agreement = sum(cell.features * cell.sign_do * cell.sign_err for cell in cells)
    return SignTable(
        cells=tuple(cells), zero=len(do) - counted, correlation=agreement / counted if counted else math.nan
    )
