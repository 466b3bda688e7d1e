"""Operands as people write them: decimals, hexadecimal floats and bit patterns, read exactly. Plain Python."""

import re
from dataclasses import dataclass
from fractions import Fraction

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, E4M3, FORMATS, FP32, FP64, FloatFormat
from bf16forensics.floats.pattern import Pattern, power_of_two
from bf16forensics.floats.scalar import encode

#: Format of a pattern without a prefix, by its number of bits, where the source format has another width.
_BY_WIDTH = {8: E4M3, 16: BF16, 32: FP32, 64: FP64}
#: Longest operand in characters, and largest decimal or binary exponent: beyond both there is no format.
_LONGEST = 1200
_LARGEST_EXPONENT = 5000

_DECIMAL = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e([+-]?[0-9]+))?")
_HEX_FLOAT = re.compile(r"([+-]?)0x([0-9a-f]+(?:\.[0-9a-f]*)?|\.[0-9a-f]+)(?:p([+-]?[0-9]+))?")
_HEX_CODE = re.compile(r"0x([0-9a-f][0-9a-f_]*)")
_BINARY_CODE = re.compile(r"0b([01][01_]*)")
_BARE_BINARY = re.compile(r"[01][01_]*")
_WORD = re.compile(r"([+-]?)(inf|infinity|nan)")
_PREFIXED = re.compile(r"([a-z0-9]+):(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One operand of `bits`: what was written, what it means, how it was read."""

    #: As written.
    text: str
    #: The value that takes part in the sum.
    pattern: Pattern
    #: How the text was read, as a phrase ("16 binary digits: the bits of a bf16 value").
    reading: str
    #: The value as written, exact; None for infinity and NaN.
    written: Fraction | None
    #: The format does not hold the value as written, so that it was rounded to it (to nearest, ties to even).
    is_rounded: bool


def read_operand(text: str, source: FloatFormat = FP32) -> Operand:
    """Read one operand.

    Decimals, hexadecimal floats ("0x1.8p+1"), "inf" and "nan" become values of `source`, rounded to nearest, ties to
    even, where it does not hold them. Bit patterns stay values of their own format, whatever `source` is: "0x" and 2,
    4, 8 or 16 digits, "0b" and 8, 16, 32 or 64 digits, or as many bare 0s and 1s; "_" may separate digits. A pattern
    is one of `source` if it has that width, else of e4m3, bf16, fp32 or fp64 by its width; "fp16:" and the like before
    it name another. A bare string of 0s and 1s of such a length is a pattern, never a decimal; with a sign, a point or
    an exponent it is a decimal.

    Args:
        text: The operand, upper or lower case; a typeset minus sign (U+2212) counts as a hyphen.
        source: Format of numbers that are not given as bits.

    Raises:
        InputError: not one of these forms, a pattern of another width, an infinity that `source` does not have, or an
            exponent beyond every format.
    """
    given = text.strip()
    # The minus sign of typeset text, which looks like a hyphen in most fonts.
    lower = given.lower().replace("\N{MINUS SIGN}", "-")
    if not lower or len(lower) > _LONGEST:
        raise InputError(f"an operand has 1 to {_LONGEST} characters, got {len(lower)}; {_FORMS}")
    if match := _PREFIXED.fullmatch(lower):
        return _prefixed(given, match[1], match[2])
    if match := _WORD.fullmatch(lower):
        return _word(given, match[1] == "-", match[2], source)
    if match := _HEX_CODE.fullmatch(lower):
        digits = match[1].replace("_", "")
        return _from_digits(given, digits, 4, _format_of_width(4 * len(digits), source, given))
    if match := _BINARY_CODE.fullmatch(lower):
        digits = match[1].replace("_", "")
        return _from_digits(given, digits, 1, _format_of_width(len(digits), source, given))
    if _BARE_BINARY.fullmatch(lower):
        digits = lower.replace("_", "")
        if len(digits) in _BY_WIDTH:
            return _from_digits(given, digits, 1, _format_of_width(len(digits), source, given))
    if match := _DECIMAL.fullmatch(lower):
        value = _positional(match[2], match[3], 10, 10, given)
        return _from_value(given, value, match[1] == "-", "a decimal", source)
    if match := _HEX_FLOAT.fullmatch(lower):
        if "." not in match[2] and match[3] is None:
            raise InputError(
                f"operand {_shown(given)} has a sign and a bit pattern; the pattern holds the sign in its first bit"
            )
        value = _positional(match[2], match[3], 16, 2, given)
        return _from_value(given, value, match[1] == "-", "a hexadecimal float", source)
    raise InputError(f"operand {_shown(given)} is not a number; {_FORMS}")


_FORMS = "write a decimal, a hex float (0x1.8p+1), bits in hex (0xC01A) or binary, inf or nan"


def _prefixed(text: str, name: str, rest: str) -> Operand:
    fmt = next((fmt for fmt in FORMATS if fmt.name == name), None)
    if fmt is None:
        known = ", ".join(f"{fmt.name}:" for fmt in FORMATS)
        raise InputError(f"operand {_shown(text)} has an unknown prefix {name!r}; use one of {known}")
    digits = rest.replace("_", "")
    has_hex = digits.startswith("0x")
    has_binary = digits.startswith("0b") and len(digits) - 2 == fmt.bits
    bare = digits[2:] if has_hex or has_binary else digits
    if len(bare) == fmt.bits and not has_hex and re.fullmatch(r"[01]+", bare):
        return _from_digits(text, bare, 1, fmt)
    if len(bare) == fmt.bits // 4 and not has_binary and re.fullmatch(r"[0-9a-f]+", bare):
        return _from_digits(text, bare, 4, fmt)
    raise InputError(
        f"operand {_shown(text)} is no {fmt.name} pattern; write {fmt.bits // 4} hex or {fmt.bits} binary digits after "
        f"{fmt.name}:"
    )


def _format_of_width(width: int, source: FloatFormat, text: str) -> FloatFormat:
    if width not in _BY_WIDTH:
        raise InputError(
            f"operand {_shown(text)} has {width} bits; a pattern has 8, 16, 32 or 64 (2, 4, 8 or 16 hex digits)"
        )
    return source if source.bits == width else _BY_WIDTH[width]


def _from_digits(text: str, digits: str, bits_each: int, fmt: FloatFormat) -> Operand:
    pattern = Pattern(fmt=fmt, code=int(digits, 2 if bits_each == 1 else 16))
    kind = "binary" if bits_each == 1 else "hex"
    # Such a number may have been meant as a decimal, the more the shorter it is.
    could_be_decimal = text == digits and bits_each == 1 and len(digits) <= 16
    decimal = f" (not the decimal; that is {digits}.0)" if could_be_decimal else ""
    return Operand(
        text=text,
        pattern=pattern,
        reading=f"{len(digits)} {kind} digits: the bits of a value of {fmt.name}{decimal}",
        written=pattern.value,
        is_rounded=False,
    )


def _word(text: str, is_negative: bool, word: str, source: FloatFormat) -> Operand:
    if word == "nan":
        code, reading = source.quiet_nan_code, f"the quiet NaN of {source.name}"
    else:
        code, reading = source.infinity_code, f"the infinity of {source.name}"
    pattern = Pattern(fmt=source, code=code | (source.sign_mask if is_negative else 0))
    return Operand(text=text, pattern=pattern, reading=reading, written=None, is_rounded=False)


def _from_value(text: str, magnitude: Fraction, is_negative: bool, kind: str, source: FloatFormat) -> Operand:
    value = -magnitude if is_negative else magnitude
    # A float carries the sign of a zero, which a fraction has not.
    code = encode(value if value else (-0.0 if is_negative else 0.0), source)
    pattern = Pattern(fmt=source, code=code)
    is_rounded = pattern.value != value
    reading = f"{kind}, rounded to {source.name}" if is_rounded else f"{kind}, held by {source.name}"
    return Operand(text=text, pattern=pattern, reading=reading, written=value, is_rounded=is_rounded)


def _positional(digits: str, exponent: str | None, base: int, exponent_base: int, text: str) -> Fraction:
    whole, _, fraction = digits.partition(".")
    power = 0
    if exponent is not None:
        # The length first: the integer itself may be too long to read.
        power = int(exponent) if len(exponent.lstrip("+-").lstrip("0")) <= 6 else _LARGEST_EXPONENT + 1
    if abs(power) > _LARGEST_EXPONENT:
        raise InputError(
            f"operand {_shown(text)} has an exponent beyond {_LARGEST_EXPONENT}; no format reaches that far"
        )
    mantissa = Fraction(int((whole + fraction) or "0", base), base ** len(fraction))
    if exponent_base == 2:
        return mantissa * power_of_two(power)
    return mantissa * (Fraction(10**power) if power >= 0 else Fraction(1, 10**-power))


def _shown(text: str) -> str:
    """The operand for a message, cut where it is longer than any that could be meant."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
