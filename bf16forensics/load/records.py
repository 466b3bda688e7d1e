"""Raw records: q, k, v, dO and what goes with them, brought to one layout and one storage format.

Shapes: B sequences, H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v, C width.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from bf16forensics.emulate.rounding import changed_by_cast, round_to
from bf16forensics.errors import InputError
from bf16forensics.load.files import FileFacts
from bf16forensics.load.names import three_of
from bf16forensics.load.record_shapes import check_core, check_extras, check_mask, check_positions
from bf16forensics.load.tensors import NAMELESS, TensorFile, floating, read_tensors

#: Axis orders of q, k, v and dO: batch, head, time, dim.
LAYOUTS = ("bhtd", "bthd")
#: Formats in which the implementation may hold q, k, v and dO.
STORAGE_FORMATS = ("bf16", "fp16", "fp32")
_CORE = ("q", "k", "v", "do")
_EXTRAS = ("x", "w_q", "w_k")
_NAMES = frozenset({*_CORE, *_EXTRAS, "mask", "key_padding", "document_ids", "scale", "layout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """The tensors of one record file, FP32, heads before time. Non-finite values are kept: they become findings."""

    #: [B, H, N, D]; values representable in `storage`, as for k, v and do.
    q: torch.Tensor
    #: [B, G, M, D].
    k: torch.Tensor
    #: [B, G, M, E].
    v: torch.Tensor
    #: [B, H, N, E]; None when absent.
    do: torch.Tensor | None
    #: [B, N, C] input of the QKV projection; None when absent.
    x: torch.Tensor | None
    #: [H*D, C] query projection, [out, in]; None when absent.
    w_q: torch.Tensor | None
    #: [G*D, C] key projection; None when absent.
    w_k: torch.Tensor | None
    #: [B or 1, H or 1, N, M]: bool, True where visible; or additive in the floating dtype of the file, whose lowest
    #: number has a meaning. None when absent.
    mask: torch.Tensor | None
    #: [B, M] bool, True where the key is real; None when absent.
    key_padding: torch.Tensor | None
    #: [B, M] int64; None when absent.
    document_ids: torch.Tensor | None
    #: Softmax scale stored in the file; None when absent.
    scale: float | None
    #: "bf16", "fp16" or "fp32".
    storage: str
    #: Axis order of the file: "bhtd" or "bthd".
    layout: str
    #: Cast errors and other things a reader must know.
    notes: tuple[str, ...]
    #: Tensors of the file that no name of a record claims.
    unused_tensors: tuple[str, ...]
    facts: FileFacts


def load_record(path: str | Path, *, layout: str | None = None, dtype: str | None = None) -> RawRecord:
    """Reads a record from one safetensors, npz or torch file, or from a folder of NAME.npy.

    The layout is never guessed: it is given, or stored in the file (safetensors metadata or an entry "layout", in a
    folder layout.txt). q, k, v and dO are rounded once to the storage format; what that changed is noted. x, w_q and
    w_k are not rounded below FP32. NaN and infinities are kept and are no error here; every shape is checked first.

    Args:
        path: file or folder.
        layout: "bhtd" or "bthd"; None to take the stored one.
        dtype: storage format, which also tells that 2-byte codes are BF16 when it is "bf16"; None for BF16 storage
            without that permission.

    Returns:
        The record.

    Raises:
        InputError: unreadable; layout unknown or contradictory; q, k or v missing; shapes that do not fit; a dtype
            that is no floating format; codes that nobody declared.
    """
    if dtype is not None and dtype not in STORAGE_FORMATS:
        raise InputError(f"--dtype must be one of {', '.join(STORAGE_FORMATS)}; got {dtype}")
    file = read_tensors(path, "record")
    where = file.path
    missing = [name for name in _CORE[:3] if name not in file.tensors]
    if missing:
        found = three_of(name or "(a tensor without a name)" for name in file.tensors)
        wrong = f" ({three_of(file.other_names)} are no tensors)" if file.other_names else ""
        raise InputError(f"{where}: no tensor {', '.join(missing)}; found {found}{wrong}. Name them q, k, v and do")
    order = _layout(file, layout)
    storage = dtype or "bf16"
    notes = list(file.notes)
    core = {name: _axes(file, name, order, dtype) for name in _CORE if name in file.tensors}
    check_core(core, where, order)
    stored = {name: _stored(tensor, name, storage, notes) for name, tensor in core.items()}
    batch, heads, queries, _ = stored["q"].shape
    keys = stored["k"].shape[2]
    extras = {name: _plain(file, name, dtype) for name in _EXTRAS if name in file.tensors}
    check_extras(extras, stored, where)
    if "do" not in stored:
        notes.append("no do in the record: nothing about delta or gradients can be judged")
    return RawRecord(
        q=stored["q"],
        k=stored["k"],
        v=stored["v"],
        do=stored.get("do"),
        x=extras.get("x"),
        w_q=extras.get("w_q"),
        w_k=extras.get("w_k"),
        mask=check_mask(_mask_values(file, dtype), (batch, heads, queries, keys), where),
        key_padding=check_positions(file.tensors.get("key_padding"), "key_padding", batch, keys, where),
        document_ids=check_positions(file.tensors.get("document_ids"), "document_ids", batch, keys, where),
        scale=_scale(file),
        storage=storage,
        layout=order,
        notes=tuple(notes),
        unused_tensors=tuple(name for name in file.tensors if name not in _NAMES and name != NAMELESS),
        facts=file.facts,
    )


def _layout(file: TensorFile, given: str | None) -> str:
    stored = file.texts.get("layout")
    stored = None if stored is None else stored.strip().lower()
    for source, value in (("--layout", given), (f"{file.path}: the stored layout", stored)):
        if value is not None and value not in LAYOUTS:
            raise InputError(f"{source} must be {' or '.join(LAYOUTS)}; got {value[:40]}")
    if given is not None and stored is not None and given != stored:
        raise InputError(f"{file.path}: --layout {given} contradicts the stored layout {stored}; drop the wrong one")
    order = given or stored
    if order is None:
        shape = list(file.tensors["q"].shape)
        raise InputError(f"{file.path}: the layout of q {shape} is not stored; give --layout bhtd (heads before time) "
                         "or bthd")  # fmt: skip
    return order


def _codes(file: TensorFile, name: str, dtype: str | None) -> str | None:
    return file.code_formats.get(name, "bf16" if dtype == "bf16" else None)


def _axes(file: TensorFile, name: str, order: str, dtype: str | None) -> torch.Tensor:
    tensor = floating(file.tensors[name], name, file.path, _codes(file, name, dtype))
    if tensor.dim() != 4:
        raise InputError(f"{file.path}: '{name}' must have 4 axes ({order}); got shape {list(tensor.shape)}. "
                         "Add the batch axis")  # fmt: skip
    return tensor if order == "bhtd" else tensor.transpose(1, 2)


def _stored(tensor: torch.Tensor, name: str, storage: str, notes: list[str]) -> torch.Tensor:
    # FP64 is rounded from FP64: by way of FP32 it would round twice.
    wide = tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
    changed, largest = changed_by_cast(wide, storage)
    if changed:
        many = "element" if changed == 1 else "elements"
        notes.append(f"{name}: {changed} {many} changed by the cast to {storage.upper()} (largest error {largest:.3g})")
    return round_to(wide, storage).to(torch.float32).contiguous()


def _plain(file: TensorFile, name: str, dtype: str | None) -> torch.Tensor:
    return floating(file.tensors[name], name, file.path, _codes(file, name, dtype)).to(torch.float32).contiguous()


def _mask_values(file: TensorFile, dtype: str | None) -> torch.Tensor | None:
    mask = file.tensors.get("mask")
    if mask is None or mask.dtype == torch.bool:
        return mask
    if mask.dtype == torch.uint16:
        return floating(mask, "mask", file.path, _codes(file, "mask", dtype))
    return mask


def _scale(file: TensorFile) -> float | None:
    value: float
    if "scale" in file.tensors:
        tensor = file.tensors["scale"]
        if tensor.numel() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
            raise InputError(f"{file.path}: 'scale' must be one number; got shape {list(tensor.shape)}")
        value = float(tensor.item())
    elif "scale" in file.texts:
        try:
            value = float(file.texts["scale"])
        except ValueError:
            raise InputError(f"{file.path}: the stored scale '{file.texts['scale'][:40]}' is not a number") from None
    else:
        return None
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{file.path}: 'scale' must be a positive finite number; got {value}")
    return value
