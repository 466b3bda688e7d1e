"""One head of one sequence through the dual pass, kept as rows and as the one row that may be traced further.

Shapes: N queries, M keys, E head size of V. Runs in a worker thread.
"""

import threading
from dataclasses import dataclass, replace

import numpy as np
import torch

from bf16forensics.attention.dual import dual_pass, dual_pass_at
from bf16forensics.attention.result import DualPass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.source import RecordSource
from bf16forensics.emulate.rounding import ulp_of
from bf16forensics.emulate.strict import single_thread, strict_fp32
from bf16forensics.errors import InputError
from bf16forensics.evidence.summary import SIGN_FLOOR
from bf16forensics.evidence.trace.contributions import HeadRows, TokenVectors
from bf16forensics.investigate.memory import give_memory_back
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTrace:
    """What is kept of one sequence."""

    rows: HeadRows
    #: The record of the head alone, and query heads that share its keys and values.
    record: AttentionRecord
    group: int
    #: The row to trace: the one asked for, else the one with the largest error; None where there is no such row.
    token: int | None
    vectors: TokenVectors | None
    #: Whether dO was there.
    has_do: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWork:
    """What every sequence of a trace is put through."""

    source: RecordSource
    layer: int
    #: The head as it is called, and its number in the records.
    head: int
    head_of_record: int
    recipe: Recipe
    reference: str
    #: The row asked for; None for the one with the largest error.
    token: int | None
    #: Whether all rows are computed, or only the block of the row asked for.
    rank: bool

    def run(self, sequence: int, stop: threading.Event) -> SequenceTrace:
        """Computes the head in one sequence.

        Args:
            sequence: its number in the source.
            stop: set when nobody waits for the result any more.

        Raises:
            InputError: a tensor of the head is not finite, or there is no such query.
            InterruptedError: `stop` was set.
        """
        with strict_fp32(), single_thread():
            whole = self._record(sequence, stop)
            record = head_record(whole, self.head_of_record)
            del whole
            give_memory_back()
            self._require_usable(record)
            found = self._dual(record)
        give_memory_back()
        return found

    def _record(self, sequence: int, stop: threading.Event) -> AttentionRecord:
        for record in self.source.records(sequence, lambda loss: None):
            if stop.is_set():
                raise InterruptedError("stopped")
            if record.layer == self.layer:
                return record
        raise InputError(f"layer {self.layer} of sequence {sequence} was not captured: the model never ran it")

    def _require_usable(self, record: AttentionRecord) -> None:
        shape = self.source.shape
        own, kv_head = self.head_of_record, self.head_of_record // (shape.num_heads // shape.num_kv_heads)
        for name, head in (("q", own), ("k", kv_head), ("v", kv_head), ("do", own)):
            tensor: torch.Tensor | None = getattr(record, name)
            if tensor is None or torch.isfinite(tensor.sum()):
                continue
            bad = (~torch.isfinite(tensor[0])).nonzero()
            if len(bad):
                token, entry = bad[0].tolist()
                raise InputError(
                    f"L{self.layer}.H{self.head} cannot be traced: {name}[{record.sequence}, {head}, {token}, {entry}] "
                    f"(sequence, head of the record, token, entry) is {tensor[0, token, entry].item()}; leave the "
                    "sequence out, or look where the value comes from"
                )

    def _dual(self, record: AttentionRecord) -> SequenceTrace:
        num_queries = record.q.shape[1]
        if self.rank or self.token is None:
            dual, span = dual_pass(record, self.recipe, self.reference), (0, num_queries)
        else:
            require_token(self.token, record.sequence, num_queries)
            dual, span = dual_pass_at(record, self.recipe, self.token, self.reference)
        rows = head_rows(record, dual, self.recipe, span, None if self.rank else self.token)
        token = self._chosen(rows)
        return SequenceTrace(
            rows=rows,
            record=record,
            group=self.source.shape.num_heads // self.source.shape.num_kv_heads,
            token=token,
            vectors=None if token is None else _vectors(record, dual, token, span[0]),
            has_do=record.do is not None,
        )

    def _chosen(self, rows: HeadRows) -> int | None:
        token = int(rows.size.argmax()) if self.token is None else self.token
        return token if token < len(rows.rows) and rows.rows[token] else None


def require_token(token: int, sequence: int, num_queries: int) -> None:
    """Refuses a query that a sequence does not have.

    Raises:
        InputError: there is no such query.
    """
    if not 0 <= token < num_queries:
        raise InputError(f"token {token} is out of range; sequence {sequence} has tokens 0 to {num_queries - 1}")


def head_record(record: AttentionRecord, head: int) -> AttentionRecord:
    """The record of one query head with its key/value head; X and the path to q are left out."""
    kv = head // (record.num_heads // record.num_kv_heads)
    span, kv_span = slice(head, head + 1), slice(kv, kv + 1)
    return replace(
        record,
        q=record.q[span].clone(),
        k=record.k[kv_span].clone(),
        v=record.v[kv_span].clone(),
        do=None if record.do is None else record.do[span].clone(),
        x=None,
        query_path=None,
        geometry=record.geometry.for_heads(span),
    )


def head_rows(
    record: AttentionRecord, dual: DualPass, recipe: Recipe, span: tuple[int, int], only: int | None
) -> HeadRows:
    """The rows of a head, from the dual pass of some of them.

    Args:
        record: of the one head.
        dual: its rows [start, end) of `span`.
        recipe: format of O, and whether ones are counted.
        span: queries of `dual`; all others count as left out.
        only: the only query that counts; None for all of `span`.
    """
    num_queries = record.q.shape[1]
    real = record.geometry.query_padding
    here = torch.zeros(num_queries, dtype=torch.bool)
    here[slice(*span) if only is None else only] = True
    visible = _spread(dual.maxima.visible[0], span, num_queries)
    rows = here & (visible > 0) & (real if real is not None else here)
    largest, feature = dual.o_err[0].abs().max(-1)
    at_largest = torch.gather(dual.o_hp[0], -1, feature[:, None])[:, 0]

    def numbers(values: torch.Tensor) -> np.ndarray:
        return np.asarray(_spread(values, span, num_queries).numpy())

    delta = dual.delta
    return HeadRows(
        sequence=record.sequence,
        step=record.step,
        rows=np.asarray(rows.numpy()),
        visible=np.asarray(visible.numpy()),
        ones=numbers(dual.maxima.ones_rounded[0]) if recipe.anchored_at_maximum else None,
        delta_err=None if delta is None else numbers(delta.delta_err[0]),
        defect=None if delta is None else numbers(delta.defect[0]),
        sign_floor=None if delta is None else numbers(delta.magnitude[0] * SIGN_FLOOR),
        o_err_max_ulp=numbers(largest / ulp_of(at_largest, recipe.o)),
        o_err_feature=numbers(feature),
    )


def _spread(values: torch.Tensor, span: tuple[int, int], num_queries: int) -> torch.Tensor:
    """Rows of a block in their place among all rows; 0 elsewhere."""
    if span == (0, num_queries):
        return values
    whole = values.new_zeros(num_queries)
    whole[slice(*span)] = values
    return whole


def _vectors(record: AttentionRecord, dual: DualPass, token: int, first: int) -> TokenVectors:
    at = token - first
    return TokenVectors(
        do=None if record.do is None or dual.delta is None else record.do[0, token].double().numpy(),
        o_lp=dual.o_lp[0, at].clone().numpy(),
        o_hp=dual.o_hp[0, at].clone().numpy(),
        o_err=dual.o_err[0, at].clone().numpy(),
    )
