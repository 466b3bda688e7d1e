"""The specification of rounding: one value at a time, in exact integers, written to be read.

`arrays` and the torch twin do the same for whole tensors and are tested against this module.
"""

import math
from fractions import Fraction

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import FloatFormat

#: Round to nearest, ties to even; round toward zero (truncation).
MODES = ("rne", "rz")


def decode(code: int, fmt: FloatFormat) -> Fraction | float:
    """Return the value of a code.

    Finite codes give the exact value; both zeros give Fraction(0), so read the sign of a zero from the code. Infinity
    and NaN give the Python float of that name.

    Args:
        code: Integer in [0, 2**fmt.bits).
        fmt: The format.

    Raises:
        InputError: the code does not fit the format.
    """
    _check_code(code, fmt)
    sign = -1 if code & fmt.sign_mask else 1
    field = (code & ~fmt.sign_mask) >> fmt.fraction_bits
    fraction = code & ((1 << fmt.fraction_bits) - 1)
    if field == (1 << fmt.exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    if field == 0:
        return sign * fraction * _power_of_two(fmt.step_exponent_min)
    significand = (1 << fmt.fraction_bits) + fraction
    return sign * significand * _power_of_two(field - fmt.bias - fmt.fraction_bits)


def encode(value: Fraction | float, fmt: FloatFormat, mode: str = "rne") -> int:
    """Round an exact value to a format, in one rounding, and return the code.

    NaN gives the format's positive quiet NaN, never an infinity; infinities stay; a float -0.0 keeps its sign, and so
    does a negative value that rounds to zero. Subnormals are kept. A value beyond the largest finite one becomes
    infinity in "rne" (from the midpoint to the next power of two on) and the largest finite one in "rz".

    Args:
        value: An int, a float or a Fraction.
        fmt: The format.
        mode: "rne" or "rz".

    Raises:
        InputError: unknown mode.

    Reference: IEEE 754-2019, sections 4.3 and 7.4.
    """
    if mode not in MODES:
        raise InputError(f"unknown rounding mode {mode!r}; use one of {', '.join(MODES)}")
    if isinstance(value, float):
        if math.isnan(value):
            return fmt.quiet_nan_code
        sign_bit = fmt.sign_mask if math.copysign(1.0, value) < 0 else 0
        if math.isinf(value):
            return sign_bit | fmt.infinity_code
    else:
        sign_bit = fmt.sign_mask if value < 0 else 0
    magnitude = abs(Fraction(value))
    step_exponent = _step_exponent(magnitude, fmt)
    num_steps = _to_integer(magnitude / _power_of_two(step_exponent), mode)
    # Codes of one sign are consecutive integers over consecutive values, so a carry out of the fraction moves into
    # the exponent field by itself, and out of the largest binade into infinity.
    binade = step_exponent - fmt.step_exponent_min
    code = (binade << fmt.fraction_bits) + num_steps
    largest = fmt.infinity_code if mode == "rne" else fmt.infinity_code - 1
    return sign_bit | min(code, largest)


def round_to(value: Fraction | float, fmt: FloatFormat, mode: str = "rne") -> float:
    """Round an exact value to a format, in one rounding, and return the rounded value. See `encode`."""
    return float_from_code(encode(value, fmt, mode), fmt)


def float_from_code(code: int, fmt: FloatFormat) -> float:
    """Return the value of a code as a Python float, which holds every value of every format, -0.0 included."""
    value = float(decode(code, fmt))
    return -0.0 if code == fmt.sign_mask else value


def code_from_float(value: float, fmt: FloatFormat) -> int:
    """Return the code of a float that the format can hold.

    Raises:
        InputError: the format cannot hold the value; NaN of any payload it can.
    """
    code = encode(float(value), fmt)
    if not math.isnan(value) and float_from_code(code, fmt) != value:
        raise InputError(f"{value!r} is not a {fmt.name} value; round it first")
    return code


def _check_code(code: int, fmt: FloatFormat) -> None:
    if not 0 <= code < 1 << fmt.bits:
        raise InputError(f"{code:#x} is not a {fmt.name} code; a code has {fmt.bits} bits")


def _step_exponent(magnitude: Fraction, fmt: FloatFormat) -> int:
    """Return e where 2**e is the spacing of the binade of `magnitude`, as if exponents had no upper end."""
    if magnitude == 0:
        return fmt.step_exponent_min
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if _power_of_two(exponent) > magnitude:
        exponent -= 1
    return max(exponent, fmt.exponent_min) - fmt.fraction_bits


def _to_integer(value: Fraction, mode: str) -> int:
    whole, rest = divmod(value.numerator, value.denominator)
    if mode == "rz":
        return whole
    twice = 2 * rest - value.denominator
    is_up = twice > 0 or (twice == 0 and whole % 2 == 1)
    return whole + is_up


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)
