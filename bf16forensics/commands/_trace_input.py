"""The head that trace-head is asked for, from a case or straight from an input: its records and what to say of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.commands._case import Case
from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.capture.record import AttentionRecord, LayerWeights
    from bf16forensics.capture.source import LossSink, RecordSource, SourceShape
    from bf16forensics.commands._source import Opened
    from bf16forensics.load.files import FileFacts
    from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInput:
    """The records of one head, and where they come from."""

    source: "RecordSource"
    #: The head as it is called, 0-based.
    layer: int
    head: int
    #: Its number in the records of the source: 0 in a file that holds nothing but this head.
    head_of_source: int
    #: Sequences of the source that may be traced, from the first on, and those of the whole run.
    sequences: int
    sequences_of_run: int
    files: "tuple[FileFacts, ...]"
    #: "nanogpt", "hf" or "record".
    kind: str
    shape: str
    activations: str | None
    #: Directory of the case and recipe of its run, under which the tensors were captured; None without a case.
    case: Path | None
    case_recipe: "Recipe | None"
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenHead:
    """A head, and why this one where nobody named it."""

    layer: int
    head: int
    note: str | None = None


def choose_head(
    layer: int | None,
    head: int | None,
    *,
    num_layers: int,
    num_heads: int,
    ranking: tuple[tuple[int, int], ...] = (),
) -> ChosenHead:
    """The head to trace: the one named, the first of the ranking, or the only one.

    Args:
        layer: as given, None where it was not.
        head: as given, None where it was not.
        num_layers: layers there are.
        num_heads: query heads of each.
        ranking: (layer, head), the most important first; empty where nothing was ranked.

    Raises:
        InputError: out of range, or nothing says which head.
    """
    note = None
    if layer is None and head is None and ranking:
        layer, head = ranking[0]
        note = f"no --layer and --head: L{layer}.H{head}, which ranks first in the case"
    return ChosenHead(layer=_number("layer", layer, num_layers), head=_number("head", head, num_heads), note=note)


def _number(name: str, value: int | None, count: int) -> int:
    if value is None and count == 1:
        return 0
    if value is None:
        raise InputError(f"--{name} is missing: give a number from 0 to {count - 1} (localize ranks the heads)")
    if not 0 <= value < count:
        raise InputError(f"--{name} {value} does not exist: give a number from 0 to {count - 1}")
    return value


def case_input(
    case: Case,
    layer: int | None,
    head: int | None,
    *,
    sequence: int | None = None,
    sequences: int | None = None,
    recapture: bool = False,
) -> TraceInput:
    """The records of a head of a case.

    Args:
        case: the case.
        layer: layer and head as given, None where they were not.
        head: likewise.
        sequence: the one to trace, as numbered in the run; None for any. One that the case did not keep is captured.
        sequences: the first so many; None for all that there are.
        recapture: capture again even if the head was kept.

    Raises:
        InputError: as for `choose_head` and `case_head`; sequences that the run did not have.
    """
    from bf16forensics.commands._case_source import case_head

    chosen = choose_head(layer, head, num_layers=case.num_layers, num_heads=case.num_heads, ranking=case.ranking)
    if sequence is not None and not 0 <= sequence < case.sequences:
        raise InputError(f"--sequence {sequence} does not exist: the run had sequences 0 to {case.sequences - 1}")
    kept = case.kept_file(chosen.layer, chosen.head)
    was_not_kept = sequence is not None and kept is not None and sequence >= len(kept.sequences)
    found = case_head(case, chosen.layer, chosen.head, recapture=recapture or was_not_kept)
    if sequences is not None and sequences > found.sequences:
        more = "" if found.recaptured or found.sequences == case.sequences else "; --recapture gives all of the run"
        raise InputError(f"--sequences {sequences}: the case has {found.sequences} of this head{more}")
    return TraceInput(
        source=found.source,
        layer=chosen.layer,
        head=chosen.head,
        head_of_source=found.head,
        sequences=found.sequences if sequences is None else sequences,
        sequences_of_run=case.sequences,
        files=case.files,
        kind=case.kind,
        shape=case.shape,
        activations=case.activations,
        case=case.directory,
        case_recipe=case.recipe,
        notes=(*([] if chosen.note is None else [chosen.note]), *found.notes),
    )


def opened_input(opened: "Opened", layer: int | None, head: int | None) -> TraceInput:
    """The records of a head of a checkpoint with its batch, or of a record.

    Raises:
        InputError: as for `choose_head`.
    """
    shape = opened.source.shape
    chosen = choose_head(layer, head, num_layers=shape.num_layers, num_heads=shape.num_heads)
    return TraceInput(
        source=opened.source,
        layer=chosen.layer,
        head=chosen.head,
        head_of_source=chosen.head,
        sequences=shape.num_sequences,
        sequences_of_run=shape.num_sequences,
        files=opened.files,
        kind=opened.kind,
        shape=opened.shape,
        activations=opened.activations,
        case=None,
        case_recipe=None,
        notes=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """One attention call in words and numbers."""

    #: "bf16", "fp16" or "fp32".
    storage: str
    #: Elements of one query vector.
    head_size: int
    #: Whether it is causal or has a window.
    has_edge: bool
    #: "scale 0.125, causal (bottom-right), no window, no soft-cap".
    geometry: str


class WatchedSource:
    """A source that remembers what the attention calls of one layer are like, as their records state it."""

    def __init__(self, source: "RecordSource", layer: int) -> None:
        self._source, self._layer = source, layer
        #: Of the first call; None before there was one.
        self.call: CallFacts | None = None

    @property
    def shape(self) -> "SourceShape":
        """That of the source."""
        return self._source.shape

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the source."""
        return self._source.notes

    def weights(self, layer: int) -> "LayerWeights":
        """Those of the source."""
        return self._source.weights(layer)

    def records(self, sequence: int, on_loss: "LossSink") -> "Iterator[AttentionRecord]":
        """The records of the source."""
        for record in self._source.records(sequence, on_loss):
            if record.layer == self._layer and self.call is None:
                self.call = _call_facts(record)
            yield record


def _call_facts(record: "AttentionRecord") -> CallFacts:
    from bf16forensics.verdict.words import number

    geometry = record.geometry
    words = (
        f"scale {number(geometry.scale, 6)}",
        "causal (bottom-right)" if geometry.causal else "not causal",
        "no window" if geometry.window is None else f"window {geometry.window}",
        "no soft-cap" if geometry.softcap is None else f"soft-cap {number(geometry.softcap)}",
    )
    return CallFacts(
        storage=record.storage,
        head_size=record.q.shape[-1],
        has_edge=geometry.causal or geometry.window is not None,
        geometry=", ".join(words),
    )
