"""The W_Q gradient and its error against dense float64 computations, and the functional figure."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence.functional import score_variance
from bf16forensics.evidence.gradient import GradientParts, delta_part, gradient_parts, weight_gradient
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.presets import FA2

Make = Callable[..., AttentionRecord]
RECIPES = ("fa2", "paper", "sdpa-math", "fa2+o=fp32,ds=fp32,dq=fp32")


def dense_probabilities(record: AttentionRecord) -> torch.Tensor:
    group = record.num_heads // record.num_kv_heads
    k = record.k.double().repeat_interleave(group, 0)
    scores = record.q.double() @ k.transpose(1, 2) * record.geometry.scale
    queries, keys = scores.shape[1:]
    visible = record.geometry.visible((0, queries), (0, keys), queries, keys)
    assert visible is not None
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1).nan_to_num(nan=0.0)


def dense_weight_gradient(record: AttentionRecord, delta: torch.Tensor) -> torch.Tensor:
    """dW_Q in float64 with a given delta [H, N]."""
    assert record.do is not None
    assert record.x is not None
    group = record.num_heads // record.num_kv_heads
    k, v = (t.double().repeat_interleave(group, 0) for t in (record.k, record.v))
    dp = record.do.double() @ v.transpose(1, 2)
    ds = dense_probabilities(record) * (dp - delta[..., None])
    return torch.einsum("hnd,nc->hdc", record.geometry.scale * ds @ k, record.x.double())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("sharpness", [0.3, 6.0])
def test_the_formula_is_the_difference_of_two_gradients_with_two_deltas(
    make_record: Make, recipe: str, kv_heads: int, sharpness: float
) -> None:
    record = make_record(1, kv_heads=kv_heads, sharpness=sharpness)
    dual = dual_pass(record, resolve(recipe), "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.x is not None
    expected = dense_weight_gradient(record, dual.delta.delta_lp) - dense_weight_gradient(record, dual.delta.delta_hp)
    found = delta_part(dual.dq.carrier_hp, dual.delta.delta_err, record.x.double())
    gradient = dense_weight_gradient(record, dual.delta.delta_hp)
    assert float((found - expected).norm()) <= 1e-10 * float(gradient.norm())
    # The same by the stage that is called high precision.
    stage = weight_gradient(dual.dq.hp, record.x.double())
    assert float((stage - gradient).norm()) <= 1e-10 * float(gradient.norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_add_up_to_the_whole_error(make_record: Make, recipe: str) -> None:
    record = make_record(2, sharpness=3.0)
    dual = dual_pass(record, resolve(recipe), "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.x is not None
    parts = gradient_parts(dual.delta, dual.dq, record.x)
    whole = weight_gradient(dual.dq.lp - dual.dq.hp, record.x.double()).numpy()
    # FP32 products of float64 differences: 24 terms, each within 2^-24 of the part it belongs to.
    size = sum(np.abs(getattr(parts, name)).max() for name in ("scores", "defect", "cast_ds", "cast_dq"))
    assert np.abs(parts.total - whole).max() <= 1e-5 * size + 1e-12
    expected = delta_part(dual.dq.carrier_hp, dual.delta.delta_err, record.x.double()).numpy()
    assert np.abs(parts.full - expected).max() <= 1e-5 * np.abs(expected).max() + 1e-12
    defect = delta_part(dual.dq.carrier_lp, dual.delta.defect, record.x.double()).numpy()
    assert np.abs(parts.defect - defect).max() <= 1e-5 * np.abs(defect).max() + 1e-12


def test_flips_empty_their_own_part_only(make_record: Make) -> None:
    record = make_record(3, sharpness=3.0)

    def parts(recipe: str) -> GradientParts:
        dual = dual_pass(record, resolve(recipe), "fp64")
        assert dual.delta is not None
        assert dual.dq is not None
        assert record.x is not None
        return gradient_parts(dual.delta, dual.dq, record.x)

    base = parts("fa2")
    without_dq = parts("fa2+dq=fp32")
    assert np.abs(base.cast_dq).max() > 0
    assert not without_dq.cast_dq.any()
    for name in ("hp", "scores", "defect", "cast_ds", "full"):
        assert np.array_equal(getattr(base, name), getattr(without_dq, name))


def test_coherence_weights_are_the_rank_one_norms(make_record: Make) -> None:
    record = make_record(4)
    dual = dual_pass(record, FA2, "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.x is not None
    parts = gradient_parts(dual.delta, dual.dq, record.x)
    for head in range(2):
        terms = [
            float(dual.delta.defect[head, row].abs() * dual.dq.carrier_lp[head, row].norm() * record.x[row].norm())
            for row in range(24)
        ]
        assert parts.weight_sum[head] == pytest.approx(sum(terms), rel=1e-6)
        assert parts.weight_square_sum[head] == pytest.approx(sum(w * w for w in terms), rel=1e-6)
    direction = torch.einsum("hn,hnd,nc->hdc", dual.delta.defect.abs(), dual.dq.carrier_lp, record.x.double()).numpy()
    assert np.abs(parts.direction - direction).max() <= 1e-5 * np.abs(direction).max()


@pytest.mark.parametrize(
    "geometry",
    [{}, {"window": 5}, {"causal": False}, {"key_padding": torch.arange(300) > 20}],
    ids=["causal", "window", "full", "padding"],
)
def test_score_variance_is_the_dense_variance(make_record: Make, geometry: dict[str, Any]) -> None:
    record = make_record(5, heads=4, kv_heads=2, tokens=300, sharpness=2.0, **geometry)
    if geometry.get("causal") is False:
        record = replace(record, geometry=replace(record.geometry, window=290))
    assert record.x is not None
    move = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 1e-3
    p = dense_probabilities(record)
    moved = record.x.double() @ move.transpose(1, 2)
    change = record.geometry.scale * moved @ record.k.double().repeat_interleave(2, 0).transpose(1, 2)
    mean = (p * change).sum(-1, keepdim=True)
    expected = (p * (change - mean) ** 2).sum((1, 2))
    found = score_variance(record, move[None])[0]
    assert found.dtype == torch.float64
    # FP32 scores of size 10: their error of 1e-6 moves P by as much.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)


def test_score_variance_of_a_shift_common_to_all_keys_is_0(make_record: Make) -> None:
    record = make_record(6)
    keys = torch.ones_like(record.k)
    found = score_variance(replace(record, k=keys), torch.ones(1, 2, 8, 12))[0]
    assert float(found.abs().max()) <= 1e-10


def test_score_variance_grows_with_the_square(make_record: Make) -> None:
    record = make_record(7)
    move = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1))
    small, large = score_variance(record, torch.stack([move, move * 4]))
    torch.testing.assert_close(large, small * 16, rtol=1e-6, atol=0.0)


def test_score_variance_needs_x(make_record: Make) -> None:
    with pytest.raises(ValueError, match="needs a record with X"):
        score_variance(replace(make_record(8), x=None), torch.zeros(1, 2, 8, 12))


def test_nan_spreads_instead_of_vanishing(make_record: Make) -> None:
    record = make_record(9)
    dual = dual_pass(record, FA2, "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.x is not None
    x = record.x.clone()
    x[3, 2] = math.nan
    assert np.isnan(gradient_parts(dual.delta, dual.dq, x).hp).any()
