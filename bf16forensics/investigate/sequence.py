"""One sequence of a run: its records through the dual pass, to the evidence of every layer. Runs in a worker thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bf16forensics.attention.backend import REFERENCE, ChosenBackend, run_dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.source import RecordSource
from bf16forensics.emulate.strict import single_thread, strict_fp32
from bf16forensics.evidence.accumulate import SequenceEvidence
from bf16forensics.evidence.finite import make_finite
from bf16forensics.evidence.flat import flat_direction
from bf16forensics.evidence.gradient import GradientParts, SummedParts, gradient_parts
from bf16forensics.evidence.observe import ObserveOptions, SequenceObservation, observe_sequence
from bf16forensics.evidence.summary import summarise
from bf16forensics.investigate.memory import give_memory_back
from bf16forensics.recipe.model import Recipe

#: Layers after which freed memory goes back to the system. More often costs page faults, more seldom memory.
_LAYERS_A_TRIM = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizeOptions:
    """How to run; nothing here changes a result except the recipe, the reference and the backend."""

    recipe: Recipe
    #: "fp32" or "fp64".
    reference: str
    #: Sequences computed at once; None takes one a processor core that this process may use.
    workers: int | None = None
    #: Whether to make the observation of the paper's appendix D as well.
    observe: bool = False
    #: What computes the dual pass.
    backend: ChosenBackend = REFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDone:
    """What one finished sequence contributes."""

    #: None where there is no loss.
    loss: float | None
    layers: tuple[SequenceEvidence, ...]
    #: Empty unless asked for.
    observed: tuple[SequenceObservation, ...]
    #: Its records, where they are to be kept.
    probes: tuple[AttentionRecord, ...]
    capture_s: float
    evidence_s: float
    #: (layer, why) of the calls that the reference took in the place of the backend that was chosen.
    by_reference: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceWork:
    """What every sequence of a run is put through."""

    source: RecordSource
    options: LocalizeOptions
    #: Takes layer, sequence and gradients; see `Collector.keep_gradients`.
    keep_gradients: Callable[[int, int, GradientParts], SummedParts]
    #: None for no observation.
    observe: ObserveOptions | None

    def run(self, sequence: int, keep: bool, stop: threading.Event) -> SequenceDone:
        """Computes one sequence.

        Args:
            sequence: its number.
            keep: whether to hand out its records.
            stop: set when nobody waits for the result any more.

        Raises:
            InterruptedError: `stop` was set.
        """
        losses: list[float] = []
        layers: list[SequenceEvidence] = []
        observed: list[SequenceObservation] = []
        kept: list[AttentionRecord] = []
        by_reference: list[tuple[int, str]] = []
        capture_s = evidence_s = 0.0
        with strict_fp32(), single_thread():
            before = time.perf_counter()
            for record in self.source.records(sequence, losses.append):
                captured = time.perf_counter()
                capture_s += captured - before
                if stop.is_set():
                    raise InterruptedError("stopped")
                evidence, observation, why_reference = self._evidence(record)
                layers.append(evidence)
                if observation is not None:
                    observed.append(observation)
                if why_reference is not None:
                    by_reference.append((record.layer, why_reference))
                if keep:
                    kept.append(record)
                if len(layers) % _LAYERS_A_TRIM == 0:
                    give_memory_back()
                before = time.perf_counter()
                evidence_s += before - captured
        give_memory_back()
        return SequenceDone(
            loss=losses[0] if losses else None,
            layers=tuple(layers),
            observed=tuple(observed),
            probes=tuple(kept),
            capture_s=capture_s,
            evidence_s=evidence_s,
            by_reference=tuple(by_reference),
        )

    def _evidence(self, raw: AttentionRecord) -> tuple[SequenceEvidence, SequenceObservation | None, str | None]:
        finite = make_finite(raw)
        record = finite.record
        ran = run_dual_pass(record, self.options.recipe, self.options.reference, self.options.backend)
        dual = ran.dual
        # The reference computes on the CPU wherever the record lies.
        record = record.to(dual.lse_lp.device)
        parts = None
        if dual.delta is not None and dual.dq is not None and record.x is not None:
            whole = gradient_parts(dual.delta, dual.dq, record.x, record.query_path)
            parts = self.keep_gradients(record.layer, record.sequence, whole)
        key_sum, key_count = flat_direction(record)
        evidence = SequenceEvidence(
            layer=record.layer,
            sequence=record.sequence,
            summary=summarise(record, dual, self.options.recipe.o),
            parts=parts,
            key_sum=key_sum,
            key_count=key_count,
            nonfinite=finite.nonfinite,
        )
        observation = None
        if self.observe is not None:
            observation = observe_sequence(record, dual, self.observe, finite.nonfinite)
        return evidence, observation, ran.why_reference
