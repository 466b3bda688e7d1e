"""Holm's correction against the textbook definition."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.verdict.holm import holm

P = st.floats(min_value=0.0, max_value=1.0)


def test_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == (0.03, 0.06, 0.06, 0.02)
    assert holm([]) == ()
    assert holm([0.9, 0.8]) == (1.0, 1.0)


@given(st.lists(P, min_size=1, max_size=12))
def test_step_down_rejections_equal_the_definition(p_values):
    # Holm rejects the k smallest as long as p_(i) <= alpha / (m - i + 1) for all i <= k.
    alpha = 0.05
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    rejected = set()
    for position, index in enumerate(order):
        if p_values[index] * (len(order) - position) > alpha:
            break
        rejected.add(index)
    assert {index for index, p in enumerate(holm(p_values)) if p <= alpha} == rejected


@given(st.lists(P, min_size=1, max_size=12), st.integers(min_value=0, max_value=12), st.randoms())
def test_nan_is_no_test_and_order_does_not_matter(p_values, undefined, random):
    mixed = [*p_values, *[math.nan] * undefined]
    order = list(range(len(mixed)))
    random.shuffle(order)
    adjusted = holm([mixed[index] for index in order])
    back = dict(zip(order, adjusted, strict=True))
    assert [back[index] for index in range(len(p_values))] == list(holm(p_values))
    assert all(math.isnan(back[index]) for index in range(len(p_values), len(mixed)))
    assert all(a >= p for a, p in zip(holm(p_values), p_values, strict=True))
