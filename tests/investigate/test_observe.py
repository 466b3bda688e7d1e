"""The observation of a run: several layers and sequences, bounded in size, from a source of records."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.evidence.observe import observe_sequence
from bf16forensics.evidence.observe_results import Observation
from bf16forensics.evidence.observe_rows import listing_order
from bf16forensics.investigate.observe import ObservationCollector, observe_options
from bf16forensics.recipe.derive import resolve


def observe(source: Any, kept: int | None = None) -> Observation:
    options = observe_options(source.shape, resolve("fa2"), "fp64")
    options = options if kept is None else replace(options, kept=kept)
    collector = ObservationCollector(options)
    for sequence in range(source.shape.num_sequences):
        layers = []
        for record in source.records(sequence, lambda loss: None):
            layers.append(observe_sequence(record, dual_pass(record, options.recipe, "fp64"), options))
        collector.add(tuple(layers))
    return collector.result()


def test_layers_and_heads_are_in_order_and_layers_do_not_mix(make_source: Callable[..., Any]) -> None:
    source = make_source(kv_heads=2)
    found = observe(source)
    assert [layer.layer for layer in found.layers] == [0, 1]
    assert [(head.layer, head.head) for head in found.heads] == [(layer, head) for layer in (0, 1) for head in range(4)]
    assert (found.sequences, found.recipe) == (4, "fa2")
    other = make_source(kv_heads=2)
    for sequence in range(4):
        # Another layer 0: layer 1 must not notice.
        before = other.sequences[sequence][0]
        other.change(0, sequence, x=before.x.flip(0), k=before.k.flip(1), q=before.q * 2)
    changed = observe(other)
    assert changed.layers[1] == found.layers[1]
    assert changed.heads[4:] == found.heads[4:]
    assert changed.heads[0].next != found.heads[0].next


def test_statistics_of_a_run_are_those_of_its_pairs(make_source: Callable[..., Any]) -> None:
    source = make_source()
    found = observe(source)
    for layer in (0, 1):
        x = [source.sequences[sequence][layer].x.double() for sequence in range(4)]
        cosines = torch.cat([torch.cosine_similarity(inputs[1:], inputs[:-1]) for inputs in x]).numpy()
        statistics = found.layers[layer].next
        assert (statistics.pairs, statistics.undefined) == (4 * 19, 0)
        assert statistics.mean == pytest.approx(cosines.mean(), rel=1e-12)
        assert statistics.median == pytest.approx(np.median(cosines), abs=1e-7)
        assert (statistics.minimum, statistics.maximum) == pytest.approx((cosines.min(), cosines.max()), rel=1e-12)
        # 20 tokens: all 190 pairs of each sequence.
        assert found.layers[layer].drawn.pairs == 4 * 190
        absolute = torch.cat(x).abs().mean(0)
        assert [column.column for column in found.layers[layer].columns] == absolute.argsort(descending=True)[
            :5
        ].tolist()


def test_a_median_of_a_few_values_lies_among_them(make_source: Callable[..., Any]) -> None:
    source = make_source()
    exact, thin = observe(source), observe(source, kept=5)
    for one, other in zip(exact.heads, thin.heads, strict=True):
        assert replace(one.next, median=0.0) == replace(other.next, median=0.0)
        assert one.next.minimum <= other.next.median <= one.next.maximum
        assert one.next.median != other.next.median


def test_a_run_lists_a_thousand_rows_and_counts_all(make_source: Callable[..., Any]) -> None:
    """Zero keys: row i of every head has i + 1 maxima, so 19 rows a head and sequence."""
    source = make_source(groups=(0,) * 8)
    for sequence in range(8):
        for layer in (0, 1):
            source.change(layer, sequence, k=torch.zeros_like(source.sequences[sequence][layer].k))
    found = observe(source)
    assert found.rows_total == 8 * 2 * 4 * 19 == 1216
    assert len(found.rows) == 1000
    assert sum(head.rows_repeated or 0 for head in found.heads) == 1216
    every = [
        (-ones, layer, head, ones - 1, sequence)
        for layer in (0, 1)
        for head in range(4)
        for sequence in range(8)
        for ones in range(2, 21)
    ]
    assert [listing_order(row) for row in found.rows] == sorted(every)[:1000]
    assert {len(row.keys) for row in found.rows} == {*range(5, 17)}


def test_an_empty_collector_has_nothing(make_source: Callable[..., Any]) -> None:
    found = ObservationCollector(observe_options(make_source().shape, resolve("fa2"), "fp32")).result()
    assert (found.sequences, found.layers, found.heads, found.rows_total, found.rows) == (0, (), (), 0, ())
