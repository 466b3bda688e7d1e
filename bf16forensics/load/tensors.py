"""Named tensors from any container: safetensors, npz, npy, a torch file, or a folder of NAME.npy."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bf16forensics.errors import InputError
from bf16forensics.load.arrays import read_npy, read_npz
from bf16forensics.load.files import FileFacts, container_of, file_facts, folder_facts, unreadable
from bf16forensics.load.inert import Placeholder
from bf16forensics.load.names import three_of
from bf16forensics.load.safetensors_file import read_safetensors
from bf16forensics.load.torchfile import read_torch_file

#: Name under which a container of a single nameless tensor lists it.
NAMELESS = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """What one container holds."""

    #: Path as given.
    path: str
    #: By name; NAMELESS for an npy file or a bare tensor.
    tensors: Mapping[str, torch.Tensor]
    #: Texts beside the tensors: header metadata, text entries, layout.txt.
    texts: Mapping[str, str]
    #: Format of uint16 codes by tensor name, from the sidecars of a folder ("bf16").
    code_formats: Mapping[str, str]
    #: Names of entries that are neither a tensor nor a text.
    other_names: tuple[str, ...]
    notes: tuple[str, ...]
    facts: FileFacts


def read_tensors(path: str | Path, role: str) -> TensorFile:
    """Reads every named tensor of a file or folder. Values, dtypes and strides stay as stored.

    In a folder, NAME.npy is tensor NAME; `layout.txt` is the text "layout"; `NAME.dtype` or `dtypes.json`
    ({"NAME": "bf16"}) says what the codes of NAME.npy mean; other files are ignored.

    Args:
        path: the file or folder.
        role: role to state in the facts.

    Raises:
        InputError: unreadable or damaged, or it holds no tensor.
    """
    if Path(path).is_dir():
        return _read_folder(Path(path), str(path), role)
    shown = str(path)
    kind = container_of(path)
    texts: dict[str, str] = {}
    others: list[str] = []
    notes: tuple[str, ...] = ()
    from_torch = False
    entries: Mapping[str, object]
    if kind == "safetensors":
        loaded = read_safetensors(path)
        entries, texts = loaded.tensors, dict(loaded.metadata)
    elif kind == "npy":
        entries = {NAMELESS: read_npy(path)}
    elif kind == "zip" and _is_npz(path):
        entries = read_npz(path)
    else:
        file = read_torch_file(path)
        from_torch = True
        notes, tree = file.notes, file.tree
        entries = {NAMELESS: tree} if isinstance(tree, torch.Tensor) else tree if isinstance(tree, dict) else {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in entries.items():
        _sort_entry(str(name), value, tensors, texts, others)
    if not tensors:
        raise InputError(f"{shown}: holds no tensor; entries found: {three_of(others)}. Give a dict of name: tensor")
    return TensorFile(
        path=shown,
        tensors=tensors,
        texts=texts,
        code_formats={},
        other_names=tuple(others),
        # Other readers hand out views of a whole mapping, whose size says nothing about how the tensor was saved.
        notes=notes + (_size_notes(tensors) if from_torch else ()),
        facts=file_facts(role, path),
    )


def floating(tensor: torch.Tensor, name: str, where: str, codes: str | None) -> torch.Tensor:
    """A floating tensor; uint16 codes are read as BF16 only when the caller was told so.

    Args:
        tensor: as stored.
        name: its name, for errors.
        where: its file.
        codes: format of 2-byte codes: "bf16", or None when nobody said.

    Returns:
        The tensor itself, or its codes viewed as BF16.

    Raises:
        InputError: codes without a format, integers, booleans, complex, or a floating dtype below 16 bits.
    """
    if tensor.dtype == torch.uint16:
        if codes != "bf16":
            raise InputError(
                f"{where}: '{name}' holds 2-byte codes (uint16 or void); if they are BF16 say so with --dtype bf16 "
                f"(in a folder: a file {name or 'NAME'}.dtype holding bf16)"
            )
        return tensor.contiguous().view(torch.bfloat16)
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{where}: '{name}' has dtype {kind}; expected BF16, FP16, FP32 or FP64 values")
    return tensor


def _sort_entry(
    name: str, value: object, tensors: dict[str, torch.Tensor], texts: dict[str, str], others: list[str]
) -> None:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
    elif isinstance(value, str):
        texts[name] = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        tensors[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    else:
        kind = value.dotted_name if isinstance(value, Placeholder) else type(value).__name__
        others.append(f"{name} ({kind})")


def _read_folder(folder: Path, shown: str, role: str) -> TensorFile:
    tensors: dict[str, torch.Tensor] = {}
    texts: dict[str, str] = {}
    formats: dict[str, str] = {}
    used: list[str] = []
    for file in sorted(folder.iterdir()):
        if file.suffix == ".npy" and file.is_file():
            value = read_npy(file)
            if isinstance(value, str):
                texts[file.stem] = value
            else:
                tensors[file.stem] = value
        elif file.name == "layout.txt":
            texts["layout"] = _text(file)
        elif file.suffix == ".dtype":
            formats[file.stem] = _text(file)
        elif file.name == "dtypes.json":
            formats |= _formats(file)
        else:
            continue
        used.append(file.name)
    if not tensors:
        raise InputError(f"{shown}: the folder holds no NAME.npy; expected q.npy, k.npy, v.npy and do.npy")
    return TensorFile(
        path=shown,
        tensors=tensors,
        texts=texts,
        code_formats=formats,
        other_names=(),
        notes=(),
        facts=folder_facts(role, folder, used),
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not a text file; write one word into it") from error


def _formats(file: Path) -> dict[str, str]:
    try:
        formats = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise InputError(f'{file}: not JSON; expected an object such as {{"q": "bf16"}}') from error
    if not isinstance(formats, dict):
        raise InputError(f'{file}: no JSON object; expected one such as {{"q": "bf16"}}')
    return {str(name): str(value) for name, value in formats.items()}


def _is_npz(path: str | Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except OSError as error:
        raise unreadable(path, error) from error
    # A damaged archive makes zipfile raise nearly anything.
    except Exception as error:
        size = Path(path).stat().st_size
        raise InputError(f"{path}: truncated or damaged archive ({size} bytes). Copy or download it again") from error
    return bool(names) and all(name.endswith(".npy") for name in names)


def _size_notes(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """One note on each storage of which its tensors show less than half: a slice saved with its whole storage."""
    names: dict[int, list[str]] = {}
    shown: dict[int, int] = {}
    whole: dict[int, int] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        elements = 1
        for n, step in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= n if step else min(n, 1)
        names.setdefault(key, []).append(name)
        shown[key] = shown.get(key, 0) + elements * tensor.element_size()
        whole[key] = storage.nbytes()
    return tuple(
        f"size: {', '.join(names[key])} show {shown[key]} bytes of a storage of {whole[key]} bytes: "
        "a slice saved with its whole storage (clone it before saving)"
        for key in names
        if whole[key] > 2 * shown[key]
    )
