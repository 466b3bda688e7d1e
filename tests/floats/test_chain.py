"""Sums of several terms and blocks of a matrix unit, step by step."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.floats.bits import UNITS, check_accumulator, explain_bits, explain_unit
from bf16forensics.floats.blocks import explain_blocks, unit_named
from bf16forensics.floats.chain import explain_chain
from bf16forensics.floats.formats import BF16, FP16, FP32, FP64
from bf16forensics.floats.literal import read_operand
from bf16forensics.floats.matrix_unit import fused_dot_add
from bf16forensics.floats.pattern import Pattern
from bf16forensics.floats.scalar import encode

#: A running sum in BF16 whose first step is a tie.
TERMS = (-2.40625, -2.296875, -2.3125, -1.0)


def patterns(values, fmt=FP32):
    return [Pattern(fmt=fmt, code=encode(value, fmt, overflow="nonfinite")) for value in values]


def chain(values, accumulator="each-add", **options):
    return explain_chain(patterns(values), accumulator, source=FP32, target=BF16, **options)


def operands(*values):
    return [read_operand(repr(value)) for value in values]


# -- each-add ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("terms", "stored", "errors"),
    [
        (TERMS, (-2.40625, -4.6875, -7, -8), (0, 2**-6, 2**-6, 2**-6)),
        (TERMS[::-1], (-1, -3.3125, -5.625, -8), (0, 0, -(2**-6), 2**-6)),
        # Neighbours: a first term that breaks the tie, and sums without any error.
        ((-2.421875, -2.296875, -2.3125, -1.0), (-2.421875, -4.71875, -7.03125, -8), (0, 0, 0, 2**-5)),
        ((-2.5, -2.25, -2.25, -1.0), (-2.5, -4.75, -7, -8), (0, 0, 0, 0)),
    ],
)
def test_a_running_sum_stored_after_every_addition(terms, stored, errors, sign):
    steps = chain([sign * term for term in terms])
    assert [step.running.number for step in steps] == [sign * value for value in stored]
    assert [step.error for step in steps] == [sign * Fraction(error) for error in errors]
    assert [step.before for step in steps] == [None, *(step.running for step in steps[:-1])]
    assert all(step.event.to_source is None for step in steps)


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6))
def test_each_addition_is_one_rounding_of_the_exact_sum(values):
    running = None
    for step, value in zip(chain(values), values, strict=True):
        exact = Fraction(value) + (0 if running is None else running)
        assert step.event.sum.exact == exact
        assert step.running.value == Pattern(fmt=BF16, code=encode(exact, BF16)).value
        running = step.running.value


# -- fp32-prefix ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=8))
def test_the_prefixes_are_those_of_numpy(values):
    steps = chain(values, "fp32-prefix")
    prefixes = np.add.accumulate(np.array(values, np.float32), dtype=np.float32)
    assert [step.running.number for step in steps] == prefixes.tolist()
    stored = prefixes.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert [step.event.to_target.result.number for step in steps] == stored.tolist()
    for count, step in enumerate(steps, 1):
        assert step.prefix == sum(map(Fraction, values[:count]))
        assert step.error == step.event.to_target.result.value - step.prefix


def test_prefix_and_stored_sum_differ_where_an_error_is_carried_along():
    assert [step.event.to_target.result.number for step in chain(TERMS, "fp32-prefix")] == [-2.40625, -4.6875, -7, -8]
    long = (1.0, *[2.0**-9] * 8)
    assert chain(long, "fp32-prefix")[-1].event.to_target.result.number == 1.015625
    assert chain(long, "each-add")[-1].running.number == 1.0
    (exact,) = chain(long, "exact")
    assert (exact.event.sum.exact, exact.event.to_target.result.number) == (Fraction(65, 64), 1.015625)


def test_a_term_wider_than_the_running_sum_rounds_on_its_way_in():
    term = Pattern(fmt=FP64, code=encode(1 + Fraction(1, 2**30), FP64))
    steps = explain_chain([term, term], source=FP32, target=BF16)
    assert steps[0].running.number == 1.0
    assert steps[0].event.to_source.decision == "down"


def test_a_single_term_is_a_conversion():
    (step,) = chain([-4.703125], "fp32-prefix")
    assert step.event.to_source is None
    assert step.event.to_target.result.code == 0xC096


@pytest.mark.parametrize(
    ("values", "last"),
    [((1.0, math.inf, 2.0), math.inf), ((math.inf, 1.0, -math.inf), math.nan), ((math.nan, 1.0), math.nan)],
)
@pytest.mark.parametrize("accumulator", ["fp32-prefix", "each-add", "exact"])
def test_infinities_and_nan_stay(values, last, accumulator):
    step = chain(values, accumulator)[-1]
    assert step.event.to_target.result.number == pytest.approx(last, nan_ok=True)
    assert (step.prefix, step.error) == (None, None)


@pytest.mark.parametrize(
    ("values", "accumulator"),
    [((), "exact"), ((1.0,), "nothing"), ((1.0, 2.0), "sm90")],
    ids=["none", "unknown", "unit"],
)
def test_nothing_to_add_and_unknown_accumulators_are_refused(values, accumulator):
    with pytest.raises(InputError):
        chain(values, accumulator)


# -- a matrix unit ----------------------------------------------------------------------------------------------------


def factors(fmt):
    """Finite codes over the whole range, and more often from a few binades, where alignment matters."""
    middle = st.integers(fmt.bias - 6, fmt.bias + 6)
    near = st.builds(
        lambda sign, field, fraction: sign << (fmt.bits - 1) | field << fmt.fraction_bits | fraction,
        st.integers(0, 1),
        middle,
        st.integers(0, (1 << fmt.fraction_bits) - 1),
    )
    anywhere = st.integers(0, (1 << fmt.bits) - 1)
    return st.builds(lambda code: Pattern(fmt=fmt, code=code), near | anywhere).filter(lambda found: found.is_finite)


@settings(max_examples=50)
@given(st.data(), st.sampled_from(["sm80", "sm90", "sm100"]), st.sampled_from([BF16, FP16]))
def test_a_block_is_that_of_the_model(data, name, fmt):
    unit = unit_named(name)
    pairs = data.draw(st.lists(st.tuples(factors(fmt), factors(fmt)), min_size=1, max_size=unit.block))
    start = data.draw(factors(FP32))
    (block,) = explain_blocks(pairs, start, unit)
    a, b = (np.array([pair[i].number for pair in pairs]) for i in (0, 1))
    expected = fused_dot_add(np.array(start.number), a, b, unit, operands=fmt.name)
    assert block.result.code == int(expected.view(np.uint32))


@settings(max_examples=30)
@given(st.data(), st.sampled_from(["sm80", "sm90"]))
def test_what_is_kept_and_lost_adds_up(data, name):
    unit = unit_named(name)
    pairs = data.draw(st.lists(st.tuples(factors(BF16), factors(BF16)), min_size=1, max_size=unit.block))
    (block,) = explain_blocks(pairs, Pattern(fmt=FP32, code=0), unit)
    grid = Fraction(2) ** block.grid_exponent
    for addend in block.addends:
        assert addend.exact == addend.kept + addend.lost
        assert (addend.kept / grid).denominator == 1
        # Toward zero: what is lost has the sign of the addend and is less than a step.
        assert abs(addend.lost) < grid
        assert addend.lost * addend.exact >= 0
    assert block.exact == sum(addend.exact for addend in block.addends)
    assert block.aligned == sum(addend.kept for addend in block.addends)
    if block.cut is not None:
        assert block.result.value + block.cut == block.aligned


@pytest.mark.parametrize(("name", "is_lost"), [("sm80", (0, 1)), ("sm90", (0, 0)), ("sm100", (0, 0))])
def test_the_last_column_of_each_unit(name, is_lost):
    """Beside 1, sm80 keeps 2**-24 and loses 2**-25; the others keep both."""
    bits = explain_bits(operands(1.0, 2.0**-24, 2.0**-25), accumulator=name, source=FP32, target=BF16)
    assert [bool(addend.lost) for addend in bits.blocks[0].addends[2:]] == [bool(lost) for lost in is_lost]
    assert [addend.exponent for addend in bits.blocks[0].addends] == [None, 0, -24, -25]


def test_blocks_chain_in_the_order_of_the_terms():
    values = [1.0] * 8 + [2.0**-20] * 8
    bits = explain_bits(operands(*values), accumulator="sm80", source=FP32, target=BF16)
    assert [block.first for block in bits.blocks] == [0, 8]
    assert bits.blocks[0].result.number == 8.0
    assert bits.blocks[1].addends[0].exact == 8
    assert bits.exact == 8 + Fraction(8, 2**20)
    assert bits.final.exact == bits.blocks[1].result.value


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("exponent", "code"), [(-149, 1), (-150, 0), (-160, 0)])
@pytest.mark.parametrize("name", [unit for unit in UNITS if unit != "sm90-fp8"])
def test_a_sum_below_the_smallest_number_truncates_to_plus_zero(name, exponent, code, sign):
    """As ADR 0010 says and `matrix_unit` computes: no sign is left of a negative sum that truncates to zero."""
    tiny, small = patterns([sign * 2.0 ** (exponent + 80), 2.0**-80], BF16)
    (block,) = explain_blocks([(tiny, small)], Pattern(fmt=FP32, code=0), unit_named(name))
    assert block.result.code == (code | (sign < 0 and code) << 31)
    numbers = (np.array([factor.number]) for factor in (tiny, small))
    expected = fused_dot_add(np.array(0.0), *numbers, unit_named(name), operands="bf16")
    assert block.result.code == int(expected.view(np.uint32))


@pytest.mark.parametrize("name", UNITS)
def test_the_meaning_of_a_unit_says_where_it_truncates(name):
    unit = unit_named(name)
    meaning = explain_bits(operands(1.0, 2.0), accumulator=name, source=FP32, target=BF16).meaning
    assert f"in blocks of {unit.block}, " in meaning
    assert f"cut off {unit.fraction_bits} bits below it" in meaning
    assert f"to {unit.output_fraction_bits} fraction bits of fp32" in meaning


def test_products_and_a_start_of_their_own():
    half, three = patterns([0.5, 3.0], BF16)
    (start,) = patterns([1.0])
    bits = explain_unit([(half, three)], start, "sm90")
    assert (bits.exact, bits.final.result.number, bits.error) == (Fraction(5, 2), 2.5, 0)


@pytest.mark.parametrize(
    ("values", "words"),
    [((0.1, 1.0), "round them first"), ((1.0, math.inf), "finite"), ((math.nan, 1.0), "finite")],
)
def test_what_a_matrix_unit_does_not_take_is_refused(values, words):
    with pytest.raises(InputError, match=words):
        explain_bits(operands(*values), accumulator="sm90", source=FP32, target=BF16)


def test_an_accumulator_that_overflows_midway_is_refused():
    with pytest.raises(InputError, match="overflows at product 8"):
        explain_bits(operands(*[2.0**127] * 9), accumulator="sm80", source=FP32, target=BF16)


# -- explain_bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"), [("bf16-each-add", "each-add"), ("EXACT", "exact"), *((unit, unit) for unit in UNITS)]
)
def test_names_of_accumulators(name, found):
    assert check_accumulator(name) == found


def test_a_decimal_rounded_twice_is_named():
    """The decimal lies above a tie of BF16 by less than FP32 can tell."""
    bits = explain_bits([read_operand("1.00390625000001")], source=FP32, target=BF16)
    assert bits.final.result.number == 1.0
    assert bits.from_text.result.number == 1.0078125
    assert explain_bits([read_operand("1.0039")], source=FP32, target=BF16).from_text is None


def test_a_seed_is_reproducible_and_counts_roundings():
    terms = operands(*[1.0 / 512 + 1] * 5)
    options = {"accumulator": "each-add", "source": FP32, "target": BF16, "mode": "stochastic"}
    first, again = (explain_bits(terms, seed=7, **options) for _ in range(2))
    assert first == again
    randoms = [step.event.to_target.random for step in first.steps]
    assert len(set(randoms)) == 5
    assert all((random * 2**32).denominator == 1 for random in randoms)
    assert explain_bits(terms, seed=8, **options).steps != first.steps


def test_an_open_decision_ends_a_stored_sum_but_not_a_prefix():
    terms = operands(1.0, 2.0**-9, 1.0)
    with pytest.raises(InputError, match="after term 2"):
        explain_bits(terms, accumulator="each-add", source=FP32, target=BF16, mode="stochastic")
    bits = explain_bits(terms, source=FP32, target=BF16, mode="stochastic", random=Fraction(1, 2))
    assert [step.event.to_target.decision for step in bits.steps] == ["exact", "open", "down"]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"random": Fraction(1, 2)},
        {"mode": "stochastic", "seed": 1, "random": Fraction(1, 2)},
        {"accumulator": "fp32"},
        {"overflow": "wrap"},
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(InputError):
        explain_bits(operands(1.0, 2.0), source=FP32, target=BF16, **options)


def test_no_operands_are_refused():
    with pytest.raises(InputError, match="one value to convert"):
        explain_bits([], source=FP32, target=BF16)
