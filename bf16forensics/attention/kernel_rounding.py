"""The gateway to the rounding inside kernels: the project's own, by integer arithmetic, and Triton's conversion."""

import os

import torch

from bf16forensics.errors import InputError

#: Variable that makes Triton interpret kernels on the CPU; read when a module of kernels is first imported.
INTERPRET_VARIABLE = "TRITON_INTERPRET"


def is_interpreting() -> bool:
    """Tell whether Triton interprets kernels in this process instead of compiling them."""
    return os.environ.get(INTERPRET_VARIABLE, "0").lower() in ("1", "true", "yes", "on", "y")


def round_bf16_in_kernel(t: torch.Tensor) -> torch.Tensor:
    """Round to BF16 as every kernel here does, by integer arithmetic on the bits.

    Args:
        t: any shape, FP32, contiguous; on a GPU, or on the CPU under Triton's interpreter.

    Returns:
        Same shape, FP32, holding BF16 values.

    Raises:
        InputError: Triton is not installed, or the tensor is on the CPU and Triton does not interpret.
    """
    _require_triton(t)
    from bf16forensics.kernels.rounding import round_bf16

    # Triton launches on the current device.
    with torch.cuda.device_of(t):
        return round_bf16(t)


def cast_bf16_in_kernel(t: torch.Tensor) -> torch.Tensor:
    """Convert to BF16 by Triton's own conversion, which no kernel here uses.

    Args:
        t: as for `round_bf16_in_kernel`.

    Returns:
        Same shape, BF16.

    Raises:
        InputError: as `round_bf16_in_kernel`.
    """
    _require_triton(t)
    from bf16forensics.kernels.casts import cast_bf16

    with torch.cuda.device_of(t):
        return cast_bf16(t)


def _require_triton(t: torch.Tensor) -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise InputError("kernels need Triton, which is not installed; install bf16forensics[gpu]") from error
    if t.device.type == "cpu" and not is_interpreting():
        raise InputError(
            f"kernels need a GPU, the tensor is on the CPU; move it, or set {INTERPRET_VARIABLE}=1 before the start"
        )
