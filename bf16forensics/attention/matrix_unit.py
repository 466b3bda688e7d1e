"""The matrix unit of the GPU at hand: dot products by one of its instructions, where there is one.

The only module that reaches the kernel. What a unit is modelled as lies in `bf16forensics.floats.matrix_unit`.
"""

import warnings

import torch

from bf16forensics.errors import InputError

INSTRUCTIONS = ("mma.sync", "wgmma")
#: Types of the operands, by the names of their formats.
OPERAND_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}

#: Lowest compute capability whose unit takes a type.
_NEEDED = {torch.bfloat16: (8, 0), torch.float16: (8, 0), torch.float8_e4m3fn: (8, 9)}


def matrix_unit_dot(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, instruction: str) -> torch.Tensor:
    """c + sum a b over the last axis, computed by the matrix unit as a chain of instructions along that axis.

    Args:
        a: [n, K] BF16, FP16 or FP8 E4M3; any n and K, on any device (copied to the GPU). K is filled up with zeros to
            whole instructions: 16 products, 32 in FP8.
        b: as `a`.
        c: [n] FP32.
        instruction: one of `INSTRUCTIONS`.

    Returns:
        [n] FP32 on c's device, with what the unit makes of NaN and infinities; `c` itself where K is 0.

    Raises:
        InputError: Triton or a GPU is missing, the GPU has no such instruction, or a shape or dtype does not fit.
    """
    missing = why_unavailable(a.dtype, instruction)
    if missing is not None:
        raise InputError(missing)
    device = a.device if a.is_cuda else torch.device("cuda")
    from bf16forensics.kernels.matrix_unit import dot_add

    try:
        with torch.no_grad(), torch.cuda.device(device):
            return dot_add(a.to(device), b.to(device), c.to(device), instruction).to(c.device)
    except ValueError as error:
        raise InputError(f"dot products on the matrix unit: {error}") from None


def matrix_instructions(dtype: torch.dtype, instruction: str) -> tuple[str, ...]:
    """The matrix instructions in the PTX that `matrix_unit_dot` runs for operands of a type, each once.

    Raises:
        InputError: as `matrix_unit_dot`.
    """
    missing = why_unavailable(dtype, instruction)
    if missing is not None:
        raise InputError(missing)
    from bf16forensics.kernels.matrix_unit import matrix_instructions as read

    return read(dtype, instruction, torch.device("cuda"))


def why_unavailable(dtype: torch.dtype, instruction: str) -> str | None:
    """One line on why an instruction cannot be run here for operands of a type; None when it can."""
    if instruction not in INSTRUCTIONS:
        return f"unknown matrix instruction {instruction!r}; choose one of {', '.join(INSTRUCTIONS)}"
    if dtype not in _NEEDED:
        return f"the matrix unit is asked with BF16, FP16 or FP8 E4M3 operands, not {dtype}; convert them first"
    if not _has_gpu():
        return "no CUDA device: the matrix unit of a GPU can only be asked where there is one"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed: install bf16forensics[gpu] to ask the GPU's matrix unit"
    capability = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
    if instruction == "wgmma" and capability[0] != 9:
        return f"{name} has no wgmma; it exists on compute capability 9 only"
    if capability < _NEEDED[dtype]:
        needed = ".".join(map(str, _NEEDED[dtype]))
        return f"the matrix unit of {name} takes no {str(dtype).removeprefix('torch.')}; that needs {needed}"
    if (dtype, instruction, capability[0]) == (torch.float8_e4m3fn, "mma.sync", 9):
        # Triton converts the operands to FP16 and gives each of two instructions every other pair of products.
        return f"mma.sync on {name} multiplies FP8 as FP16; ask wgmma, which has FP8 arithmetic of its own"
    return None


def _has_gpu() -> bool:
    # A driver that is too old or broken warns; the answer is the same.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()
