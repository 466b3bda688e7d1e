"""Draws the figure of trace-head: delta by token, V and the error of the running sum by key, features."""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bf16forensics.evidence.trace.results import HeadTrace
from bf16forensics.report.trace import axes as trace_axes
from bf16forensics.report.trace.context import TraceContext
from bf16forensics.report.trace.words import bound_words, exists_words, has_delta, largest_words, place, signed
from bf16forensics.verdict.words import count, head_name

#: Inches: the page, its margins, the gaps between panels, and the lines of title and footer.
_WIDTH, _PANEL, _LEFT, _RIGHT, _GAP, _DOWN = 11.0, 2.15, 0.85, 0.25, 1.0, 1.0
_PANEL_WIDTH = (_WIDTH - _LEFT - _RIGHT - _GAP) / 2
_STRIP, _STRIP_GAP = 0.34, 0.08
_TITLE_LINE, _FOOTER_LINE = 0.22, 0.14
_TITLE_CHARACTERS, _FOOTER_CHARACTERS = 118, 205
_MOST_FILES = 4
_ONE_ROW = "one row alone was computed"
_NO_DELTA, _NO_GRADIENT = "no dO or no backward pass: there is no error of δ", "no dO: nothing contributes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """A figure with room for three rows of two panels."""

    figure: Figure
    #: Inches: height of the page, and of what lies below the panels.
    height: float
    bottom: float

    def axes(self, index: int, label: str, *, low: float = 0.0, high: float = _PANEL) -> Axes:
        """Axes over a part of the place of a panel, from `low` to `high` inches above its lower edge."""
        x, y = self._corner(index)
        place = (x / _WIDTH, (y + low) / self.height, _PANEL_WIDTH / _WIDTH, (high - low) / self.height)
        return self.figure.add_axes(place, label=label)

    def panel(self, index: int, title: str, note: str, *, low: float = 0.0) -> Axes:
        """A panel with its letter and two lines of heading."""
        letter = "abcdef"[index]
        x, y = self._corner(index)
        left, top = x - 0.6, y + _PANEL
        self.text((left, top + 0.3), f"{letter}   {title}", size=9.5, weight="bold")
        self.text((left, top + 0.13), note.replace("-", "−"), size=7.5)
        return self.axes(index, f"panel {letter}", low=low)

    def text(self, corner: tuple[float, float], words: str, **style: Any) -> None:
        """Words at a place in inches. What the input names may hold a dollar sign, which is no formula."""
        self.figure.text(corner[0] / _WIDTH, corner[1] / self.height, words, parse_math=False, **style)

    def _corner(self, index: int) -> tuple[float, float]:
        row, column = divmod(index, 2)
        return _LEFT + column * (_PANEL_WIDTH + _GAP), self.bottom + (2 - row) * (_PANEL + _DOWN)


def draw_trace(trace: HeadTrace, context: TraceContext) -> Figure:
    """The figure: six panels, in the order of their letters, then the strip of signs where there is a dO.

    Args:
        trace: what was found out; any number of queries, keys and features.
        context: where it comes from.
    """
    footer = _wrapped(_footer(trace, context), _FOOTER_CHARACTERS, 4)
    title = _wrapped(_title(trace), _TITLE_CHARACTERS, 2)
    bottom = 0.8 + _FOOTER_LINE * len(footer)
    height = bottom + 3 * _PANEL + 2 * _DOWN + 0.75 + _TITLE_LINE * len(title)
    page = _Page(figure=Figure(figsize=(_WIDTH, height), facecolor="white"), height=height, bottom=bottom)
    page.text((0.25, height - 0.17), "\n".join(title), size=11.5, weight="bold", va="top")
    page.text((0.25, 0.14), "\n".join(footer), size=7, va="bottom")
    _rows(page, trace)
    _keys(page, trace)
    _features(page, trace)
    return page.figure


def _rows(page: _Page, trace: HeadTrace) -> None:
    """Panels a and b: the error of delta by row; empty where one row was computed, so that no other is drawn as 0."""
    traced, known = trace.traced, has_delta(trace)
    if known and trace.rows < 2:
        axes = page.panel(0, f"δ error of query {traced.token} of sequence {traced.sequence}", "δ_lp − δ_hp")
        trace_axes.without(axes, signed(traced.delta_err, 4).replace("-", "−"))
        trace_axes.without(page.panel(1, "its running sum", ""), _ONE_ROW)
        return
    note = f"δ_lp − δ_hp; circle: query {traced.token}, which is traced below"
    axes = page.panel(0, f"δ error of each query of sequence {traced.sequence}", note)
    note = trace_axes.sum_words(trace) if known else _NO_DELTA
    beside = page.panel(1, f"its running sum over {count(len(trace.sequences), 'sequence')}", note)
    if known:
        trace_axes.delta_by_token(axes, trace)
        trace_axes.delta_sum(beside, trace)
    else:
        trace_axes.without(axes, _NO_DELTA)
        trace_axes.without(beside, _NO_DELTA)


def _keys(page: _Page, trace: HeadTrace) -> None:
    """Panels c, d and e: one feature along the keys."""
    cumulative = trace.cumulative
    axes = page.panel(2, f"V of feature {cumulative.feature}", trace_axes.negative_words(trace))
    trace_axes.values_along_keys(axes, trace)
    _legend(axes)
    title = f"error of the running sum of P̄ V by {cumulative.accumulator}"
    axes = page.panel(3, title, f"lp − hp; {trace_axes.ones_words(cumulative)}")
    first, last = trace_axes.zoom(cumulative)
    trace_axes.error_along_keys(axes, cumulative, 0, len(cumulative.keys) - 1)
    if last - first + 1 < len(cumulative.keys):
        axes.axvspan(first - 0.5, last + 0.5, facecolor="none", edgecolor=trace_axes.FAINT, linewidth=0.8, zorder=3)
    _legend(axes)
    title = f"the region of the largest jumps, {count(last - first + 1, 'key')}"
    axes = page.panel(4, title, largest_words(cumulative, "P̄"))
    trace_axes.error_along_keys(axes, cumulative, first, last)


def _features(page: _Page, trace: HeadTrace) -> None:
    """Panel f: one token by feature."""
    token = trace.token
    if token is None:
        trace_axes.without(page.panel(5, "contributions of the features", ""), _NO_GRADIENT)
        return
    total = token.token.delta_err
    known = "" if math.isnan(total) else f", δ error {signed(total, 4)}"
    note = f"sum {signed(token.contributions, 4)}{known}; equal signs give +"
    title = f"what the features contribute to the δ error of query {token.token.token}"
    axes = page.panel(5, title, note, low=_STRIP + _STRIP_GAP)
    trace_axes.contributions(axes, page.axes(5, "signs", high=_STRIP), token)


def _legend(axes: Axes) -> None:
    """Above the panel at its right, where no curve can be."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.995),
        ncols=4,
        fontsize=7.5,
        frameon=False,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _title(trace: HeadTrace) -> str:
    name = head_name(trace.layer, trace.head)
    return f"{name}: from the error of δ to one addition; {place(trace.traced)}, feature {trace.cumulative.feature}"


def _footer(trace: HeadTrace, context: TraceContext) -> str:
    files = [f"{file.role} sha256 {file.sha256[:8]}" for file in context.inputs[:_MOST_FILES]]
    if len(context.inputs) > _MOST_FILES:
        files.append(f"{count(len(context.inputs) - _MOST_FILES, 'more file')}")
    recipe, cumulative = context.recipe, trace.cumulative
    return "; ".join(
        (
            ", ".join(files),
            f"recipe {recipe.name} (version {recipe.version}), reference {context.reference}",
            f"d, e: walk of {cumulative.walk_recipe}, {cumulative.accumulator}: {cumulative.meaning.rstrip('.')}",
            f"{bound_words(cumulative)}; {exists_words(cumulative)}",
            f"bf16forensics {context.environment.tool_version}; everything counts from 0",
        )
    )


def _wrapped(words: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(words, width, max_lines=most, placeholder=" ...", break_on_hyphens=False) or [""]
