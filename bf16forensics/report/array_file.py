"""NumPy arrays in safetensors files, written and read without a tensor library. Nothing in a file is ever executed."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from bf16forensics.errors import InputError
from bf16forensics.load.files import first_bytes, unreadable

#: Entry of the metadata that holds the checksum of everything else.
_CHECKSUM = "sha256"
#: The types that are written and read, by their names in the format: every one of them NumPy has.
_TYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "BOOL": np.bool_}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFile:
    """What a file holds."""

    #: float32, float64, int64 or bool, by name; any shape.
    arrays: Mapping[str, NDArray[Any]]
    #: The free metadata of the header.
    metadata: Mapping[str, str]


def array_bytes(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file; the same content gives the same bytes. A checksum of all of it is part of the metadata.

    Args:
        arrays: float32, float64, int64 or bool, any shape, by name.
        metadata: what goes into the header.

    Raises:
        TypeError: an array of another type.
    """
    known = {np.dtype(kind) for kind in _TYPES.values()}
    for name, array in arrays.items():
        if array.dtype not in known:
            raise TypeError(f"array {name} is {array.dtype}; a file of arrays holds float32, float64, int64 and bool")
    ordered = {name: np.array(arrays[name], order="C") for name in sorted(arrays)}
    return _with_sorted_metadata(save(ordered, metadata={**metadata, _CHECKSUM: _checksum(ordered, metadata)}))


def read_arrays(path: Path) -> ArrayFile:
    """Reads a whole file.

    Raises:
        InputError: missing, empty, a Git LFS pointer, damaged (where it holds a checksum: in any byte), or with an
            array of another type.
    """
    first_bytes(path)
    try:
        with safe_open(str(path), framework="numpy") as file:
            names = list(file.keys())
            for name in names:
                kind = file.get_slice(name).get_dtype()
                if kind not in _TYPES:
                    raise InputError(
                        f"{path}: array {name[:80]!r} has dtype {kind}, known are {', '.join(_TYPES)}; "
                        "name a file that trace-head wrote"
                    )
            arrays = {name: np.array(file.get_tensor(name)) for name in names}
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise InputError(
            f"{path}: damaged safetensors file ({str(error)[:120]}); run trace-head again to write it"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    for name, array in arrays.items():
        # Any byte but 0 and 1 would be a bool that is neither.
        if array.dtype == np.bool_ and bool((array.view(np.uint8) > 1).any()):
            raise InputError(
                f"{path}: array {name[:80]!r} holds bytes that are no bool; run trace-head again to write it"
            )
    checksum = metadata.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(arrays, metadata):
        raise InputError(f"{path}: damaged, its checksum does not fit; run trace-head again to write it")
    return ArrayFile(arrays=arrays, metadata=metadata)


def _checksum(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    """SHA-256 over names, types, shapes and bytes of the arrays, and over the metadata, each in the order of names."""
    shapes = [(name, str(arrays[name].dtype), arrays[name].shape) for name in sorted(arrays)]
    digest = hashlib.sha256(json.dumps([shapes, sorted(metadata.items())]).encode("utf-8"))
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def sorted_header(header: bytes) -> bytes:
    """The JSON header of a safetensors file with its metadata in order, no blanks at the end.

    The library writes the metadata in a random order, process by process.

    Args:
        header: the header without the eight bytes of its length; it has metadata.
    """
    entries = json.loads(header)
    entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def _with_sorted_metadata(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = sorted_header(data[8 : 8 + length])
    # The header is padded with blanks to whole words of 8 bytes, so that the arrays stay aligned.
    header = header.ljust(-(-len(header) // 8) * 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]
