"""A code together with its format: what the explanations of sums and roundings are made of. Plain Python."""

from dataclasses import dataclass
from fractions import Fraction

from bf16forensics.floats.formats import FloatFormat
from bf16forensics.floats.scalar import decode, float_from_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One value of one format, as its bits."""

    fmt: FloatFormat
    #: Integer in [0, 2**fmt.bits).
    code: int

    @property
    def number(self) -> float:
        """The value; every value of every format is a Python float, -0.0, infinity and NaN included."""
        return float_from_code(self.code, self.fmt)

    @property
    def value(self) -> Fraction | None:
        """The exact value, 0 for both zeros; None for infinity and NaN."""
        decoded = decode(self.code, self.fmt)
        return decoded if isinstance(decoded, Fraction) else None

    @property
    def is_finite(self) -> bool:
        """Neither infinity nor NaN."""
        return self.code & ~self.fmt.sign_mask <= self.fmt.max_finite_code

    @property
    def is_nan(self) -> bool:
        """One of the format's NaNs."""
        return self.code & ~self.fmt.sign_mask > self.fmt.largest_code

    @property
    def is_zero(self) -> bool:
        """+0 or -0."""
        return self.code & ~self.fmt.sign_mask == 0

    @property
    def sign(self) -> int:
        """The sign bit, 0 or 1."""
        return self.code >> (self.fmt.bits - 1)

    @property
    def exponent_field(self) -> int:
        """The biased exponent as stored."""
        return (self.code & self.fmt.exponent_mask) >> self.fmt.fraction_bits

    @property
    def fraction_field(self) -> int:
        """The fraction as stored."""
        return self.code & ((1 << self.fmt.fraction_bits) - 1)

    @property
    def exponent(self) -> int:
        """Exponent of the binade; of zero and subnormals that of the smallest normal binade. Finite values only."""
        return max(self.exponent_field, 1) - self.fmt.bias

    @property
    def significand(self) -> int:
        """Significand in steps of the binade, hidden bit included: |value| = significand * 2**step_exponent."""
        hidden = 1 << self.fmt.fraction_bits if self.exponent_field else 0
        return hidden | self.fraction_field

    @property
    def step_exponent(self) -> int:
        """Exponent of the last bit of the significand."""
        return self.exponent - self.fmt.fraction_bits

    @property
    def hex(self) -> str:
        """The code as "0xC01A", with all digits of the format."""
        return f"0x{self.code:0{self.fmt.bits // 4}X}"

    @property
    def binary(self) -> str:
        """All bits of the code without separators."""
        return f"{self.code:0{self.fmt.bits}b}"

    @property
    def fields(self) -> tuple[str, str, str]:
        """Sign, exponent and fraction as binary digits."""
        bits = self.binary
        return bits[0], bits[1 : 1 + self.fmt.exponent_bits], bits[1 + self.fmt.exponent_bits :]


def leading_exponent(magnitude: Fraction) -> int:
    """Return e where 2**e <= magnitude < 2**(e + 1), for a magnitude above 0."""
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if magnitude >= power_of_two(exponent) else exponent - 1


def power_of_two(exponent: int) -> Fraction:
    """Return 2**exponent exactly."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)
