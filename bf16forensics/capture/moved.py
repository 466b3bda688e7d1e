"""A source whose records come to another device: what follows a head computes on the CPU, wherever the model ran."""

from collections.abc import Iterator

import torch

from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, RecordSource, SourceShape


class MovedSource:
    """A `RecordSource` that hands out another one's records on a device."""

    def __init__(self, source: RecordSource, device: torch.device) -> None:
        """Args: source, on any device; device, where its records are wanted."""
        self._source = source
        self._device = device

    @property
    def shape(self) -> SourceShape:
        """That of the source."""
        return self._source.shape

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the source."""
        return self._source.notes

    def weights(self, layer: int) -> LayerWeights:
        """Those of the source."""
        return self._source.weights(layer)

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """The records of the source, moved."""
        for record in self._source.records(sequence, on_loss):
            yield record.to(self._device)
