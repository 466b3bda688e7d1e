"""Rows with several maxima and their keys: the records of case P03 and their neighbours, and random integer scores."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence.finite import make_finite
from bf16forensics.evidence.observe import ObserveOptions, observe_sequence
from bf16forensics.evidence.observe_results import Observation, RepeatedRow
from bf16forensics.evidence.observe_rows import MOST_ROWS, _top_keys
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.investigate.observe import ObservationCollector
from bf16forensics.recipe.derive import resolve

Make = Callable[..., AttentionRecord]

Q = [[1.0, 0.0]] * 4
K = [[2.0, 0.0], [2.0, 0.0], [1.0, 0.0], [2.0, 0.0]]
V = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
RECIPES = ["fa2", "fa2+o_bar=bf16", "paper", "sdpa-math", "fa2+scores=bf16", "eager"]


def record_of(q: Any, k: Any, v: Any, *, sequence: int = 0, labelled: Any = None, **geometry: Any) -> AttentionRecord:
    """One head."""
    tensors = [torch.tensor(np.asarray(values), dtype=torch.float32)[None] for values in (q, k, v)]
    return AttentionRecord(
        layer=0,
        sequence=sequence,
        step=None,
        storage="bf16",
        q=tensors[0],
        k=tensors[1],
        v=tensors[2],
        do=torch.ones(1, tensors[0].shape[1], tensors[2].shape[2]),
        x=None,
        geometry=Geometry(**{"scale": tensors[0].shape[-1] ** -0.5, **geometry}),
        labelled=None if labelled is None else torch.tensor(labelled),
    )


def observation(*records: AttentionRecord, recipe: str = "fa2") -> Observation:
    options = ObserveOptions(recipe=resolve(recipe), reference="fp64", kept=64)
    collector = ObservationCollector(options)
    for record in records:
        finite = make_finite(record)
        dual = dual_pass(finite.record, options.recipe, "fp64")
        collector.add((observe_sequence(finite.record, dual, options, finite.nonfinite),))
    return collector.result()


def brief(rows: tuple[RepeatedRow, ...]) -> list[tuple[int, tuple[int, ...]]]:
    return [(row.query, row.keys) for row in rows]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_rows_of_the_case(recipe: str) -> None:
    found = observation(record_of(Q, K, V), recipe=recipe)
    assert brief(found.rows) == [(3, (0, 1, 3)), (1, (0, 1)), (2, (0, 1))]
    assert [(row.ones, row.ones_exact, row.gap_nats, row.labelled) for row in found.rows] == [
        (3, 3, 0.0, True),
        (2, 2, 0.0, True),
        (2, 2, 0.0, True),
    ]
    assert (found.rows_counted, found.rows_total) == (True, 3)
    (head,) = found.heads
    assert (head.rows_repeated, head.rows_exact, head.most_ones) == (3, 3, 3)


def test_rows_of_several_sequences_are_added() -> None:
    found = observation(record_of(Q, K, V), record_of(Q[:2], K[:2], V[:2], sequence=1))
    (head,) = found.heads
    assert (found.rows_total, head.rows_repeated, head.rows_exact, head.most_ones) == (4, 4, 4, 3)
    assert [(row.query, row.sequence) for row in found.rows] == [(3, 0), (1, 0), (1, 1), (2, 0)]


def test_without_the_mask_every_row_sees_all_three() -> None:
    found = observation(record_of(Q, K, V, causal=False))
    assert brief(found.rows) == [(query, (0, 1, 3)) for query in range(4)]


def test_a_window_hides_the_first_key() -> None:
    found = observation(record_of(Q, K, V, window=3))
    assert brief(found.rows) == [(1, (0, 1)), (2, (0, 1)), (3, (1, 3))]


@pytest.mark.parametrize(("gap", "found"), [(2.0**-9.5, True), (2.0**-8.5, False)])
def test_a_near_tie_is_one_after_rounding_only(gap: float, found: bool) -> None:
    bias = torch.tensor([[[0.0, -gap]]])
    (head,) = (seen := observation(record_of([[1.0, 0.0]], np.zeros((2, 2)), V[:2], bias=bias))).heads
    assert (head.rows_repeated, head.rows_exact) == (int(found), 0)
    if found:
        (row,) = seen.rows
        assert (row.ones, row.ones_exact, row.keys) == (2, 1, (0, 1))
        assert row.gap_nats == pytest.approx(gap, rel=1e-6)


def test_padding_and_blind_rows_never_count_and_ignored_labels_are_marked() -> None:
    zeros = np.zeros((6, 2))
    real = torch.tensor([True, True, True, True, True, False])
    keep = torch.ones(1, 6, 6, dtype=torch.bool)
    keep[:, 3] = False
    found = observation(
        record_of(
            zeros,
            zeros,
            np.ones((6, 2)),
            key_padding=real,
            query_padding=real,
            keep=keep,
            labelled=[True, False, True, True, True, True],
        )
    )
    assert brief(found.rows) == [(4, (0, 1, 2, 3, 4)), (2, (0, 1, 2)), (1, (0, 1))]
    assert [row.labelled for row in found.rows] == [True, True, False]
    assert found.rows_total == 3


@pytest.mark.parametrize("recipe", ["fa4", "fa2+rescale_threshold=8"])
def test_a_recipe_that_anchors_elsewhere_counts_nothing(recipe: str) -> None:
    found = observation(record_of(Q, K, V), recipe=recipe)
    assert (found.rows_counted, found.rows_total, found.rows) == (False, 0, ())
    (head,) = found.heads
    assert (head.rows_repeated, head.rows_exact, head.most_ones) == (None, None, None)
    # What PK says does not depend on it: keys of one direction.
    assert head.next.minimum == pytest.approx(1)


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math"])
@pytest.mark.parametrize("geometry", [{}, {"window": 40}, {"causal": False}, {"softcap": 30.0}])
def test_integer_scores_of_many_rows(recipe: str, geometry: dict[str, Any]) -> None:
    """Scores of integers are exact under every recipe: the keys are those that share the largest score."""
    generator = torch.Generator().manual_seed(5)
    heads, tokens = 4, 300
    q = torch.randint(-2, 3, (heads, tokens, 4), generator=generator).float()
    k = torch.randint(-2, 3, (2, tokens, 4), generator=generator).float()
    record = replace(
        record_of(q[0], k[0], k[0], scale=1.0, **geometry), layer=2, q=q, k=k, v=k, do=torch.ones_like(q), sequence=7
    )
    found = observation(record, recipe=recipe)
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2)
    visible = record.geometry.visible((0, tokens), (0, tokens), tokens, tokens)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    best = scores == scores.amax(-1, keepdim=True)
    expected = {
        (head, query): best[head, query].nonzero()[:, 0].tolist()
        for head in range(heads)
        for query in range(tokens)
        if best[head, query].sum() > 1
    }
    order = sorted(expected, key=lambda place: (-len(expected[place]), *place))
    assert found.rows_total == len(expected) > 100
    assert [(row.head, row.query) for row in found.rows] == order[:MOST_ROWS]
    for row in found.rows:
        keys = expected[row.head, row.query]
        assert (row.ones, row.ones_exact, row.gap_nats) == (len(keys), len(keys), 0.0)
        assert row.keys == tuple(keys[:16])
        assert (row.layer, row.sequence) == (2, 7)
    for head in found.heads:
        own = [len(keys) for (number, _), keys in expected.items() if number == head.head]
        assert (head.rows_repeated, head.rows_exact, head.most_ones) == (len(own), len(own), max(own))


def test_random_scores_give_keys_that_round_to_one(make_record: Make) -> None:
    """In blocks of the dual pass's shape the scores have its bits: the count and the keys agree without any repair."""
    record = make_record(11, tokens=260, heads=4, sharpness=0.02)
    found = observation(record)
    q, k = record.q.double(), record.k.double().repeat_interleave(2, 0)
    assert found.rows_total > 100
    for row in found.rows:
        scores = record.geometry.scale * (k[row.head, : row.query + 1] @ q[row.head, row.query])
        gap = scores.max() - scores
        # P-bar of at least 1 - 2^-9: 0.001955 nats, and some FP32 noise of scores near 0.1.
        sure, possible = (gap < 0.001955 - 1e-6).nonzero()[:, 0], (gap < 0.001955 + 1e-6).nonzero()[:, 0]
        assert len(sure) <= row.ones <= len(possible)
        if len(sure) == len(possible):
            assert row.keys == tuple(sure.tolist()[:16])
            assert row.gap_nats == pytest.approx(float(gap[sure].max()), abs=1e-6)


def test_a_count_made_of_other_bits_still_has_its_number_of_keys() -> None:
    scores = np.array([[1.0, 3.0, 2.0, 3.0, 3.0], [5.0, -np.inf, 5.0, 4.0, 6.0]], np.float32)
    keys, gaps = _top_keys(scores, np.array([2, 2]))
    assert [found.tolist() for found in keys] == [[1, 3], [0, 4]]
    assert gaps == [0.0, 1.0]


def test_fp8_operands_are_the_ones_that_were_counted(make_record: Make) -> None:
    """Quantised q and k tie where the stored ones do not."""
    record = make_record(12, tokens=40, sharpness=0.05)
    found = observation(record, recipe="fa2+operands=e4m3")
    dual = dual_pass(record, resolve("fa2+operands=e4m3"), "fp64")
    ones = dual.maxima.ones_rounded
    assert found.rows_total == int((ones > 1).sum()) > 0
    for row in found.rows:
        assert row.ones == int(ones[row.head, row.query])
        assert row.gap_nats <= 0.00197
