"""The specification of rounding: one value at a time, in exact integers, written to be read.

`arrays` and the torch twin do the same for whole tensors and are tested against this module.
"""

import math
from fractions import Fraction

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import FloatFormat

#: To nearest, ties to even; toward zero (truncation); to nearest, ties away from zero; up or down at random.
MODES = ("rne", "rz", "rna", "stochastic")


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
    magnitude = code & ~fmt.sign_mask
    if magnitude > fmt.largest_code:
        return math.nan
    if magnitude > fmt.max_finite_code:
        return sign * math.inf
    field, fraction = divmod(magnitude, 1 << fmt.fraction_bits)
    if field == 0:
        return sign * fraction * _power_of_two(fmt.step_exponent_min)
    significand = (1 << fmt.fraction_bits) + fraction
    return sign * significand * _power_of_two(field - fmt.bias - fmt.fraction_bits)


def encode(
    value: Fraction | float,
    fmt: FloatFormat,
    mode: str = "rne",
    *,
    overflow: str | None = None,
    random: Fraction | None = None,
) -> int:
    """Round an exact value to a format, in one rounding, and return the code.

    NaN gives the format's positive quiet NaN, never an infinity; a float -0.0 keeps its sign, and so does a negative
    value that rounds to zero. Subnormals are kept.

    Values between the largest finite one and the next step, were there one, round as anywhere else; whatever comes out
    at or beyond that step overflows. In "rz" no finite value does. What overflows, and infinity in every mode, becomes
    what `overflow` says: in "nonfinite" infinity, or the quiet NaN in a format without one; in "saturate" the largest
    finite value. So a tie at the end of the range (464 in E4M3) goes where its mode sends ties.

    In "stochastic" a value goes away from zero exactly if `random` is below its distance from the value next to zero,
    in steps: with a uniform `random` the expectation is the value itself, and a value that the format holds stays.
    `fraction_from_bits` makes a random number of k bits.

    Args:
        value: An int, a float or a Fraction.
        fmt: The format.
        mode: "rne", "rz", "rna" or "stochastic".
        overflow: "nonfinite" or "saturate"; None for the format's own, which saturates FP8 alone.
        random: Number in [0, 1) for "stochastic", and for no other mode.

    Raises:
        InputError: unknown mode or overflow, or a random number that is missing, out of range or not asked for.

    Reference: IEEE 754-2019, sections 4.3 and 7.4.
    """
    _check_mode(mode, random)
    beyond = fmt.value_beyond(overflow)
    if isinstance(value, float):
        if math.isnan(value):
            return fmt.quiet_nan_code
        sign_bit = fmt.sign_mask if math.copysign(1.0, value) < 0 else 0
        if math.isinf(value):
            return _code_beyond(fmt, beyond, sign_bit)
    else:
        sign_bit = fmt.sign_mask if value < 0 else 0
    magnitude = abs(Fraction(value))
    step_exponent = _step_exponent(magnitude, fmt)
    num_steps = _to_integer(*_in_units(magnitude, step_exponent), mode, random)
    # Codes of one sign are consecutive integers over consecutive values, so a carry out of the fraction moves into
    # the exponent field by itself, and out of the largest value into the code beyond it.
    binade = step_exponent - fmt.step_exponent_min
    code = (binade << fmt.fraction_bits) + num_steps
    if code <= fmt.max_finite_code:
        return sign_bit | code
    return sign_bit | fmt.max_finite_code if mode == "rz" else _code_beyond(fmt, beyond, sign_bit)


def round_to(
    value: Fraction | float,
    fmt: FloatFormat,
    mode: str = "rne",
    *,
    overflow: str | None = None,
    random: Fraction | None = None,
) -> float:
    """Round an exact value to a format, in one rounding, and return the rounded value. See `encode`."""
    return float_from_code(encode(value, fmt, mode, overflow=overflow, random=random), fmt)


def fraction_from_bits(bits: int, num_bits: int) -> Fraction:
    """Return bits / 2**num_bits, the random number in [0, 1) that an integer of `num_bits` random bits stands for.

    Over all 2**num_bits integers stochastic rounding is exactly unbiased for values whose distance, in steps, is a
    multiple of 2**-num_bits; others come out too far from zero, on average by less than 2**-num_bits steps.

    Raises:
        InputError: the integer has more bits, or is negative.
    """
    if num_bits < 0 or not 0 <= bits < 1 << num_bits:
        raise InputError(f"{bits} is not an integer of {num_bits} random bits; it lies outside [0, 2**{num_bits})")
    return Fraction(bits, 1 << num_bits)


def float_from_code(code: int, fmt: FloatFormat) -> float:
    """Return the value of a code as a Python float, which holds every value of every format, -0.0 included."""
    value = float(decode(code, fmt))
    return -0.0 if code == fmt.sign_mask else value


def code_from_float(value: float, fmt: FloatFormat) -> int:
    """Return the code of a float that the format can hold.

    Raises:
        InputError: the format cannot hold the value; NaN of any payload it can.
    """
    code = encode(float(value), fmt, overflow="nonfinite")
    if not math.isnan(value) and float_from_code(code, fmt) != value:
        raise InputError(f"{value!r} is not a {fmt.name} value; round it first")
    return code


def _check_mode(mode: str, random: Fraction | None) -> None:
    if mode not in MODES:
        raise InputError(f"unknown rounding mode {mode!r}; use one of {', '.join(MODES)}")
    if mode != "stochastic":
        if random is not None:
            raise InputError(f"rounding mode {mode!r} takes no random number; use 'stochastic'")
    elif random is None or not 0 <= random < 1:
        raise InputError(f"stochastic rounding takes a random number in [0, 1), got {random}")


def _check_code(code: int, fmt: FloatFormat) -> None:
    if not 0 <= code < 1 << fmt.bits:
        raise InputError(f"{code:#x} is not a {fmt.name} code; a code has {fmt.bits} bits")


def _step_exponent(magnitude: Fraction, fmt: FloatFormat) -> int:
    """Return e where 2**e is the spacing of the binade of `magnitude`, as if exponents had no upper end."""
    if magnitude == 0:
        return fmt.step_exponent_min
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    numerator, denominator = _in_units(magnitude, exponent)
    if numerator < denominator:
        exponent -= 1
    return max(exponent, fmt.exponent_min) - fmt.fraction_bits


def _to_integer(numerator: int, denominator: int, mode: str, random: Fraction | None) -> int:
    whole, rest = divmod(numerator, denominator)
    if mode == "rz":
        return whole
    if random is not None:
        return whole + (random * denominator < rest)
    twice = 2 * rest - denominator
    is_tie_up = mode == "rna" or whole % 2 == 1
    return whole + (twice > 0 or (twice == 0 and is_tie_up))


def _code_beyond(fmt: FloatFormat, beyond: float, sign_bit: int) -> int:
    if math.isnan(beyond):
        return fmt.quiet_nan_code
    return sign_bit | (fmt.infinity_code if math.isinf(beyond) else fmt.max_finite_code)


def _in_units(magnitude: Fraction, exponent: int) -> tuple[int, int]:
    """Return numerator and denominator of magnitude / 2**exponent, not reduced."""
    if exponent >= 0:
        return magnitude.numerator, magnitude.denominator << exponent
    return magnitude.numerator << -exponent, magnitude.denominator


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)
