"""P03: several keys share the row maximum, and rounding the output leans to one side; two recipes disagree which."""

from typing import Any

import numpy as np
import pytest

Q = [[1.0, 0.0]] * 4
K = [[2.0, 0.0], [2.0, 0.0], [1.0, 0.0], [2.0, 0.0]]
V = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
LP_PAPER = "fa2+o_bar=bf16"


def statistics_record(record: Any, sign: float = -1.0) -> Any:
    t = np.arange(128)
    column = sign * (128 + (37 * t) % 128) / 64
    zeros = np.zeros((128, 2))
    return record(zeros, zeros, np.stack([column, column], 1))


@pytest.mark.parametrize("recipe", ["fa2", LP_PAPER, "paper", "sdpa-math", "fa2+scores=bf16"])
def test_a_counts_of_ones(localize: Any, record: Any, recipe: str) -> None:
    found = localize(record(Q, K, V), "--recipe", recipe)
    assert found.exit_code == 0
    assert found.head["ones"] == {"fp32_exact": 8, "rounded": 8, "shared_maximum": 8}
    assert (found.head["rows"], found.head["rows_repeated_max"], found.head["most_ones"]) == (4, 3, 3)
    assert found.head["pairs"] == 10
    assert found.document["recipe"]["name"] == recipe


def test_a_ones_by_row(passes: Any, record: Any) -> None:
    (dual,) = passes(record(Q, K, V))
    assert dual.maxima.ones_rounded.tolist() == [[1, 2, 2, 3]]
    (dual,) = passes(record(Q, K, V), causal=False)
    assert dual.maxima.ones_rounded.tolist() == [[3, 3, 3, 3]]


def test_a_without_the_mask(localize: Any, record: Any) -> None:
    head = localize(record(Q, K, V), "--no-causal").head
    assert (head["ones"]["rounded"], head["rows_repeated_max"], head["pairs"]) == (12, 4, 16)


def test_a_neighbour_with_a_near_tie(localize: Any, record: Any) -> None:
    """A gap of 2^-9.5 nats still rounds to 1 in BF16; it is no tie in FP32 and no shared maximum."""
    k = np.zeros((2, 2))
    near = record([[1.0, 0.0]], k, [[1.0, 0.0], [2.0, 0.0]], mask=np.array([[0.0, -(2.0**-9.5)]], np.float32))
    assert localize(near).head["ones"] == {"fp32_exact": 1, "rounded": 2, "shared_maximum": 1}
    far = record([[1.0, 0.0]], k, [[1.0, 0.0], [2.0, 0.0]], mask=np.array([[0.0, -(2.0**-8.5)]], np.float32))
    assert localize(far).head["ones"] == {"fp32_exact": 1, "rounded": 1, "shared_maximum": 1}


@pytest.mark.parametrize("recipe", ["fa2", LP_PAPER, "paper"])
def test_b_one_event(localize: Any, passes: Any, record: Any, recipe: str) -> None:
    zeros = np.zeros((2, 2))
    tensors = record(zeros, zeros, [[-2.40625] * 2, [-2.296875] * 2])
    (dual,) = passes(tensors, recipe)
    assert dual.o_hp[0, 1].tolist() == [-2.3515625] * 2
    assert dual.o_lp[0, 1].tolist() == [-2.34375] * 2
    assert dual.o_err[0, 1].tolist() == [0.0078125] * 2
    assert dual.delta.delta_err[0].tolist() == [0.0, 0.015625]
    head = localize(tensors, "--recipe", recipe).head
    assert head["delta_err"]["sum"] == 0.015625
    assert (head["delta_err"]["positive"], head["delta_err"]["negative"], head["delta_err"]["zero"]) == (1, 0, 1)
    assert (head["output_err"]["max_abs"], head["output_err"]["token"]) == (0.0078125, 1)
    assert head["output_err"]["max_ulp"] == 0.5


@pytest.mark.parametrize("reference", ["fp64", "fp32"])
@pytest.mark.parametrize(
    ("recipe", "mean", "signs", "largest", "row"),
    [("fa2", -0.00183779, (57, 66, 5), 0.015625, 1), (LP_PAPER, 0.00206846, (73, 50, 5), 0.0301724, 28)],
)
def test_c_statistics(
    localize: Any,
    passes: Any,
    record: Any,
    recipe: str,
    reference: str,
    mean: float,
    signs: tuple[int, int, int],
    largest: float,
    row: int,
) -> None:
    tensors = statistics_record(record)
    found = localize(tensors, "--recipe", recipe, "--reference", reference)
    error = found.head["delta_err"]
    assert found.head["ones"] == {"fp32_exact": 8256, "rounded": 8256, "shared_maximum": 8256}
    assert found.head["rows_repeated_max"] == 127
    assert error["mean"] == pytest.approx(mean, abs=5e-9)
    assert error["sum"] == pytest.approx(128 * mean, abs=1e-6)
    assert (error["positive"], error["negative"], error["zero"]) == signs
    assert found.document["recipe"]["name"] == recipe
    assert found.document["reference"] == reference
    (dual,) = passes(tensors, recipe, reference)
    assert dual.delta.delta_err.max().item() == pytest.approx(largest, abs=5e-8)
    assert dual.delta.delta_err.argmax().item() == row


@pytest.mark.parametrize("recipe", ["fa2", LP_PAPER])
def test_c_with_all_signs_flipped(localize: Any, record: Any, recipe: str) -> None:
    """V and dO both negated: O err flips, dO flips, delta error stays; V alone negated: it flips."""
    plain = localize(statistics_record(record), "--recipe", recipe).head["delta_err"]
    flipped = localize(statistics_record(record, 1.0), "--recipe", recipe).head["delta_err"]
    assert flipped["sum"] == -plain["sum"]
    assert (flipped["positive"], flipped["negative"]) == (plain["negative"], plain["positive"])
    both = statistics_record(record, 1.0)
    both["do"] = -both["do"]
    assert localize(both, "--recipe", recipe).head["delta_err"]["sum"] == plain["sum"]


def test_c_the_recipes_disagree_about_the_sign(localize: Any, record: Any) -> None:
    tensors = statistics_record(record)
    means = [localize(tensors, "--recipe", recipe).head["delta_err"]["mean"] for recipe in ("fa2", LP_PAPER)]
    assert means[0] < 0 < means[1]


def test_a_single_sequence_is_no_verdict(localize: Any, record: Any) -> None:
    found = localize(statistics_record(record))
    assert found.exit_code == 0
    assert found.document["verdict"] == "cannot judge"
    assert "BF101" in found.codes()
