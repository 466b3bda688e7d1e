"""The steps of a sum as a table, one line a step: plain ASCII."""

import math
import textwrap
from fractions import Fraction

from bf16forensics.floats.bits import Bits
from bf16forensics.floats.chain import ChainStep
from bf16forensics.report.bits.numbers import exact_text, label_of

#: Columns of the numbers; with the rest they make 80.
_TERM, _RUNNING, _STORED, _ERROR = 15, 16, 15, 12


def steps_lines(bits: Bits, width: int) -> list[str]:
    """Every step: term, running sum with it, stored value, deciding bits, decision, error.

    The error is the stored value minus the exact sum of the terms up to there.
    """
    lines = [
        _row("", "term", "running sum", "stored", "L|GRS", "", "error"),
        *(_line(step, bits) for step in bits.steps),
    ]
    if bits.accumulator == "each-add":
        notes = ["running sum: exact sum of what was stored before and the term"]
    else:
        notes = [f"running sum: kept in {bits.source.name}"]
    if any(step.event.to_source is not None and step.event.to_source.error for step in bits.steps):
        notes[0] += f" (~ the addition was rounded to {bits.source.name})"
    notes += [f"stored: rounded to {bits.target.name}; error: stored - exact sum of the terms so far"]
    notes += ["L last kept bit, G guard, R round, S sticky"]
    return [
        *lines,
        *(line for note in notes for line in textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="    ")),
    ]


def _line(step: ChainStep, bits: Bits) -> str:
    event, rounding = step.event, step.event.to_target
    if bits.accumulator == "each-add" or event.to_source is None:
        running = _sum_text(event.sum.exact)
    else:
        mark = "~" if event.to_source.error else ""
        running = "" if event.to_source.result is None else _fitting(event.to_source.result.number, _RUNNING, mark)
    decision = "" if rounding.decision in ("exact", "none") else rounding.decision
    deciding = f"{rounding.last_kept}|{rounding.guard}{rounding.round_bit}{rounding.sticky}"
    return _row(
        label_of(step.index, bits.labels),
        _fitting(step.terms[-1].number, _TERM),
        running,
        "open" if rounding.result is None else _fitting(rounding.result.number, _STORED),
        "" if rounding.exact is None else deciding,
        f"tie {decision}" if rounding.is_tie and decision in ("up", "down") else decision,
        "" if step.error is None else _fitting(_nearest(step.error), _ERROR, "+" if step.error > 0 else ""),
    )


def _row(label: str, term: str, running: str, stored: str, deciding: str, decision: str, error: str) -> str:
    numbers = f"{term:>{_TERM}} {running:>{_RUNNING}} {stored:>{_STORED}}"
    return f"{label:>3} {numbers} {deciding:>5} {decision:<8} {error:>{_ERROR}}".rstrip()


def _sum_text(exact: Fraction | None) -> str:
    if exact is None:
        return ""
    text = exact_text(exact)
    return text if len(text) <= _RUNNING else _fitting(_nearest(exact), _RUNNING, "~")


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return -math.inf if exact < 0 else math.inf


def _fitting(number: float, room: int, mark: str = "") -> str:
    """A number behind a mark, with as many of nine digits as the column takes."""
    for digits in range(9, 0, -1):
        text = f"{mark}{number:.{digits}g}"
        if len(text) <= room:
            break
    return text
