"""A Hugging Face directory: configuration and weights by name, mapped from the files, with every file accounted for."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from bf16forensics.errors import InputError
from bf16forensics.load.files import FileFacts, file_facts, unreadable
from bf16forensics.load.hf_files import WeightFiles, find_weight_files
from bf16forensics.load.hf_json import read_json_object
from bf16forensics.load.names import same_bits, three_of
from bf16forensics.load.nanogpt_contents import describe
from bf16forensics.load.safetensors_file import read_safetensors
from bf16forensics.load.torchfile import read_torch_file

CONFIG = "config.json"
#: Files hashed at once: hashing one is bound by the processor, reading it by the disk.
_HASHED_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HFDirectory:
    """What a directory holds, read but not interpreted."""

    #: Path as given.
    path: str
    #: config.json.
    config: Mapping[str, object]
    #: By checkpoint name, mapped from the files, as stored, on the CPU.
    tensors: Mapping[str, torch.Tensor]
    #: config.json ("config"), the index ("index") and every weight file ("checkpoint").
    files: tuple[FileFacts, ...]
    #: What a reader must know of how the directory was read.
    notes: tuple[str, ...]


def read_hf_directory(path: str | Path, *, allow_bin: bool = False) -> HFDirectory:
    """Reads what `save_pretrained` writes: config.json, and safetensors files or torch files, single or sharded.

    Shards are those that the index names, never those that a pattern finds. Torch files go through the restricted
    reader (`torchfile`), which executes nothing. Values, dtypes and names stay as stored; non-finite weights are kept.

    Args:
        path: the directory.
        allow_bin: whether torch files may be read.

    Raises:
        InputError: no such directory, config.json unusable, no weights or only torch files without leave, a shard
            that is missing, damaged or lacks a tensor that the index places in it.
    """
    folder, shown = Path(path), str(path)
    if not folder.exists():
        raise InputError(f"{shown}: no such directory; check the path")
    if not folder.is_dir():
        raise InputError(f"{shown}: not a directory; give the one that holds {CONFIG}")
    config = _read_config(folder)
    source = find_weight_files(folder, allow_bin=allow_bin)
    tensors, notes = _read_weights(folder, source)
    if (folder / "adapter_config.json").exists():
        notes.append("adapter_config.json: an adapter lies beside the model; it is not applied")
    wanted = [("config", CONFIG)]
    wanted += [("index", source.index)] if source.index is not None else []
    wanted += [("checkpoint", name) for name in source.names]
    with ThreadPoolExecutor(max_workers=_HASHED_AT_ONCE) as pool:
        files = tuple(pool.map(lambda one: file_facts(one[0], folder / one[1]), wanted))
    return HFDirectory(path=shown, config=config, tensors=tensors, files=files, notes=(*source.notes, *notes))


def _read_config(folder: Path) -> dict[str, object]:
    file = folder / CONFIG
    try:
        found = file.exists()
    except OSError as error:
        raise unreadable(file, error) from error
    if not found:
        raise InputError(f"{folder}: no {CONFIG}; give the directory that save_pretrained wrote")
    config = read_json_object(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(f"{file}: no model_type; add the family of the model, such as llama")
    return config


def _read_weights(folder: Path, source: WeightFiles) -> tuple[dict[str, torch.Tensor], list[str]]:
    """All tensors of the chosen files: where the index places a name, that file's; else the first that holds it."""
    notes: list[str] = []
    held = {name: _read_one(folder / name, source.pickled, notes) for name in source.names}
    tensors: dict[str, torch.Tensor] = {}
    for name, file in source.placement.items():
        if name not in held[file]:
            raise InputError(f"{folder / file}: does not hold '{name}', which {source.index} places there; "
                             "download the file and the index again")  # fmt: skip
        tensors[name] = held[file][name]
    unplaced: list[str] = []
    for file, here in held.items():
        for name, tensor in here.items():
            if name not in tensors:
                tensors[name] = tensor
                unplaced.append(name)
            elif source.placement.get(name) != file and not same_bits(tensors[name], tensor):
                raise InputError(f"{folder / file}: '{name}' has other values here than in another shard; "
                                 "remove one of the two")  # fmt: skip
    if not tensors:
        raise InputError(f"{folder / source.names[0]}: holds no tensor; give the weights of the model")
    if source.index is not None and unplaced:
        notes.append(f"tensors in the shards that {source.index} does not list: {three_of(unplaced)}")
    return tensors, notes


def _read_one(file: Path, pickled: bool, notes: list[str]) -> dict[str, torch.Tensor]:
    if not pickled:
        loaded = read_safetensors(file)
        layout = loaded.metadata.get("format")
        if layout in ("tf", "flax"):
            raise InputError(f"{file}: written by {layout}, whose weights lie in another layout; save it from PyTorch")
        return dict(loaded.tensors)
    read = read_torch_file(file)
    notes += read.notes
    if not isinstance(read.tree, dict):
        raise InputError(f"{file}: holds {describe(read.tree)}, not a state dict; save model.state_dict()")
    for name, value in read.tree.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{file}: '{name}' is {describe(value)}, not a tensor; save model.state_dict() alone")
    return {str(name): value for name, value in read.tree.items()}
