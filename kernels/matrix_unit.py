"""Dot products on a GPU's matrix unit, one instruction or a chain of them, for looking at how the unit adds.

Not a fast product: of every tile that the unit computes only the diagonal is kept, so that each problem has operands
and an addend of its own. Triton chooses the instruction by the tile: 16 rows and one warp make mma.sync, 64 rows and
four warps make wgmma on a GPU that has it. What was chosen can be read off the compiled code: on Hopper, FP8 operands
of mma.sync are converted to FP16 first.
"""

import re

import torch
import triton
import triton.language as tl

#: Rows of a tile (and columns) and warps that compute it, for each instruction.
TILES = {"mma.sync": (16, 1), "wgmma": (64, 4)}
#: Elements of the dot product that one instruction takes, by the bytes of an operand's element.
STEPS = {2: 16, 1: 32}
OPERANDS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)

_MATRIX_INSTRUCTION = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")


@triton.jit
def _dot_add_kernel(p_a, p_b, p_c, p_d, num_problems, num_steps, SIZE: tl.constexpr, STEP: tl.constexpr):
    i_tile = tl.program_id(0).to(tl.int64)
    # [SIZE]
    o_problem = i_tile * SIZE + tl.arange(0, SIZE)
    m_problem = o_problem < num_problems
    b_c = tl.load(p_c + o_problem, mask=m_problem, other=0.0)
    # [SIZE, SIZE]
    b_sum = tl.broadcast_to(b_c[:, None], (SIZE, SIZE))
    stride = num_steps * STEP
    for i_step in range(num_steps):
        # [STEP]
        o_k = i_step * STEP + tl.arange(0, STEP)
        # [SIZE, STEP]
        b_a = tl.load(p_a + o_problem[:, None] * stride + o_k[None, :], mask=m_problem[:, None], other=0.0)
        # [STEP, SIZE]
        b_b = tl.load(p_b + o_problem[None, :] * stride + o_k[:, None], mask=m_problem[None, :], other=0.0)
        b_sum = tl.dot(b_a, b_b, b_sum, input_precision="ieee")
    # [SIZE, SIZE]
    o_row = tl.arange(0, SIZE)[:, None]
    m_diagonal = (o_row == tl.arange(0, SIZE)[None, :]) & m_problem[:, None]
    tl.store(p_d + o_problem[:, None] + tl.full((SIZE, SIZE), 0, tl.int64), b_sum, mask=m_diagonal)


def dot_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, instruction: str) -> torch.Tensor:
    """c + sum a b over the last axis, as a chain of matrix instructions in the order of that axis.

    Args:
        a: [n, K] BF16, FP16 or FP8 E4M3, on a GPU, or on the CPU under Triton's interpreter, which multiplies the
            operands in FP32 instead. K is filled up with zeros to whole instructions: 16 products, 32 in FP8.
        b: as `a`.
        c: [n] FP32.
        instruction: a key of `TILES`.

    Returns:
        [n] FP32, with what the unit makes of NaN and infinities. `c` where K is 0. Bitwise reproducible on one device.

    Raises:
        ValueError: other dtypes or shapes.
    """
    _check(a, b, c)
    return _launch(a, b, c, instruction)[0]


def matrix_instructions(dtype: torch.dtype, instruction: str, device: torch.device | str) -> tuple[str, ...]:
    """The matrix instructions in the PTX of the kernel that `dot_add` runs on a GPU, each once, in their order.

    Args:
        dtype: of the operands.
        instruction: a key of `TILES`.
        device: a GPU.
    """
    a = torch.zeros(1, 1, dtype=torch.float32, device=device).to(dtype)
    compiled = _launch(a, a, torch.zeros(1, device=device), instruction)[1]
    return tuple(dict.fromkeys(_MATRIX_INSTRUCTION.findall(compiled.asm["ptx"])))


def _launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, instruction: str):
    size, warps = TILES[instruction]
    step = STEPS[a.element_size()]
    num_steps = triton.cdiv(a.shape[1], step)
    a, b = (_operand(t, num_steps * step) for t in (a, b))
    c = c.contiguous()
    d = torch.empty_like(c)
    if not len(c):
        return d, None
    grid = (triton.cdiv(len(c), size),)
    compiled = _dot_add_kernel[grid](a, b, c, d, len(c), num_steps, SIZE=size, STEP=step, num_warps=warps)
    return d, compiled


def _operand(values: torch.Tensor, length: int) -> torch.Tensor:
    """Contiguous, filled up with zeros; FP32 on the CPU, whose interpreter multiplies the codes of narrower formats."""
    filled = torch.zeros(values.shape[0], length, dtype=values.dtype, device=values.device)
    filled[:, : values.shape[1]] = values
    return filled if values.is_cuda else filled.float()


def _check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    if a.dtype not in OPERANDS or b.dtype != a.dtype or c.dtype != torch.float32:
        raise ValueError(
            f"expected two operands of one type (BF16, FP16, E4M3) and FP32, got {[a.dtype, b.dtype, c.dtype]}"
        )
    if a.ndim != 2 or a.shape != b.shape or c.shape != a.shape[:1]:
        raise ValueError(f"expected [n, K], [n, K] and [n], got {[tuple(t.shape) for t in (a, b, c)]}")
