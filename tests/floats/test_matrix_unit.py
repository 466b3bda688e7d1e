"""The fused dot product and addition of matrix units, all T0: hardware vectors, exact fractions, identities.

The oracle follows the definition one sum at a time in exact fractions. Vectors that were read off GPUs lie beside the
repository (published ones, which are not part of it) and in `data` (this project's own).
"""

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.floats import accumulate, scalar
from bf16forensics.floats.accumulate import dot_add
from bf16forensics.floats.arrays import array_from_codes, round_to
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FP16, FP32, FloatFormat
from bf16forensics.floats.matrix_unit import SM80, SM90, SM90_FP8, SM100, fused_dot_add

UNITS = pytest.mark.parametrize("unit", [SM80, SM90, SM100, SM90_FP8], ids=lambda unit: unit.name)
SIXTEEN_BIT = pytest.mark.parametrize("unit", [SM80, SM90, SM100], ids=lambda unit: unit.name)

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tensor-core-vectors"
MEASURED = sorted((Path(__file__).parent / "data").glob("h200-*.npz"))
CODES_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
NAN_CODE = 0x7FFFFFFF


def f32(*values):
    return np.array(values, np.float32)


def codes(x):
    assert x.dtype == np.float32
    return x.view(np.uint32)


def same_bits(found, expected):
    different = codes(found) != codes(expected)
    assert not different.any(), f"{np.count_nonzero(different)} of {different.size}, first {np.argwhere(different)[0]}"


def exponent(x, fmt):
    return max(math.frexp(x)[1] - 1, fmt.exponent_min)


def power(exponent):
    return Fraction(2) ** exponent


def grid_sum(c, a, b, unit, fmt):
    """Return the sum on the common grid: steps 1 to 4 of the definition, for finite Python floats."""
    addends = [(Fraction(c), exponent(c, FP32))] if c else []
    addends += [
        (Fraction(x) * Fraction(y), exponent(x, fmt) + exponent(y, fmt)) for x, y in zip(a, b, strict=True) if x and y
    ]
    step = power(max([e for _, e in addends] + [unit.alignment_exponent_min]) - unit.fraction_bits)
    return sum((math.trunc(value / step) * step for value, _ in addends), Fraction(0))


def oracle(c, a, b, unit, fmt, mode="rz"):
    """Return the FP32 code of the result."""
    total = grid_sum(c, a, b, unit, fmt)
    if abs(total) >= power(128):
        return FP32.infinity_code | (FP32.sign_mask if total < 0 else 0)
    fraction_bits = unit.output_fraction_bits
    output = FloatFormat(name="out", bits=9 + fraction_bits, exponent_bits=8, fraction_bits=fraction_bits, bias=127)
    code = scalar.encode(total, output, mode) << (FP32.fraction_bits - fraction_bits)
    return 0 if code == FP32.sign_mask else code


def oracle_codes(c, a, b, unit, fmt, mode="rz"):
    rows = zip(c.tolist(), a.tolist(), b.tolist(), strict=True)
    return np.array([oracle(x, y, z, unit, fmt, mode) for x, y, z in rows], np.uint32)


def published(gpu, block):
    if not PUBLISHED.exists():
        pytest.skip("published vectors 'tensor-core-vectors' are not present beside the repository")

    def read(name, base):
        words = (PUBLISHED / name).read_text(encoding="ascii").split()
        return np.array([int(word, base) for word in words], np.uint32).view(np.float32)

    a, b = (read(f"{side}_{gpu}_bf16.txt", 16).reshape(-1, block) for side in "ab")
    c, d = (read(f"{side}_{gpu}_fp32.txt", 2) for side in "cd")
    assert len(a) == len(b) == len(c) == len(d) == 5000
    return c, a, b, d


GPUS = pytest.mark.parametrize(("gpu", "unit"), [("A100", SM80), ("H200", SM90)], ids=["A100", "H200"])


@GPUS
def test_published_vectors_bit_for_bit(gpu, unit):
    c, a, b, d = published(gpu, unit.block)
    same_bits(fused_dot_add(c, a, b, unit), d)


@GPUS
def test_published_vectors_tell_other_arithmetic_apart(gpu, unit):
    c, a, b, d = published(gpu, unit.block)
    others = {
        "one bit less": fused_dot_add(c, a, b, replace(unit, fraction_bits=unit.fraction_bits - 1)),
        "one bit more": fused_dot_add(c, a, b, replace(unit, fraction_bits=unit.fraction_bits + 1)),
        "one rounding of the exact sum": dot_add(c, a, b, "exact"),
        "products one by one": dot_add(c, a, b, "fp32-sequential"),
    }
    if unit is SM90:
        others["two blocks of eight"] = dot_add(c, a, b, "sm80")
        halves = replace(unit, block=8)
        others["two blocks of eight, with all bits"] = fused_dot_add(
            fused_dot_add(c, a[:, :8], b[:, :8], halves), a[:, 8:], b[:, 8:], halves
        )
    mismatches = {name: np.count_nonzero(codes(found) != codes(d)) for name, found in others.items()}
    assert min(mismatches.values()) > 100, mismatches


@GPUS
def test_published_vectors_tell_rounding_to_nearest_apart(gpu, unit):
    c, a, b, d = (x[:1000] for x in published(gpu, unit.block))
    assert np.array_equal(oracle_codes(c, a, b, unit, BF16), codes(d))
    assert np.count_nonzero(oracle_codes(c, a, b, unit, BF16, "rne") != codes(d)) > 200


def test_there_are_measured_vectors():
    assert MEASURED, "tests/floats/data holds no h200-*.npz"


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_vectors_bit_for_bit(path):
    with np.load(path, allow_pickle=False) as vectors:
        a, b, c, d = (vectors[name].view(np.float32) for name in "abcd")
        model, operands = str(vectors["model"]), str(vectors["operands"])
    assert len(d) > 100
    same_bits(dot_add(c, a, b, model, operands=operands), d)


@pytest.mark.parametrize(
    "change",
    [{"alignment_exponent_min": -132}, {"alignment_exponent_min": -134}, {"fraction_bits": 24}, {"fraction_bits": 26}],
    ids=str,
)
@pytest.mark.parametrize("name", ["h200-bf16-mma.sync", "h200-bf16-wgmma"])
def test_measured_vectors_tell_other_arithmetic_apart(name, change, monkeypatch):
    path = next(path for path in MEASURED if path.stem == name)
    with np.load(path, allow_pickle=False) as vectors:
        a, b, c, d = (vectors[name].view(np.float32) for name in "abcd")
    monkeypatch.setitem(accumulate._UNITS, "sm90", replace(SM90, **change))
    assert (codes(dot_add(c, a, b, "sm90", operands="bf16")) != codes(d)).any()


@UNITS
@pytest.mark.parametrize("sign", [1, -1])
def test_terms_at_the_end_of_the_grid(unit, sign):
    """One grid step counts and half of one does not, whether the large term is c or a product."""
    count = unit.block - 1
    ulp = 2.0**-unit.output_fraction_bits
    for exponent, steps in ((-unit.fraction_bits, count), (-unit.fraction_bits - 1, 0)):
        # FP8 reaches its own steps of 2**-13 by products only.
        a, b = f32(*[sign * 2.0**-7] * count), f32(*[2.0 ** (exponent + 7)] * count)
        # FP32 ends two or one bits above the grid, which truncation takes away.
        expected = sign * (1 + math.floor(steps * 2.0**-unit.fraction_bits / ulp) * ulp)
        assert fused_dot_add(f32(sign), a, b, unit)[0] == expected
        with_one = fused_dot_add(f32(0), np.append(a, f32(sign)), np.append(b, f32(1)), unit)
        assert with_one[0] == expected


def test_facts_read_off_an_h200():
    ones = np.ones(16, np.float32)

    def add(*terms, c=0.0):
        return float(fused_dot_add(f32(c), f32(*terms, *[0] * (16 - len(terms))), ones, SM90)[0])

    assert add(*[2**-25] * 8, c=1.0) == 1 + 2**-22
    assert add(*[2**-26] * 8, c=1.0) == 1
    assert add(2**-23, 2**-24, c=1.0) == 1 + 2**-23
    assert add(-(2**-23), -(2**-24), c=-1.0) == -1 - 2**-23
    # Between 2**26 and -2**26 the grid has a step of two, so ones vanish; between halves of these they do not.
    for first, last in ((0, 15), (3, 4), (15, 0)):
        for large, expected in ((2**26, 0), (2**25, 14)):
            terms = np.ones(16)
            terms[first], terms[last] = large, -large
            assert add(*terms) == expected
    assert add(*[1] * 14, -(2**26), c=2**26) == 0


def test_the_hopper_unit_for_fp8_keeps_thirteen_bits():
    def add(*terms, c=0.0):
        return float(fused_dot_add(f32(c), f32(*terms), np.ones(len(terms), np.float32), SM90_FP8)[0])

    assert add(1.0, c=2**-13) == 1 + 2**-13
    assert add(1.0, c=2**-14) == 1
    assert add(1.0, 2**-6 * 1.125, c=2**-13) == 1 + 2**-6 * 1.125 + 2**-13
    # Without products a step still cuts its accumulator down.
    assert add(0.0, c=1 + 2**-14) == 1
    assert add(0.0, c=-1 - 2**-13 - 2**-14) == -1 - 2**-13


def near_codes(draw, fmt, count):
    """Draw values whose exponents lie close enough together for their bits to meet, zeros and subnormals among them."""
    span = 34
    low = draw(st.integers(0, max(0, (fmt.exponent_mask >> fmt.fraction_bits) - 2 - span)))
    first = low << fmt.fraction_bits
    last = min(first + (span << fmt.fraction_bits), fmt.max_finite_code)
    magnitude = st.one_of(st.integers(first, last), st.sampled_from([0, first]))
    drawn = draw(st.lists(st.tuples(magnitude, st.booleans()), min_size=count, max_size=count))
    return [scalar.float_from_code(code | (fmt.sign_mask if negative else 0), fmt) for code, negative in drawn]


@st.composite
def problems(draw, unit, fmt):
    count = draw(st.integers(0, unit.block))
    a, b = near_codes(draw, fmt, count), near_codes(draw, fmt, count)
    largest = max((abs(x * y) for x, y in zip(a, b, strict=True)), default=1.0)
    if draw(st.booleans()) and 0 < largest < 2.0**120:
        shift = draw(st.integers(-32, 6))
        with np.errstate(under="ignore"):
            c = float(np.float32(largest * 2.0**shift * draw(st.floats(1, 2, width=32))))
    else:
        c = draw(st.floats(allow_nan=False, allow_infinity=False, width=32))
    return c * draw(st.sampled_from([1, -1])), a, b


CASES = [(SM80, BF16), (SM80, FP16), (SM90, BF16), (SM90, FP16), (SM90_FP8, E4M3), (SM90_FP8, E5M2)]


@pytest.mark.parametrize(("unit", "fmt"), CASES, ids=lambda x: x.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_specification_in_fractions(unit, fmt, data):
    c, a, b = data.draw(problems(unit, fmt))
    found = fused_dot_add(f32(c), f32(a).reshape(1, -1), f32(b).reshape(1, -1), unit, operands=fmt.name)
    assert codes(found)[0] == oracle(c, a, b, unit, fmt)


def spread_batch(unit, fmt, rows, spread):
    """Values over `spread` binades around one, which FP8 and FP16 cut to subnormals and to their largest."""
    random = np.random.default_rng(unit.block + fmt.bits + spread)
    scale = 2.0 ** random.integers(-spread, spread + 1, size=(2, rows, unit.block))
    values = random.standard_normal((2, rows, unit.block)) * scale
    a, b = round_to(values.astype(np.float32), fmt, overflow="saturate")
    c = (random.standard_normal(rows) * 2.0 ** random.integers(-2 * spread, 2 * spread + 1, size=rows)).astype(
        np.float32
    )
    return c, a, b


@pytest.mark.parametrize(("unit", "fmt"), CASES, ids=lambda x: x.name)
@pytest.mark.parametrize("spread", [2, 12])
def test_batches_equal_the_specification(unit, fmt, spread):
    c, a, b = spread_batch(unit, fmt, 150, spread)
    found = codes(fused_dot_add(c, a, b, unit, operands=fmt.name))
    assert np.array_equal(found, oracle_codes(c, a, b, unit, fmt))


@pytest.mark.parametrize(("unit", "fmt"), CASES, ids=lambda x: x.name)
def test_order_within_a_block_is_irrelevant_and_signs_are_symmetric(unit, fmt):
    c, a, b = spread_batch(unit, fmt, 200, 8)
    expected = fused_dot_add(c, a, b, unit, operands=fmt.name)
    order = np.random.default_rng(1).permutation(unit.block)
    same_bits(fused_dot_add(c, a[:, order], b[:, order], unit, operands=fmt.name), expected)
    same_bits(fused_dot_add(c, b, a, unit, operands=fmt.name), expected)
    same_bits(fused_dot_add(-c, -a, b, unit, operands=fmt.name), np.where(expected == 0, expected, -expected))


@UNITS
def test_padding_with_zeros_changes_nothing(unit):
    fmt = E4M3 if unit is SM90_FP8 else BF16
    c, a, b = spread_batch(unit, fmt, 100, 6)
    count = unit.block // 2 + 1
    mask = np.arange(unit.block) < count
    for zero in (np.float32(0), np.float32(-0.0)):
        padded = fused_dot_add(c, np.where(mask, a, zero), b, unit)
        same_bits(padded, fused_dot_add(c, a[:, :count], b[:, :count], unit))


@SIXTEEN_BIT
@pytest.mark.parametrize("shift", [-100, 60])
def test_powers_of_two_factor_out(unit, shift):
    """T4: away from the ends of the range, a power of two on a and c comes back on the result."""
    c, a, b = spread_batch(unit, BF16, 200, 3)
    scale = np.float32(2.0**shift)
    same_bits(fused_dot_add(c * scale, a * scale, b, unit), fused_dot_add(c, a, b, unit) * scale)


@SIXTEEN_BIT
def test_every_bf16_value_passes_through(unit):
    values = array_from_codes(CODES_16, BF16).astype(np.float32)
    finite = values[np.isfinite(values)]
    ones = np.ones((1, 1), np.float32)
    found = fused_dot_add(f32(0), finite[:, np.newaxis], ones, unit)
    # The grid of the smallest exponent reaches below FP32's smallest subnormal, so none of them loses a bit.
    same_bits(found, finite + np.float32(0))
    same_bits(fused_dot_add(finite, f32(0), f32(0), unit), finite + np.float32(0))


@SIXTEEN_BIT
def test_subnormal_accumulators_and_results(unit):
    tiny = 2.0**-149
    zero = f32(0)
    for c in (tiny, 5 * tiny, 2.0**-126 - tiny, -tiny):
        assert fused_dot_add(f32(c), zero, zero, unit)[0] == c
    product = fused_dot_add(f32(0), f32(2.0**-70), f32(2.0**-79), unit)
    assert product[0] == tiny
    # Half a smallest subnormal is cut off; two halves within a block are not.
    for sign in (1, -1):
        half = fused_dot_add(f32(0), f32(sign * 2.0**-70), f32(2.0**-80), unit)
        assert codes(half)[0] == 0
    halves = fused_dot_add(f32(0), f32(2.0**-70, 2.0**-71), f32(2.0**-80, 2.0**-79), unit)
    assert halves[0] == tiny
    truncated = fused_dot_add(f32(3 * tiny), f32(-(2.0**-70)), f32(2.0**-80), unit)
    assert truncated[0] == 2 * tiny


def test_the_smallest_alignment_exponent_bounds_the_grid():
    """Pieces of the smallest subnormal, the last two below the lowest grid: without them nothing is left."""
    pieces = [2.0**-e for e in (*range(150, 159), 159, 159)]
    a, b = f32(*[p * 2.0**80 for p in pieces]), f32(*[2.0**-80] * len(pieces))
    assert sum(map(Fraction, pieces)) == power(-149)
    assert fused_dot_add(f32(0), a, b, SM90)[0] == 0
    assert fused_dot_add(f32(0), a, b, replace(SM90, alignment_exponent_min=-134))[0] == 2.0**-149


@SIXTEEN_BIT
def test_the_end_of_the_range(unit):
    largest = FP32.max_finite

    def add(c, *products):
        a = f32(*[x for x, _ in products])
        return float(fused_dot_add(f32(c), a, f32(*[y for _, y in products]), unit)[0])

    # Half a step beyond the largest number is cut off, a whole one is infinite.
    assert add(largest, (2.0**103, 1.0)) == largest
    assert add(largest, (2.0**104, 1.0)) == math.inf
    assert add(-largest, (-(2.0**104), 1.0)) == -math.inf
    assert add(0.0, (2.0**127, 1.0), (2.0**127, 1.0)) == math.inf
    # Products may leave FP32's range as long as their sum does not.
    assert add(0.0, (2.0**100, 2.0**100), (-(2.0**100), 2.0**100)) == 0
    assert add(0.0, (2.0**100, 2.0**28), (-(2.0**100), 2.0**27)) == 2.0**127
    assert add(0.0, (2.0**100, 2.0**100)) == math.inf


@SIXTEEN_BIT
def test_infinities_and_nan(unit):
    inf, nan = math.inf, math.nan

    def add(c, *products):
        a = f32(1.0, *[x for x, _ in products])
        return int(codes(fused_dot_add(f32(c), a, f32(1.0, *[y for _, y in products]), unit))[0])

    positive, negative = 0x7F800000, 0xFF800000
    assert add(inf) == add(0.0, (inf, 2.0)) == add(0.0, (-inf, -2.0), (inf, inf)) == add(inf, (inf, 1.0)) == positive
    assert add(-inf) == add(0.0, (inf, -2.0)) == add(-inf, (3.0, -inf)) == negative
    # A sum that overflows and an infinity of the other sign: the infinity is there from the start, the overflow is not.
    assert add(-inf, (2.0**127, 2.0)) == negative
    for terms in [(nan,), (0.0, (nan, 0.0)), (0.0, (inf, 0.0)), (inf, (-inf, 1.0)), (0.0, (inf, 1.0), (inf, -1.0))]:
        assert add(*terms) == NAN_CODE
    signalling = np.array([0xFF800001], np.uint32).view(np.float32)
    assert codes(fused_dot_add(signalling, f32(1), f32(1), unit))[0] == NAN_CODE


def test_a_nan_touches_its_own_sum_only():
    a = np.ones((3, 4), np.float32)
    a[1, 2] = math.nan
    found = fused_dot_add(f32(0.5), a, f32(1, 2, 3, 4), SM90)
    assert found.tolist()[::2] == [10.5, 10.5]
    assert codes(found)[1] == NAN_CODE


@UNITS
def test_signs_of_zero(unit):
    minus = np.float32(-0.0)

    def add(c, a, b):
        return int(codes(fused_dot_add(f32(c), f32(a), f32(b), unit))[0])

    for c, a, b in [(minus, minus, 1.0), (minus, 0.0, -1.0), (0.0, minus, 1.0), (1.0, -1.0, 1.0), (-1.0, -1.0, -1.0)]:
        assert add(c, a, b) == 0


def test_the_format_decides_the_exponent_of_subnormals():
    """2**-20 has exponent -14 in FP16: beside c = 2**-32 the grid starts at 2**-14 and not at 2**-20."""
    a, b, c = f32(2.0**-20), f32(1.0), f32(2.0**-40)
    assert fused_dot_add(c, a, b, SM90)[0] == 2.0**-20 + 2.0**-40
    assert fused_dot_add(c, a, b, SM90, operands="bf16")[0] == 2.0**-20 + 2.0**-40
    assert fused_dot_add(c, a, b, SM90, operands="fp16")[0] == 2.0**-20
    # 1 + 2**-10 is no BF16 value, so the pair is FP16's.
    pair = fused_dot_add(c, f32(2.0**-20, 0.0), f32(1.0, 1 + 2.0**-10), SM90)
    assert pair[0] == 2.0**-20


def test_shapes_broadcast():
    c, a, b = spread_batch(SM90, BF16, 12, 3)
    table = fused_dot_add(c[:, np.newaxis], a[:, np.newaxis], b[np.newaxis], SM90)
    assert table.shape == (12, 12)
    same_bits(np.diagonal(table).copy(), fused_dot_add(c, a, b, SM90))
    same_bits(table[3], fused_dot_add(c[3], a[3], b, SM90))
    one = fused_dot_add(c[0], a[0], b[0], SM90)
    assert one.shape == ()
    assert one == table[0, 0]
    assert fused_dot_add(np.zeros((0,), np.float32), a[:1], b[:1], SM90).shape == (0,)
    same_bits(fused_dot_add(c.astype(np.float64), a.astype(np.float64), b, SM90), np.diagonal(table).copy())


@pytest.mark.parametrize(
    ("c", "a", "b", "unit", "operands", "message"),
    [
        (0.0, [1.0, 1 + 2**-11], [1.0, 1.0], SM90, None, "1.00048828125 is no fp16 value"),
        (0.0, [1 + 2**-8], [2.0**40], SM90, None, "no fp16 value"),
        (0.0, [1 + 2**-8], [1.0], SM90, "bf16", "1.00390625 is no bf16 value"),
        (0.0, [1.0], [1.0625], SM90_FP8, None, "1.0625 is no e5m2 value"),
        (0.0, [1.0], [1.0], SM90, "e4m3", "not 'e4m3'"),
        (1 / 3, [1.0], [1.0], SM90, None, "no fp32 value"),
        (0.0, [1.0] * 17, [1.0] * 17, SM90, None, "16 products a step, got 17"),
        (0.0, [1.0, 2.0], [1.0], SM90, None, "shapes do not fit"),
        (0.0, [[1.0], [1.0]], [[1.0], [1.0], [1.0]], SM90, None, "shapes do not fit"),
        (0.0, 1.0, 1.0, SM90, None, "shapes do not fit"),
    ],
)
def test_bad_input_is_named(c, a, b, unit, operands, message):
    with pytest.raises(InputError, match=message) as caught:
        fused_dot_add(np.array(c), np.array(a), np.array(b), unit, operands=operands)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.uint16])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(InputError, match="convert it to float32 or float64"):
        fused_dot_add(f32(0), np.ones(2, dtype), f32(1, 1), SM90)
