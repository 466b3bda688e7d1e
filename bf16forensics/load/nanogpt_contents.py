"""What a nanoGPT checkpoint file holds: the state dict, what the file says about the model, and the step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bf16forensics.errors import InputError
from bf16forensics.load.files import container_of
from bf16forensics.load.inert import Placeholder
from bf16forensics.load.names import normalise_names, three_of
from bf16forensics.load.safetensors_file import read_safetensors
from bf16forensics.load.torchfile import read_torch_file

_STATE_KEYS = ("model", "model_state_dict", "state_dict")
#: Top-level entries of a training checkpoint that hold tensors and are no weights of the model.
_TRAINING_KEYS = frozenset({"optimizer", "optimizers", "optimizer_state_dict", "scheduler", "scaler", "rng_state"})
_SIZE_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
_KNOWN_KEYS = frozenset({*_SIZE_KEYS, "bias", "dropout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint file holds, names stripped of wrappers."""

    #: State dict entries; values that are no plain tensor stay what they are.
    tensors: dict[str, object]
    #: model_args; empty when absent.
    model_args: Mapping[str, object]
    #: The training configuration; empty when absent.
    training_config: Mapping[str, object]
    iter_num: int | None
    notes: tuple[str, ...]


def read_contents(path: str | Path) -> Contents:
    """Reads the container and finds the state dict in it.

    Raises:
        InputError: unreadable, or no state dict inside.
    """
    shown = str(path)
    if container_of(path) == "safetensors":
        loaded = read_safetensors(path)
        tensors, notes = normalise_names(dict[str, object](loaded.tensors), shown)
        metadata = {key: _number(value) for key, value in loaded.metadata.items() if key in _KNOWN_KEYS}
        return Contents(tensors=tensors, model_args=metadata, training_config={},
                        iter_num=_step(_number(loaded.metadata.get("iter_num"))), notes=notes)  # fmt: skip
    file = read_torch_file(path)
    top = file.tree
    if not isinstance(top, dict) or not top:
        raise InputError(f"{shown}: holds a {describe(top)}, not a checkpoint dict; give {{'model': state dict, ...}}")
    found = [top[key] for key in _STATE_KEYS if isinstance(top.get(key), dict)]
    state: dict[object, object] = found[0] if found else top
    extra: list[str] = []
    if not found:
        top = {}
        if not any(isinstance(value, torch.Tensor) for value in state.values()):
            raise InputError(f"{shown}: no state dict found; keys found: {three_of(map(str, state))}; "
                             f"expected one of {', '.join(_STATE_KEYS)}")  # fmt: skip
    else:
        extra = [
            str(key)
            for key, value in top.items()
            if value is not state and key not in _TRAINING_KEYS and _holds_tensors(value)
        ]
    tensors, notes = normalise_names({str(name): value for name, value in state.items()}, shown)
    if extra:
        notes += (f"entries of the file that hold tensors and are not read: {', '.join(extra)}",)
    return Contents(
        tensors=tensors,
        model_args=_mapping(top.get("model_args")),
        training_config=_mapping(top.get("config")),
        iter_num=_step(top.get("iter_num")),
        notes=file.notes + notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSizes:
    """What the file (or the caller) says about the model; None where nothing is said."""

    sizes: Mapping[str, int]
    bias: bool | None
    dropout: float
    tie_weights: bool | None

    @staticmethod
    def read(contents: Contents, where: str, n_head: int | None, notes: list[str]) -> "DeclaredSizes":
        """Reads model_args, or the training configuration where there is no model_args.

        Raises:
            InputError: a size is not a positive integer, or the given n_head contradicts the file.
        """
        source = contents.model_args or contents.training_config
        label = "model_args" if contents.model_args else "config"
        sizes: dict[str, int] = {}
        for key in _SIZE_KEYS:
            value = source.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{where}: {label}.{key} must be a positive integer; got {describe(value, show=True)}")
            sizes[key] = value
        if n_head is not None:
            if n_head < 1:
                raise InputError(f"--n-head must be at least 1; got {n_head}")
            if sizes.setdefault("n_head", n_head) != n_head:
                raise InputError(f"{where}: --n-head {n_head} contradicts {label}.n_head {sizes['n_head']}; drop one")
        unknown = sorted(str(key) for key in contents.model_args if key not in _KNOWN_KEYS)
        if unknown:
            notes.append(f"model_args keys not applied: {', '.join(unknown)}")
        dropout = next((c["dropout"] for c in (source, contents.training_config) if "dropout" in c), 0.0)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise InputError(f"{where}: {label}.dropout must be in [0, 1); got {describe(dropout, show=True)}")
        bias = source.get("bias")
        ties = [source[key] for key in ("tie_weights", "tie_word_embeddings") if isinstance(source.get(key), bool)]
        return DeclaredSizes(
            sizes=sizes,
            bias=bool(bias) if isinstance(bias, bool | int) else None,
            dropout=float(dropout),
            tie_weights=bool(ties[0]) if ties else None,
        )


def describe(value: object, show: bool = False) -> str:
    """A value in an error message: its type with an article, or (show) the value itself where it is short."""
    if isinstance(value, Placeholder):
        return f"a {value.dotted_name}"
    return repr(value) if show and isinstance(value, int | float | str) else f"a {type(value).__name__}"


def _mapping(value: object) -> Mapping[str, object]:
    if isinstance(value, Placeholder):
        value = value.state
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _step(value: object) -> int | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(text: str | None) -> object:
    if text is None or text in ("True", "true", "False", "false"):
        return None if text is None else text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _holds_tensors(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values())
