"""The chain of a matrix unit along a row walk.

Shapes: K keys of the walk, L products of a block.
"""

import numpy as np
from numpy.typing import NDArray

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.exact_prefix import exact_prefixes
from bf16forensics.evidence.trace.running_sum import RunningSums, exact_products
from bf16forensics.floats.accumulate import block_of, dot_add, running
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import FP32, format_named


def matrix_unit_sum(walk: RowWalk, feature: int, accumulator: str) -> RunningSums:
    """The FP32 accumulator of a tensor core: blocks of products in the order of visits, rescaled before each tile.

    Args:
        walk: the recipe's own walk.
        feature: of V.
        accumulator: "sm80", "sm90" or "sm100".

    Raises:
        InputError: P or V has other than 16-bit values.
    """
    v = np.ascontiguousarray(walk.v[:, feature])
    _require_16_bits(walk, feature, accumulator)
    size = block_of(accumulator)
    block, column = _blocks(walk, size)
    count = int(block[-1]) + 1
    p_blocks, v_blocks = np.zeros((count, size), np.float32), np.zeros((count, size), np.float32)
    p_blocks[block, column], v_blocks[block, column] = walk.p_operand, v
    tile_of_block = walk.tile[np.flatnonzero(np.diff(block, prepend=-1))]
    before, after = np.empty(count, np.float32), np.empty(count, np.float32)
    first = np.flatnonzero(np.diff(tile_of_block, prepend=-1))
    # Tiles that rescale nothing continue the chain of the ones before.
    starts = [0, *(b for b in first.tolist() if b > 0 and walk.tile_alpha[tile_of_block[b]] != 1.0)]
    carried, fmt = np.zeros((), np.float32), walk.p_format
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        if start > 0:
            carried = np.asarray(after[start - 1] * walk.tile_alpha[tile_of_block[start]])
        p_chain, v_chain = p_blocks[start:end].ravel(), v_blocks[start:end].ravel()
        after[start:end] = running(carried, p_chain, v_chain, accumulator, operands=fmt)
        before[start], before[start + 1 : end] = carried, after[start : end - 1]
    so_far = np.arange(size) <= column[:, None]
    p_so_far = np.where(so_far, p_blocks[block], np.float32(0.0))
    in_block = dot_add(before[block], p_so_far, v_blocks[block], accumulator, operands=fmt)
    return RunningSums(
        lp=in_block.astype(np.float64),
        hp=exact_prefixes(exact_products(walk, feature), walk.tile, walk.tile_alpha).nearest,
        stored=FP32,
        rounds_once=False,
        group=block,
        before=before[block].astype(np.float64),
        addend=None,
        end=float(after[-1]),
    )


def _blocks(walk: RowWalk, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block of a matrix unit of each key, counted along the walk, and the key's place in it; int64 [K] each.

    Blocks start with the tile; the last one of a tile is filled up with zeros.
    """
    first = np.flatnonzero(np.diff(walk.tile, prepend=-1))
    place = np.arange(len(walk.keys)) - first[walk.tile]
    starts = place % size == 0
    return np.cumsum(starts) - 1, place % size


def _require_16_bits(walk: RowWalk, feature: int, accumulator: str) -> None:
    if walk.p_format not in ("bf16", "fp16"):
        raise InputError(
            f"accumulator {accumulator} multiplies 16-bit operands; recipe {walk.recipe} has {walk.p_format} P. "
            "Use exact or fp32-prefix"
        )
    v = walk.v[:, feature]
    if not np.array_equal(round_to(v, format_named(walk.p_format), overflow="nonfinite"), v):
        raise InputError(
            f"accumulator {accumulator} takes both operands in one format; V of feature {feature} holds values that "
            f"are not {walk.p_format}, the format of P-bar in recipe {walk.recipe}. Use exact or fp32-prefix"
        )
