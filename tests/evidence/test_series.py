"""Streamed signed statistics against one dense computation over all rows."""

import math

import numpy as np
import pytest

from bf16forensics.evidence.results import SignedStatistics
from bf16forensics.evidence.series import SignedSeries, undefined_statistics
from bf16forensics.evidence.statistics import student_two_sided

HEADS = 3


def stream(values: np.ndarray, rows: np.ndarray, floor: np.ndarray, spare: int = 0) -> list[SignedStatistics]:
    """Adds [S, F, N] sequence by sequence."""
    series = SignedSeries(HEADS, values.shape[0] * values.shape[2] + spare)
    for one in zip(values, rows, floor, strict=True):
        series.add(*one)
    return [series.result(head) for head in range(HEADS)]


def draw(seed: int, sequences: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.Generator(np.random.PCG64(seed))
    shape = (sequences, HEADS, tokens)
    rows = generator.random(shape) > 0.2
    # Heavy tails, so that the largest rows sit in some sequences more than in others.
    values = generator.standard_t(2, shape) * rows * generator.lognormal(0, 1, (sequences, 1, 1))
    return values, rows, np.abs(generator.standard_normal(shape)) * 0.3


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 7), (2, 50), (7, 333), (12, 41)])
@pytest.mark.parametrize("spare", [0, 5000])
def test_streaming_is_the_dense_computation(sequences: int, tokens: int, spare: int) -> None:
    values, rows, floor = draw(sequences, sequences, tokens)
    for head, found in enumerate(stream(values, rows, floor, spare)):
        mask = rows[:, head].ravel()
        all_rows = values[:, head].ravel()[mask]
        limits = floor[:, head].ravel()[mask]
        n = all_rows.size
        assert found.sum == pytest.approx(all_rows.sum(), rel=1e-12, abs=1e-12)
        assert found.mean == pytest.approx(all_rows.mean(), rel=1e-12, abs=1e-12)
        assert found.standard_error == pytest.approx(all_rows.std(ddof=1) / math.sqrt(n), rel=1e-10)
        assert found.z == pytest.approx(found.mean / found.standard_error)
        assert found.positive == int((all_rows > limits).sum())
        assert found.negative == int((all_rows < -limits).sum())
        assert found.positive + found.negative + found.zero == n
        by_sequence = values[:, head].sum(1)
        assert found.clustered.sequences == sequences
        assert found.clustered.mean == pytest.approx(by_sequence.mean(), rel=1e-12)
        if sequences > 1:
            assert found.clustered.standard_error == pytest.approx(by_sequence.std(ddof=1) / math.sqrt(sequences))
            assert found.clustered.p == pytest.approx(student_two_sided(found.clustered.t, sequences - 1))
        else:
            assert math.isnan(found.clustered.standard_error)
            assert math.isnan(found.clustered.p)
        size = np.abs(all_rows)
        assert found.robust.n_effective == pytest.approx(size.sum() ** 2 / (size**2).sum(), rel=1e-12)
        assert found.robust.largest_share == pytest.approx(size.max() / size.sum(), rel=1e-12)
        without = np.delete(all_rows, np.argsort(-size, kind="stable")[: math.ceil(n / 100)])
        assert found.robust.sign_without_top_1_percent == np.sign(without.sum())


def test_the_top_rows_are_those_of_all_sequences_together() -> None:
    # 2 sequences of 100 rows: the 2 largest of all 200 rows lie in the first; one of each would leave -50 behind.
    values = np.full((2, HEADS, 100), 0.1)
    values[0, :, 3] = -100.0
    values[0, :, 7] = -50.0
    values[1, :, 5] = -3.0
    found = stream(values, np.ones_like(values, bool), np.zeros_like(values))[0]
    assert found.sum < 0
    assert found.robust.sign_without_top_1_percent == 1


def test_a_sum_that_vanishes_without_its_top_rows_has_no_sign() -> None:
    values = np.zeros((1, HEADS, 50))
    values[:, :, 9] = 0.3
    found = stream(values, np.ones_like(values, bool), np.zeros_like(values))[0]
    assert found.robust.sign_without_top_1_percent == 0
    assert found.robust.largest_share == 1.0
    assert found.robust.n_effective == pytest.approx(1.0)


def test_signs_count_only_above_the_floor() -> None:
    values = np.array([[[0.5, -0.5, 0.5, -0.6, 0.4, 0.0]]] * 1).repeat(HEADS, axis=1)
    floor = np.full_like(values, 0.5)
    rows = np.ones_like(values, bool)
    found = stream(values, rows, floor)[0]
    assert (found.positive, found.negative, found.zero) == (0, 1, 5)
    exact = stream(values, rows, np.zeros_like(values))[0]
    assert (exact.positive, exact.negative, exact.zero) == (3, 2, 1)


def test_rows_that_do_not_count_do_not_count() -> None:
    values = np.array([[[1.0, 0.0, 3.0, 0.0]]]).repeat(HEADS, axis=1)
    rows = np.array([[[True, False, True, False]]]).repeat(HEADS, axis=1)
    found = stream(values, rows, np.zeros_like(values))[0]
    assert found.mean == 2.0
    assert (found.positive, found.negative, found.zero) == (2, 0, 0)


def test_all_zero_rows_are_zero_and_not_undefined() -> None:
    values = np.zeros((3, HEADS, 10))
    found = stream(values, np.ones_like(values, bool), np.zeros_like(values))[0]
    assert (found.sum, found.mean, found.standard_error, found.z) == (0.0, 0.0, 0.0, 0.0)
    assert (found.positive, found.negative, found.zero) == (0, 0, 30)
    assert (found.clustered.t, found.clustered.p) == (0.0, 1.0)
    assert math.isnan(found.robust.n_effective)
    assert math.isnan(found.robust.largest_share)


def test_equal_sums_have_no_error_and_an_infinite_t() -> None:
    values = np.full((4, HEADS, 5), 0.25)
    found = stream(values, np.ones_like(values, bool), np.zeros_like(values))[0]
    assert found.clustered.t == math.inf
    assert found.clustered.p == 0.0


def test_no_row_at_all_is_undefined() -> None:
    values = np.zeros((2, HEADS, 4))
    found = stream(values, np.zeros_like(values, bool), np.zeros_like(values))[0]
    assert repr(found) == repr(undefined_statistics(2))
    assert math.isnan(found.sum)
    assert (found.positive, found.negative, found.zero) == (0, 0, 0)
    assert found.clustered.sequences == 2


def test_one_row_has_a_mean_and_no_error() -> None:
    values = np.full((1, HEADS, 1), 2.0)
    found = stream(values, np.ones_like(values, bool), np.zeros_like(values))[0]
    assert found.mean == 2.0
    assert math.isnan(found.standard_error)
    assert math.isnan(found.z)


def test_heads_are_kept_apart() -> None:
    values, rows, floor = draw(5, 4, 60)
    together = stream(values, rows, floor)
    for head in range(HEADS):
        alone = np.repeat(values[:, head : head + 1], HEADS, 1)
        alone_rows, alone_floor = (np.repeat(part[:, head : head + 1], HEADS, 1) for part in (rows, floor))
        assert stream(alone, alone_rows, alone_floor)[0] == together[head]
