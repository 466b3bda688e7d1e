"""The record: what one attention call saw and got.

Shapes: H query heads, G key/value heads (H a multiple of G), N queries, M keys, D and E head sizes of q/k and v,
C width of the input of the query projection.
"""

from dataclasses import dataclass, replace

import torch

from bf16forensics.capture.path import QueryPath
from bf16forensics.geometry.geometry import Geometry

#: Fields of a record that are tensors.
_TENSORS = ("q", "k", "v", "do", "x", "labelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecord:
    """One attention call of one sequence.

    q, k, v and do are stored as FP32 tensors whose values are representable in `storage` (BF16 values, usually).
    """

    #: Layer, 0-based.
    layer: int
    #: Position of the sequence among all sequences analysed, 0-based.
    sequence: int
    #: Training step the batch was recorded for; None when unknown.
    step: int | None
    #: Format in which the implementation holds q, k, v and dO: "bf16" or "fp16" or "fp32".
    storage: str
    #: [H, N, D] queries.
    q: torch.Tensor
    #: [G, M, D] keys.
    k: torch.Tensor
    #: [G, M, E] values.
    v: torch.Tensor
    #: [H, N, E] gradient of the sequence's mean loss with respect to O; None when there is no loss.
    do: torch.Tensor | None
    #: [N, C] input of the query projection, FP32; None when unknown.
    x: torch.Tensor | None
    #: Masks, scale and score modifiers.
    geometry: Geometry
    #: [N] bool, False where the label is ignored; None when every position has a label.
    labelled: torch.Tensor | None = None
    #: From W_Q x to q; None where q is W_Q x itself (up to a bias and the rounding).
    query_path: QueryPath | None = None

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.k.shape[0]

    def to(self, device: torch.device) -> "AttentionRecord":
        """The same record with its tensors on a device.

        The query path is a graph and stays where it was recorded; it takes gradients and moves from any device.
        """
        known = {name: tensor for name in _TENSORS if (tensor := getattr(self, name)) is not None}
        moved = {name: tensor.to(device) for name, tensor in known.items()}
        return replace(self, **moved, geometry=self.geometry.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The projections of one layer, split by head. All FP32; [out, in] orientation.

    A field is None when the input does not hold that projection.
    """

    #: Layer, 0-based.
    layer: int
    #: [H, D, C] query projection of each head.
    w_q: torch.Tensor | None
    #: [G, D, C] key projection of each key/value head; another width than W_Q's where keys come from another input.
    w_k: torch.Tensor | None
