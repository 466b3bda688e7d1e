"""Choosing and joining the records that a case keeps.

Shapes: S sequences kept, N queries, M keys, C width.
"""

from collections.abc import Sequence

import torch

from bf16forensics.capture.device import CPU
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import RecordSource
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.investigate.keep import KeptRecord
from bf16forensics.recipe.model import Recipe


def kept_records(
    source: RecordSource, probes: Sequence[AttentionRecord], heads: Sequence[tuple[int, int]], recipe: Recipe
) -> tuple[KeptRecord, ...]:
    """The calls of some heads over the sequences whose records were held in memory.

    Args:
        source: for the projections.
        probes: records of the first sequences, on any device.
        heads: (layer, head) worth keeping, most important first.
        recipe: recipe of the run.

    Returns:
        One record a head, on the CPU, in the order given; empty when nothing was held.
    """
    return tuple(
        _kept(records, head, source.weights(layer), recipe)
        for layer, head in heads
        if (records := [record.to(CPU) for record in probes if record.layer == layer])
    )


def _kept(records: list[AttentionRecord], head: int, weights: LayerWeights, recipe: Recipe) -> KeptRecord:
    first = records[0]
    kv = head // (first.num_heads // first.num_kv_heads)
    do = [record.do[head] for record in records if record.do is not None]
    # Behind a rotation or a norm X alone does not give the gradient of W_Q, and a reader of the file could not tell.
    x = [record.x for record in records if record.x is not None and record.query_path is None]
    geometries = [record.geometry for record in records]
    return KeptRecord(
        name=f"L{first.layer}.H{head}",
        layer=first.layer,
        head=head,
        sequences=tuple(record.sequence for record in records),
        steps=tuple(record.step for record in records),
        storage=first.storage,
        recipe=recipe.name,
        q=torch.stack([record.q[head] for record in records]),
        k=torch.stack([record.k[kv] for record in records]),
        v=torch.stack([record.v[kv] for record in records]),
        do=torch.stack(do) if do else None,
        x=torch.stack(x) if x else None,
        w_q=None if weights.w_q is None else weights.w_q[head],
        w_k=None if weights.w_k is None else weights.w_k[kv],
        scale=first.geometry.scale,
        causal=first.geometry.causal,
        window=first.geometry.window,
        softcap=first.geometry.softcap,
        mask=_mask(geometries, head),
        key_padding=_joined([geometry.key_padding for geometry in geometries], True),
        document_ids=_joined([geometry.document_ids for geometry in geometries], 0),
    )


def _joined(parts: list[torch.Tensor | None], absent: float) -> torch.Tensor | None:
    """All sequences' parts as one tensor; None where no sequence has one, `absent` everywhere in those that lack it."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return torch.stack([torch.full_like(present[0], absent) if part is None else part for part in parts])


def _mask(geometries: list[Geometry], head: int) -> torch.Tensor | None:
    """Visibility and bias of one head as one mask: additive as soon as there is a bias, -inf where hidden."""
    own = [geometry.for_heads(slice(head, head + 1)) for geometry in geometries]
    keep = _joined([None if geometry.keep is None else geometry.keep[0] for geometry in own], True)
    bias = _joined([None if geometry.bias is None else geometry.bias[0] for geometry in own], 0)
    if bias is None or keep is None:
        return keep if bias is None else bias
    return bias.masked_fill(~keep, -torch.inf)
