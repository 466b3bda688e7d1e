"""One record and its dual pass, reduced to what the statistics over sequences need.

Shapes: H query heads, N queries, E head size of V. A summary holds [H, N] rows of a few signed quantities and sums;
the [D, C] matrices of the gradient live in `gradient.py`.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from bf16forensics.attention.result import DeltaRows, DualPass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import ulp_of
from bf16forensics.evidence.host import on_host
from bf16forensics.evidence.ties import TieSums, tie_sums

#: A row's sign counts where |error| exceeds this times sum |dO * O|: below it the order of an FP32 sum decides.
SIGN_FLOOR = 2.0**-22

#: [H, N] of one record: on the CPU an array, on any other device a tensor.
Rows = np.ndarray | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSummary:
    """Signed per-row quantities of one record, float64 [H, N]; 0 where `RecordSummary.rows` is False.

    NumPy arrays of a record on the CPU. They stay on any other device, where `DeviceSeries` adds them up.
    """

    #: delta_lp - delta_hp.
    delta_err: Rows
    #: delta_lp - rowsum(P_lp * dP) / rowsum(P_lp).
    defect: Rows
    #: rowsum(dS_lp) before the scale.
    ds_row_sum: Rows
    #: |error| below which a row's sign does not count.
    sign_floor: Rows


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

    #: bool [H, N]: rows analysed (neither padding nor fully masked); kept where those of `delta` are.
    rows: Rows
    delta: DeltaSummary | None
    output: OutputSummary
    maxima: MaximaSummary
    #: None where the dual pass has none.
    ties: TieSums | None


def summarise(record: AttentionRecord, dual: DualPass, output_format: str) -> RecordSummary:
    """Reduces a dual pass to per-row signed quantities, counts and sums.

    Sums are float64 whatever the dual pass holds. Everything is computed where the record and its dual pass are, and
    what is small comes to the CPU in one transfer.

    Args:
        record: the record (finite).
        dual: its dual pass, on the same device; its ties may lie on the CPU.
        output_format: format of O ("bf16"), whose ulp the output error is counted in.
    """
    device = dual.lse_lp.device
    real = torch.ones(dual.lse_lp.shape[1], dtype=torch.bool, device=device)
    if record.geometry.query_padding is not None:
        real = record.geometry.query_padding
    rows = (dual.maxima.visible > 0) & real[None]
    delta = None if dual.delta is None else _delta(dual.delta, rows)
    small = on_host(_output(record, dual, rows, output_format) | _maxima(record, dual, rows, real))
    is_here = device.type == "cpu"
    return RecordSummary(
        rows=rows.numpy() if is_here else rows,
        delta=None if delta is None else DeltaSummary(**(on_host(delta) if is_here else delta)),
        output=OutputSummary(**{field.name: small[field.name] for field in fields(OutputSummary)}),
        maxima=MaximaSummary(**{field.name: small[field.name] for field in fields(MaximaSummary)}),
        ties=None if dual.ties is None else tie_sums(dual.ties, dual.maxima.ones_rounded, rows),
    )


def _delta(delta: DeltaRows, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fields of `DeltaSummary`."""
    defect = delta.defect.double() * rows
    return {
        "delta_err": delta.delta_err.double() * rows,
        "defect": defect,
        "ds_row_sum": -defect * delta.p_row_sum.double(),
        "sign_floor": delta.magnitude.double() * SIGN_FLOOR,
    }


def _output(record: AttentionRecord, dual: DualPass, rows: torch.Tensor, output_format: str) -> dict[str, torch.Tensor]:
    """Fields of `OutputSummary`."""
    heads, _, features = dual.o_err.shape
    error = dual.o_err * rows[..., None]
    in_ulp = error / ulp_of(dual.o_hp, output_format)
    near = (in_ulp.abs() <= 1.0) & rows[..., None]
    away = torch.where(near, in_ulp * torch.sign(dual.o_hp), 0.0)
    flat = error.abs().flatten(1)
    largest, position = flat.max(1)
    ulp_there = torch.gather(in_ulp.abs().flatten(1), 1, position[:, None])[:, 0]
    if record.do is None:
        signs = torch.zeros(heads, features, dtype=torch.float64, device=error.device)
        counts = signs
    else:
        product = torch.sign(record.do) * torch.sign(error).float()
        signs, counts = product.sum(1).double(), product.abs().sum(1).double()
    return {
        "ulp_sum": away.sum((1, 2), dtype=torch.float64),
        "ulp_count": near.sum((1, 2)).double(),
        "max_abs": largest.double(),
        "max_ulp": ulp_there.double(),
        "max_position": torch.where(rows.any(1), position, -1),
        "sign_sum": signs,
        "sign_count": counts,
    }


def _maxima(record: AttentionRecord, dual: DualPass, rows: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fields of `MaximaSummary`."""
    maxima = dual.maxima
    repeated = (maxima.ones_rounded > 1) & rows
    unlabelled = torch.zeros_like(repeated) if record.labelled is None else repeated & ~record.labelled[None]
    swamped = maxima.swamped & rows
    if dual.delta is None:
        defect = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    else:
        defect = dual.delta.defect.double() * rows
    power = defect.square()
    numbers = {
        "ones_fp32": maxima.ones_fp32,
        "ones_rounded": maxima.ones_rounded,
        "shared": maxima.shared,
        "pairs": maxima.visible,
    }
    masks = {
        "rows": rows,
        "rows_repeated": repeated,
        "rows_repeated_unlabelled": unlabelled,
        "rows_near": (maxima.near > 1) & rows,
        "rows_fully_masked": (maxima.visible == 0) & real[None],
        "rows_padding": (~real)[None].expand_as(rows),
        "rows_swamped": swamped,
    }
    totals = {
        "sink_sum": maxima.sink.double() * rows,
        "defect_power": power,
        "defect_power_swamped": power * swamped,
        "defect_sum": defect,
        "defect_sum_repeated": defect * repeated,
    }
    counted = torch.stack(list(numbers.values())) * rows
    return {
        **dict(zip(numbers, counted.sum(-1), strict=True)),
        **dict(zip(masks, torch.stack(list(masks.values())).sum(-1), strict=True)),
        **dict(zip(totals, torch.stack(list(totals.values())).sum(-1), strict=True)),
        "most_ones": counted[1].amax(1),
        "score_abs_max": (maxima.score_abs_max.double() * rows).amax(1),
    }
