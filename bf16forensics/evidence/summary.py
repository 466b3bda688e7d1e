"""One record and its dual pass, reduced to what the statistics over sequences need.

Shapes: H query heads, N queries, E head size of V. A summary holds [H, N] rows of a few signed quantities and sums;
the [D, C] matrices of the gradient live in `gradient.py`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from bf16forensics.attention.result import DualPass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import ulp_of
from bf16forensics.evidence.ties import TieSums, tie_sums

#: A row's sign counts where |error| exceeds this times sum |dO * O|: below it the order of an FP32 sum decides.
SIGN_FLOOR = 2.0**-22


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSummary:
    """Signed per-row quantities of one record, float64 [H, N]; 0 where `RecordSummary.rows` is False."""

    #: delta_lp - delta_hp.
    delta_err: np.ndarray
    #: delta_lp - rowsum(P_lp * dP) / rowsum(P_lp).
    defect: np.ndarray
    #: rowsum(dS_lp) before the scale.
    ds_row_sum: np.ndarray
    #: |error| below which a row's sign does not count.
    sign_floor: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSummary:
    """Sums over the elements of O_lp - O_hp, by head."""

    #: float64 [H] sum of the signed error in ulp (+ away from zero) over elements within one ulp, and their number.
    ulp_sum: np.ndarray
    ulp_count: np.ndarray
    #: float64 [H] largest |error|, its ulp and its flat position token * E + feature (-1: none).
    max_abs: np.ndarray
    max_ulp: np.ndarray
    max_position: np.ndarray
    #: float64 [H, E] sum of sign(dO) sign(error), and number of elements where both are non-zero.
    sign_sum: np.ndarray
    sign_count: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximaSummary:
    """Counts by head, int64 [H] unless said otherwise."""

    ones_fp32: np.ndarray
    ones_rounded: np.ndarray
    shared: np.ndarray
    rows: np.ndarray
    rows_repeated: np.ndarray
    rows_repeated_unlabelled: np.ndarray
    rows_near: np.ndarray
    rows_fully_masked: np.ndarray
    rows_padding: np.ndarray
    rows_swamped: np.ndarray
    pairs: np.ndarray
    most_ones: np.ndarray
    #: float64 [H] sums over rows: probability of the first key, squared defect, squared defect of swamped rows,
    #: defect, defect of rows with repeated maxima; and the largest |score|.
    sink_sum: np.ndarray
    defect_power: np.ndarray
    defect_power_swamped: np.ndarray
    defect_sum: np.ndarray
    defect_sum_repeated: np.ndarray
    score_abs_max: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSummary:
    """Everything but the gradients."""

    #: bool [H, N]: rows analysed (neither padding nor fully masked).
    rows: np.ndarray
    delta: DeltaSummary | None
    output: OutputSummary
    maxima: MaximaSummary
    #: None where the dual pass has none.
    ties: TieSums | None


def summarise(record: AttentionRecord, dual: DualPass, output_format: str) -> RecordSummary:
    """Reduces a dual pass to per-row signed quantities, counts and sums.

    Args:
        record: the record (finite).
        dual: its dual pass.
        output_format: format of O ("bf16"), whose ulp the output error is counted in.
    """
    real = torch.ones(dual.lse_lp.shape[1], dtype=torch.bool)
    if record.geometry.query_padding is not None:
        real = record.geometry.query_padding
    rows = (dual.maxima.visible > 0) & real[None]
    return RecordSummary(
        rows=rows.numpy(),
        delta=_delta(dual, rows),
        output=_output(record, dual, rows, output_format),
        maxima=_maxima(record, dual, rows, real),
        ties=None if dual.ties is None else tie_sums(dual.ties, dual.maxima.ones_rounded, rows),
    )


def _delta(dual: DualPass, rows: torch.Tensor) -> DeltaSummary | None:
    if dual.delta is None:
        return None
    defect = dual.delta.defect * rows
    return DeltaSummary(
        delta_err=(dual.delta.delta_err * rows).numpy(),
        defect=defect.numpy(),
        ds_row_sum=(-defect * dual.delta.p_row_sum).numpy(),
        sign_floor=(dual.delta.magnitude * SIGN_FLOOR).numpy(),
    )


def _output(record: AttentionRecord, dual: DualPass, rows: torch.Tensor, output_format: str) -> OutputSummary:
    heads, _, features = dual.o_err.shape
    error = dual.o_err * rows[..., None]
    in_ulp = error / ulp_of(dual.o_hp, output_format)
    near = (in_ulp.abs() <= 1.0) & rows[..., None]
    away = torch.where(near, in_ulp * torch.sign(dual.o_hp), 0.0)
    flat = error.abs().flatten(1)
    largest, position = flat.max(1)
    ulp_there = torch.gather(in_ulp.abs().flatten(1), 1, position[:, None])[:, 0]
    if record.do is None:
        signs = torch.zeros(heads, features, dtype=torch.float64)
        counts = signs
    else:
        product = torch.sign(record.do) * torch.sign(error).float()
        signs, counts = product.sum(1).double(), product.abs().sum(1).double()
    return OutputSummary(
        ulp_sum=away.sum((1, 2)).numpy(),
        ulp_count=near.sum((1, 2)).double().numpy(),
        max_abs=largest.numpy(),
        max_ulp=ulp_there.numpy(),
        max_position=torch.where(rows.any(1), position, -1).numpy(),
        sign_sum=signs.numpy(),
        sign_count=counts.numpy(),
    )


def _maxima(record: AttentionRecord, dual: DualPass, rows: torch.Tensor, real: torch.Tensor) -> MaximaSummary:
    maxima = dual.maxima
    repeated = (maxima.ones_rounded > 1) & rows
    unlabelled = repeated if record.labelled is None else repeated & ~record.labelled[None]
    swamped = maxima.swamped & rows
    zero = torch.zeros(rows.shape[0], dtype=torch.float64)
    defect = None if dual.delta is None else dual.delta.defect * rows

    def count(mask: torch.Tensor) -> np.ndarray:
        return np.asarray(mask.sum(1).numpy())

    def total(values: torch.Tensor | None, mask: torch.Tensor) -> np.ndarray:
        return np.asarray((zero if values is None else (values * mask).sum(1)).numpy())

    power = None if defect is None else defect.square()
    return MaximaSummary(
        ones_fp32=count(maxima.ones_fp32 * rows),
        ones_rounded=count(maxima.ones_rounded * rows),
        shared=count(maxima.shared * rows),
        rows=count(rows),
        rows_repeated=count(repeated),
        rows_repeated_unlabelled=count(unlabelled if record.labelled is not None else unlabelled & False),
        rows_near=count((maxima.near > 1) & rows),
        rows_fully_masked=count((maxima.visible == 0) & real[None]),
        rows_padding=count((~real)[None].expand_as(rows)),
        rows_swamped=count(swamped),
        pairs=count(maxima.visible * rows),
        most_ones=(maxima.ones_rounded * rows).amax(1).numpy(),
        sink_sum=total(maxima.sink, rows),
        defect_power=total(power, rows),
        defect_power_swamped=total(power, swamped),
        defect_sum=total(defect, rows),
        defect_sum_repeated=total(defect, repeated),
        score_abs_max=(maxima.score_abs_max * rows).amax(1).numpy(),
    )
