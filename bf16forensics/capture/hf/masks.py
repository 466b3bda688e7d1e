"""From a model's own mask to our geometry: guessed from what the call says, proved against the mask, else the mask.

A geometry of a few numbers keeps key ranges short and can be reported; the mask is what the model computes with. So
every geometry is compared with the mask on all rows of real queries, once for each distinct mask of a sequence, and
where none fits the mask itself is kept.

Shapes: H query heads, N queries, M keys.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from bf16forensics.capture.hf.attention import AttentionCall
from bf16forensics.errors import InputError
from bf16forensics.geometry.geometry import Geometry, split_additive_mask

#: Rows that are compared at once.
_ROWS = 1024


class SequenceMasks:
    """The geometries of one sequence's attention calls."""

    def __init__(self, real: torch.Tensor | None = None, position_ids: torch.Tensor | None = None) -> None:
        """Args: real, [N] bool, True where the token is real, None when all are; position_ids, [N] int64 as given."""
        self._real = real
        self._documents = _documents(position_ids) if real is None else None
        self._proved: dict[tuple[object, ...], tuple[torch.Tensor, Geometry]] = {}
        #: Layers whose visibility nothing but the model's own mask describes.
        self.kept_layers: set[int] = set()

    def geometry(self, call: AttentionCall, *, scale: float | None = None, softcap: float | None = None) -> Geometry:
        """The geometry of a call.

        Args:
            call: the attention call.
            scale: softmax scale instead of the call's; None for the call's.
            softcap: soft-cap where the call has none.

        Raises:
            InputError: the call has no mask, real queries may see padding, the mask depends on the hidden states, or
                the scale or the soft-cap cannot be.
        """
        mask = call.mask
        if mask is None:
            raise InputError(
                f"{_name(call)} calls attention without a mask: what a query may see is not known, and this model "
                "cannot be analysed"
            )
        if mask.requires_grad:
            raise InputError(f"{_name(call)} computes its attention mask from hidden states; it cannot be analysed")
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, call.causal, call.window)
        if key not in self._proved:
            # The mask is held so that its address stays its own.
            self._proved[key] = (mask, self._prove(call, mask))
        proved = self._proved[key][1]
        if proved.keep is not None and call.layer is not None:
            self.kept_layers.add(call.layer)
        return replace(
            proved,
            scale=call.scale if scale is None else scale,
            softcap=softcap if call.softcap is None else call.softcap,
        )

    @property
    def has_documents(self) -> bool:
        """Whether positions tell several documents in the sequence."""
        return self._documents is not None

    def _prove(self, call: AttentionCall, mask: torch.Tensor) -> Geometry:
        bias = None
        if mask.dtype != torch.bool:
            keep, bias = split_additive_mask(mask)
            every = torch.ones((1, 1, 1), dtype=torch.bool, device=mask.device)
            mask = every.expand(mask.shape) if keep is None else keep
        for geometry in self._guesses(call, mask):
            if self._equal(geometry, mask):
                return replace(geometry, bias=bias)
        below = Geometry(scale=1.0, causal=True, keep=mask, query_padding=self._real)
        kept = replace(below, causal=self._equal(below, mask), key_padding=self._real)
        if not self._equal(kept, mask):
            raise InputError(
                f"{_name(call)} lets real tokens attend to padded ones; it cannot be analysed with padding"
            )
        return replace(kept, bias=bias)

    def _guesses(self, call: AttentionCall, mask: torch.Tensor) -> Iterator[Geometry]:
        """Geometries that may describe the mask, the likeliest first."""
        num_keys = mask.shape[-1]
        seen = mask if self._real is None else mask[:, self._real[-mask.shape[1] :]]
        windows: list[int | None] = [call.window, None]
        if seen.numel():
            widest = int(seen.sum(-1).max())
            windows += [widest] if 0 < widest < num_keys else []
        documents = [None] if self._documents is None else [self._documents, None]
        for causal in (call.causal, not call.causal):
            for window in dict.fromkeys(windows):
                for ids in documents:
                    yield Geometry(
                        scale=1.0,
                        causal=causal,
                        window=window,
                        key_padding=self._real,
                        query_padding=self._real,
                        document_ids=ids,
                    )

    def _equal(self, geometry: Geometry, mask: torch.Tensor) -> bool:
        """Whether a geometry shows every real query exactly the keys of the mask."""
        num_queries, num_keys = mask.shape[-2:]
        for start in range(0, num_queries, _ROWS):
            end = min(start + _ROWS, num_queries)
            visible = geometry.visible((start, end), (0, num_keys), num_queries, num_keys, mask.device)
            same = mask[:, start:end] if visible is None else mask[:, start:end] == visible
            if self._real is not None:
                same = same[:, self._real[start:end]]
            if not bool(same.all()):
                return False
        return True


def _documents(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Documents as transformers tells them: a new one wherever a position is not its predecessor plus one."""
    if position_ids is None or len(position_ids) < 2:
        return None
    starts = torch.diff(position_ids) != 1
    if not bool(starts.any()):
        return None
    return torch.nn.functional.pad(starts.cumsum(0), (1, 0))


def _name(call: AttentionCall) -> str:
    name = type(call.module).__name__
    return name if call.layer is None else f"{name} of layer {call.layer}"
