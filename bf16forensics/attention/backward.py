"""The whole backward pass of a recipe: dQ, dK and dV with every cast it makes.

The evidence needs only dQ, which the dual pass has in stages. This is the rest of the specification, for comparing a
recipe with a kernel's own gradients.

Shapes: H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v.
"""

from dataclasses import dataclass, replace

import torch

from bf16forensics.attention.lp import (
    add_tile,
    backward_probabilities,
    delta_products,
    forward_rows,
    product_scale,
    round_delta,
    score_gradient,
)
from bf16forensics.attention.operands import forward_operands
from bf16forensics.attention.scores import Block, LpScores, lp_scores, product
from bf16forensics.attention.tiles import TilePlan, plan_tiles, query_tile, seen_keys
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import round_to
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError, RecipeError
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeGradients:
    """Output and gradients by a recipe, FP32 tensors holding values of the recipe's formats."""

    #: [H, N, E]
    o: torch.Tensor
    #: [H, N, D]
    dq: torch.Tensor
    #: [G, M, D] and [G, M, E]; with several query heads a key/value head, each head's part rounds, then their sum.
    dk: torch.Tensor
    dv: torch.Tensor


def recipe_gradients(record: AttentionRecord, recipe: Recipe) -> RecipeGradients:
    """Runs forward and backward of one record by a recipe.

    Query tiles are visited in ascending order. Where `gradients_at` is "tile" or "buffer", the buffers of dQ, dK and dV
    round after every tile that is added to them; otherwise they accumulate in FP32 and round once.

    Args:
        record: one attention call with dO; finite.
        recipe: rounding points, tiles and order.

    Returns:
        Output and gradients; 0 for queries and keys that take part in no visible pair.

    Raises:
        InputError: the record has no dO.
        RecipeError: the recipe is a forward pass only.
    """
    if recipe.passes == "forward":
        raise RecipeError(f"recipe {recipe.name} is a forward pass only and has no gradients; use another recipe")
    if record.do is None:
        raise InputError("the record has no do: a backward pass needs the gradient of O")
    group = record.num_heads // record.num_kv_heads
    with torch.no_grad(), strict_fp32():
        heads = [_head(record, recipe, head, record.do) for head in range(record.num_heads)]
    o, dq, dk, dv = (torch.stack(parts) for parts in zip(*heads, strict=True))
    if group > 1:
        dk, dv = (round_to(part.unflatten(0, (-1, group)).sum(1), recipe.dkv) for part in (dk, dv))
    return RecipeGradients(o=o, dq=dq, dk=dk, dv=dv)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBlock:
    """A block of rows on its way back, with what its forward pass gave."""

    #: [H, R, D] queries of the block, [H, M, D] keys, [H, M, E] values, as stored.
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    #: [H, R, E] gradient of the output, and the output by the recipe.
    do: torch.Tensor
    o: torch.Tensor
    #: [H, R, K] P of the backward pass before its cast.
    p: torch.Tensor
    #: Scores, for their soft-cap; their values are not read.
    scores: LpScores
    block: Block
    plan: TilePlan
    #: Softmax scale.
    scale: float


def add_gradients(
    part: BackwardBlock, buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor], recipe: Recipe
) -> None:
    """Adds a block's parts to the buffers of dQ [H, N, D], dK [H, M, D] and dV [H, M, E], FP32, in place."""
    rows, seen, do = slice(*part.block.rows), slice(*part.block.keys), part.do
    dp = round_to(product(do, part.v[:, seen].mT, recipe.arithmetic), recipe.dp)
    terms = (part.p * dp).double() if recipe.delta_source == "dp" else delta_products(do, part.o, recipe)
    ds = score_gradient(part.p, dp, round_delta(terms.sum(-1), recipe), part.scores, part.scale, recipe)
    p = round_to(part.p, recipe.p_backward)
    factor = product_scale(recipe, part.scale)
    dq, dk, dv = buffers
    for first, last in part.plan.tiles:
        tile = slice(seen.start + first, seen.start + last)
        ds_tile, p_tile = ds[..., first:last], p[..., first:last]
        for buffer, where, added, storage in (
            (dq, rows, product(ds_tile, part.k[:, tile], recipe.arithmetic) * factor, recipe.dq),
            (dk, tile, product(ds_tile.mT, part.q, recipe.arithmetic) * factor, recipe.dkv),
            (dv, tile, product(p_tile.mT, do, recipe.arithmetic), recipe.dkv),
        ):
            add_tile(buffer, where, added, storage, recipe.gradients_at)


def _head(
    record: AttentionRecord, recipe: Recipe, head: int, all_do: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kv = head // (record.num_heads // record.num_kv_heads)
    q, do, k, v = record.q[head, None], all_do[head, None], record.k[kv, None], record.v[kv, None]
    num_queries, num_keys = q.shape[1], k.shape[1]
    forward_of = forward_operands(record, recipe, slice(head, head + 1))
    geometry, scale = record.geometry.for_heads(slice(head, head + 1)), record.geometry.scale
    scaled = replace(geometry, scale=forward_of.scale)
    tile_q = query_tile(recipe, geometry, q.shape[-1], num_queries, num_keys)
    o, dq = torch.zeros_like(do), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, num_queries, tile_q):
        rows = (start, min(start + tile_q, num_queries))
        keys = seen_keys(recipe, geometry, q.shape[-1], rows, num_queries, num_keys)
        if keys[0] == keys[1]:
            continue
        own, seen = slice(*rows), slice(*keys)
        block = Block(rows=rows, keys=keys, num_queries=num_queries, num_keys=num_keys)
        plan = plan_tiles(recipe, geometry, block, q.shape[-1])
        bias = geometry.bias_block(rows, keys)
        scores = lp_scores(forward_of.q[:, own], forward_of.k[:, seen], scaled, recipe, block, bias)
        forward = forward_rows(scores, forward_of.v[:, seen], plan, recipe, forward_of.value_scale)
        o[:, own] = forward.o
        add_gradients(
            BackwardBlock(
                q=q[:, own],
                k=k,
                v=v,
                do=do[:, own],
                o=forward.o,
                p=backward_probabilities(scores, forward, recipe),
                scores=scores,
                block=block,
                plan=plan,
                scale=scale,
            ),
            (dq, dk, dv),
            recipe,
        )
    return o[0], round_to(dq, recipe.dq)[0], round_to(dk, recipe.dkv)[0], round_to(dv, recipe.dkv)[0]
