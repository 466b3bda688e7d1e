"""What the rounding that ends a row's sum did, in rows with several P-bar = 1.

The keys with P-bar = 1 give the main sum M, the others the residue; see `floats.ties` for the law that ties the error
to both. The elements are reduced to sums by row at once, so that an input in which every row is such a row needs no
more memory than any other.

Shapes: H heads, R rows and K keys of a block, E head size of V, n rows with several ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bf16forensics.attention.lp import FinalRounding, LpRows
from bf16forensics.attention.maxima import LpOnes
from bf16forensics.attention.result import MOST_ONES, TieRows
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import format_named
from bf16forensics.floats.ties import TieTerms, steps_at, tie_terms
from bf16forensics.recipe.model import Recipe

#: Entries of the histogram of bits dropped: 0, 1, 2, and 3 or more.
DROPPED = 4
#: A reciprocal, a product and a sum in FP32, each half a step.
FP32_NOISE = 3 * 2.0**-24
#: Elements (row, feature) that are taken apart at once: what stays in a cache.
_ELEMENTS = 2**15


@dataclass(frozen=True, slots=True, kw_only=True)
class MainSums:
    """Main sums of n rows, in the units of the final rounding; see `tie_terms`."""

    #: float64 [n, E]
    main: NDArray[np.float64]
    grid: NDArray[np.float64]
    #: int64 [n, 1]
    odd: NDArray[np.int64]


def final_point(recipe: Recipe) -> str:
    """Which rounding ends the sum: "o_bar" where the recipe rounds O-bar, else "o"."""
    return "o" if recipe.o_bar == "fp32" else "o_bar"


def final_format(recipe: Recipe) -> str:
    """Format of that rounding; "fp32" where there is none."""
    return recipe.o if final_point(recipe) == "o" else recipe.o_bar


def has_ties(recipe: Recipe) -> bool:
    """Whether P-bar = 1 marks the row maximum in a recipe, and its sum is rounded."""
    return recipe.anchored_at_maximum and final_format(recipe) != "fp32"


def main_sums(
    added: NDArray[np.float64],
    smallest: NDArray[np.float64],
    weight: NDArray[np.float64],
    divisor: NDArray[np.int64],
    v_format: str,
) -> MainSums:
    """The sums of the values at the ones of each row, times their weight and over a divisor.

    Exact but for the division: BF16 values add up without rounding in float64 unless they are 2^45 apart. The grid is
    that of the format of the values, not of the bits they happen to have: the law speaks of their last bits at random.

    Args:
        added: float64 [n, E] the values of the ones, added up.
        smallest: float64 [n, E] the smallest magnitude among them but 0; inf where all of them are 0.
        weight: float64 [n], not 0.
        divisor: int64 [n], positive.
        v_format: the format that holds the values.
    """
    even = divisor & -divisor
    factor = (weight / even)[:, None]
    odd = (divisor // even)[:, None]
    grid = steps_at(smallest, format_named(v_format)) * _lowest_bit(factor)
    grid[smallest == np.inf] = np.inf
    with np.errstate(over="ignore", invalid="ignore"):
        return MainSums(main=added * factor / odd, grid=grid, odd=odd)


def add_values(added: NDArray[np.float64], smallest: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    """Adds one value a row to what `main_sums` takes, in place; all [n, E]. They begin as 0 and inf."""
    added += values
    size = np.abs(values)
    size[size == 0] = np.inf
    np.minimum(smallest, size, out=smallest)


def _lowest_bit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest power of two that divides each value, none of which is 0."""
    significand, exponent = np.frexp(values)
    whole = np.ldexp(significand, 53).astype(np.int64)
    return np.ldexp((whole & -whole).astype(np.float64), exponent - 53)


@dataclass(frozen=True, slots=True, kw_only=True)
class TieBlock:
    """A block of rows by the recipe."""

    recipe: Recipe
    #: Its marks say which keys are ones.
    ones: LpOnes
    #: The forward pass, with what the final rounding did.
    lp: LpRows
    #: [H, K, E] FP32 values of the block's keys as multiplied, the name of their format, and their descale factor.
    v: torch.Tensor
    v_format: str
    value_scale: float
    #: Position of the block's first key.
    first_key: int


def tie_rows(block: TieBlock) -> TieRows | None:
    """Reduces a block of rows; None where its forward pass does not say what the final rounding did."""
    ones, final = block.ones, block.lp.final
    if final is None:
        return None
    sums = no_ties(ones.rounded.shape)
    if ones.marks is None:
        return sums
    heads, rows = (index.numpy() for index in (ones.rounded > 1).nonzero(as_tuple=True))
    counts = ones.rounded.numpy()[heads, rows]
    marks = ones.marks.numpy()
    # Rows with as many ones come together, so that their first ones are added at once, then their second ones.
    order = np.argsort(-counts, kind="stable")
    order = order[np.count_nonzero(counts > MOST_ONES) :]
    at_once = max(1, _ELEMENTS // block.v.shape[-1])
    for start in range(0, len(order), at_once):
        some = order[start : start + at_once]
        _reduce(sums, heads[some], rows[some], marks[some], block, final)
    return sums


def _reduce(
    sums: TieRows,
    heads: NDArray[np.int64],
    rows: NDArray[np.int64],
    marks: NDArray[np.bool_],
    block: TieBlock,
    final: FinalRounding,
) -> None:
    """Writes the sums of n rows, those with most ones first, into those of the block."""
    # Faster than `nonzero`, which would find their rows a second time.
    keys = np.flatnonzero(marks) % marks.shape[1]
    counts = np.count_nonzero(marks, axis=1)
    starts = np.cumsum(counts) - counts
    added = np.zeros((len(rows), block.v.shape[-1]))
    smallest = np.full_like(added, np.inf)
    values = block.v.numpy()
    with np.errstate(invalid="ignore"):
        for number in range(counts[0]):
            own = slice(0, np.count_nonzero(counts > number))
            add_values(added[own], smallest[own], values[heads[own], keys[starts[own] + number]].astype(np.float64))
    weight, divisor = _weight(block, counts, block.lp.row_sum.numpy()[heads, rows])
    found = main_sums(added, smallest, weight, divisor, block.v_format)
    before, after = (part.numpy()[heads, rows].astype(np.float64) for part in (final.before, final.after))
    fmt = format_named(final_format(block.recipe))
    terms = tie_terms(found.main, found.grid, before, after, fmt, found.odd, FP32_NOISE)
    where = torch.from_numpy(heads), torch.from_numpy(rows)
    sums.ones[where] = torch.from_numpy(counts)
    sums.label[where] = torch.from_numpy(np.add.reduceat(_label(keys + block.first_key), starts).view(np.int64))
    for name, per_row in _row_sums(terms).items():
        getattr(sums, name)[where] = torch.from_numpy(per_row)


def _weight(
    block: TieBlock, counts: NDArray[np.int64], row_sum: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What the values of the ones are multiplied by and divided by on the way to the final rounding.

    Where P is cast after the division it is the cast of 1 / l. Otherwise the ones are taken as if they were alone, and
    what the other keys do to l counts as part of the residue.
    """
    recipe = block.recipe
    at_o = final_point(recipe) == "o"
    cast = recipe.p_bar_cast == "after"
    weight = np.full(len(counts), block.value_scale if at_o else 1.0 if cast else float(recipe.p_scale))
    if cast and recipe.p_bar != "fp32":
        share = round_to((1.0 / row_sum).astype(np.float64), format_named(recipe.p_bar))
        return weight * np.where(np.isfinite(share) & (share > 0), share, 1.0), np.ones_like(counts)
    return weight, counts if cast or at_o else np.ones_like(counts)


def _row_sums(terms: TieTerms) -> dict[str, NDArray[np.generic]]:
    defined = terms.defined
    whole = bool(defined.all())
    residue, error, law = (
        values if whole else np.where(defined, values, 0.0) for values in (terms.residue, terms.error, terms.law)
    )
    residue = np.clip(residue, -1.0, 1.0)
    elements = defined.sum(-1)
    few = [(terms.bits_dropped == bits) & defined for bits in range(DROPPED - 1)]
    dropped = [number.sum(-1) for number in few]
    return {
        "elements": elements,
        "halfway": terms.halfway.sum(-1),
        "residues": (residue != 0).sum(-1),
        "same_sign": (residue > 0).sum(-1),
        "error": error.sum(-1),
        "law": law.sum(-1),
        "residue": residue.sum(-1),
        "residue_size": np.abs(residue).sum(-1),
        "dropped": np.stack([*dropped, elements - sum(dropped)], -1),
    }


def no_ties(shape: torch.Size, device: torch.device | None = None) -> TieRows:
    """Sums of rows [H, N] none of which has several ones; `device` None: on the CPU."""
    counts = ("ones", "label", "elements", "halfway", "residues", "same_sign")
    totals = ("error", "law", "residue", "residue_size")
    return TieRows(
        **{name: torch.zeros(shape, dtype=torch.int64, device=device) for name in counts},
        **{name: torch.zeros(shape, dtype=torch.float64, device=device) for name in totals},
        dropped=torch.zeros((*shape, DROPPED), dtype=torch.int64, device=device),
    )


def _label(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A well-mixed number for each key (splitmix64); sums of them tell sets of keys apart."""
    mixed = (keys.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
