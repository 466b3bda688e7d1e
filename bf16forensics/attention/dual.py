"""The dual pass: one record through a recipe and through high precision, block of rows by block of rows.

Nothing of size N x N exists at once: a block holds its rows times the keys they may see, for as many heads as fit the
working-set budget. The recipe's own key tiles and their order are obeyed inside each block; how rows are grouped into
blocks changes no result, because rows do not interact in the forward pass and in dQ. (It could change how a library
splits its sums: where a recipe cares, a block is one query tile of the recipe.)

Shapes: H query heads, G key/value heads, N queries, M keys, R rows and K keys of a block, D and E head sizes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from bf16forensics.attention.hp import gather_rows, reference_rows
from bf16forensics.attention.lp import backward_probabilities, forward_rows
from bf16forensics.attention.maxima import count_ones, row_maxima
from bf16forensics.attention.operands import Operands, forward_operands, shares_factors, value_format
from bf16forensics.attention.query_gradient import GradientInputs, query_gradients
from bf16forensics.attention.result import DualPass
from bf16forensics.attention.scores import Block, hp_scores, lp_scores
from bf16forensics.attention.ties import TieBlock, has_ties, tie_rows
from bf16forensics.attention.tiles import heads_differ, plan_tiles, query_tile, row_edges, seen_keys
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.model import Recipe

#: Query rows of a block.
ROWS_PER_BLOCK = 128
#: Elements of one [H, R, K] tensor of a block; about ten of them live at once.
ELEMENTS_PER_BLOCK = 2**21

_REFERENCE_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Tensors of the heads of one chunk, key/value heads repeated for their query heads."""

    #: What the recipe's forward pass multiplies, and the format of its v.
    forward: Operands
    v_format: str
    #: [H, M, D] keys as stored, for the recipe's backward pass.
    k: torch.Tensor
    do: torch.Tensor | None
    #: The stored tensors in the reference dtype.
    q_hp: torch.Tensor
    k_hp: torch.Tensor
    v_hp: torch.Tensor
    do_hp: torch.Tensor | None


def dual_pass(record: AttentionRecord, recipe: Recipe, reference: str = "fp64") -> DualPass:
    """Runs a record through a recipe and through high precision.

    Args:
        record: one attention call of one sequence; all tensors must be finite (a NaN spreads to its rows).
        recipe: rounding points, tiles and order of the lp side.
        reference: "fp64", or "fp32" (differences from the top key keep it useful in saturated rows).

    Returns:
        lp, hp and their differences for every row. Fully masked rows are 0 everywhere. Without dO, or by a recipe that
        is a forward pass only, there is no delta and no dQ.

    Raises:
        InputError: unknown reference.
        ForensicsError: FP32 products are not IEEE FP32 on this machine even inside `strict_fp32`.

    Reference: arXiv 2510.04212, section 3.3.1 and equations 1 to 3.
    """
    return _through(record, recipe, reference, row_blocks(record, recipe))


def dual_pass_at(
    record: AttentionRecord, recipe: Recipe, token: int, reference: str = "fp64"
) -> tuple[DualPass, tuple[int, int]]:
    """Runs the block of rows that holds one query through a recipe and through high precision.

    Args:
        record: as for `dual_pass`.
        recipe: as for `dual_pass`.
        token: the query, in [0, N).
        reference: as for `dual_pass`.

    Returns:
        The rows of the block, bit for bit those of `dual_pass`, and which they are, [start, end).

    Raises:
        InputError: unknown reference.
        ForensicsError: as `dual_pass`.
    """
    block = block_of(record, recipe, token)
    return _through(record, recipe, reference, (block,)), block.rows


def _through(record: AttentionRecord, recipe: Recipe, reference: str, blocks: tuple[Block, ...]) -> DualPass:
    if reference not in _REFERENCE_DTYPES:
        raise InputError(f"reference must be fp32 or fp64; got {reference!r}")
    dtype = _REFERENCE_DTYPES[reference]
    with torch.no_grad(), strict_fp32():
        # Last rows first: causal blocks then shrink and fit into the memory that the larger ones before them gave back.
        blocks = blocks[::-1]
        chunks = [
            _concatenate([_block(heads, record.geometry, span, recipe, block) for block in blocks][::-1], dim=1)
            for span, heads in _chunks(record, recipe, dtype)
        ]
        whole: DualPass = _concatenate(chunks, dim=0)
    return whole


def row_blocks(record: AttentionRecord, recipe: Recipe) -> tuple[Block, ...]:
    """The blocks of rows that a record is computed in, in order; every one holds at least one key, visible or not."""
    found = []
    num_queries, num_keys = record.q.shape[1], record.k.shape[1]
    edges = row_edges(recipe, record.geometry, record.q.shape[-1], num_queries, num_keys)
    starts = sorted({*range(0, num_queries, _rows_per_block(record, recipe)), *edges})
    for start, end in zip(starts, [*starts[1:], num_queries], strict=True):
        keys = seen_keys(recipe, record.geometry, record.q.shape[-1], (start, end), num_queries, num_keys)
        if keys[0] == keys[1]:
            # Rows that can see nothing still need one (invisible) key to be computed as fully masked.
            keys = (min(keys[0], num_keys - 1), min(keys[0], num_keys - 1) + 1)
        found.append(Block(rows=(start, end), keys=keys, num_queries=num_queries, num_keys=num_keys))
    return tuple(found)


def block_of(record: AttentionRecord, recipe: Recipe, token: int) -> Block:
    """The block of rows that holds a query in [0, N)."""
    return next(block for block in row_blocks(record, recipe) if token < block.rows[1])


def _rows_per_block(record: AttentionRecord, recipe: Recipe) -> int:
    if recipe.arithmetic != "torch-blocks":
        return ROWS_PER_BLOCK
    return query_tile(recipe, record.geometry, record.q.shape[-1], record.q.shape[1], record.k.shape[1])


def _chunks(record: AttentionRecord, recipe: Recipe, dtype: torch.dtype) -> Iterator[tuple[slice, _Heads]]:
    group = record.num_heads // record.num_kv_heads
    rows = _rows_per_block(record, recipe)
    size = max(1, ELEMENTS_PER_BLOCK // (rows * max(record.k.shape[1], rows)))
    if heads_differ(recipe, record.geometry) or not shares_factors(recipe):
        size = 1
    for start in range(0, record.num_heads, size):
        span = slice(start, min(start + size, record.num_heads))
        forward = forward_operands(record, recipe, span)
        kv = torch.arange(span.start, span.stop) // group
        q, k, v = forward.q, forward.k, forward.v
        if not shares_factors(recipe):
            q, k, v = record.q[span], record.k[kv], record.v[kv]
        do = None if record.do is None or recipe.passes == "forward" else record.do[span].contiguous()
        yield (
            span,
            _Heads(
                forward=forward,
                v_format=value_format(record, recipe),
                k=k,
                do=do,
                q_hp=q.to(dtype),
                k_hp=k.to(dtype),
                v_hp=v.to(dtype),
                do_hp=None if do is None else do.to(dtype),
            ),
        )


def _block(heads: _Heads, geometry: Geometry, span: slice, recipe: Recipe, block: Block) -> DualPass:
    rows, keys = slice(*block.rows), slice(*block.keys)
    geometry = geometry.for_heads(span)
    bias = geometry.bias_block(block.rows, block.keys)
    forward, k_hp, v_hp = heads.forward, heads.k_hp[:, keys], heads.v_hp[:, keys]
    plan = plan_tiles(recipe, geometry, block, heads.k.shape[-1])

    scaled = geometry if forward.scale == geometry.scale else replace(geometry, scale=forward.scale)
    lp_s = lp_scores(forward.q[:, rows], forward.k[:, keys], scaled, recipe, block, bias)
    v = forward.v[:, keys]
    lp = forward_rows(lp_s, v, plan, recipe, forward.value_scale, keep_final=has_ties(recipe))
    ones = count_ones(lp_s, lp, recipe)
    hp_s = hp_scores(heads.q_hp[:, rows], k_hp, geometry, block, bias)
    hp = reference_rows(hp_s, v_hp)

    top_value = gather_rows(v_hp, hp.top).double()
    seen = hp.row_max > -torch.inf
    o_hp = (hp.o_minus_top + top_value) * seen[..., None]
    lp_minus_top = lp.o.double() - top_value * seen[..., None]
    delta, dq = None, None
    if heads.do is not None and heads.do_hp is not None:
        found = query_gradients(
            GradientInputs(
                lp=lp,
                hp=hp,
                scores=lp_s,
                p_lp=backward_probabilities(lp_s, lp, recipe),
                slope=hp_s.slope,
                k=heads.k[:, keys],
                k_hp=k_hp,
                v_hp=v_hp,
                do=heads.do[:, rows],
                do_hp=heads.do_hp[:, rows],
                scale=geometry.scale,
                plan=plan,
            ),
            recipe,
        )
        delta, dq = found.delta, found.dq
    return DualPass(
        o_lp=lp.o.double(),
        o_hp=o_hp,
        o_err=lp_minus_top - hp.o_minus_top,
        lse_lp=lp.lse.double(),
        lse_hp=hp.lse,
        maxima=row_maxima(ones, hp_s, hp, lp_minus_top),
        ties=tie_rows(
            TieBlock(
                recipe=recipe,
                ones=ones,
                lp=lp,
                v=v,
                v_format=heads.v_format,
                value_scale=forward.value_scale,
                first_key=block.keys[0],
            )
        ),
        delta=delta,
        dq=dq,
    )


def _concatenate(parts: list[Any], dim: int) -> Any:
    """Joins results of the same type field by field; dim 1 joins rows, dim 0 joins heads."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        if values[0] is None:
            joined[field.name] = None
        elif isinstance(values[0], torch.Tensor):
            joined[field.name] = torch.cat(values, dim)
        else:
            joined[field.name] = _concatenate(values, dim)
    return type(parts[0])(**joined)
