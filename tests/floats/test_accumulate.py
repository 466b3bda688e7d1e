"""Accumulation models against exact fractions, against each other and against loops written out. All T0."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bf16forensics.errors import InputError
from bf16forensics.floats import accumulate, scalar
from bf16forensics.floats.accumulate import ACCUMULATORS, block_of, dot_add, matmul_add, running
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.exact_sum import exact_sums
from bf16forensics.floats.formats import BF16, E4M3, FP16, FP32
from bf16forensics.floats.matrix_unit import SM80, SM90, SM90_FP8, SM100, fused_dot_add

UNITS = {"sm80": SM80, "sm90": SM90, "sm100": SM100, "sm90-fp8": SM90_FP8}
EVERY = pytest.mark.parametrize("model", ACCUMULATORS)
WITH_STATES = pytest.mark.parametrize("model", [name for name in ACCUMULATORS if name != "fp32-pairwise"])
FP32_TERMS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def f32(*values):
    return np.array(values, np.float32)


def same_bits(found, expected):
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    different = found.view(np.uint32) != expected.view(np.uint32)
    assert not different.any(), f"{np.count_nonzero(different)} of {different.size}, first {np.argwhere(different)[0]}"


def sample(shape, model, seed=0, spread=4):
    """Values of the model's own format with exponents spread over a few binades."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 2.0 ** random.integers(-spread, spread + 1, size=shape)
    return round_to(values.astype(np.float32), E4M3 if model == "sm90-fp8" else BF16)


def fraction_of_products(c, a, b):
    return sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)), Fraction(float(c)))


def fp32_code(value):
    return scalar.encode(value, FP32)


def codes(x):
    return [int(code) for code in np.atleast_1d(x).view(np.uint32)]


@WITH_STATES
@pytest.mark.parametrize("count", [1, 7, 8, 16, 17, 33, 64])
def test_a_chain_is_its_steps_one_after_the_other(model, count):
    a, b = sample((5, count), model, 1), sample((5, count), model, 2)
    c = sample(5, model, 3)
    block = block_of(model)
    states = running(c, a, b, model)
    assert states.shape == (5, math.ceil(count / block))
    same_bits(states[:, -1].copy(), dot_add(c, a, b, model))
    expected = c
    for index in range(states.shape[1]):
        part = slice(index * block, (index + 1) * block)
        if model in UNITS:
            expected = fused_dot_add(expected, a[:, part], b[:, part], UNITS[model])
        elif model == "fp32-sequential":
            expected = expected + a[:, index] * b[:, index]
        else:
            expected = dot_add(c, a[:, : index + 1], b[:, : index + 1], model)
        same_bits(states[:, index].copy(), expected)


def test_blocks_of_the_models():
    assert {model: block_of(model) for model in ACCUMULATORS if model != "fp32-pairwise"} == {
        "exact": 1,
        "fp32-sequential": 1,
        "sm80": 8,
        "sm90": 16,
        "sm100": 16,
        "sm90-fp8": 32,
    }


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 13, 1000])
def test_pairwise_is_this_tree(count):
    a, b = sample(count, "fp32-pairwise", 4), sample(count, "fp32-pairwise", 5)
    c = np.float32(0.3)
    sums = [np.float32(x * y) for x, y in zip(a, b, strict=True)]
    while len(sums) > 1:
        sums += [np.float32(0)] * (len(sums) % 2)
        sums = [np.float32(sums[i] + sums[i + 1]) for i in range(0, len(sums), 2)]
    same_bits(dot_add(c, a, b, "fp32-pairwise"), np.float32(c + sums[0]).reshape(()))


def test_the_orders_differ_where_they_should():
    """2**24 + 1 + 1: nothing arrives one by one, two arrives from a pair, and the exact sum has both."""
    ones = np.ones(4, np.float32)
    terms = f32(0, 0, 1, 1)
    start = np.float32(2**24)
    assert dot_add(start, terms, ones, "fp32-sequential") == 2**24
    assert dot_add(start, terms, ones, "fp32-pairwise") == 2**24 + 2
    assert dot_add(start, f32(0, 1, 1, 0), ones, "fp32-pairwise") == 2**24 + 2
    assert dot_add(start, terms, ones, "exact") == 2**24 + 2
    assert dot_add(start, f32(0, 0, 1, 0), ones, "exact") == 2**24
    assert dot_add(start, f32(0, 0, 3, 0), ones, "exact") == 2**24 + 4


def test_products_round_once_before_they_are_added():
    """(1 + 2**-12)**2 - 1 - 2**-11 is 2**-24: a fused multiplication and addition would keep it."""
    x = np.float32(1 + 2**-12)
    c = np.float32(-1 - 2**-11)
    for model in ("fp32-sequential", "fp32-pairwise"):
        assert dot_add(c, x.reshape(1), x.reshape(1), model) == 0
    assert dot_add(c, x.reshape(1), x.reshape(1), "exact") == 2.0**-24


@settings(max_examples=150, deadline=None)
@given(
    c=FP32_TERMS,
    terms=st.lists(st.tuples(FP32_TERMS, FP32_TERMS), max_size=40),
    cancelled=st.integers(0, 40),
)
def test_exact_is_one_rounding_of_the_fraction(c, terms, cancelled):
    """Any FP32 values: magnitudes from 2**-298 to 2**256, some of them cancelled by their opposites."""
    terms = [*terms, *((-x, y) for x, y in reversed(terms[:cancelled]))]
    a, b = f32(*[x for x, _ in terms]), f32(*[y for _, y in terms])
    expected = fp32_code(fraction_of_products(c, a, b))
    found = codes(dot_add(np.float32(c), a, b, "exact"))[0]
    assert found == expected if expected & 0x7FFFFFFF else found in (0, FP32.sign_mask)
    states = running(np.float32(c), a, b, "exact")
    for count in range(1, len(terms) + 1):
        expected = fp32_code(fraction_of_products(c, a[:count], b[:count]))
        found = codes(states[count - 1])[0]
        assert found == expected if expected & 0x7FFFFFFF else found in (0, FP32.sign_mask)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(-(1 << 25), 1 << 25),
    st.integers(-160, 90),
    st.sampled_from([0, 1, -1]),
    st.integers(1, 260),
)
def test_exact_ties_and_what_breaks_them(integer, exponent, sticky, depth):
    """A number of up to 26 bits, often a tie, and far below it a term that decides."""
    main = np.ldexp(float(integer), exponent)
    small = np.ldexp(float(sticky), exponent - depth)
    found = exact_sums(np.array([small, main / 2, main / 2]))
    expected = fp32_code(Fraction(main) + Fraction(small))
    assert codes(found)[0] == expected or expected & 0x7FFFFFFF == 0 == codes(found)[0] & 0x7FFFFFFF


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float64, st.tuples(st.integers(0, 30), st.integers(1, 3)), elements=st.floats(-1e200, 1e200)))
def test_exact_sums_of_float64_terms(terms):
    """Down to where digits of float64 themselves would be subnormal."""
    terms[np.abs(terms) < 2.0**-900] = 0
    found = exact_sums(terms)
    for column, value in zip(terms.T, found, strict=True):
        expected = fp32_code(sum(map(Fraction, column), Fraction(0)))
        assert codes(value)[0] == expected or expected & 0x7FFFFFFF == 0 == codes(value)[0] & 0x7FFFFFFF


def test_exact_does_not_lose_a_term_among_many():
    random = np.random.default_rng(6)
    terms = random.standard_normal(16384) * 2.0 ** random.integers(-200, 120, size=16384)
    terms = np.concatenate([terms, [2.0**-140], -terms])[random.permutation(2 * 16384 + 1)]
    assert exact_sums(terms) == 2.0**-140


def test_exact_at_its_largest_number_of_terms():
    """All digits as large as they get, so that sums of digits reach the end of float64's integers."""
    largest = 2.0**53 - 1
    terms = np.broadcast_to(np.float64(largest), (1 << 20, 1))
    assert codes(exact_sums(terms)) == [fp32_code(Fraction(largest) * (1 << 20))]
    with pytest.raises(InputError, match="takes 1,048,576 terms, got 1,048,577"):
        exact_sums(np.zeros((1 << 20) + 1))


def test_exact_range_ends_and_signs_of_zero():
    largest = FP32.max_finite
    assert exact_sums(np.array([largest, 2.0**103 - 2.0**60])) == largest
    assert exact_sums(np.array([largest, 2.0**103])) == math.inf
    assert exact_sums(np.array([-largest, -(2.0**103)])) == -math.inf
    assert exact_sums(np.array([2.0**200, -(2.0**200), 3.0])) == 3
    assert codes(exact_sums(np.array([-0.0, -0.0])))[0] == 0
    assert codes(exact_sums(np.array([-(2.0**-150)])))[0] == FP32.sign_mask
    assert exact_sums(np.array([-(2.0**-150), -(2.0**-200)])) == -(2.0**-149)
    assert exact_sums(np.zeros((0, 3))).tolist() == [0, 0, 0]


@pytest.mark.parametrize("model", ["exact", "fp32-sequential", "fp32-pairwise", "sm80", "sm90", "sm100", "sm90-fp8"])
def test_infinities_and_nan_stay_in_their_own_sums(model):
    inf, nan = math.inf, math.nan
    nonfinite = nan if model == "sm90-fp8" else inf
    ones = np.ones((1, 40), np.float32)
    a = np.repeat(ones, 5, axis=0)
    a[1, 3] = nonfinite
    a[2, 35] = nan
    found = dot_add(f32(0, 1, 2, inf, -inf), a, ones, model)
    assert np.array_equal(found, f32(40, nonfinite, nan, inf, -inf), equal_nan=True)
    if model in UNITS:
        assert set(codes(found[np.isnan(found)])) == {0x7FFFFFFF}


@pytest.mark.parametrize("model", ["exact", "fp32-sequential", "fp32-pairwise", "sm80", "sm90", "sm100"])
def test_opposite_infinities_and_zero_times_infinity_are_nan(model):
    inf = math.inf
    a = f32([inf, 0, -inf, 1], [0, 1, 1, 1], [inf, inf, 1, 1])
    b = f32([1, 1, 1, 1], [inf, 1, 1, 1], [1, -1, 1, 1])
    assert np.isnan(dot_add(np.float32(0), a, b, model)).all()


def test_infinities_show_in_the_running_sum_where_they_arrive():
    a = np.ones(48, np.float32)
    a[20] = math.inf
    ones = np.ones(48, np.float32)
    assert running(np.float32(0), a, ones, "sm90").tolist() == [16, math.inf, math.inf]
    exact = running(np.float32(0), a, ones, "exact")
    assert exact[19] == 20
    assert (exact[20:] == math.inf).all()


def test_an_accumulator_that_overflows_stays_infinite():
    ones = np.ones(32, np.float32)
    a = np.full(32, 2.0**124, np.float32)
    a[16:] = -a[16:]
    assert running(np.float32(0), a, ones, "sm90").tolist() == [math.inf, math.inf]
    assert running(np.float32(0), a / 2, ones, "sm90").tolist() == [2.0**127, 0]
    assert dot_add(np.float32(0), a, ones, "exact") == 0


@EVERY
def test_without_products_the_accumulator_comes_back(model):
    c = f32(1 + 2**-20, -0.0, math.inf)
    empty = np.zeros((3, 0), np.float32)
    same_bits(dot_add(c, empty, empty, model), c)
    if model != "fp32-pairwise":
        assert running(c, empty, empty, model).shape == (3, 0)


@EVERY
def test_zeros_at_the_end_change_nothing(model):
    a, b = sample((6, 40), model, 7), sample((6, 40), model, 8)
    c = f32(0.5)
    zeros = np.zeros((6, 24), np.float32)
    padded = dot_add(c, np.concatenate([a, zeros], -1), np.concatenate([b, zeros], -1), model)
    same_bits(padded, dot_add(c, a, b, model))


@EVERY
def test_products_of_matrices_are_their_dot_products(model, monkeypatch):
    a, b = sample((3, 5, 40), model, 9), sample((40, 7), model, 10)
    c = sample((5, 7), model, 11)
    found = matmul_add(c, a, b, model)
    assert found.shape == (3, 5, 7)
    same_bits(found, dot_add(c, a[:, :, np.newaxis], b.T, model))
    for h in range(3):
        for r in range(5):
            same_bits(found[h, r], np.stack([dot_add(c[r, e], a[h, r], b[:, e], model) for e in range(7)]))
    # However the work is cut, the results are the same.
    for limit in (1, 10, 50):
        monkeypatch.setattr(accumulate, "_RESULTS_AT_ONCE", limit)
        monkeypatch.setattr(accumulate, "_PRODUCTS_AT_ONCE", 40 * limit)
        same_bits(matmul_add(c, a, b, model), found)


@EVERY
def test_shapes_and_dtypes(model):
    a, b = sample((4, 33), model, 12), sample((2, 1, 33), model, 13)
    c = sample((2, 4), model, 14)
    found = dot_add(c, a, b, model)
    same_bits(found, dot_add(c.astype(np.float64), a.astype(np.float64), b.astype(np.float64), model))
    same_bits(found[1], np.stack([dot_add(c[1, i], a[i], b[1, 0], model) for i in range(4)]))
    assert dot_add(c[0, 0], a[0], b[0, 0], model).shape == ()
    assert dot_add(c[:, :0], a[:0], b, model).shape == (2, 0)
    strided = np.repeat(a, 2, axis=-1)[:, ::2]
    same_bits(dot_add(c, strided, b, model), found)
    if model != "fp32-pairwise":
        assert running(c, a, b, model).shape == (2, 4, math.ceil(33 / block_of(model)))
        assert running(c[0, 0], a[0], b[0, 0], model).ndim == 1


@EVERY
def test_negation_is_symmetric(model):
    a, b = sample((50, 70), model, 15), sample((50, 70), model, 16)
    c = sample(50, model, 17)
    same_bits(dot_add(-c, -a, b, model), -dot_add(c, a, b, model))


def test_truncation_only_ever_loses():
    """Sums of one sign: a matrix unit stays at or below the exact sum, by less than its steps allow."""
    a, b = np.abs(sample((20, 512), "sm90", 18)), np.abs(sample((20, 512), "sm90", 19))
    zero = np.float32(0)
    exact = dot_add(zero, a, b, "exact").astype(np.float64)
    for model, unit in UNITS.items():
        if model == "sm90-fp8":
            continue
        lost = (exact - dot_add(zero, a, b, model)) / exact
        # Each of a block's terms loses less than a grid step, which is below 2 ** (1 - fraction_bits) of the block's
        # end, and the end less than 2**-23 of itself; the exact sum is rounded by 2**-24.
        steps = 512 // unit.block
        bound = steps * ((unit.block + 1) * 2.0 ** (1 - unit.fraction_bits) + 2.0**-23) + 2.0**-24
        assert (lost >= -(2.0**-24)).all()
        assert (lost < bound).all()
        assert lost.max() > 0


@pytest.mark.parametrize("model", ["sm80", "sm90", "sm100"])
def test_fp16_values_are_taken_too(model):
    random = np.random.default_rng(20)
    a, b = (round_to(random.standard_normal((8, 40)).astype(np.float32), FP16) for _ in range(2))
    found = dot_add(np.zeros(8, np.float32), a, b, model)
    exact = dot_add(np.zeros(8, np.float32), a, b, "exact")
    # Five or three blocks of terms below 16, each off by at most a grid step of 2**(3 - 24), and the ends' truncation.
    np.testing.assert_allclose(found, exact, rtol=0, atol=41 * 2.0**-21 + 5 * 2.0**-19)
    with pytest.raises(InputError, match="is no bf16 value"):
        dot_add(np.zeros(8, np.float32), a, b, model, operands="bf16")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dot_add(f32(0), f32(1), f32(1), "sm70"), "unknown accumulator 'sm70'; use one of exact, fp32-seq"),
        (lambda: running(f32(0), f32(1), f32(1), "SM90"), "unknown accumulator 'SM90'"),
        (lambda: block_of(""), "unknown accumulator ''"),
        (lambda: block_of("fp32-pairwise"), "no running sum"),
        (lambda: running(f32(0), f32(1), f32(1), "fp32-pairwise"), "no running sum"),
        (lambda: dot_add(f32(0), f32(0.1), f32(1), "sm90"), "is no fp16 value"),
        (lambda: dot_add(f32(0), f32(1.0625), f32(1), "sm90-fp8"), "1.0625 is no e5m2 value"),
        (lambda: dot_add(f32(0), f32(1), f32(1), "exact", operands="bf16"), "leave out operands 'bf16'"),
        (lambda: dot_add(f32(0), f32(1).astype(np.float16), f32(1), "exact"), "a is float16; convert"),
        (lambda: dot_add(f32(0), f32(1), np.ones(1, np.int64), "exact"), "b is int64; convert"),
        (lambda: dot_add(np.array(0.1), f32(1), f32(1), "exact"), "0.1 in c is no fp32 value"),
        (lambda: dot_add(f32(0), np.array([1e300]), f32(1), "exact"), "1e[+]300 in a is no fp32 value"),
        (lambda: dot_add(f32(0), f32(1, 2), f32(1, 2, 3), "exact"), "shapes do not fit"),
        (lambda: dot_add(f32(0, 1, 2), np.ones((2, 4)), np.ones((2, 4)), "exact"), "shapes do not fit"),
        (lambda: matmul_add(f32(0), f32(1), f32(1), "exact"), "shapes do not fit"),
        (lambda: matmul_add(f32(0), np.ones((2, 3)), np.ones((2, 3)), "exact"), "shapes do not fit"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
