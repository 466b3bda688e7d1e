"""The terminal report: at most 60 lines whatever the model, an observation apart; readable without colour."""

from collections.abc import Sequence
from typing import TextIO

from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.report.console import encodable, show_lines, text_of
from bf16forensics.report.glyphs import Glyphs, glyphs_for
from bf16forensics.report.layout import Line
from bf16forensics.report.observation import observation_section
from bf16forensics.report.sections import closing, findings, header, message_lines, next_steps, unchecked, verdict
from bf16forensics.report.table import head_table
from bf16forensics.report.ties import ties
from bf16forensics.verdict.findings import Judgement

#: Lines of the whole report at 100 columns.
MAX_LINES = 60
#: Heads whose rows of the table come before long findings, and lines that findings get in any case.
_TABLE_HEADS = 10
_LEAST_FINDING_LINES = 8
_WIDEST = 120
_NARROWEST = 60


def render(
    result: LocalizeResult,
    judgement: Judgement,
    *,
    width: int = 100,
    top: int = 10,
    encoding: str | None = "utf-8",
    case: str | None = None,
) -> str:
    """The report as plain text ending in a newline.

    Args:
        result: what was measured.
        judgement: what was concluded.
        width: columns; below 60 is taken as 60.
        top: heads in the table; fewer where the 60 lines leave less room, which the report then says.
        encoding: of the stream that will take the text; characters it lacks are replaced (P-bar, delta, sigma).
        case: directory of the case written, to be named in the report; None for none.

    Returns:
        Text without control sequences that `encoding` can encode.
    """
    return text_of(_lines(result, judgement, width, top, encoding, case))


def show(
    result: LocalizeResult,
    judgement: Judgement,
    *,
    stream: TextIO | None = None,
    top: int = 10,
    case: str | None = None,
) -> None:
    """Writes the report to a stream: in colour on a terminal, plain otherwise. Arguments as for `render`."""
    show_lines(lambda width, encoding: _lines(result, judgement, width, top, encoding, case), stream)


def _lines(
    result: LocalizeResult, judgement: Judgement, width: int, top: int, encoding: str | None, case: str | None
) -> list[Line]:
    glyphs = glyphs_for(encoding)
    columns = min(max(width, _NARROWEST), _WIDEST)
    before = [*header(result, columns, glyphs), *verdict(judgement, columns)]
    after = [
        *unchecked(judgement, columns),
        *next_steps(judgement, columns, case),
        *closing(result, judgement, columns),
    ]
    room = MAX_LINES - len(before) - len(after)
    wanted = head_table(result, judgement, columns, glyphs, top=min(top, _TABLE_HEADS), room=room)
    # Ties come before further evidence of a finding, but never in place of a message.
    tied = ties(result, judgement, columns, glyphs)
    if len(tied) > room - len(wanted) - message_lines(judgement, columns):
        tied = []
    room -= len(tied)
    found = findings(judgement, columns, max(room - len(wanted), _LEAST_FINDING_LINES))
    table = head_table(result, judgement, columns, glyphs, top=top, room=room - len(found))
    observed = _observed(result, judgement, columns, glyphs, top)
    return [encodable(line, encoding) for line in _joined((before, found, table, tied, observed, after))]


def _observed(result: LocalizeResult, judgement: Judgement, width: int, glyphs: Glyphs, top: int) -> list[Line]:
    """The observation, where one was asked for: lines beyond the report's own."""
    if result.observation is None:
        return []
    return observation_section(result.observation, width, glyphs, ranking=judgement.ranking, top=top)


def _joined(parts: Sequence[Sequence[Line]]) -> list[Line]:
    return [line for part in parts for line in part]
