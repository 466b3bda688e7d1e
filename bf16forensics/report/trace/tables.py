"""The tables of the terminal report of trace-head."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from bf16forensics.evidence.trace.results import HeadTrace, Jump, TokenTrace
from bf16forensics.report.glyphs import Glyphs
from bf16forensics.report.layout import BLANK, Line, labelled, pad, row
from bf16forensics.report.trace.context import TraceContext
from bf16forensics.report.trace.words import (
    aligned_sum,
    correlation_words,
    fit,
    place,
    remainder_words,
    sign_cell,
)
from bf16forensics.verdict.words import count, number, percent

#: What a cell holds when the evidence does not exist.
_NONE = "-"
#: Columns of one cell of the table of signs, and of the words before a summand.
_SIGNS, _SUMMAND = 30, 40

_Item = TypeVar("_Item")
#: Title, columns of the terminal without the blank before, cells from the first row to the last.
_Column = tuple[str, int, list[str]]


def token_table(trace: HeadTrace, width: int, glyphs: Glyphs, *, top: int) -> list[Line]:
    """The first `top` rows of the head, the largest error first, with a legend; none without rows or where `top` is 0.

    Args:
        trace: what was found out.
        width: columns, at least 80.
        glyphs: signs to use.
        top: rows wanted.
    """
    shown = trace.tokens[:top]
    if not shown:
        return []
    columns = [
        _column("seq", 5, shown, lambda token, _: str(token.sequence)),
        _column("step", 7, shown, lambda token, _: _NONE if token.step is None else str(token.step)),
        _column("token", 6, shown, lambda token, _: str(token.token)),
        _column(
            f"{glyphs.delta} err", 10, shown, lambda token, wide: _counted(token.delta_err, token.sign_counts, wide)
        ),
        _column("defect", 9, shown, lambda token, wide: _given(token.defect, wide)),
        _column("visible", 7, shown, lambda token, _: str(token.visible)),
        _column("ones", 5, shown, lambda token, _: _NONE if token.ones is None else str(token.ones)),
        _column("O ulp", 7, shown, lambda token, wide: fit(token.o_err_max_ulp, wide, 3).removeprefix("+")),
        _column("at", 5, shown, lambda token, _: str(token.o_err_feature)),
    ]
    if all(token.step is None for token in trace.tokens):
        columns = [column for column in columns if column[0] != "step"]
    lines = _table(columns)
    if len(shown) < trace.rows:
        more = f"up to {len(trace.tokens):,} are in the JSON document"
        lines.append(Line(text=f"{len(shown)} of {count(trace.rows, 'row')}; {more}"))
    legend = (
        f"defect: error against the recipe's own P; ones: keys with {glyphs.p_bar} = 1; O ulp: largest error of O in "
        "ulp, and at which feature"
    )
    if not all(token.sign_counts or math.isnan(token.delta_err) for token in shown):
        legend += "; (): within the order of an FP32 sum"
    return [*lines, *labelled("legend", legend, width), BLANK]


def feature_table(token: TokenTrace, context: TraceContext, width: int, glyphs: Glyphs, *, top: int) -> list[Line]:
    """The first `top` features of the token, the meeting of signs, and the sum to the last digit.

    Args:
        token: the token by feature.
        context: where the trace comes from.
        width: columns, at least 80.
        glyphs: signs to use.
        top: features wanted.
    """
    shown = token.features[:top]
    total = token.token.delta_err
    columns = [
        _column("feature", 7, shown, lambda item, _: str(item.feature)),
        _column("dO", 10, shown, lambda item, wide: fit(item.do, wide)),
        _column("O_lp", 10, shown, lambda item, wide: fit(item.o_lp, wide, 8)),
        _column("O_hp", 10, shown, lambda item, wide: fit(item.o_hp, wide, 8)),
        _column("error", 9, shown, lambda item, wide: fit(item.o_err, wide, 4)),
        _column("ulp", 7, shown, lambda item, wide: fit(item.o_err_ulp, wide, 3)),
        _column("dO * error", 10, shown, lambda item, wide: fit(item.contribution, wide, 4)),
        _column(
            "so far",
            8,
            list(accumulate(item.contribution for item in shown)),
            lambda sum_, _: percent(sum_ / total) if total and math.isfinite(total) else _NONE,
        ),
    ]
    lines = labelled("token", f"{place(token.token)}: what its features add to {glyphs.delta}", width)
    lines += _table(columns) if shown else []
    if len(shown) < len(token.features):
        named = count(len(token.features), "feature")
        lines.append(Line(text=f"{len(shown)} of {named}; all are in the JSON document"))
    return [*lines, *_signs(token), *_sum(token, context, glyphs), BLANK]


def jump_table(trace: HeadTrace, width: int, glyphs: Glyphs, *, top: int) -> list[Line]:
    """The first `top` jumps of the cumulative error, the largest first, with a legend.

    Args:
        trace: what was found out.
        width: columns, at least 80.
        glyphs: signs to use.
        top: jumps wanted.
    """
    cumulative = trace.cumulative
    shown = cumulative.jumps[:top]
    if not shown:
        return []

    def before(jump: Jump) -> float:
        return float(cumulative.error[jump.position - 1]) if jump.position else 0.0

    columns = [
        _column("key", 6, shown, lambda jump, _: str(jump.key)),
        _column(glyphs.p_bar, 8, shown, lambda jump, wide: fit(jump.p_bar, wide, 8).removeprefix("+")),
        _column("V", 9, shown, lambda jump, wide: fit(jump.v, wide, 8)),
        _column("sum lp", 10, shown, lambda jump, wide: fit(float(cumulative.running_lp[jump.position]), wide, 8)),
        _column("sum hp", 10, shown, lambda jump, wide: fit(float(cumulative.running_hp[jump.position]), wide, 8)),
        _column("before", 9, shown, lambda jump, wide: fit(before(jump), wide, 4)),
        _column("after", 9, shown, lambda jump, wide: fit(float(cumulative.error[jump.position]), wide, 4)),
        _column("jump", 9, shown, lambda jump, wide: fit(jump.size, wide, 4)),
    ]
    heading, *rows = _table(columns)
    lines = [heading]
    for line, jump in zip(rows, shown, strict=True):
        ends = bool(cumulative.tile_end[jump.position])
        signs = f"{'1' * jump.is_one}{'|' * ends}{'*' * jump.exists}"
        lines.append(Line(text=f"{line.text} {signs}".rstrip(), style="bold" if jump.is_one else ""))
    legend = (
        f"sum: of {glyphs.p_bar} V up to the key; before, after: its error lp - hp; 1: {glyphs.p_bar} = 1; |: end of a "
        "tile; *: the value exists"
    )
    return [*lines, *labelled("legend", legend, width)]


def _signs(token: TokenTrace) -> list[Line]:
    """The 2 x 2 table of signs."""
    titles = " ".join(pad(title, _SIGNS) for title in ("error of O > 0", "error of O < 0"))
    lines = [Line(text=f"{'signs':<8}{titles}", style="bold")]
    for sign, name in ((1, "dO > 0"), (-1, "dO < 0")):
        cells = " ".join(pad(sign_cell(token.signs, sign, error), _SIGNS) for error in (1, -1))
        lines.append(Line(text=f"{name:<8}{cells}"))
    return [*lines, Line(text=f"{'':<8}{correlation_words(token.signs)}")]


def _sum(token: TokenTrace, context: TraceContext, glyphs: Glyphs) -> list[Line]:
    """sum of contributions + remainder = error of delta, so that a reader can add it up."""
    first = f"sum of dO * error, {count(len(token.features), 'feature')}"
    if math.isnan(token.token.delta_err):
        return [Line(text=f"{pad(first, _SUMMAND, left=True)} {number(token.contributions, 17)}")]
    values = aligned_sum(token.contributions, token.remainder, token.token.delta_err)
    names = (
        first,
        f"+ {remainder_words(context.recipe, glyphs.delta)}",
        f"= error of {glyphs.delta} of the token",
    )
    wide = max(map(len, values))
    return [
        Line(text=f"{pad(name, _SUMMAND, left=True)} {value:>{wide}}")
        for name, value in zip(names, values, strict=True)
    ]


def _column(title: str, width: int, items: Iterable[_Item], cell: Callable[[_Item, int], str]) -> _Column:
    return title, width, [cell(item, width) for item in items]


def _table(columns: Sequence[_Column]) -> list[Line]:
    heading = Line(text=row([(title, width) for title, width, _ in columns]), style="bold")
    cells = zip(*([(text, width) for text in texts] for _, width, texts in columns), strict=True)
    return [heading, *(Line(text=row(list(items))) for items in cells)]


def _counted(value: float, sign_counts: bool, width: int) -> str:
    """The number, in parentheses where its sign does not count."""
    if math.isnan(value):
        return _NONE
    return fit(value, width, 4) if sign_counts else f"({fit(value, width - 2, 4)})"


def _given(value: float, width: int) -> str:
    return _NONE if math.isnan(value) else fit(value, width, 4)
