"""dW_Q through rotation and QK-norm: the path itself, and the evidence that is carried through it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.result import DeltaRows, QueryGradients
from bf16forensics.capture.path import QueryPath
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence.flat import flat_direction
from bf16forensics.evidence.functional import score_variance
from bf16forensics.evidence.gradient import delta_part, gradient_parts, weight_gradient
from bf16forensics.recipe.derive import resolve

Make = Callable[..., AttentionRecord]
Map = Callable[[torch.Tensor], torch.Tensor]

HEADS, TOKENS, SIZE, WIDTH = 2, 24, 8, 12


def rotate(q: torch.Tensor) -> torch.Tensor:
    """[H, N, D] rotated by position, two halves of the features as one complex number each."""
    angle = torch.arange(q.shape[1], dtype=q.dtype)[:, None] * 0.3 ** torch.arange(SIZE // 2, dtype=q.dtype)
    low, high = q.split(SIZE // 2, dim=-1)
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1)


def heads_of(raw: torch.Tensor) -> torch.Tensor:
    return raw.unflatten(-1, (HEADS, SIZE)).transpose(0, 1)


def norm(values: torch.Tensor) -> torch.Tensor:
    weight = 1.0 + 0.1 * torch.arange(values.shape[-1], dtype=values.dtype)
    return values * weight / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()


ROWS = torch.arange(HEADS * SIZE).view(HEADS, SIZE)
#: Name: map from raw to q, outputs F of the projection, columns of each head.
PATHS: dict[str, tuple[Map, int, torch.Tensor]] = {
    "rotation": (lambda raw: rotate(heads_of(raw)), HEADS * SIZE, ROWS),
    "norm-by-head": (lambda raw: rotate(norm(heads_of(raw))), HEADS * SIZE, ROWS),
    "norm-over-heads": (lambda raw: rotate(heads_of(norm(raw))), HEADS * SIZE, ROWS),
    # Interleaved: each head's q, k and v lie beside one another.
    "fused": (lambda raw: raw.unflatten(-1, (HEADS, 3, SIZE))[:, :, 0].transpose(0, 1), 3 * HEADS * SIZE, ROWS * 1),
}
PATHS["fused"] = (PATHS["fused"][0], PATHS["fused"][1], ROWS + 2 * SIZE * torch.arange(HEADS)[:, None])


def path_at(raw: torch.Tensor, name: str) -> QueryPath:
    leaf = raw.detach().clone().requires_grad_()
    return QueryPath(raw=leaf, query=PATHS[name][0](leaf), columns=PATHS[name][2])


def draw(name: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, PATHS[name][1], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", PATHS)
def test_pull_back_and_push_forward_are_the_jacobian(name: str) -> None:
    raw = draw(name)
    path = path_at(raw, name)
    generator = torch.Generator().manual_seed(1)
    gradients, moves = (torch.randn(3, HEADS, TOKENS, SIZE, generator=generator, dtype=torch.float64) for _ in "ab")
    jacobian: Any = torch.autograd.functional.jacobian(PATHS[name][0], raw)
    full = torch.einsum("khnd,hndmf->kmf", gradients, jacobian)
    pulled = path.pull_back(gradients)
    assert torch.allclose(pulled, full[:, :, path.columns].permute(0, 2, 1, 3), rtol=1e-12, atol=1e-12)
    raw_move = torch.zeros(3, *raw.shape, dtype=torch.float64)
    raw_move[:, :, path.columns] = moves.transpose(1, 2)
    pushed = path.push_forward(moves)
    assert torch.allclose(pushed, torch.einsum("hndmf,kmf->khnd", jacobian, raw_move), rtol=1e-12, atol=1e-12)
    for gradient, move, back, forth in zip(gradients, moves, pulled, pushed, strict=True):
        assert float((gradient * forth).sum()) == pytest.approx(float((back * move).sum()), rel=1e-10)


def test_a_path_serves_any_number_of_times() -> None:
    path = path_at(draw("norm-by-head"), "norm-by-head")
    ones = torch.ones(1, HEADS, TOKENS, SIZE)
    first = path.pull_back(ones)
    path.push_forward(ones)
    assert torch.equal(path.pull_back(ones), first)


def through(record: AttentionRecord, name: str) -> tuple[AttentionRecord, torch.Tensor]:
    """The record with q at the end of a path from x, and the W that gives it."""
    assert record.x is not None
    weight = torch.randn(
        PATHS[name][1], record.x.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    path = path_at(record.x.double() @ weight.T, name)
    q = path.query.detach().float().bfloat16().float()
    return replace(record, q=q, query_path=path), weight


def by_autograd(record: AttentionRecord, weight: torch.Tensor, name: str, dq: torch.Tensor) -> torch.Tensor:
    """[H, D, C] gradient of W by a gradient of q, through the whole map from x to q."""
    assert record.x is not None
    leaf = weight.clone().requires_grad_()
    found = torch.autograd.grad(PATHS[name][0](record.x.double() @ leaf.T), leaf, dq)[0]
    return found[PATHS[name][2]]


@pytest.mark.parametrize("recipe", ["fa2", "paper", "fa2+o_bar=bf16"])
@pytest.mark.parametrize("name", PATHS)
def test_delta_error_through_the_path_is_the_gradient_error(make_record: Make, name: str, recipe: str) -> None:
    """alpha sum delta_err (PK)^T X, carried back, = dW_Q(hp) - dW_Q(lp) in which only delta differs."""
    record, weight = through(make_record(7, sharpness=2.0), name)
    dual = dual_pass(record, resolve(recipe), "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.query_path is not None
    assert record.x is not None
    with_lp = dual.dq.hp - dual.dq.carrier_hp * dual.delta.delta_err[..., None]
    expected = by_autograd(record, weight, name, with_lp) - by_autograd(record, weight, name, dual.dq.hp)
    pulled = record.query_path.pull_back((dual.dq.carrier_hp * dual.delta.delta_err[..., None])[None])[0]
    formula = -weight_gradient(pulled, record.x.double())
    assert expected.norm() > 0
    assert float((formula - expected).norm()) <= 1e-10 * float(expected.norm())
    parts = gradient_parts(dual.delta, dual.dq, record.x, record.query_path)
    # FP32 products of float64 differences, as in test_gradient_parts.
    assert np.abs(parts.full - expected.numpy()).max() <= 1e-5 * np.abs(expected.numpy()).max()
    whole = by_autograd(record, weight, name, dual.dq.lp - dual.dq.hp).numpy()
    size = sum(np.abs(getattr(parts, part)).max() for part in ("scores", "defect", "cast_ds", "cast_dq"))
    assert np.abs(parts.total - whole).max() <= 1e-5 * size
    hp = by_autograd(record, weight, name, dual.dq.hp).numpy()
    assert np.abs(parts.hp - hp).max() <= 1e-5 * np.abs(hp).max()


def test_the_path_matters(make_record: Make) -> None:
    record, _ = through(make_record(8), "rotation")
    dual = dual_pass(record, resolve("fa2"), "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.x is not None
    with_path = gradient_parts(dual.delta, dual.dq, record.x, record.query_path)
    without = gradient_parts(dual.delta, dual.dq, record.x)
    assert np.abs(with_path.hp - without.hp).max() > 0.1 * np.abs(without.hp).max()


def test_weights_of_the_coherence_are_those_of_the_carried_back_terms(make_record: Make) -> None:
    record, _ = through(make_record(9), "norm-by-head")
    dual = dual_pass(record, resolve("fa2"), "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.query_path is not None
    assert record.x is not None
    parts = gradient_parts(dual.delta, dual.dq, record.x, record.query_path)
    carrier = record.query_path.pull_back(dual.dq.carrier_lp[None])[0]
    weights = dual.delta.defect.abs() * carrier.norm(dim=-1) * record.x.double().norm(dim=-1)
    assert parts.weight_sum == pytest.approx(weights.sum(1).numpy(), rel=1e-6)


@pytest.mark.parametrize("name", PATHS)
def test_score_variance_moves_q_through_the_path(make_record: Make, name: str) -> None:
    """Against the scores of a model whose W was really moved, by a central difference."""
    record, weight = through(make_record(10, tokens=TOKENS), name)
    assert record.x is not None
    move = torch.randn(HEADS, SIZE, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    step = torch.zeros_like(weight)
    step[PATHS[name][2]] = move
    x, small = record.x.double(), 1e-5
    plus, minus = (PATHS[name][0](x @ (weight + sign * small * step).T) for sign in (1, -1))
    change = record.geometry.scale * ((plus - minus) / (2 * small)) @ record.k.double().transpose(-1, -2)
    scores = record.geometry.scale * record.q.double() @ record.k.double().transpose(-1, -2)
    hidden = ~torch.ones(TOKENS, TOKENS).tril().bool()
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    change = change - (p * change).sum(-1, keepdim=True)
    expected = (p * change.square()).sum((1, 2))
    found = score_variance(record, move[None])[0]
    # The movement is an FP32 product; the central difference errs by about 1e-10.
    assert torch.allclose(found, expected, rtol=1e-4)


def test_the_flat_direction_is_carried_back_too(make_record: Make) -> None:
    real = torch.arange(TOKENS) >= 5
    plain = make_record(11, key_padding=real, query_padding=real)
    total, count = flat_direction(plain)
    assert count == TOKENS - 5
    assert total == pytest.approx(plain.k[:, 5:].double().sum(1).numpy())
    record, _ = through(plain, "rotation")
    total, count = flat_direction(record)
    assert count == TOKENS - 5
    mean = plain.k[:, 5:].double().mean(1)
    turned = torch.zeros(HEADS, SIZE, dtype=torch.float64)
    for token in range(5, TOKENS):
        basis = torch.eye(SIZE, dtype=torch.float64)[:, None, :].expand(-1, TOKENS, -1)
        turned += mean @ rotate(basis)[:, token].T
    assert total == pytest.approx(turned.numpy(), rel=1e-6)


def test_a_part_of_another_head_reaches_w_q_only_through_a_norm_over_heads(make_record: Make) -> None:
    for name, mixes in (("norm-by-head", False), ("norm-over-heads", True)):
        record, _ = through(make_record(12), name)
        assert record.query_path is not None
        only_second = torch.zeros(1, HEADS, TOKENS, SIZE)
        only_second[0, 1] = 1.0
        assert bool(record.query_path.pull_back(only_second)[0, 0].any()) is mixes


def test_delta_part_of_nothing_is_nothing(make_record: Make) -> None:
    record, _ = through(make_record(13), "rotation")
    dual = dual_pass(record, resolve("fa2"), "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.x is not None
    none = torch.zeros_like(dual.delta.delta_err)
    exact = DeltaRows(
        delta_lp=dual.delta.delta_hp,
        delta_hp=dual.delta.delta_hp,
        delta_err=none,
        defect=none,
        p_row_sum=dual.delta.p_row_sum,
        magnitude=dual.delta.magnitude,
    )
    same = QueryGradients(
        hp=dual.dq.hp,
        consistent=dual.dq.hp,
        cast_ds=dual.dq.hp,
        lp=dual.dq.hp,
        carrier_hp=dual.dq.carrier_hp,
        carrier_lp=dual.dq.carrier_hp,
    )
    parts = gradient_parts(exact, same, record.x, record.query_path)
    assert not parts.total.any()
    assert not delta_part(dual.dq.carrier_hp, none, record.x.double()).any()
