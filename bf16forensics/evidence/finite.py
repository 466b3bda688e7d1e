"""Finding non-finite inputs, naming them, and keeping them from spoiling what they do not touch.

Shapes: H query heads, G key/value heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from bf16forensics.capture.record import AttentionRecord, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteRecord:
    """A record whose every tensor is finite, and what was replaced to get there."""

    #: The record with the affected heads' tensors set to 0; the record itself when all was finite.
    record: AttentionRecord
    #: For each query head, "name[sequence, head, token, feature]" of the first non-finite entry of each tensor.
    nonfinite: tuple[tuple[str, ...], ...]


def make_finite(record: AttentionRecord) -> FiniteRecord:
    """Names the non-finite entries of a record and zeroes the tensors of the heads that hold them.

    A non-finite key or value counts against every query head that reads it, visible or not: its evidence is withheld
    rather than trusted to a mask.
    """
    heads, group = record.num_heads, record.num_heads // record.num_kv_heads
    found: list[list[str]] = [[] for _ in range(heads)]
    changed: dict[str, Any] = {}
    suspects = _suspects(record)
    for name in ("q", "k", "v", "do"):
        if name not in suspects:
            continue
        tensor = getattr(record, name).clone()
        for index in range(tensor.shape[0]):
            bad = (~torch.isfinite(tensor[index])).nonzero()
            if len(bad) == 0:
                continue
            where = ", ".join(str(i) for i in (record.sequence, index, *bad[0].cpu().tolist()))
            readers = range(index * group, (index + 1) * group) if name in ("k", "v") else (index,)
            for head in readers:
                found[head].append(f"{name}[{where}]")
            tensor[index] = 0.0
        changed[name] = tensor
    if record.x is not None and "x" in suspects:
        bad = (~torch.isfinite(record.x)).nonzero()
        if len(bad):
            where = ", ".join(str(i) for i in (record.sequence, *bad[0].cpu().tolist()))
            for names in found:
                names.append(f"x[{where}]")
            changed["x"] = torch.nan_to_num(record.x, nan=0.0, posinf=0.0, neginf=0.0)
    clean = replace(record, **changed) if changed else record
    return FiniteRecord(record=clean, nonfinite=tuple(tuple(names) for names in found))


def _suspects(record: AttentionRecord) -> set[str]:
    """Names of the tensors whose sum is not finite.

    A sum is finite only if every entry is: one cheap pass decides the usual case (overflow only looks closer), and one
    answer for all of them waits for a device once.
    """
    sums = {name: t.sum().double() for name in ("q", "k", "v", "do", "x") if (t := getattr(record, name)) is not None}
    finite = torch.isfinite(torch.stack(list(sums.values()))).cpu().tolist()
    return {name for name, is_finite in zip(sums, finite, strict=True) if not is_finite}


def nonfinite_weights(weights: LayerWeights, num_heads: int) -> tuple[tuple[str, ...], ...]:
    """For each query head, "w_q[head, row, column]" and "w_k[...]" of the first non-finite entry of its weights."""
    found: list[list[str]] = [[] for _ in range(num_heads)]
    for name, tensor in (("w_q", weights.w_q), ("w_k", weights.w_k)):
        if tensor is None or torch.isfinite(tensor.sum()):
            continue
        group = num_heads // tensor.shape[0]
        for index in range(tensor.shape[0]):
            bad = (~torch.isfinite(tensor[index])).nonzero()
            if len(bad):
                where = ", ".join(str(i) for i in (index, *bad[0].cpu().tolist()))
                for head in range(index * group, (index + 1) * group):
                    found[head].append(f"{name}[{where}]")
    return tuple(tuple(names) for names in found)
