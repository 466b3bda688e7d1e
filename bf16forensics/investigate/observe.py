"""Joining the observations of all sequences, layer by layer, into the observation of a run. Bounded memory."""

import math

import numpy as np

from bf16forensics.capture.source import SourceShape
from bf16forensics.evidence.observe import TOUCHES_HEAD, TOUCHES_X, ObserveOptions, SequenceObservation
from bf16forensics.evidence.observe_inputs import InputValues
from bf16forensics.evidence.observe_pairs import PAIRS_DRAWN, SEED, PairSeries, kept_values, undefined_pairs
from bf16forensics.evidence.observe_results import (
    ColumnCosine,
    ColumnSigns,
    HeadObservation,
    LayerObservation,
    Observation,
    PairStatistics,
    RepeatedRow,
)
from bf16forensics.evidence.observe_rows import MOST_ROWS, listing_order
from bf16forensics.recipe.model import Recipe

#: Columns of X reported for a layer.
_COLUMNS = 5
#: Names of non-finite inputs reported for one head or layer.
_MOST_NAMES = 8
_HEAD_SERIES = ("next", "drawn", "rotated_next", "rotated_drawn")
_INPUT_SERIES = ("next", "drawn", "signs_next", "signs_drawn", "matrix_next", "matrix_drawn")
_INPUT_SUMS = ("absolute", "positive", "negative", "column_sum", "column_pairs", "coherent", "weight")


def observe_options(shape: SourceShape, recipe: Recipe, reference: str) -> ObserveOptions:
    """How to observe the records of a source.

    Args:
        shape: of the source; its number of sequences decides how much of each is kept for the medians.
        recipe: recipe of the dual passes.
        reference: their reference, "fp32" or "fp64".
    """
    return ObserveOptions(recipe=recipe, reference=reference, kept=kept_values(shape.num_sequences))


class ObservationCollector:
    """Running sums of all layers; sequences must be added in order, whatever order they were computed in."""

    def __init__(self, options: ObserveOptions) -> None:
        """Starts empty. Args: options that the sequences were observed with."""
        self._options = options
        self._layers: dict[int, _Layer] = {}
        self._rows: list[RepeatedRow] = []
        self._sequences = 0

    def add(self, layers: tuple[SequenceObservation, ...]) -> None:
        """Adds the layers of one sequence, in any order."""
        self._sequences += 1
        for observed in layers:
            if observed.layer not in self._layers:
                self._layers[observed.layer] = _Layer(observed.layer, len(observed.nonfinite))
            self._layers[observed.layer].add(observed)
            if observed.rows is not None:
                self._rows.extend(observed.rows.listed)
        self._rows = sorted(self._rows, key=listing_order)[:MOST_ROWS]

    def result(self) -> Observation:
        """The observation of what was added so far."""
        layers = [self._layers[number] for number in sorted(self._layers)]
        return Observation(
            recipe=self._options.recipe.name,
            sequences=self._sequences,
            pairs_drawn=PAIRS_DRAWN,
            seed=SEED,
            layers=tuple(layer.inputs() for layer in layers if layer.has_x),
            heads=tuple(head for layer in layers for head in layer.heads()),
            rows_counted=self._options.recipe.anchored_at_maximum,
            rows_total=sum(layer.rows_found for layer in layers),
            rows=tuple(self._rows),
        )


class _Layer:
    """Running sums of one layer."""

    def __init__(self, layer: int, num_heads: int) -> None:
        self._layer = layer
        self._names: list[tuple[str, ...]] = [()] * num_heads
        self._series = {name: PairSeries() for name in _HEAD_SERIES}
        self._input_series = {name: PairSeries() for name in _INPUT_SERIES}
        self._inputs: dict[str, np.ndarray] = {}
        self._tokens = 0
        self._unit_sum: np.ndarray | None = None
        #: [H] sums over sequences of |sum of PK / |PK||^2, of its number of rows, and of that number's square.
        self._own = np.zeros(num_heads)
        self._units = np.zeros(num_heads, np.int64)
        self._unit_squares = np.zeros(num_heads, np.int64)
        #: [3, H] rows with several ones, with several exact ones, and most ones; None where they are not counted.
        self._counts: np.ndarray | None = None

    @property
    def has_x(self) -> bool:
        """Whether the records carried X."""
        return bool(self._inputs)

    @property
    def rows_found(self) -> int:
        """Rows with several maxima in the sequences where their head was finite."""
        return 0 if self._counts is None else int(self._counts[0].sum())

    def add(self, observed: SequenceObservation) -> None:
        """Adds one sequence."""
        self._names = [known + new for known, new in zip(self._names, observed.nonfinite, strict=True)]
        for name, series in self._series.items():
            values = getattr(observed, name)
            if values is not None:
                series.add(values)
        self._unit_sum = observed.unit_sum if self._unit_sum is None else self._unit_sum + observed.unit_sum
        self._own += (observed.unit_sum**2).sum(1)
        self._units += observed.units
        self._unit_squares += observed.units**2
        if observed.x is not None:
            self._add_inputs(observed.x)
        if observed.rows is not None:
            new = np.stack([observed.rows.rows, observed.rows.rows_exact, observed.rows.most_ones])
            old = np.zeros_like(new) if self._counts is None else self._counts
            self._counts = np.concatenate([old[:2] + new[:2], np.maximum(old[2:], new[2:])])

    def _add_inputs(self, x: InputValues) -> None:
        for name, series in self._input_series.items():
            series.add(getattr(x, name))
        for name in _INPUT_SUMS:
            new = getattr(x, name)
            self._inputs[name] = self._inputs[name] + new if name in self._inputs else new
        self._tokens += x.tokens

    def inputs(self) -> LayerObservation:
        """X of the layer; call it only where there is one."""
        names = tuple(dict.fromkeys(n for names in self._names for n in names if n.startswith(TOUCHES_X)))
        found = {name: self._pairs(self._input_series[name], 0, names) for name in _INPUT_SERIES[:4]}
        columns = () if names else tuple(self._column(column) for column in self._largest_columns())
        return LayerObservation(layer=self._layer, columns=columns, nonfinite=names[:_MOST_NAMES], **found)

    def heads(self) -> list[HeadObservation]:
        """Every head of the layer, in order."""
        return [self._head(head) for head in range(len(self._names))]

    def _head(self, head: int) -> HeadObservation:
        # What is not finite elsewhere (dO, a weight) does not touch the observation; X alone leaves what PK says.
        names = tuple(name for name in dict.fromkeys(self._names[head]) if name.startswith((*TOUCHES_HEAD, TOUCHES_X)))
        broken = tuple(name for name in names if name.startswith(TOUCHES_HEAD))
        rotated = self._series["rotated_next"].is_empty
        counts = [None] * 3 if broken or self._counts is None else self._counts[:, head].tolist()
        return HeadObservation(
            layer=self._layer,
            head=head,
            next=self._pairs(self._series["next"], head, broken),
            drawn=self._pairs(self._series["drawn"], head, broken),
            rotated_next=None if rotated else self._pairs(self._series["rotated_next"], head, broken),
            rotated_drawn=None if rotated else self._pairs(self._series["rotated_drawn"], head, broken),
            matrix_next=self._pairs(self._input_series["matrix_next"], head, names) if self.has_x else None,
            matrix_drawn=self._pairs(self._input_series["matrix_drawn"], head, names) if self.has_x else None,
            coherence=self._coherence(head, names) if self.has_x else None,
            across_sequences=math.nan if broken else self._across(head),
            columns=tuple(self._column_cosine(head, c) for c in self._largest_columns()) if not names else (),
            rows_repeated=counts[0],
            rows_exact=counts[1],
            most_ones=counts[2],
            nonfinite=names[:_MOST_NAMES],
        )

    def _pairs(self, series: PairSeries, row: int, names: tuple[str, ...]) -> PairStatistics:
        return undefined_pairs() if names else series.result(row)

    def _coherence(self, head: int, names: tuple[str, ...]) -> float:
        weight = float(self._inputs["weight"][head])
        return math.nan if names or not weight > 0 else float(self._inputs["coherent"][head]) / weight

    def _across(self, head: int) -> float:
        """(|sum over all|^2 - sum over sequences |sum|^2) over the number of such pairs."""
        pairs = int(self._units[head]) ** 2 - int(self._unit_squares[head])
        if self._unit_sum is None or pairs == 0:
            return math.nan
        return float((self._unit_sum[head] ** 2).sum() - self._own[head]) / pairs

    def _largest_columns(self) -> list[int]:
        if not self.has_x:
            return []
        order: list[int] = np.argsort(-self._inputs["absolute"], kind="stable")[:_COLUMNS].tolist()
        return order

    def _column(self, column: int) -> ColumnSigns:
        positive, negative = (int(self._inputs[name][column]) for name in ("positive", "negative"))
        tokens = self._tokens
        return ColumnSigns(
            column=column,
            mean_abs=float(self._inputs["absolute"][column]) / tokens if tokens else math.nan,
            sign=(positive > negative) - (positive < negative),
            share=max(positive, negative) / tokens if tokens else math.nan,
        )

    def _column_cosine(self, head: int, column: int) -> ColumnCosine:
        pairs = int(self._inputs["column_pairs"][head, column])
        total = float(self._inputs["column_sum"][head, column])
        return ColumnCosine(column=column, pairs=pairs, mean=total / pairs if pairs else math.nan)
