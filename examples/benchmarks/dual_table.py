"""Shapes, what was measured at them, and how the benchmark of the fused dual pass prints it."""

from dataclasses import dataclass, fields
from typing import Any

from dual_checks import Checked

from bf16forensics.attention.fused_recipe import fused_recipe
from bf16forensics.recipe.model import Recipe

#: Names of what is timed beside dual passes, and what is added to a recipe's for its forward kernel alone.
FLASH, TRAINING, EAGER, FP64 = "SDPA flash forward", "flash forward and backward", "eager pair", "float64"
FORWARD_ONLY = " without the second look"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """A call: causal, as many key/value heads as query heads."""

    heads: int
    tokens: int
    size: int

    def __str__(self) -> str:
        return f"{self.heads} x {self.tokens:,} x {self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds by name at one shape, and what was checked."""

    shape: Shape
    seconds: dict[str, float]
    #: |O - O_exact| / |O_exact| by name of what the passes are timed against.
    errors: dict[str, float]
    #: By recipe.
    checked: dict[str, Checked]
    #: Of one pass by recipe, results included; None on a CPU.
    peak_bytes: dict[str, int | None]
    #: Inputs and results of one pass, once.
    moved_bytes: int


def flops(shape: Shape, products: int) -> int:
    """Of so many products over the visible pairs."""
    return products * 2 * shape.size * shape.heads * shape.tokens * (shape.tokens + 1) // 2


def teraflops(shape: Shape, recipe: Recipe, seconds: float) -> float:
    """TFLOP/s of a pass: four products where the recipe's P-bar V is the first term of the high-precision one."""
    constants = fused_recipe(recipe, shape.size, shape.tokens, True)
    own_product = constants.scores or constants.shifted or constants.o_bar_by_tile
    return flops(shape, 5 if own_product else 4) / seconds / 1e12


def say_headline(found: Measured, recipes: list[Recipe], others: list[str]) -> None:
    """The table of one shape."""
    shape, seconds = found.shape, found.seconds
    flash = seconds[FLASH]
    speed = flops(shape, 2) / flash / 1e12
    print(f"\n{shape}: {FLASH} 1 ({1e3 * flash:.3f} ms, {speed:.0f} TFLOP/s, |error| / |O| {found.errors[FLASH]:.1e})")
    for name in (*others, TRAINING):
        print(f"  {name} {seconds[name] / flash:.2f}x")
    fastest = min((FLASH, *others), key=lambda name: seconds[name])
    print(f"  the fastest forward pass is {fastest}")
    names = ("pass/flash", "pass/fastest", "pass/training", "second look", "eager/pass", "fp64/pass", "TFLOP/s", "GB/s")
    print(f"  {'recipe':<8}" + "".join(f"  {name}" for name in names))
    for recipe in recipes:
        own = seconds[recipe.name]
        values = (
            f"{own / flash:.2f}x", f"{own / seconds[fastest]:.2f}x", f"{own / seconds[TRAINING]:.2f}x",
            f"{1 - seconds[recipe.name + FORWARD_ONLY] / own:.1%}", f"{seconds[EAGER] / own:.0f}x",
            f"{seconds[FP64] / own:.0f}x", f"{teraflops(shape, recipe, own):.0f}",
            f"{found.moved_bytes / own / 1e9:.0f}",
        )  # fmt: skip
        print(f"  {recipe.name:<8}" + "".join(f"  {v:>{len(n)}}" for n, v in zip(names, values, strict=True)))
    for recipe in recipes:
        right = found.checked[recipe.name]
        print(f"  {recipe.name}: O_hp rms {right.rms:.1e} and bias {right.bias:.1e} of sum P|V|, |error| / |O| "
              f"{right.norm:.1e}; O_lp differs from the reference in {right.differing:.2%} of {right.rows} rows' "
              f"elements, the reference with its sums in another order in {right.twin:.2%}")  # fmt: skip


def say_sweep(found: list[Measured], recipes: list[Recipe]) -> None:
    """Ratio, speed and memory by number of tokens."""
    print(f"\nsweep: pass / {FLASH}, TFLOP/s of the pass, and its peak bytes a token and head")
    print(f"  {'heads x tokens x size':<22}" + "".join(f"{recipe.name:>9} TFLOP/s  bytes" for recipe in recipes))
    for point in found:
        line = f"  {point.shape!s:<22}"
        for recipe in recipes:
            own, peak = point.seconds[recipe.name], point.peak_bytes[recipe.name]
            each = "-" if peak is None else f"{peak / point.shape.heads / point.shape.tokens:.0f}"
            line += f"{own / point.seconds[FLASH]:>8.2f}x {teraflops(point.shape, recipe, own):>7.0f} {each:>6}"
        print(line)


def document(found: list[Measured]) -> list[dict[str, Any]]:
    """For --json."""
    return [
        {
            "heads": point.shape.heads, "tokens": point.shape.tokens, "size": point.shape.size,
            "seconds": point.seconds, "errors": point.errors, "peak_bytes": point.peak_bytes,
            "moved_bytes": point.moved_bytes,
            "checked": {
                name: {field.name: getattr(value, field.name) for field in fields(value) if field.name != "wrong"}
                for name, value in point.checked.items()
            },
        }
        for point in found
    ]  # fmt: skip
