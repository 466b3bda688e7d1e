"""Counting what a graph holds in memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Addresses of the storages of tensors."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


class Held:
    """Storages seen so far, each counted once."""

    def __init__(self, apart: frozenset[int]) -> None:
        """Args: apart, addresses of storages that do not count, such as those of mapped files."""
        self._seen = set(apart)
        #: Their size together.
        self.bytes = 0

    def add(self, *tensors: torch.Tensor) -> None:
        """Counts the storages of tensors that were not counted yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()


@contextmanager
def counting(apart: frozenset[int]) -> Iterator[Held]:
    """Counts what the graphs built inside the block save for their backward pass."""
    held = Held(apart)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.add(tensor)
        # A node that saves its own result would hold itself, and a graph that is never run backward would never go.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield held
