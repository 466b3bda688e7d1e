"""Explained sums and conversions: against NumPy, ml_dtypes, the scalar specification and exact fractions."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.floats.align import align, number_of
from bf16forensics.floats.explain import explain_conversion, explain_sum
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64
from bf16forensics.floats.pattern import Pattern
from bf16forensics.floats.round_bits import explain_rounding
from bf16forensics.floats.scalar import MODES, encode, float_from_code

NARROW = [E4M3, E5M2, BF16, FP16]


def pattern(value, fmt=FP32):
    code = encode(value, fmt, overflow="nonfinite")
    assert float_from_code(code, fmt) == value or math.isnan(value)
    return Pattern(fmt=fmt, code=code)


def of_code(code, fmt=FP32):
    return Pattern(fmt=fmt, code=code)


def codes(fmt):
    return st.integers(0, (1 << fmt.bits) - 1)


def finite(fmt):
    return st.builds(of_code, codes(fmt), st.just(fmt)).filter(lambda found: found.is_finite)


# -- published events -----------------------------------------------------------------------------------------------


def test_the_published_event():
    """The event of arXiv 2510.04212, section 3.3.2, with every number printed there."""
    a, b = of_code(0b11000000000110100000111000101110), of_code(0b11000000000100110000000000000000)
    event = explain_sum([a, b])
    assert event.sum.exact == Fraction(-4.703990459442139)
    assert (event.sum.is_carry, event.sum.shift) == (True, 1)
    assert event.to_source.decision == "exact"
    rounding = event.to_target
    assert rounding.result.binary == "1100000010010111"
    assert rounding.result.number == -4.71875
    assert float(rounding.error) == -0.014759540557861328
    assert (rounding.last_kept, rounding.guard, rounding.round_bit, rounding.sticky) == (0, 1, 0, 1)
    assert (rounding.decision, rounding.is_tie) == ("up", False)
    assert [found.number for found in (rounding.toward_zero, rounding.away)] == [-4.6875, -4.71875]
    (without,) = rounding.without
    assert (without.cleared, without.exact, without.is_tie, without.is_other) == (
        "residue",
        Fraction(-4.703125),
        True,
        True,
    )
    assert (without.result.number, without.error) == (-4.6875, Fraction(1, 64))
    # The residue in ulp: what the first operand has below -2.40625, over an ulp of 2**-5.
    assert rounding.residue_ulp == (Fraction(2.4071154594421387) - Fraction(2.40625)) * 32


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("below", "code", "tie", "sticky"),
    [
        (0.0, 0xC096, True, 0),
        (2.0**-20, 0xC097, False, 1),
        (2.0**-7, 0xC097, False, 0),
        (-(2.0**-20), 0xC096, False, 1),
    ],
)
def test_a_tie_and_its_neighbours(sign, below, code, tie, sticky):
    """-2.40625 - 2.296875 = -4.703125 lies halfway; a little more or less does not, and signs change nothing else."""
    event = explain_sum([pattern(sign * -2.40625, BF16), pattern(sign * (-2.296875 - below))])
    rounding = event.to_target
    assert rounding.result.code == (code if sign == 1 else code & 0x7FFF)
    assert (rounding.is_tie, rounding.sticky, rounding.last_kept) == (tie, sticky, 0)
    assert ("a tie" in rounding.reason) == tie
    assert rounding.decision == ("up" if code == 0xC097 else "down")


@pytest.mark.parametrize(
    ("code", "expected", "tie"),
    [
        (0x3E89CCD5, 0x3E8A, False),
        (0x3F808000, 0x3F80, True),
        (0x3F818000, 0x3F82, True),
        (0x3F807FFF, 0x3F80, False),
        (0x3F808001, 0x3F81, False),
        (0x7F7F7FFF, 0x7F7F, False),
        (0x7F7F8000, 0x7F80, True),
        (0xFF7F8000, 0xFF80, True),
        (0x80000000, 0x8000, False),
        (0x00008000, 0x0000, True),
        (0x00008001, 0x0001, False),
        (0x80008000, 0x8000, True),
        (0x00018000, 0x0002, True),
        (0x7F800000, 0x7F80, False),
        (0xFF800000, 0xFF80, False),
    ],
)
def test_conversions_at_ties_and_at_the_ends_of_the_range(code, expected, tie):
    rounding = explain_conversion(of_code(code))
    assert (rounding.result.code, rounding.is_tie) == (expected, tie)


@pytest.mark.parametrize("code", [0x7F800001, 0x7FC00000, 0xFFFFFFFF])
def test_nan_stays_nan(code):
    rounding = explain_conversion(of_code(code))
    assert rounding.result.is_nan
    assert (rounding.exact, rounding.error, rounding.decision) == (None, None, "none")


# -- against libraries ----------------------------------------------------------------------------------------------


def library_sums(first, second):
    """BF16 codes of BF16 sums, added in FP32 by NumPy and converted by ml_dtypes."""
    with np.errstate(all="ignore"):
        total = first.view(ml_dtypes.bfloat16).astype(np.float32) + second.view(ml_dtypes.bfloat16).astype(np.float32)
        return total, total.astype(ml_dtypes.bfloat16).view(np.uint16)


def by_explain_sum(terms):
    event = explain_sum(terms)
    return event.to_source.result, event.to_target.result


def by_its_parts(terms):
    """The arithmetic inside `explain_sum`, without digits and words: what `explain_rounding` calls its result."""
    in_source = of_code(encode(number_of(align(terms)), FP32))
    return in_source, of_code(encode(in_source.value or in_source.number, BF16), BF16)


def compare_with_libraries(rounded_twice, every, partner):
    first = np.arange(0, 1 << 16, every, dtype=np.uint32).astype(np.uint16)
    totals, expected = library_sums(first, np.full_like(first, partner))
    other = of_code(partner, BF16)
    codes_of_totals, is_nan = totals.view(np.uint32).tolist(), np.isnan(totals).tolist()
    for code, total, stored, nan in zip(first.tolist(), codes_of_totals, expected.tolist(), is_nan, strict=True):
        in_source, in_target = rounded_twice([of_code(code, BF16), other])
        if nan:
            assert in_target.is_nan
            continue
        assert in_source.code == total, hex(code)
        assert in_target.code == stored, hex(code)


@pytest.mark.parametrize("partner", [0xC013, 0x0001])
def test_sums_of_bf16_codes_against_libraries(partner):
    compare_with_libraries(by_explain_sum, 127, partner)


@pytest.mark.slow
def test_sums_of_all_bf16_codes_against_libraries():
    compare_with_libraries(by_its_parts, 1, 0xC013)
    compare_with_libraries(by_explain_sum, 13, 0xC013)


# -- against the specification and exact arithmetic -----------------------------------------------------------------


@given(st.data(), st.sampled_from(FORMATS), st.sampled_from(MODES), st.sampled_from([None, "nonfinite", "saturate"]))
def test_the_result_is_the_specification_s(data, fmt, mode, overflow):
    operand = data.draw(st.sampled_from(FORMATS).flatmap(finite))
    random = Fraction(data.draw(st.integers(0, 255)), 256) if mode == "stochastic" else None
    rounding = explain_conversion(operand, fmt, mode, overflow=overflow, random=random)
    value = operand.value or operand.number
    assert rounding.result.code == encode(value, fmt, mode, overflow=overflow, random=random)
    if rounding.result.is_finite:
        assert rounding.error == rounding.result.value - operand.value
        assert rounding.error_ulp * Fraction(2) ** rounding.step_exponent == rounding.error


@given(st.sampled_from(NARROW), st.fractions(min_value=-300, max_value=300), st.integers(-12, 12))
def test_the_bits_decide_as_ieee_754_says(fmt, base, power):
    value = base * Fraction(2) ** power
    rounding = explain_rounding(value, fmt, overflow="nonfinite")
    digits = int(rounding.kept, 2) + Fraction(int(rounding.dropped or "0", 2), 1 << len(rounding.dropped))
    is_binary = value.denominator & (value.denominator - 1) == 0
    magnitude = digits * Fraction(2) ** rounding.step_exponent
    assert magnitude == abs(value) if is_binary else magnitude < abs(value)
    bits = (rounding.guard, rounding.round_bit, rounding.sticky)
    assert rounding.is_tie == (bits == (1, 0, 0))
    if rounding.decision != "beyond":
        is_up = rounding.guard and (rounding.round_bit or rounding.sticky or rounding.last_kept)
        assert (rounding.decision == "up") == bool(is_up)
        assert (rounding.decision == "exact") == (bits == (0, 0, 0))
        assert rounding.residue_ulp == (abs(value) / Fraction(2) ** rounding.step_exponent) % 1 - Fraction(
            rounding.guard, 2
        )


@given(st.sampled_from(NARROW), finite(FP32))
def test_the_neighbours_bracket_the_value(fmt, operand):
    rounding = explain_conversion(operand, fmt, overflow="nonfinite")
    magnitude = abs(operand.value)
    below, above = rounding.toward_zero, rounding.away
    assert abs(below.value) <= magnitude
    if rounding.decision == "exact":
        assert below == above == rounding.result
        return
    assert {below.sign, rounding.result.sign} == {operand.sign}
    if above is None:
        assert not fmt.has_infinity
        assert magnitude > fmt.max_finite
    elif above.is_finite:
        assert abs(above.value) > magnitude
        assert above.code == below.code + 1
        assert rounding.result in (below, above)
    else:
        assert abs(below.value) == fmt.max_finite


@given(st.sampled_from(NARROW), finite(FP32), st.sampled_from(["rne", "rz", "rna"]))
def test_counterfactuals_clear_exactly_the_bits_they_name(fmt, operand, mode):
    rounding = explain_conversion(operand, fmt, mode, overflow="nonfinite")
    step = Fraction(2) ** rounding.step_exponent
    kept = int(rounding.kept, 2)
    expected = {}
    if rounding.residue_ulp and rounding.decision != "beyond":
        if rounding.round_bit and rounding.sticky:
            expected["sticky"] = kept + Fraction(rounding.guard, 2) + Fraction(1, 4)
        expected["residue"] = kept + Fraction(rounding.guard, 2)
    assert {other.cleared: abs(other.exact) / step for other in rounding.without} == expected
    for other in rounding.without:
        assert other.result.sign == operand.sign
        assert other.result.code & ~fmt.sign_mask == encode(abs(other.exact), fmt, mode, overflow="nonfinite")
        assert other.is_other == (other.result != rounding.result)
        assert other.error is None or other.error == other.result.value - other.exact


@given(st.lists(st.sampled_from(FORMATS).flatmap(finite), min_size=1, max_size=5))
def test_the_grid_holds_every_term_and_the_sum_exactly(terms):
    total = align(terms)
    assert total.exact == sum(term.value for term in terms)
    unit = Fraction(2) ** total.grid_exponent
    for term, row in zip(terms, total.rows, strict=True):
        assert len(row) == len(total.total) == total.top_exponent - total.grid_exponent + 1
        assert int(row, 2) * unit == abs(term.value)
    assert int(total.total, 2) * unit == abs(total.exact)
    if total.exact:
        assert Fraction(2) ** (total.lead_exponent + total.shift) <= abs(total.exact)
        assert abs(total.exact) < Fraction(2) ** (total.lead_exponent + total.shift + 1)
        assert total.is_carry == (total.shift > 0)
        # Nothing before the first and nothing behind the last column is left to shorten.
        assert any(int(row[-1]) for row in total.rows)
        assert any(int(row[0]) for row in (*total.rows, total.total))


@given(finite(FP32), finite(FP32))
def test_a_sum_does_not_depend_on_the_order_and_follows_its_sign(a, b):
    event, turned = explain_sum([a, b]), explain_sum([b, a])
    assert (event.to_target, event.to_source) == (turned.to_target, turned.to_source)
    flipped = explain_sum([of_code(a.code ^ 1 << 31), of_code(b.code ^ 1 << 31)])
    if event.sum.exact:
        assert flipped.to_target.result.code == event.to_target.result.code ^ 1 << 15
        assert flipped.to_target.decision == event.to_target.decision


# -- special cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [
        (0.0, 0.0, 0x0000),
        (-0.0, -0.0, 0x8000),
        (-0.0, 0.0, 0x0000),
        (1.5, -1.5, 0x0000),
        (-1.5, 1.5, 0x0000),
        (math.inf, 1.0, 0x7F80),
        (-math.inf, -math.inf, 0xFF80),
    ],
)
def test_zeros_cancellation_and_infinities(a, b, code):
    event = explain_sum([pattern(a), pattern(b)])
    assert event.to_target.result.code == code
    assert event.direct is None


@pytest.mark.parametrize("terms", [(math.inf, -math.inf), (math.nan, 1.0), (math.nan, math.inf)])
def test_sums_that_are_nan(terms):
    event = explain_sum([pattern(term) for term in terms])
    assert event.sum.is_nan
    assert event.to_target.result.is_nan
    assert event.to_target.error is None


@pytest.mark.parametrize(
    ("terms", "shift", "is_carry"),
    [((1.0, 1.0), 1, True), ((1.0, 0.5), 0, False), ((1.0, -0.9375), -4, False), ((1.0, 1.0, 1.0, 1.0), 2, True)],
)
def test_normalising_shift(terms, shift, is_carry):
    total = align([pattern(term) for term in terms])
    assert (total.shift, total.is_carry) == (shift, is_carry)


def test_a_target_wider_than_the_source_holds_everything():
    event = explain_sum([pattern(0.5, BF16), pattern(2.0**-20, BF16)], BF16, FP64)
    assert event.to_source.result.number == 0.5
    assert event.to_target.decision == "exact"
    # In one step FP64 would have held the sum.
    assert event.direct.result.number == 0.5 + 2.0**-20


def test_double_rounding_is_named_only_where_it_changes_the_result():
    """1 + 2**-8 + 2**-31 is above a tie of BF16, but FP32 rounds it into the tie."""
    one, above, half = pattern(1.0), pattern(2.0**-8 + 2.0**-31), pattern(2.0**-8)
    twice = explain_sum([one, above])
    assert (twice.to_target.result.number, twice.direct.result.number) == (1.0, 1.0078125)
    assert explain_sum([one, half]).direct is None
    inexact = explain_sum([one, pattern(2.0**-30)])
    assert inexact.to_source.decision == "down"
    assert inexact.direct is None


def test_one_format_for_sum_and_target_rounds_once_by_the_mode():
    event = explain_sum([pattern(1.0, BF16), pattern(2.0**-8 + 2.0**-10, BF16)], BF16, BF16, "rz")
    assert event.to_source is None
    assert event.to_target.result.number == 1.0


@pytest.mark.parametrize(
    ("value", "fmt", "mode", "overflow", "code", "extreme", "decision"),
    [
        (3.5e38, BF16, "rne", None, 0x7F80, "overflow", "beyond"),
        (-3.5e38, BF16, "rz", None, 0xFF7F, "saturated", "beyond"),
        (3.395e38, BF16, "rne", None, 0x7F7F, "", "down"),
        (448.0, E4M3, "rne", None, 0x7E, "", "exact"),
        (464.0, E4M3, "rne", None, 0x7E, "", "down"),
        (464.0, E4M3, "rna", None, 0x7E, "saturated", "up"),
        (500.0, E4M3, "rne", None, 0x7E, "saturated", "beyond"),
        (500.0, E4M3, "rne", "nonfinite", 0x7F, "overflow", "beyond"),
        (1e6, E5M2, "rne", None, 0x7B, "saturated", "beyond"),
        (-1e6, E5M2, "rne", "nonfinite", 0xFC, "overflow", "beyond"),
        (2.0**-10, E4M3, "rne", None, 0x00, "subnormal", "down"),
        (2.0**-9, E4M3, "rne", None, 0x01, "subnormal", "exact"),
        (-(2.0**-11), E4M3, "rne", None, 0x80, "subnormal", "down"),
        (0.0, E4M3, "rne", None, 0x00, "zero", "exact"),
    ],
)
def test_ends_of_the_range(value, fmt, mode, overflow, code, extreme, decision):
    rounding = explain_rounding(Fraction(value), fmt, mode, overflow=overflow)
    assert (rounding.result.code, rounding.extreme, rounding.decision) == (code, extreme, decision)
    assert ("largest finite" in rounding.reason) == (extreme in ("overflow", "saturated"))
    if extreme == "subnormal":
        assert rounding.kept[0] == "0"


@pytest.mark.parametrize(("overflow", "code"), [(None, 0x7E), ("nonfinite", 0x7F)])
def test_infinity_into_a_format_without_one(overflow, code):
    rounding = explain_conversion(pattern(math.inf), E4M3, overflow=overflow)
    assert rounding.result.code == code


# -- stochastic rounding ----------------------------------------------------------------------------------------------


def test_stochastic_without_a_random_number_stays_open():
    rounding = explain_rounding(Fraction(1) + Fraction(3, 512), BF16, "stochastic")
    assert (rounding.decision, rounding.result, rounding.error) == ("open", None, None)
    assert rounding.probability_up == Fraction(3, 4)
    assert [found.code for found in (rounding.toward_zero, rounding.away)] == [0x3F80, 0x3F81]
    assert explain_rounding(Fraction(1), BF16, "stochastic").result.code == 0x3F80


@pytest.mark.parametrize(("random", "code"), [(Fraction(191, 256), 0x3F81), (Fraction(192, 256), 0x3F80)])
def test_stochastic_compares_the_random_number_with_the_dropped_bits(random, code):
    rounding = explain_rounding(Fraction(1) + Fraction(3, 512), BF16, "stochastic", random=random)
    assert rounding.result.code == code
    assert rounding.without == ()


@given(finite(FP32), st.sampled_from(NARROW))
def test_the_probability_makes_stochastic_rounding_unbiased(operand, fmt):
    rounding = explain_conversion(operand, fmt, "stochastic", overflow="nonfinite")
    if rounding.decision == "open" and rounding.away is not None and rounding.away.is_finite:
        chance = rounding.probability_up
        assert chance * rounding.away.value + (1 - chance) * rounding.toward_zero.value == operand.value


@pytest.mark.parametrize(
    ("mode", "random"),
    [("up", None), ("rne", Fraction(1, 2)), ("stochastic", Fraction(1)), ("stochastic", Fraction(-1, 8))],
)
def test_modes_and_random_numbers_are_checked(mode, random):
    with pytest.raises(InputError):
        explain_rounding(Fraction(1, 3), BF16, mode, random=random)
