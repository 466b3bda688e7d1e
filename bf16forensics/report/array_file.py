"""NumPy arrays in safetensors files, written and read without a tensor library. Nothing in a file is ever executed."""

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
    """The bytes of a file; the same content gives the same bytes.

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
    return _with_sorted_metadata(save(ordered, metadata=dict(metadata)))


def read_arrays(path: Path) -> ArrayFile:
    """Reads a whole file.

    Raises:
        InputError: missing, empty, a Git LFS pointer, damaged, or with an array of another type.
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
    return ArrayFile(arrays=arrays, metadata=metadata)


def _with_sorted_metadata(data: bytes) -> bytes:
    """The file with its metadata in order: the library writes it in a random one, process by process."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # The header is padded with blanks to whole words of 8 bytes, so that the arrays stay aligned.
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
