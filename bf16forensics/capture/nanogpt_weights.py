"""The weights of a nanoGPT checkpoint where its capture runs: mapped on the CPU, or held on a GPU while they fit.

Shapes: T tokens, C width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from bf16forensics.capture.device import DeviceStore, room_on
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTLayer

#: Changes the format of an operand of a product.
Cast = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTHead:
    """What follows the last layer."""

    #: [C]; the bias is None where the model has none.
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor | None
    #: [V, C]
    lm_head: torch.Tensor


class NanoGPTWeights:
    """The weights of a checkpoint on a device, FP32 but for operands of products, which may be cast beforehand."""

    def __init__(self, checkpoint: NanoGPTCheckpoint, device: torch.device, cast: Cast) -> None:
        """Args: checkpoint; device of the capture; cast, of weights and biases of linear layers, on a GPU only."""
        self._checkpoint = checkpoint
        self._device = device
        self._cast = cast
        self._store = DeviceStore(lambda: room_on(device))

    def layer(self, index: int) -> NanoGPTLayer:
        """The weights of a layer (0-based)."""
        if self._device.type == "cpu":
            return self._checkpoint.layer(index)
        return self._store.get(f"layer {index}", lambda: self._moved_layer(index))

    def head(self) -> NanoGPTHead:
        """The weights behind the last layer."""
        if self._device.type == "cpu":
            return self._head(lambda t: t, lambda t: t)
        return self._store.get("head", lambda: self._head(self._moved, lambda t: self._cast(self._moved(t))))

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] FP32: embeddings of tokens and positions, added.

        Args:
            ids: [T] int64, on the device.
            positions: [T] int64, likewise.
        """
        tokens, places = self._table("transformer.wte.weight"), self._table("transformer.wpe.weight")
        # Rows first: a table may be large and stored in another format.
        return tokens[ids].float() + places[positions].float()

    def _table(self, name: str) -> torch.Tensor:
        stored = self._checkpoint.tensors[name]
        return stored if self._device.type == "cpu" else self._store.get(name, lambda: self._moved(stored))

    def _moved_layer(self, index: int) -> NanoGPTLayer:
        layer = self._checkpoint.layer(index)
        moved: dict[str, torch.Tensor | None] = {}
        for field in fields(layer):
            weight: torch.Tensor | None = getattr(layer, field.name)
            is_norm = field.name.startswith("ln_")
            if weight is not None:
                weight = self._moved(weight) if is_norm else self._cast(self._moved(weight))
            moved[field.name] = weight
        return NanoGPTLayer(**moved)  # type: ignore[arg-type]

    def _head(self, moved: Cast, cast: Cast) -> NanoGPTHead:
        model = self._checkpoint
        bias = model.ln_f_bias
        return NanoGPTHead(
            norm_weight=moved(model.ln_f_weight),
            norm_bias=None if bias is None else moved(bias),
            lm_head=cast(model.lm_head),
        )

    def _moved(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self._device)
