"""The high-precision side against dense float64 formulas and against autograd, over every kind of mask (class T2)."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.errors import InputError
from bf16forensics.recipe.derive import resolve

FA2 = resolve("fa2")
EPS = {"fp64": 2.0**-53, "fp32": 2.0**-24}


def keep_by_head(seed: int, heads: int, queries: int, keys: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    keep = rng.random((heads, queries, keys)) < 0.6
    keep[:, 3] = False
    return keep


def padding(keys: int, *, left: int = 0, right: int = 0) -> np.ndarray:
    real = np.ones(keys, bool)
    real[:left] = False
    real[keys - right :] = False
    return real


def alibi(heads: int, queries: int, keys: int) -> np.ndarray:
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    distance = np.arange(keys)[None, :] - (np.arange(queries)[:, None] + keys - queries)
    return (slopes[:, None, None] * distance[None]).astype(np.float32)


def documents(keys: int) -> np.ndarray:
    return np.sort(np.random.default_rng(5).integers(0, 4, keys))


#: Arguments of `draw` by name; H 2, N 37, D 16 unless said.
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not-causal": {"causal": False},
    "causal-fewer-queries": {"queries": 9, "keys": 37},
    "causal-more-queries": {"queries": 37, "keys": 9},
    "causal-one-query": {"queries": 1, "keys": 37},
    "causal-one-key": {"queries": 37, "keys": 1},
    "window-1": {"window": 1},
    "window-5": {"window": 5},
    "window-wider-than-the-row": {"window": 99},
    "window-both-sides": {"window": 5, "causal": False},
    "window-fewer-queries": {"queries": 9, "keys": 37, "window": 6},
    "window-more-queries": {"queries": 37, "keys": 9, "window": 6},
    "window-more-queries-both-sides": {"queries": 37, "keys": 9, "window": 6, "causal": False},
    "boolean-by-head": {"causal": False, "keep": keep_by_head(1, 2, 37, 37)},
    "boolean-common": {"keep": keep_by_head(2, 1, 37, 37)},
    "additive-by-head": {"causal": False, "bias": alibi(2, 37, 37) * np.float32(3)},
    "additive-common": {"bias": np.random.default_rng(3).standard_normal((1, 37, 37)).astype(np.float32)},
    "additive-with-boolean": {"bias": alibi(2, 37, 37), "keep": keep_by_head(4, 2, 37, 37)},
    "alibi-fewer-queries": {"queries": 9, "keys": 37, "bias": alibi(2, 9, 37)},
    "padding-left": {"key_padding": padding(37, left=5), "query_padding": padding(37, left=5)},
    "padding-right": {"key_padding": padding(37, right=7), "query_padding": padding(37, right=7)},
    "padding-of-keys-only": {"key_padding": padding(37, left=5)},
    "documents": {"document_ids": documents(37)},
    "documents-not-causal": {"document_ids": documents(37), "causal": False, "window": 4},
    "grouped-heads": {"heads": 6, "kv_heads": 2},
    "multi-query": {"heads": 3, "kv_heads": 1},
    "softcap": {"softcap": 1.5, "spread": 4.0},
    "softcap-and-bias": {"softcap": 0.7, "bias": alibi(2, 37, 37)},
    "scale": {"scale": 1.0 / 12.0},
    "scale-above-1": {"scale": 2.5},
    "values-wider-than-keys": {"value_size": 24},
    "peaked": {"spread": 12.0},
    "everything": {
        "heads": 4,
        "kv_heads": 2,
        "window": 20,
        "softcap": 3.0,
        "bias": alibi(4, 37, 37),
        "keep": keep_by_head(6, 4, 37, 37),
        "key_padding": padding(37, left=3),
        "document_ids": documents(37),
    },
}


def check(oracle: ModuleType, call: Any, dual: Any, reference: str) -> None:
    expected = oracle.dense(call)
    limit = oracle.budget(call, expected, EPS[reference])
    found = {
        "o": dual.o_hp,
        "lse": dual.lse_hp,
        "delta": dual.delta.delta_hp,
        "dq": dual.dq.hp,
        "carrier": dual.dq.carrier_hp,
    }
    for name, value in found.items():
        want = torch.from_numpy(getattr(expected, name))
        assert value.dtype == torch.float64
        assert value.shape == want.shape
        assert torch.equal(value.isinf(), want.isinf())
        error = (value - want).masked_fill(want.isinf(), 0.0).abs().max().item()
        allowed = (
            getattr(limit, name) if name != "carrier" else limit.o * call.scale * abs(call.k).max() / abs(call.v).max()
        )
        assert error <= allowed, (name, error, allowed)
    # What is written as a difference is the difference.
    torch.testing.assert_close(dual.o_err, dual.o_lp - dual.o_hp, rtol=0, atol=2 * limit.o * 2.0**-20 + 1e-12)
    torch.testing.assert_close(
        dual.delta.delta_err, dual.delta.delta_lp - dual.delta.delta_hp, rtol=0, atol=limit.delta * 2.0**-20 + 1e-12
    )


@pytest.mark.parametrize("reference", ["fp64", "fp32"])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(oracle: ModuleType, record_of: Any, name: str, reference: str) -> None:
    call = oracle.draw(sum(map(ord, name)), **MASKS[name])
    check(oracle, call, dual_pass(record_of(call), FA2, reference), reference)


@pytest.mark.parametrize("size", [1, 2, 63, 72, 80, 96, 128, 256])
def test_every_head_size(oracle: ModuleType, record_of: Any, size: int) -> None:
    call = oracle.draw(size, size=size, queries=21)
    for reference in EPS:
        check(oracle, call, dual_pass(record_of(call), FA2, reference), reference)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 137, 192, 513])
@pytest.mark.parametrize("causal", [True, False])
def test_every_length(oracle: ModuleType, record_of: Any, length: int, causal: bool) -> None:
    call = oracle.draw(length, heads=1, queries=length, size=8, causal=causal)
    check(oracle, call, dual_pass(record_of(call), FA2, "fp64"), "fp64")


@pytest.mark.parametrize("name", [name for name in MASKS if name != "causal-more-queries"])
def test_query_gradient_is_autograds(oracle: ModuleType, record_of: Any, name: str) -> None:
    """The formula of dS is not the oracle's either: torch differentiates the forward pass in float64."""
    call = oracle.draw(7 + len(name), **MASKS[name])
    record = record_of(call)
    group = record.num_heads // record.num_kv_heads
    q = record.q.double().requires_grad_()
    k, v = (t.double().repeat_interleave(group, 0) for t in (record.k, record.v))
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if record.geometry.bias is not None:
        scores = scores + record.geometry.bias.double()
    seen = torch.from_numpy(np.stack([call.visible(head) for head in range(record.num_heads)]))
    some = seen.any(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(~seen, -torch.inf).masked_fill(~some, 0.0), -1) * some
    (p @ v).backward(record.do.double())
    limit = oracle.budget(call, oracle.dense(call), EPS["fp64"])
    dual = dual_pass(record, FA2, "fp64")
    assert (dual.dq.hp - q.grad).abs().max() <= limit.dq


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math", "fa2+scores=bf16", "fa2+row_sum=bf16,o_bar=bf16"])
@pytest.mark.parametrize("reference", ["fp64", "fp32"])
def test_fully_masked_rows_are_zero_everywhere(oracle: ModuleType, record_of: Any, recipe: str, reference: str) -> None:
    keep = keep_by_head(8, 2, 150, 40)
    keep[0, 10:140] = False
    keep[1] = False
    call = oracle.draw(9, queries=150, keys=40, causal=False, keep=keep)
    dual = dual_pass(record_of(call), resolve(recipe), reference)
    empty = torch.from_numpy(~keep.any(-1))
    assert empty[1].all()
    for values in (dual.o_lp, dual.o_hp, dual.o_err, *(getattr(dual.dq, n) for n in dual.dq.__dataclass_fields__)):
        assert not values.isnan().any()
        assert (values[empty] == 0).all()
    for name in dual.delta.__dataclass_fields__:
        assert (getattr(dual.delta, name)[empty] == 0).all(), name
    for name in dual.maxima.__dataclass_fields__:
        assert (getattr(dual.maxima, name)[empty] == 0).all(), name
    assert (dual.lse_lp[empty] == -math.inf).all()
    assert (dual.lse_hp[empty] == -math.inf).all()
    assert dual.lse_hp[~empty].isfinite().all()


def test_rows_above_a_short_causal_history_see_nothing(oracle: ModuleType, record_of: Any) -> None:
    """N > M bottom-right: whole blocks of rows lie above the first key."""
    call = oracle.draw(10, heads=1, queries=300, keys=7, size=4)
    dual = dual_pass(record_of(call), FA2)
    assert dual.maxima.visible[0].tolist() == [0] * 293 + list(range(1, 8))
    assert (dual.o_hp[0, :293] == 0).all()
    check(oracle, call, dual, "fp64")


def test_counts_of_maxima(oracle: ModuleType, record_of: Any) -> None:
    """Ones by the recipe's scores, shared maxima by the hp scores, near keys within 1e-3 nats; masked pairs never."""
    gaps = np.array([0.0, 0.0, 5e-4, 1.5e-3, 3e-3, 1.0])
    q = np.zeros((1, 1, 2), np.float32)
    call = oracle.Call(
        q=q,
        k=np.zeros((1, 6, 2), np.float32),
        v=np.arange(6, dtype=np.float32)[None, :, None],
        do=np.ones((1, 1, 1), np.float32),
        scale=1.0,
        causal=False,
        bias=-gaps.astype(np.float32)[None, None],
    )
    maxima = dual_pass(record_of(call), FA2).maxima
    # exp(-0.0015) rounds to 1 in BF16, exp(-0.003) does not.
    assert (maxima.ones_fp32.item(), maxima.ones_rounded.item()) == (2, 4)
    assert (maxima.shared.item(), maxima.near.item(), maxima.visible.item()) == (2, 3, 6)
    hidden = oracle.Call(
        **{name: getattr(call, name) for name in ("q", "k", "v", "do", "scale", "causal", "bias")},
        keep=np.array([[[False, True, True, False, True, True]]]),
    )
    maxima = dual_pass(record_of(hidden), FA2).maxima
    assert (maxima.ones_fp32.item(), maxima.ones_rounded.item()) == (1, 2)
    assert (maxima.shared.item(), maxima.near.item(), maxima.visible.item()) == (1, 2, 4)


def test_sink_and_largest_score(oracle: ModuleType, record_of: Any) -> None:
    call = oracle.draw(12, heads=2, queries=30, key_padding=padding(30, left=2), spread=3.0)
    dual, expected = dual_pass(record_of(call), FA2), oracle.dense(call)
    scores = np.where(expected.visible, np.abs(expected.scores), 0.0).max(-1)
    limit = oracle.budget(call, expected, EPS["fp64"])
    assert abs(dual.maxima.score_abs_max.numpy() - scores).max() <= limit.lse
    assert abs(dual.maxima.sink.numpy() - expected.p[:, :, 2] * expected.visible.any(-1)).max() <= limit.lse


def test_without_do_there_is_only_a_forward_pass(oracle: ModuleType, record_of: Any) -> None:
    from dataclasses import replace

    record = record_of(oracle.draw(13))
    alone = dual_pass(replace(record, do=None), FA2)
    assert alone.delta is None
    assert alone.dq is None
    assert torch.equal(alone.o_lp, dual_pass(record, FA2).o_lp)


@pytest.mark.parametrize("reference", ["fp16", "FP64", ""])
def test_unknown_reference(oracle: ModuleType, record_of: Any, reference: str) -> None:
    with pytest.raises(InputError, match="reference must be fp32 or fp64"):
        dual_pass(record_of(oracle.draw(14)), FA2, reference)
