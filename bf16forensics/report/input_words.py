"""Input files in words."""

from collections.abc import Sequence

from bf16forensics.load.files import FileFacts
from bf16forensics.verdict.words import count

#: Most files named, and columns of a path.
_FILES = 4
_PATH = 60


def files_words(files: Sequence[FileFacts]) -> str:
    """Role, path, size and the start of the hash of the first files, and how many more there are."""
    parts = [
        f"{file.role} {_elided(file.path)} ({_size(file.size_bytes)}, sha256 {file.sha256[:8]})"
        for file in files[:_FILES]
    ]
    if len(files) > _FILES:
        parts.append(f"and {count(len(files) - _FILES, 'more file')}")
    return "; ".join(parts)


def _elided(path: str) -> str:
    """A long path without its middle; the JSON document holds all of it."""
    return path if len(path) <= _PATH else f"{path[: _PATH // 3]}...{path[-2 * _PATH // 3 :]}"


def _size(size_bytes: int) -> str:
    if size_bytes < 1000:
        return f"{size_bytes} B"
    return f"{size_bytes / 1e3:,.0f} kB" if size_bytes < 1_000_000 else f"{size_bytes / 1e6:,.1f} MB"
