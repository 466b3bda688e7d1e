"""Records from a file of raw tensors: a kernel author or a test needs no model.

Shapes: B sequences, H query heads, G key/value heads, N queries, M keys, D head size, C width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, SourceShape
from bf16forensics.errors import InputError
from bf16forensics.geometry.geometry import Geometry, split_additive_mask
from bf16forensics.load.records import RawRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGeometry:
    """What the command line says about the attention call, beside what the file holds."""

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    #: None takes the file's scale, or 1 / sqrt(head size).
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSource:
    """A raw record as a `RecordSource` of one layer; its sequences are the entries of the batch axis."""

    raw: RawRecord
    options: RawGeometry
    #: [B or 1, H or 1, N, M] parts of the mask; None where the mask has no such part.
    keep: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def scale(self) -> float:
        """Softmax scale: the option, else the file's, else 1 / sqrt(head size)."""
        if self.options.scale is not None:
            return self.options.scale
        return 1.0 / math.sqrt(self.raw.q.shape[-1]) if self.raw.scale is None else self.raw.scale

    @property
    def shape(self) -> SourceShape:
        """Shapes of the file; every sequence belongs to one step of unknown number."""
        batch, heads, queries, head_size = self.raw.q.shape
        return SourceShape(
            num_layers=1,
            num_heads=heads,
            num_kv_heads=self.raw.k.shape[1],
            head_size=head_size,
            width=None if self.raw.x is None else self.raw.x.shape[-1],
            num_queries=queries,
            steps=(None,) * batch,
            groups=(0,) * batch,
            step_sequences=batch,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the file's tensors."""
        return self.raw.notes

    def weights(self, layer: int) -> LayerWeights:
        """The file's projections by head; None where it has none."""

        def by_head(weight: torch.Tensor | None, heads: int) -> torch.Tensor | None:
            return None if weight is None else weight.view(heads, -1, weight.shape[-1])

        return LayerWeights(
            layer=layer,
            w_q=by_head(self.raw.w_q, self.raw.q.shape[1]),
            w_k=by_head(self.raw.w_k, self.raw.k.shape[1]),
        )

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Yields the one record of a sequence; there is no loss."""
        raw = self.raw
        # Without W_Q there is nothing whose gradient X could carry.
        x = raw.x[sequence] if raw.x is not None and raw.w_q is not None else None
        yield AttentionRecord(
            layer=0,
            sequence=sequence,
            step=None,
            storage=raw.storage,
            q=raw.q[sequence].contiguous(),
            k=raw.k[sequence].contiguous(),
            v=raw.v[sequence].contiguous(),
            do=None if raw.do is None else raw.do[sequence].contiguous(),
            x=x,
            geometry=self._geometry(sequence),
        )

    def _geometry(self, sequence: int) -> Geometry:
        raw = self.raw
        queries, keys = raw.q.shape[2], raw.k.shape[2]
        padding = None if raw.key_padding is None else raw.key_padding[sequence]
        # Queries are the last N of the M positions, so a padded position is padding on both sides.
        query_padding = padding[keys - queries :] if padding is not None and queries <= keys else None

        def part(mask: torch.Tensor | None) -> torch.Tensor | None:
            return None if mask is None else mask[sequence if mask.shape[0] > 1 else 0]

        return Geometry(
            scale=self.scale,
            causal=self.options.causal,
            window=self.options.window,
            softcap=self.options.softcap,
            key_padding=padding,
            query_padding=query_padding,
            document_ids=None if raw.document_ids is None else raw.document_ids[sequence],
            keep=part(self.keep),
            bias=part(self.bias),
        )


def raw_source(raw: RawRecord, options: RawGeometry, sequences: int | None = None) -> RawSource:
    """Checks that the masks fit the geometry and splits an additive mask into visibility and bias.

    Args:
        raw: the record.
        options: what the file does not say.
        sequences: the first so many of the batch axis; None for all.

    Raises:
        InputError: document ids with queries and keys of different numbers; a NaN or +inf in an additive mask; a
            scale, window or soft-cap that cannot be.
    """
    batch, queries, keys = raw.q.shape[0], raw.q.shape[2], raw.k.shape[2]
    if sequences is not None and not 1 <= sequences <= batch:
        raise InputError(
            f"{raw.facts.path}: holds {batch} sequences; --sequences must be 1 to {batch}, got {sequences}"
        )
    if sequences is not None:
        raw = _first(raw, sequences)
    if raw.document_ids is not None and queries != keys:
        raise InputError(
            f"{raw.facts.path}: document_ids need as many queries as keys; got {queries} and {keys}. "
            "Give the documents as a mask"
        )
    keep, bias = raw.mask, None
    if raw.mask is not None and raw.mask.dtype != torch.bool:
        try:
            keep, bias = split_additive_mask(raw.mask)
        except InputError as error:
            raise InputError(f"{raw.facts.path}: {error}") from error
    source = RawSource(raw=raw, options=options, keep=keep, bias=bias)
    source._geometry(0)
    return source


def _first(raw: RawRecord, sequences: int) -> RawRecord:
    names = ("q", "k", "v", "do", "x", "key_padding", "document_ids")
    cut: dict[str, Any] = {
        name: None if (tensor := getattr(raw, name)) is None else tensor[:sequences] for name in names
    }
    mask = raw.mask if raw.mask is None or raw.mask.shape[0] == 1 else raw.mask[:sequences]
    return replace(raw, mask=mask, **cut)
