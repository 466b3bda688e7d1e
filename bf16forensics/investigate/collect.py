"""Collecting the sequences' evidence, layer by layer, and turning it into heads with family-wise tests."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import RecordSource
from bf16forensics.emulate.strict import single_thread, strict_fp32
from bf16forensics.evidence.accumulate import LayerAccumulator, SequenceEvidence
from bf16forensics.evidence.assemble import NOT_TESTED as UNTESTED_DELTA
from bf16forensics.evidence.assemble import DeltaTests, delta_defined, head_evidence
from bf16forensics.evidence.coupling import NOT_TESTED, StepSpan, family_tests, gradient_coupling, head_grams
from bf16forensics.evidence.finite import nonfinite_weights
from bf16forensics.evidence.functional import score_variance
from bf16forensics.evidence.gradient import SUMMED_MATRICES, GradientParts, SummedParts, summed_parts
from bf16forensics.evidence.results import GradientCoupling, HeadEvidence
from bf16forensics.evidence.spectrum import layer_spectra
from bf16forensics.evidence.statistics import sum_tests
from bf16forensics.evidence.store import GradientStore
from bf16forensics.evidence.ties import TiePoint

#: Names of non-finite inputs reported for one head.
_MOST_NAMES = 8


class Collector:
    """Running statistics of all layers; sequences are added in order, their gradients kept as they are computed."""

    def __init__(
        self,
        source: RecordSource,
        workers: int = 1,
        *,
        ones_counted: bool = True,
        tie_point: TiePoint | None = None,
    ) -> None:
        """Starts empty.

        Args:
            source: its shape bounds what can be added.
            workers: threads that `heads` may use.
            ones_counted: whether P-bar = 1 marks the row maximum in the recipe.
            tie_point: the rounding that ends the recipe's sums; None for no tie statistics.
        """
        self._ones_counted = ones_counted
        self._tie_point = tie_point
        self._source = source
        self._workers = workers
        self._shape = source.shape
        shape = self._shape
        max_rows = shape.num_sequences * shape.num_queries
        self._layers = [LayerAccumulator(shape.num_heads, max_rows) for _ in range(shape.num_layers)]
        self._store: GradientStore | None = None
        self._store_lock = threading.Lock()
        #: By sequence that is not added yet: float32 [L, 5, H, D, C]. In one piece, because small ones that live long
        #: between large ones that do not would keep a third more memory busy than is used.
        self._summed: dict[int, np.ndarray] = {}
        self.num_sequences = 0

    def keep_gradients(self, layer: int, sequence: int, parts: GradientParts) -> SummedParts:
        """Stores the gradients of one layer of one sequence; returns what its evidence still has to carry.

        Any thread may call it, for sequences in any order: gradients of sequences that are never added are not used.
        """
        heads = self._shape.num_heads
        with self._store_lock:
            if self._store is None:
                size = int(np.prod(parts.hp.shape[1:]))
                self._store = GradientStore(heads * len(self._layers), self._shape.num_sequences, size)
            if sequence not in self._summed:
                shape = (len(self._layers), len(SUMMED_MATRICES), *parts.hp.shape)
                self._summed[sequence] = np.empty(shape, np.float32)
            into = self._summed[sequence][layer]
        self._store.put(slice(layer * heads, (layer + 1) * heads), sequence, parts.hp, parts.defect, parts.total)
        return summed_parts(parts, into)

    def add(self, layers: tuple[SequenceEvidence, ...]) -> None:
        """Adds one sequence's evidence of every layer."""
        for evidence in layers:
            self._layers[evidence.layer].add(evidence)
            self._summed.pop(evidence.sequence, None)
        self.num_sequences += 1

    def heads(self, probes: tuple[AttentionRecord, ...]) -> tuple[HeadEvidence, ...]:
        """The evidence of every head, in (layer, head) order.

        Args:
            probes: records of a few sequences, over which the functional figure is taken.
        """
        shape = self._shape
        layers = range(shape.num_layers)
        weights = [self._source.weights(layer) for layer in layers]
        with ThreadPoolExecutor(self._workers) as pool:
            spectra = list(pool.map(lambda layer: layer_spectra(weights[layer], shape.num_heads), layers))
        nonfinite = [self._nonfinite(layer, weights[layer]) for layer in layers]
        steps = self._steps()
        coupling = self._coupling(probes, nonfinite, steps)
        tests = self._delta_tests(nonfinite)
        found: list[HeadEvidence] = []
        for layer, accumulator in enumerate(self._layers):
            for head in range(shape.num_heads):
                found.append(
                    head_evidence(
                        layer,
                        head,
                        head // (shape.num_heads // shape.num_kv_heads),
                        accumulator,
                        spectra[layer][head],
                        coupling.get(layer * shape.num_heads + head),
                        nonfinite[layer][head],
                        tests.get(layer * shape.num_heads + head, UNTESTED_DELTA),
                        steps,
                        self._ones_counted,
                        self._tie_point,
                    )
                )
        return tuple(found)

    def _nonfinite(self, layer: int, weights: LayerWeights) -> list[tuple[str, ...]]:
        from_weights = nonfinite_weights(weights, self._shape.num_heads)
        return [
            tuple(dict.fromkeys(found + more))[:_MOST_NAMES]
            for found, more in zip(self._layers[layer].nonfinite, from_weights, strict=True)
        ]

    def _delta_tests(self, nonfinite: list[list[tuple[str, ...]]]) -> dict[int, DeltaTests]:
        """Tests of delta's errors by head index, for the family of heads whose inputs and sums are finite."""
        if not all(accumulator.has_delta for accumulator in self._layers):
            return {}
        names = [name for names in nonfinite for name in names]
        series = ("delta_err", "defect", "ds_row_sum")
        sums = {
            kind: np.concatenate([getattr(accumulator, kind).sequence_sums() for accumulator in self._layers])
            for kind in series
        }
        finite = np.all([np.isfinite(values).all(1) for values in sums.values()], axis=0)
        family = [index for index in np.flatnonzero(finite).tolist() if delta_defined(names[index])]
        tested = [sum_tests(sums[kind][family]) for kind in series]
        return {
            index: DeltaTests(delta_err=delta_err, defect=defect, ds_row_sum=ds_row_sum)
            for index, delta_err, defect, ds_row_sum in zip(family, *tested, strict=True)
        }

    def _coupling(
        self,
        probes: tuple[AttentionRecord, ...],
        nonfinite: list[list[tuple[str, ...]]],
        steps: tuple[StepSpan, ...],
    ) -> dict[int, GradientCoupling]:
        """Coupling by head index.

        Heads with non-finite inputs have none. Heads whose gradients overflowed have an undefined one. Both are left
        out of the family, where one of them would spoil every p.
        """
        if self._store is None:
            return {}
        heads, n = self._shape.num_heads, self.num_sequences
        grams = {}
        for index in range(heads * len(self._layers)):
            if not nonfinite[index // heads][index % heads]:
                gram = head_grams(self._store, index, n)
                grams[index] = gram if gram.finite else gram.undefined()
        family = [index for index, gram in grams.items() if gram.finite]
        tests = dict(zip(family, family_tests([grams[index] for index in family]), strict=True))
        functional = self._functional(probes, n)
        found: dict[int, GradientCoupling] = {}
        for index, gram in grams.items():
            layer, head = divmod(index, heads)
            accumulator = self._layers[layer]
            if accumulator.gradients is None or accumulator.key_sum is None:
                continue
            found[index] = gradient_coupling(
                self._store,
                index,
                gram,
                tests.get(index, NOT_TESTED),
                accumulator.gradients,
                head,
                accumulator.key_sum[head] / max(accumulator.key_count, 1),
                steps,
                functional.get(index, math.nan),
            )
        return found

    def _steps(self) -> tuple[StepSpan, ...]:
        of_group: dict[int, list[int]] = {}
        for index in range(self.num_sequences):
            of_group.setdefault(self._shape.groups[index], []).append(index)
        return tuple(StepSpan(step=self._shape.steps[s[0]], sequences=tuple(s)) for s in of_group.values())

    def _functional(self, probes: tuple[AttentionRecord, ...], n: int) -> dict[int, float]:
        """Root of the score variance of the batch's error over that of the batch's gradient, by head index."""
        if self._store is None:
            return {}
        with ThreadPoolExecutor(self._workers) as pool:
            totals = np.concatenate(
                list(pool.map(lambda layer: self._variances(layer, probes, n), range(len(self._layers)))), axis=1
            )
        error, gradient = totals
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = np.sqrt(error / gradient)
        return dict(enumerate(ratio.tolist()))

    def _variances(self, layer: int, probes: tuple[AttentionRecord, ...], n: int) -> np.ndarray:
        """float64 [2, H]: score variance of the batch's error and of its gradient for the heads of a layer."""
        heads = self._shape.num_heads
        total = np.zeros((2, heads))
        records = [record for record in probes if record.layer == layer and record.x is not None]
        if not records or self._store is None:
            return total
        indices = range(layer * heads, (layer + 1) * heads)
        means = [self._store.vectors(kind, index, n).mean(0) for kind in ("defect", "hp") for index in indices]
        moves = torch.from_numpy(np.stack(means)).view(2, heads, self._shape.head_size, -1)
        with strict_fp32(), single_thread():
            for record in records:
                total += score_variance(record, moves).numpy()
        return total
