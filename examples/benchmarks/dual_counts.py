"""Whether counts at the maximum are those of the reference, up to the noise of the scores they are taken from.

Shapes: H heads, R rows and K keys of a block.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from bf16forensics.attention.exponential import exponential
from bf16forensics.attention.maxima import NEAR_NATS, ROUNDS_TO_ONE
from bf16forensics.attention.result import DualPass
from bf16forensics.attention.scores import Block, LpScores, lp_scores
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.model import Recipe

#: Nats by which a score may differ; two of them move a gap by 4e-5.
SCORE_NOISE = 2e-5


def wrong_counts(
    found: dict[str, torch.Tensor],
    record: AttentionRecord,
    recipe: Recipe,
    dual: DualPass,
    block: Block,
    *,
    on_gpu: bool,
) -> Iterator[str]:
    """Counts outside of what scores off by `SCORE_NOISE` allow: every step after a product keeps the order.

    Args:
        found: int64 [H, R] by the names in `RowMaxima`, on the CPU.
        record: of the heads.
        recipe: of the pass.
        dual: the reference of the block.
        block: where it lies.
        on_gpu: where the counts come from.

    Yields:
        One clause for each kind of count that is wrong.
    """
    rows, keys = slice(*block.rows), slice(*block.keys)
    raw = record.q[:, rows].double() @ record.k[:, keys].double().transpose(1, 2)
    record.geometry.hide(raw, block.rows, block.num_queries, block.keys[0], block.num_keys)
    noise = SCORE_NOISE / record.geometry.scale
    low, high = (_scores(raw + sign * noise, record.geometry, recipe) for sign in (-1, 1))
    low_max, high_max = low.values.amax(-1), high.values.amax(-1)
    with strict_fp32():
        p_low = exponential(low.values.clone(), high_max, low.unit, recipe)
        p_high = exponential(high.values.clone(), low_max, high.unit, recipe)
    gap_low = (low_max[..., None] - high.values) * low.unit
    gap_high = (high_max[..., None] - low.values) * low.unit
    at_most = {
        "ones_fp32": p_high >= 1.0,
        "ones_rounded": p_high >= ROUNDS_TO_ONE,
        "near": gap_low <= NEAR_NATS,
        "shared": raw >= raw.amax(-1, keepdim=True) - 2 * noise,
    }
    # On a GPU keys that are the same have the same product (NumPy has several loops for the columns of one matrix):
    # where nothing else comes close to it, they all count.
    top = (raw == raw.amax(-1, keepdim=True)) & on_gpu
    same = top & (top.sum(-1) == at_most["shared"].sum(-1))[..., None]
    at_least = {
        "ones_fp32": same,
        "ones_rounded": same | (p_low >= ROUNDS_TO_ONE),
        "near": same | (gap_high <= NEAR_NATS),
        "shared": same,
    }
    for name, values in found.items():
        least, most = at_least[name].sum(-1).clamp(min=1), at_most[name].sum(-1)
        expected = getattr(dual.maxima, name)
        off = int(((values < least) | (values > most) | (least == most) & (values != expected)).sum())
        if off:
            yield f"{off} of {values.numel()} counts {name} are not those of the reference"


def _scores(raw: torch.Tensor, geometry: Geometry, recipe: Recipe) -> LpScores:
    """The recipe's scores from raw products, -inf where they are."""
    if recipe.scale_placement == "operands":
        recipe = replace(recipe, scale_placement="scores")
    # A query of one 1 takes every product as it is: all that follows is the recipe's own.
    flat = raw.float().reshape(1, -1, 1).nan_to_num(neginf=0.0)
    block = Block(rows=(0, 1), keys=(0, flat.shape[1]), num_queries=1, num_keys=flat.shape[1])
    plain = Geometry(scale=geometry.scale, causal=False)
    scores = lp_scores(torch.ones(1, 1, 1), flat, plain, recipe, block, None)
    values = scores.values.reshape(raw.shape).masked_fill(raw == -math.inf, -math.inf)
    return LpScores(values=values, unit=scores.unit)
