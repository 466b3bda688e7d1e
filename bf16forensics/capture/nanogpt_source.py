"""A nanoGPT checkpoint over a recorded batch, as a source of records."""

from collections.abc import Iterator
from dataclasses import dataclass

from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.sequence import sequence_of, step_groups
from bf16forensics.capture.source import LossSink, SourceShape
from bf16forensics.load.batch import RecordedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTSource:
    """A nanoGPT checkpoint over a recorded batch, as a `RecordSource`."""

    capture: NanoGPTCapture
    batch: RecordedBatch

    @property
    def shape(self) -> SourceShape:
        """Geometry of the model and of the batch."""
        config = self.capture.checkpoint.config
        return SourceShape(
            num_layers=config.n_layer,
            num_heads=config.n_head,
            num_kv_heads=config.n_head,
            head_size=config.n_embd // config.n_head,
            width=config.n_embd,
            num_queries=self.batch.num_tokens,
            steps=self.batch.steps,
            groups=step_groups(self.batch),
            step_sequences=self.batch.step_sequences,
        )

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer by head."""
        return self.capture.weights(layer)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the checkpoint and to the batch, and where the model ran unless on the CPU."""
        return (*self.capture.checkpoint.notes, *self.batch.notes, *self.capture.notes)

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Runs one sequence of the batch."""
        return self.capture.sequence_records(sequence_of(self.batch, sequence), on_loss)
