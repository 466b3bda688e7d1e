"""NumPy arrays (npy, npz) as torch tensors.

NumPy has no BF16: such arrays are written as 2-byte void or as uint16. Both come out as torch uint16 *codes*; whoever
uses them must have been told what they mean (see `tensors.floating`).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from bf16forensics.errors import InputError
from bf16forensics.load.files import first_bytes, unreadable


def read_npy(path: str | Path) -> torch.Tensor | str:
    """One array, mapped copy-on-write; a text array of one element comes as str.

    Raises:
        InputError: unreadable, truncated, or of Python objects.
    """
    first_bytes(path)
    try:
        return to_torch(np.load(path, mmap_mode="c", allow_pickle=False), str(path))
    except InputError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    # A damaged header makes NumPy raise nearly anything, tokenizer errors and MemoryError included.
    except Exception as error:
        raise InputError(f"{path}: {_why(error, path)}") from error


def read_npz(path: str | Path) -> Mapping[str, torch.Tensor | str]:
    """All arrays of an archive by name, in its order.

    Raises:
        InputError: unreadable, truncated, or an entry is no array of numbers or text.
    """
    arrays: dict[str, torch.Tensor | str] = {}
    try:
        # Opened here because NumPy leaves a damaged archive open.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            for name in archive.files:
                where = f"{path}: entry '{name}'"
                try:
                    value = archive[name]
                except ValueError as error:
                    raise InputError(f"{where}: {_why(error)}") from error
                if not isinstance(value, np.ndarray):
                    raise InputError(f"{where} is no array; give an archive written by numpy.savez")
                arrays[name] = to_torch(value, where)
    except InputError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    # A damaged archive makes zipfile and NumPy raise nearly anything.
    except Exception as error:
        size = Path(path).stat().st_size
        raise InputError(f"{path}: truncated or damaged archive ({size} bytes). Copy or download it again") from error
    return arrays


def to_torch(array: np.ndarray, where: str) -> torch.Tensor | str:
    """One array as a tensor of the same values; 2-byte void becomes uint16 codes; a single text becomes str.

    Raises:
        InputError: a dtype that is neither.
    """
    if array.dtype.kind in "US" and array.size == 1:
        item = array.reshape(-1)[0]
        return item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item)
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        array = array.view("<u2")
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise InputError(f"{where}: dtype {array.dtype} is not supported; store FP32, FP16 or BF16 codes")
    native = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="), copy=False).reshape(array.shape)
    return torch.from_numpy(native if native.flags.writeable else native.copy())


def _why(error: Exception, path: str | Path | None = None) -> str:
    if any(words in str(error) for words in ("allow_pickle", "Object arrays", "Python objects")):
        return "holds Python objects, which are never loaded; store plain numbers"
    size = f" ({Path(path).stat().st_size} bytes)" if path is not None else ""
    return f"truncated or damaged array{size}. Copy or download it again"
