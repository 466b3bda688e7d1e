"""What holds for every preset: limits without rounding, flips, empty rows, independence of company."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.dual import dual_pass
from bf16forensics.recipe.derive import flip, resolve, rounding_points
from bf16forensics.recipe.points import POINTS
from bf16forensics.recipe.presets import PRESETS

NAMES = [preset.name for preset in PRESETS]
BOTH_PASSES = [preset.name for preset in PRESETS if preset.passes == "both"]


def unrounded(name: str) -> str:
    """The recipe with every rounding set to FP32 and without its approximations."""
    points = [f"{spec.name}=fp32" for spec in POINTS if spec.is_rounding_point]
    preset = resolve(name)
    points.append(f"exponential={'exp' if preset.exponential in ('exp', 'fexp_u20') else 'exp2'}")
    return f"{name}+operands=stored,{','.join(points)}"


def autograd(record: Any) -> tuple[torch.Tensor, ...]:
    """O, dQ, dK and dV in float64 by automatic differentiation of a dense softmax."""
    group = record.num_heads // record.num_kv_heads
    q, k, v = (t.double().requires_grad_() for t in (record.q, record.k, record.v))
    scores = q @ k.repeat_interleave(group, 0).mT * record.geometry.scale
    if record.geometry.softcap is not None:
        scores = record.geometry.softcap * torch.tanh(scores / record.geometry.softcap)
    n, m = record.q.shape[1], record.k.shape[1]
    visible = record.geometry.visible((0, n), (0, m), n, m)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    o = scores.softmax(-1) @ v.repeat_interleave(group, 0)
    o.backward(record.do.double())
    return o.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("name", BOTH_PASSES)
@pytest.mark.parametrize("shape", [
    {"queries": 150, "size": 32, "heads": 4, "kv_heads": 2},
    {"queries": 150, "size": 32, "softcap": 3.0, "spread": 3.0},
    {"queries": 40, "keys": 150, "size": 32, "causal": False, "softcap": 20.0},
    {"queries": 150, "size": 16, "window": 9},
], ids=["grouped", "softcap", "softcap-not-causal", "window"])  # fmt: skip
def test_without_rounding_it_is_the_gradient(
    oracle: ModuleType, record_of: Any, name: str, shape: dict[str, Any]
) -> None:
    """T2: FP32 sums of at most 150 terms, and exponents up to 2^4 in FP32."""
    record = record_of(oracle.draw(len(name), **shape))
    recipe = resolve(unrounded(name))
    found = recipe_gradients(record, recipe)
    expected = autograd(record)
    for mine, exact in zip((found.o, found.dq, found.dk, found.dv), expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=150 * 2.0**-23 * exact.abs().max().item())
    dual = dual_pass(record, recipe, "fp64")
    assert dual.dq is not None
    for mine in (dual.dq.lp, dual.dq.hp, dual.dq.consistent, dual.dq.cast_ds):
        torch.testing.assert_close(mine, expected[1], rtol=2e-5, atol=150 * 2.0**-23 * expected[1].abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_without_rounding_it_is_the_output(oracle: ModuleType, record_of: Any, name: str) -> None:
    record = record_of(oracle.draw(3, queries=300, size=64))
    dual = dual_pass(record, resolve(unrounded(name)))
    assert dual.o_err.abs().max() <= 2.0**-18 * record.v.abs().max()
    assert (dual.lse_lp - dual.lse_hp).abs().max() <= 2.0**-18
    assert dual_pass(record, resolve(name)).o_err.abs().max() > 2.0**-12


@pytest.mark.parametrize("name", BOTH_PASSES)
def test_softcap_of_both_passes(oracle: ModuleType, record_of: Any, name: str) -> None:
    """T2: with all its roundings, dQ of `recipe_gradients` is that of the dual pass."""
    record = record_of(oracle.draw(4, queries=200, size=32, softcap=4.0, spread=3.0))
    dual, found = dual_pass(record, resolve(name), "fp32"), recipe_gradients(record, resolve(name))
    assert dual.dq is not None
    assert torch.equal(found.o.double(), dual.o_lp)
    size = dual.dq.lp.abs().max()
    assert ((found.dq.double() - dual.dq.lp).abs() <= 2.0**-7 * dual.dq.lp.abs() + 2.0**-8 * size).all()
    assert (found.dq.bfloat16() != dual.dq.lp.bfloat16()).double().mean() < 0.02


FLIPS = [(name, point) for name in NAMES for point in rounding_points(resolve(name))]


@pytest.mark.parametrize(("name", "point"), FLIPS, ids=["+".join(pair) for pair in FLIPS])
def test_every_flip_runs_under_its_own_name(oracle: ModuleType, record_of: Any, name: str, point: str) -> None:
    """One point in FP32 changes some tensor of one of the passes, and the name says which point."""
    record = record_of(oracle.draw(5, heads=2, kv_heads=1, queries=140, size=80))
    recipe = resolve(name)
    flipped = flip(recipe, point)
    assert flipped.name == f"{name}+{point}=fp32"
    assert resolve(flipped.name) == flipped
    before, after = dual_pass(record, recipe, "fp32"), dual_pass(record, flipped, "fp32")
    pairs = [(before.o_lp, after.o_lp), (before.lse_lp, after.lse_lp)]
    if recipe.passes == "both":
        mine, other = recipe_gradients(record, recipe), recipe_gradients(record, flipped)
        pairs += [(getattr(mine, t), getattr(other, t)) for t in ("o", "dq", "dk", "dv")]
        assert before.dq is not None
        assert after.dq is not None
        pairs += [(before.dq.lp, after.dq.lp)]
    assert all(t.isfinite().all() for _, t in pairs)
    assert any(not torch.equal(*pair) for pair in pairs)
    # High precision does not know the recipe.
    assert torch.equal(before.o_hp, after.o_hp)


@pytest.mark.parametrize("name", [*NAMES, "fa2+shifted=e4m3", "fa2+lse=e4m3", "fa2+p_bar=e5m2,scores=e5m2"])
@pytest.mark.parametrize("reference", ["fp64", "fp32"])
def test_rows_that_see_nothing_are_zero(oracle: ModuleType, record_of: Any, name: str, reference: str) -> None:
    keep = np.random.default_rng(8).random((2, 150, 300)) < 0.5
    keep[0, 10:140] = False
    keep[1] = False
    call = oracle.draw(9, queries=150, keys=300, causal=False, keep=keep)
    dual = dual_pass(record_of(call), resolve(name), reference)
    empty = torch.from_numpy(~keep.any(-1))
    assert (dual.o_lp[empty] == 0).all()
    assert (dual.o_lp[~empty] != 0).any()
    assert (dual.lse_lp[empty] == -torch.inf).all()
    assert dual.lse_lp[~empty].isfinite().all()
    assert not dual.o_lp.isnan().any()
    for part in (dual.delta, dual.dq):
        for values in () if part is None else (getattr(part, field) for field in part.__dataclass_fields__):
            assert (values[empty] == 0).all()
            assert not values.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_one_visible_key_is_the_output(oracle: ModuleType, record_of: Any, name: str) -> None:
    """O is the value itself; in E4M3, within half a step of it."""
    call = oracle.draw(20, queries=1, keys=1, size=8, spread=50.0)
    o = dual_pass(record_of(call), resolve(name)).o_lp.numpy()
    limit = (
        2.0**-4 * np.abs(call.v) + 2.0**-10 * np.abs(call.v).max() / 448 if "fp8" in name else 2.0**-13 * abs(call.v)
    )
    assert (np.abs(o - call.v) <= limit).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_head_alone_and_in_company(oracle: ModuleType, record_of: Any, name: str) -> None:
    """T0: the bytes of a head do not depend on its company, nor on where it lay in memory."""
    record = record_of(oracle.draw(105, heads=4, queries=200, size=64))
    together = dual_pass(record, resolve(name))
    views = {
        field: torch.stack([getattr(record, field)] * 2, -1)[..., 1].transpose(0, 1).contiguous().transpose(0, 1)
        for field in ("q", "k", "v", "do")
    }
    assert not views["q"].is_contiguous()
    assert torch.equal(dual_pass(replace(record, **views), resolve(name)).o_lp, together.o_lp)
    for head in (0, 3):
        one = {field: getattr(record, field)[head : head + 1] for field in ("q", "k", "v", "do")}
        alone = dual_pass(replace(record, **one), resolve(name))
        assert torch.equal(alone.o_lp[0], together.o_lp[head])
        assert torch.equal(alone.lse_lp[0], together.lse_lp[head])
        if together.dq is not None:
            assert alone.dq is not None
            assert torch.equal(alone.dq.lp[0], together.dq.lp[head])


@pytest.mark.parametrize(("what", "tile_k"), [
    ({}, 128), ({"causal": False}, 192), ({"causal": False, "window": 100}, 128), ({"window": 100}, 128),
])  # fmt: skip
def test_causal_calls_have_tiles_of_their_own(
    oracle: ModuleType, record_of: Any, what: dict[str, Any], tile_k: int
) -> None:
    """T0 against fa2 with that tile size; a BF16 O-bar at every tile shows the tiles."""
    record = record_of(oracle.draw(30, heads=1, queries=400, size=64, **what))
    at_tile = "o_bar=bf16,o_bar_at=tile"
    fa3, recipe = resolve(f"fa3+{at_tile}"), resolve(f"fa2+{at_tile},tile_q=192,tile_k={tile_k}")
    found = dual_pass(record, fa3).o_lp
    assert torch.equal(found, dual_pass(record, recipe).o_lp)
    assert torch.equal(recipe_gradients(record, fa3).dk, recipe_gradients(record, recipe).dk)
    other = dual_pass(record, resolve(f"fa2+{at_tile},tile_q=192,tile_k={320 - tile_k}")).o_lp
    assert not torch.equal(found, other)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "fp16", "bf16"])
def test_every_format_rounds_the_output(oracle: ModuleType, record_of: Any, fmt: str) -> None:
    """O in a format is the FP32 O of the same recipe, rounded by torch's own cast."""
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16}
    record = record_of(oracle.draw(31, queries=100, size=64))
    exact = dual_pass(record, resolve("fa2+o=fp32")).o_lp.float()
    found = dual_pass(record, resolve(f"fa2+o={fmt}")).o_lp
    assert torch.equal(found, exact.to(dtypes[fmt]).double())


@pytest.mark.parametrize("name", ["fa2", "eager", "sdpa-math"])
def test_a_factor_of_p_bar_is_exact_where_nothing_overflows(oracle: ModuleType, record_of: Any, name: str) -> None:
    """2^8 in P-bar and in the row sum divides out: T0 for exp, and within an FP32 step of the exponent for exp2."""
    record = record_of(oracle.draw(32, queries=100, size=64))
    plain, scaled = (dual_pass(record, resolve(f"{name}+p_scale={factor}")) for factor in (1, 256))
    different = (plain.o_lp != scaled.o_lp).double().mean()
    assert different == 0 if resolve(name).exponential == "exp" else different <= 0.005
    torch.testing.assert_close(plain.lse_lp, scaled.lse_lp, rtol=2.0**-20, atol=2.0**-20)
