"""The case directory: case.json and the tensors of the heads kept, written whole or not at all; rows traced later."""

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError
from bf16forensics.report.jsonio import dumps, plain, read_json
from bf16forensics.report.whole_file import write_new

if TYPE_CHECKING:
    from bf16forensics.investigate.keep import KeptRecord
    from bf16forensics.report.row_trace import RowTrace

#: Names inside a case.
DOCUMENT = "case.json"
TENSORS = "tensors"
TRACES = "traces"


def check_target(directory: Path, *, force: bool) -> None:
    """Refuses a directory that a case may not be written to; call it before a long run.

    An existing directory is replaced only with `force`, and only if it is empty or holds nothing but a case: what this
    program did not write, it does not delete.

    Raises:
        InputError: the directory may not be replaced.
    """
    if directory.is_symlink():
        raise InputError(f"{directory} is a symbolic link; name the directory itself")
    if not directory.exists():
        return
    if not directory.is_dir():
        raise InputError(f"{directory} is a file; name a directory for the case")
    if not force:
        raise InputError(f"{directory} exists; pass --force to replace the case in it, or name another directory")
    foreign = _foreign(directory)
    if foreign is not None:
        raise InputError(
            f"{directory} holds {foreign}, which is no part of a case; move it away or name another directory"
        )


def write_case(
    directory: Path, document: dict[str, object], kept: "Sequence[KeptRecord]", *, force: bool
) -> dict[str, object]:
    """Writes a case beside its place and renames it there, so that an interrupted run leaves nothing half done.

    Args:
        directory: the case; its parents are made.
        document: what `report.document.document` built.
        kept: records of the heads worth keeping, names unique; may be empty.
        force: replace an existing case.

    Returns:
        The document as written, with the list of tensor files.

    Raises:
        InputError: the directory may not be replaced or cannot be written; two records of one name.
    """
    check_target(directory, force=force)
    names = [record.name for record in kept]
    for name in names:
        if names.count(name) > 1 or Path(name).name != name:
            raise InputError(f"record name {name!r} is not unique or not a file name; give every record its own")
    target = Path(os.path.abspath(directory))
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        written = _fill(beside, document, kept)
        _swap(beside, target)
    except OSError as error:
        raise InputError(f"cannot write {directory}: {error.strerror or error}; choose another directory") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return written


def read_case(directory: Path) -> dict[str, object]:
    """The document of a case.

    Raises:
        InputError: not a case, or one of another schema version.
    """
    if not (directory / DOCUMENT).is_file():
        raise InputError(f"{directory} is not a case: it has no {DOCUMENT}; write one with localize -o")
    return read_json(directory / DOCUMENT)


def write_row_trace_into_case(directory: Path, trace: "RowTrace") -> Path:
    """Keeps a row in a case, in the place of the same row if that was kept before; it goes when the case is replaced.

    Args:
        directory: a case.
        trace: the row, by the case's own recipe.

    Returns:
        The file: CASE/traces/L1.H7.s0.t718.safetensors.

    Raises:
        InputError: not a case, or the file cannot be written.
    """
    from bf16forensics.report.row_trace import write_row_trace

    if not (directory / DOCUMENT).is_file():
        raise InputError(f"{directory} is not a case: it has no {DOCUMENT}; write one with localize -o")
    path = directory / TRACES / trace.file_name
    for taken in (path.parent, path):
        if taken.is_symlink():
            raise InputError(f"{taken} is a symbolic link, which no case contains; move it away")
    write_row_trace(path, trace)
    return path


def _fill(folder: Path, document: dict[str, object], kept: "Sequence[KeptRecord]") -> dict[str, object]:
    files = []
    if kept:
        from bf16forensics.report.tensors import write_record

        (folder / TENSORS).mkdir()
        files = [write_record(folder / TENSORS / f"{record.name}.safetensors", record) for record in kept]
        _sync(folder / TENSORS)
    written = {**document, "tensors": plain(files)}
    write_new(folder / DOCUMENT, dumps(written).encode("ascii"))
    _sync(folder)
    return written


def _swap(beside: Path, target: Path) -> None:
    """Puts the new directory in the old one's place; the old one goes only after the new one is there."""
    old = None
    if target.exists():
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
        target.rename(old)
    try:
        beside.rename(target)
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    _sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _foreign(directory: Path) -> str | None:
    """The first entry that no case contains; None for an empty directory and for a case."""
    entries = sorted(directory.iterdir())
    if entries and not (directory / DOCUMENT).is_file():
        return f"{entries[0].name} and no {DOCUMENT}"
    for entry in entries:
        if entry.name in (TENSORS, TRACES) and entry.is_dir() and not entry.is_symlink():
            odd = [item.name for item in sorted(entry.iterdir()) if item.suffix != ".safetensors" or not item.is_file()]
            if odd:
                return f"{entry.name}/{odd[0]}"
        elif entry.name != DOCUMENT:
            return entry.name
    return None


def _sync(folder: Path) -> None:
    """Makes the entries of a folder durable, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
