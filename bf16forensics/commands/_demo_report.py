"""What the demo prints: the essentials of each report, then what to look at and how to go on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bf16forensics.commands._demo_twins import PLANTED, Twin

if TYPE_CHECKING:
    from bf16forensics.commands._localize_run import Analysed, LocalizeRun
    from bf16forensics.report.layout import Line

_WIDEST = 120
_NARROWEST = 60
#: Lines of the findings and of the table, and heads in it.
_FINDING_LINES = 9
_TABLE_LINES = 14
_TOP = 4


def show_twin(twin: Twin, done: "Analysed", *, case: str | None) -> None:
    """Prints title, data, verdict, findings and the first heads of one twin."""
    from bf16forensics.report.console import show_lines

    show_lines(lambda width, encoding: _twin(twin, done, case, _columns(width), encoding))


def _twin(twin: Twin, done: "Analysed", case: str | None, width: int, encoding: str | None) -> "list[Line]":
    from bf16forensics.report.console import encodable
    from bf16forensics.report.glyphs import glyphs_for
    from bf16forensics.report.layout import labelled
    from bf16forensics.report.sections import findings, verdict
    from bf16forensics.report.table import head_table
    from bf16forensics.verdict.words import number

    result, judgement, glyphs = done.result, done.judgement, glyphs_for(encoding)
    data = (
        f"{result.sequences} sequences of {result.tokens} tokens, {result.step_sequences} a step; mean loss "
        f"{number(result.loss)}; recipe {result.recipe.name} against {result.reference}; analysis "
        f"{result.timing.analysis_s:.1f} s"
    )
    lines = labelled(twin.name.upper(), twin.title, width, style="bold")
    lines += labelled("read", result.inputs[0].path if result.inputs else "", width)
    lines += labelled("data", f"{data}; L1.H2 is layer 1, head 2, counted from 0", width)
    lines += verdict(judgement, width)
    lines += findings(judgement, width, _FINDING_LINES)
    lines += head_table(result, judgement, width, glyphs, top=_TOP, room=_TABLE_LINES)
    if case is not None:
        lines += labelled("case", case, width)
    return [encodable(line, encoding) for line in lines]


def show_closing(runs: "Sequence[tuple[Twin, LocalizeRun]]", deviations: Sequence[str]) -> None:
    """Prints what to look at, what to run next, and whether all came out as documented."""
    from bf16forensics.report.console import show_lines

    show_lines(lambda width, encoding: _closing(runs, deviations, _columns(width), encoding))


def _closing(
    runs: "Sequence[tuple[Twin, LocalizeRun]]", deviations: Sequence[str], width: int, encoding: str | None
) -> "list[Line]":
    from bf16forensics.report.console import encodable
    from bf16forensics.report.layout import BLANK, labelled, shell
    from bf16forensics.verdict.advice import rerun

    lines = labelled("look at", "B/lim: the bias of the dW_Q error over the largest harmless one. It decides, not the "
                     "number of repeated maxima, which is a trigger and no verdict. upper below 1 is what lets the "
                     "other heads be called noise.", width)  # fmt: skip
    planted = [run for twin, run in runs if twin is PLANTED]
    if planted:
        command = planted[0].command
        lines += labelled("", "The cause is shown by removing one rounding. Without that of O the bias is gone; with a "
                          "rounding of O-bar before it the sign of the error turns over:", width)  # fmt: skip
        for flip in ("fa2+o=fp32", "fa2+o_bar=bf16"):
            lines += shell("", rerun(command, "--recipe", flip), width)
        lines += labelled(
            "", "The planted head down to single additions, and the bits of the one that the paper prints:", width
        )
        layer, head = PLANTED.culprit or (0, 0)
        traced = f"{rerun(command, '--layer', str(layer))} --head {head}".replace(" localize ", " trace-head ", 1)
        lines += shell("", traced, width)
        lines += shell("", "bf16forensics bits 0xC01A0E2E 0xC0130000", width)
    lines += labelled("your data", "give the checkpoint and the batches recorded around the failure, at least 16 "
                      "sequences:", width)  # fmt: skip
    own = "bf16forensics localize ckpt.pt --batch train.bin --indices indices.txt --lines 0:8 -o case"
    lines += shell("", own, width)
    lines += labelled("", "or the tensors of one attention call:", width)
    lines += shell("", "bf16forensics localize --record tensors.safetensors --layout bhtd", width)
    if deviations:
        lines += [BLANK]
        for text in deviations:
            lines += labelled("NOT SO", text, width, style="bold red")
    names = " and ".join(twin.name for twin, _ in runs)
    end = f"{names}: {'not as documented' if deviations else 'as documented'}"
    return [encodable(line, encoding) for line in [*lines, *labelled("done", end, width)]]


def _columns(width: int) -> int:
    return min(max(width, _NARROWEST), _WIDEST)
