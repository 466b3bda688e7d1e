"""Running sums over query positions and over recorded steps against a dense computation."""

import numpy as np
import pytest

from bf16forensics.evidence.series import SignedSeries


def series_of(values: list[np.ndarray]) -> SignedSeries:
    series = SignedSeries(values[0].shape[0], sum(v.shape[1] for v in values))
    for v in values:
        series.add(v, np.ones(v.shape, bool), np.zeros(v.shape))
    return series


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 100, 512])
def test_the_running_sum_over_tokens_is_sampled_evenly_and_ends_in_the_sum(tokens: int) -> None:
    generator = np.random.default_rng(tokens)
    values = [generator.standard_normal((2, tokens)) for _ in range(3)]
    found = series_of(values).result(1)
    whole = np.cumsum(sum(v[1] for v in values))
    assert len(found.running_tokens) == min(16, tokens)
    places = [int(np.abs(whole - x).argmin()) for x in found.running_tokens]
    assert [whole[i] for i in places] == pytest.approx(found.running_tokens, rel=1e-12)
    assert places == sorted(set(places))
    assert places[-1] == tokens - 1
    assert max(np.diff([-1, *places])) - min(np.diff([-1, *places])) <= 1
    assert found.running_tokens[-1] == pytest.approx(found.sum, rel=1e-12)


def test_sequences_of_other_lengths_add_where_they_have_tokens() -> None:
    found = series_of([np.ones((1, 4)), np.ones((1, 8))]).result(0)
    assert found.running_tokens == (2.0, 4.0, 6.0, 8.0, 9.0, 10.0, 11.0, 12.0)


def test_the_running_sum_over_steps_follows_their_order() -> None:
    values = [np.full((1, 2), float(i)) for i in (1, 10, 100, 1000)]
    found = series_of(values).result(0, steps=((0, 2), (1,), (3,)))
    assert found.running_steps == (202.0, 222.0, 2222.0)
    assert series_of(values).result(0).running_steps == ()
