"""Attention by a recipe as one differentiable operation, against `recipe_gradients`, which says what to compute."""

from dataclasses import replace

import pytest
import torch

from bf16forensics.attention import recipe_attention as module
from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.autocast import CudaAutocast
from bf16forensics.errors import RecipeError
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

#: Met by every geometry, and met by some.
RECIPES = ("fa2+tile_q=16,tile_k=16", "eager")
MORE_RECIPES = (
    "paper+tile_q=12,tile_k=16",
    "sdpa-math",
    "flex+tile_q=16,tile_k=16",
    "paper+tile_q=16,tile_k=16,dp=bf16,ds=bf16,dq=bf16,dkv=bf16,gradients_at=tile",
    "fa2+operands=e4m3,p_scale=256,tile_q=16,tile_k=16",
)
QUERIES, KEYS = 37, 45


def record_of(heads=4, groups=4, queries=QUERIES, keys=KEYS, size=16, seed=0, scale=0.25, **geometry):
    """BF16 values; 37 queries see 45 keys bottom-right."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().float()

    return AttentionRecord(
        layer=0, sequence=0, step=None, storage="bf16", q=draw(heads, queries, size), k=draw(groups, keys, size),
        v=draw(groups, keys, size), do=draw(heads, queries, size), x=None,
        geometry=Geometry(scale=scale, **geometry),
    )  # fmt: skip


def run(record, recipe):
    """O, dQ, dK and dV of the operation, BF16."""
    operands = [t.bfloat16().requires_grad_() for t in (record.q, record.k, record.v)]
    o = RecipeAttention(recipe=recipe)(*operands, record.geometry)
    o.backward(record.do.bfloat16())
    return (o.detach(), *(t.grad for t in operands))


def expected(record, recipe):
    found = recipe_gradients(record, recipe)
    return tuple(t.bfloat16() for t in (found.o, found.dq, found.dk, found.dv))


def mask(*shape, seed=9):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4


GEOMETRIES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 7},
    "window both ways": {"causal": False, "window": 7},
    "grouped": {"groups": 2},
    "one key head": {"groups": 1, "softcap": 2.0},
    "soft-cap": {"softcap": 1.5},
    "bias by head": {"bias": torch.randn(4, QUERIES, KEYS, generator=torch.Generator().manual_seed(3))},
    "padding": {"key_padding": mask(KEYS), "query_padding": mask(QUERIES)},
    "documents": {"keys": QUERIES, "document_ids": torch.arange(QUERIES) // 10},
    "rows that see nothing": {"queries": KEYS, "keys": QUERIES},
    "keep by head": {"keep": mask(4, QUERIES, KEYS)},
}


@pytest.mark.parametrize(
    ("name", "geometry"),
    [(name, geometry) for name in RECIPES for geometry in GEOMETRIES]
    + [(name, geometry) for name in MORE_RECIPES for geometry in ("causal", "one key head", "keep by head")],
)
def test_every_bit_is_that_of_the_specification(name, geometry):
    record, recipe = record_of(**GEOMETRIES[geometry]), resolve(name)
    for found, wanted in zip(run(record, recipe), expected(record, recipe), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("elements", [2**21, 1], ids=["all heads at once", "head by head"])
@pytest.mark.parametrize("kept", [2**24, 0], ids=["kept", "computed again"])
@pytest.mark.parametrize("more", [{}, {"groups": 2, "softcap": 1.5}], ids=["plain", "grouped and capped"])
def test_budgets_change_nothing(monkeypatch, elements, kept, more):
    record = record_of(**more)
    monkeypatch.setattr(module, "ELEMENTS_PER_BLOCK", elements)
    monkeypatch.setattr(module, "KEPT_ELEMENTS", kept)
    for name in ("fa2", "eager"):
        for found, wanted in zip(run(record, resolve(name)), expected(record, resolve(name)), strict=True):
            assert torch.equal(found, wanted)


def test_several_query_heads_of_a_key_head_round_before_they_are_added():
    record = record_of(groups=1)
    _, _, dk, dv = run(record, resolve("fa2"))
    apart = record_of(groups=1)
    apart = replace(apart, k=record.k.expand(4, -1, -1), v=record.v.expand(4, -1, -1))
    _, _, dk_heads, dv_heads = run(apart, resolve("fa2"))
    for found, heads in ((dk, dk_heads), (dv, dv_heads)):
        assert torch.equal(found[0], heads.float().sum(0).bfloat16())


def test_against_autograd_in_float64():
    record = record_of(groups=2, softcap=1.5)
    q, k, v = (t.double().requires_grad_() for t in (record.q, record.k, record.v))
    scores = q @ k.repeat_interleave(2, 0).mT * 0.25
    scores = 1.5 * torch.tanh(scores / 1.5)
    hidden = ~record.geometry.visible((0, QUERIES), (0, KEYS), QUERIES, KEYS)
    o = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 0)
    o.backward(record.do.double())
    exact = (o.detach(), q.grad, k.grad, v.grad)
    for found, truth in zip(run(record, resolve("fa2")), exact, strict=True):
        # T2: a dozen BF16 casts of 2^-9 each on the way, of values at most as large as the largest.
        assert (found.double() - truth).abs().max() <= 12 * 2.0**-9 * truth.abs().max()
        assert (found.double() - truth).norm() <= 4 * 2.0**-9 * truth.norm()


def test_an_unrounded_output_is_rounded_at_the_border_and_unrounded_inside():
    record = record_of()
    unrounded = resolve("fa2+o=fp32,dq=fp32,dkv=fp32")
    found = recipe_gradients(record, unrounded)
    assert not torch.equal(found.o, found.o.bfloat16().float())
    o, dq, dk, dv = run(record, unrounded)
    assert torch.equal(o, found.o.bfloat16())
    for mine, wide in ((dq, found.dq), (dk, found.dk), (dv, found.dv)):
        assert torch.equal(mine, wide.bfloat16())
    # delta saw the unrounded O.
    assert not torch.equal(dq, run(record, resolve("fa2+dq=fp32,dkv=fp32"))[1])


def test_emulated_autocast_around_it_changes_nothing():
    record, recipe = record_of(groups=2), resolve("fa2")
    outside = run(record, recipe)
    with CudaAutocast():
        inside = run(record, recipe)
    for mine, wanted in zip(inside, outside, strict=True):
        assert torch.equal(mine, wanted)


def test_operands_may_lie_anyhow_in_memory():
    record, recipe = record_of(), resolve("fa2")
    wanted = expected(record, recipe)
    operands = [t.bfloat16().transpose(0, 1).contiguous().requires_grad_() for t in (record.q, record.k, record.v)]
    o = RecipeAttention(recipe=recipe)(*(t.transpose(0, 1) for t in operands), record.geometry)
    o.transpose(0, 1).backward(record.do.bfloat16().transpose(0, 1).contiguous())
    assert torch.equal(o, wanted[0])
    for operand, gradient in zip(operands, wanted[1:], strict=True):
        assert torch.equal(operand.grad.transpose(0, 1), gradient)


def test_a_nan_stays_in_the_rows_that_see_it():
    record = record_of()
    record.k[1, 30] = torch.nan
    o = run(record, resolve("fa2"))[0]
    # Query i sees the keys up to i + 8.
    sees = torch.arange(QUERIES) + KEYS - QUERIES >= 30
    assert o[1, sees].isnan().all()
    assert not o[1, ~sees].isnan().any()
    assert not o[[0, 2, 3]].isnan().any()


def test_without_gradients_nothing_is_kept():
    record = record_of()
    with torch.no_grad():
        o = RecipeAttention(recipe=resolve("fa2"))(*(t.bfloat16() for t in (record.q, record.k, record.v)),
                                                   record.geometry)  # fmt: skip
    assert not o.requires_grad
    assert torch.equal(o, expected(record, resolve("fa2"))[0])


def test_refusals_name_the_reason():
    with pytest.raises(RecipeError, match="fa3-fp8 is a forward pass only.*use --activations fp32") as refusal:
        RecipeAttention(recipe=resolve("fa3-fp8"))
    assert "\n" not in str(refusal.value)
    q = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="k is torch.float32"):
        RecipeAttention(recipe=resolve("fa2"))(q, q.float(), q, Geometry(scale=1.0))
    with pytest.raises(ValueError, match="2 query heads cannot share 3"):
        RecipeAttention(recipe=resolve("fa2"))(q, q.repeat(2, 1, 1)[:3], q, Geometry(scale=1.0))
