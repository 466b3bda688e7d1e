"""What a file is, judged by its first bytes, and the facts that a report states about it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bf16forensics.errors import InputError

#: First bytes of a legacy (not zip) torch file: a protocol 2 pickle of the format's magic number.
LEGACY_TORCH_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LFS_START = b"version https://git-lfs.github.com/spec/"
_SNIFF_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """One input file as a report names it."""

    #: "checkpoint", "config", "index", "tokens", "indices", "batch" or "record".
    role: str
    #: Path as given.
    path: str
    #: Bytes; the sum over its files for a folder.
    size_bytes: int
    #: SHA-256 of the bytes, lower-case hex; of (name, bytes) of every file in name order for a folder.
    sha256: str


def file_facts(role: str, path: str | Path) -> FileFacts:
    """Size and hash of one file.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
            size = stream.tell()
    except OSError as error:
        raise unreadable(path, error) from error
    return FileFacts(role=role, path=str(path), size_bytes=size, sha256=digest.hexdigest())


def folder_facts(role: str, folder: str | Path, names: list[str]) -> FileFacts:
    """Size and hash of the named files of one folder, taken together.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    size = 0
    for name in sorted(names):
        try:
            data = (Path(folder) / name).read_bytes()
        except OSError as error:
            raise unreadable(Path(folder) / name, error) from error
        digest.update(name.encode() + b"\0" + len(data).to_bytes(8, "little"))
        digest.update(data)
        size += len(data)
    return FileFacts(role=role, path=str(folder), size_bytes=size, sha256=digest.hexdigest())


def unreadable(path: str | Path, error: OSError) -> InputError:
    """The one-line error for a file that the system does not hand over."""
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file; check the path")
    if isinstance(error, IsADirectoryError):
        return InputError(f"{path}: is a directory; give the file inside it")
    reason = (error.strerror or type(error).__name__).lower()
    return InputError(f"{path}: cannot be read ({reason}); check the path and its permissions")


def first_bytes(path: str | Path) -> bytes:
    """The first bytes of a file that exists, holds something and is not a Git LFS pointer.

    Raises:
        InputError: missing, a directory, unreadable, empty, or a pointer left by Git LFS.
    """
    try:
        with open(path, "rb") as stream:
            start = stream.read(_SNIFF_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if not start:
        raise InputError(f"{path}: empty file (0 bytes, truncated); copy or download it again")
    if start.startswith(_LFS_START):
        raise InputError(f"{path}: Git LFS pointer, not the data; fetch the real file with git lfs pull")
    return start


def container_of(path: str | Path) -> str:
    """The container of a tensor file, by content and not by name; only safetensors counts by name too.

    Returns:
        "zip" (torch or npz), "torch-legacy", "npy" or "safetensors".

    Raises:
        InputError: not readable, or none of these.
    """
    start = first_bytes(path)
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    if start.startswith(LEGACY_TORCH_MAGIC):
        return "torch-legacy"
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if Path(path).suffix == ".safetensors" or (len(start) > 8 and start[8:9] == b"{" and start[5:8] == b"\0\0\0"):
        return "safetensors"
    raise InputError(
        f"{path}: {_what_else(start)}, not a checkpoint or tensor file; give a torch, safetensors or NumPy file"
    )


def _what_else(start: bytes) -> str:
    if start.startswith((b"PK\x05\x06", b"PK\x07\x08")):
        return "an empty zip archive"
    if LEGACY_TORCH_MAGIC.startswith(start[: len(LEGACY_TORCH_MAGIC)]) or b"PK\x03\x04".startswith(start):
        return "truncated after a few bytes"
    if start[257:262] == b"ustar":
        return "a tar archive"
    if start[:1] == b"\x80":
        return "a plain pickle"
    if b"\0" not in start and all(byte >= 32 or byte in b"\t\n\r\f\x1b" for byte in start):
        return "a text file"
    return "unknown data"
