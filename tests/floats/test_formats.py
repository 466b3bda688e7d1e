"""The format table against the constants that NumPy and ml_dtypes publish."""

import ml_dtypes
import numpy as np
import pytest

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, FORMATS, FP16, FP32, FP64, format_named

ORACLES = [
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
    assert (FP32.sign_mask, FP32.infinity_code, FP32.quiet_nan_code) == (0x80000000, 0x7F800000, 0x7FC00000)


def test_formats_are_found_by_name():
    assert [format_named(fmt.name) for fmt in FORMATS] == list(FORMATS)


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="unknown float format 'bfloat16'; use one of bf16, fp16, fp32, fp64"):
        format_named("bfloat16")
