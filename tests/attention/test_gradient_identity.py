"""What a delta error does to dW_Q, against two full float64 backward passes in which only delta differs."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.evidence.gradient import delta_part, gradient_parts, weight_gradient
from bf16forensics.recipe.derive import resolve

#: Kinds of call over which the identity must hold.
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"queries": 50, "size": 24},
    "grouped": {"queries": 40, "heads": 4, "kv_heads": 2},
    "softcap": {"queries": 30, "softcap": 1.3, "spread": 3.0},
    "window-and-bias": {
        "queries": 40,
        "window": 9,
        "bias": np.random.default_rng(1).standard_normal((2, 40, 40)).astype(np.float32),
    },
    "masked-rows": {"queries": 40, "keep": np.random.default_rng(2).random((2, 40, 40)) < 0.1},
    "peaked": {"queries": 60, "size": 64, "spread": 8.0},
}
RECIPES = ("fa2", "fa2+o_bar=bf16", "paper")


def width(queries: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(queries, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CALLS)
def test_delta_error_times_carrier_is_the_gradient_error(
    oracle: ModuleType, record_of: Any, name: str, recipe: str
) -> None:
    """alpha sum delta_err (PK)^T X = dW_Q(hp) - dW_Q(lp) to 1e-10, the two sides by dense backward passes."""
    call = oracle.draw(30 + len(name), **CALLS[name])
    dual = dual_pass(record_of(call), resolve(recipe), "fp64")
    x = width(call.q.shape[1])
    with_hp = torch.from_numpy(oracle.dense(call).dq)
    with_lp = torch.from_numpy(oracle.dense(call, delta=dual.delta.delta_lp.numpy()).dq)
    difference = weight_gradient(with_hp, x) - weight_gradient(with_lp, x)
    formula = -delta_part(dual.dq.carrier_hp, dual.delta.delta_err, x)
    assert difference.norm() > 0
    assert (formula - difference).norm() <= 1e-10 * weight_gradient(with_hp, x).norm()
    # Relative to the error itself as well: it is far above float64 noise.
    assert (formula - difference).norm() <= 1e-8 * difference.norm()


@pytest.mark.parametrize("recipe", [*RECIPES, "fa2+row_sum=bf16", "fa2+scores=bf16"])
@pytest.mark.parametrize("name", ["causal", "grouped", "masked-rows", "peaked"])
def test_defect_times_the_recipes_carrier(oracle: ModuleType, record_of: Any, name: str, recipe: str) -> None:
    """The twin with P_lp: the same P on both sides, delta of the recipe against delta consistent with that P."""
    call = oracle.draw(50 + len(name), **CALLS[name])
    dual = dual_pass(record_of(call), resolve(recipe), "fp64")
    heads, queries, _ = call.q.shape
    x = width(queries)
    dq_of: dict[str, list[np.ndarray]] = {"consistent": [], "own": []}
    for head in range(heads):
        group = call.kv_head(head)
        k, v, do = (a.astype(np.float64) for a in (call.k[group], call.v[group], call.do[head]))
        p = recipe_probabilities(oracle, call, head, dual, resolve(recipe))
        dp = do @ v.T
        row_sum = p.sum(1)
        consistent = (p * dp).sum(1) / np.where(row_sum == 0, 1.0, row_sum)
        for key, delta in (("consistent", consistent), ("own", dual.delta.delta_lp[head].numpy())):
            dq_of[key].append(call.scale * ((p * (dp - delta[:, None])) @ k))
    first, second = (torch.from_numpy(np.stack(values)) for values in dq_of.values())
    difference = weight_gradient(first, x) - weight_gradient(second, x)
    formula = -delta_part(dual.dq.carrier_lp, dual.delta.defect, x)
    # P here is recomputed from lse in float64, the package's P is FP32: relative 2^-17 at exponents of some dozens.
    assert (formula - difference).norm() <= 1e-4 * difference.norm()
    assert (dual.dq.consistent - first).norm() <= 1e-4 * first.norm()


def recipe_probabilities(oracle: ModuleType, call: Any, head: int, dual: Any, recipe: Any) -> np.ndarray:
    s = oracle.exact_product(call.q[head], call.k[call.kv_head(head)].T)
    if recipe.scores == "bf16":
        s = oracle.bf16(oracle.bf16(s) * np.float32(call.scale))
    nats = s.astype(np.float64) * (1.0 if recipe.scores == "bf16" else call.scale)
    seen = call.visible(head)
    lse = np.where(seen.any(1), dual.lse_lp[head].numpy(), 0.0)[:, None]
    return np.where(seen, np.exp(np.where(seen, nats - lse, 0.0)), 0.0)


@pytest.mark.parametrize("recipe", [*RECIPES, "sdpa-math", "fa2+ds=fp32,dq=fp32", "fa2+gradients_at=tile"])
@pytest.mark.parametrize("name", CALLS)
def test_telescope_adds_up(oracle: ModuleType, record_of: Any, name: str, recipe: str) -> None:
    """hp + scores + defect + casts = lp: in float64 from the stages, in FP32 from what the evidence keeps."""
    call = oracle.draw(70 + len(name), **CALLS[name])
    dual = dual_pass(record_of(call), resolve(recipe), "fp64")
    x = width(call.q.shape[1])
    dq, delta = dual.dq, dual.delta
    with_delta = dq.consistent - dq.carrier_lp * delta.defect[..., None]
    # The recipe's dS before its cast, in float64, is what the cast stages start from.
    uncast = (with_delta - dq.cast_ds).norm()
    exact_parts = [dq.consistent - dq.hp, with_delta - dq.consistent, dq.cast_ds - with_delta, dq.lp - dq.cast_ds]
    total = sum((weight_gradient(part, x) for part in exact_parts), torch.zeros(()))
    whole = weight_gradient(dq.lp, x) - weight_gradient(dq.hp, x)
    assert (total - whole).norm() <= 1e-10 * weight_gradient(dq.hp, x).norm()
    parts = gradient_parts(delta, dq, x)
    # Each FP32 product errs by 2^-24 of its terms' sizes, over some dozens of rows.
    size = (dq.hp.abs().amax() * x.abs().amax() * x.shape[0]).item()
    np.testing.assert_allclose(parts.scores + parts.defect + parts.cast_ds + parts.cast_dq, parts.total, atol=0, rtol=0)
    np.testing.assert_allclose(parts.total, whole.numpy(), rtol=0, atol=2.0**-18 * size)
    np.testing.assert_allclose(parts.hp, weight_gradient(dq.hp, x).numpy(), rtol=0, atol=2.0**-18 * size)
    np.testing.assert_allclose(
        parts.full, delta_part(dq.carrier_hp, delta.delta_err, x).numpy(), rtol=0, atol=2.0**-18 * size
    )
    np.testing.assert_allclose(
        parts.defect, delta_part(dq.carrier_lp, delta.defect, x).numpy(), rtol=0, atol=2.0**-18 * size
    )
    if recipe.endswith("ds=fp32,dq=fp32"):
        assert not parts.cast_dq.any()
        # Without the cast of dS only the FP32 noise of the recipe's own backward pass is left.
        assert uncast <= 1e-4 * dq.hp.norm()


def test_a_planted_delta_error_is_carried(oracle: ModuleType, record_of: Any) -> None:
    """A constant error c in every row: the formula is linear in it, and its sign is that of dW_Q(hp) - dW_Q(lp)."""
    call = oracle.draw(90, queries=30)
    dense = oracle.dense(call)
    dual = dual_pass(record_of(call), resolve("fa2"), "fp64")
    x = width(30)
    error = torch.full((2, 30), 0.25, dtype=torch.float64)
    moved = oracle.dense(call, delta=dense.delta + 0.25)
    lp_minus_hp = weight_gradient(torch.from_numpy(moved.dq - dense.dq), x)
    assert torch.allclose(delta_part(dual.dq.carrier_hp, error, x), lp_minus_hp, rtol=1e-10, atol=1e-12)
    assert torch.allclose(torch.from_numpy(dense.carrier), dual.dq.carrier_hp, rtol=1e-10, atol=1e-12)
