"""The gradients of every sequence on the CPU, kept until their inner products are taken.

A Gram matrix needs every pair of sequences, so the [D, C] matrices of a head stay until the end. They live in memory
while they fit the budget and in an unnamed temporary file beyond it.
"""

import tempfile

import numpy as np
import torch

#: Bytes of gradients held in memory before a temporary file takes over.
MEMORY_BUDGET_BYTES = 768 * 2**20


class GradientStore:
    """float32 [F, n, D * C] for each kind of gradient; F heads, n sequences."""

    #: Kinds, in storage order.
    KINDS = ("hp", "defect", "total")

    def __init__(self, num_heads: int, max_sequences: int, size: int, budget_bytes: int = MEMORY_BUDGET_BYTES) -> None:
        """Args: num_heads F; max_sequences the most that will be added; size D * C."""
        shape = (len(self.KINDS), num_heads, max_sequences, size)
        if int(np.prod(shape, dtype=np.int64)) * 4 <= budget_bytes:
            self._data: np.ndarray = np.zeros(shape, np.float32)
        else:
            # The mapping keeps the file alive after it is closed here.
            with tempfile.TemporaryFile(prefix="bf16forensics-") as file:
                self._data = np.memmap(file, np.float32, "w+", shape=shape)

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 array, not filled."""
        return np.empty(shape, np.float32)

    def place(self, values: np.ndarray | torch.Tensor) -> np.ndarray:
        """Arrays or tensors as arrays."""
        return values.cpu().numpy() if isinstance(values, torch.Tensor) else values

    def put(
        self,
        heads: slice,
        sequence: int,
        hp: np.ndarray | torch.Tensor,
        defect: np.ndarray | torch.Tensor,
        total: np.ndarray | torch.Tensor,
    ) -> None:
        """Stores the gradients [H, D, C] of one sequence for a range of heads."""
        for index, values in enumerate((hp, defect, total)):
            self._data[index, heads, sequence] = self.place(values).reshape(values.shape[0], -1)

    def means(self, kinds: tuple[str, ...], heads: slice, num_sequences: int) -> torch.Tensor:
        """float64 [kinds, H, D * C]: mean over sequences."""
        indices = range(heads.start, heads.stop)
        found = [[self.vectors(kind, index, num_sequences).mean(0) for index in indices] for kind in kinds]
        return torch.from_numpy(np.array(found))

    def vectors(self, kind: str, head: int, num_sequences: int) -> np.ndarray:
        """float64 [n, D * C] of one head."""
        return np.asarray(self._data[self.KINDS.index(kind), head, :num_sequences], np.float64)
