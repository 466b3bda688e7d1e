"""Rows ranked, and a row's delta error split over its features."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence.trace.contributions import (
    HeadRows,
    TokenVectors,
    delta_errors,
    ranked_tokens,
    sign_table,
    token_trace,
)
from bf16forensics.evidence.trace.results import TokenError
from bf16forensics.recipe.derive import resolve

Make = Callable[..., AttentionRecord]


def head_rows(delta_err: list[float] | None, **changes: Any) -> HeadRows:
    count = 4 if delta_err is None else len(delta_err)
    values = None if delta_err is None else np.array(delta_err)
    fields: dict[str, Any] = {
        "sequence": 0,
        "step": 401,
        "rows": np.ones(count, np.bool_),
        "visible": np.arange(1, count + 1),
        "ones": np.ones(count, np.int64),
        "delta_err": values,
        "defect": None if values is None else values / 2,
        "sign_floor": None if values is None else np.full(count, 0.25),
        "o_err_max_ulp": np.full(count, 0.5),
        "o_err_feature": np.zeros(count, np.int64),
    }
    return HeadRows(**(fields | changes))


def row(record: AttentionRecord, name: str, token: int) -> tuple[TokenError, TokenVectors]:
    dual = dual_pass(record, resolve(name))
    assert dual.delta is not None
    assert record.do is not None
    rows = head_rows(dual.delta.delta_err[0].tolist())
    vectors = TokenVectors(
        do=record.do[0, token].double().numpy(),
        o_lp=dual.o_lp[0, token].numpy(),
        o_hp=dual.o_hp[0, token].numpy(),
        o_err=dual.o_err[0, token].numpy(),
    )
    return rows.token_error(0, token), vectors


@pytest.mark.parametrize("token", [1, 9, 23])
@pytest.mark.parametrize("name", ["fa2", "fa2+o_bar=bf16", "paper", "sdpa-cpu", "flex"])
def test_contributions_and_rounding_of_delta_add_up_to_the_delta_error(
    make_record: Make, name: str, token: int
) -> None:
    error, vectors = row(make_record(heads=1, kv_heads=1), name, token)
    found = token_trace(error, vectors, "bf16")
    assert math.fsum([found.contributions, found.remainder]) == error.delta_err
    assert found.contributions == math.fsum(f.do * f.o_err for f in found.features)
    by_sign = math.fsum(cell.contribution for cell in found.signs.cells)
    # The sum of a cell is rounded once before the four are added.
    assert abs(found.contributions - by_sign) <= 2.0**-51 * math.fsum(abs(f.contribution) for f in found.features)
    # What is left is delta's own rounding to FP32, and the float64 noise of sums of terms of its size.
    magnitude = math.fsum(abs(f.do * f.o_lp) for f in found.features)
    delta = abs(math.fsum(f.do * f.o_lp for f in found.features))
    assert abs(found.remainder) <= 2.0**-24 * delta + 2.0**-48 * magnitude


@pytest.mark.parametrize("name", ["eager", "sdpa-math", "fa2+delta_source=dp", "fa2+delta_products=bf16,delta=bf16"])
def test_everything_that_does_not_come_from_o_is_remainder(make_record: Make, name: str) -> None:
    error, vectors = row(make_record(heads=1, kv_heads=1), name, 20)
    found = token_trace(error, vectors, "bf16")
    # The difference of the two is rounded once.
    total = math.fsum([found.contributions, found.remainder, -error.delta_err])
    assert abs(total) <= 2.0**-53 * max(abs(found.contributions), abs(error.delta_err)) * 2
    assert abs(found.remainder) > 2.0**-20 * abs(found.contributions)


def test_features_are_ranked_and_keep_their_numbers(make_record: Make) -> None:
    error, vectors = row(make_record(heads=1, kv_heads=1), "paper", 15)
    found = token_trace(error, vectors, "bf16")
    assert sorted(f.feature for f in found.features) == list(range(8))
    sizes = [abs(f.contribution) for f in found.features]
    assert sizes == sorted(sizes, reverse=True)
    for f in found.features:
        assert vectors.do is not None
        assert (f.do, f.o_lp, f.o_hp) == tuple(x[f.feature] for x in (vectors.do, vectors.o_lp, vectors.o_hp))
        ulp = 2.0 ** (math.floor(math.log2(abs(f.o_hp))) - 7)
        assert f.o_err_ulp == f.o_err / ulp


def test_the_sign_table_counts_the_four_pairs() -> None:
    do = np.array([1.0, 2.0, -1.0, 3.0, -2.0, 0.0, 5.0])
    err = np.array([1.0, 0.5, -1.0, -1.0, 4.0, 1.0, 0.0])
    found = sign_table(do, err)
    assert [(c.sign_do, c.sign_err, c.features, c.contribution) for c in found.cells] == [
        (1, 1, 2, 2.0),
        (-1, -1, 1, 1.0),
        (1, -1, 1, -3.0),
        (-1, 1, 1, -8.0),
    ]
    assert found.zero == 2
    assert found.correlation == (3 - 2) / 5


def test_without_signs_there_is_no_correlation() -> None:
    found = sign_table(np.zeros(3), np.ones(3))
    assert math.isnan(found.correlation)
    assert (found.zero, [cell.features for cell in found.cells]) == (3, [0, 0, 0, 0])


@given(hnp.arrays(np.float64, (2, 9), elements=st.floats(-4, 4, width=16)))
def test_flipping_dO_swaps_the_signs(values: np.ndarray) -> None:
    found, flipped = sign_table(*values), sign_table(-values[0], values[1])
    assert flipped.zero == found.zero
    pairs = [(cell.features, cell.contribution) for cell in found.cells]
    # (+,+) <-> (-,+), (-,-) <-> (+,-).
    assert [(cell.features, -cell.contribution) for cell in flipped.cells] == [pairs[i] for i in (3, 2, 1, 0)]


def test_rows_are_ranked_over_all_sequences_and_ties_keep_their_order() -> None:
    first = head_rows([1.0, -3.0, 0.5], sequence=4)
    second = head_rows([3.0, 9.0, -1.0], sequence=7, rows=np.array([True, False, True]), ones=None)
    found = ranked_tokens([first, second])
    assert [(t.index, t.sequence, t.token, t.delta_err) for t in found] == [
        (0, 4, 1, -3.0),
        (1, 7, 0, 3.0),
        (0, 4, 0, 1.0),
        (1, 7, 2, -1.0),
        (0, 4, 2, 0.5),
    ]
    assert (found[0].defect, found[0].visible, found[0].ones, found[0].step) == (-1.5, 2, 1, 401)
    assert found[1].ones is None
    assert ranked_tokens([first, second], most=2) == found[:2]
    errors = delta_errors([first, second])
    assert np.isnan(errors).tolist() == [[False] * 3, [False, True, False]]


def test_signs_count_beyond_the_order_of_a_sum_only() -> None:
    rows = head_rows([0.25, -0.25, 0.26, -0.26, -7.0], rows=np.array([True, True, True, True, False]))
    assert (rows.positive, rows.negative) == (1, 1)
    assert [rows.token_error(0, t).sign_counts for t in range(4)] == [False, False, True, True]


def test_without_a_delta_rows_are_ranked_by_the_error_of_o() -> None:
    rows = head_rows(None, o_err_max_ulp=np.array([0.1, 0.9, 7.0, 0.4]), rows=np.array([True, True, False, True]))
    found = ranked_tokens([rows])
    assert [token.token for token in found] == [1, 3, 0]
    assert all(math.isnan(token.delta_err) and not token.sign_counts for token in found)
    assert (rows.positive, rows.negative) == (0, 0)
    assert np.isnan(delta_errors([rows])).all()


def test_sequences_of_different_lengths_are_filled_up() -> None:
    errors = delta_errors([head_rows([1.0]), head_rows([2.0, 3.0])])
    assert errors.shape == (2, 2)
    assert math.isnan(errors[0, 1])
    assert ranked_tokens([]) == ()
