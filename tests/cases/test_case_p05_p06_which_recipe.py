"""P05: the row sum and the product with V use different copies of P-bar. P06: where the score is rounded."""

from typing import Any

import numpy as np
import pytest


def over_ones(record: Any) -> Any:
    k = np.tile([-1.375, -0.25, 0.0, 0.0], (64, 1))
    k[0] = 0.0
    return record([[1.0, 1 / 64, 0.0, 0.0]], k, np.ones((64, 4)))


@pytest.mark.parametrize(
    ("recipe", "o", "delta_error"),
    [
        ("fa2", 0.99609375, -0.015625),
        ("fa2+o_bar=bf16", 0.99609375, -0.015625),
        ("fa2+row_sum_input=bf16", 1.0, 0.0),
        ("fa2+p_bar=fp32", 1.0, 0.0),
        ("paper", 1.0, 0.0),
        ("sdpa-math", 1.0, 0.0),
    ],
)
def test_p05_output_over_ones(
    localize: Any, passes: Any, record: Any, recipe: str, o: float, delta_error: float
) -> None:
    tensors = over_ones(record)
    (dual,) = passes(tensors, recipe)
    assert dual.o_lp.flatten().tolist() == [o] * 4
    assert dual.o_hp.flatten().tolist() == pytest.approx([1.0] * 4, abs=1e-15)
    head = localize(tensors, "--recipe", recipe, "--reference", "fp64").head
    assert head["output_err"]["max_abs"] == pytest.approx(1.0 - o, abs=1e-15)
    assert head["delta_err"]["sum"] == pytest.approx(delta_error, abs=1e-14)
    if delta_error == 0.0:
        assert head["delta_err"]["zero"] == 1
    else:
        assert (head["delta_err"]["negative"], head["output_err"]["mean_ulp"]) == (1, pytest.approx(-1.0))


@pytest.mark.parametrize(("recipe", "delta_error"), [("fa2", -0.015625), ("fa2+row_sum_input=bf16", 0.0)])
def test_p05_against_an_fp32_reference(localize: Any, record: Any, recipe: str, delta_error: float) -> None:
    """T2: sums of 64 FP32 terms on the reference's side, four of them in delta."""
    error = localize(over_ones(record), "--recipe", recipe, "--reference", "fp32").head["delta_err"]["sum"]
    assert error == pytest.approx(delta_error, abs=4 * 64 * 2.0**-24)


def test_p05_scores_and_row_sum(passes: Any, record: Any) -> None:
    (dual,) = passes(over_ones(record))
    assert dual.maxima.score_abs_max.item() == 0.689453125
    assert np.exp(dual.lse_lp.item()) == pytest.approx(32.6166, abs=5e-5)


def test_p05_the_report_names_which_row_sum_it_models(localize: Any, record: Any) -> None:
    for recipe, value in (("fa2", "fp32"), ("fa2+row_sum_input=bf16", "bf16")):
        document = localize(over_ones(record), "--recipe", recipe).document
        points = document["recipe"]
        assert points["name"] == recipe
        assert points["row_sum_input"] == value


def test_p05_neighbour_where_p_bar_is_exact(localize: Any, record: Any) -> None:
    """P-bar that BF16 holds needs no cast, and the invariant holds in fa2 too."""
    tensors = record([[0.0] * 4], np.zeros((64, 4)), np.ones((64, 4)))
    head = localize(tensors).head
    assert (head["delta_err"]["sum"], head["output_err"]["max_abs"]) == (0.0, 0.0)


def two_keys(record: Any) -> Any:
    return record([[8.0, 1.0, 0.0, 0.0]], [[15.0, 0, 0, 0], [15.0, 0.1875, 0, 0]], [[0.0], [1.0]])


@pytest.mark.parametrize(
    ("recipe", "ones", "o"),
    [("fa2", 1, 0.5234375), ("fa2+scores=bf16", 2, 0.5), ("paper", 2, 0.5), ("sdpa-math", 1, 0.5234375)],
)
def test_p06_where_the_score_is_rounded(
    localize: Any, passes: Any, record: Any, recipe: str, ones: int, o: float
) -> None:
    tensors = two_keys(record)
    (dual,) = passes(tensors, recipe)
    assert dual.o_lp.item() == o
    assert dual.o_hp.item() == pytest.approx(0.523420, abs=5e-7)
    assert dual.maxima.score_abs_max.item() == 60.09375
    head = localize(tensors, "--recipe", recipe).head
    assert head["ones"]["rounded"] == ones
    assert head["ones"]["shared_maximum"] == 1
    assert head["rows_repeated_max"] == ones - 1
    assert head["output_err"]["max_abs"] == pytest.approx(abs(o - 0.523420), abs=5e-7)


def test_p06_neighbour_that_bf16_can_tell_apart(localize: Any, record: Any) -> None:
    """Scores 60 and 60.25 are two BF16 numbers, so rounding them makes no tie."""
    tensors = record([[8.0, 1.0, 0.0, 0.0]], [[15.0, 0, 0, 0], [15.0, 0.5, 0, 0]], [[0.0], [1.0]])
    assert localize(tensors, "--recipe", "fa2+scores=bf16").head["ones"]["rounded"] == 1


def test_p06_the_same_numbers_with_native_settings_changed(localize: Any, record: Any) -> None:
    import torch

    plain = localize(two_keys(record), "--recipe", "paper").head
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert localize(two_keys(record), "--recipe", "paper").head == plain
