"""FP8: every code, every 16-bit value rounded, and the two ways to treat what lies beyond the range.

Oracles: the definition of the OCP 8-bit formats in fractions, midpoints of neighbouring values in exact float64, and
ml_dtypes, whose casts do not saturate.
"""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from bf16forensics.emulate import rounding as torch_rounding
from bf16forensics.errors import InputError
from bf16forensics.floats import arrays, scalar, ulp
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FP16, FP32, FP64

FP8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
OVERFLOW = pytest.mark.parametrize("overflow", ["nonfinite", "saturate"])
ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}

CODES_8 = np.arange(1 << 8, dtype=np.uint16).astype(np.uint8)
CODES_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def quiet(x, dtype):
    """Cast without NumPy's warnings of NaN and overflow."""
    with np.errstate(invalid="ignore", over="ignore"):
        return x.astype(dtype)


#: Every value of the two formats that records come in, as FP32.
SOURCES = {
    "bf16": quiet(CODES_16.view(ml_dtypes.bfloat16), np.float32),
    "fp16": quiet(CODES_16.view(np.float16), np.float32),
}


def same_values(found, expected):
    """T0: equal with the same sign of zero, NaN where NaN is expected."""
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


def round_scalar(x, fmt, overflow=None):
    return np.array([scalar.round_to(v, fmt, overflow=overflow) for v in x.tolist()])


def round_numpy(x, fmt, overflow=None):
    return arrays.round_to(x, fmt, overflow=overflow)


def round_torch(x, fmt, overflow=None):
    return torch_rounding.round_to(torch.from_numpy(x), fmt.name, overflow=overflow).numpy()


ROUNDERS = pytest.mark.parametrize(
    "rounder", [round_scalar, round_numpy, round_torch], ids=["scalar", "numpy", "torch"]
)


def by_definition(code, fmt):
    """OFP8 1.0, table 1: (-1)**S * 2**(E - bias) * (1 + M / 2**m), and 2**(1 - bias) * (M / 2**m) where E is 0."""
    bits = f"{code:08b}"
    num_fraction, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[fmt.name]
    exponent, fraction = int(bits[1:-num_fraction], 2), Fraction(int(bits[-num_fraction:], 2), 2**num_fraction)
    if fmt.name == "e4m3" and bits[1:] == "1111111":
        return "NaN"
    if fmt.name == "e5m2" and bits[1:6] == "11111":
        return "NaN" if fraction else "infinity"
    sign = -1 if bits[0] == "1" else 1
    return sign * Fraction(2) ** (max(exponent, 1) - bias) * (fraction + (exponent > 0))


@FP8
def test_every_code_has_the_value_of_the_definition(fmt):
    for code in range(256):
        expected, found = by_definition(code, fmt), scalar.decode(code, fmt)
        if expected == "NaN":
            assert math.isnan(found)
        elif expected == "infinity":
            assert found == (-math.inf if code & 0x80 else math.inf)
        else:
            assert isinstance(found, Fraction)
            assert found == expected


@FP8
def test_every_code_agrees_with_ml_dtypes(fmt):
    expected = quiet(CODES_8.view(ORACLE[fmt.name]), np.float64)
    same_values(np.array([scalar.float_from_code(code, fmt) for code in range(256)]), expected)
    same_values(arrays.array_from_codes(CODES_8, fmt), expected)
    codes = np.where(np.isnan(expected), fmt.quiet_nan_code, CODES_8)
    assert arrays.codes_from_array(expected, fmt).tolist() == codes.tolist()
    assert arrays.codes_from_array(expected.astype(np.float32), fmt).dtype == np.uint8


#: Code -> value, from OFP8 1.0, table 1: smallest and largest subnormal and normal numbers, zero, one.
ENDS = [
    (E4M3, 0x01, 2.0**-9),
    (E4M3, 0x07, 0.875 * 2.0**-6),
    (E4M3, 0x08, 2.0**-6),
    (E4M3, 0x38, 1.0),
    (E4M3, 0x7E, 448.0),
    (E4M3, 0x80, -0.0),
    (E4M3, 0xFE, -448.0),
    (E5M2, 0x01, 2.0**-16),
    (E5M2, 0x03, 0.75 * 2.0**-14),
    (E5M2, 0x04, 2.0**-14),
    (E5M2, 0x3C, 1.0),
    (E5M2, 0x7B, 57344.0),
    (E5M2, 0xFC, -math.inf),
]


@pytest.mark.parametrize(("fmt", "code", "value"), ENDS, ids=lambda x: getattr(x, "name", str(x)))
def test_ends_of_the_range(fmt, code, value):
    assert scalar.float_from_code(code, fmt) == value
    assert math.copysign(1.0, scalar.float_from_code(code, fmt)) == math.copysign(1.0, value)
    assert scalar.code_from_float(value, fmt) == code


def nearest(x, fmt, overflow):
    """Round by position among the midpoints, which float64 holds exactly: an oracle that knows no exponents."""
    values = quiet(CODES_8[:128].view(ORACLE[fmt.name]), np.float64)
    values = values[np.isfinite(values)]
    # Where the next value would be, were the range longer; a tie with it goes to the even code as well.
    steps = np.append(values, 2 * values[-1] - values[-2])
    midpoints = (steps[1:] + steps[:-1]) / 2
    magnitude = np.abs(quiet(x, np.float64))
    below, above = (np.searchsorted(midpoints, magnitude, side=side) for side in ("left", "right"))
    chosen = np.where(below % 2 == 0, below, above)
    beyond = values[-1] if overflow == "saturate" else np.inf if fmt is E5M2 else np.nan
    rounded = np.append(values, beyond)[np.minimum(chosen, len(values))]
    return np.where(np.isnan(x), np.nan, np.where(np.signbit(x), -rounded, rounded))


@pytest.mark.parametrize("source", SOURCES)
@FP8
@OVERFLOW
@ROUNDERS
def test_every_16_bit_value_rounds_to_the_nearest(rounder, overflow, fmt, source):
    x = SOURCES[source]
    if rounder is round_scalar and overflow == "nonfinite":
        # Every code in the mode that FP8 has by itself; a seventh here, of every binade.
        x = x[::7]
    same_values(rounder(x, fmt, overflow), nearest(x, fmt, overflow))


@pytest.mark.parametrize("source", SOURCES)
@FP8
@pytest.mark.parametrize("rounder", [round_numpy, round_torch], ids=["numpy", "torch"])
def test_every_16_bit_value_rounds_as_ml_dtypes_where_that_does_not_saturate(rounder, fmt, source):
    x = SOURCES[source]
    same_values(rounder(x, fmt, "nonfinite"), quiet(quiet(x, ORACLE[fmt.name]), np.float32))


@FP8
@ROUNDERS
def test_fp32_values_beside_every_tie_round_as_ml_dtypes(rounder, fmt):
    low = quiet(CODES_8[:127].view(ORACLE[fmt.name]), np.float32)
    low = low[np.isfinite(low)]
    ties = np.append((low[1:] + low[:-1]) / 2, low[-1] + (low[-1] - low[-2]) / 2).astype(np.float32)
    x = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    x = np.concatenate([x, -x])
    same_values(rounder(x, fmt, "nonfinite"), quiet(quiet(x, ORACLE[fmt.name]), np.float32))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("fmt", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_torch_casts_agree_within_the_range(fmt, dtype, source):
    """Beyond it they depend on the version of torch."""
    x = torch.from_numpy(SOURCES[source]).clamp(-fmt.max_finite, fmt.max_finite)
    for overflow in ("nonfinite", "saturate"):
        same_values(torch_rounding.round_to(x, fmt.name, overflow=overflow).numpy(), x.to(dtype).float().numpy())


@ROUNDERS
def test_float64_rounds_to_fp8_once(rounder):
    """Each lies above a tie by less than FP32, BF16 or FP16 can tell; rounding there first would send it down."""
    x = np.array([1 + 2.0**-4 + 2.0**-40, -(2.0**-10 + 2.0**-60), 200 + 2.0**-30])
    assert rounder(x, E4M3).tolist() == [1.125, -(2.0**-9), 208.0]
    assert rounder(x.astype(np.float32), E4M3).tolist() == [1.0, -0.0, 192.0]
    x = np.array([1 + 2.0**-3 + 2.0**-40, -(2.0**-17 + 2.0**-60), 18432 + 2.0**-20])
    assert rounder(x, E5M2).tolist() == [1.25, -(2.0**-16), 20480.0]


#: Value -> what "saturate" and "nonfinite" give. The tie at the end goes to the even code: to 448 in E4M3, whose last
#: code is even, and beyond the range in E5M2, as in IEEE 754.
BEYOND = [
    (E4M3, 464.0, 448.0, 448.0),
    (E4M3, math.nextafter(464.0, 500.0), 448.0, math.nan),
    (E4M3, 480.0, 448.0, math.nan),
    (E4M3, 512.0, 448.0, math.nan),
    (E4M3, 1e300, 448.0, math.nan),
    (E4M3, math.inf, 448.0, math.nan),
    (E4M3, math.nan, math.nan, math.nan),
    (E5M2, math.nextafter(61440.0, 0.0), 57344.0, 57344.0),
    (E5M2, 61440.0, 57344.0, math.inf),
    (E5M2, 65536.0, 57344.0, math.inf),
    (E5M2, 1e300, 57344.0, math.inf),
    (E5M2, math.inf, 57344.0, math.inf),
    (E5M2, math.nan, math.nan, math.nan),
    (FP16, 65520.0, 65504.0, math.inf),
    (FP16, math.inf, 65504.0, math.inf),
    (BF16, 3.4e38, BF16.max_finite, math.inf),
    (BF16, math.inf, BF16.max_finite, math.inf),
    (FP32, 1e300, FP32.max_finite, math.inf),
    (FP64, math.inf, FP64.max_finite, math.inf),
]


@pytest.mark.parametrize(("fmt", "value", "saturated", "nonfinite"), BEYOND, ids=lambda x: getattr(x, "name", str(x)))
@ROUNDERS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_beyond_the_range(rounder, sign, fmt, value, saturated, nonfinite):
    x = sign * np.array([value])
    same_values(rounder(x, fmt, "saturate"), sign * np.array([saturated]))
    same_values(rounder(x, fmt, "nonfinite"), sign * np.array([nonfinite]))
    same_values(rounder(x, fmt), sign * np.array([saturated if fmt.bits == 8 else nonfinite]))


@FP8
@pytest.mark.parametrize("rounder", [scalar.round_to, arrays.round_to], ids=["scalar", "numpy"])
def test_truncation_overflows_at_infinity_alone(rounder, fmt):
    largest = fmt.max_finite
    for value, saturated, nonfinite in [
        (1e300, largest, largest),
        (-1e300, -largest, -largest),
        (-math.inf, -largest, -math.inf if fmt.has_infinity else math.nan),
    ]:
        x = np.array([value]) if rounder is arrays.round_to else value
        np.testing.assert_array_equal(rounder(x, fmt, "rz"), saturated)
        np.testing.assert_array_equal(rounder(x, fmt, "rz", overflow="nonfinite"), nonfinite)


def test_overflow_to_nan_has_the_positive_code():
    assert scalar.encode(-1e300, E4M3, overflow="nonfinite") == 0x7F
    assert scalar.encode(-1e300, E4M3) == 0xFE
    assert scalar.encode(-(10**400), E5M2, overflow="nonfinite") == 0xFC
    assert scalar.encode(10**400, E5M2) == 0x7B


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_format_as_wide_as_the_array_only_limits_it(dtype):
    x = np.array([1.001, np.inf, -np.inf, np.nan, -0.0], dtype=dtype)
    fmt = {np.float32: FP32, np.float64: FP64}[dtype]
    largest = dtype(fmt.max_finite)
    limited = np.array([1.001, largest, -largest, np.nan, -0.0], dtype=dtype)
    for rounder in (round_numpy, round_torch):
        same_values(rounder(x, fmt), x)
        same_values(rounder(x, fmt, "saturate"), limited)


def test_distances_count_fp8_codes():
    assert ulp.distance_steps(0.0, 448.0, E4M3) == 0x7E
    assert ulp.distance_steps(-math.inf, math.inf, E5M2) == 2 * 0x7C
    assert ulp.distance_steps_array(np.array([1.0, -448.0]), np.array([2.0, 448.0]), E4M3).tolist() == [8, 252]


def test_refusals():
    with pytest.raises(InputError, match="e4m3 codes are uint8, got uint16; convert the array"):
        arrays.array_from_codes(CODES_16, E4M3)
    with pytest.raises(InputError, match="0x100 is not a e5m2 code; a code has 8 bits"):
        scalar.decode(0x100, E5M2)
    for value in (math.inf, 449.0, 480.0):
        with pytest.raises(InputError, match="is not a e4m3 value; round it first"):
            scalar.code_from_float(value, E4M3)
        with pytest.raises(InputError, match="is not a e4m3 value; round it first"):
            arrays.codes_from_array(np.array([1.0, value]), E4M3)
    for function in (
        lambda: scalar.encode(1.0, E4M3, overflow="clip"),
        lambda: arrays.round_to(np.ones(1), E4M3, overflow="clip"),
        lambda: torch_rounding.round_to(torch.ones(1), "e4m3", overflow="clip"),
    ):
        with pytest.raises(InputError, match="unknown overflow 'clip'; use one of nonfinite, saturate"):
            function()
    with pytest.raises(InputError, match="float32 cannot hold the largest fp64 value; convert the array to float64"):
        arrays.round_to(np.ones(1, dtype=np.float32), FP64, overflow="saturate")
    with pytest.raises(InputError, match="float32 cannot hold the largest fp64 value; convert the tensor"):
        torch_rounding.round_to(torch.ones(1), "fp64", overflow="saturate")
