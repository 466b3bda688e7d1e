"""Records for the tests of the fused kernels, and the fused forward pass as the float64 reference gives it."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from bf16forensics.kernels.fused_types import FusedForward, FusedInputs, FusedRecipe

from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.fused_inputs import fused_inputs, visible_pairs
from bf16forensics.attention.fused_recipe import fused_recipe
from bf16forensics.attention.result import DualPass
from bf16forensics.attention.scores import Block, LpScores, lp_scores
from bf16forensics.attention.tiles import has_edge
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.model import Recipe

#: Gap in nats up to which a key is a candidate for the maximum.
CANDIDATE_NATS = 4e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call, through the reference and as the kernels take it."""

    record: AttentionRecord
    recipe: Recipe
    #: The float64 reference of it.
    dual: DualPass
    inputs: FusedInputs
    constants: FusedRecipe
    forward: FusedForward
    #: FP32 scores of the recipe, [H, N, M], on the CPU; and the raw products in float64, -inf where not visible.
    scores: LpScores
    raw: torch.Tensor


def bf16(values: torch.Tensor) -> torch.Tensor:
    """FP32 holding BF16 values."""
    return values.float().bfloat16().float()


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers that BF16 holds."""
    return bf16(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def record_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor | None,
    *,
    storage: str = "bf16",
    **geometry: Any,
) -> AttentionRecord:
    """A record of one call; the scale is D^-1/2 unless given."""
    geometry.setdefault("scale", q.shape[-1] ** -0.5)
    return AttentionRecord(
        layer=0, sequence=0, step=None, storage=storage, q=q, k=k, v=v, do=do, x=None, geometry=Geometry(**geometry)
    )  # fmt: skip


def drawn(
    seed: int = 0, heads: int = 2, groups: int | None = None, queries: int = 48, keys: int | None = None,
    size: int = 16, value_size: int | None = None, sharpness: float = 1.0, **geometry: Any,
) -> AttentionRecord:  # fmt: skip
    """A record of normal numbers, its scores `sharpness` wide."""
    keys, groups, value_size = keys or queries, groups or heads, value_size or size
    return record_of(
        bf16(sharpness * draw(seed, heads, queries, size)),
        draw(seed + 1, groups, keys, size),
        draw(seed + 2, groups, keys, value_size),
        draw(seed + 3, heads, queries, value_size),
        **geometry,
    )


def case_of(record: AttentionRecord, recipe: str | Recipe, device: str, *, ieee: bool = False) -> Case:
    """A record through the float64 reference, and the forward pass of it as the kernels take it, on a device."""
    recipe = resolve(recipe) if isinstance(recipe, str) else recipe
    dual = dual_pass(record, recipe, "fp64")
    inputs = fused_inputs(record.to(torch.device(device)), recipe, ieee=ieee)
    heads, queries, size = record.q.shape
    keys = record.k.shape[1]
    kv = torch.arange(heads) // (heads // record.num_kv_heads)
    visible = visible_pairs(inputs, torch.arange(queries, device=device)).cpu()
    raw = torch.matmul(record.q.double(), record.k[kv].double().transpose(1, 2)).masked_fill(~visible, -torch.inf)
    whole = Block(rows=(0, queries), keys=(0, keys), num_queries=queries, num_keys=keys)
    with strict_fp32():
        scores = lp_scores(record.q, record.k[kv], record.geometry, recipe, whole, None)
    row_max, raw_max = scores.values.amax(-1), raw.amax(-1)
    finite_max = raw_max.masked_fill(raw_max == -torch.inf, 0.0)
    row_sum = torch.exp((raw - finite_max[..., None]) * record.geometry.scale).sum(-1)
    near = (row_max[..., None] - scores.values) * scores.unit <= CANDIDATE_NATS
    near_raw = (raw_max[..., None] - raw) * record.geometry.scale <= CANDIDATE_NATS
    delta = dual.delta

    def moved(values: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        return None if values is None else values.to(device=device, dtype=dtype, copy=True)

    constants = fused_recipe(recipe, size, keys, has_edge(record.geometry))
    forward = FusedForward(
        o_lp=moved(dual.o_lp, torch.bfloat16 if constants.o else torch.float32),
        o_hp=moved(dual.o_hp),
        lse_lp=moved(dual.lse_lp),
        lse_hp=moved(dual.lse_hp),
        row_max_lp=moved(row_max),
        row_max_raw=moved(raw_max),
        row_sum_hp=moved(row_sum),
        candidates=moved((near | near_raw).sum(-1), torch.int32),
        lowest_raw=None,
        delta_lp=moved(delta and delta.delta_lp),
        delta_hp=moved(delta and delta.delta_hp),
        delta_err=moved(delta and delta.delta_err),
        delta_consistent=moved(delta and delta.delta_lp - delta.defect),
        magnitude=moved(delta and delta.magnitude),
        p_row_sum=moved(row_sum * 0 if delta is None else delta.p_row_sum),
        carrier=None,
        feature_sums=None,
    )
    return Case(
        record=record,
        recipe=recipe,
        dual=dual,
        inputs=inputs,
        constants=constants,
        forward=forward,
        scores=scores,
        raw=raw,
    )


def keys_of_heads(record: AttentionRecord, values: torch.Tensor) -> torch.Tensor:
    """[G, M, ...] of a record as [H, M, ...] in float64, repeated for the query heads of each group."""
    group = record.num_heads // record.num_kv_heads
    return values.double().repeat_interleave(group, 0)


def copied(forward: FusedForward) -> FusedForward:
    """The same forward pass in memory of its own."""
    tensors = {field.name: getattr(forward, field.name) for field in fields(forward)}
    return FusedForward(**{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()})
