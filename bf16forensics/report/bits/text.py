"""The explanation of a conversion or a sum for a terminal: plain ASCII, no colour."""

import textwrap
from collections.abc import Sequence

from bf16forensics.floats.bits import SEED_BITS, Bits
from bf16forensics.floats.chain import ChainStep
from bf16forensics.floats.explained import Rounding
from bf16forensics.report.bits.numbers import exact_text, fields_text, item, label_of, value_text
from bf16forensics.report.bits.rounding import MODE_WORDS, rounding_section, sum_lines
from bf16forensics.report.bits.steps import steps_lines

#: Operands up to which each is shown with its bits; more are listed one a line.
_IN_FULL = 4
#: Column of an operand behind its letter.
_OPERAND = 4


def bits_text(bits: Bits, width: int, *, all_steps: bool = False, about: Sequence[str] = ()) -> str:
    """The whole explanation, ending in a newline.

    Args:
        bits: What was explained.
        width: Columns; from 60 on no line is wider, but for the table of steps, which has 80.
        all_steps: Every step of a sum in full, not the last alone.
        about: Sentences to put first: where the operands come from.
    """
    lines = [line for sentence in about for line in _wrapped(sentence, width)]
    lines += _heading(bits, width)
    lines += ["", *_operand_lines(bits, width)] if bits.operands else []
    if bits.blocks:
        from bf16forensics.report.bits.blocks import blocks_lines

        lines += blocks_lines(bits, width, all_steps=all_steps)
    elif bits.accumulator:
        if len(bits.steps) > 2:
            lines += ["", *steps_lines(bits, width)]
        shown = bits.steps[1:] if all_steps and len(bits.steps) > 1 else bits.steps[-1:]
        for step in shown:
            lines += _step_lines(step, bits, width, is_whole=all_steps)
    if bits.blocks or not bits.accumulator:
        lines += rounding_section(bits.final, width)
    lines += _closing_lines(bits, width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading(bits: Bits, width: int) -> list[str]:
    target = f"{bits.target.name} ({bits.mode}: {MODE_WORDS[bits.mode]})"
    if not bits.accumulator:
        return _wrapped(f"conversion of {bits.operands[0].pattern.fmt.name} to {target}", width)
    if len(bits.operands) == 2 and bits.accumulator == "fp32-prefix":
        return _wrapped(f"sum of 2 terms in {bits.source.name}, rounded to {target}", width)
    num_terms = len(bits.operands) or sum(len(block.addends) - 1 for block in bits.blocks)
    title = f"sum of {num_terms} terms by {bits.accumulator}, rounded to {target}"
    return [*_wrapped(title, width), *_wrapped(bits.meaning, width)]


def _operand_lines(bits: Bits, width: int) -> list[str]:
    operands = bits.operands
    lines: list[str] = []
    for index, operand in enumerate(operands):
        pattern = operand.pattern
        cells = [value_text(pattern), pattern.fmt.name, pattern.hex]
        lines += item(label_of(index, bits.labels), cells, width, indent=0, start=_OPERAND)
        notes = []
        if len(operands) <= _IN_FULL:
            # Named operands were not written by anybody.
            notes = [fields_text(pattern), operand.reading if bits.labels else f"read as {operand.reading}"]
        if operand.is_rounded and operand.written is not None and pattern.value is not None:
            change = exact_text(pattern.value - operand.written, is_signed=True)
            notes.append(f"rounding to {pattern.fmt.name} changed it by {change}")
        elif operand.is_rounded:
            notes.append(f"beyond the range of {pattern.fmt.name}")
        lines += item("", notes, width, indent=0, start=_OPERAND) if notes else []
    return lines


def _step_lines(step: ChainStep, bits: Bits, width: int, *, is_whole: bool) -> list[str]:
    event = step.event
    if step.before is None or len(bits.operands) == 2:
        title, labels = "exact sum", [label_of(index, bits.labels) for index in range(len(event.sum.terms))]
    else:
        label = label_of(step.index, bits.labels)
        title, labels = f"addition of {label} to the running sum", ["run", label]
    lines = ["", title, *sum_lines(event.sum, labels, width, is_whole=is_whole)]
    if event.to_source is not None:
        lines += rounding_section(event.to_source, width)
    lines += rounding_section(event.to_target, width)
    if event.direct is not None and event.to_source is not None:
        what = f"double rounding: the step through {event.to_source.fmt.name} changed the result"
        lines += _double_lines(what, event.direct, width)
    return lines


def _closing_lines(bits: Bits, width: int) -> list[str]:
    lines = []
    if bits.from_text is not None:
        what = f"double rounding: writing the number in {bits.source.name} first changed the result"
        lines += _double_lines(what, bits.from_text, width)
    is_one_rounding = bits.final.error == bits.error and len(bits.operands) <= 2
    if bits.accumulator and not is_one_rounding and bits.exact is not None:
        cells = [f"exact sum {exact_text(bits.exact)}"]
        if bits.error is not None:
            cells = [f"{cells[0]},", f"result - exact sum {exact_text(bits.error, is_signed=True)}"]
        lines += ["", *item("all together", cells, width, indent=0)]
    if bits.seed is not None:
        lines += ["", *item("random", [f"seed {bits.seed}, {SEED_BITS} bits a rounding"], width, indent=0)]
    return lines


def _double_lines(what: str, once: Rounding, width: int) -> list[str]:
    result = once.result
    if result is None:
        return ["", *_wrapped(f"{what}: of one rounding the probabilities are others", width)]
    cells = [value_text(result), result.hex, f"by one rounding, {once.decision}: {once.reason}"]
    return ["", *_wrapped(what, width), *item("result", cells, width)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width=width, break_on_hyphens=False)
