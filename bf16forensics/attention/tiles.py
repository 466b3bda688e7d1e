"""Which key tiles the rows of a block visit, in which order, and what the order depends on.

Shapes: N queries, M keys, K keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bf16forensics.attention.cubic import cubic_keys
from bf16forensics.attention.fexp import vector_keys
from bf16forensics.attention.scores import Block
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.model import Recipe

#: Queries and keys of a block of a block mask (flex_attention's default), rounded down to whole tiles.
_MASK_BLOCK = 128
#: Queries whose visibility is looked at together.
_ROWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """How the rows of one block walk along the keys."""

    #: [start, end) of each key tile relative to the block's first key, in the order of visits.
    tiles: tuple[tuple[int, int], ...]
    #: bool [K] on the CPU: keys whose exponential in the forward pass is a polynomial; None when there is none.
    cubic: torch.Tensor | None

    def cubic_of(self, start: int, end: int, device: torch.device) -> torch.Tensor | None:
        """The part of `cubic` that belongs to one tile, on a device."""
        return None if self.cubic is None else self.cubic[start:end].to(device)


def has_edge(geometry: Geometry) -> bool:
    """Whether a call counts as causal in `TileRule`: a causal mask, or a window."""
    return geometry.causal or geometry.window is not None


def row_edges(recipe: Recipe, geometry: Geometry, head_size: int, num_queries: int, num_keys: int) -> tuple[int, ...]:
    """Query rows at which a block of rows must end because the next row visits the tiles in another order."""
    if recipe.tile_order != "masked-first":
        return ()
    size = _mask_block(recipe.tile(head_size, num_keys, has_edge(geometry), num_queries)[0])
    return tuple(range(size, num_queries, size))


def query_tile(recipe: Recipe, geometry: Geometry, head_size: int, num_queries: int, num_keys: int) -> int:
    """Query rows a tile in a call."""
    return recipe.tile(head_size, num_keys, has_edge(geometry), num_queries)[0]


def seen_keys(
    recipe: Recipe, geometry: Geometry, head_size: int, rows: tuple[int, int], num_queries: int, num_keys: int
) -> tuple[int, int]:
    """[start, end) of the keys of a block of rows: those they may see, and the rest of their tiles if products need it.

    Args:
        recipe: tiles, and whether its products are those of whole tiles.
        geometry: of the call.
        head_size: elements of one query vector.
        rows: [start, end) of the queries.
        num_queries: N.
        num_keys: M.
    """
    start, end = geometry.key_range(*rows, num_queries, num_keys)
    if recipe.arithmetic != "torch-blocks" or start == end:
        return start, end
    tile_k = recipe.tile(head_size, num_keys, has_edge(geometry), num_queries)[1]
    return start // tile_k * tile_k, min(-(-end // tile_k) * tile_k, num_keys)


def heads_differ(recipe: Recipe, geometry: Geometry) -> bool:
    """Whether heads may visit the tiles in different orders."""
    return recipe.tile_order == "masked-first" and geometry.keep is not None and geometry.keep.shape[0] > 1


def plan_tiles(recipe: Recipe, geometry: Geometry, block: Block, head_size: int) -> TilePlan:
    """The walk of a block's rows by the recipe.

    "masked-first" is flex_attention's order: a block mask of 128 x 128 (queries x keys) says which blocks have a hidden
    pair, where pairs beyond the last query or key count as hidden; these come first. A call that hides nothing has no
    block mask, so that its tiles come in ascending order.

    Args:
        recipe: tiles, order, exponential.
        geometry: of the call, for heads that visit the tiles in one order.
        block: rows within one block of the block mask.
        head_size: elements of one query vector.
    """
    causal = has_edge(geometry)
    tile_q, tile_k = recipe.tile(head_size, block.num_keys, causal, block.num_queries)
    cubic = None
    if recipe.exponential == "exp2-cubic":
        cubic = cubic_keys(head_size, causal, block.num_queries, block.keys, tile_k)
    tiles = tuple(_tiles(block.keys, tile_k, recipe.tile_order))
    if recipe.exponential == "fexp_u20":
        cubic = vector_keys(tiles, recipe.row_sum_order)
    if recipe.tile_order == "masked-first" and _hides(geometry):
        size = _mask_block(tile_k)
        masked = _partly_hidden(geometry, block, _mask_block(tile_q), size)
        tiles = tuple(sorted(tiles, key=lambda tile: not masked[(tile[0] + block.keys[0]) // size]))
    return TilePlan(tiles=tiles, cubic=cubic)


def _tiles(keys: tuple[int, int], tile_k: int, order: str) -> Iterator[tuple[int, int]]:
    """The tiles that overlap a range of keys, relative to its start.

    Tile borders lie at multiples of `tile_k` of the whole row, so that a block sees the tiles the kernel sees.
    """
    first, last = keys[0] // tile_k, -(-keys[1] // tile_k)
    for index in range(last - 1, first - 1, -1) if order == "descending" else range(first, last):
        yield max(index * tile_k, keys[0]) - keys[0], min((index + 1) * tile_k, keys[1]) - keys[0]


def _mask_block(tile: int) -> int:
    """Size of a block of the block mask: whole tiles, 128 where that is possible."""
    return tile * max(1, _MASK_BLOCK // tile)


def _hides(geometry: Geometry) -> bool:
    return has_edge(geometry) or bool(_masks(geometry))


def _masks(geometry: Geometry) -> list[torch.Tensor]:
    every = (geometry.key_padding, geometry.query_padding, geometry.document_ids, geometry.keep)
    return [mask for mask in every if mask is not None]


def _partly_hidden(geometry: Geometry, block: Block, size_q: int, size_k: int) -> dict[int, bool]:
    """For each block of the block mask that overlaps the block's keys: whether it has a hidden pair."""
    first_row = block.rows[0] // size_q * size_q
    last_row = first_row + size_q
    first, last = block.keys[0] // size_k, -(-block.keys[1] // size_k)
    keys = (first * size_k, min(last * size_k, block.num_keys))
    device = next((mask.device for mask in _masks(geometry)), None)
    every = torch.ones(keys[1] - keys[0], dtype=torch.bool, device=device)
    if last_row > block.num_queries:
        every[:] = False
    for start in range(first_row, min(last_row, block.num_queries), _ROWS_AT_ONCE):
        rows = (start, min(start + _ROWS_AT_ONCE, last_row, block.num_queries))
        visible = geometry.visible(rows, keys, block.num_queries, block.num_keys, device)
        if visible is not None:
            every &= visible.expand(-1, rows[1] - rows[0], len(every)).all(1).all(0)
    masked = {}
    for index in range(first, last):
        part = every[index * size_k - keys[0] : (index + 1) * size_k - keys[0]]
        masked[index] = len(part) < size_k or not bool(part.all())
    return masked
