"""localize: every head of every layer over every recorded sequence, streamed into running statistics.

Sequences are computed side by side, each on one thread of its own, and added in their order: the result is the same
for any number of threads, and no sequence depends on its neighbours in the batch.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from bf16forensics.capture.device import any_turn
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.source import RecordSource, SourceShape
from bf16forensics.emulate.strict import require_ieee, single_thread, strict_fp32
from bf16forensics.evidence.observe_results import Observation
from bf16forensics.evidence.results import HeadEvidence
from bf16forensics.evidence.ties import tie_point
from bf16forensics.investigate.collect import Collector
from bf16forensics.investigate.cores import usable_cores
from bf16forensics.investigate.interrupts import interrupts_deferred
from bf16forensics.investigate.observe import ObservationCollector, observe_options
from bf16forensics.investigate.sequence import LocalizeOptions, SequenceDone, SequenceWork

#: Sequences whose records stay in memory: for the functional figure and for the case.
PROBE_SEQUENCES = 4
#: Bytes of records held at most; at least one sequence is always held.
PROBE_BUDGET_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesDone:
    """Told to the caller after each sequence."""

    done: int
    planned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsFound:
    """Outcome of the run before it is joined with what was read from files."""

    heads: tuple[HeadEvidence, ...]
    #: Sequences finished, and mean loss over them (nan without a loss).
    sequences: int
    loss: float
    #: Seconds of all workers together, and of the whole run on the clock.
    capture_work_s: float
    evidence_work_s: float
    analysis_s: float
    interrupted: bool
    #: Records of the first sequences, in order.
    probes: tuple[AttentionRecord, ...]
    #: None unless asked for.
    observation: Observation | None
    #: (layer, why) of the calls that the reference took in the place of the chosen backend, each once, in order.
    by_reference: tuple[tuple[int, str], ...] = ()


def find_heads(
    source: RecordSource,
    options: LocalizeOptions,
    on_progress: Callable[[SequencesDone], None] | None = None,
    is_decided: "Callable[[HeadsFound], bool] | None" = None,
) -> HeadsFound:
    """Runs the dual pass over every record of a source and assembles the evidence of every head.

    Ctrl-C stops after the sequences that are being computed; what is finished is returned with `interrupted` set
    (a second Ctrl-C stops at once).

    Args:
        source: records and weights.
        options: recipe, reference precision, workers.
        on_progress: called after each sequence, in the calling thread.
        is_decided: with it the run may end early: called with what was found so far whenever a recorded step is
            complete, and ends the run by returning True.

    Returns:
        The evidence of the sequences that were finished.

    Raises:
        KeyboardInterrupt: stopped before the first sequence was finished.
        ForensicsError: FP32 products are not IEEE FP32 on this machine.
    """
    shape = source.shape
    require_ieee()
    # Sequences side by side would only wait for one another on a GPU.
    workers = options.workers or (1 if options.backend.on_gpu else usable_cores())
    recipe = options.recipe
    collector = Collector(source, workers, ones_counted=recipe.anchored_at_maximum, tie_point=tie_point(recipe))
    observe = observe_options(shape, options.recipe, options.reference) if options.observe else None
    observed = None if observe is None else ObservationCollector(observe)
    probes = _ProbeKeeper(shape)
    losses: list[float] = []
    work = [0.0, 0.0]
    by_reference: set[tuple[int, str]] = set()
    started = time.perf_counter()

    def found(interrupted: bool) -> HeadsFound:
        return HeadsFound(
            heads=collector.heads(probes.records),
            sequences=collector.num_sequences,
            loss=sum(losses) / len(losses) if losses else float("nan"),
            capture_work_s=work[0],
            evidence_work_s=work[1],
            analysis_s=time.perf_counter() - started,
            interrupted=interrupted,
            probes=probes.records,
            observation=None if observed is None else observed.result(),
            by_reference=tuple(sorted(by_reference)),
        )

    interrupted = False
    with strict_fp32(), single_thread():
        job = SequenceWork(source=source, options=options, keep_gradients=collector.keep_gradients, observe=observe)
        results = _run_in_order(job, probes, shape.num_sequences, min(workers, max(shape.num_sequences, 1)))
        try:
            for index, done in enumerate(results):
                with interrupts_deferred(), any_turn():
                    collector.add(done.layers)
                    if observed is not None:
                        observed.add(done.observed)
                    probes.keep(done.probes)
                    if done.loss is not None:
                        losses.append(done.loss)
                    by_reference.update(done.by_reference)
                    work[0] += done.capture_s
                    work[1] += done.evidence_s
                # A sequence of a large model holds much, and its sums are taken.
                del done
                if on_progress is not None:
                    on_progress(SequencesDone(done=index + 1, planned=shape.num_sequences))
                ends_step = index + 1 == shape.num_sequences or shape.groups[index + 1] != shape.groups[index]
                if is_decided is not None and ends_step:
                    with any_turn():
                        so_far = found(False)
                    if is_decided(so_far):
                        return so_far
        except KeyboardInterrupt:
            interrupted = True
            if collector.num_sequences == 0:
                raise
        finally:
            results.close()
        return found(interrupted)


def _run_in_order(
    work: SequenceWork, probes: "_ProbeKeeper", num_sequences: int, workers: int
) -> Generator[SequenceDone, None, None]:
    """Yields finished sequences in their order; one more than there are workers is in work or waits to be taken."""
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="sequence") as pool:
        pending: deque[Future[SequenceDone]] = deque()
        following = 0
        try:
            while pending or following < num_sequences:
                while following < num_sequences and len(pending) <= workers:
                    pending.append(pool.submit(work.run, following, probes.wants(following), stop))
                    following += 1
                yield pending.popleft().result()
        finally:
            stop.set()
            for future in pending:
                future.cancel()


class _ProbeKeeper:
    """Holds the records of the first sequences within a budget."""

    def __init__(self, shape: SourceShape) -> None:
        # Beside q, k, v and dO a record may hold the graph from the projection to q, about four tensors of its size.
        per_record = shape.num_queries * (
            2 * shape.head_size * (3 * shape.num_heads + shape.num_kv_heads) + (shape.width or 0)
        )
        per_sequence = 4 * per_record * shape.num_layers
        self._count = max(1, min(PROBE_SEQUENCES, PROBE_BUDGET_BYTES // max(per_sequence, 1)))
        self._records: list[AttentionRecord] = []

    def wants(self, sequence: int) -> bool:
        """Whether a sequence's records should be kept."""
        return sequence < self._count

    def keep(self, records: tuple[AttentionRecord, ...]) -> None:
        """Adds the records of one sequence."""
        self._records.extend(records)

    @property
    def records(self) -> tuple[AttentionRecord, ...]:
        """What was kept, in order of sequence."""
        return tuple(self._records)
