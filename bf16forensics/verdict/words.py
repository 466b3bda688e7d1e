"""Numbers and names as the project prints them, ASCII only."""

import math
from collections.abc import Sequence


def head_name(layer: int, head: int) -> str:
    """Name of a head, 0-based: "L1.H7"."""
    return f"L{layer}.H{head}"


def number(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits; "nan", "inf", "-inf" as such; exponents without padding."""
    if not math.isfinite(value):
        return str(value)
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def percent(share: float) -> str:
    """A share as "12 %", with two digits below ten per cent; "nan" as such."""
    if not math.isfinite(share):
        return number(share)
    value = 100 * share
    return f"{value:,.0f} %" if abs(value) >= 9.95 else f"{number(value, 2)} %"


def count(value: int, noun: str, plural: str | None = None) -> str:
    """A number of things: "1 head", "1,536 heads"."""
    return f"{value:,} {noun if value == 1 else (plural or noun + 's')}"


def about(value: int) -> str:
    """A whole number rounded up to two significant digits, with separators: 57 -> "57", 1,234 -> "1,300"."""
    if value < 100:
        return str(value)
    unit = 10 ** (len(str(value)) - 2)
    return f"{-(-value // unit) * unit:,}"


def listing(names: Sequence[str], limit: int, total: int | None = None) -> str:
    """The first `limit` names, then how many more there are: "a, b and 3 more".

    Args:
        names: the names, the most important first.
        limit: names to print.
        total: how many there are in all, where `names` is already cut; None for len(names).
    """
    shown = list(names[:limit])
    more = (len(names) if total is None else total) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")
