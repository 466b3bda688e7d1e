"""The exact sum of floating-point values, written out on one grid. Plain Python."""

import math
from collections.abc import Sequence
from fractions import Fraction

from bf16forensics.floats.explained import AlignedSum
from bf16forensics.floats.pattern import Pattern, leading_exponent, power_of_two


def align(terms: Sequence[Pattern]) -> AlignedSum:
    """Add values exactly and show them on one grid, whose columns are powers of two.

    The grid reaches from the first digit of the largest magnitude to the last 1 that any term has.
    A sum of zeros is -0 where every term is -0, else +0; so is a sum that cancels, as in rounding to nearest. NaN, and
    infinities of both signs, give NaN.

    Args:
        terms: One or more, formats may differ.
    """
    if not all(term.is_finite for term in terms):
        return _special(terms)
    values = [term.value or Fraction(0) for term in terms]
    exact = sum(values, Fraction(0))
    is_negative = exact < 0 if exact else all(term.sign for term in terms)
    grid = min((_last_exponent(value) for value in values if value), default=0)
    lead = max((leading_exponent(abs(value)) for value in values if value), default=0)
    reached = leading_exponent(abs(exact)) if exact else lead
    top = max(lead, reached)
    width = top - grid + 1
    return AlignedSum(
        terms=tuple(terms),
        exact=exact,
        is_negative=is_negative,
        is_nan=False,
        top_exponent=top,
        grid_exponent=grid,
        lead_exponent=lead,
        rows=tuple(_on_grid(value, grid, width) for value in values),
        total=_on_grid(exact, grid, width),
        is_carry=reached > lead,
        shift=reached - lead,
        reason=_reason(values, exact, lead, reached, is_negative),
    )


def number_of(aligned: AlignedSum) -> Fraction | float:
    """Return the sum as `scalar.encode` takes it: exact, or a float where only that says it (-0.0, infinity, NaN)."""
    if aligned.is_nan:
        return math.nan
    if aligned.exact is None:
        return -math.inf if aligned.is_negative else math.inf
    return -0.0 if aligned.is_negative and not aligned.exact else aligned.exact


def _special(terms: Sequence[Pattern]) -> AlignedSum:
    infinite = [term for term in terms if not term.is_finite and not term.is_nan]
    signs = {term.sign for term in infinite}
    if any(term.is_nan for term in terms):
        is_nan, reason = True, "a NaN among the terms makes the sum NaN"
    elif len(signs) == 2:
        is_nan, reason = True, "infinities of both signs: the sum is NaN"
    else:
        is_nan, reason = False, "an infinity swallows every finite term"
    return AlignedSum(
        terms=tuple(terms),
        exact=None,
        is_negative=not is_nan and 1 in signs,
        is_nan=is_nan,
        top_exponent=0,
        grid_exponent=0,
        lead_exponent=0,
        rows=(),
        total="",
        is_carry=False,
        shift=0,
        reason=reason,
    )


def _last_exponent(value: Fraction) -> int:
    """Exponent of the last 1 of a binary fraction other than 0."""
    if value.denominator > 1:
        return 1 - value.denominator.bit_length()
    return (value.numerator & -value.numerator).bit_length() - 1


def _on_grid(value: Fraction, grid: int, width: int) -> str:
    return f"{int(abs(value) / power_of_two(grid)):0{width}b}"


def _reason(values: Sequence[Fraction], exact: Fraction, lead: int, reached: int, is_negative: bool) -> str:
    if not exact:
        zero = "-0" if is_negative else "+0"
        return f"the terms cancel exactly: {zero}" if any(values) else f"a sum of zeros: {zero}"
    places = abs(reached - lead)
    bits = f"{places} bit{'s' if places > 1 else ''}"
    if reached > lead:
        return f"carry out: the sum is {bits} wider than the largest term and moves right by {places}"
    if reached < lead:
        return f"cancellation: the sum is {bits} narrower than the largest term and moves left by {places}"
    return "no carry and no cancellation: the sum stands where the largest term stands"
