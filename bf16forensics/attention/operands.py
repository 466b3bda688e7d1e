"""q, k and v as the forward pass of a recipe takes them: as they are stored, or quantised to E4M3.

Shapes: H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v.
"""

from dataclasses import dataclass

import torch

from bf16forensics.attention.scores import LOG2_E
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import round_to
from bf16forensics.recipe.model import Recipe

#: Largest finite E4M3 number.
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Operands of some heads, and the factors that belong to them."""

    #: [H, N, D], [H, M, D], [H, M, E] FP32, key/value heads repeated for their query heads.
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    #: Softmax scale, times the descale factors of q and k.
    scale: float
    #: Descale factor of v, which multiplies O; an FP32 number.
    value_scale: float


def shares_factors(recipe: Recipe) -> bool:
    """Whether heads of one call can be computed together: their operands have the same factors."""
    return recipe.operands == "stored"


def forward_operands(record: AttentionRecord, recipe: Recipe, heads: slice) -> Operands:
    """The operands of a range of query heads.

    E4M3 quantises x / d with d = max |x| / 448 in FP32, one d for each key/value head and sequence, where q counts
    over the query heads that share it. FlashAttention-3 takes one factor for each of them from its caller, and
    multiplies the exponent of the softmax by q's and k's in FP32. Non-finite elements have no say in d; a tensor of
    zeros has d = 1.

    Args:
        record: one attention call.
        recipe: `operands`.
        heads: a range of query heads; a single head unless `shares_factors`.
    """
    group = record.num_heads // record.num_kv_heads
    # Fresh contiguous copies: results must not depend on where a head lay in the caller's memory.
    q = record.q[heads].contiguous()
    of_head = torch.arange(heads.start, heads.stop, device=q.device) // group
    k, v = record.k[of_head], record.v[of_head]
    if shares_factors(recipe):
        return Operands(q=q, k=k, v=v, scale=record.geometry.scale, value_scale=1.0)
    kv = heads.start // group
    factors = [_descale(t) for t in (record.q[kv * group : (kv + 1) * group], record.k[kv], record.v[kv])]
    q, k, v = (round_to(t / d, recipe.operands) for t, d in zip((q, k, v), factors, strict=True))
    # In this order of FP32 roundings; `exponential` multiplies by log2(e) again.
    folded = _fp32(_fp32(record.geometry.scale * LOG2_E) * (factors[0] * factors[1]))
    return Operands(q=q, k=k, v=v, scale=folded.item() / LOG2_E, value_scale=factors[2].item())


def value_format(record: AttentionRecord, recipe: Recipe) -> str:
    """Name of the format that holds the values that the recipe multiplies: the stored ones, or quantised ones."""
    return record.storage if recipe.operands == "stored" else recipe.operands


def _descale(values: torch.Tensor) -> torch.Tensor:
    largest = values.masked_fill(~values.isfinite(), 0.0).abs().amax()
    return torch.where(largest == 0, 1.0, largest / _E4M3_MAX)


def _fp32(value: float | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32)
