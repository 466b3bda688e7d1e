"""(PK)[T]^T X[T] against cosines known by hand and against whole matrices formed by brute force."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.path import QueryPath
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence import observe_inputs, observe_pairs
from bf16forensics.evidence.finite import make_finite
from bf16forensics.evidence.observe import ObserveOptions, SequenceObservation, observe_sequence
from bf16forensics.evidence.observe_carrier import carried_back, exact_carrier
from bf16forensics.evidence.observe_pairs import PAIRS_DRAWN, draw_pairs, kept_values
from bf16forensics.evidence.observe_results import HeadObservation, LayerObservation, Observation
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.investigate.observe import ObservationCollector
from bf16forensics.recipe.derive import resolve

Make = Callable[..., AttentionRecord]

#: FP32 carriers and sums: some 1e-7 relative, of numbers up to 1, accumulated over at most a few hundred terms.
FP32 = 2e-5


def observed(record: AttentionRecord, recipe: str = "fa2", reference: str = "fp64") -> SequenceObservation:
    finite = make_finite(record)
    chosen = resolve(recipe)
    options = ObserveOptions(recipe=chosen, reference=reference, kept=10**6)
    return observe_sequence(finite.record, dual_pass(finite.record, chosen, reference), options, finite.nonfinite)


def observation(*records: AttentionRecord, recipe: str = "fa2", reference: str = "fp64") -> Observation:
    options = ObserveOptions(recipe=resolve(recipe), reference=reference, kept=10**6)
    collector = ObservationCollector(options)
    for record in records:
        collector.add((observed(record, recipe, reference),))
    return collector.result()


def own_key_only(pk: Any, x: Any, **fields: Any) -> AttentionRecord:
    """One head whose every query sees its own key alone: P K is K itself, whatever the queries."""
    keys, inputs = torch.tensor(pk, dtype=torch.float32)[None], torch.tensor(x, dtype=torch.float32)
    values: dict[str, Any] = {
        "layer": 0,
        "sequence": 0,
        "step": None,
        "storage": "bf16",
        "q": torch.ones_like(keys),
        "k": keys,
        "v": torch.ones_like(keys),
        "do": torch.ones_like(keys),
        "x": inputs,
        "geometry": Geometry(scale=0.5, window=1),
    }
    return AttentionRecord(**{**values, **fields})


def only(found: Observation) -> tuple[HeadObservation, LayerObservation]:
    (head,), (layer,) = found.heads, found.layers
    return head, layer


@pytest.mark.parametrize("with_do", [True, False])
def test_cosines_known_by_hand(with_do: bool) -> None:
    # PK: 3-4-5 triangles. cos(0, 1) = 24/25, cos(1, 2) = -1, cos(0, 2) = -24/25; lengths 5, 5, 10.
    # X: cos(0, 1) = 0, cos(1, 2) = 7/25, cos(0, 2) = 24/25 in the first two columns; lengths 5, 5, 5.
    record = own_key_only([[3, 4], [4, 3], [-8, -6]], [[3, 4, 0], [4, -3, 0], [4, 3, 0]])
    head, layer = only(observation(record if with_do else replace(record, do=None)))
    assert (head.next.pairs, head.next.undefined) == (2, 0)
    assert head.next.mean == pytest.approx((24 / 25 - 1) / 2, abs=1e-12)
    assert (head.next.minimum, head.next.maximum) == pytest.approx((-1, 24 / 25), abs=1e-12)
    assert head.drawn.pairs == 3
    assert head.drawn.mean == pytest.approx((24 / 25 - 1 - 24 / 25) / 3, abs=1e-12)
    assert head.drawn.median == pytest.approx(-24 / 25, abs=1e-7)
    assert layer.next.mean == pytest.approx((0 + 7 / 25) / 2, abs=1e-12)
    assert layer.drawn.maximum == pytest.approx(24 / 25, abs=1e-12)
    assert head.matrix_next is not None
    assert head.matrix_next.mean == pytest.approx((24 / 25 * 0 - 7 / 25) / 2, abs=1e-12)
    assert head.matrix_drawn is not None
    assert head.matrix_drawn.minimum == pytest.approx(-((24 / 25) ** 2), abs=1e-12)
    # The third column is zero everywhere: it has no sign and no cosine.
    assert layer.signs_next.mean == 0.5
    assert (layer.signs_drawn.minimum, layer.signs_drawn.maximum) == (0.5, 1.0)
    # Weights 25, 25, 50: terms 25 * 25 * 0, 25 * 50 * -(7/25) and 25 * 50 * -(24/25)^2, twice each.
    between = 25 * 50 * (-7 / 25 - (24 / 25) ** 2)
    assert head.coherence == pytest.approx(between / (25 * 25 + 2 * 25 * 50), abs=FP32)
    assert math.isnan(head.across_sequences)
    assert head.rotated_next is None
    assert head.nonfinite == ()


def test_every_column_has_the_cosine_of_pk_up_to_its_sign() -> None:
    pk, x = [[3, 4], [4, 3], [4, 3]], [[1, -2, 9, 0], [2, -3, -5, 1], [4, -1, 7, 1]]
    head, layer = only(observation(own_key_only(pk, x)))
    # Largest mean |X|: 7, 7/3, 2, 2/3. Between neighbours cos(PK) is 24/25, then 1.
    assert [(column.column, column.sign) for column in layer.columns] == [(2, 1), (0, 1), (1, -1), (3, 1)]
    assert [column.mean_abs for column in layer.columns] == pytest.approx([7, 7 / 3, 2, 2 / 3])
    assert [column.share for column in layer.columns] == pytest.approx([2 / 3, 1, 1, 2 / 3])
    same = (24 / 25 + 1) / 2
    assert [column.column for column in head.columns] == [2, 0, 1, 3]
    assert [column.mean for column in head.columns] == pytest.approx([-same, same, same, 1], abs=1e-12)
    assert [column.pairs for column in head.columns] == [2, 2, 2, 1]


@pytest.mark.parametrize(("pk", "x", "coherence"), [(1, 1, 1.0), (1, -1, -1.0), (-1, -1, 1.0)])
def test_parallel_matrices_add_up_whatever_their_lengths(pk: int, x: int, coherence: float) -> None:
    found = observation(own_key_only([[1, 2], [3 * pk, 6 * pk]], [[2, 0, 1], [8 * x, 0, 4 * x]]))
    head, layer = only(found)
    assert head.next.mean == pytest.approx(pk, abs=1e-12)
    assert layer.next.mean == pytest.approx(x, abs=1e-12)
    assert head.coherence == pytest.approx(coherence, abs=FP32)


def test_a_zero_vector_has_no_cosine() -> None:
    head, layer = only(observation(own_key_only([[3, 4], [0, 0], [4, 3], [3, 4]], [[1, 1], [1, 2], [0, 0], [1, 3]])))
    assert (head.next.pairs, head.next.undefined, head.next.mean) == (1, 2, pytest.approx(24 / 25))
    assert (head.drawn.pairs, head.drawn.undefined) == (3, 3)
    assert (layer.next.pairs, layer.next.undefined) == (1, 2)
    assert (layer.signs_next.pairs, layer.signs_next.undefined, layer.signs_next.mean) == (1, 2, 1.0)
    assert head.matrix_next is not None
    assert (head.matrix_next.pairs, head.matrix_next.undefined) == (0, 3)
    assert math.isnan(head.matrix_next.mean)
    zeros, _ = only(observation(own_key_only([[0, 0], [0, 0]], [[1, 1], [1, 1]])))
    assert math.isnan(zeros.next.median)
    assert math.isnan(zeros.across_sequences)
    assert zeros.coherence is not None
    assert math.isnan(zeros.coherence)


def test_one_token_has_no_pair() -> None:
    head, layer = only(observation(own_key_only([[3, 4]], [[1, 1]])))
    assert (head.next.pairs, head.drawn.pairs, layer.next.pairs) == (0, 0, 0)
    assert math.isnan(head.next.maximum)


def test_pairs_across_sequences_are_all_of_them() -> None:
    sequences = [[[3, 4], [4, 3]], [[5, 0]], [[0, -2], [1, 0], [1, 0]]]
    found = observation(*(own_key_only(pk, [[1, 1]] * len(pk), sequence=i) for i, pk in enumerate(sequences)))
    units = [np.array(pk) / np.linalg.norm(pk, axis=1, keepdims=True) for pk in sequences]
    cosines = [u @ v for i, a in enumerate(units) for b in units[:i] for u in a for v in b]
    assert only(found)[0].across_sequences == pytest.approx(np.mean(cosines), abs=1e-12)


def dense_carrier(record: AttentionRecord) -> np.ndarray:
    """P K [H, N, D] from a dense softmax in float64."""
    geometry, (heads, queries) = record.geometry, record.q.shape[:2]
    k = record.k.double().repeat_interleave(heads // record.num_kv_heads, 0)
    scores = geometry.scale * record.q.double() @ k.transpose(1, 2)
    slope = torch.ones_like(scores)
    if geometry.softcap is not None:
        slope = 1 - torch.tanh(scores / geometry.softcap) ** 2
        scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
    if geometry.bias is not None:
        scores = scores + geometry.bias
    visible = geometry.visible((0, queries), (0, k.shape[1]), queries, k.shape[1])
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return np.asarray((torch.softmax(scores, -1).nan_to_num(0.0) * slope @ k).numpy())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))


def real_rows() -> torch.Tensor:
    real = torch.ones(40, dtype=torch.bool)
    real[35:] = False
    return real


GEOMETRIES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": torch.linspace(-3, 0, 2 * 40 * 40).view(2, 40, 40)},
    "padding": {"key_padding": real_rows(), "query_padding": real_rows()},
    "blind-rows": {"keep": (torch.arange(40) % 7 != 3)[None, :, None].expand(1, 40, 40)},
}


@pytest.mark.parametrize("reference", ["fp64", "fp32"])
@pytest.mark.parametrize("with_do", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_everything_against_whole_matrices(make_record: Make, name: str, with_do: bool, reference: str) -> None:
    record = make_record(3, tokens=40, kv_heads=1, sharpness=2.0, **GEOMETRIES[name])
    record = record if with_do else replace(record, do=None)
    assert record.x is not None
    found = observation(record, reference=reference)
    pk, x = dense_carrier(record), record.x.double().numpy()
    rows = [token for token in range(40) if np.abs(pk[0, token]).max() > 0]
    if name == "padding":
        rows = rows[:35]
    first, second = (index.tolist() for index in draw_pairs(torch.isin(torch.arange(40), torch.tensor(rows)), 0))
    assert len(first) == PAIRS_DRAWN
    near = [(token, token + 1) for token in rows if token + 1 in rows]
    (layer,) = found.layers
    for head, measured in enumerate(found.heads):
        matrices = np.einsum("nd,nc->ndc", pk[head], x)
        for statistics, matrix, own, signs, pairs in (
            (measured.next, measured.matrix_next, layer.next, layer.signs_next, near),
            (measured.drawn, measured.matrix_drawn, layer.drawn, layer.signs_drawn, [*zip(first, second, strict=True)]),
        ):
            whole = [cosine(matrices[a], matrices[b]) for a, b in pairs]
            column = [cosine(matrices[a][:, 4], matrices[b][:, 4]) for a, b in pairs]
            assert matrix is not None
            for statistic, expected in (
                (matrix, whole),
                (statistics, np.array(column) * [np.sign(x[a, 4] * x[b, 4]) for a, b in pairs]),
                (own, [cosine(x[a], x[b]) for a, b in pairs]),
                (signs, [float((x[a] * x[b] > 0).mean()) for a, b in pairs]),
            ):
                assert (statistic.pairs, statistic.undefined) == (len(pairs), 0)
                assert statistic.mean == pytest.approx(np.mean(expected), abs=FP32)
                assert statistic.median == pytest.approx(np.median(expected), abs=FP32)
                assert statistic.minimum == pytest.approx(min(expected), abs=FP32)
                assert statistic.maximum == pytest.approx(max(expected), abs=FP32)
        terms = matrices[rows].reshape(len(rows), -1)
        gram, weight = terms @ terms.T, np.linalg.norm(terms, axis=1)
        off = ~np.eye(len(rows), dtype=bool)
        assert measured.coherence == pytest.approx(gram[off].sum() / np.outer(weight, weight)[off].sum(), abs=FP32)
        largest = np.argsort(-np.abs(x[rows]).mean(0))[:5]
        assert [column.column for column in measured.columns] == largest.tolist()
        for column in measured.columns:
            c = column.column
            expected = [cosine(matrices[a][:, c], matrices[b][:, c]) for a, b in near]
            assert column.mean == pytest.approx(np.mean(expected), abs=FP32)
            assert column.pairs == len(near)
    for column in layer.columns:
        signs = x[rows, column.column] > 0
        assert column.mean_abs == pytest.approx(np.abs(x[rows, column.column]).mean())
        assert column.share == pytest.approx(max(signs.mean(), 1 - signs.mean()))


def test_a_forward_only_recipe_and_one_with_gradients_see_the_same_pk(make_record: Make) -> None:
    # More rows than a block holds, and two key/value heads.
    record = make_record(4, heads=4, kv_heads=2, tokens=200, sharpness=4.0, softcap=5.0)
    for reference, tolerance in (("fp64", 1e-13), ("fp32", 1e-5)):
        dual = dual_pass(record, resolve("fa2"), reference)
        assert dual.dq is not None
        expected = torch.from_numpy(dense_carrier(record)) * record.geometry.scale
        assert torch.allclose(dual.dq.carrier_hp, expected, rtol=tolerance, atol=tolerance)
        assert torch.allclose(exact_carrier(record, reference), expected, rtol=tolerance, atol=tolerance)


def test_block_borders_lose_no_pair(make_record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(6, tokens=40)
    whole = observed(record)
    monkeypatch.setattr(observe_pairs, "_TOKENS", 7)
    monkeypatch.setattr(observe_inputs, "_TOKENS", 7)
    cut = observed(record)
    assert whole.x is not None
    assert cut.x is not None
    for name in ("next", "drawn", "signs_next", "matrix_next"):
        a, b = getattr(whole.x, name), getattr(cut.x, name)
        assert np.array_equal(a.pairs, b.pairs)
        np.testing.assert_allclose(a.total, b.total, rtol=1e-12, atol=1e-12)
    for name in ("column_sum", "column_pairs", "coherent", "weight"):
        np.testing.assert_allclose(getattr(whole.x, name), getattr(cut.x, name), rtol=FP32, atol=1e-3 * FP32)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_two_ways_to_one_coherence(make_record: Make, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    record = make_record(7, tokens=tokens)
    assert record.x is not None
    vectors = torch.from_numpy(dense_carrier(record))
    expected = torch.einsum("hnd,nc->hdc", vectors, record.x.double()).square().sum((1, 2))
    monkeypatch.setattr(observe_inputs, "_TOKENS", 7)
    monkeypatch.setattr(observe_inputs, "ELEMENTS_PER_BLOCK", 300)
    for way in (observe_inputs._square_of_sum, observe_inputs._square_by_pairs):
        assert torch.allclose(way(record.x, vectors), expected, rtol=FP32)


def turned(raw: torch.Tensor) -> torch.Tensor:
    """Each token's pair of features rotated by 60 degrees more than the last token's; [H, N, 2]."""
    angle = torch.arange(raw.shape[1], dtype=raw.dtype)[:, None] * math.pi / 3
    low, high = raw.split(1, dim=-1)
    return torch.cat([low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()], -1)


def test_rotation_is_undone_and_told() -> None:
    tokens = 5
    direction = torch.tensor([[2.0, 1.0]]).expand(1, tokens, 2)
    raw = torch.ones(tokens, 2, requires_grad=True)
    path = QueryPath(raw=raw, query=turned(raw[None]), columns=torch.tensor([[0, 1]]))
    record = own_key_only(turned(direction)[0].tolist(), [[1, 2, -1]] * tokens, query_path=path)
    for given_record in (record, replace(record, do=None)):
        head, layer = only(observation(given_record))
        assert head.rotated_next is not None
        assert head.rotated_drawn is not None
        assert head.rotated_next.mean == pytest.approx(math.cos(math.pi / 3), abs=FP32)
        # Angles of 60 degrees times 1, 1, 1, 1, 2, 2, 2, 3, 3, 4.
        assert head.rotated_drawn.mean == pytest.approx((4 * 0.5 - 3 * 0.5 - 2 - 0.5) / 10, abs=FP32)
        assert head.next.minimum == pytest.approx(1, abs=FP32)
        assert head.drawn.minimum == pytest.approx(1, abs=FP32)
        assert head.coherence == pytest.approx(1, abs=FP32)
        assert layer.next.minimum == pytest.approx(1)


@pytest.mark.parametrize("over_heads", [False, True])
def test_each_head_is_carried_back_alone(over_heads: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, tokens, size = 3, 4, 2
    raw = torch.randn(tokens, heads * size, generator=generator, dtype=torch.float64).requires_grad_()

    def normed(values: torch.Tensor) -> torch.Tensor:
        by_head = values.unflatten(-1, (heads, size))
        over = values.square().sum(-1)[:, None, None] if over_heads else by_head.square().sum(-1, keepdim=True)
        return (by_head / over.sqrt()).transpose(0, 1)

    path = QueryPath(raw=raw, query=normed(raw), columns=torch.arange(heads * size).view(heads, size))
    carrier = torch.randn(heads, tokens, size, generator=generator, dtype=torch.float64)
    carrier[2] *= 100
    jacobian: Any = torch.autograd.functional.jacobian(normed, raw.detach())
    expected = torch.stack(
        [
            torch.einsum("nd,ndmf->mf", carrier[head], jacobian[head])[:, head * size : (head + 1) * size]
            for head in range(heads)
        ]
    )
    assert torch.allclose(carried_back(carrier, path), expected, rtol=1e-12, atol=1e-12)
    at_once = path.pull_back(carrier[None])[0]
    assert torch.allclose(at_once, expected, rtol=1e-3, atol=1e-3) != over_heads


def test_heads_keep_their_own_numbers(make_record: Make) -> None:
    record = make_record(8, heads=4, kv_heads=4, tokens=30, sharpness=3.0)
    order = torch.tensor([2, 0, 3, 1])
    assert record.do is not None
    mixed = replace(record, q=record.q[order], k=record.k[order], v=record.v[order], do=record.do[order])
    straight, permuted = observation(record), observation(mixed)
    assert permuted.layers == straight.layers
    for place, head in enumerate(order.tolist()):
        assert replace(permuted.heads[place], head=head) == straight.heads[head]


def test_sequences_may_stand_in_any_order(make_record: Make) -> None:
    records = [make_record(10 + i, sequence=i, tokens=30, sharpness=6.0) for i in range(3)]
    straight, turned_ = observation(*records), observation(*records[::-1])
    assert straight.rows == turned_.rows
    for one, other in zip(straight.heads, turned_.heads, strict=True):
        assert one.next.median == other.next.median
        for a, b in ((one.next.mean, other.next.mean), (one.coherence, other.coherence)):
            assert a == pytest.approx(b, rel=1e-12)
        assert one.across_sequences == pytest.approx(other.across_sequences, rel=1e-9)


@pytest.mark.parametrize("sequence", [0, 1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_head_that_is_not_finite_is_named(make_record: Make, name: str, sequence: int) -> None:
    # Flat scores: rows with several maxima everywhere.
    good = [make_record(20 + i, sequence=i, heads=4, kv_heads=2, sharpness=0.001) for i in range(2)]
    tensor = getattr(good[sequence], name).clone()
    tensor[1, 5, 2] = math.inf
    touched = (1,) if name == "q" else (2, 3)
    broken = list(good)
    broken[sequence] = replace(good[sequence], **{name: tensor})
    found, whole = observation(*broken), observation(*good)
    assert found.layers == whole.layers
    rows = tuple(row for row in whole.rows if row.head not in touched or row.sequence != sequence)
    assert found.rows == rows
    assert found.rows_total == len(rows) > 4 * 20
    for head in range(4):
        if head not in touched:
            assert found.heads[head] == whole.heads[head]
            continue
        measured = found.heads[head]
        assert measured.nonfinite == (f"{name}[{sequence}, 1, 5, 2]",)
        for statistics in (measured.next, measured.drawn, measured.matrix_next, measured.matrix_drawn):
            assert statistics is not None
            assert statistics.pairs == 0
            assert math.isnan(statistics.mean)
        assert measured.coherence is not None
        assert math.isnan(measured.coherence)
        assert math.isnan(measured.across_sequences)
        assert measured.columns == ()
        assert (measured.rows_repeated, measured.rows_exact, measured.most_ones) == (None, None, None)


def test_a_broken_x_leaves_what_pk_says(make_record: Make) -> None:
    record = make_record(30)
    assert record.x is not None
    x = record.x.clone()
    x[3, 1] = math.nan
    found, whole = observation(replace(record, x=x)), observation(record)
    (layer,) = found.layers
    assert layer.nonfinite == ("x[0, 3, 1]",)
    assert layer.columns == ()
    assert math.isnan(layer.next.mean)
    for head, other in zip(found.heads, whole.heads, strict=True):
        assert head.nonfinite == ("x[0, 3, 1]",)
        assert (head.next, head.drawn, head.rows_repeated) == (other.next, other.drawn, other.rows_repeated)
        assert head.matrix_next is not None
        assert math.isnan(head.matrix_next.mean)
        assert head.columns == ()


def test_a_broken_do_touches_nothing(make_record: Make) -> None:
    record = make_record(31)
    assert record.do is not None
    do = record.do.clone()
    do[0, 3, 1] = math.nan
    assert observation(replace(record, do=do)) == observation(record)


def test_a_path_that_is_not_finite_is_named() -> None:
    raw = torch.ones(3, 2)
    raw[1, 0] = math.nan
    raw.requires_grad_()
    path = QueryPath(raw=raw, query=(raw * raw)[None], columns=torch.tensor([[0, 1]]))
    head, _ = only(observation(own_key_only([[3, 4], [4, 3], [1, 0]], [[1, 1]] * 3, query_path=path, sequence=4)))
    assert head.nonfinite == ("PK[4, 0, 1]",)
    assert math.isnan(head.next.mean)


def test_a_path_that_is_not_finite_at_padding_spoils_nothing() -> None:
    real = torch.tensor([True, True, False])

    def seen(broken: float) -> HeadObservation:
        raw = torch.tensor([[1.0, 2.0], [3.0, 4.0], [broken, 1.0]], requires_grad=True)
        path = QueryPath(raw=raw, query=(raw * raw)[None], columns=torch.tensor([[0, 1]]))
        masks = {"key_padding": real, "query_padding": real, "window": 1}
        x = [[1, 1], [2, 1], [1, 1]]
        record = own_key_only([[3, 4], [4, 3], [1, 0]], x, query_path=path, geometry=Geometry(scale=0.5, **masks))
        return only(observation(record, replace(record, sequence=1)))[0]

    assert seen(math.nan) == seen(1.0)
    assert seen(math.nan).next.pairs == 2
    assert math.isfinite(seen(math.nan).coherence or math.nan)
    assert math.isfinite(seen(math.nan).across_sequences)


def test_no_cosine_is_above_one() -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(200, 5, generator=generator).repeat_interleave(2, 0)
    head, layer = only(observation(own_key_only(vectors.tolist(), vectors.tolist())))
    assert head.next.maximum == layer.next.maximum == 1.0


def test_without_x_pk_is_still_compared(make_record: Make) -> None:
    record = make_record(40)
    found, whole = observation(replace(record, x=None)), observation(record)
    assert found.layers == ()
    for head, other in zip(found.heads, whole.heads, strict=True):
        assert (head.next, head.drawn) == (other.next, other.drawn)
        assert (head.matrix_next, head.matrix_drawn, head.coherence, head.columns) == (None, None, None, ())


@given(st.integers(0, 60), st.integers(0, 3), st.integers(0, 5))
def test_pairs_drawn(count: int, gap: int, sequence: int) -> None:
    mask = torch.zeros(count * (gap + 1), dtype=torch.bool)
    mask[:: gap + 1] = True
    first, second = (index.tolist() for index in draw_pairs(mask, sequence))
    pairs = [*zip(first, second, strict=True)]
    assert all(a != b and mask[a] and mask[b] for a, b in pairs)
    if count * (count - 1) // 2 <= PAIRS_DRAWN:
        assert len({frozenset(pair) for pair in pairs}) == len(pairs) == count * (count - 1) // 2
    else:
        assert len(pairs) == PAIRS_DRAWN
    again = draw_pairs(mask, sequence)
    assert (again[0].tolist(), again[1].tolist()) == (first, second)


def test_sequences_draw_different_pairs() -> None:
    everything = torch.ones(100, dtype=torch.bool)
    assert not torch.equal(draw_pairs(everything, 0)[0], draw_pairs(everything, 1)[0])


@pytest.mark.parametrize(("sequences", "kept"), [(0, 1024), (1, 1024), (2, 512), (1000, 1), (10**6, 1)])
def test_values_kept_for_a_median(sequences: int, kept: int) -> None:
    assert kept_values(sequences) == kept
