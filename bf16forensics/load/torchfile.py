"""Torch files, zip and legacy: the object tree with its tensors mapped from the file.

The containers are read here and not by `torch.load`: in versions that this project supports, its restricted mode has
been bypassed by crafted files, and it gives up at the first extra that it does not know.
"""

import io
import mmap
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from bf16forensics.errors import InputError
from bf16forensics.load.files import container_of, unreadable
from bf16forensics.load.inert import StorageRef, TensorRef
from bf16forensics.load.unpickle import Unpickled, load_pickle

_LOCAL_HEADER_BYTES = 30
_CUT = "Copy or download it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """What a torch file holds."""

    #: Dicts, lists, tuples, sets, numbers, strings, CPU tensors and `Placeholder`s.
    tree: object
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where the bytes of one storage lie: in the file, or (compressed members) in memory."""

    offset: int
    num_bytes: int
    inline: bytes | None = None


def read_torch_file(path: str | Path) -> TorchFile:
    """Reads a `.pt`, `.pth`, `.ckpt` or `.bin` file written by `torch.save`.

    Nothing that the file names is executed: see `unpickle`. Tensors are views of a private mapping of the file, except
    where a storage is compressed or misaligned. Gradients, hooks and devices are dropped: everything is on the CPU.

    Raises:
        InputError: not such a file, truncated, damaged, or it refers to something that is not data.
    """
    kind = container_of(path)
    if kind not in ("zip", "torch-legacy"):
        raise InputError(f"{path}: a {kind} file, not a torch checkpoint; give the file that torch.save wrote")
    read, extents = _read_zip(path) if kind == "zip" else _read_legacy(path)
    notes = (f"blocked types replaced by placeholders: {', '.join(read.blocked)}",) if read.blocked else ()
    return TorchFile(tree=_Resolver(path, extents).resolve(read.tree), notes=notes)


def _read_zip(path: str | Path) -> tuple[Unpickled, dict[str, _Extent]]:
    shown = str(path)
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
            members = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise InputError(f"{shown}: a zip archive without the object tree of torch.save, not a checkpoint")
            root = pickles[0].removesuffix("data.pkl")
            if root + "constants.pkl" in members:
                raise InputError(f"{shown}: a TorchScript archive; save the state dict with torch.save instead")
            if root + "byteorder" in members and archive.read(root + "byteorder") != b"little":
                raise InputError(f"{shown}: written on a big-endian machine; re-save it on a little-endian one")
            read = load_pickle(io.BytesIO(archive.read(pickles[0])), shown)
            extents: dict[str, _Extent] = {}
            for name, info in members.items():
                if not name.startswith(root + "data/"):
                    continue
                key = name.removeprefix(root + "data/")
                if info.compress_type != zipfile.ZIP_STORED:
                    extents[key] = _Extent(0, info.file_size, archive.read(name))
                    continue
                raw.seek(info.header_offset)
                header = raw.read(_LOCAL_HEADER_BYTES)
                if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
                    raise InputError(f"{shown}: damaged (no data at the place of storage {key}). {_CUT}")
                skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                extents[key] = _Extent(info.header_offset + _LOCAL_HEADER_BYTES + skip, info.file_size)
    except InputError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    # A damaged archive makes zipfile raise nearly anything.
    except Exception as error:
        size = Path(path).stat().st_size
        raise InputError(f"{shown}: truncated or damaged archive ({size} bytes; its directory, at the end, is missing "
                         f"or wrong). {_CUT}") from error  # fmt: skip
    return read, extents


def _read_legacy(path: str | Path) -> tuple[Unpickled, dict[str, _Extent]]:
    shown = str(path)
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for what in ("magic number", "version", "system"):
            header = load_pickle(view, shown).tree
            if what == "system" and isinstance(header, dict) and header.get("little_endian") is False:
                raise InputError(f"{shown}: written on a big-endian machine; re-save it on a little-endian one")
        read = load_pickle(view, shown)
        keys = load_pickle(view, shown).tree
        if not isinstance(keys, list):
            raise InputError(f"{shown}: damaged (no list of storages). {_CUT}")
        extents: dict[str, _Extent] = {}
        at = view.tell()
        for key in keys:
            count = int.from_bytes(view[at : at + 8], "little", signed=True)
            num_bytes = count * read.storages.get(str(key), torch.uint8).itemsize
            if at + 8 + num_bytes > len(view) or count < 0:
                raise InputError(f"{shown}: truncated; storage {key} ends at byte {at + 8 + max(num_bytes, 0)}, "
                                 f"the file has {len(view)}. {_CUT}")  # fmt: skip
            extents[str(key)] = _Extent(at + 8, num_bytes)
            at += 8 + num_bytes
    return read, extents


class _Resolver:
    """Replaces the references of a tree by tensors on the mapped file."""

    def __init__(self, path: str | Path, extents: dict[str, _Extent]) -> None:
        self._path = path
        self._extents = extents
        self._size = Path(path).stat().st_size
        self._mapped = torch.UntypedStorage.from_file(str(path), False, self._size)
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._done: dict[int, object] = {}

    def resolve(self, node: object, depth: int = 0) -> object:
        """The node with tensors in place of references; shared nodes stay shared."""
        if depth > 200:
            raise InputError(f"{self._path}: its object tree is nested too deep to be a checkpoint")
        if isinstance(node, TensorRef):
            return self._tensor(node)
        if not isinstance(node, dict | list | tuple):
            return node
        if id(node) in self._done:
            return self._done[id(node)]
        if isinstance(node, dict):
            mapping: dict[object, object] = {}
            self._done[id(node)] = mapping
            for key, value in node.items():
                mapping[key] = self.resolve(value, depth + 1)
            return mapping
        if isinstance(node, list):
            items: list[object] = []
            self._done[id(node)] = items
            items.extend(self.resolve(item, depth + 1) for item in node)
            return items
        self._done[id(node)] = made = tuple(self.resolve(item, depth + 1) for item in node)
        return made

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        item = ref.dtype.itemsize
        storage = self._storage(ref.storage)
        offset = ref.offset + ref.storage.view_offset * ref.storage.dtype.itemsize // item
        empty = 0 in ref.size
        last = offset + sum((n - 1) * step for n, step in zip(ref.size, ref.stride, strict=True)) + 1
        if not empty and last * item > storage.nbytes():
            raise InputError(
                f"{self._path}: truncated or damaged; a tensor of shape {list(ref.size)} needs "
                f"{last * item} bytes of storage {ref.storage.key}, which has {storage.nbytes()}. {_CUT}"
            )
        if empty:
            return torch.empty(ref.size, dtype=ref.dtype)
        try:
            return torch.empty(0, dtype=ref.dtype).set_(storage, offset, ref.size, ref.stride)
        except RuntimeError as error:
            raise InputError(
                f"{self._path}: damaged; a tensor of shape {list(ref.size)}, {ref.dtype}, cannot be built. {_CUT}"
            ) from error

    def _storage(self, ref: StorageRef) -> torch.UntypedStorage:
        if ref.key in self._storages:
            return self._storages[ref.key]
        extent = self._extents.get(ref.key)
        if extent is None:
            raise InputError(f"{self._path}: truncated or damaged; storage {ref.key} is not in the file. {_CUT}")
        end = extent.offset + extent.num_bytes
        if extent.inline is not None:
            storage = torch.frombuffer(bytearray(extent.inline), dtype=torch.uint8).untyped_storage()
        elif end > self._size:
            raise InputError(f"{self._path}: truncated; storage {ref.key} ends at byte {end}, the file has "
                             f"{self._size}. {_CUT}")  # fmt: skip
        else:
            storage = self._mapped[extent.offset : end]
            if extent.offset % ref.dtype.itemsize or (ref.dtype == torch.uint8 and extent.offset % 8):
                storage = storage.clone()
        self._storages[ref.key] = storage
        return storage
