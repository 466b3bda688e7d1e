"""Exact numbers and lines of cells as plain ASCII text, for the explanations of `bits`."""

from collections.abc import Sequence
from fractions import Fraction

from bf16forensics.floats.pattern import Pattern, leading_exponent, power_of_two

#: Columns of the labels at the left of a panel.
LABEL = 16


def exact_text(number: Fraction, *, is_signed: bool = False) -> str:
    """A number as the shortest decimal that reads back as its double; "~" before it says that the double is not exact.

    What no double comes near is written as a hexadecimal float, which is exact.

    Args:
        number: Any fraction.
        is_signed: Write "+" before what is above zero.
    """
    try:
        nearest = float(number)
    except OverflowError:
        return hex_text(number)
    if number and not nearest:
        return hex_text(number)
    sign = "+" if is_signed and number > 0 else ""
    return f"{'' if Fraction(nearest) == number else '~'}{sign}{float_text(nearest)}"


def float_text(number: float) -> str:
    """A float as `repr`, whole numbers without ".0"."""
    return repr(number).removesuffix(".0")


def value_text(pattern: Pattern) -> str:
    """The value of a pattern, which a double holds."""
    return float_text(pattern.number)


def hex_text(number: Fraction) -> str:
    """A binary fraction as an exact hexadecimal float with a significand in [1, 2), of any length."""
    if not number:
        return "0x0p+0"
    exponent = leading_exponent(abs(number))
    rest = abs(number) / power_of_two(exponent) - 1
    # Whole hex digits: the fraction is moved left until its last bit ends one.
    width = -(-(rest.denominator.bit_length() - 1) // 4)
    digits = f".{int(rest * 16**width):0{width}x}" if width else ""
    return f"{'-' if number < 0 else ''}0x1{digits}p{exponent:+d}"


def ulp_text(number: Fraction, *, is_signed: bool = False) -> str:
    """A number of ulps with six digits; "~" before what only looks like half an ulp or a whole one."""
    text = f"{float(number):+.6g}" if is_signed and number else f"{float(number):.6g}"
    is_near_half = (2 * Fraction(text)).denominator == 1 and Fraction(text) != number
    return f"~{text}" if is_near_half else text


def label_of(index: int, labels: Sequence[str] = ()) -> str:
    """Short name of a term: the given one; without names a, b, ... for the first 26, then the 0-based position."""
    if labels:
        return labels[index]
    return chr(ord("a") + index) if index < 26 else str(index)


def power_text(exponent: int) -> str:
    """A power of two with its value where that is short: "2^-5 = 0.03125"."""
    value = exact_text(power_of_two(exponent))
    return f"2^{exponent} = {value}" if len(value) <= 12 and not value.startswith("~") else f"2^{exponent}"


def fields_text(pattern: Pattern) -> str:
    """Sign, exponent and fraction, parted by blanks."""
    return " ".join(pattern.fields)


def item(label: str, cells: Sequence[str], width: int, *, indent: int = 2, start: int = LABEL) -> list[str]:
    """A label and its cells, wrapped between cells, cells between their words, and words where nothing else helps.

    Args:
        label: What the cells are.
        cells: Parts that stay on one line where they fit.
        width: Columns.
        indent: Blanks before the label.
        start: Column of the cells; further right where the label needs it.
    """
    head = f"{'':{indent}}{label}"
    start = max(start, len(head) + 1)
    room = width - start
    lines: list[str] = []
    current = ""
    for cell in cells:
        for part in [cell] if len(cell) <= room else _words(cell, room):
            gap = "  " if part is cell else " "
            if current and len(current) + len(gap) + len(part) > room:
                lines.append(current)
                current = part
            else:
                current = f"{current}{gap}{part}" if current else part
    lines.append(current)
    heads = [f"{head:<{start}}", *[" " * start] * (len(lines) - 1)]
    return [f"{before}{line}".rstrip() for before, line in zip(heads, lines, strict=True)]


def _words(text: str, room: int) -> list[str]:
    return [word[i : i + room] for word in text.split() for i in range(0, len(word), room)]
