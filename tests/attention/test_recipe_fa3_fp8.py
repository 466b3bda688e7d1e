"""The preset fa3-fp8 against NumPy FP32 with the E4M3 of ml_dtypes."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.operands import forward_operands
from bf16forensics.errors import RecipeError
from bf16forensics.recipe.derive import resolve

F32 = np.float32
FP8 = resolve("fa3-fp8")
EXACT = resolve("fa3-fp8+arithmetic=exact")

#: Arguments of `draw`: head sizes on either side of a tile rule, grouped heads, masks, rows over several tiles.
CALLS: dict[str, dict[str, Any]] = {
    "d64": {"queries": 200, "size": 64, "spread": 2.0},
    "d96-not-causal": {"queries": 40, "keys": 300, "size": 96, "causal": False},
    "d128": {"queries": 60, "keys": 500, "size": 128},
    "grouped": {"queries": 180, "size": 64, "heads": 6, "kv_heads": 2},
    "window": {"queries": 200, "size": 32, "window": 30},
    "softcap": {"queries": 100, "size": 64, "softcap": 10.0, "spread": 4.0},
    "wide-values": {"queries": 60, "size": 32, "value_size": 48},
}
#: Keys a tile by head size: tile_size_fwd_sm90 for 1-byte elements.
TILE_K = {32: 160, 64: 160, 96: 128, 128: 224}


def e4m3(values: np.ndarray) -> np.ndarray:
    """FP32 to the nearest E4M3 number, as FP32."""
    assert values.dtype == F32
    return values.astype(ml_dtypes.float8_e4m3fn).astype(F32)


def fp8_rows(oracle: ModuleType, call: Any, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """O, the O before its last cast, and lse of one head."""
    kv = call.kv_head(head)
    group = call.q.shape[0] // call.k.shape[0]
    d_q = F32(np.abs(call.q[kv * group : (kv + 1) * group]).max()) / F32(448)
    d_k, d_v = (F32(np.abs(t[kv]).max()) / F32(448) for t in (call.k, call.v))
    q, k, v = e4m3(call.q[head] / d_q), e4m3(call.k[kv] / d_k), e4m3(call.v[kv] / d_v)
    c = F32(F32(call.scale * np.log2(np.e)) * F32(d_q * d_k))
    n, m = q.shape[0], k.shape[0]
    seen = call.visible(head)
    scores = oracle.exact_product(q, k.T)
    if call.softcap is not None:
        unit = c / np.log2(np.e)
        scores = (call.softcap * np.tanh(scores.astype(np.float64) * unit / call.softcap)).astype(F32)
        c = F32(np.log2(np.e))
    row_max = np.full(n, -np.inf, F32)
    row_sum, o_bar = np.zeros(n, F32), np.zeros((n, v.shape[1]), F32)
    tile_k = TILE_K[q.shape[1]]
    for start in reversed(range(0, m, tile_k)):
        span = slice(start, min(start + tile_k, m))
        s = np.where(seen[:, span], scores[:, span], -np.inf).astype(F32)
        new = np.maximum(row_max, s.max(1))
        safe = np.where(np.isfinite(new), new, F32(0)).astype(F32)
        # FP32 steps; the exponential itself in float64, rounded once.
        exponent = (s * c).astype(F32) - (safe * c - F32(8))[:, None]
        p = np.exp2(exponent.astype(np.float64)).astype(F32)
        alpha = np.exp2(((row_max * c).astype(F32) - safe * c).astype(np.float64)).astype(F32)
        row_sum = (alpha * row_sum).astype(F32) + p.astype(np.float64).sum(1).astype(F32)
        o_bar = (o_bar * alpha[:, None]).astype(F32) + oracle.exact_product(e4m3(p), v[span])
        row_max = new
    inverse = F32(1) / np.where(row_sum == 0, F32(1), row_sum)
    unrounded = o_bar * (inverse * d_v)[:, None]
    anchor = np.where(np.isfinite(row_max), row_max, 0).astype(np.float64)
    with np.errstate(divide="ignore"):
        lse = anchor * (float(c) / np.log2(np.e)) + np.log(row_sum.astype(np.float64) / 256.0)
    return oracle.bf16(unrounded), unrounded, lse


@pytest.mark.parametrize("name", CALLS)
def test_against_numpy(oracle: ModuleType, record_of: Any, name: str) -> None:
    """T2: an FP32 step on the way to P-bar flips its E4M3 rounding in about 1e-5 of the elements."""
    call = oracle.draw(700 + len(name), **CALLS[name])
    dual = dual_pass(record_of(call), EXACT)
    differing, outside = 0, 0
    for head in range(call.q.shape[0]):
        o, unrounded, lse = fp8_rows(oracle, call, head)
        found = dual.o_lp[head].numpy()
        differing += int((found != o).sum())
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(unrounded), 2.0**-100))) - 7)
        largest = float(np.abs(call.v).max())
        error = np.abs(found - unrounded)
        outside += int((error > step / 2 + 64 * 2.0**-24 * largest).sum())
        # One flip moves a term by 2^-3 of itself at most.
        assert (error <= step / 2 + 2.0**-3 * largest).all()
        np.testing.assert_allclose(dual.lse_lp[head].numpy(), lse, rtol=2.0**-21, atol=2.0**-19)
    assert differing <= 0.005 * dual.o_lp.numel()
    assert outside <= 0.002 * dual.o_lp.numel()


def test_what_the_comparison_can_tell(oracle: ModuleType, record_of: Any) -> None:
    """Every ingredient moves more outputs than the tolerance above."""
    call = oracle.draw(703, **CALLS["d64"])
    record = record_of(call)
    expected = fp8_rows(oracle, call, 0)[0]
    for change in ("operands=stored", "p_bar=bf16", "p_scale=1", "p_bar=e5m2", "o=fp32", "tile_order=ascending"):
        found = dual_pass(record, resolve(f"fa3-fp8+arithmetic=exact,{change}")).o_lp[0].numpy()
        assert (found != expected).mean() > 0.01, change


def test_factors_belong_to_key_value_heads(oracle: ModuleType, record_of: Any) -> None:
    """q's factor counts over the heads that share a key/value head, as the library's descale tensors do."""
    call = oracle.draw(720, heads=4, kv_heads=2, queries=30, size=32)
    call.q[1] *= 4.0
    record = record_of(call)
    first, second, third = (forward_operands(record, FP8, slice(h, h + 1)) for h in (0, 1, 2))
    assert first.scale == second.scale
    assert first.scale != third.scale
    assert first.value_scale == np.abs(call.v[0]).max() / F32(448)
    assert second.q.abs().max() == 448
    assert first.q.abs().max() <= 448 / 2
    for operands, kv in ((first, 0), (third, 1)):
        assert operands.k.abs().max() == 448
        assert operands.v.abs().max() == 448
        # Half a step of E4M3, and of its smallest number.
        error = np.abs(operands.v.numpy()[0] * operands.value_scale - call.v[kv])
        assert (error <= 2.0**-4 * np.abs(call.v[kv]) + 2.0**-10 * operands.value_scale).all()


def test_one_head_more_changes_nothing_of_another_group(oracle: ModuleType, record_of: Any) -> None:
    record = record_of(oracle.draw(721, heads=4, kv_heads=2, queries=140, size=32))
    together = dual_pass(record, FP8)
    alone = dual_pass(replace(record, q=record.q[2:], do=record.do[2:], k=record.k[1:], v=record.v[1:]), FP8)
    assert torch.equal(together.o_lp[2:], alone.o_lp)
    assert torch.equal(together.lse_lp[2:], alone.lse_lp)


def test_zeros_have_no_factor(oracle: ModuleType, record_of: Any) -> None:
    call = oracle.draw(722, queries=20, size=32)
    for name in ("q", "k", "v"):
        zeroed = replace(record_of(call), **{name: torch.zeros_like(getattr(record_of(call), name))})
        dual = dual_pass(zeroed, FP8)
        assert dual.o_lp.isfinite().all()
        assert name != "v" or (dual.o_lp == 0).all()
        # All scores are 0: the log-sum-exp counts the keys. P-bar's factor of 2^8 is not in it.
        if name != "v":
            expected = torch.arange(1, 21).double().log()
            torch.testing.assert_close(dual.lse_lp[0], expected, rtol=2.0**-20, atol=2.0**-20)


def test_what_is_not_finite_stays_in_its_rows(oracle: ModuleType, record_of: Any) -> None:
    record = record_of(oracle.draw(723, queries=20, size=32))
    clean = dual_pass(record, FP8)
    spoilt = record.q.clone()
    spoilt[0, 3, 5] = torch.nan
    dual = dual_pass(replace(record, q=spoilt), FP8)
    assert dual.o_lp[0, 3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(dual.o_lp[0, others], clean.o_lp[0, others])


def test_it_is_a_forward_pass_only(oracle: ModuleType, record_of: Any) -> None:
    record = record_of(oracle.draw(724, queries=20, size=32))
    assert record.do is not None
    dual = dual_pass(record, FP8)
    assert dual.delta is None
    assert dual.dq is None
    assert torch.equal(dual.o_hp, dual_pass(record, resolve("fa2")).o_hp)
    with pytest.raises(RecipeError, match="recipe fa3-fp8 is a forward pass only"):
        recipe_gradients(record, FP8)
    with pytest.raises(RecipeError, match=r"recipe fa2\+passes=forward is a forward pass only"):
        recipe_gradients(record, resolve("fa2+passes=forward"))


def test_a_derived_backward_pass_takes_the_stored_tensors(oracle: ModuleType, record_of: Any) -> None:
    """Without any rounding but that of q, k and v, gradients are those of the stored tensors at the FP8 forward's P."""
    record = record_of(oracle.draw(725, heads=2, queries=40, size=32, causal=False))
    recipe = resolve("fa3-fp8+passes=both,p_bar=fp32,o=fp32")
    dual, found = dual_pass(record, recipe), recipe_gradients(record, recipe)
    assert dual.dq is not None
    torch.testing.assert_close(found.dq.double(), dual.dq.lp, rtol=1e-4, atol=1e-5)
    k, v, do = (t.double() for t in (record.k, record.v, record.do))
    for head in range(2):
        forward = forward_operands(record, recipe, slice(head, head + 1))
        p = torch.softmax(forward.q[0].double() @ forward.k[0].double().T * forward.scale, -1)
        o = p @ forward.v[0].double() * forward.value_scale
        ds = p * (do[head] @ v[head].T - (do[head] * o).sum(-1, keepdim=True)) * record.geometry.scale
        torch.testing.assert_close(found.dq[head].double(), ds @ k[head], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.dk[head].double(), ds.T @ record.q[head].double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.dv[head].double(), p.T @ do[head], rtol=1e-4, atol=1e-5)
