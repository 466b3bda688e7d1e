"""Running sums without rounding, and with one rounding an addition, against fractions."""

import math
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16forensics.evidence.trace.exact_prefix import exact_prefixes, round_float, rounded_sums
from bf16forensics.floats import scalar
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import BF16, E4M3, FP16, FP32, FloatFormat

#: Each example costs a millisecond of fractions.
FEW = settings(max_examples=40)
FORMATS = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)


@st.composite
def bf16_products(draw: st.DrawFn, spread: int = 60) -> list[float]:
    """Products of two BF16 numbers each, over a range of exponents that float64 cannot add exactly."""
    number = st.tuples(st.integers(-255, 255), st.integers(-spread, 3)).map(lambda n: math.ldexp(n[0], n[1]))
    value = st.integers(-255, 255).map(lambda n: n / 64)
    return [p * v for p, v in draw(st.lists(st.tuples(number, value), min_size=1, max_size=12))]


def fraction_sums(products: list[float]) -> list[Fraction]:
    return list(accumulate(Fraction(product) for product in products))


def one_tile(products: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(products), np.zeros(len(products), np.int64), np.ones(1, np.float32)


@FEW
@given(bf16_products())
def test_prefixes_are_the_nearest_float64_to_the_exact_sums(products: list[float]) -> None:
    found = exact_prefixes(*one_tile(products))
    assert found.nearest.tolist() == [float(total) for total in fraction_sums(products)]


@FORMATS
@FEW
@given(bf16_products())
def test_odd_prefixes_round_as_the_exact_sums_do(fmt: FloatFormat, products: list[float]) -> None:
    found = round_to(exact_prefixes(*one_tile(products)).odd, fmt)
    assert found.tolist() == [scalar.round_to(total, fmt) for total in fraction_sums(products)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("tiny", "expected"), [(2.0**-80, 1 + 2.0**-7), (0.0, 1.0), (-(2.0**-80), 1.0)])
def test_a_tie_falls_to_the_side_of_what_float64_cannot_hold(tiny: float, expected: float, sign: int) -> None:
    products = [sign * tiny, sign * (1 + 2.0**-8)]
    assert round_to(exact_prefixes(*one_tile(products)).odd, BF16)[-1] == sign * expected
    # Stored first, the tiny number still decides the tie of the one rounding that follows.
    assert rounded_sums(np.array(products), BF16)[-1] == sign * expected


@FORMATS
@FEW
@given(bf16_products())
def test_each_addition_is_one_rounding_of_the_exact_sum(fmt: FloatFormat, products: list[float]) -> None:
    running = Fraction(0)
    expected = []
    for product in products:
        running = Fraction(scalar.round_to(running + Fraction(product), fmt))
        expected.append(float(running))
    assert rounded_sums(np.array(products), fmt).tolist() == expected


def test_an_overflow_stays() -> None:
    assert rounded_sums(np.array([60000.0, 60000.0, -60000.0]), FP16).tolist() == [60000.0, math.inf, math.inf]


@pytest.mark.parametrize("fmt", [E4M3, FP16, BF16, FP32], ids=lambda fmt: fmt.name)
@FEW
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_one_number_is_what_the_specification_says(fmt: FloatFormat, value: float) -> None:
    expected = scalar.round_to(value, fmt)
    found = round_float(value, fmt)
    assert (found, math.copysign(1, found)) == (expected, math.copysign(1, expected))


@FEW
@given(
    bf16_products(spread=20),
    st.lists(st.floats(2.0**-20, 1.0, width=32), min_size=12, max_size=12),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_factors_multiply_everything_before_their_tile(
    products: list[float], alphas: list[float], sizes: list[int]
) -> None:
    tile = np.repeat(np.arange(12), sizes)[: len(products)]
    found = exact_prefixes(np.array(products), tile, np.array(alphas, np.float32))
    total = magnitude = Fraction(0)
    for index, product in enumerate(products):
        if index and tile[index] != tile[index - 1]:
            total, magnitude = total * Fraction(alphas[tile[index]]), magnitude * Fraction(alphas[tile[index]])
        total, magnitude = total + Fraction(product), magnitude + abs(Fraction(product))
        # Two roundings to float64 a rescaling and one at the end, each 2^-53 of something no larger than the
        # magnitude.
        allowed = magnitude * (2 * int(tile[index]) + 1) * Fraction(1, 2**53)
        assert abs(Fraction(found.nearest[index]) - total) <= allowed


@pytest.mark.parametrize("products", [[0.0], [0.0, 0.0], [1.5, -1.5, 0.0]])
def test_zeros_and_cancellation(products: list[float]) -> None:
    found = exact_prefixes(*one_tile(products))
    assert found.nearest.tolist() == found.odd.tolist() == [float(total) for total in fraction_sums(products)]
