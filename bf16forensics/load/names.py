"""Parameter names without the wrappers that compilation and data-parallel training put in front."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch

from bf16forensics.errors import InputError

_WRAPPERS = ("_orig_mod.", "module.")
_Value = TypeVar("_Value")


def strip_wrappers(name: str) -> str:
    """Removes every leading `_orig_mod.` and `module.` component, in any nesting; inner components stay."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


def same_bits(a: object, b: object) -> bool:
    """True for two tensors of one dtype, shape and bit pattern (NaN equals the same NaN); False for anything else."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def normalise_names(tensors: Mapping[str, _Value], where: str) -> tuple[dict[str, _Value], tuple[str, ...]]:
    """Strips the wrappers off every name.

    Args:
        tensors: by name as stored.
        where: file to name in errors.

    Returns:
        (tensors by stripped name in file order, notes on names that occurred twice with the same bits).

    Raises:
        InputError: two names become one and their values differ.
    """
    stripped: dict[str, _Value] = {}
    origin: dict[str, str] = {}
    notes: list[str] = []
    for name, value in tensors.items():
        clean = strip_wrappers(name)
        if clean in stripped:
            if not same_bits(stripped[clean], value):
                raise InputError(
                    f"{where}: '{origin[clean]}' and '{name}' are the same parameter with different values; "
                    "remove one of them"
                )
            notes.append(f"'{origin[clean]}' and '{name}' hold the same values: one is used")
            continue
        stripped[clean] = value
        origin[clean] = name
    return stripped, tuple(notes)


def three_of(names: Iterable[str]) -> str:
    """Up to three names for an error message, in their order."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") if listed else "none"
