"""Scalar specification, NumPy twin and torch twin against independent oracles and against one another.

ml_dtypes is an oracle for decoding and for FP32 -> BF16 and FP8 only: from float64 it rounds twice.
"""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.emulate import rounding as torch_rounding
from bf16forensics.errors import InputError
from bf16forensics.floats import arrays, scalar
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FP16, FP32, FP64

ALL_CODES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def bits_equal(found, expected):
    """T0: the same bits, except that any NaN equals any NaN."""
    as_bits = {4: np.uint32, 8: np.uint64}[expected.dtype.itemsize]
    same = (found.view(as_bits) == expected.view(as_bits)) | (np.isnan(found) & np.isnan(expected))
    assert found.dtype == expected.dtype
    assert same.all(), f"{np.count_nonzero(~same)} differ, first at {np.flatnonzero(~same)[0]}"


def cast(x, dtype):
    """Cast without NumPy's warning of signalling NaNs."""
    with np.errstate(invalid="ignore"):
        return x.astype(dtype)


def round_scalar(x, fmt, mode="rne", overflow=None):
    return cast(np.array([scalar.round_to(v, fmt, mode, overflow=overflow) for v in x.tolist()]), x.dtype)


def round_torch(x, fmt, overflow=None):
    return torch_rounding.round_to(torch.from_numpy(x), fmt.name, overflow=overflow).numpy()


ROUNDERS = pytest.mark.parametrize(
    "rounder", [round_scalar, arrays.round_to, round_torch], ids=["scalar", "numpy", "torch"]
)
NARROW = pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16, FP16], ids=lambda f: f.name)
OVERFLOW = pytest.mark.parametrize("overflow", ["nonfinite", "saturate"])


def thinned(rounder, fmt=BF16):
    """Choose all codes; for the slow scalar form every 7th of 16 bits, which takes odd and even ones of every binade.

    Its exhaustive test is the way from code to value and back.
    """
    return slice(None, None, 7 if rounder is round_scalar and fmt.bits == 16 else 1)


def codes_of(fmt):
    return ALL_CODES if fmt.bits == 16 else np.arange(1 << 8, dtype=np.uint16).astype(np.uint8)


def oracle_dtype(fmt):
    return {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "bf16": ml_dtypes.bfloat16,
        "fp16": np.float16,
    }[fmt.name]


def oracle_values(fmt, codes=None):
    return cast((codes_of(fmt) if codes is None else codes).view(oracle_dtype(fmt)), np.float64)


def finite_values(fmt):
    """Return every finite value that is not negative, ascending, and the value that would follow the last."""
    low = oracle_values(fmt, codes_of(fmt)[: fmt.max_finite_code + 1])
    return low, np.append(low[1:], 2 * low[-1] - low[-2])


@NARROW
def test_every_code_decodes_as_the_oracle_says(fmt):
    expected = oracle_values(fmt)
    bits_equal(np.array([scalar.float_from_code(int(c), fmt) for c in codes_of(fmt)]), expected)
    bits_equal(arrays.array_from_codes(codes_of(fmt), fmt), expected)


def test_every_bf16_code_decodes_to_float32_with_its_payload():
    expected = cast(ALL_CODES.view(ml_dtypes.bfloat16), np.float32)
    found = arrays.bf16_from_codes(ALL_CODES)
    bits_equal(found, expected)
    assert (found.view(np.uint32) >> 16 == ALL_CODES).all()


@NARROW
def test_every_code_survives_decoding_and_encoding(fmt):
    values = oracle_values(fmt)
    expected = np.where(np.isnan(values), fmt.quiet_nan_code, codes_of(fmt))
    some, expected_some = values[thinned(round_scalar, fmt)].tolist(), expected[thinned(round_scalar, fmt)].tolist()
    assert [scalar.encode(v, fmt, overflow="nonfinite") for v in values.tolist()] == expected.tolist()
    assert [scalar.encode(v, fmt, "rz", overflow="nonfinite") for v in some] == expected_some
    assert [scalar.code_from_float(v, fmt) for v in some] == expected_some
    codes = arrays.codes_from_array(values, fmt)
    assert codes.dtype == codes_of(fmt).dtype
    assert (codes == expected).all()


@NARROW
@ROUNDERS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_representable_values_are_left_alone(rounder, fmt, dtype):
    values = cast(oracle_values(fmt), dtype)[thinned(rounder, fmt)]
    bits_equal(rounder(values, fmt, overflow="nonfinite"), values)
    ends = np.where(np.isinf(values), np.copysign(dtype(fmt.max_finite), values), values)
    bits_equal(rounder(values, fmt, overflow="saturate"), ends)


@OVERFLOW
@NARROW
@ROUNDERS
@pytest.mark.parametrize("offset", [-1, 0, 1], ids=["tie-tiny", "tie", "tie+tiny"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_midpoint_rounds_once_from_float64(rounder, fmt, overflow, offset, sign):
    """The neighbours differ from the tie in the last bit of float64, where FP32 as a half-way house sees the tie."""
    low, high = finite_values(fmt)
    tie = (low + high) / 2
    even_low = np.arange(len(low)) % 2 == 0
    goes_low = even_low if offset == 0 else np.full(len(low), offset < 0)
    beyond = fmt.max_finite if overflow == "saturate" else np.inf if fmt.has_infinity else np.nan
    expected = np.where(goes_low, low, np.append(low[1:], beyond))
    x = np.nextafter(tie, offset * np.inf) if offset else tie
    chosen = thinned(rounder, fmt)
    bits_equal(rounder(sign * x[chosen], fmt, overflow=overflow), sign * expected[chosen])


@ROUNDERS
def test_midpoint_neighbours_in_fp32_agree_with_the_oracle(rounder):
    """T1: every BF16 code of either sign with the 16 lower bits around none, half and all."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    codes = ALL_CODES[thinned(rounder)]
    x = ((codes.astype(np.uint32) << 16)[:, None] | lower).reshape(-1).view(np.float32)
    bits_equal(rounder(x, BF16), cast(cast(x, ml_dtypes.bfloat16), np.float32))


@ROUNDERS
def test_fp32_midpoint_neighbours_to_fp16_agree_with_numpy(rounder):
    exponents = np.arange(-28, 18, dtype=np.float64)
    fractions = 1 + np.array([0, 1, 1023, 1024, 1025, 2047, 2048]) / 2**11
    ties = (np.exp2(exponents)[:, None] * fractions).reshape(-1).astype(np.float32)
    x = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    bits_equal(rounder(x, FP16), expected)


@ROUNDERS
def test_float64_to_fp32_agrees_with_numpy(rounder):
    exponents = np.arange(-152, 129, dtype=np.float64)
    fractions = 1 + np.array([0, 1, 2, 3, 2**23 - 1, 2**24 - 1]) / 2**24
    ties = (np.exp2(exponents)[:, None] * fractions).reshape(-1)
    x = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    x = np.concatenate([x, -x, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, -1e-300, 5e-324]])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float32).astype(np.float64)
    bits_equal(rounder(x, FP32), expected)


#: FP32 bits -> BF16 code: truncation sold as rounding, and the ends of the range.
TABLE = [
    (0x3E89CCD5, 0x3E8A),
    (0x3F808000, 0x3F80),
    (0x3F818000, 0x3F82),
    (0x7F7F7FFF, 0x7F7F),
    (0x7F7F8000, 0x7F80),
    (0x80000000, 0x8000),
    (0x00008000, 0x0000),
    (0x00008001, 0x0001),
    (0xC0968000, 0xC096),
    (0xC0968002, 0xC097),
]


@ROUNDERS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_truncation_and_range_ends(rounder, dtype):
    bits, codes = (np.array(column, dtype=np.uint32) for column in zip(*TABLE, strict=True))
    x = bits.view(np.float32).astype(dtype)
    bits_equal(rounder(x, BF16), (codes << 16).view(np.float32).astype(dtype))


@ROUNDERS
def test_no_nan_becomes_infinity(rounder):
    x = np.array([0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], dtype=np.uint32)
    assert np.isnan(rounder(x.view(np.float32), BF16)).all()
    assert np.isnan(rounder(x.view(np.float32), FP16)).all()


@pytest.mark.parametrize("rounder", [round_scalar, arrays.round_to], ids=["scalar", "numpy"])
@NARROW
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rz_drops_whatever_lies_below(rounder, fmt, sign):
    low, high = finite_values(fmt)
    chosen = thinned(rounder, fmt)
    for x in (np.nextafter(low, np.inf), (low + high) / 2, np.nextafter(high, 0)):
        bits_equal(rounder(sign * x[chosen], fmt, "rz"), sign * low[chosen])


@pytest.mark.parametrize("rounder", [round_scalar, arrays.round_to], ids=["scalar", "numpy"])
def test_rz_stops_at_the_largest_finite_value(rounder):
    x = np.array([1e300, -1e300, np.inf, -np.inf, -0.0, -1e-300])
    largest = BF16.max_finite
    bits_equal(rounder(x, BF16, "rz"), np.array([largest, -largest, np.inf, -np.inf, -0.0, -0.0]))


def test_exact_values_beyond_float64_round_once():
    one = Fraction(1)
    tie = one + one / 256
    assert scalar.encode(tie, BF16) == 0x3F80
    assert scalar.encode(tie + one / 10**40, BF16) == 0x3F81
    assert scalar.encode(tie - one / 10**40, BF16) == 0x3F80
    assert scalar.encode(10**400, BF16) == BF16.infinity_code
    assert scalar.encode(-(10**400), BF16, "rz") == BF16.sign_mask | 0x7F7F
    assert scalar.encode(one / 10**400, BF16) == 0
    assert scalar.encode(-one / 10**400, FP64) == FP64.sign_mask
    assert scalar.encode(0, BF16) == 0
    assert scalar.encode(Fraction(1, 3), FP64) == int(np.array(1 / 3).view(np.uint64))


@given(st.floats(width=64))
def test_all_three_agree_on_any_float64(value):
    x = np.array([value])
    for fmt in (E4M3, E5M2, BF16, FP16, FP32, FP64):
        for overflow in ("nonfinite", "saturate"):
            expected = round_scalar(x, fmt, "rne", overflow)
            bits_equal(arrays.round_to(x, fmt, overflow=overflow), expected)
            bits_equal(round_torch(x, fmt, overflow), expected)
            for mode in ("rz", "rna"):
                bits_equal(arrays.round_to(x, fmt, mode, overflow=overflow), round_scalar(x, fmt, mode, overflow))


@given(st.floats(width=32))
def test_all_three_agree_on_any_float32(value):
    x = np.array([value], dtype=np.float32)
    for fmt in (E4M3, E5M2, BF16, FP16, FP32):
        for overflow in ("nonfinite", "saturate"):
            expected = round_scalar(x, fmt, "rne", overflow)
            bits_equal(arrays.round_to(x, fmt, overflow=overflow), expected)
            bits_equal(round_torch(x, fmt, overflow), expected)


@given(
    st.fractions() | st.fractions(-500, 500), st.sampled_from([E4M3, E5M2, BF16, FP16]), st.sampled_from(["rne", "rna"])
)
def test_the_result_is_a_nearest_value(value, fmt, mode):
    """T4 against the definition itself: no neighbour of the result is nearer."""
    code = scalar.encode(value, fmt, mode, overflow="nonfinite")
    largest = Fraction(fmt.max_finite)
    if math.isnan(scalar.decode(code, fmt)) or math.isinf(scalar.decode(code, fmt)):
        assert abs(value) >= largest + Fraction(2) ** (fmt.exponent_max - fmt.fraction_bits - 1)
        assert scalar.round_to(value, fmt, mode, overflow="saturate") == math.copysign(largest, value)
        return
    magnitude = code & ~fmt.sign_mask
    nearest = scalar.decode(code, fmt)
    distance = abs(nearest - value)
    for neighbour in (magnitude - 1, magnitude + 1):
        if 0 <= neighbour <= fmt.max_finite_code:
            other = abs(scalar.decode(code & fmt.sign_mask | neighbour, fmt) - value)
            wins_tie = code % 2 == 0 if mode == "rne" else neighbour < magnitude
            assert distance < other or (distance == other and wins_tie)


@given(st.floats(allow_nan=False, width=32), st.integers(-20, 20))
def test_rounding_commutes_with_powers_of_two_in_the_normal_range(value, power):
    """T4: as long as neither side leaves the normal range."""
    scaled = math.ldexp(value, power)
    for fmt in (BF16, FP32):
        if all(fmt.min_normal <= abs(v) <= fmt.max_finite / 2 for v in (value, scaled)):
            assert scalar.round_to(scaled, fmt) == math.ldexp(scalar.round_to(value, fmt), power)


def test_refusals_say_what_to_do():
    with pytest.raises(InputError, match="unknown rounding mode 'up'; use one of rne, rz"):
        scalar.encode(1.0, BF16, "up")
    with pytest.raises(InputError, match="unknown rounding mode 'up'"):
        arrays.round_to(np.ones(1), BF16, "up")
    with pytest.raises(InputError, match="0x10000 is not a bf16 code; a code has 16 bits"):
        scalar.decode(0x10000, BF16)
    with pytest.raises(InputError, match=r"1\.001 is not a bf16 value; round it first"):
        scalar.code_from_float(1.001, BF16)
    with pytest.raises(InputError, match=r"1\.001\)? is not a bf16 value; round it first"):
        arrays.codes_from_array(np.array([1.0, 1.001]), BF16)
    with pytest.raises(InputError, match="cannot round an array of int64; convert it to float32 or float64"):
        arrays.round_to(np.ones(1, dtype=np.int64), BF16)
    with pytest.raises(InputError, match="bf16 codes are uint16, got uint32"):
        arrays.bf16_from_codes(np.ones(1, dtype=np.uint32))
    with pytest.raises(InputError, match="fp32 codes are uint32, got uint16"):
        arrays.array_from_codes(ALL_CODES, FP32)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_shapes_are_kept(shape):
    x = np.ones(shape, dtype=np.float32)
    assert arrays.round_to(x, BF16).shape == shape
    assert arrays.codes_from_array(x, BF16).shape == shape
    assert arrays.array_from_codes(np.ones(shape, dtype=np.uint16), BF16).shape == shape


def test_wide_codes_go_both_ways():
    x = np.array([0.0, -0.0, 1.5, -np.inf, 2.0**-149])
    for fmt in (FP32, FP64):
        codes = arrays.codes_from_array(x, fmt)
        assert codes.tolist() == [scalar.encode(v, fmt) for v in x.tolist()]
        bits_equal(arrays.array_from_codes(codes, fmt), x)


def test_input_is_not_changed():
    x = np.array([1.001, -2.7])
    arrays.round_to(x, BF16)
    arrays.round_to(x, FP64)[0] = 7
    assert x.tolist() == [1.001, -2.7]
