"""A nanoGPT checkpoint over a recorded batch, as a source of records."""

from collections.abc import Iterator
from dataclasses import dataclass

from bf16forensics.capture.nanogpt import NanoGPTCapture, SequenceInput
from bf16forensics.capture.record import AttentionRecord, LayerWeights
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
        lines = self.batch.line_of_sequence
        groups = tuple(_group(lines[i], self.batch.steps[i]) for i in range(self.batch.num_sequences))
        return SourceShape(
            num_layers=config.n_layer,
            num_heads=config.n_head,
            num_kv_heads=config.n_head,
            head_size=config.n_embd // config.n_head,
            width=config.n_embd,
            num_queries=self.batch.num_tokens,
            steps=self.batch.steps,
            groups=groups,
            step_sequences=self.batch.step_sequences,
        )

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer by head."""
        return self.capture.weights(layer)

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Runs one sequence of the batch."""
        batch = self.batch
        return self.capture.sequence_records(
            SequenceInput(
                index=sequence,
                step=batch.steps[sequence],
                ids=batch.ids[sequence],
                labels=batch.labels[sequence],
                position_ids=None if batch.position_ids is None else batch.position_ids[sequence],
                real=None if batch.attention_mask is None else batch.attention_mask[sequence],
            ),
            on_loss,
        )


def _group(line: int | None, step: int | None) -> int:
    """Sequences of one line, or of one step where there are no lines, belong together."""
    if line is not None:
        return line
    return 0 if step is None else step
