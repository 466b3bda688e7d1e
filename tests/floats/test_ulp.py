"""Steps: scalar, NumPy and torch twin over every adjacent pair of values."""

import math

import numpy as np
import pytest
import torch

from bf16forensics.emulate.rounding import ulp_of
from bf16forensics.errors import InputError
from bf16forensics.floats import arrays, ulp
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FP16, FP32, FP64

NARROW = pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16, FP16], ids=lambda f: f.name)


def ulp_scalar(x, fmt):
    return np.array([ulp.ulp(v, fmt) for v in x.tolist()])


def ulp_torch(x, fmt):
    return ulp_of(torch.from_numpy(x), fmt.name).numpy()


ULPS = pytest.mark.parametrize("find_ulp", [ulp_scalar, ulp.ulp_array, ulp_torch], ids=["scalar", "numpy", "torch"])


def magnitudes(fmt):
    """Return every finite value that is not negative, ascending."""
    codes = np.arange(fmt.max_finite_code + 1, dtype=np.uint8 if fmt.bits == 8 else np.uint16)
    return arrays.array_from_codes(codes, fmt)


@NARROW
@ULPS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ulp_is_the_gap_to_the_next_value(find_ulp, fmt, sign):
    values = magnitudes(fmt)
    # E4M3 ends one value before a power of two, inside its last binade: the gap there is the one before it.
    gaps = np.append(np.diff(values), values[-1] - values[-2])
    assert (find_ulp(sign * values, fmt) == gaps).all()
    inside = values + gaps * (1 - 2.0**-30)
    assert (find_ulp(sign * inside, fmt) == gaps).all()


@ULPS
def test_ulp_at_the_ends(find_ulp):
    x = np.array([0.0, -0.0, 1e-300, BF16.min_subnormal, BF16.max_finite, 1e300, np.inf, -np.inf, np.nan])
    tiny, top = 2.0**-133, 2.0**120
    expected = [tiny, tiny, tiny, tiny, top, top, np.nan, np.nan, np.nan]
    np.testing.assert_array_equal(find_ulp(x, BF16), expected)


@ULPS
def test_ulp_beyond_the_ends_of_fp8(find_ulp):
    x = np.array([0.0, -1e-30, 2.0**-9, 448.0, 479.0, 1e300, np.inf])
    np.testing.assert_array_equal(find_ulp(x, E4M3), [2.0**-9] * 3 + [32.0] * 3 + [np.nan])
    np.testing.assert_array_equal(find_ulp(x, E5M2), [2.0**-16, 2.0**-16, 2.0**-11, 64.0, 64.0, 8192.0, np.nan])


@ULPS
def test_ulp_of_float64_is_the_spacing(find_ulp):
    x = np.array([0.0, 1.0, 1.5, 1e308, 5e-324, 2.2250738585072014e-308, 4.4501477170144028e-308, 1e-300])
    assert find_ulp(x, FP64).tolist() == [math.ulp(v) for v in x.tolist()]


@NARROW
def test_distance_is_one_step_between_neighbours(fmt):
    values = magnitudes(fmt)
    if fmt.has_infinity:
        values = np.append(values, np.inf)
    ascending = np.concatenate([-values[::-1], values[1:]])
    steps = ulp.distance_steps_array(ascending[:-1], ascending[1:], fmt)
    assert steps.dtype == np.int64
    assert (steps == 1).all()
    pairs = list(zip(ascending[:-1].tolist(), ascending[1:].tolist(), strict=True))
    assert all(ulp.distance_steps(a, b, fmt) == 1 for a, b in pairs[::5])
    assert ulp.distance_steps(ascending[0], ascending[-1], fmt) == len(pairs) == 2 * fmt.largest_code


def test_zeros_are_the_same_value():
    assert ulp.distance_steps(-0.0, 0.0, BF16) == 0
    assert ulp.ordered_int(0x8000, BF16) == ulp.ordered_int(0, BF16) == 0
    zeros = np.array([-0.0, 0.0])
    assert ulp.distance_steps_array(zeros, zeros[::-1], BF16).tolist() == [0, 0]


def test_distance_has_a_sign_and_counts_codes():
    assert ulp.distance_steps(-4.6875, -4.71875, BF16) == -1
    assert ulp.distance_steps(1.0, 2.0, BF16) == 128
    assert ulp.distance_steps(1.0, 2.0, FP32) == 1 << 23
    assert ulp.distance_steps(-1.0, 1.0, FP64) == 2 * 1023 << 52
    x = np.array([[1.0], [2.0]])
    assert ulp.distance_steps_array(x, np.array([2.0, 4.0]), BF16).tolist() == [[128, 256], [0, 128]]


def test_ordered_int_is_strictly_ascending_over_all_codes():
    codes = [*range(BF16.sign_mask + BF16.infinity_code, BF16.sign_mask, -1), *range(BF16.infinity_code + 1)]
    assert np.diff([ulp.ordered_int(c, BF16) for c in codes]).tolist() == [1] * (len(codes) - 1)


def test_refusals():
    with pytest.raises(InputError, match="0x7fc0 is a NaN of bf16; it has no place in the order"):
        ulp.ordered_int(0x7FC0, BF16)
    with pytest.raises(InputError, match="a code has 16 bits"):
        ulp.ordered_int(-1, BF16)
    with pytest.raises(InputError, match="0xff is a NaN of e4m3; it has no place in the order"):
        ulp.ordered_int(0xFF, E4M3)
    with pytest.raises(InputError, match="inf is not a e4m3 value"):
        ulp.distance_steps(1.0, math.inf, E4M3)
    with pytest.raises(InputError, match="is not a bf16 value"):
        ulp.distance_steps(1.001, 1.0, BF16)
    with pytest.raises(InputError, match="NaN"):
        ulp.distance_steps(math.nan, 1.0, BF16)
    with pytest.raises(InputError, match="NaN has no place in the order of bf16; mask such elements first"):
        ulp.distance_steps_array(np.array([np.nan]), np.zeros(1), BF16)
    with pytest.raises(InputError, match="use distance_steps for single values"):
        ulp.distance_steps_array(np.zeros(1), np.zeros(1), FP64)


def test_no_room_of_floats_needs_torch():
    import subprocess
    import sys

    code = (
        "import sys, bf16forensics.floats.scalar, bf16forensics.floats.arrays, bf16forensics.floats.ulp;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
