"""Tie statistics: the rounding that ends a sum with several P-bar = 1, against the law b(d, r).

Rows of one sequence that have the same keys at P-bar = 1 have the same main sum, bit for bit, so that their errors are
one draw and not many. They are one group, and standard errors are taken over groups.

Shapes: H query heads, N queries, C classes of rows, E features, K keys of a walk.
"""

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from bf16forensics.attention.result import MOST_ONES, TieRows
from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.attention.ties import DROPPED, add_values, final_format, final_point, has_ties, main_sums
from bf16forensics.evidence.tie_results import TieClass, TieStatistics
from bf16forensics.evidence.trace.results import RowTies
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import format_named
from bf16forensics.floats.ties import tie_terms
from bf16forensics.recipe.model import Recipe

#: Fewest and most ones of the rows of each class.
CLASSES = ((2, 2), (3, 3), (4, 4), (5, 8), (9, MOST_ONES))

#: Effective groups, (sum n)^2 / sum n^2, below which their scatter says too little for a standard error.
_FEWEST_GROUPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TiePoint:
    """The rounding that ends a recipe's sums."""

    #: "o_bar" or "o".
    point: str
    #: Name of its format.
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TieSums:
    """Sums by head and class, [H, C]; those of several sequences add up field by field."""

    rows: np.ndarray
    groups: np.ndarray
    elements: np.ndarray
    halfway: np.ndarray
    residues: np.ndarray
    same_sign: np.ndarray
    error: np.ndarray
    law: np.ndarray
    residue: np.ndarray
    residue_size: np.ndarray
    #: [H, C, 4]
    dropped: np.ndarray
    #: Sums over groups of n n, n e, e e, n x and x x: n the elements of a group, e its error, x its error - law.
    n_n: np.ndarray
    n_e: np.ndarray
    e_e: np.ndarray
    n_x: np.ndarray
    x_x: np.ndarray
    #: [H] rows with more ones than any class.
    beyond: np.ndarray


#: Fields of `TieRows` that are added up as they are.
_SUMMED = ("elements", "halfway", "residues", "same_sign", "error", "law", "residue", "residue_size")


def tie_point(recipe: Recipe) -> TiePoint | None:
    """The rounding that the tie statistics of a recipe are about; None where it has none."""
    return TiePoint(point=final_point(recipe), format=final_format(recipe)) if has_ties(recipe) else None


def tie_sums(ties: TieRows, ones: torch.Tensor, rows: torch.Tensor) -> TieSums:
    """Reduces one record.

    Args:
        ties: of its dual pass, on any device.
        ones: int64 [H, N] keys with P-bar = 1 after rounding, and
        rows: bool [H, N]: rows analysed; both on one device.
    """
    heads = len(ones)
    names = [field.name for field in fields(TieSums) if field.name not in ("dropped", "beyond")]
    sums = {name: np.zeros((heads, len(CLASSES))) for name in names}
    dropped = np.zeros((heads, len(CLASSES), DROPPED))
    where = ((ties.ones >= CLASSES[0][0]) & rows.to(ties.ones.device)).nonzero(as_tuple=True)
    head_of = where[0].cpu().numpy()
    per_row = {field.name: getattr(ties, field.name)[where].cpu().numpy() for field in fields(TieRows)}
    for head in np.unique(head_of):
        for number, (least, most) in enumerate(CLASSES):
            own = np.flatnonzero((head_of == head) & (per_row["ones"] >= least) & (per_row["ones"] <= most))
            if len(own) == 0:
                continue
            of_row = {name: per_row[name][own] for name in (*_SUMMED, "label", "dropped")}
            found = {name: float(of_row[name].sum()) for name in _SUMMED} | _group_sums(of_row)
            for name, value in (found | {"rows": float(len(own))}).items():
                sums[name][head, number] = value
            dropped[head, number] = of_row["dropped"].sum(0)
    beyond = ((ones > MOST_ONES) & rows).sum(1).double().cpu().numpy()
    return TieSums(**sums, dropped=dropped, beyond=beyond)


def _group_sums(of_row: dict[str, np.ndarray]) -> dict[str, float]:
    _, group = np.unique(of_row["label"], return_inverse=True)
    n, e, law = (np.bincount(group, weights=of_row[name]) for name in ("elements", "error", "law"))
    x = e - law
    return {
        "groups": float(len(n)),
        "n_n": float(n @ n),
        "n_e": float(n @ e),
        "e_e": float(e @ e),
        "n_x": float(n @ x),
        "x_x": float(x @ x),
    }


def add_ties(old: TieSums, new: TieSums) -> TieSums:
    """The sums over the sequences of both."""
    return TieSums(**{field.name: getattr(old, field.name) + getattr(new, field.name) for field in fields(TieSums)})


def tie_statistics(sums: TieSums, head: int, point: TiePoint) -> TieStatistics | None:
    """The statistics of one head; None where no row has several ones."""
    classes = tuple(
        _class(sums, head, number, least, most)
        for number, (least, most) in enumerate(CLASSES)
        if sums.rows[head, number]
    )
    beyond = int(sums.beyond[head])
    if not classes and not beyond:
        return None
    return TieStatistics(point=point.point, format=point.format, classes=classes, rows_beyond=beyond)


def _class(sums: TieSums, head: int, number: int, least: int, most: int) -> TieClass:
    own = {field.name: getattr(sums, field.name)[head] for field in fields(TieSums)}
    value = {name: float(values[number]) for name, values in own.items() if name not in ("dropped", "beyond")}
    n, groups = value["elements"], value["groups"]

    def mean(total: float, of: float = n) -> float:
        return total / of if of else math.nan

    def standard_error(center: float, n_s: float, s_s: float) -> float:
        """Of a ratio of sums over groups: the scatter of each group's sum around center times its elements."""
        if not n or n * n < _FEWEST_GROUPS * value["n_n"]:
            return math.nan
        scatter = s_s - 2 * center * n_s + center * center * value["n_n"]
        return math.sqrt(max(scatter, 0.0) * groups / (groups - 1)) / n

    error, law = mean(value["error"]), mean(value["law"])
    error_se = standard_error(error, value["n_e"], value["e_e"])
    difference_se = standard_error(error - law, value["n_x"], value["x_x"])
    shares = [mean(float(total)) for total in own["dropped"][number]]
    return TieClass(
        ones_min=least,
        ones_max=most,
        rows=int(value["rows"]),
        groups=int(groups),
        elements=int(n),
        tie_share=mean(value["halfway"]),
        bits_dropped=(shares[0], shares[1], shares[2], shares[3]),
        same_sign_share=mean(value["same_sign"], value["residues"]),
        residue_ulp_mean=mean(value["residue"]),
        residue_ulp_size=mean(value["residue_size"]),
        error_ulp_mean=error,
        law_ulp_mean=law,
        standard_error=error_se,
        difference_standard_error=difference_se,
        z_zero=_ratio(error, error_se),
        z=_ratio(error - law, difference_se),
    )


def _ratio(value: float, standard_error: float) -> float:
    return value / standard_error if standard_error else math.nan


def row_ties(walk: RowWalk) -> RowTies | None:
    """The final rounding of one row, from its walk alone: float64 sums of the walk, and their rounding.

    It speaks of the final rounding alone: of what the sum of the row would become if nothing before had been rounded
    (a recipe that rounds O-bar at every tile has more roundings, which are not in it).

    Args:
        walk: of a recipe whose anchor is the row maximum, with one or more ones.

    Returns:
        One entry a feature; nan where the sum is 0 or not finite. None where the walk marks no one, or the recipe
        does not round the sum.
    """
    at_o = walk.o_bar_format == "fp32"
    fmt = walk.o_format if at_o else walk.o_bar_format
    if fmt == "fp32" or not walk.is_one.any():
        return None
    count = int(walk.is_one.sum())
    values = walk.v[walk.is_one].astype(np.float64)
    share = walk.division == "none"
    # P of a one is a share as cast, but for a recipe that leaves it in FP32; P-bar is 1 times the recipe's factor.
    largest = float(walk.p_operand[walk.is_one].max())
    cast = share and walk.p_format != "fp32"
    weight = largest if cast else 1.0 if share or at_o else 2.0 ** round(math.log2(largest))
    weight *= walk.value_scale if at_o else 1.0
    divisor = count if (share or at_o) and not cast else 1
    added, smallest = np.zeros((1, values.shape[1])), np.full((1, values.shape[1]), np.inf)
    with np.errstate(invalid="ignore"):
        for one in values:
            add_values(added, smallest, one[None])
    found = main_sums(added, smallest, np.array([weight]), np.array([divisor]), walk.v_format)
    with np.errstate(invalid="ignore", over="ignore"):
        before = _sum(walk)
        if at_o:
            before = before / (1.0 if share else walk.row_sum) * walk.value_scale
    sound = format_named(fmt)
    terms = tie_terms(found.main[0], found.grid[0], before, round_to(before, sound), sound, found.odd[0], 2.0**-50)
    residues = terms.defined & (terms.residue != 0)
    number = int(terms.defined.sum())

    def mean(values: NDArray[np.float64]) -> float:
        return float(values[terms.defined].mean()) if number else math.nan

    return RowTies(
        point="o" if at_o else "o_bar",
        ones=count,
        bits_dropped=tuple(terms.bits_dropped.tolist()),
        residue_ulp=tuple(terms.residue.tolist()),
        error_ulp=tuple(terms.error.tolist()),
        law_ulp=tuple(terms.law.tolist()),
        mean_error_ulp=mean(terms.error),
        mean_law_ulp=mean(terms.law),
        tie_share=mean(terms.halfway.astype(np.float64)),
        same_sign_share=float((terms.residue[residues] > 0).mean()) if residues.any() else math.nan,
    )


def _sum(walk: RowWalk) -> NDArray[np.float64]:
    """float64 [E]: the sum of the products, each times the factors of all later tiles."""
    total = np.zeros(walk.v.shape[1])
    for index, alpha in enumerate(walk.tile_alpha.astype(np.float64)):
        own = walk.tile == index
        added = walk.p_operand[own].astype(np.float64) @ walk.v[own].astype(np.float64)
        total = added if index == 0 else total * alpha + added
    return total
