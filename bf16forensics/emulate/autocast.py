"""CUDA autocast to BF16, emulated on CPU tensors.

A function mode sees every call of a torch function above autograd, which is where autocast casts: the casts are part of
the graph, and each gradient is rounded where it passes one. `autocast_rules` says what becomes of each function.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bf16forensics.emulate.autocast_rules import Function, rule_of
from bf16forensics.errors import InputError

#: Both are set: models ask for either, and switch either off around what must stay FP32.
_DEVICES = ("cuda", "cpu")


class CudaAutocast(TorchFunctionMode):
    """Inside the block, torch functions on CPU tensors do what they do under `torch.autocast("cuda", torch.bfloat16)`.

    Only BF16, FP16 and FP32 tensors are cast; FP64 and integers are left alone. Belongs to the calling thread, nests,
    and may be entered again. `torch.autocast(..., enabled=False)` and `strict_fp32` inside the block switch it off, as
    they do autocast; products then are what torch makes them. Gradients may be taken inside the block or after it.

    Sums of products are FP32 as far as the process computes FP32 products: enter it inside `strict_fp32`.

    Raises:
        InputError: by the call of an operation that autocast would change and that is not emulated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[list[tuple[str, bool, torch.dtype]]] = []

    def __enter__(self) -> "CudaAutocast":
        self._saved.append([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES])
        for device in _DEVICES:
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, torch.bfloat16)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for device, enabled, dtype in self._saved.pop():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of a torch function."""
        named = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__" or not all(torch.is_autocast_enabled(d) for d in _DEVICES):
            return func(*args, **named)
        if any(torch.get_autocast_dtype(device) != torch.bfloat16 for device in _DEVICES):
            raise InputError("amp-bf16: the model asks for autocast to another format; use --activations fp32")
        with _Off():
            return rule_of(func)(func, args, named)


class _Off:
    """Real CPU autocast must not act on what a rule calls, and nested calls are not the model's."""

    def __enter__(self) -> None:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, False)

    def __exit__(self, *exception: object) -> None:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, True)
