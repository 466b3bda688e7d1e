"""Row files: the walk of one row, kept so that later commands explain its additions without capturing again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.errors import InputError
from bf16forensics.floats.formats import FORMATS
from bf16forensics.report.array_file import ArrayFile, array_bytes, read_arrays
from bf16forensics.report.whole_file import write_whole

#: Grows when a field is renamed, removed or changes its meaning; other arrays and metadata may be added.
SCHEMA = "1"
#: Formats of what a recipe rounds.
_FORMATS = tuple(fmt.name for fmt in FORMATS if fmt.name != "fp64")
#: Arrays of a walk, with their type and their axes: K keys, T tiles, E features.
_ARRAYS: dict[str, tuple[Any, str]] = {
    "keys": (np.int64, "K"),
    "visible": (np.bool_, "K"),
    "p_bar": (np.float32, "K"),
    "p_operand": (np.float32, "K"),
    "is_one": (np.bool_, "K"),
    "tile": (np.int64, "K"),
    "tile_alpha": (np.float32, "T"),
    "v": (np.float32, "KE"),
    "o": (np.float32, "E"),
    "row_sum": (np.float64, ""),
    "lse": (np.float64, ""),
    "value_scale": (np.float64, ""),
}
#: Words of a walk and what they may be; None: anything.
_WORDS: dict[str, tuple[str, ...] | None] = {
    "recipe": None,
    "p_format": _FORMATS,
    "v_format": _FORMATS,
    "division": ("reciprocal", "divide", "none"),
    "o_bar_format": _FORMATS,
    "o_bar_at": ("end", "tile"),
    "o_format": _FORMATS,
}
_WALKS = ("run", "ascending")
#: Characters of a word that may be anything, such as the name of a recipe.
_LONGEST = 1000
_INTEGERS = ("layer", "head", "sequence", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTrace:
    """One row of one head, as two walks: every accumulator of a trace starts from one of them or from a capture."""

    #: 0-based; `sequence` as numbered in the run.
    layer: int
    head: int
    sequence: int
    token: int
    #: Training step; None when unknown.
    step: int | None
    #: Walk of the run's own recipe, and of the same recipe with one tile over the whole row, keys ascending.
    run: RowWalk
    ascending: RowWalk
    #: float64 [E] O of the high-precision side.
    o_hp: NDArray[np.float64]

    @property
    def file_name(self) -> str:
        """Name of the row's file in a case."""
        return row_file_name(self.layer, self.head, self.sequence, self.token)


def row_file_name(layer: int, head: int, sequence: int, token: int) -> str:
    """Name of a row's file in a case: "L1.H7.s0.t718.safetensors"."""
    return f"L{layer}.H{head}.s{sequence}.t{token}.safetensors"


def write_row_trace(path: Path, trace: RowTrace) -> None:
    """Writes a row file, replacing what is there; the same trace gives the same bytes.

    Args:
        path: the file; its parents are made.
        trace: the row; NaN and Inf are stored as they are.

    Raises:
        InputError: the file cannot be written.
    """
    write_whole(path, array_bytes(row_arrays(trace), row_metadata(trace)))


def row_arrays(trace: RowTrace) -> dict[str, NDArray[Any]]:
    """The arrays of a row file: "run.keys", "ascending.v", ..., "o_hp"; F32, F64, I64 and BOOL."""
    arrays: dict[str, NDArray[Any]] = {"o_hp": np.asarray(trace.o_hp, dtype=np.float64)}
    for walk in _WALKS:
        for name, (kind, _) in _ARRAYS.items():
            arrays[f"{walk}.{name}"] = np.asarray(getattr(getattr(trace, walk), name), dtype=kind)
    return arrays


def row_metadata(trace: RowTrace) -> dict[str, str]:
    """The metadata of a row file: the place of the row, and the words of both walks."""
    metadata = {"row_trace": SCHEMA, "step": "" if trace.step is None else str(trace.step)}
    metadata |= {name: str(getattr(trace, name)) for name in _INTEGERS}
    for walk in _WALKS:
        metadata |= {f"{walk}.{name}": getattr(getattr(trace, walk), name) for name in _WORDS}
    return metadata


def read_row_trace(path: Path) -> RowTrace:
    """Reads a row file, or an export, which holds one.

    Returns:
        The row; bit for bit what was written.

    Raises:
        InputError: not readable, not a row file, of another schema, or with arrays or words that no walk has.
    """
    file = read_arrays(path)
    schema = file.metadata.get("row_trace")
    if schema is None:
        raise InputError(f"{path}: not a row of trace-head (its metadata has no row_trace); name a file of CASE/traces")
    if schema != SCHEMA:
        raise InputError(
            f"{path}: row_trace schema {_short(schema)}, this program reads {SCHEMA}; run trace-head again"
        )
    run, ascending = (_walk(path, file, name) for name in _WALKS)
    o_hp = _array(path, file, "o_hp", np.float64, 1)
    if not len(o_hp) == run.v.shape[1] == ascending.v.shape[1]:
        raise _damaged(path, "o_hp, run.v and ascending.v have different numbers of features")
    place = {name: _integer(path, file, name) for name in _INTEGERS}
    step = _integer(path, file, "step") if file.metadata.get("step") else None
    return RowTrace(**place, step=step, run=run, ascending=ascending, o_hp=o_hp)


def _walk(path: Path, file: ArrayFile, name: str) -> RowWalk:
    fields: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for field, (kind, axes) in _ARRAYS.items():
        array = _array(path, file, f"{name}.{field}", kind, len(axes))
        for axis, size in zip(axes, array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise _damaged(path, f"{name}.{field} has {size} entries along {axis}, the others {sizes[axis]}")
        fields[field] = array if axes else float(array)
    if 0 in sizes.values():
        raise _damaged(path, f"{name} is empty")
    for field, known in _WORDS.items():
        word = file.metadata.get(f"{name}.{field}")
        # A word is printed: it may not move a cursor or fill a screen.
        if word is None or not word.isprintable() or (word not in known if known else len(word) > _LONGEST):
            raise _damaged(path, f"metadata {name}.{field} is {_short(word)}")
        fields[field] = word
    walk = RowWalk(**fields)
    steps = np.diff(walk.tile)
    if walk.tile[0] != 0 or walk.tile[-1] != sizes["T"] - 1 or not bool(((steps == 0) | (steps == 1)).all()):
        raise _damaged(path, f"{name}.tile does not count from 0 to {sizes['T'] - 1}")
    if bool((walk.keys < 0).any()) or len(np.unique(walk.keys)) < len(walk.keys):
        raise _damaged(path, f"{name}.keys holds a negative or a repeated position")
    if bool((walk.is_one & ~walk.visible).any()):
        raise _damaged(path, f"{name}.is_one marks a key that the query does not see")
    return walk


def _array(path: Path, file: ArrayFile, name: str, kind: Any, dimensions: int) -> NDArray[Any]:
    array = file.arrays.get(name)
    if array is None:
        raise _damaged(path, f"array '{name}' is missing")
    if array.dtype != kind or array.ndim != dimensions:
        wanted = f"{np.dtype(kind)} with {dimensions} axes"
        raise _damaged(path, f"array '{name}' is {array.dtype} with {array.ndim} axes instead of {wanted}")
    return array


def _integer(path: Path, file: ArrayFile, name: str) -> int:
    text = file.metadata.get(name, "")
    # Only what str() of a position gives: int() would also take signs, blanks and underscores.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _damaged(path, f"metadata {name} is {_short(text)}, not a whole number")
    return int(text)


def _short(word: str | None) -> str:
    return repr(word if word is None else word[:40])


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path}: not a whole row of trace-head: {what}; run trace-head again to write it")
