"""Kept records as safetensors files, which `localize --record` reads back."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import save_file

from bf16forensics.investigate.keep import KeptRecord
from bf16forensics.report.array_file import sorted_header

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """One file of a case, as case.json lists it."""

    #: Path inside the case, with forward slashes: "tensors/L1.H7.safetensors".
    file: str
    #: 0-based.
    layer: int
    head: int
    #: Positions among all sequences analysed, and their steps; None for an unknown step.
    sequences: tuple[int, ...]
    steps: tuple[int | None, ...]
    #: SHA-256 of the tensors' bytes in name order; the file's own header may differ between versions of the library.
    sha256: str
    size_bytes: int
    #: Names of the tensors.
    tensors: tuple[str, ...]


def write_record(path: Path, record: KeptRecord) -> TensorFile:
    """Writes one record in layout [batch, head, time, size] with one head, and waits until it is on disk.

    q, k, v and dO are stored in the record's storage format, which holds their values exactly; where it would not,
    they stay FP32. Everything else keeps its type. The metadata holds strings only.

    Args:
        path: the file; its folder exists.
        record: the record; NaN and Inf are stored as they are.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = record_tensors(record)
    metadata = {
        "layout": "bhtd",
        "dtype": record.storage,
        "layer": str(record.layer),
        "head": str(record.head),
        "recipe": record.recipe,
        "causal": str(record.causal).lower(),
        "window": "" if record.window is None else str(record.window),
        "softcap": "" if record.softcap is None else repr(record.softcap),
        "sequences": " ".join(map(str, record.sequences)),
    }
    save_file(tensors, path, metadata=metadata)
    with path.open("rb+") as stream:
        _sort_metadata(stream)
        stream.flush()
        os.fsync(stream.fileno())
    return TensorFile(
        file=f"tensors/{path.name}",
        layer=record.layer,
        head=record.head,
        sequences=record.sequences,
        steps=record.steps,
        sha256=tensors_sha256(tensors),
        size_bytes=path.stat().st_size,
        tensors=tuple(sorted(tensors)),
    )


def record_tensors(record: KeptRecord) -> dict[str, torch.Tensor]:
    """The tensors of a record under the names and shapes of a record file: q [S, 1, N, D], x [S, N, C], w_q [D, C]."""
    stored = {name: _stored(getattr(record, name), record.storage) for name in ("q", "k", "v", "do")}
    tensors = {name: tensor.unsqueeze(1) for name, tensor in stored.items() if tensor is not None}
    if record.mask is not None:
        tensors["mask"] = record.mask.unsqueeze(1)
    for name in ("x", "w_q", "w_k", "key_padding", "document_ids"):
        tensor = getattr(record, name)
        if tensor is not None:
            tensors[name] = tensor
    tensors["scale"] = torch.tensor(record.scale, dtype=torch.float64)
    # Copies: a view would drag its whole storage along, and the library refuses tensors that share one.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def tensors_sha256(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of the tensors' bytes in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sort_metadata(stream: BinaryIO) -> None:
    """Puts the metadata in order in place: the tensors of a long record are not read back for it."""
    length = int.from_bytes(stream.read(8), "little")
    header = sorted_header(stream.read(length))
    # The format pads its header with blanks; a text that grew (other escapes) would move the data: it stays.
    if len(header) <= length:
        stream.seek(8)
        stream.write(header.ljust(length))


def _stored(tensor: torch.Tensor | None, storage: str) -> torch.Tensor | None:
    """The tensor in its storage format if that loses nothing; NaN counts as equal to NaN."""
    if tensor is None:
        return None
    narrow = tensor.to(_DTYPES[storage])
    widened = narrow.to(tensor.dtype)
    same = (widened == tensor) | (widened.isnan() & tensor.isnan())
    return narrow if bool(same.all()) else tensor.to(torch.float32)
