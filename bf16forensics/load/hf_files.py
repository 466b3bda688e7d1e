"""Which files of a Hugging Face directory hold the weights: one file, or the shards that an index names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bf16forensics.errors import InputError
from bf16forensics.load.files import unreadable
from bf16forensics.load.hf_json import read_json_object
from bf16forensics.load.names import three_of

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".npz", ".onnx")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files to read, and what the index says about them."""

    #: True for torch files, which only the restricted reader opens.
    pickled: bool
    #: Names of the weight files inside the directory, in order of first mention.
    names: tuple[str, ...]
    #: Name of the index file; None for a single weight file.
    index: str | None
    #: Weight file of each tensor; empty without an index.
    placement: Mapping[str, str]
    notes: tuple[str, ...]


def find_weight_files(folder: Path, *, allow_bin: bool) -> WeightFiles:
    """Chooses the weight files as transformers does: safetensors before torch files, a single file before an index.

    Args:
        folder: the directory.
        allow_bin: whether torch files may be read.

    Raises:
        InputError: no weights, torch files without leave, an unusable index, or a shard that is not there.
    """
    present = _listing(folder)
    found = _choose(folder, present, allow_bin)
    unread = sorted(name for name in present if name.endswith(".safetensors") and name not in found.names)
    if unread:
        return replace(found, notes=(*found.notes, f"weight files that are not read: {three_of(unread)}"))
    return found


def _choose(folder: Path, present: frozenset[str], allow_bin: bool) -> WeightFiles:
    for pickled, single, index in ((False, SAFETENSORS, SAFETENSORS_INDEX), (True, BIN, BIN_INDEX)):
        if single not in present and index not in present:
            continue
        if pickled and not allow_bin:
            raise InputError(f"{folder / (single if single in present else index)}: torch files are read with "
                             "--allow-bin only (nothing in them is executed); or convert to safetensors")  # fmt: skip
        notes = []
        if not pickled and (BIN in present or BIN_INDEX in present):
            notes.append("the directory holds torch files too: the safetensors files are used")
        if index not in present:
            return WeightFiles(pickled=pickled, names=(single,), index=None, placement={}, notes=tuple(notes))
        placement = _placement(folder / index)
        shards = tuple(dict.fromkeys(placement.values()))
        if single in present and single not in shards:
            absent = sum(name not in present for name in shards)
            stale = f" ({absent} of the {len(shards)} files that the index names do not exist)" if absent else ""
            notes.append(f"both {single} and {index} are there: {single} is used{stale}")
            return WeightFiles(pickled=pickled, names=(single,), index=None, placement={}, notes=tuple(notes))
        _refuse_absent(folder, index, shards, present)
        return WeightFiles(pickled=pickled, names=shards, index=index, placement=placement, notes=tuple(notes))
    raise InputError(_nothing_found(folder, present))


def _listing(folder: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error


def _placement(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: no weight_map of tensor names to files; download the index again")
    for name, file in weight_map.items():
        # Only a plain name: an index must not point outside of its own directory.
        if not isinstance(file, str) or not file or file in (".", "..") or any(c in file for c in '/\\:\0\n"'):
            raise InputError(f"{index}: '{name}' is placed in {str(file)[:80]!r}, which is no plain file name; "
                             "shards lie beside the index")  # fmt: skip
    return weight_map


def _refuse_absent(folder: Path, index: str, shards: Iterable[str], present: frozenset[str]) -> None:
    missing = [name for name in shards if name not in present]
    if not missing:
        return
    suffix = Path(missing[0]).suffix
    others = sorted(name for name in present if name.endswith(suffix) and name not in set(shards))
    hint = f"; {three_of(others)} is there but not in the index: stale index?" if others else ""
    raise InputError(f"{folder / index}: {len(missing)} of its files missing: {three_of(missing)} "
                     f"(incomplete download?{hint})")  # fmt: skip


def _nothing_found(folder: Path, present: frozenset[str]) -> str:
    if "adapter_config.json" in present:
        return f"{folder}: an adapter without its base model; merge it into the base model and save that"
    weights = sorted(name for name in present if name.endswith(_WEIGHT_SUFFIXES))
    listed = three_of(weights or sorted(present))
    return (f"{folder}: no {SAFETENSORS}, {SAFETENSORS_INDEX} or {BIN}; found {listed}. "
            "Give the directory that save_pretrained wrote")  # fmt: skip
