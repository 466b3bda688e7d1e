"""Ties away from zero and stochastic rounding: the scalar specification in exact arithmetic, and its NumPy twin."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.floats import arrays, scalar, stochastic
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FP16, FP32, FP64

NARROW = [E4M3, E5M2, BF16, FP16]
FORMATS = pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
SIGNS = pytest.mark.parametrize("sign", [1, -1])

ALL_8_BITS = np.arange(1 << 8, dtype=np.uint16).astype(np.uint8)


def value_of(code, fmt):
    """The exact value of a magnitude code; one past the largest finite code, the value that would follow."""
    if code <= fmt.max_finite_code:
        return scalar.decode(code, fmt)
    return 2 * scalar.decode(code - 1, fmt) - scalar.decode(code - 2, fmt)


def some_codes(fmt):
    """Magnitude codes with a successor: all of FP8; of 16 bits the ends of the range and every 997th between."""
    if fmt.bits == 8:
        return list(range(fmt.max_finite_code + 1))
    first_normal = 1 << fmt.fraction_bits
    ends = {0, 1, first_normal - 1, first_normal, fmt.max_finite_code - 1, fmt.max_finite_code}
    return sorted(ends | set(range(0, fmt.max_finite_code, 997)))


codes_of_any_format = st.sampled_from(NARROW).flatmap(
    lambda fmt: st.tuples(st.just(fmt), st.integers(0, fmt.max_finite_code))
)


# -- ties away from zero ------------------------------------------------------------------------------------------


@FORMATS
@SIGNS
def test_ties_go_away_from_zero_and_everything_else_to_the_nearest(fmt, sign):
    codes = some_codes(fmt)
    low = np.array([float(value_of(code, fmt)) for code in codes])
    high = np.array([float(value_of(code + 1, fmt)) for code in codes])
    tie = (low + high) / 2
    for x, nearest in ((tie, high), (np.nextafter(tie, np.inf), high), (np.nextafter(tie, 0), low), (low, low)):
        beyond = np.where(nearest > fmt.max_finite, np.inf if fmt.has_infinity else np.nan, nearest)
        limited = np.minimum(nearest, fmt.max_finite)
        for overflow, expected in (("nonfinite", sign * beyond), ("saturate", sign * limited)):
            found = [scalar.round_to(v, fmt, "rna", overflow=overflow) for v in (sign * x).tolist()]
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(arrays.round_to(sign * x, fmt, "rna", overflow=overflow), expected)


def test_ties_away_differ_from_ties_to_even_at_even_codes_alone():
    ties = np.array([0.5, 1.5, 2.5, 3.5, -0.5, -2.5]) * 2.0**-24
    assert (arrays.round_to(ties, FP16, "rna") * 2**24).tolist() == [1, 2, 3, 4, -1, -3]
    assert (arrays.round_to(ties, FP16) * 2**24).tolist() == [0, 2, 2, 4, 0, -2]


def test_just_below_half_a_step_stays_below():
    """Adding one half and truncating, the usual short cut, would round the sum up first."""
    x = np.nextafter(np.array([0.5, 1.0, 1.5]), 0) * np.array([1.0, 0.5, 1.0]) * 2.0**-9
    assert (arrays.round_to(x, E4M3, "rna") * 2**9).tolist() == [0, 0, 1]
    almost = Fraction(1, 2) - Fraction(1, 10**40)
    assert scalar.encode(almost * Fraction(2) ** -9, E4M3, "rna") == 0
    assert scalar.encode(Fraction(1, 2) * Fraction(2) ** -9, E4M3, "rna") == 1


@given(st.floats(width=64), st.sampled_from([E4M3, E5M2, BF16, FP16, FP32, FP64]))
def test_zeros_infinities_and_nan_are_kept_in_every_mode(value, fmt):
    for mode in ("rne", "rz", "rna"):
        for special in (0.0, -0.0, math.inf, -math.inf):
            found = scalar.round_to(special, fmt, mode, overflow="nonfinite")
            if math.isinf(special) and not fmt.has_infinity:
                assert math.isnan(found)
            else:
                assert (found, math.copysign(1, found)) == (special, math.copysign(1, special))
        assert math.isnan(scalar.round_to(math.nan, fmt, mode))
        if not math.isnan(value):
            assert math.copysign(1, scalar.round_to(value, fmt, mode)) == math.copysign(1, value)


# -- stochastic: the specification -----------------------------------------------------------------------------------


@given(codes_of_any_format, st.fractions(0, 1), st.fractions(0, 1), st.sampled_from([1, -1]))
def test_a_value_goes_away_from_zero_exactly_if_the_number_is_below_its_distance(fmt_and_code, share, random, sign):
    (fmt, code), random = fmt_and_code, random % 1
    low, high = value_of(code, fmt), value_of(code + 1, fmt)
    value = sign * (low + share * (high - low))
    chosen = code + (1 if share == 1 else int(random < share))
    expected = fmt.quiet_nan_code if chosen > fmt.largest_code else chosen
    # A code of zero has no sign here: an exact value of zero is positive.
    sign_bit = fmt.sign_mask if value < 0 and expected != fmt.quiet_nan_code else 0
    assert scalar.encode(value, fmt, "stochastic", random=random, overflow="nonfinite") == sign_bit | expected
    limited = (fmt.sign_mask if value < 0 else 0) | min(chosen, fmt.max_finite_code)
    assert scalar.encode(value, fmt, "stochastic", random=random, overflow="saturate") == limited


@FORMATS
@pytest.mark.parametrize("numerator", [0, 1, 31, 32, 63])
def test_over_all_random_integers_the_expectation_is_the_value(fmt, numerator):
    """Exactly, and in every binade: 2**6 integers of 6 bits, distances in 64ths."""
    draws = [scalar.fraction_from_bits(r, 6) for r in range(64)]
    for code in some_codes(fmt)[:-1:5]:
        low, high = value_of(code, fmt), value_of(code + 1, fmt)
        value = -(low + Fraction(numerator, 64) * (high - low))
        total = sum(scalar.decode(scalar.encode(value, fmt, "stochastic", random=u), fmt) for u in draws)
        assert total / 64 == value


def test_distances_finer_than_the_random_integer_are_biased_by_less_than_its_unit():
    step, value = Fraction(1, 8), 1 + Fraction(1, 8) * Fraction(5, 16)
    results = [scalar.round_to(value, E4M3, "stochastic", random=scalar.fraction_from_bits(r, 3)) for r in range(8)]
    bias = sum(map(Fraction, results)) / 8 - value
    assert bias == step * (Fraction(3, 8) - Fraction(5, 16))
    assert 0 < bias < step / 8


@given(st.floats(width=64), st.fractions(0, 1), st.sampled_from(NARROW))
def test_specials_and_held_values_do_not_move(value, random, fmt):
    held = scalar.round_to(value, fmt)
    for special in (held, math.nan, 0.0, -0.0):
        found = scalar.round_to(special, fmt, "stochastic", random=random % 1, overflow="nonfinite")
        np.testing.assert_array_equal(found, special if fmt.has_infinity or not math.isinf(special) else math.nan)
        assert math.isnan(special) or math.copysign(1, found) == math.copysign(1, special)


def test_random_bits_are_a_binary_fraction():
    assert scalar.fraction_from_bits(5, 3) == Fraction(5, 8)
    assert scalar.fraction_from_bits(0, 0) == 0
    for bits, num_bits in ((8, 3), (-1, 3), (1, 0), (0, -1)):
        with pytest.raises(InputError, match=rf"{bits} is not an integer of {num_bits} random bits"):
            scalar.fraction_from_bits(bits, num_bits)


# -- stochastic: the NumPy twin --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@given(value=st.floats(width=64) | st.floats(-500, 500), data=st.data())
def test_random_bits_of_every_width_decide_as_specified(dtype, value, data):
    num_bits = 8 * np.dtype(dtype).itemsize
    fmt = data.draw(st.sampled_from([*NARROW, FP32]))
    overflow = data.draw(st.sampled_from(["nonfinite", "saturate"]))
    r = data.draw(st.integers(0, 2**num_bits - 1))
    # The integers at which the decision turns are the ones that a rounding in the comparison would get wrong.
    if math.isfinite(value):
        below = scalar.encode(abs(value), fmt, "rz")
        if below < fmt.max_finite_code:
            low, high = value_of(below, fmt), value_of(below + 1, fmt)
            turn = math.floor((Fraction(abs(value)) - low) / (high - low) * 2**num_bits)
            r = data.draw(st.sampled_from([r, *(n for n in (turn - 1, turn, turn + 1) if 0 <= n < 2**num_bits)]))
    random = scalar.fraction_from_bits(r, num_bits)
    expected = scalar.round_to(value, fmt, "stochastic", random=random, overflow=overflow)
    bits = np.array([r], dtype=dtype)
    found = arrays.round_to(np.array([value]), fmt, "stochastic", random=bits, overflow=overflow)
    np.testing.assert_array_equal(found, [expected])
    assert math.isnan(expected) or np.signbit(found[0]) == (math.copysign(1, expected) < 0)


@FORMATS
@SIGNS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_expectation_over_all_bytes_is_the_value(fmt, sign, dtype):
    """T0: distances in 256ths from every FP8 value and from some of 16 bits, each against all 256 random bytes."""
    codes = [code for code in some_codes(fmt) if code < fmt.max_finite_code]
    low, high = (np.array([float(value_of(c, fmt)) for c in cs]) for cs in (codes, [c + 1 for c in codes]))
    shares = np.array([0, 1, 77, 128, 255]) / 256
    x = (sign * (low + shares[:, None] * (high - low))).astype(dtype)[..., None]
    bits = np.broadcast_to(ALL_8_BITS, (*x.shape[:2], 256))
    found = arrays.round_to(np.broadcast_to(x, bits.shape), fmt, "stochastic", random=bits)
    # Both neighbours and 256 of them fit float64, so the sum is exact.
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float64).sum(-1), 256 * x[..., 0].astype(np.float64))


def test_between_the_largest_value_and_the_next_step():
    """456 is a quarter of a step above 448; in "saturate" the other three quarters have nowhere else to go."""
    x = np.full(256, 456.0)
    found = arrays.round_to(x, E4M3, "stochastic", random=ALL_8_BITS, overflow="nonfinite")
    assert np.isnan(found).sum() == 64
    assert (found[~np.isnan(found)] == 448).all()
    assert (arrays.round_to(x, E4M3, "stochastic", random=ALL_8_BITS) == 448).all()
    found = arrays.round_to(
        -np.full(256, 57344 + 8192 / 8), E5M2, "stochastic", random=ALL_8_BITS, overflow="nonfinite"
    )
    assert np.isinf(found).sum() == 32
    assert (found < 0).all()
    for beyond in (480.0, 1e300, math.inf):
        assert (arrays.round_to(np.full(256, beyond), E4M3, "stochastic", random=ALL_8_BITS) == 448).all()


def test_digits_are_drawn_until_they_decide():
    """All 2**6 sequences of six binary digits: n of them are below n/64, though few are drawn to the end."""
    for numerator in range(64):
        drawn = []
        ups = 0
        for digits in product((0, 1), repeat=6):
            supply = iter(digits)

            def draw(count, supply=supply, drawn=drawn):
                assert count == 1
                drawn.append(1)
                return np.array([next(supply)])

            ups += int(stochastic.goes_up_exactly(np.array([numerator / 64]), draw, 1)[0])
        assert ups == numerator
        assert len(drawn) < 64 * 3


def test_distances_far_below_a_digit_are_not_rounded_up():
    """2**-40 of a step: one bit array of 32 bits cannot tell it from one unit, a generator can."""
    rest = np.full(3, 2.0**-40)
    assert stochastic.goes_up(rest, np.array([0, 1, 2], dtype=np.uint32)).tolist() == [True, False, False]
    # The second digits of the two that are still open stand beside 2**-40, which is 2**24 in units of theirs.
    digits = iter([np.array([0, 1, 0]), np.array([2**24, 2**24 - 1])])
    assert stochastic.goes_up_exactly(rest, lambda count: next(digits)[:count], 32).tolist() == [False, False, True]


def test_a_generator_gives_the_same_rounding_from_the_same_state():
    x = np.linspace(-3, 3, 999).reshape(27, 37)
    first, again, other = (
        arrays.round_to(x, BF16, "stochastic", random=np.random.default_rng(seed)) for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    strided = arrays.round_to(np.asfortranarray(x), BF16, "stochastic", random=np.random.default_rng(5))
    np.testing.assert_array_equal(first, strided)
    assert (np.abs(first - x) <= np.abs(x) * 2.0**-7).all()


@FORMATS
def test_a_generator_is_unbiased(fmt):
    """T3: the mean error of 40,000 values within five standard errors of zero, where truncation is off by hundreds."""
    x = np.random.default_rng(11).uniform(1, 2, 40_000)
    error = arrays.round_to(x, fmt, "stochastic", random=np.random.default_rng(12)) - x
    assert abs(error.mean()) < 5 * error.std() / 200
    truncated = arrays.round_to(x, fmt, "rz") - x
    assert abs(truncated.mean()) > 100 * error.std() / 200


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_shapes_and_held_values_are_kept(shape):
    x = np.full(shape, -1.25, dtype=np.float32)
    generator = np.random.default_rng(1)
    for source in (generator, np.zeros(shape, dtype=np.uint8)):
        found = arrays.round_to(x, E5M2, "stochastic", random=source)
        assert (found.shape, found.dtype) == (shape, np.float32)
        assert (found == x).all()
    assert arrays.round_to(x, FP32, "stochastic", random=generator) is not x


def test_refusals():
    x = np.ones(3)
    for mode in ("rne", "rz", "rna"):
        with pytest.raises(InputError, match=f"rounding mode '{mode}' takes no random number; use 'stochastic'"):
            scalar.encode(1.0, BF16, mode, random=Fraction(0))
        with pytest.raises(InputError, match=f"with rounding mode 'stochastic' and only with it, got mode '{mode}'"):
            arrays.round_to(x, BF16, mode, random=np.zeros(3, dtype=np.uint8))
    for random in (None, Fraction(1), Fraction(-1, 9)):
        with pytest.raises(InputError, match=r"stochastic rounding takes a random number in \[0, 1\), got "):
            scalar.encode(1.0, BF16, "stochastic", random=random)
    with pytest.raises(InputError, match="random numbers go with rounding mode 'stochastic'"):
        arrays.round_to(x, BF16, "stochastic")
    for bits in (np.zeros(4, dtype=np.uint8), np.zeros(3, dtype=np.int64), np.zeros(3)):
        with pytest.raises(InputError, match=r"random bits are an unsigned array of shape \(3,\), got "):
            arrays.round_to(x, BF16, "stochastic", random=bits)
