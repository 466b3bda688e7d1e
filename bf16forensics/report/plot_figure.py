"""Draws the figure of a run: three heat maps of layers and heads, readable without colour."""

import math
import textwrap
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.report.plot_map import UNDEFINED, heat_map
from bf16forensics.report.plot_panels import LETTERS, letters, panels
from bf16forensics.verdict.findings import COMPOUNDING_BIAS, Judgement
from bf16forensics.verdict.words import count

#: Lengths in inches: around everything; between panels; left of, above and below a map; of its colour bar.
_MARGIN, _GAP, _LEFT, _ABOVE, _BELOW, _BAR = 0.3, 0.4, 0.42, 0.5, 0.88, 0.13
#: Least and most width of a map with its headings, most height; least length of a colour bar; side of a cell.
_NARROWEST, _WIDEST, _TALLEST, _SHORTEST_BAR = 3.0, 5.4, 8.0, 2.2
_SMALLEST_CELL, _LARGEST_CELL = 0.14, 0.62
#: Width below which three panels always stand side by side.
_PAGE = 12.0
#: Lines of the title, of the legend and of the footer; characters an inch of title and footer.
_TITLE_LINE, _LEGEND_LINE, _FOOTER_LINE = 0.21, 0.19, 0.14
_TITLE_CHARACTERS, _FOOTER_CHARACTERS = 11.5, 20.0
_MOST_FILES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """Where everything goes, in inches from the lower left corner."""

    width: float
    height: float
    #: Lower left corner of every map.
    maps: tuple[tuple[float, float], ...]

    def place(self, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        """A rectangle as shares of the page."""
        return (x / self.width, y / self.height, width / self.width, height / self.height)


def draw(result: LocalizeResult, judgement: Judgement, tool_version: str) -> Figure:
    """The figure: for each panel the axes of its map, then those of its colour bar.

    Args:
        result: what was measured; any number of layers and heads.
        judgement: what was concluded about the same heads.
        tool_version: version of this package, for the footer.
    """
    shown, signs = panels(result, judgement), letters(judgement)
    layers, heads = shown[0].values.shape
    cell = min(max(min(_WIDEST / heads, _TALLEST / layers), _SMALLEST_CELL), _LARGEST_CELL)
    wide, tall = heads * cell, layers * cell
    across, down = _LEFT + max(wide, _NARROWEST), _ABOVE + tall + _BELOW
    # Side by side, unless the maps are so wide and low that the page would be a strip.
    beside = 3 * (across + _GAP) <= max(_PAGE, 3 * down)
    inner = 3 * across + 2 * _GAP if beside else max(across, 7.0)
    title = _wrapped(judgement.summary, inner * _TITLE_CHARACTERS)
    footer = _wrapped(_footer(result, tool_version), inner * _FOOTER_CHARACTERS)
    columns = max(1, min(3, int(inner / 3.1)))
    legend_at = 0.22 + _FOOTER_LINE * len(footer)
    bottom = legend_at + _LEGEND_LINE * math.ceil((len(LETTERS) + 1) / columns) + 0.2
    rows = 1 if beside else 3
    page = _Page(
        width=inner + 2 * _MARGIN,
        height=bottom + rows * down + 0.3 + _TITLE_LINE * len(title),
        maps=tuple(
            (
                _MARGIN + _LEFT + (index * (across + _GAP) if beside else 0),
                bottom + _BELOW + (0 if beside else (2 - index) * down),
            )
            for index in range(3)
        ),
    )
    figure = Figure(figsize=(page.width, page.height), facecolor="white")
    _text(figure, page, (_MARGIN, page.height - 0.2), "\n".join(title), size=11, weight="bold", hangs=True)
    _text(figure, page, (_MARGIN, 0.12), "\n".join(footer), size=7)
    for index, panel in enumerate(shown):
        x, y = page.maps[index]
        top = y + tall
        _text(figure, page, (x - _LEFT, top + 0.31), f"{'abc'[index]}   {panel.title}", size=9.5, weight="bold")
        _text(figure, page, (x - _LEFT, top + 0.13), panel.note, size=7.5)
        axes = figure.add_axes(page.place(x, y, wide, tall), label=f"map {index}")
        bar = figure.add_axes(page.place(x, y - 0.57, max(wide, _SHORTEST_BAR), _BAR), label=f"bar {index}")
        heat_map(axes, bar, panel, signs, cell)
    with_gaps = any(bool(np.isnan(panel.values).any()) for panel in shown)
    _legend(figure, judgement, columns, with_gaps, (_MARGIN / page.width, legend_at / page.height))
    return figure


def _legend(figure: Figure, judgement: Judgement, columns: int, with_gaps: bool, corner: tuple[float, float]) -> None:
    numbers = dict(judgement.counts())
    handles = [
        Patch(
            facecolor="white",
            edgecolor="black",
            linewidth=2.0 if verdict == COMPOUNDING_BIAS else 0.5,
            label=f"{letter} = {verdict} ({count(numbers[verdict], 'head')})",
        )
        for verdict, letter in LETTERS.items()
    ]
    if with_gaps:
        handles.append(
            Patch(
                **UNDEFINED,
                label="hatched = not defined (nan)",
            )
        )
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=corner,
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=2.0,
    )


def _text(
    figure: Figure,
    page: _Page,
    corner: tuple[float, float],
    words: str,
    *,
    size: float,
    weight: str = "normal",
    hangs: bool = False,
) -> None:
    x, y = corner[0] / page.width, corner[1] / page.height
    # What the input names may hold a dollar sign, which is no formula.
    figure.text(
        x, y, words, size=size, weight=weight, va="top" if hangs else "baseline", linespacing=1.3, parse_math=False
    )


def _footer(result: LocalizeResult, tool_version: str) -> str:
    files = [f"{file.role} sha256 {file.sha256[:8]}" for file in result.inputs[:_MOST_FILES]]
    if len(result.inputs) > _MOST_FILES:
        files.append(f"{count(len(result.inputs) - _MOST_FILES, 'more file')}")
    data = f"{count(result.sequences, 'sequence')} of {count(result.tokens, 'token')}"
    if result.interrupted:
        data += f" (stopped: {result.sequences_planned:,} were asked for)"
    basis = f"recipe {result.recipe.name} (version {result.recipe.version}), reference {result.reference}"
    return "; ".join((", ".join(files), data, basis, f"bf16forensics {tool_version}; layers and heads count from 0"))


def _wrapped(words: str, width: float) -> list[str]:
    return textwrap.wrap(words, int(width), max_lines=3, placeholder=" ...", break_on_hyphens=False) or [""]
