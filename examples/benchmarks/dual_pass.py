"""What the fused dual pass costs on a GPU, against forward passes, a training step, and naive ways to the same numbers.

    python examples/benchmarks/dual_pass.py [--quick] [--json FILE] [--recipes fa2,fa3,paper] [--shapes 96x4096x64,...]

A dual pass here is the forward kernel with P K and the delta errors, and the second look at rows with several
candidates for the maximum and at saturated rows. Causal attention of normal BF16 data; a shape is heads x tokens x head
size. In one process, alternating, by the GPU's own clock, medians:

- SDPA's flash forward pass, and the other forward passes that the machine has: cuDNN, FlashAttention-3 and 2;
- SDPA's flash forward and backward pass;
- the materialised eager pair (BF16 and FP32, some heads at a time) and float64 (some rows at a time).

FLOP/s count four products over the visible pairs of a pass (Q K, two terms of P-bar V, P K; five where the recipe's own
P-bar V is none of these terms), whatever a kernel computes again, and two of a forward pass; bytes are the inputs and
results of the pass, once.

Nothing is printed but what is wrong, and the exit code is 1, unless the results of every recipe and shape are right:
O, log-sum-exp, P K and delta of high precision against float64; O, log-sum-exp and counts of the recipe against the
reference on sampled rows; both on normal data and on sharp data with repeated keys; equal bits of two runs.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
import triton
from bf16forensics.kernels.dual_forward import dual_forward
from bf16forensics.kernels.flagged_rows import count_and_anchor
from bf16forensics.kernels.fused_types import FusedForward, FusedInputs, FusedWishes, RowCounts
from dual_checks import Checked, check, not_reproduced
from dual_rivals import (
    Rival,
    chunked_fp64,
    eager_pair,
    exact,
    flash_forward,
    flash_forward_backward,
    other_forwards,
)
from dual_table import (
    EAGER,
    FLASH,
    FORWARD_ONLY,
    FP64,
    TRAINING,
    Measured,
    Shape,
    document,
    say_headline,
    say_sweep,
)
from gpu_clock import Contestant, ceilings, median_seconds, peak_bytes

from bf16forensics.attention.fused_recipe import fused_recipe
from bf16forensics.attention.kernel_rounding import INTERPRET_VARIABLE, is_interpreting
from bf16forensics.errors import ForensicsError
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.model import Recipe

#: Tokens of the sweep, and tokens times heads of it by head size.
SWEEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SWEEP_ROWS = {64: 96 * 4096, 128: 32 * 8192}
#: Heads of the sweep at least, and a divisor of its heads: kernels are compiled for multiples of 16 apart from others.
_HEADS = 16
#: Relative error of O that a BF16 forward pass may have, and one in FP32 or float64.
MOST_BF16_ERROR, MOST_FP32_ERROR = 1e-2, 1e-4
#: What the pass is held to.
HEADLINE = (Shape(heads=96, tokens=4096, size=64), Shape(heads=32, tokens=8192, size=128))


def draw(shape: Shape, device: torch.device, recipe: Recipe, seed: int, *, sharp: bool = False) -> FusedInputs:
    """Normal BF16 numbers; `sharp`: saturated rows and, as every third key is the first one, repeated maxima."""
    generator = torch.Generator(device=device).manual_seed(seed)
    full = (shape.heads, shape.tokens, shape.size)
    q, k, v, do = (torch.randn(full, generator=generator, device=device).bfloat16() for _ in range(4))
    if sharp:
        q, k[:, 1::3] = q * 8.0, k[:, 0:1]
    ieee = recipe.scale_placement == "operands"
    dtype = torch.float32 if ieee or device.type == "cpu" else torch.bfloat16
    return FusedInputs(
        q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), do=do.to(dtype), scale=shape.size**-0.5, causal=True, ieee=ieee
    )


def forward_pass(inputs: FusedInputs, recipe: Recipe) -> FusedForward:
    """The forward kernel with P K."""
    constants = fused_recipe(recipe, inputs.q.shape[-1], inputs.k.shape[1], True)
    return dual_forward(inputs, constants, FusedWishes(carrier=True))


def dual_pass(inputs: FusedInputs, recipe: Recipe) -> tuple[FusedForward, RowCounts]:
    """All of it."""
    forward = forward_pass(inputs, recipe)
    constants = fused_recipe(recipe, inputs.q.shape[-1], inputs.k.shape[1], True)
    return forward, count_and_anchor(inputs, constants, forward, o_err=None, with_keys=False)


def compile_for(recipe: str, size: int) -> None:
    """Fills the cache of compiled kernels, in a process of its own."""
    inputs = draw(Shape(heads=_HEADS, tokens=512, size=size), torch.device("cuda"), resolve(recipe), 0)
    dual_pass(inputs, resolve(recipe))
    torch.cuda.synchronize()


def compile_all(recipes: list[Recipe], shapes: list[Shape]) -> None:
    """Compiles for all recipes and head sizes at once: a single process would take minutes."""
    jobs = [(recipe.name, size) for recipe in recipes for size in sorted({shape.size for shape in shapes})]
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_for, *job) for job in jobs]:
            done.result()


def checked_pass(inputs: FusedInputs, recipe: Recipe, heads: int | None, tokens: list[int]) -> Checked:
    """Runs a pass twice and compares it with what is right."""
    runs = [dual_pass(inputs, recipe) for _ in range(2)]
    found = check(inputs, recipe, *runs[0], exact(inputs, heads, weights=True), tokens)
    return replace(found, wrong=(*found.wrong, *not_reproduced(*runs)))


def check_sharp(shape: Shape, recipes: list[Recipe], device: torch.device) -> list[str]:
    """What is wrong on sharp data."""
    small = Shape(heads=min(_HEADS, shape.heads), tokens=min(1024, shape.tokens), size=shape.size)
    wrong = []
    for recipe in recipes:
        found = checked_pass(draw(small, device, recipe, 7, sharp=True), recipe, None, [small.tokens - 1])
        wrong += [f"{small} sharp, {recipe.name}: {clause}" for clause in found.wrong]
    return wrong


def rival_errors(inputs: FusedInputs, rivals: dict[str, Rival]) -> dict[str, float]:
    """|O - O_exact| / |O_exact| of every rival that has an O."""
    true, found = exact(inputs).o, {}
    for name, rival in rivals.items():
        if rival.output is None:
            continue
        o = rival.output(rival.call(rival.prepare(inputs))).double()
        found[name] = ((o - true).norm() / true.norm()).item()
    return found


def far_rivals(errors: dict[str, float]) -> Iterator[str]:
    """Rivals that do not compute the same attention."""
    for name, error in errors.items():
        most = MOST_FP32_ERROR if name in (EAGER, FP64) else MOST_BF16_ERROR
        if not error <= most:
            yield f"{name}: |error| / |O| is {error:.2g}, at most {most:.2g}"


def measure(
    shape: Shape, recipes: list[Recipe], device: torch.device, rounds: int, others: dict[str, Rival], *, whole: bool
) -> tuple[Measured, list[str]]:
    """One shape: checked, then timed.

    Args:
        shape: of the calls.
        recipes: of the dual passes.
        device: where they run.
        rounds: of the times.
        others: forward passes beside SDPA's flash.
        whole: whether all heads are compared with float64, and the slow rivals are timed too.
    """
    sets = [draw(shape, device, recipes[0], seed) for seed in (1, 2)]
    rivals = {FLASH: flash_forward(), **others}
    slow = {EAGER: eager_pair(), FP64: chunked_fp64()} if whole else {}
    if whole:
        rivals[TRAINING] = flash_forward_backward()
    errors = rival_errors(sets[0], {**rivals, **slow}) if whole else {}
    wrong = [f"{shape}: {clause}" for clause in far_rivals(errors)]
    checked, peaks, contestants = {}, {}, dict[str, Contestant]()
    for recipe in recipes:
        own = sets if recipe.scale_placement != "operands" else [draw(shape, device, recipe, seed) for seed in (1, 2)]
        tokens = [0, shape.tokens // 2, shape.tokens - 1] if whole else [shape.tokens - 1]
        checked[recipe.name] = checked_pass(own[0], recipe, None if whole else 1, tokens)
        wrong += [f"{shape}, {recipe.name}: {clause}" for clause in checked[recipe.name].wrong]
        peaks[recipe.name] = peak_bytes(partial(dual_pass, own[0], recipe), device)
        contestants[recipe.name] = (partial(dual_pass, recipe=recipe), own)
        contestants[recipe.name + FORWARD_ONLY] = (partial(forward_pass, recipe=recipe), own)
    results = dual_pass(sets[0], recipes[0])
    moved = sum(_bytes(part) for part in (sets[0], *results))
    del results
    measured = Measured(
        shape=shape, seconds={}, errors=errors, checked=checked, peak_bytes=peaks, moved_bytes=moved
    )  # fmt: skip
    if wrong:
        return measured, wrong
    quick = {**contestants, **{name: (rival.call, [rival.prepare(x) for x in sets]) for name, rival in rivals.items()}}
    seconds = median_seconds(quick, device, rounds)
    slow_rivals = {name: (rival.call, [rival.prepare(x) for x in sets]) for name, rival in slow.items()}
    seconds |= median_seconds(slow_rivals, device, max(1, rounds // 5), warm_up=1)
    return replace(measured, seconds=seconds), []


def _bytes(part: object) -> int:
    """Bytes of all tensors of a dataclass."""
    values = [getattr(part, field.name) for field in fields(part)]  # type: ignore[arg-type]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def sweep_shapes() -> list[Shape]:
    """Shapes of about equal numbers of rows."""
    return [
        Shape(heads=max(_HEADS, rows // tokens // _HEADS * _HEADS), tokens=tokens, size=size)
        for size, rows in SWEEP_ROWS.items()
        for tokens in SWEEP_TOKENS
    ]


def parse_shapes(text: str) -> list[Shape]:
    """Shapes as HEADSxTOKENSxSIZE, separated by commas."""
    try:
        return [Shape(**dict(zip(("heads", "tokens", "size"), map(int, part.split("x")), strict=True)))
                for part in text.split(",")]  # fmt: skip
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected HEADSxTOKENSxSIZE,..., got {text!r}") from None


def main() -> int:
    """Checks, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="no sweep, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--recipes", default="fa2,fa3,paper", help="separated by commas; points are added by +")
    parser.add_argument("--shapes", type=parse_shapes, help="HEADSxTOKENSxSIZE,... in place of the two, without sweep")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not is_interpreting():
        return refused([f"no CUDA device; {INTERPRET_VARIABLE}=1 runs small shapes on the CPU"])
    device = torch.device("cpu" if is_interpreting() else "cuda")
    try:
        recipes = [resolve(name) for name in given.recipes.split(",")]
        return timed(given, recipes, device)
    except ForensicsError as error:
        return refused([str(error)])


def timed(given: argparse.Namespace, recipes: list[Recipe], device: torch.device) -> int:
    """All of it, once the options are read."""
    headline = given.shapes or list(HEADLINE)
    sweep = [] if given.quick or given.shapes else sweep_shapes()
    rounds = 1 if device.type == "cpu" else 5 if given.quick else 20
    if device.type == "cuda":
        compile_all(recipes, headline)
    wrong = [clause for shape in headline for clause in check_sharp(shape, recipes, device)]
    if wrong:
        return refused(wrong)
    small = Shape(heads=headline[0].heads, tokens=min(512, headline[0].tokens), size=headline[0].size)
    others, missing = other_forwards(draw(small, device, recipes[0], 0))
    found: list[Measured] = []
    for shape in (*headline, *sweep):
        whole = shape in headline and len(found) < len(headline)
        point, wrong = measure(shape, recipes, device, rounds if whole else 5, others if whole else {}, whole=whole)
        if wrong:
            return refused(wrong)
        found.append(point)
    product, copy = ceilings(device, rounds)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted: the times mean nothing"
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{name}; {versions}; causal, BF16, normal data, medians of {rounds}")
    print(f"ceilings of this run: BF16 product of torch {product / 1e12:.0f} TFLOP/s, copy {copy / 1e9:.0f} GB/s")
    print("; ".join(missing) or "all other forward passes are here")
    for point in found[: len(headline)]:
        say_headline(point, recipes, list(others))
    if sweep:
        say_sweep(found[len(headline) :], recipes)
    if given.json is not None:
        result = {
            "device": name, "torch": torch.__version__, "triton": triton.__version__, "rounds": rounds,
            "recipes": [recipe.name for recipe in recipes], "product_flops": product, "copy_bytes": copy,
            "missing": missing, "headline": document(found[: len(headline)]), "sweep": document(found[len(headline) :]),
        }  # fmt: skip
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def refused(wrong: list[str]) -> int:
    """Says what is wrong instead of a time, on one line."""
    more = f"; {len(wrong) - 5} more" if len(wrong) > 5 else ""
    print(f"nothing is reported: {'; '.join(wrong[:5])}{more}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
