"""The weights of a model where its capture runs: read where they are mapped, held on a GPU while they fit."""

from collections.abc import Iterator, Mapping

import torch

from bf16forensics.capture.device import DeviceStore, room_on


class PlacedWeights:
    """Weights by the model's own names, FP32 where they are floating, on a device. Any thread may ask."""

    def __init__(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Args: weights, as stored; device of the capture."""
        self._weights = weights
        self._store = DeviceStore(lambda: room_on(device))
        self.device = device

    def get(self, name: str) -> torch.Tensor | None:
        """A weight, not to be written to; None where there is no such weight."""
        if self.device.type == "cpu" or name not in self._weights:
            stored = self._weights.get(name)
            return None if stored is None else _wide(stored)
        return self._store.get(name, lambda: _wide(self._weights[name].to(self.device)))

    def table(self, name: str) -> torch.Tensor | None:
        """A weight of which few rows are wanted: as stored, where it is stored."""
        return self._weights.get(name)

    def kept(self) -> Iterator[torch.Tensor]:
        """What is held on the device so far."""
        yield from self._store.tensors()


def _wide(stored: torch.Tensor) -> torch.Tensor:
    return stored.float() if stored.is_floating_point() else stored
