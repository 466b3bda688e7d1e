"""Files of bytes that are there whole or not at all."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from bf16forensics.errors import InputError


def check_target(path: Path, *, force: bool, what: str) -> None:
    """Refuses a file that could not be written at the end; call it before a long run.

    Args:
        path: the file.
        force: an existing file may be replaced.
        what: what the file is, for the message: "figure".

    Raises:
        InputError: the path is a link or no file, the file may not be replaced, or its folder not be written.
    """
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link; name the file itself")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file; name a file for the {what}")
    if path.exists() and not force:
        raise InputError(f"{path} exists; pass --force to replace it, or name another file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(f"{folder} is not a folder that can be written; choose another for the {what} {path.name}")


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside the place of the file, waits until the bytes are on disk, and renames; replaces what is there.

    Args:
        path: the file; its parents are made.
        data: everything that it shall hold.

    Raises:
        InputError: the file cannot be written; then nothing is left behind.
    """
    target = Path(os.path.abspath(path))
    # The suffix stays, so that what a killed process leaves in a case is still seen as part of one.
    beside = target.with_name(f".{target.stem}.{secrets.token_hex(4)}.tmp{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_new(beside, data)
        beside.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    finally:
        with suppress(OSError):
            beside.unlink()


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file and waits until it is on disk.

    Raises:
        OSError: the file exists or cannot be written.
    """
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
