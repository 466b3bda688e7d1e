"""Running sums over sequences for the heads of one layer.

Sequences must be added in order, whatever order they were computed in: floating-point sums depend on it, and repeated
runs and other thread counts must give the same bytes.

Shapes: H query heads, G key/value heads, E head size of V, D head size of q and k, C width.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from bf16forensics.evidence.device_series import DeviceSeries
from bf16forensics.evidence.gradient import SummedParts
from bf16forensics.evidence.series import SignedSeries
from bf16forensics.evidence.summary import DeltaSummary, MaximaSummary, OutputSummary, RecordSummary, Rows
from bf16forensics.evidence.ties import TieSums, add_ties


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEvidence:
    """What one sequence contributes to one layer."""

    layer: int
    #: Position among all sequences, 0-based.
    sequence: int
    summary: RecordSummary
    #: None without dO or X. The matrices of single sequences lie in the `GradientStore`.
    parts: SummedParts | None
    #: float64 [H, D] sum of the mean keys as W_Q sees them, and their number; see `flat.flat_direction`.
    key_sum: np.ndarray
    key_count: int
    #: For each query head, names with positions of non-finite inputs; empty when finite.
    nonfinite: tuple[tuple[str, ...], ...]


class LayerAccumulator:
    """Everything about one layer that does not need the family of all heads."""

    _COUNTS = (
        "ones_fp32 ones_rounded shared rows rows_repeated rows_repeated_unlabelled rows_near rows_fully_masked "
        "rows_padding rows_swamped pairs sink_sum defect_power defect_power_swamped defect_sum defect_sum_repeated"
    ).split()

    def __init__(self, num_heads: int, max_rows: int) -> None:
        """Args: num_heads H; max_rows no fewer than the rows of all sequences together."""
        self.num_heads = num_heads
        self._max_rows = max_rows
        #: Where the signed quantities are added up if they came from a device, until `settle`.
        self._on_device: DeviceSeries | None = None
        self.delta_err = SignedSeries(num_heads, max_rows)
        self.defect = SignedSeries(num_heads, max_rows)
        self.ds_row_sum = SignedSeries(num_heads, max_rows)
        self.has_delta = False
        self.num_sequences = 0
        self.maxima: MaximaSummary | None = None
        self.output: OutputSummary | None = None
        self.ties: TieSums | None = None
        #: int64 [H] sequence of the largest output error.
        self.max_sequence = np.full(num_heads, -1)
        #: float32 matrices, as the parts are: a sum of thousands of them is good to 1e-5, far beyond what the ratios
        #: built from it are printed with.
        self.gradients: SummedParts | None = None
        self.key_sum: np.ndarray | None = None
        self.key_count = 0
        self.nonfinite: list[tuple[str, ...]] = [()] * num_heads

    def add(self, evidence: SequenceEvidence) -> None:
        """Adds one sequence; its matrices of gradients may be written to from then on."""
        self.num_sequences += 1
        summary = evidence.summary
        if summary.delta is not None:
            self._add_delta(summary.delta, summary.rows)
        self._add_maxima(summary.maxima)
        self._add_output(summary.output, evidence.sequence)
        if summary.ties is not None:
            self.ties = summary.ties if self.ties is None else add_ties(self.ties, summary.ties)
        if evidence.parts is not None:
            self._add_gradients(evidence.parts)
        self.key_sum = evidence.key_sum if self.key_sum is None else self.key_sum + evidence.key_sum
        self.key_count += evidence.key_count
        self.nonfinite = [known + new for known, new in zip(self.nonfinite, evidence.nonfinite, strict=True)]

    def settle(self) -> None:
        """Brings what was added up on a device into the series; call it before they are read."""
        if self._on_device is not None:
            for series, totals in zip(self._series, self._on_device.totals(), strict=True):
                series.load(totals)

    @property
    def _series(self) -> tuple[SignedSeries, SignedSeries, SignedSeries]:
        return self.delta_err, self.defect, self.ds_row_sum

    def _add_delta(self, delta: DeltaSummary, rows: Rows) -> None:
        given = (delta.delta_err, delta.defect, delta.ds_row_sum)
        if self._on_device is None and not self.has_delta and isinstance(rows, torch.Tensor):
            self._on_device = DeviceSeries(len(given), self.num_heads, self._max_rows, rows.device)
        self.has_delta = True
        if self._on_device is not None:
            values, counted, floor = torch.stack([_tensor(one) for one in given]), rows, delta.sign_floor
            self._on_device.add(values, _tensor(counted), _tensor(floor))
            return
        # A call that the reference took in the place of a device's pass may come first, and one from the device later.
        for series, one in zip(self._series, given, strict=True):
            series.add(_array(one), _array(rows), _array(delta.sign_floor))

    def _add_maxima(self, new: MaximaSummary) -> None:
        if self.maxima is None:
            self.maxima = new
            return
        old = self.maxima
        self.maxima = MaximaSummary(
            **{name: getattr(old, name) + getattr(new, name) for name in self._COUNTS},
            most_ones=np.maximum(old.most_ones, new.most_ones),
            score_abs_max=np.maximum(old.score_abs_max, new.score_abs_max),
        )

    def _add_output(self, new: OutputSummary, sequence: int) -> None:
        if self.output is None:
            self.output = new
            self.max_sequence = np.where(new.max_position >= 0, sequence, -1)
            return
        old = self.output
        # An undefined maximum must not lose against a number: it would print as if all had been compared.
        above = (new.max_abs > old.max_abs) | (np.isnan(new.max_abs) & ~np.isnan(old.max_abs))
        larger = (new.max_position >= 0) & (above | (old.max_position < 0))
        self.max_sequence = np.where(larger, sequence, self.max_sequence)
        self.output = OutputSummary(
            ulp_sum=old.ulp_sum + new.ulp_sum,
            ulp_count=old.ulp_count + new.ulp_count,
            max_abs=np.where(larger, new.max_abs, old.max_abs),
            max_ulp=np.where(larger, new.max_ulp, old.max_ulp),
            max_position=np.where(larger, new.max_position, old.max_position),
            sign_sum=old.sign_sum + new.sign_sum,
            sign_count=old.sign_count + new.sign_count,
        )

    def _add_gradients(self, parts: SummedParts) -> None:
        if self.gradients is None:
            # The first sequence's matrices become the sums: a copy of them would be the peak of a run over one.
            self.gradients = parts
            return
        for field in fields(SummedParts):
            getattr(self.gradients, field.name)[...] += getattr(parts, field.name)


def _tensor(values: Rows) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def _array(values: Rows) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values
