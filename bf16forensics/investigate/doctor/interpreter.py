"""Rounding inside kernels: on a GPU in this process, and under Triton's interpreter in one of its own.

Triton decides how a kernel runs when its module is imported, so the interpreter needs a process in which nothing of
Triton has been imported yet. Run as a program, this module is that process: it writes the checks as JSON.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from bf16forensics.attention.kernel_rounding import (
    INTERPRET_VARIABLE,
    cast_bf16_in_kernel,
    is_interpreting,
    round_bf16_in_kernel,
)
from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, FP32
from bf16forensics.investigate.doctor.boundaries import boundaries
from bf16forensics.investigate.doctor.compare import Comparison
from bf16forensics.investigate.doctor.result import ROUNDING, SKIPPED, Check

WHERE = "interpreter"
NO_TRITON = "Triton is not installed; install bf16forensics[gpu]"
_KERNEL, _CAST = "kernel rounding to bf16", "Triton fp32 to bf16"
#: Roundings in kernels: name, function, whether kernels here depend on it.
_ROUNDINGS: tuple[tuple[str, Callable[[Tensor], Tensor], bool], ...] = (
    (_KERNEL, round_bf16_in_kernel, True),
    (_CAST, cast_bf16_in_kernel, False),
)
_TIMEOUT_S = 120.0


def kernel_checks(device: str, where: str) -> tuple[Check, ...]:
    """Rounds every boundary of BF16 in kernels.

    Args:
        device: a CUDA device, or "cpu" where Triton interprets.
        where: for the checks.

    Returns:
        One check for the project's rounding and one for Triton's conversion; "skipped" where Triton cannot run.
    """
    if device != "cpu" and is_interpreting():
        return skipped(where, f"{INTERPRET_VARIABLE} is set, so kernels are interpreted; unset it")
    cases = boundaries(BF16, FP32)
    t = torch.from_numpy(cases.values).to(device)
    checks = []
    for name, function, is_relied_on in _ROUNDINGS:
        try:
            found = function(t).float().cpu().numpy()
        except InputError as error:
            return skipped(where, str(error))
        comparison = Comparison(name=name, where=where, is_relied_on=is_relied_on)
        comparison.add("fp32 to bf16, rne", cases.values, found, cases.expected("rne"))
        checks.append(comparison.check())
    return tuple(checks)


def skipped(where: str, reason: str) -> tuple[Check, ...]:
    """The same checks, not made.

    Args:
        where: for the checks.
        reason: why, and what would make them possible.
    """
    return tuple(
        Check(
            group=ROUNDING,
            name=name,
            where=where,
            status=SKIPPED,
            observed=reason,
            expected="0 differ from exact rounding",
            what_it_means="Nothing is known of roundings in kernels here; without kernels nothing depends on them.",
        )
        for name, _, __ in _ROUNDINGS
    )


class InterpreterProcess:
    """Triton's interpreter at work beside this process."""

    def __init__(self) -> None:
        """Start it, where Triton is installed."""
        self._process: subprocess.Popen[str] | None = None
        if find_spec("triton") is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            # A GPU is not needed, and starting to use one takes seconds.
            env={**os.environ, INTERPRET_VARIABLE: "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def checks(self) -> tuple[Check, ...]:
        """Wait for its checks; "skipped" where it came to none."""
        process = self._process
        if process is None:
            return skipped(WHERE, NO_TRITON)
        try:
            answer, complaints = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.stop()
            return skipped(WHERE, f"Triton's interpreter took more than {_TIMEOUT_S:g} s; try on an idle machine")
        if process.returncode != 0:
            last = complaints.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            return skipped(WHERE, f"Triton's interpreter does not run here: {last[0]}")
        return tuple(Check(**fields) for fields in json.loads(answer))

    def stop(self) -> None:
        """End it, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def main() -> None:
    """Writes the checks under the interpreter to standard output."""
    # Triton's interpreter computes with NumPy, which warns of NaN and overflow.
    with np.errstate(all="ignore"):
        checks = kernel_checks("cpu", WHERE)
    sys.stdout.write(json.dumps([dataclasses.asdict(check) for check in checks]))


if __name__ == "__main__":
    main()
