"""One block of rows through a recipe: the forward pass, and the steps of the backward pass that round.

This is the specification of a recipe: every rounding of `Recipe` appears here, or in `scores.py`, exactly once.

Shapes: H heads, R rows, K keys, E head size of V.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bf16forensics.attention.scores import LOG2_E, LpScores, exp_, product
from bf16forensics.emulate.rounding import round_to
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class LpRows:
    """What the forward pass of a recipe leaves behind for a block of rows."""

    #: [H, R, E] output in FP32 holding values of the recipe's output format; 0 in rows that see no key.
    o: torch.Tensor
    #: [H, R] final row maximum, in the units of `LpScores.values`; -inf in rows that see no key.
    row_max: torch.Tensor
    #: [H, R] row sum as stored.
    row_sum: torch.Tensor
    #: [H, R] log-sum-exp in nats as stored; -inf in rows that see no key.
    lse: torch.Tensor


def exponential(values: torch.Tensor, row_max: torch.Tensor, unit: float, recipe: Recipe) -> torch.Tensor:
    """exp(values - row_max) by the recipe, FP32.

    Args:
        values: [..., K] scores in units of `unit`; -inf gives 0.
        row_max: [...] finite anchor of each row, same units.
        unit: factor to nats.
        recipe: `exponential`, `shifted`.
    """
    anchor = row_max[..., None]
    if recipe.exponential == "exp2" and recipe.shifted == "fp32":
        factor = unit * LOG2_E
        return torch.exp2((values * factor).sub_(anchor * factor))
    shifted = round_to(values - anchor, recipe.shifted)
    if recipe.exponential == "exp2":
        return torch.exp2(shifted * (unit * LOG2_E))
    return exp_(shifted if unit == 1.0 else shifted * unit)


def key_tiles(keys: tuple[int, int], tile_k: int, order: str) -> Iterator[tuple[int, int]]:
    """[start, end) slices, relative to keys[0], of the key tiles that overlap a range, in the recipe's order.

    Tile borders lie at multiples of `tile_k` of the whole row, so that a block sees the tiles the kernel sees.
    """
    first, last = keys[0] // tile_k, -(-keys[1] // tile_k)
    indices = range(first, last) if order == "ascending" else range(last - 1, first - 1, -1)
    for index in indices:
        yield max(index * tile_k, keys[0]) - keys[0], min((index + 1) * tile_k, keys[1]) - keys[0]


def _finite(row_max: torch.Tensor) -> torch.Tensor:
    """The anchor to subtract: 0 where the row has seen no key, so that exp(-inf - anchor) is 0 and not NaN."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def _divide(o_bar: torch.Tensor, row_sum: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    safe = row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
    return o_bar * (1.0 / safe) if recipe.division == "reciprocal" else o_bar / safe


def forward_rows(scores: LpScores, v: torch.Tensor, keys: tuple[int, int], tile_k: int, recipe: Recipe) -> LpRows:
    """Runs the recipe's softmax and product with V over a block of rows.

    Args:
        scores: [H, R, K] masked scores of the block.
        v: [H, K, E] FP32 values of the block's keys.
        keys: [start, end) of the block's keys in the whole row.
        tile_k: keys a tile.
        recipe: rounding points.

    Returns:
        Output and row statistics. A row without visible keys gives O = 0, lse = -inf. NaN scores give NaN rows.
    """
    if recipe.p_bar_cast == "after":
        return _forward_normalised(scores, v, recipe)
    heads, rows, _ = scores.values.shape
    row_max = scores.values.new_full((heads, rows), -torch.inf)
    row_sum = scores.values.new_zeros((heads, rows))
    o_bar = scores.values.new_zeros((heads, rows, v.shape[-1]))
    for start, end in key_tiles(keys, tile_k, recipe.tile_order):
        tile = scores.values[..., start:end]
        new_max = torch.maximum(row_max, tile.amax(-1))
        anchor = _finite(new_max)
        p_bar = exponential(tile, anchor, scores.unit, recipe)
        alpha = exponential(row_max[..., None], anchor, scores.unit, recipe)[..., 0]
        tile_sum = round_to(p_bar, recipe.row_sum_input).sum(-1)
        row_sum = round_to(alpha * row_sum + tile_sum, recipe.row_sum)
        tile_o = product(round_to(p_bar, recipe.p_bar), v[:, start:end], recipe.arithmetic)
        if recipe.o_bar_at == "tile":
            o_bar = round_to(o_bar * alpha[..., None], recipe.o_bar)
            o_bar = round_to(o_bar + round_to(tile_o, recipe.o_bar), recipe.o_bar)
        else:
            o_bar = o_bar * alpha[..., None] + tile_o
        row_max = new_max
    if recipe.o_bar_at == "end":
        o_bar = round_to(o_bar, recipe.o_bar)
    lse = _finite(row_max) * scores.unit + torch.log(row_sum)
    return LpRows(
        o=round_to(_divide(o_bar, row_sum, recipe), recipe.o),
        row_max=row_max,
        row_sum=row_sum,
        lse=round_to(lse, recipe.lse),
    )


def _forward_normalised(scores: LpScores, v: torch.Tensor, recipe: Recipe) -> LpRows:
    """The whole row at once: P = P-bar / l is cast, then multiplied."""
    row_max = scores.values.amax(-1)
    anchor = _finite(row_max)
    p_bar = exponential(scores.values, anchor, scores.unit, recipe)
    row_sum = round_to(round_to(p_bar, recipe.row_sum_input).sum(-1), recipe.row_sum)
    p = round_to(_normalised(scores, row_max, row_sum, p_bar, recipe), recipe.p_bar)
    o_bar = round_to(product(p, v, recipe.arithmetic), recipe.o_bar)
    lse = anchor * scores.unit + torch.log(row_sum)
    return LpRows(o=round_to(o_bar, recipe.o), row_max=row_max, row_sum=row_sum, lse=round_to(lse, recipe.lse))


def _normalised(
    scores: LpScores, row_max: torch.Tensor, row_sum: torch.Tensor, p_bar: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """P = P-bar / l in FP32; 0 in rows that see no key.

    Where nothing is rounded below FP32 on the way from the scores to P, a framework calls its fused softmax, whose
    exponential and sum differ from the separate operations in the last bit: the same one is called here.
    """
    unrounded = (recipe.shifted, recipe.row_sum_input, recipe.row_sum) == ("fp32", "fp32", "fp32")
    plain = recipe.exponential == "exp" and recipe.division == "divide" and scores.unit == 1.0
    if not (unrounded and plain and recipe.p_bar_cast == "after"):
        return _divide(p_bar, row_sum, recipe)
    return torch.softmax(scores.values, -1).masked_fill_((row_max == -torch.inf)[..., None], 0.0)


def backward_probabilities(scores: LpScores, rows: LpRows, recipe: Recipe) -> torch.Tensor:
    """P as the recipe's backward pass has it, [H, R, K] FP32; 0 in rows that see no key.

    `p_source` "lse" recomputes exp(S - lse), "saved" takes the forward pass's own P before its cast. The rows of this
    P need not add up to 1: their sum is part of the evidence.
    """
    if recipe.p_source == "saved":
        p_bar = exponential(scores.values, _finite(rows.row_max), scores.unit, recipe)
        return _normalised(scores, rows.row_max, rows.row_sum, p_bar, recipe)
    lse = _finite(rows.lse)[..., None]
    if recipe.exponential == "exp2":
        return torch.exp2((scores.values * (scores.unit * LOG2_E)).sub_(lse * LOG2_E))
    values = scores.values if scores.unit == 1.0 else scores.values * scores.unit
    return exp_(values - lse)


def delta_products(do: torch.Tensor, o: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """dO * O as the recipe rounds it before adding, [H, R, E] float64."""
    return round_to(do.double() * o.double(), recipe.delta_products)


def round_delta(exact: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """delta from an exact sum, rounded once to the recipe's format, [H, R] float64.

    The order in which a kernel adds FP32 products moves the result by less than 2^-22 of sum |dO * O|, which is the
    limit below which no sign is counted.
    """
    return round_to(exact, recipe.delta)


def score_gradient(
    p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor, slope: torch.Tensor | None, recipe: Recipe
) -> torch.Tensor:
    """dS = P * (dP - delta) as the operand of the products with K and Q, [H, R, K] FP32.

    Args:
        p: [H, R, K] FP32 P of the backward pass.
        dp: [H, R, K] FP32 dP by the recipe.
        delta: [H, R] float64 delta by the recipe.
        slope: [H, R, K] derivative of the score by the scaled product (soft-cap), or None for 1.
        recipe: format of dS.
    """
    ds = p * (dp - delta.float()[..., None])
    return round_to(ds if slope is None else ds * slope.float(), recipe.ds)


def add_tile(buffer: torch.Tensor, where: slice, tile: torch.Tensor, storage: str, gradients_at: str) -> None:
    """Adds a tile to rows of a gradient buffer [H, rows, D], in place.

    Args:
        buffer: FP32.
        where: the rows.
        tile: FP32.
        storage: format of the gradient.
        gradients_at: "tile" rounds the tile and the sum; "end" leaves the rounding to the end.
    """
    if gradients_at == "tile":
        buffer[:, where] = round_to(buffer[:, where] + round_to(tile, storage), storage)
    else:
        buffer[:, where] += tile
