"""One heat map with its colour bar, every cell of it readable in grey."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.patches import Rectangle

from bf16forensics.report.plot_panels import LETTERS, Panel
from bf16forensics.verdict.findings import COMPOUNDING_BIAS
from bf16forensics.verdict.words import number

#: Either map has one direction of lightness, so that grey print keeps the order; blue and orange stay apart for the
#: common kinds of colour blindness. Dark is large.
SEQUENTIAL = LinearSegmentedColormap.from_list("", ("#fdf3cf", "#d9c36b", "#8f8a79", "#4f5a78", "#0a1f4d"))
DIVERGING = LinearSegmentedColormap.from_list("", ("#e0f1ff", "#8fc6f7", "#b4b4b4", "#b8701f", "#4a1c04"))

#: How a cell without a value looks.
UNDEFINED: Final[dict[str, Any]] = {"facecolor": "white", "edgecolor": "#8a8a8a", "hatch": "/////", "linewidth": 0.4}
#: Side of a cell, in inches, from which it has room for a number.
_NUMBERED_CELL = 0.3


def heat_map(axes: Axes, bar: Axes, panel: Panel, signs: Mapping[tuple[int, int], str], cell: float) -> None:
    """Draws a panel.

    Args:
        axes: takes the map; (layers, heads) squares.
        bar: takes the colour bar.
        panel: what to show.
        signs: letter by (layer, head).
        cell: side of a cell in inches, which decides whether it holds a number.
    """
    layers, heads = panel.values.shape
    colours = DIVERGING if panel.diverging else SEQUENTIAL
    norm = LogNorm(panel.low, panel.high) if panel.log else Normalize(panel.low, panel.high)
    inside = np.ma.masked_invalid(np.clip(panel.values, panel.low, panel.high))
    mesh = axes.pcolormesh(
        np.arange(heads + 1) - 0.5,
        np.arange(layers + 1) - 0.5,
        inside,
        cmap=colours,
        norm=norm,
        edgecolors="white",
        linewidth=min(0.8, 3 * cell),
    )
    axes.set(xlim=(-0.5, heads - 0.5), ylim=(layers - 0.5, -0.5))
    for axis, size, label, room in ((axes.xaxis, heads, "head", 0.2), (axes.yaxis, layers, "layer", 0.14)):
        axis.set_ticks(range(0, size, _stride(cell, room)))
        axis.set_label_text(label, size=8)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_linewidth(0.6)
    for (layer, head), value in np.ndenumerate(panel.values):
        paint = None if math.isnan(value) else colours(norm(float(inside[layer, head])))
        _cell(
            axes,
            cell,
            (layer, head),
            signs.get((layer, head), ""),
            None if paint is None else panel.text(value),
            paint,
        )
    defined = panel.values[~np.isnan(panel.values)]
    below, beyond = bool((defined < panel.low).any()), bool((defined > panel.high).any())
    extend = ("both" if beyond else "min") if below else ("max" if beyond else "neither")
    scale = axes.figure.colorbar(mesh, cax=bar, orientation="horizontal", extend=extend)
    scale.minorticks_off()
    scale.set_ticks(panel.ticks, labels=[number(tick).replace("-", "\u2212") for tick in panel.ticks])
    if panel.diverging:
        bar.axvline(math.sqrt(panel.low * panel.high) if panel.log else 0.0, color="black", linewidth=0.8)
    bar.tick_params(labelsize=7, length=2)
    bar.set_xlabel(panel.unit, size=7.5, labelpad=1)


def _cell(
    axes: Axes,
    side: float,
    key: tuple[int, int],
    letter: str,
    value: str | None,
    paint: tuple[float, float, float, float] | None,
) -> None:
    """Letter, number, hatching and outline of one cell; `value` and `paint` are None where nothing is defined."""
    layer, head = key
    if paint is None:
        axes.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, zorder=2, **UNDEFINED))
    ink = "white" if paint is not None and lightness(paint) < 0.45 else "black"
    numbered = value is not None and side >= _NUMBERED_CELL
    # Points of the letter: most of a small cell, less than half of one that holds a number too.
    size = min(10.0, 72 * side * (0.36 if numbered else 0.55))
    halo = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"} if paint is None else None
    weight = "bold" if letter == LETTERS[COMPOUNDING_BIAS] else "normal"
    y = layer - (0.17 if numbered else 0.0)
    axes.text(head, y, letter, size=size, weight=weight, color=ink, ha="center", va="center", bbox=halo, zorder=4)
    if numbered and value is not None:
        points = min(7.0, 72 * side * 0.25)
        words = value.replace("-", "\u2212")
        axes.text(head, layer + 0.23, words, size=points, color=ink, ha="center", va="center", zorder=4)
    if letter == LETTERS[COMPOUNDING_BIAS]:
        # White around black: seen on the darkest cell and on the lightest. Inside the cell: neighbours stay whole.
        corner = (head - 0.44, layer - 0.44)
        for colour, points, zorder in (("white", 3.6, 5), ("black", 2.0, 6)):
            line = points * min(1.0, side / 0.3)
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=colour, linewidth=line, zorder=zorder))


def lightness(paint: tuple[float, float, float, float]) -> float:
    """Lightness as grey print shows it, 0 to 1 (luma of ITU-R BT.709); paint is red, green, blue, alpha in 0 to 1."""
    red, green, blue, _ = paint
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _stride(cell: float, room: float) -> int:
    """Every how many-th cell gets a tick so that labels have `room` inches each."""
    return next(stride for stride in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if stride * cell >= room)
