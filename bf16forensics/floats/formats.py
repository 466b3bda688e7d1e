"""The storage formats, as data.

All four are IEEE 754 binary formats: sign, biased exponent, fraction; exponent field 0 holds zero and the subnormals,
the all-ones field holds infinity (fraction 0) and NaN (any other fraction).
"""

from dataclasses import dataclass

from bf16forensics.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """One IEEE 754 binary format. Every property is exact: each value is a binary64 number."""

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

    @property
    def exponent_max(self) -> int:
        """Exponent of the largest binade: numbers in it are 2**exponent_max <= |x| < 2**(exponent_max + 1)."""
        return (1 << self.exponent_bits) - 2 - self.bias

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
        return (2.0 - 2.0**-self.fraction_bits) * 2.0**self.exponent_max

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
    def infinity_code(self) -> int:
        """Code of +infinity; a larger code below the sign bit is a NaN."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def quiet_nan_code(self) -> int:
        """Code of the positive quiet NaN with an empty payload."""
        return self.infinity_code | 1 << (self.fraction_bits - 1)


BF16 = FloatFormat(name="bf16", bits=16, exponent_bits=8, fraction_bits=7, bias=127)
FP16 = FloatFormat(name="fp16", bits=16, exponent_bits=5, fraction_bits=10, bias=15)
FP32 = FloatFormat(name="fp32", bits=32, exponent_bits=8, fraction_bits=23, bias=127)
FP64 = FloatFormat(name="fp64", bits=64, exponent_bits=11, fraction_bits=52, bias=1023)

#: Every format, narrowest first.
FORMATS = (BF16, FP16, FP32, FP64)

_BY_NAME = {fmt.name: fmt for fmt in FORMATS}


def format_named(name: str) -> FloatFormat:
    """Return the format that `name` ("bf16", "fp16", "fp32" or "fp64") stands for.

    Raises:
        InputError: no format has this name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(_BY_NAME)
        raise InputError(f"unknown float format {name!r}; use one of {known}") from None
