"""The law of ties and residues against exact enumeration, and the terms of single roundings against fractions."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import BF16, E4M3, FP16, FP32, FloatFormat
from bf16forensics.floats.ties import MOST_BITS, steps_at, tie_law, tie_law_array, tie_terms
from bf16forensics.floats.ulp import ulp


def enumerated(bits: int, residue: Fraction, odd: int) -> Fraction:
    """Mean of round(x) - x over every place of the grid within two ulps, so that halves go to both parities."""
    places = odd << (bits + 1)
    # round() of a fraction takes halves to even.
    errors = [
        round(value) - value for value in (Fraction(j, odd << bits) + residue + 4 * places for j in range(places))
    ]
    return sum(errors, Fraction(0)) / places


@pytest.mark.parametrize("odd", [1, 3, 7])
@pytest.mark.parametrize("bits", range(5))
def test_the_law_is_the_mean_over_the_grid(bits: int, odd: int) -> None:
    """T1: residues on, between and beside the places, beyond one ulp, of either sign; the law rounds once."""
    for part in range(-80, 81):
        residue = Fraction(part, 64)
        assert tie_law(bits, float(residue), odd) == float(enumerated(bits, residue, odd))


@given(
    bits=st.integers(0, 5),
    odd=st.sampled_from([1, 3, 5]),
    residue=st.floats(-3, 3, allow_subnormal=False),
)
def test_the_law_takes_any_residue(bits: int, odd: int, residue: float) -> None:
    assert tie_law(bits, residue, odd) == float(enumerated(bits, Fraction(residue), odd))


@pytest.mark.parametrize(
    ("bits", "residue", "expected"),
    [
        (1, 0.0, 0.0),
        (1, 2.0**-40, 0.25 - 2.0**-40),
        (1, -(2.0**-40), -0.25 + 2.0**-40),
        (1, 0.1, 0.15),
        (1, 0.5, 0.0),
        (1, 0.6, 0.15),
        (2, 0.01, 0.115),
        (3, 0.01, 0.0525),
        (0, 0.01, -0.01),
        (0, 0.49, -0.49),
        (0, 0.5, 0.0),
        (0, 0.51, 0.49),
        (0, -0.3, 0.3),
        (0, 1.25, -0.25),
        (MOST_BITS, 0.3, 0.0),
    ],
)
def test_values_of_the_law(bits: int, residue: float, expected: float) -> None:
    assert tie_law(bits, residue) == pytest.approx(expected, abs=1e-15)


@given(
    st.lists(
        st.tuples(st.integers(0, MOST_BITS), st.floats(-100, 100), st.sampled_from([1, 3, 63])), min_size=1, max_size=20
    )
)
def test_arrays_follow_the_law(cases: list[tuple[int, float, int]]) -> None:
    """Bit for bit for q = 1. A product by another q rounds, which moves a jump by 2^-52 of r."""
    bits, residue, odd = (np.array(part) for part in zip(*cases, strict=True))
    found = tie_law_array(bits, residue, odd)
    for index, (d, r, q) in enumerate(cases):
        near = [tie_law(d, r, q)]
        if q > 1:
            near += [tie_law(d, r * (1 + slip), q) for slip in (-(2.0**-51), 2.0**-51)]
        limit = 0.0 if q == 1 else 2.0**-50 * max(abs(r), 1.0)
        assert min(abs(found[index] - value) for value in near) <= limit


@pytest.mark.parametrize("residue", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_law(residue: float) -> None:
    assert math.isnan(tie_law(1, residue))
    assert math.isnan(tie_law_array(np.array([1]), np.array([residue]))[0])


@pytest.mark.parametrize(("bits", "odd"), [(-1, 1), (MOST_BITS + 1, 1), (1, 0), (1, 2), (1, -3)])
def test_the_law_refuses_other_grids(bits: int, odd: int) -> None:
    with pytest.raises(InputError, match="odd divisor"):
        tie_law(bits, 0.1, odd)
    with pytest.raises(InputError, match="odd divisor"):
        tie_law_array(np.array([0, bits]), np.array([0.1, 0.1]), np.array([1, odd]))


def test_an_empty_array_stays_empty() -> None:
    assert tie_law_array(np.zeros(0, np.int64), np.zeros(0)).shape == (0,)


def sums_of_significands(k: int) -> dict[int, int]:
    """How often k significands of 128 to 255 add up to each number, over all 128^k choices."""
    counts = np.array([1], dtype=object)
    for _ in range(k):
        counts = np.convolve(counts, np.ones(128, dtype=object))
    return {128 * k + index: int(count) for index, count in enumerate(counts)}


#: Sums of k BF16 numbers of one binade: P(tie), mean error without residue, with one of the same and of the other
#: sign, as small as can be.
TABLE = {
    1: (0.0, 0.0, 0.0, 0.0),
    2: (0.5, 0.0, 0.25, -0.25),
    3: (0.293152, -0.000500, 0.146076, -0.147076),
    4: (0.25, 0.0, 0.125, -0.125),
    5: (0.222978, -0.000657, 0.110832, -0.112146),
    8: (0.125, 0.0, 0.0625, -0.0625),
    16: (0.0625, 0.0, 0.03125, -0.03125),
}


@pytest.mark.parametrize("k", TABLE)
def test_all_sums_of_a_binade(k: int) -> None:
    """T1: every sum counted, each rounded by fractions; the law, which takes sums for uniform, comes within 0.001."""
    counts = sums_of_significands(k)
    assert sum(counts.values()) == 128**k
    tiny = Fraction(1, 2**40)
    found = np.zeros(4, dtype=object)
    law = 0.0
    for total, count in counts.items():
        bits = total.bit_length() - 8
        kept = Fraction(total, 1 << bits)
        found[0] += count * (kept % 1 == Fraction(1, 2))
        for place, residue in ((1, Fraction(0)), (2, tiny), (3, -tiny)):
            # Next to a power of two from below, steps are half as large.
            step = Fraction(1, 2) if kept + residue < 128 else Fraction(1)
            value = (kept + residue) / step
            found[place] += count * (round(value) - value) * step
        law += count / 128**k * tie_law(bits, float(tiny))
    shares = [float(value / 128**k) for value in found]
    assert shares == pytest.approx(TABLE[k], abs=6e-7)
    assert law == pytest.approx(TABLE[k][2], abs=1e-9 if k & (k - 1) == 0 else 1e-3)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_sums_of_mixed_signs_are_not_biased(k: int) -> None:
    """Residues of either sign equally often: what is left is the mean of both."""
    assert (TABLE[k][2] + TABLE[k][3]) / 2 == pytest.approx(TABLE[k][1], abs=1e-6)


def terms_of(main: float, grid: float, before: float, after: float, odd: int = 1) -> list[float]:
    found = tie_terms(*(np.array([value]) for value in (main, grid, before, after)), BF16, odd)
    assert found.defined.all()
    return [found.bits_dropped[0], found.residue[0], found.error[0], found.law[0], bool(found.halfway[0])]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_tie_with_a_residue(sign: float) -> None:
    """The published sum: -2.40625 - 0.00086546 - 2.296875 lies 2^-15 beyond halfway between two BF16 numbers."""
    main, before, after = 4.703125, 4.703990459442139, 4.71875
    found = terms_of(-sign * main, 2.0**-6, -sign * before, -sign * after)
    ulp = 2.0**-5
    residue = (before - main) / ulp
    assert found == [1, residue, (after - before) / ulp, 0.25 - residue, True]
    assert found[2] == pytest.approx(0.014759540557861328 / ulp)


@pytest.mark.parametrize(
    ("main", "grid", "before", "after", "expected"),
    [
        # On the grid of the result: the residue alone is lost.
        (4.6875, 2.0**-5, 4.6875 + 2.0**-8, 4.6875, [0, 0.125, -0.125, -0.125, False]),
        # Two bits dropped, no residue.
        (4.6875 + 2.0**-7, 2.0**-7, 4.6875 + 2.0**-7, 4.6875, [2, 0.0, -0.25, 0.0, False]),
        # The residue is larger than the main sum and of the other sign: away from zero means along the value.
        (-(2.0**-9), 2.0**-16, 4.6875 + 2.0**-8, 4.6875, [11, -150.1875, -0.125, 0.0, False]),
        # No main sum left: the value is all residue.
        (0.0, 2.0**-16, -(4.6875 + 2.0**-8), -4.6875, [11, 150.125, -0.125, 0.0, False]),
        # Every number of the main sum is 0: it lies on any grid.
        (0.0, math.inf, 4.6875 + 2.0**-8, 4.6875, [0, 150.125, -0.125, -0.125, False]),
        # A grid coarser than the result's.
        (4.0, 2.0, 4.0 + 2.0**-8, 4.0, [0, 0.125, -0.125, -0.125, False]),
    ],
)
def test_terms_of_one_rounding(main: float, grid: float, before: float, after: float, expected: list[float]) -> None:
    assert terms_of(main, grid, before, after) == expected


def test_a_third_lies_halfway_only_where_it_can_be_held() -> None:
    """(128 + 129 + 130.5 + ...) / 3: main sums of 3 on a half, and what FP32 makes of other thirds is no residue."""
    half = (3 * 129 + 1.5) / 3
    assert terms_of(half, 0.5, half, 130.0, odd=3) == [1, 0.0, 0.5, 0.0, True]
    third = 388 / 3
    near = float(np.float32(third))
    found = tie_terms(*(np.array([value]) for value in (third, 1.0, near, 129.0)), BF16, 3, noise=3 * 2.0**-24)
    assert found.law[0] == 0.0
    assert found.residue[0] == near - third
    heard = tie_terms(*(np.array([value]) for value in (third, 0.5, third + 0.001, 129.0)), BF16, 3, noise=3 * 2.0**-24)
    assert heard.law[0] == pytest.approx(1 / 12 - 0.001)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_what_is_not_finite_has_no_terms(bad: float, place: int) -> None:
    values = [np.array([4.0, 4.0]) for _ in range(4)]
    values[place][0] = bad
    found = tie_terms(*values, FP16)
    assert found.defined.tolist() == [False, True]
    for name in ("residue", "error", "law"):
        assert np.isnan(getattr(found, name)).tolist() == [True, False]
    assert not found.halfway.any()


def test_a_sum_of_zero_is_not_rounded() -> None:
    found = tie_terms(np.array([1.0]), np.array([1.0]), np.array([0.0]), np.array([0.0]), BF16)
    assert not found.defined.any()


@example(significands=[128], shift=0, residue=-0.75, negative=True)
@given(
    significands=st.lists(st.integers(128, 255), min_size=1, max_size=6),
    shift=st.integers(-20, 20),
    residue=st.floats(-0.9, 0.9, allow_subnormal=False),
    negative=st.booleans(),
)
def test_terms_against_fractions(significands: list[int], shift: int, residue: float, negative: bool) -> None:
    """T1: bits dropped, residue and halfway by integers; scaling by powers of two and the sign of V change nothing."""
    total = sum(significands)
    bits = total.bit_length() - 8
    residue = float(np.float32(residue))
    value = total + residue * 2**bits
    exponent = math.frexp(value)[1] - 8
    step = Fraction(2) ** exponent
    kept = round(Fraction(value) / step) * step
    sign = -1.0 if negative else 1.0
    scale = math.ldexp(sign, shift)
    found = terms_of(total * scale, abs(scale), value * scale, float(kept) * scale)
    exact = (Fraction(value) - total) / step
    assert found[0] == max(exponent, 0)
    assert found[1] == float(exact)
    assert found[2] == pytest.approx(float((kept - Fraction(value)) / step), abs=1e-12)
    assert found[3] == tie_law(found[0], float(exact))
    assert found[4] == (total / step % 1 == Fraction(1, 2))


def test_the_bias_falls_with_every_bit() -> None:
    values = [tie_law(bits, 1e-9) for bits in range(1, 12)]
    for wide, narrow in pairwise(values):
        assert narrow == pytest.approx(wide / 2, rel=1e-4)


#: Laws of |V|, and the mean error of their sums in ulp, + away from zero: k large values and 16 small terms 7 to 14
#: nats below. First without the small terms, then with them, then with V of either sign. By Monte Carlo over 400,000
#: draws, with another implementation (s.e. 0.0005).
DRAWN = {
    "binade": {
        1: (0.0, -0.1486, -0.0001),
        2: (-0.0002, 0.0514, -0.0006),
        3: (-0.0004, 0.0295, -0.0004),
        8: (0.0011, 0.0130, 0.0004),
    },
    "normal": {
        1: (0.0, -0.1660, 0.0006),
        2: (0.0002, 0.0474, -0.0007),
        3: (0.0002, 0.0319, 0.0004),
        8: (-0.0007, -0.0005, -0.0005),
    },
    "lognormal": {
        1: (0.0, -0.0657, 0.0002),
        2: (-0.0002, 0.0160, -0.0005),
        3: (-0.0003, 0.0031, -0.0005),
        8: (-0.0001, 0.0, 0.0002),
    },
}


def drawn_values(law: str, generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    if law == "binade":
        return generator.integers(128, 256, shape) * 2.0**-6
    normal = generator.standard_normal(shape)
    return round_to(np.abs(2.2 + 0.35 * normal) if law == "normal" else np.exp(normal), BF16)


@pytest.mark.parametrize("kind", ["none", "same", "mixed"])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("law", DRAWN)
def test_sums_with_a_residue_follow_the_table(law: str, k: int, kind: str) -> None:
    """T3, 25,000 draws: four standard errors of both sides together, about 0.0075 ulp.

    The law is held to the same: of sums beside a power of two, where steps double, it is wrong by 2e-4 on average.
    """
    number, column = 25_000, ("none", "same", "mixed").index(kind)
    generator = np.random.default_rng(100 * k + column)
    v = drawn_values(law, generator, (k + 16, number))
    p_bar = round_to(np.exp(-generator.uniform(7.0, 14.0, (16, number))), BF16)
    if kind == "mixed":
        v *= generator.choice([-1.0, 1.0], v.shape)
    main = v[:k].sum(0)
    before = main if kind == "none" else (main + (p_bar * v[k:]).sum(0)).astype(np.float32).astype(np.float64)
    grid = steps_at(np.abs(v[:k]).min(0), BF16)
    found = tie_terms(main, grid, before, round_to(before, BF16), BF16)
    error, law_error = found.error[found.defined], found.law[found.defined]
    limit = 4 * math.hypot(error.std() / math.sqrt(error.size), 0.0005)
    assert abs(error.mean() - DRAWN[law][k][column]) < limit
    assert abs((error - law_error).mean()) < limit
    if kind == "none":
        assert not law_error.any()
        assert (found.residue[found.defined] == 0).all()
    if kind == "same":
        assert (found.residue >= 0).all()
    if k == 1:
        # A single value lies on the grid, unless the residue takes the sum into another binade.
        assert (found.bits_dropped > 0).mean() < (0.01 if kind != "none" else 1e-9)
        assert (kind == "none") == (not error.any())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, FP32], ids=lambda fmt: fmt.name)
def test_steps_by_bits_are_those_of_the_format(fmt: FloatFormat, sign: float) -> None:
    """T1: at every power of two float64 has around the format's range, on both sides of it, and at 0."""
    powers = [math.ldexp(1.0, exponent) for exponent in range(fmt.exponent_min - 60, fmt.exponent_max + 20)]
    values = [0.0, 2.0**-1074, 2.0**-1030]
    values += [part * power for power in powers for part in (1.0, 1.0 + 2.0**-52, 1.5, 2.0 - 2.0**-52)]
    found = steps_at(sign * np.array(values), fmt)
    assert found.tolist() == [ulp(value, fmt) for value in values]
    assert steps_at(np.array([sign * math.inf]), fmt)[0] == ulp(fmt.max_finite, fmt)


@pytest.mark.parametrize("place", [0, 2, 3])
def test_what_has_no_terms_drops_no_bits(place: int) -> None:
    """Whatever its grid, and whatever the other elements are."""
    values = [np.array([4.0, 4.0]), np.array([2.0**-9, 2.0**-9]), np.array([4.0, 4.0]), np.array([4.0, 4.0])]
    values[place][1] = math.nan
    assert tie_terms(*values, BF16).bits_dropped.tolist() == [4, 0]
