"""The panels of one rounding and of one exact sum, as lines of plain ASCII text."""

import textwrap
from fractions import Fraction
from itertools import groupby

from bf16forensics.floats.explained import AlignedSum, Counterfactual, Rounding
from bf16forensics.floats.pattern import Pattern, power_of_two
from bf16forensics.report.bits.grid import grid_lines
from bf16forensics.report.bits.numbers import (
    exact_text,
    fields_text,
    float_text,
    item,
    power_text,
    ulp_text,
    value_text,
)

#: Rounding modes in words.
MODE_WORDS = {
    "rne": "to nearest, ties to even",
    "rz": "toward zero",
    "rna": "to nearest, ties away from zero",
    "stochastic": "up or down at random",
}
_CLEARED = {
    "sticky": ("without the sticky bits", "below the round bit"),
    "residue": ("without the residue", "below the guard bit"),
}
#: Rows of a sum that are shown unless everything is asked for.
_ROWS_MOST = 16
#: Equal digits from this many on are written as "[0 x 123]".
_RUN = 16


def sum_lines(total: AlignedSum, labels: list[str], width: int, *, is_whole: bool = False) -> list[str]:
    """The terms on one grid, their exact sum, and what carried or cancelled.

    Args:
        total: The sum.
        labels: At most three columns for each term.
        width: Columns.
        is_whole: Show every row, however many there are.
    """
    sign = _sign(total.is_negative)
    if total.exact is None:
        return item("sum", ["NaN" if total.is_nan else f"{sign}inf", total.reason], width)
    num_before = total.top_exponent - total.lead_exponent + 1
    num_shown = len(total.rows) if is_whole else _ROWS_MOST
    rows = [
        (label, _sign(term.sign), _blank_lead(digits, num_before))
        for label, term, digits in zip(labels, total.terms, total.rows, strict=True)
    ][:num_shown]
    lines = grid_lines([*rows, ("sum", sign, _blank_lead(total.total, num_before))], num_before, width)
    if num_shown < len(total.rows):
        lines += [f"  {len(total.rows) - num_shown} more terms are not shown (--all-steps)"]
    columns = f"the digit before the point counts 2^{total.lead_exponent}, the last one 2^{total.grid_exponent}"
    return [
        *lines,
        *item("columns", [columns], width),
        *item("exact sum", [_number_text(total.exact, total.is_negative)], width),
        *item("", [total.reason], width),
    ]


def rounding_section(rounding: Rounding, width: int) -> list[str]:
    """A heading and the rounding under it; one line or two where nothing is dropped, or no bits are involved."""
    name = rounding.fmt.name
    if rounding.result is not None and (rounding.decision == "exact" or rounding.exact is None):
        result = item("result", [*_pattern_cells(rounding.result), name], width)
        return [
            "",
            *_wrapped(f"rounding to {name}: {rounding.reason}", width),
            *result,
            *_result_bits(rounding.result, width),
        ]
    title = f"rounding to {name} ({rounding.mode}: {MODE_WORDS[rounding.mode]})"
    return ["", title, *rounding_lines(rounding, width)]


def rounding_lines(rounding: Rounding, width: int) -> list[str]:
    """One rounding: digits kept and dropped, guard, round, sticky, neighbours, decision, result, error."""
    fmt = rounding.fmt
    number = _number_text(rounding.exact or Fraction(0), rounding.is_negative)
    digits = [f"{_sign(rounding.is_negative)} {_digits(rounding)}", f"x 2^{rounding.step_exponent + fmt.fraction_bits}"]
    lines = [*item("value", [number], width), *item("kept|dropped", digits, width)]
    if rounding.extreme == "subnormal":
        lines += item("", [f"below the normal range of {fmt.name}: the first digit is 0"], width)
    if rounding.decision != "beyond":
        bits = f"last kept bit {rounding.last_kept}, guard {rounding.guard}, round {rounding.round_bit}"
        lines += item("bits", [f"{bits}, sticky {rounding.sticky}"], width)
        lines += item("residue", [f"{ulp_text(rounding.residue_ulp)} ulp below the guard bit"], width)
        lines += item("tie", ["yes" if rounding.is_tie else "no"], width)
    lines += item("1 ulp", [power_text(rounding.step_exponent)], width)
    if rounding.decision == "open":
        return [*lines, *_open_lines(rounding, width)]
    lines += item("toward zero", _pattern_cells(rounding.toward_zero), width)
    lines += item("away", _pattern_cells(rounding.away), width)
    lines += item("decision", [f"{rounding.decision}: {rounding.reason}"], width)
    if rounding.result is not None:
        lines += item("result", [*_pattern_cells(rounding.result), fmt.name], width)
        lines += _result_bits(rounding.result, width)
    lines += _error_lines(rounding, width)
    for other in rounding.without:
        lines += _counterfactual_lines(other, rounding, width)
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width=width, break_on_hyphens=False)


def _counterfactual_lines(other: Counterfactual, rounding: Rounding, width: int) -> list[str]:
    title, where = _CLEARED[other.cleared]
    tie = "a tie" if other.is_tie else "no tie"
    value = _number_text(other.exact, rounding.is_negative)
    lines = [title, *item("value", [value, f"({tie}; everything {where} cleared)"], width)]
    cells = [*_pattern_cells(other.result), "another result" if other.is_other else "the same result"]
    lines += item("result", cells, width)
    return lines if other.error is None else lines + item("error", _error_cells(other.error, rounding), width)


def _open_lines(rounding: Rounding, width: int) -> list[str]:
    chance = rounding.probability_up or Fraction(0)
    lines = item("decision", [f"open: {rounding.reason}"], width)
    for label, pattern, share in (
        ("toward zero", rounding.toward_zero, 1 - chance),
        ("away", rounding.away, chance),
    ):
        fraction = f"{share} = " if len(str(share)) <= 24 else ""
        lines += item(label, [*_pattern_cells(pattern), f"with probability {fraction}{float(share):.6g}"], width)
    return lines


def _result_bits(result: Pattern, width: int) -> list[str]:
    return item("", [result.binary, f"= {fields_text(result)}"], width)


def _error_lines(rounding: Rounding, width: int) -> list[str]:
    if rounding.error is None:
        return item("error", ["none: the result is not finite"], width)
    return item("error", [*_error_cells(rounding.error, rounding), "result - value"], width)


def _error_cells(error: Fraction, rounding: Rounding) -> list[str]:
    in_ulp = error / power_of_two(rounding.step_exponent)
    return [exact_text(error, is_signed=True), f"({ulp_text(in_ulp, is_signed=True)} ulp)"]


def _pattern_cells(pattern: Pattern | None) -> list[str]:
    return ["none in the format"] if pattern is None else [value_text(pattern), pattern.hex]


def _digits(rounding: Rounding) -> str:
    kept = f"{rounding.kept[0]}.{rounding.kept[1:]}"
    dropped = f"{rounding.dropped:0<3}"
    rest = "".join(
        f"[{digit} x {count}]" if (count := len(list(group))) >= _RUN else digit * count
        for digit, group in groupby(dropped[2:])
    )
    return f"{kept}|{dropped[0]} {dropped[1]} {rest}"


def _blank_lead(digits: str, num_before: int) -> str:
    """Zeros before the point become blanks, but for the one at the point."""
    lead = digits[: num_before - 1]
    return " " * (len(lead) - len(lead.lstrip("0"))) + lead.lstrip("0") + digits[len(lead) :]


def _number_text(exact: Fraction, is_negative: bool) -> str:
    return exact_text(exact) if exact else float_text(-0.0 if is_negative else 0.0)


def _sign(is_negative: int) -> str:
    return "-" if is_negative else "+"
