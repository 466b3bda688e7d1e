"""The format table against the constants that NumPy and ml_dtypes publish."""

import math

import ml_dtypes
import numpy as np
import pytest

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, format_named

ORACLES = [
    (E4M3, ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)),
    (E5M2, ml_dtypes.finfo(ml_dtypes.float8_e5m2)),
    (BF16, ml_dtypes.finfo(ml_dtypes.bfloat16)),
    (FP16, np.finfo(np.float16)),
    (FP32, np.finfo(np.float32)),
    (FP64, np.finfo(np.float64)),
]


@pytest.mark.parametrize(("fmt", "oracle"), ORACLES, ids=lambda x: getattr(x, "name", ""))
def test_limits_agree_with_the_published_ones(fmt, oracle):
    assert fmt.max_finite == float(oracle.max)
    assert fmt.min_normal == float(oracle.smallest_normal)
    assert fmt.min_subnormal == float(oracle.smallest_subnormal)
    assert fmt.fraction_bits == oracle.nmant
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.fraction_bits
    assert fmt.bias == (1 << (fmt.exponent_bits - 1)) - 1


def test_codes_of_specials():
    assert (BF16.sign_mask, BF16.infinity_code, BF16.quiet_nan_code) == (0x8000, 0x7F80, 0x7FC0)
    assert (FP16.sign_mask, FP16.infinity_code, FP16.quiet_nan_code) == (0x8000, 0x7C00, 0x7E00)
    assert (E5M2.sign_mask, E5M2.infinity_code, E5M2.quiet_nan_code) == (0x80, 0x7C, 0x7E)
    assert (FP32.sign_mask, FP32.infinity_code, FP32.quiet_nan_code) == (0x80000000, 0x7F800000, 0x7FC00000)


def test_e4m3_has_no_infinity_and_one_nan_of_each_sign():
    assert (E4M3.sign_mask, E4M3.max_finite_code, E4M3.largest_code, E4M3.quiet_nan_code) == (0x80, 0x7E, 0x7E, 0x7F)
    with pytest.raises(InputError, match="e4m3 has no infinity; its largest value is 448"):
        _ = E4M3.infinity_code


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt is not E4M3], ids=lambda f: f.name)
def test_infinity_follows_the_largest_finite_value(fmt):
    assert fmt.largest_code == fmt.infinity_code == fmt.max_finite_code + 1 == fmt.exponent_mask


def test_only_the_fp8_formats_saturate_by_themselves():
    """PTX converts to FP8 in no other way; for the wider formats it has both, and IEEE 754 asks for infinity."""
    assert {fmt.name: fmt.value_beyond() for fmt in FORMATS} == {
        "e4m3": 448.0,
        "e5m2": 57344.0,
        **dict.fromkeys(("bf16", "fp16", "fp32", "fp64"), math.inf),
    }
    assert all(fmt.value_beyond("saturate") == fmt.max_finite for fmt in FORMATS)
    assert math.isnan(E4M3.value_beyond("nonfinite"))
    assert E5M2.value_beyond("nonfinite") == math.inf
    with pytest.raises(InputError, match="unknown overflow 'clip'; use one of nonfinite, saturate"):
        E4M3.value_beyond("clip")


def test_formats_are_found_by_name():
    assert [format_named(fmt.name) for fmt in FORMATS] == list(FORMATS)


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        InputError, match="unknown float format 'bfloat16'; use one of e4m3, e5m2, bf16, fp16, fp32, fp64"
    ):
        format_named("bfloat16")
