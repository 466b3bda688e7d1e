"""A device that is not the CPU, simulated: tensors that hold CPU memory but answer to another device.

Mixing them with CPU tensors, or reading them as NumPy arrays, fails as it does with the tensors of a GPU; everything
else computes what the CPU computes. So a test can tell that code keeps to the device of its input, without one.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

#: A device that torch needs no driver for, and whose own kernels are never reached.
DEVICE = torch.device("meta")


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"DeviceTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class SimulatedDevice(TorchDispatchMode):
    """Makes `torch.zeros(..., device=DEVICE)` and its like work inside the block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    mine = [t for t in flat if isinstance(t, DeviceTensor)]
    name = func.overloadpacket.__name__
    moves = name in ("_to_copy", "copy_")
    others = [t for t in flat if not isinstance(t, DeviceTensor) and t.dim() > 0]
    if mine and others and not moves:
        raise RuntimeError(f"{name}: tensors on {DEVICE} and on the CPU")
    here = bool(mine)
    asked = kwargs.get("device")
    if asked is not None:
        here = torch.device(asked).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "copy_":
        here = isinstance(args[0], DeviceTensor)
    plain_args, plain_kwargs = tree_map(lambda t: t.held if isinstance(t, DeviceTensor) else t, (args, kwargs))
    found = func(*plain_args, **plain_kwargs)
    if not here:
        return found
    wrapped = tree_map(lambda t: DeviceTensor(t) if isinstance(t, torch.Tensor) else t, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def on_device(value: Any) -> Any:
    """A tensor, or a dataclass of tensors, on the simulated device."""
    return _each(value, lambda t: DeviceTensor(t.detach().clone()))


def in_fp32(value: Any) -> Any:
    """The same with float64 tensors rounded to FP32, as a fused pass delivers them."""
    return _each(value, lambda t: t.float() if t.dtype == torch.float64 else t)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _each(getattr(value, field.name), change) for field in fields(value)})
    return value
