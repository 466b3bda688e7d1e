"""A Hugging Face model over a recorded batch, as a source of records."""

from collections.abc import Iterator
from dataclasses import dataclass

from bf16forensics.capture.hf.capture import HFCapture
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.sequence import sequence_of, step_groups
from bf16forensics.capture.source import LossSink, SourceShape
from bf16forensics.load.batch import RecordedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSource:
    """A Hugging Face model over a recorded batch, as a `RecordSource`."""

    capture: HFCapture
    batch: RecordedBatch

    @property
    def shape(self) -> SourceShape:
        """Geometry of the model and of the batch."""
        structure, batch = self.capture.structure, self.batch
        return SourceShape(
            num_layers=len(structure.layers),
            num_heads=structure.num_heads,
            num_kv_heads=structure.num_kv_heads,
            head_size=structure.head_size,
            width=structure.width,
            num_queries=batch.num_tokens,
            steps=batch.steps,
            groups=step_groups(batch),
            step_sequences=batch.step_sequences,
        )

    @property
    def shape_words(self) -> str:
        """The model in one line: "llama, 30 layers, 9 heads (3 kv), head size 64, width 576, weights fp32"."""
        model, structure = self.capture.model, self.capture.structure
        heads, kv_heads = structure.num_heads, structure.num_kv_heads
        size, value_size = structure.head_size, structure.value_size
        return ", ".join(
            [
                model.family,
                f"{len(structure.layers)} layers",
                f"{heads} heads" if kv_heads == heads else f"{heads} heads ({kv_heads} kv)",
                f"head size {size}" if value_size == size else f"head size {size} (v {value_size})",
                f"width {model.config.hidden_size}",
                f"weights {model.weight_dtype}",
            ]
        )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Window of each layer as its attention call names it; None for none."""
        return tuple(layer.window for layer in self.capture.structure.layers)

    @property
    def layer_scales(self) -> tuple[float, ...]:
        """Softmax scale of each layer."""
        return tuple(layer.scale for layer in self.capture.structure.layers)

    @property
    def softcap(self) -> float | None:
        """Soft-cap of the attention scores; the largest where layers differ, None for none."""
        return max(
            (layer.softcap for layer in self.capture.structure.layers if layer.softcap is not None), default=None
        )

    @property
    def causal(self) -> bool:
        """Whether every layer's attention is causal."""
        return all(layer.causal for layer in self.capture.structure.layers)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the model, of how it runs and of the batch; more once sequences have been run."""
        scales, scale_notes = self.layer_scales, tuple[str, ...]()
        if len(set(scales)) > 1:
            scale_notes = (f"the softmax scale differs by layer, from {min(scales):g} to {max(scales):g}",)
        return (*self.capture.model.notes, *self.capture.notes, *scale_notes, *self.batch.notes)

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer by head."""
        return self.capture.weights(layer)

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Runs one sequence of the batch."""
        return self.capture.sequence_records(sequence_of(self.batch, sequence), on_loss)
