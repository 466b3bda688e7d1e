"""Measures the matrix unit of the GPU at hand and compares it with the models of it.

    python examples/matrix_unit/measure.py [-o DIRECTORY] [--problems N]

For BF16, FP16 and FP8 E4M3 operands, for mma.sync and wgmma (and two stated shapes of mma.sync), for one instruction
and chains of several: runs the problems of `vectors.py`, compares every result bit for bit with the model, and prints
one line each; exits 1 where one differs. With -o it also writes fewer problems and their results to DIRECTORY as npz
files.
"""

import argparse
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import inline_mma
import numpy as np
import torch
import vectors
from numpy.typing import NDArray

from bf16forensics.attention.matrix_unit import OPERAND_DTYPES, matrix_instructions, matrix_unit_dot, why_unavailable
from bf16forensics.floats.accumulate import block_of, dot_add
from bf16forensics.floats.formats import format_named

CHAINS = (1, 2, 4, 8)
#: Chains that are written, and the share of the problems that the longer one gets. A longer chain of instructions that
#: take fewer products than the model's block is left out: the model puts several into one block.
WRITTEN = {1: 1.0, 8: 0.125}
#: Measured and not written: Triton's mma.sync is this shape.
NOT_WRITTEN = ("m16n8k16",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One way of asking the matrix unit."""

    #: Format of the operands, and name of the instruction as files carry it.
    operands: str
    instruction: str
    #: Products that one instruction takes, and the model it should follow.
    step: int
    model: str
    #: a, b, c to d.
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    #: Matrix instructions in the compiled code.
    compiled: str


def units() -> list[Unit]:
    """Every way of asking that this GPU has."""
    found = []
    for operands, dtype in OPERAND_DTYPES.items():
        for instruction in ("mma.sync", "wgmma"):
            if why_unavailable(dtype, instruction) is not None:
                continue
            narrow = operands == "e4m3"
            found.append(
                Unit(
                    operands=operands,
                    instruction=instruction,
                    step=32 if narrow else 16,
                    model="sm90-fp8" if narrow and instruction == "wgmma" else "sm90",
                    run=lambda a, b, c, i=instruction: matrix_unit_dot(a, b, c, i),
                    compiled=" ".join(matrix_instructions(dtype, instruction)),
                )
            )
        for shape, step in inline_mma.SHAPES.items():
            if operands != "e4m3":
                found.append(
                    Unit(
                        operands=operands,
                        instruction=shape,
                        step=step,
                        model="sm90",
                        run=lambda a, b, c, s=shape: inline_mma.mma_dot(a, b, c, s),
                        compiled=f"mma.sync.{shape} (inline PTX)",
                    )
                )
    return found


def measured(
    unit: Unit, values: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """The unit's results for problems in FP32."""
    dtype = OPERAND_DTYPES[unit.operands]
    a, b = (torch.from_numpy(t).cuda().to(dtype) for t in values[:2])
    return unit.run(a, b, torch.from_numpy(values[2]).cuda()).cpu().numpy()


def modelled(unit: Unit, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """The model's results, one instruction after the other."""
    for start in range(0, a.shape[1], unit.step):
        some = slice(start, start + unit.step)
        c = dot_add(c, a[:, some], b[:, some], unit.model, operands=unit.operands)
    return c


def differing(d: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Where the bits differ."""
    return d.view(np.uint32) != expected.view(np.uint32)


def versions() -> dict[str, str]:
    """GPU, driver, torch and Triton."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="directory for the npz files")
    parser.add_argument("--problems", type=int, default=20_000, help="problems a line (default 20,000)")
    parser.add_argument("--kept", type=int, default=1200, help="problems a file (default 1,200)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: there is no matrix unit to measure")
    facts = versions()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    num_differing = 0
    for unit in units():
        print(f"{unit.operands} {unit.instruction}: {unit.compiled}")
        num_differing += sum(one_line(unit, chain, args.problems) for chain in CHAINS)
        for chain, share in WRITTEN.items():
            if args.output is None or unit.instruction in NOT_WRITTEN:
                continue
            if chain == 1 or unit.step == block_of(unit.model):
                write(unit, chain, int(args.kept * share), args.output, facts)
    raise SystemExit(1 if num_differing else 0)


def one_line(unit: Unit, chain: int, count: int) -> int:
    """Measures and compares one length of chain, and prints the line; how many problems differ."""
    *values, names = vectors.problems(format_named(unit.operands), count, unit.step * chain, seed=chain)
    d = measured(unit, tuple(values))
    wrong = differing(d, modelled(unit, *values))
    where = {name: int(n) for name, n in zip(*np.unique(np.array(names)[wrong], return_counts=True), strict=True)}
    print(f"  chain of {chain}: {wrong.sum()} of {len(d)} differ from {unit.model}{f' {where}' if where else ''}")
    return int(wrong.sum())


def write(unit: Unit, chain: int, count: int, directory: Path, facts: dict[str, str]) -> None:
    """Measures fewer problems and writes them, bits as uint32."""
    directory.mkdir(parents=True, exist_ok=True)
    *values, names = vectors.problems(format_named(unit.operands), count, unit.step * chain, seed=100 + chain)
    kinds, kind = np.unique(names, return_inverse=True)
    a, b, c, d = (t.view(np.uint32) for t in (*values, measured(unit, tuple(values))))
    suffix = "" if chain == 1 else f"-chain{chain}"
    path = directory / f"{facts['gpu'].split()[-1].lower()}-{unit.operands}-{unit.instruction}{suffix}.npz"
    np.savez_compressed(
        path, a=a, b=b, c=c, d=d, kind=kind.astype(np.uint8), kinds=kinds,
        model=unit.model, operands=unit.operands, instruction=unit.instruction, compiled=unit.compiled, **facts,
    )  # fmt: skip
    print(f"  wrote {path.name}: {len(d)} problems, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
