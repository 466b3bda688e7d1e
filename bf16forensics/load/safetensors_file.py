"""safetensors files, with the header checked first so that damage is told in one line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from bf16forensics.errors import InputError
from bf16forensics.load.files import first_bytes, unreadable

#: Bits an element of the dtypes that the format knows.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
         "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
         "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # fmt: skip
#: The format's own limit on the header.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """What a safetensors file holds."""

    #: By name, in the order of the file's header; mapped, on the CPU.
    tensors: Mapping[str, torch.Tensor]
    #: The free metadata of the header.
    metadata: Mapping[str, str]


def read_safetensors(path: str | Path) -> SafetensorsFile:
    """Reads all tensors of one file; BF16 comes as torch BF16.

    Raises:
        InputError: missing, a Git LFS pointer, truncated (with expected and found sizes), or a damaged header (with
            the entry's name).
    """
    shown = str(path)
    if Path(path).is_file() and Path(path).stat().st_size == 0:
        raise InputError(f"{shown}: truncated; expected at least 10 bytes, found 0 (empty file). Download it again")
    first_bytes(path)
    names, metadata = _checked_header(path)
    try:
        with safe_open(shown, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise InputError(f"{shown}: damaged safetensors file ({str(error)[:120]}). Download it again") from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{shown}: holds a dtype that this PyTorch cannot read; convert it to BF16 or FP32") from error
    return SafetensorsFile(tensors=tensors, metadata=metadata)


def _checked_header(path: str | Path) -> tuple[list[str], dict[str, str]]:
    shown = str(path)
    try:
        with open(path, "rb") as stream:
            length = stream.read(8)
            size = stream.seek(0, 2)
            header_bytes = int.from_bytes(length, "little")
            if size < 8 or (8 + header_bytes > size and header_bytes <= _MAX_HEADER_BYTES):
                expected = 8 + header_bytes if size >= 8 else 10
                raise InputError(f"{shown}: truncated; expected at least {expected} bytes, found {size}. "
                                 "Download it again")  # fmt: skip
            if header_bytes > _MAX_HEADER_BYTES:
                raise InputError(f"{shown}: not a safetensors file (its header claims {header_bytes} bytes, the file "
                                 f"has {size}); check the file")  # fmt: skip
            stream.seek(8)
            raw = stream.read(header_bytes)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        header = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{shown}: not a safetensors file (its header is not JSON); check the file") from error
    if not isinstance(header, dict):
        raise InputError(f"{shown}: not a safetensors file (its header is no object); check the file")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        metadata = {}
    end = 0
    for name, entry in header.items():
        end = max(end, _checked_entry(shown, name, entry))
    expected = 8 + header_bytes + end
    if size < expected:
        raise InputError(f"{shown}: truncated; expected {expected} bytes, found {size}. Download it again")
    return list(header), {str(key): str(value) for key, value in metadata.items()}


def _checked_entry(where: str, name: str, entry: object) -> int:
    what = f"{where}: damaged header; entry '{name}'"
    if not isinstance(entry, dict):
        raise InputError(f"{what} is no object. Download it again")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise InputError(f"{what} has the unknown dtype {dtype!r}. Download or convert it again")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise InputError(f"{what} has the malformed shape {shape!r}. Download it again")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(n, int) and n >= 0 for n in offsets):
        raise InputError(f"{what} has the malformed data_offsets {offsets!r}. Download it again")
    bits = _BITS[dtype]
    for n in shape:
        bits *= n
    if (offsets[1] - offsets[0]) * 8 != bits:
        raise InputError(f"{what} of shape {shape} and dtype {dtype} needs {bits // 8} bytes but declares "
                         f"{offsets[1] - offsets[0]}. Download it again")  # fmt: skip
    return int(offsets[1])
