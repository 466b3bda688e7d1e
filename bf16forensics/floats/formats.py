"""The storage formats, as data.

Every format has a sign, a biased exponent and a fraction; exponent field 0 holds zero and the subnormals. In all but
one the all-ones field holds infinity (fraction 0) and NaN (any other fraction), as in IEEE 754. E4M3 has no infinity:
its all-ones field is one more binade, and only the last code of it is NaN.

Reference: IEEE 754-2019; OCP 8-bit Floating Point Specification (OFP8) 1.0 for E4M3 and E5M2.
"""

import math
from dataclasses import dataclass

from bf16forensics.errors import InputError

#: What a value beyond the largest finite one becomes. "nonfinite": infinity, or NaN in a format without infinity;
#: "saturate": the largest finite value, infinities included.
OVERFLOWS = ("nonfinite", "saturate")


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """One binary format. Every property is exact: each value is a binary64 number."""

    #: Name as recipes and reports write it ("bf16").
    name: str
    #: Bits of a code, sign included.
    bits: int
    #: Bits of the biased exponent field.
    exponent_bits: int
    #: Bits of the fraction field; the significand of a normal number has one more.
    fraction_bits: int
    #: Exponent of a normal number is its field minus this.
    bias: int
    #: True: the all-ones exponent field holds infinity and NaN. False: it holds numbers, but for its last code, NaN.
    has_infinity: bool = True
    #: One of `OVERFLOWS`: what a conversion does unless told otherwise.
    overflow: str = "nonfinite"

    @property
    def exponent_mask(self) -> int:
        """Code with all bits of the exponent field set, and no other."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def exponent_max(self) -> int:
        """Exponent of the largest binade: numbers in it are 2**exponent_max <= |x| < 2**(exponent_max + 1)."""
        return (self.max_finite_code >> self.fraction_bits) - self.bias

    @property
    def exponent_min(self) -> int:
        """Exponent of the smallest normal binade."""
        return 1 - self.bias

    @property
    def step_exponent_min(self) -> int:
        """Exponent of the smallest step, which is also the smallest subnormal: 2**step_exponent_min."""
        return self.exponent_min - self.fraction_bits

    @property
    def max_finite(self) -> float:
        """Largest finite value."""
        one = 1 << self.fraction_bits
        return math.ldexp(one + self.max_finite_code % one, self.exponent_max - self.fraction_bits)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        return 2.0**self.exponent_min

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, and the step between subnormals."""
        return 2.0**self.step_exponent_min

    @property
    def sign_mask(self) -> int:
        """Code with only the sign bit set: the code of -0."""
        return 1 << (self.bits - 1)

    @property
    def max_finite_code(self) -> int:
        """Code of the largest finite value."""
        if self.has_infinity:
            return self.exponent_mask - 1
        return self.sign_mask - 2

    @property
    def largest_code(self) -> int:
        """Code of the largest value, infinity or finite; a larger code below the sign bit is a NaN."""
        return self.max_finite_code + self.has_infinity

    @property
    def infinity_code(self) -> int:
        """Code of +infinity.

        Raises:
            InputError: the format has no infinity.
        """
        if not self.has_infinity:
            raise InputError(f"{self.name} has no infinity; its largest value is {self.max_finite:g}")
        return self.exponent_mask

    @property
    def quiet_nan_code(self) -> int:
        """Code of the positive quiet NaN with an empty payload, or of the only positive NaN."""
        if not self.has_infinity:
            return self.sign_mask - 1
        return self.exponent_mask | 1 << (self.fraction_bits - 1)

    def value_beyond(self, overflow: str | None = None) -> float:
        """Return what a positive value beyond the range becomes: infinity, NaN or the largest finite value.

        Args:
            overflow: One of `OVERFLOWS`; None for the format's own.

        Raises:
            InputError: unknown overflow.
        """
        chosen = self.overflow if overflow is None else overflow
        if chosen not in OVERFLOWS:
            raise InputError(f"unknown overflow {chosen!r}; use one of {', '.join(OVERFLOWS)}")
        if chosen == "saturate":
            return self.max_finite
        return math.inf if self.has_infinity else math.nan


# The conversions to FP8 that kernels use saturate (PTX cvt.rn.satfinite.e4m3x2 and .e5m2x2, which have no other form).
# Casts of ml_dtypes give NaN and infinity; torch's give infinity for E5M2, and for E4M3 NaN before 2.12, 448 since.
E4M3 = FloatFormat(
    name="e4m3", bits=8, exponent_bits=4, fraction_bits=3, bias=7, has_infinity=False, overflow="saturate"
)
E5M2 = FloatFormat(name="e5m2", bits=8, exponent_bits=5, fraction_bits=2, bias=15, overflow="saturate")
BF16 = FloatFormat(name="bf16", bits=16, exponent_bits=8, fraction_bits=7, bias=127)
FP16 = FloatFormat(name="fp16", bits=16, exponent_bits=5, fraction_bits=10, bias=15)
FP32 = FloatFormat(name="fp32", bits=32, exponent_bits=8, fraction_bits=23, bias=127)
FP64 = FloatFormat(name="fp64", bits=64, exponent_bits=11, fraction_bits=52, bias=1023)

#: Every format, narrowest first.
FORMATS = (E4M3, E5M2, BF16, FP16, FP32, FP64)

_BY_NAME = {fmt.name: fmt for fmt in FORMATS}


def format_named(name: str) -> FloatFormat:
    """Return the format that `name` ("e4m3", "e5m2", "bf16", "fp16", "fp32" or "fp64") stands for.

    Raises:
        InputError: no format has this name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(_BY_NAME)
        raise InputError(f"unknown float format {name!r}; use one of {known}") from None
