"""Collecting the sequences' evidence, layer by layer, and turning it into heads with family-wise tests."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import torch

from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import RecordSource
from bf16forensics.emulate.strict import single_thread, strict_fp32
from bf16forensics.evidence.accumulate import LayerAccumulator, SequenceEvidence
from bf16forensics.evidence.assemble import NOT_TESTED as UNTESTED_DELTA
from bf16forensics.evidence.assemble import DeltaTests, delta_defined, head_evidence
from bf16forensics.evidence.coupling import MOST_STEPS, NOT_TESTED, family_tests, gradient_couplings
from bf16forensics.evidence.device_spectrum import device_spectra
from bf16forensics.evidence.device_store import DeviceGradientStore
from bf16forensics.evidence.finite import nonfinite_weights
from bf16forensics.evidence.functional import summed_variance
from bf16forensics.evidence.gradient import SUMMED_MATRICES, GradientParts, Matrices, SummedParts, summed_parts
from bf16forensics.evidence.gradient_products import HeadGrams, HeadProducts, StepSpan, head_grams, head_products
from bf16forensics.evidence.results import GradientCoupling, HeadEvidence, Spectrum
from bf16forensics.evidence.sign_flips import sum_tests
from bf16forensics.evidence.spectrum import layer_spectra
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
        self._store: GradientStore | DeviceGradientStore | None = None
        self._store_lock = threading.Lock()
        #: By sequence that is not added yet: float32 [L, 5, H, D, C]. In one piece, because small ones that live long
        #: between large ones that do not would keep a third more memory busy than is used.
        self._summed: dict[int, Matrices] = {}
        self.num_sequences = 0

    def keep_gradients(self, layer: int, sequence: int, parts: GradientParts) -> SummedParts:
        """Stores the gradients of one layer of one sequence; returns what its evidence still has to carry.

        Any thread may call it, for sequences in any order: gradients of sequences that are never added are not used.
        """
        with self._store_lock:
            store = self._store
            if store is None:
                store = self._store = self._new_store(parts)
            if sequence not in self._summed:
                self._summed[sequence] = store.empty((len(self._layers), len(SUMMED_MATRICES), *parts.hp.shape))
            into = self._summed[sequence][layer]
        # The reference may have taken a call in the place of a device's pass, or the gradients do not fit there.
        parts = GradientParts(**{field.name: store.place(getattr(parts, field.name)) for field in fields(parts)})
        store.put(self._of_layer(layer), sequence, parts.hp, parts.defect, parts.total)
        return summed_parts(parts, into)

    def _new_store(self, parts: GradientParts) -> GradientStore | DeviceGradientStore:
        heads, n = self._shape.num_heads * len(self._layers), self._shape.num_sequences
        size = int(np.prod(parts.hp.shape[1:]))
        if isinstance(parts.hp, torch.Tensor) and DeviceGradientStore.fits(heads, n, size, parts.hp.device):
            return DeviceGradientStore(heads, n, size, parts.hp.device)
        return GradientStore(heads, n, size)

    def _of_layer(self, layer: int) -> slice:
        """The heads of a layer among all heads."""
        return slice(layer * self._shape.num_heads, (layer + 1) * self._shape.num_heads)

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
        for accumulator in self._layers:
            accumulator.settle()
        weights = [self._source.weights(layer) for layer in layers]
        spectra = self._spectra(weights)
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
        heads = self._shape.num_heads
        grams: dict[int, HeadGrams] = {}
        products: dict[int, HeadProducts] = {}
        for layer in range(len(self._layers)):
            for head, (gram, own) in self._products(self._store, layer, nonfinite[layer], steps[:MOST_STEPS]).items():
                grams[layer * heads + head] = gram if gram.finite else gram.undefined()
                products[layer * heads + head] = own
        family = [index for index, gram in grams.items() if gram.finite]
        tested = family_tests([grams[index] for index in family], self._device)
        tests = dict(zip(family, tested, strict=True))
        functional = self._functional(probes)
        found = gradient_couplings(
            list(grams.values()),
            list(products.values()),
            [tests.get(index, NOT_TESTED) for index in grams],
            steps,
            [functional.get(index, math.nan) for index in grams],
        )
        return dict(zip(grams, found, strict=True))

    def _products(
        self,
        store: GradientStore | DeviceGradientStore,
        layer: int,
        nonfinite: list[tuple[str, ...]],
        steps: tuple[StepSpan, ...],
    ) -> dict[int, tuple[HeadGrams, HeadProducts]]:
        """Inner products of the heads of a layer whose inputs are finite, by head; none where it has no gradients."""
        accumulator, heads = self._layers[layer], self._of_layer(layer)
        sums, n = accumulator.gradients, self.num_sequences
        if sums is None or accumulator.key_sum is None:
            return {}
        keys = accumulator.key_sum / max(accumulator.key_count, 1)
        finite = [head for head, names in enumerate(nonfinite) if not names]
        if isinstance(store, DeviceGradientStore):
            pairs = list(zip(*store.products(heads, n, sums, keys, steps), strict=True))
            return {head: pairs[head] for head in finite}
        return {
            head: (
                head_grams(store, heads.start + head, n),
                head_products(store, heads.start + head, n, sums, head, keys[head], steps),
            )
            for head in finite
        }

    @property
    def _device(self) -> torch.device | None:
        """Where gradients are kept; None for the CPU."""
        return self._store.device if isinstance(self._store, DeviceGradientStore) else None

    def _spectra(self, weights: list[LayerWeights]) -> list[tuple[Spectrum | None, ...]]:
        if self._device is not None:
            return device_spectra(weights, self._shape.num_heads, self._device)
        with ThreadPoolExecutor(self._workers) as pool:
            return list(pool.map(lambda own: layer_spectra(own, self._shape.num_heads), weights))

    def _steps(self) -> tuple[StepSpan, ...]:
        of_group: dict[int, list[int]] = {}
        for index in range(self.num_sequences):
            of_group.setdefault(self._shape.groups[index], []).append(index)
        return tuple(StepSpan(step=self._shape.steps[s[0]], sequences=tuple(s)) for s in of_group.values())

    def _functional(self, probes: tuple[AttentionRecord, ...]) -> dict[int, float]:
        """Root of the score variance of the batch's error over that of the batch's gradient, by head index."""
        if self._store is None:
            return {}
        with ThreadPoolExecutor(self._workers) as pool:
            totals = np.concatenate(
                list(pool.map(lambda layer: self._variances(layer, probes), range(len(self._layers)))), axis=1
            )
        error, gradient = totals
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = np.sqrt(error / gradient)
        return dict(enumerate(ratio.tolist()))

    def _variances(self, layer: int, probes: tuple[AttentionRecord, ...]) -> np.ndarray:
        """float64 [2, H]: score variance of the batch's error and of its gradient for the heads of a layer."""
        heads = self._shape.num_heads
        records = [record for record in probes if record.layer == layer and record.x is not None]
        if not records or self._store is None:
            return np.zeros((2, heads))
        moves = self._store.means(("defect", "hp"), self._of_layer(layer), self.num_sequences)
        with strict_fp32(), single_thread():
            return summed_variance(records, moves.view(2, heads, self._shape.head_size, -1))
