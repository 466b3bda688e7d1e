"""One head's attention calls from a file that an earlier run kept, under the numbers that they had in that run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bf16forensics.capture.raw import RawSource
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, SourceShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSource:
    """A record of one head as a `RecordSource`: its sequences are the first of the run, its head is number 0."""

    raw: RawSource
    #: Layer of the head in the model, 0-based.
    layer: int
    #: Sequences by their numbers in the run, in the order of the file, and their training steps.
    sequences: tuple[int, ...]
    steps: tuple[int | None, ...]

    @property
    def shape(self) -> SourceShape:
        """Shapes of the file, with the layers up to the head's own."""
        return replace(self.raw.shape, num_layers=self.layer + 1, steps=self.steps)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the file's tensors."""
        return self.raw.notes

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of the head, where the file has them."""
        return replace(self.raw.weights(0), layer=layer)

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Yields the record of the sequence at this position of the file, named as in the run; there is no loss."""
        for record in self.raw.records(sequence, on_loss):
            named = replace(record, layer=self.layer, sequence=self.sequences[sequence], step=self.steps[sequence])
            yield named
