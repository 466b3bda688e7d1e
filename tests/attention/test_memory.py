"""Memory grows with N, not with N x N."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, math, resource, sys, time
import torch
from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

n, d = int(sys.argv[1]), 64
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
q, k, v, do = (torch.randn(1, n, d, generator=generator).bfloat16().float() for _ in range(4))
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
record = AttentionRecord(layer=0, sequence=0, step=None, storage="bf16", q=q, k=k, v=v, do=do, x=None,
                         geometry=Geometry(scale=1 / math.sqrt(d)))
start = time.perf_counter()
dual = dual_pass(record, resolve(sys.argv[2]), sys.argv[3])
seconds = time.perf_counter() - start
assert dual.o_hp.isfinite().all()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak": peak, "base": base, "seconds": seconds}))
"""


def measure(run_python: Callable[..., Any], root: Path, *args: object) -> dict[str, float]:
    done = run_python(["-c", SCRIPT, *args], env={"PYTHONPATH": str(root)})
    assert done.exit_code == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_one_head_of_16384_tokens_within_4_gib(run_python: Callable[..., Any], repository: Path) -> None:
    found = measure(run_python, repository, 16384, "fa2", "fp64")
    assert found["peak"] < 4 * 2**30
    # Far below the bound where freed blocks are used again: a fragmented heap shows here first.
    assert found["peak"] - found["base"] < 16384 * 16384 * 8


def test_a_shorter_head_stays_far_below_n_times_n(run_python: Callable[..., Any], repository: Path) -> None:
    """2,048 tokens: one float64 matrix of all pairs takes 32 MiB; a pass over whole matrices would hold about ten."""
    found = measure(run_python, repository, 2048, "fa2", "fp64")
    assert found["peak"] - found["base"] < 4 * 2048 * 2048 * 8
