"""Rows in which one key has nearly all the probability: the defect is tiny beside O, and FP32 must still see it."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.recipe.derive import resolve

FA2 = resolve("fa2")


def saturated_call(oracle: ModuleType, seed: int, level: float) -> Any:
    """Scores `level` (2,000 or -2,000) for one key of a row and 7 to 14 nats less for the others; D 2, E 64.

    Scores are sums of two products that FP32 holds exactly, so the references differ in cancellation alone.
    """
    rng = np.random.default_rng(seed)
    keys = 40
    gaps = rng.integers(7 * 8, 14 * 8, keys) / 8.0
    top = rng.integers(0, keys)
    gaps[top] = 0.0
    q = np.ones((1, 64, 2), np.float32)
    q[..., 0] = np.float32(np.sign(level) * 16)
    k = np.stack([np.full(keys, abs(level) / 16), -gaps], -1)[None].astype(np.float32)
    v = oracle.bf16((rng.standard_normal((1, keys, 64)) * 2).astype(np.float32))
    do = oracle.bf16(rng.standard_normal((1, 64, 64)).astype(np.float32))
    assert (oracle.bf16(k) == k).all()
    return oracle.Call(q=q, k=k, v=v, do=do, scale=1.0, causal=False)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("level", [2000.0, -2000.0])
@pytest.mark.parametrize("seed", range(3))
def test_fp32_reference_keeps_the_delta_error(oracle: ModuleType, record_of: Any, seed: int, level: float) -> None:
    """T2: within 2 % of float64, where a difference of FP32 deltas is off by more than 10 times that."""
    record = record_of(saturated_call(oracle, seed, level))
    exact, found = dual_pass(record, FA2, "fp64"), dual_pass(record, FA2, "fp32")
    assert (exact.lse_hp - level).abs().max() < 0.1
    # A defect there is: O_lp is not the exact O in BF16.
    assert exact.delta.delta_err.abs().max() > 0
    anchored = relative(found.delta.delta_err, exact.delta.delta_err)
    assert anchored < 0.02
    # The naive way: softmax, O and delta in FP32, then a difference.
    scores = record.q @ record.k.transpose(-1, -2)
    o = torch.softmax(scores, -1) @ record.v
    naive = ((record.do * found.o_lp.float()).sum(-1) - (record.do * o).sum(-1)).double()
    assert relative(naive, exact.delta.delta_err) > 10 * max(anchored, 1e-6)


@pytest.mark.parametrize("level", [2000.0, -2000.0])
@pytest.mark.parametrize("recipe", ["fa2", "fa2+o_bar=bf16", "paper"])
def test_fp32_reference_keeps_the_defect_and_dq(oracle: ModuleType, record_of: Any, recipe: str, level: float) -> None:
    record = record_of(saturated_call(oracle, 5, level))
    exact, found = (dual_pass(record, resolve(recipe), reference) for reference in ("fp64", "fp32"))
    assert relative(found.delta.defect, exact.delta.defect) < 0.02
    assert relative(found.o_err, exact.o_err) < 0.02
    assert relative(found.dq.hp, exact.dq.hp) < 0.02
    assert relative(found.dq.consistent, exact.dq.consistent) < 0.02


def test_float64_reference_against_a_wider_one(oracle: ModuleType, record_of: Any) -> None:
    """T2: the anchored float64 delta error against exact fractions of the same probabilities, to 1e-9."""
    from fractions import Fraction

    call = saturated_call(oracle, 6, 2000.0)
    dual = dual_pass(record_of(call), FA2, "fp64")
    gaps = call.k[0, :, 1].astype(np.float64)
    weights = [Fraction(float(np.exp(gap))) for gap in gaps]
    total = sum(weights, Fraction(0))
    for row in range(0, 64, 9):
        delta_hp = (
            sum(
                (
                    w
                    * sum(
                        (Fraction(float(d)) * Fraction(float(x)) for d, x in zip(call.do[0, row], v, strict=True)),
                        Fraction(0),
                    )
                    for w, v in zip(weights, call.v[0], strict=True)
                ),
                Fraction(0),
            )
            / total
        )
        delta_lp = sum(
            (Fraction(float(d)) * Fraction(float(o)) for d, o in zip(call.do[0, row], dual.o_lp[0, row], strict=True)),
            Fraction(0),
        )
        error = float(Fraction(float(np.float32(float(delta_lp)))) - delta_hp)
        assert dual.delta.delta_err[0, row].item() == pytest.approx(error, rel=1e-9)


def test_a_single_visible_key_has_no_error(oracle: ModuleType, record_of: Any) -> None:
    """T0: O is the value itself, on both sides and in both references."""
    call = oracle.draw(20, queries=1, keys=1, size=8, spread=50.0)
    for reference in ("fp32", "fp64"):
        for name in ("fa2", "paper", "sdpa-math"):
            dual = dual_pass(record_of(call), resolve(name), reference)
            assert torch.equal(dual.o_lp, torch.from_numpy(call.v).double())
            assert torch.equal(dual.o_hp, dual.o_lp)
            assert (dual.o_err == 0).all()
            # delta is one FP32 rounding of an exact sum.
            assert (dual.delta.delta_err.abs() <= 2.0**-24 * dual.delta.magnitude).all()
