"""Where records come from: a model running over a recorded batch, or a file. One protocol for both."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from bf16forensics.capture.record import AttentionRecord, LayerWeights


class LossSink(Protocol):
    """Receives a sequence's mean loss once it is known."""

    def __call__(self, loss: float, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShape:
    """What the records of a source have in common."""

    num_layers: int
    #: Query heads and key/value heads of every layer.
    num_heads: int
    num_kv_heads: int
    #: Elements of one query vector.
    head_size: int
    #: Width C of the input of the QKV projection; None when records carry no X.
    width: int | None
    #: Most queries of a sequence.
    num_queries: int
    #: Training step of each sequence, in order; None where unknown.
    steps: tuple[int | None, ...]
    #: Recorded group (line, step) of each sequence: equal numbers belong to one step.
    groups: tuple[int, ...]
    #: Sequences of one whole recorded step, before any cut.
    step_sequences: int

    @property
    def num_sequences(self) -> int:
        """Sequences of the source."""
        return len(self.steps)


class RecordSource(Protocol):
    """Yields the attention records of each sequence. Safe to call from several threads at once."""

    @property
    def shape(self) -> SourceShape:
        """What is known without computing anything."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the input and of how it is run; may grow while sequences are run."""

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer by head; fields None where unknown."""

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Yields one record a layer, in any order, calling `on_loss` once before the first where there is a loss."""
