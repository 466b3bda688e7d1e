"""Exact attention and its gradients against the dense formula in float64: grouped heads, soft-cap, bias, sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16forensics.capture import exact_attention as blocks
from bf16forensics.capture.exact_attention import exact_attention
from bf16forensics.geometry.geometry import Geometry

TOKENS = 7


def draw(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The formula, head by head, with autograd's own derivative."""
    visible = geometry.visible((0, q.shape[1]), (0, k.shape[1]), q.shape[1], k.shape[1])
    rows = []
    for head in range(q.shape[0]):
        kv = head * k.shape[0] // q.shape[0]
        scores = geometry.scale * q[head] @ k[kv].T
        if geometry.softcap is not None:
            scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
        if geometry.bias is not None:
            scores = scores + geometry.bias[head if len(geometry.bias) > 1 else 0]
        if visible is not None:
            seen = visible[head if len(visible) > 1 else 0]
            exponential = torch.exp(scores) * seen
        else:
            exponential = torch.exp(scores)
        rows.append(exponential @ v[kv] / exponential.sum(-1, keepdim=True).clamp(min=1e-300))
    return torch.stack(rows)


GEOMETRIES = {
    "causal": Geometry(scale=0.7),
    "full": Geometry(scale=0.7, causal=False),
    "window": Geometry(scale=0.7, window=2),
    "padding": Geometry(scale=0.7, key_padding=torch.arange(TOKENS) > 2, query_padding=torch.arange(TOKENS) > 1),
    "soft-cap": Geometry(scale=0.7, softcap=0.8),
    "bias": Geometry(scale=0.7, bias=draw(4, TOKENS, TOKENS)),
    "one bias": Geometry(scale=0.7, bias=draw(1, TOKENS, TOKENS)),
    "all": Geometry(
        scale=0.7, softcap=0.8, window=3, bias=draw(4, TOKENS, TOKENS), keep=draw(4, TOKENS, TOKENS) > -0.5
    ),
}


@pytest.mark.parametrize("kept_elements", [2**24, 0], ids=["kept", "computed again"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_output_and_gradients_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, name: str, kv_heads: int, kept_elements: int
) -> None:
    monkeypatch.setattr(blocks, "_ROWS", 3)
    monkeypatch.setattr(blocks, "_KEPT_ELEMENTS", kept_elements)
    geometry = GEOMETRIES[name]
    q, k, v = draw(4, TOKENS, 3), draw(kv_heads, TOKENS, 3, seed=9), draw(kv_heads, TOKENS, 5, seed=2)
    upstream = draw(4, TOKENS, 5, seed=3)
    found, expected = [], []
    for attention, results in ((exact_attention, found), (dense, expected)):
        operands = [t.clone().requires_grad_() for t in (q, k, v)]
        o = attention(*operands, geometry)
        results += [o.detach(), *torch.autograd.grad(o, operands, upstream)]
    for one, wanted in zip(found, expected, strict=True):
        # float64 on both sides: sums of a few dozen terms.
        torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_derivative_is_that_of_the_function(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(blocks, "_ROWS", 4)
    operands = (draw(4, TOKENS, 3), draw(2, TOKENS, 3, seed=9), draw(2, TOKENS, 5, seed=2))
    operands = tuple(t.requires_grad_() for t in operands)
    assert torch.autograd.gradcheck(lambda *t: exact_attention(*t, GEOMETRIES[name]), operands, fast_mode=True)


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 140), st.integers(1, 140), st.integers(0, 3))
def test_shared_keys_are_repeated_keys(groups: int, shared: int, queries: int, keys: int, seed: int) -> None:
    q, k, v = draw(groups * shared, queries, 4, seed=seed), draw(groups, keys, 4, seed=8), draw(groups, keys, 2, seed=6)
    geometry = Geometry(scale=0.5, softcap=3.0)
    repeated = (t.repeat_interleave(shared, 0) for t in (k, v))
    found = exact_attention(q, k, v, geometry)
    torch.testing.assert_close(found, exact_attention(q, *repeated, geometry), rtol=1e-12, atol=1e-13)


def test_soft_capped_scores_of_known_size() -> None:
    q = torch.tensor([[[1.0]]], dtype=torch.float64)
    k = torch.tensor([[[100.0], [90.0]]], dtype=torch.float64)
    v = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
    geometry = Geometry(scale=1.0, causal=False, softcap=50.0)
    assert float(exact_attention(q, k, v, geometry)) == pytest.approx(0.702886, abs=1e-6)
    assert float(exact_attention(q, k, v, replace(geometry, softcap=None))) == pytest.approx(0.999955, abs=1e-6)


@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"bias": torch.ones(1, 5, 5)}], ids=["plain", "cap", "bias"])
def test_rows_that_see_nothing_are_zero_and_pull_nothing(more: dict[str, Any]) -> None:
    q, k, v = (draw(2, 5, 4, seed=seed).float().requires_grad_() for seed in range(3))
    real = torch.tensor([False, False, True, True, True])
    o = exact_attention(q, k, v, Geometry(scale=0.5, key_padding=real, **more))
    assert not o[:, :2].any()
    o.square().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()
        assert not tensor.grad[:, :2].any()


def test_heads_that_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key/value heads evenly"):
        exact_attention(draw(6, 2, 3), draw(4, 2, 3), draw(4, 2, 3), Geometry(scale=1.0))
