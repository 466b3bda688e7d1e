"""trace-head: one head by token, one token by feature, one feature key by key.

Sequences are computed side by side, each on one thread of its own, and compared in their order: the result is the same
for any number of threads.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.attention.walk import walk_row
from bf16forensics.capture.source import RecordSource
from bf16forensics.emulate.strict import require_ieee, single_thread, strict_fp32
from bf16forensics.errors import InputError
from bf16forensics.evidence.ties import row_ties
from bf16forensics.evidence.trace.contributions import HeadRows, delta_errors, ranked_tokens, token_trace
from bf16forensics.evidence.trace.cumulative import check_accumulator, cumulative, walk_recipe_of
from bf16forensics.evidence.trace.results import HeadTrace, TokenTrace
from bf16forensics.evidence.trace.row_jumps import row_jumps
from bf16forensics.investigate.localize import SequencesDone
from bf16forensics.investigate.trace_notes import trace_notes
from bf16forensics.investigate.trace_sequence import SequenceTrace, TraceWork, require_token
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What to trace; 0-based."""

    layer: int
    head: int
    recipe: Recipe
    #: "fp32" or "fp64".
    reference: str = "fp64"
    #: See `evidence.cumulative.ACCUMULATOR_NAMES`.
    accumulator: str = "fp32-prefix"
    #: Sequence (as the source numbers it), query and column of V to trace; None for the ones with the largest error.
    sequence: int | None = None
    token: int | None = None
    feature: int | None = None
    #: Sequences whose rows are ranked and added up; None for all of the source. `sequence` is always among them.
    sequences: tuple[int, ...] | None = None
    #: False computes the rows around `token` only, in `sequence` (both needed), and ranks nothing: for long sequences.
    rank: bool = True
    #: Sequences computed at once.
    workers: int = 1
    #: Number of the head in the records, where these hold other heads than the model (a kept record holds one).
    head_of_record: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedHead:
    """The result, and the walks it was read off, which can be saved."""

    result: HeadTrace
    #: Walk of the accumulator, of the run's own recipe, and of one ascending tile over the row.
    walk: RowWalk
    run_walk: RowWalk
    ascending: RowWalk
    #: float64 [E] high-precision O of the row, as numbers.
    o_hp: tuple[float, ...]


def trace_head(
    source: RecordSource, request: TraceRequest, on_progress: Callable[[SequencesDone], None] | None = None
) -> TracedHead:
    """Traces one head of a source's records down to the additions of one row and feature.

    Without a token in the request it is the one with the largest |delta_err| (without dO, or by a recipe that is a
    forward pass only: the largest error of O in ulp); without a feature the one with the largest |dO * error| (else
    the largest |error|). Ties go to the first.

    Args:
        source: records; the layer's record of each sequence is used, and dropped but for one row's head.
        request: what to trace.
        on_progress: called after each sequence, in the calling thread.

    Returns:
        The trace and its walks.

    Raises:
        InputError: a number out of range, unknown accumulator or reference, tensors of the head that are not finite,
            no row to trace, or a row whose running sum cannot be computed (see `cumulative`).
        ForensicsError: FP32 products are not IEEE FP32 on this machine.

    Reference: arXiv 2510.04212, section 3.3 and figures 5 and 6.
    """
    numbers = _require_in_range(source, request)
    accumulator = check_accumulator(request.accumulator)
    walk_recipe_of(accumulator, request.recipe)
    require_ieee()
    rows: list[HeadRows] = []
    best: SequenceTrace | None = None
    best_index = 0
    with strict_fp32(), single_thread():
        for index, found in enumerate(_in_order(source, request, numbers)):
            rows.append(found.rows)
            is_wanted = request.sequence in (None, numbers[index])
            if request.sequence == numbers[index] and request.token is not None:
                require_token(request.token, found.record.sequence, len(found.rows.rows))
            if is_wanted and (best is None or _size(found) > _size(best)):
                best, best_index = found, index
            if on_progress is not None:
                on_progress(SequencesDone(done=index + 1, planned=len(numbers)))
        if best is None or best.token is None or best.vectors is None:
            raise InputError(_no_row(request))
        return _traced(source, request, accumulator, rows, best, best_index)


def _require_in_range(source: RecordSource, request: TraceRequest) -> tuple[int, ...]:
    """Numbers of the sequences to trace."""
    shape = source.shape
    known = range(shape.num_sequences)
    numbers = tuple(known) if request.sequences is None else request.sequences
    if not numbers:
        raise InputError("no sequence to trace: the input holds none")
    for name, value, count in (
        ("layer", request.layer, shape.num_layers),
        ("head", request.head if request.head_of_record is None else request.head_of_record, shape.num_heads),
        *(("sequence", number, shape.num_sequences) for number in numbers),
        ("sequence", request.sequence, shape.num_sequences),
        ("token", request.token, shape.num_queries),
    ):
        if value is not None and not 0 <= value < count:
            raise InputError(f"{name} {value} is out of range; the input has {name}s 0 to {count - 1}")
    if request.sequence is not None and request.sequence not in numbers:
        numbers = tuple(sorted({*numbers, request.sequence}))
    if request.rank:
        return numbers
    if request.token is None or request.sequence is None:
        raise InputError("tracing without a ranking needs both a sequence and a token")
    return (request.sequence,)


def _in_order(source: RecordSource, request: TraceRequest, numbers: tuple[int, ...]) -> Iterator[SequenceTrace]:
    """Yields the sequences in order; one more than there are workers is in work or waits to be taken."""
    work = TraceWork(
        source=source,
        layer=request.layer,
        head=request.head,
        head_of_record=request.head if request.head_of_record is None else request.head_of_record,
        recipe=request.recipe,
        reference=request.reference,
        token=request.token,
        rank=request.rank,
    )
    stop = threading.Event()
    workers = max(1, min(request.workers, len(numbers)))
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="sequence") as pool:
        pending: deque[Future[SequenceTrace]] = deque()
        following = 0
        try:
            while pending or following < len(numbers):
                while following < len(numbers) and len(pending) <= workers:
                    pending.append(pool.submit(work.run, numbers[following], stop))
                    following += 1
                yield pending.popleft().result()
        finally:
            stop.set()
            for future in pending:
                future.cancel()


def _size(found: SequenceTrace) -> float:
    return -1.0 if found.token is None else float(found.rows.size[found.token])


def _no_row(request: TraceRequest) -> str:
    where = "the input" if request.sequence is None else f"sequence {request.sequence}"
    if request.token is None:
        return f"no row to trace: every query of {where} is padding or sees no key"
    return f"token {request.token} of {where} does not exist, is padding or sees no key; choose another token"


def _traced(
    source: RecordSource,
    request: TraceRequest,
    accumulator: str,
    rows: list[HeadRows],
    best: SequenceTrace,
    best_index: int,
) -> TracedHead:
    if best.token is None or best.vectors is None:
        raise ValueError("no row was chosen")
    recipe, record, vectors = request.recipe, best.record, best.vectors
    chosen = best.rows.token_error(best_index, best.token)
    token = None if vectors.do is None else token_trace(chosen, vectors, recipe.o)
    feature = _feature(request, token, vectors.o_err.shape[0], chosen.o_err_feature)
    num_queries, num_keys = record.q.shape[1], record.k.shape[1]
    walks: dict[str, RowWalk] = {}

    def walk_of(name: str) -> RowWalk:
        walked = walk_recipe_of(name, recipe, num_keys)
        if walked.name not in walks:
            walks[walked.name] = walk_row(record, walked, chosen.token)
        return walks[walked.name]

    run, ascending, walk = walk_of("exact"), walk_of("fp32-prefix"), walk_of(accumulator)
    trace = cumulative(walk, feature, accumulator, float(vectors.o_hp[feature]), run=run)
    errors = delta_errors(rows)
    result = HeadTrace(
        layer=request.layer,
        head=request.head,
        sequences=tuple(each.sequence for each in rows),
        sequences_of_run=source.shape.num_sequences,
        num_queries=num_queries,
        num_features=vectors.o_err.shape[0],
        delta_err_sum=_sum(rows),
        rows=sum(int(each.rows.sum()) for each in rows),
        positive=sum(each.positive for each in rows),
        negative=sum(each.negative for each in rows),
        delta_err=errors,
        tokens=ranked_tokens(rows),
        token=token,
        traced=chosen,
        cumulative=trace,
        row_jumps=row_jumps(walk, accumulator),
        v_all=record.v[0, :, feature].numpy().copy(),
        ties=row_ties(run),
        notes=trace_notes(request.recipe, best, ranked=request.rank),
    )
    return TracedHead(result=result, walk=walk, run_walk=run, ascending=ascending, o_hp=tuple(vectors.o_hp.tolist()))


def _feature(request: TraceRequest, token: TokenTrace | None, num_features: int, largest: int) -> int:
    feature = request.feature
    if feature is None:
        return largest if token is None else token.features[0].feature
    if not 0 <= feature < num_features:
        raise InputError(f"feature {feature} is out of range; V has features 0 to {num_features - 1}")
    return feature


def _sum(rows: list[HeadRows]) -> float:
    """Sum of delta_err over the rows analysed; nan without a delta."""
    values = [each.delta_err[each.rows] for each in rows if each.delta_err is not None]
    return math.fsum(value for each in values for value in each.tolist()) if values else math.nan
