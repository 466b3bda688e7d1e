"""The walk of one row: what `forward_rows` multiplies for it, written down key by key.

The row is computed in the block of rows that the dual pass computes it in, by the same calls, so that the walk is the
computation and its O is the dual pass's O bit for bit.

Shapes: N queries, M keys, K keys and T tiles of the walk, D and E head sizes of q/k and v.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from bf16forensics.attention.dual import block_of
from bf16forensics.attention.lp import LpRows, forward_rows
from bf16forensics.attention.maxima import count_ones, marked_keys
from bf16forensics.attention.operands import Operands, forward_operands, value_format
from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.attention.scores import Block, lp_scores
from bf16forensics.attention.steps import TileStep, tile_steps
from bf16forensics.attention.tiles import has_edge, plan_tiles
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """One row's part of a tile: positions of its keys in the sequence, P-bar, its cast, ones, and the tile's factor."""

    keys: NDArray[np.int64]
    p_bar: NDArray[np.float32]
    operand: NDArray[np.float32]
    is_one: NDArray[np.bool_]
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """The block of the row through the recipe, and the row's tiles in the order of visits."""

    operands: Operands
    rows: LpRows
    #: Index of the row in the block.
    row: int
    tiles: tuple[_Tile, ...]


def walk_row(record: AttentionRecord, recipe: Recipe, token: int) -> RowWalk:
    """Walks one row of a head.

    The keys of a tile begin at the tile's border, so that blocks of a matrix unit lie where the kernel has them; keys
    at its end that no row of the block may see are left out, because nothing follows them.

    Args:
        record: one attention call of one head, [1, N, D] and [1, M, D]; dO and X are not used.
        recipe: rounding points, tiles and order.
        token: the query, 0-based.

    Returns:
        The walk; its `o` equals `dual_pass(record, recipe).o_lp[0, token]`. NaN and Inf pass through.

    Raises:
        InputError: the token does not exist or sees no key.
        ValueError: the record holds several heads.
        ForensicsError: FP32 products are not IEEE FP32 on this machine even inside `strict_fp32`.
    """
    if record.num_heads != 1:
        raise ValueError(f"walk_row takes a record of one head; got {record.num_heads}")
    num_queries = record.q.shape[1]
    if not 0 <= token < num_queries:
        raise InputError(f"token {token} does not exist: layer {record.layer} has tokens 0 to {num_queries - 1}")
    visible = _visible(record, token)
    if not visible.any():
        raise InputError(f"token {token} of layer {record.layer} sees no key, so nothing is added; name another token")
    with torch.no_grad(), strict_fp32():
        found = _compute(record, recipe, block_of(record, recipe, token), token)
    keys = np.concatenate([tile.keys for tile in found.tiles])
    sizes = [len(tile.keys) for tile in found.tiles]
    after = recipe.p_bar_cast == "after"
    rows, row = found.rows, found.row
    return RowWalk(
        recipe=recipe.name,
        keys=keys,
        visible=visible[keys],
        p_bar=np.concatenate([tile.p_bar for tile in found.tiles]),
        p_operand=np.concatenate([tile.operand for tile in found.tiles]),
        is_one=np.concatenate([tile.is_one for tile in found.tiles]),
        tile=np.repeat(np.arange(len(sizes)), sizes),
        tile_alpha=np.array([tile.alpha for tile in found.tiles], np.float32),
        v=found.operands.v[0].numpy()[keys],
        p_format=recipe.p_bar,
        row_sum=float(rows.row_sum[0, row]),
        division="none" if after else recipe.division,
        o_bar_format=recipe.o_bar,
        o_bar_at="end" if after else recipe.o_bar_at,
        o_format=recipe.o,
        o=rows.o[0, row].numpy().copy(),
        lse=float(rows.lse[0, row]),
        value_scale=found.operands.value_scale,
        v_format=value_format(record, recipe),
    )


def _visible(record: AttentionRecord, token: int) -> NDArray[np.bool_]:
    """bool [M]: the keys that the query may see."""
    num_queries, num_keys = record.q.shape[1], record.k.shape[1]
    visible = record.geometry.visible((token, token + 1), (0, num_keys), num_queries, num_keys)
    every = torch.ones(num_keys, dtype=torch.bool)
    return np.asarray((every if visible is None else every & visible[0, 0]).numpy())


def _compute(record: AttentionRecord, recipe: Recipe, block: Block, token: int) -> _Computed:
    """The calls of the dual pass for the forward pass of a block."""
    operands = forward_operands(record, recipe, slice(0, 1))
    geometry = record.geometry
    bias = geometry.bias_block(block.rows, block.keys)
    plan = plan_tiles(recipe, geometry, block, record.k.shape[-1])
    rows, keys = slice(*block.rows), slice(*block.keys)
    scaled = replace(geometry, scale=operands.scale)
    scores = lp_scores(operands.q[:, rows], operands.k[:, keys], scaled, recipe, block, bias)
    found = forward_rows(scores, operands.v[:, keys], plan, recipe, operands.value_scale)
    row = token - block.rows[0]
    is_one = torch.zeros(scores.values.shape[-1], dtype=torch.bool)
    if recipe.anchored_at_maximum:
        is_one = marked_keys(scores, count_ones(scores, found, recipe), 0, row)
    tile_k = _tile_size(record, recipe)
    tiles = _tiles(tile_steps(scores, plan, recipe), is_one.numpy(), block.keys[0], tile_k, row)
    return _Computed(operands=operands, rows=found, row=row, tiles=tuple(tiles))


def _tile_size(record: AttentionRecord, recipe: Recipe) -> int:
    (_, num_queries, head_size), num_keys = record.q.shape, record.k.shape[1]
    if recipe.p_bar_cast == "after":
        return num_keys
    return recipe.tile(head_size, num_keys, has_edge(record.geometry), num_queries)[1]


def _tiles(
    steps: Iterator[TileStep], is_one: NDArray[np.bool_], first_key: int, tile_k: int, row: int
) -> Iterator[_Tile]:
    for step in steps:
        start, end = first_key + step.start, first_key + step.end
        # Between the tile's border and the first key of the block: keys that no row of the block sees.
        before = start % tile_k
        empty = np.zeros(before, np.float32)
        yield _Tile(
            keys=np.arange(start - before, end),
            p_bar=np.concatenate([empty, step.p_bar[0, row].numpy()]),
            operand=np.concatenate([empty, step.operand[0, row].numpy()]),
            is_one=np.concatenate([empty.astype(np.bool_), is_one[step.start : step.end]]),
            alpha=float(step.alpha[0, row]),
        )
