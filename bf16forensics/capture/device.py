"""Where a captured model runs: the choice of a device, and what is kept there.

Importing this loads torch; choosing the CPU touches no GPU.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch

from bf16forensics.emulate.strict import require_ieee
from bf16forensics.errors import InputError

#: Names a user may give; the first is the default.
DEVICES = ("auto", "cpu", "cuda")
CPU = torch.device("cpu")

#: Lowest compute capability whose matrix unit multiplies BF16.
_CAPABILITY = (8, 0)
#: Share of the free memory of a GPU that weights, and the graphs of one sequence, may take each.
_SHARE = 0.25

_Held = TypeVar("_Held")
_turn = threading.RLock()


def capture_device(wanted: str, *, gpu_computes: bool = False) -> torch.device:
    """The device that a captured model runs on.

    Args:
        wanted: one of `DEVICES`; "auto" takes the GPU where it computes the dual pass, else the CPU.
        gpu_computes: whether a GPU computes the dual pass.

    Raises:
        InputError: an unknown name; "cuda" without an NVIDIA GPU that multiplies BF16.
        ForensicsError: FP32 products of the GPU are not IEEE FP32 even inside `strict_fp32`.
    """
    if wanted not in DEVICES:
        raise InputError(f"unknown --device {wanted!r}; choose one of {', '.join(DEVICES)}")
    if wanted == "cpu" or (wanted == "auto" and not gpu_computes):
        return CPU
    missing = why_no_gpu()
    if missing is not None:
        raise InputError(f"--device {wanted}: {missing}; use --device cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    require_ieee(device)
    return device


def why_no_gpu() -> str | None:
    """One clause on why no GPU here computes, which takes an NVIDIA one with BF16 products; None where one does."""
    # A driver that is too old or broken warns; the answer is the same.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            return "no CUDA device"
    if torch.version.cuda is None:
        return "the GPU is not NVIDIA's"
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, and BF16 products "
            f"need {_CAPABILITY[0]}.{_CAPABILITY[1]}"
        )
    return None


def device_words(device: torch.device) -> str:
    """A device for people: "cpu", "cuda (NVIDIA H200)"."""
    return device.type if device.type != "cuda" else f"cuda ({torch.cuda.get_device_name(device)})"


def turn_on(device: torch.device) -> AbstractContextManager[object]:
    """A turn at computing on a device: one thread at a time on a GPU, everybody at once on the CPU.

    For a moment of a capture's backward pass torch refuses operations in the whole process; see `GpuAttention`.
    """
    return nullcontext() if device.type == "cpu" else _turn


def any_turn() -> AbstractContextManager[object]:
    """A turn for whoever may compute on a GPU beside a capture; nobody waits where none runs on a GPU."""
    return _turn


def room_on(device: torch.device) -> int:
    """Bytes that one use of a device's memory may take: a share of what is free on a GPU; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    # What torch has set aside and does not use is free as well.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((torch.cuda.mem_get_info(device)[0] + unused) * _SHARE)


class DeviceStore:
    """Tensors kept on the device of a capture while they fit, made anew at every use where they do not.

    Any thread may ask; a value may be made twice, and is the same both times.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        """Args: room, bytes that may be kept; asked for at the first use."""
        self._ask = room
        self._room: int | None = None
        self._kept: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, name: str, make: Callable[[], _Held]) -> _Held:
        """What `make` gives, a tensor or a dataclass of tensors; kept under its name if there is room."""
        if name in self._kept:
            kept: _Held = self._kept[name]
            return kept
        made = make()
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(made))
        with self._lock:
            if self._room is None:
                self._room = self._ask()
            if size <= self._room and name not in self._kept:
                self._room -= size
                self._kept[name] = made
        return made

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that is kept."""
        for value in tuple(self._kept.values()):
            yield from _tensors(value)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
