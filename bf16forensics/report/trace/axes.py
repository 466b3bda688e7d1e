"""The panels of the figure of trace-head, each on axes of its own; every kind of mark has its own shape."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from bf16forensics.evidence.trace.results import CumulativeTrace, HeadTrace, TokenTrace
from bf16forensics.report.envelope import envelope
from bf16forensics.report.trace.words import signed
from bf16forensics.verdict.words import count, percent

#: Blue and orange, which stay apart for the common kinds of colour blindness, and greys.
LINE, MARK, FAINT, BAND = "#0a4f8f", "#d55e00", "#8a8a8a", "#dedede"
#: More values than this are drawn as the range of each column; more marks than this are drawn small.
_MOST_VALUES, _COLUMNS, _MANY_MARKS = 4000, 1500, 60
#: More tiles or sequences than this get no line each.
_MOST_LINES = 40


def delta_by_token(axes: Axes, trace: HeadTrace) -> None:
    """The error of delta of every row of the traced sequence, the traced token marked."""
    token = trace.traced
    values = trace.delta_err[trace.sequences.index(token.sequence)]
    _frame(axes, "query", "δ error")
    axes.axhline(0.0, color="black", linewidth=0.6)
    if len(values) <= _MOST_VALUES:
        at = np.arange(len(values))
        axes.vlines(at, 0.0, np.nan_to_num(values), color=LINE, linewidth=min(1.5, 300 / max(len(values), 1)))
    else:
        _range(axes, values)
    if math.isfinite(values[token.token]):
        axes.plot(token.token, values[token.token], marker="o", markersize=6, fillstyle="none", color=MARK)
    axes.set_xlim(-0.02 * len(values) - 0.5, 1.02 * len(values) - 0.5)
    _units(axes)


def delta_sum(axes: Axes, trace: HeadTrace) -> None:
    """The running sum of the error of delta over all rows traced, sequence by sequence."""
    values = trace.delta_err.reshape(-1)
    running = np.cumsum(np.nan_to_num(values, nan=0.0))
    _frame(axes, "row, sequence after sequence", "sum of δ error")
    axes.axhline(0.0, color="black", linewidth=0.6)
    sequences, queries = trace.delta_err.shape
    if 1 < sequences <= _MOST_LINES:
        for border in range(1, sequences):
            axes.axvline(border * queries - 0.5, color=FAINT, linewidth=0.5, linestyle=(0, (1, 2)))
    _line(axes, np.arange(len(running)), running)
    axes.plot(len(running) - 1, running[-1], marker="o", markersize=4, color=LINE)
    axes.set_xlim(-0.02 * len(values), 1.03 * len(values))
    _units(axes)


def sum_words(trace: HeadTrace) -> str:
    """Where the running sum ends."""
    return f"a bias climbs, noise wanders; {count(trace.rows, 'row')}, sum {signed(trace.delta_err_sum, 4)}"


def values_along_keys(axes: Axes, trace: HeadTrace) -> None:
    """V of the traced feature along the sequence, keys with P-bar = 1 marked."""
    values, cumulative = trace.v_all.astype(np.float64), trace.cumulative
    _frame(axes, "key", f"V[:, {cumulative.feature}]")
    if len(values) <= _MOST_VALUES:
        axes.plot(np.arange(len(values)), values, ".", color=FAINT, markersize=3.0, label="V")
    else:
        _range(axes, values, colour=FAINT, label="V")
    axes.axhline(0.0, color="black", linewidth=0.6)
    _ones(axes, cumulative.keys, cumulative.v.astype(np.float64), cumulative)
    axes.set_xlim(-0.02 * len(values), 1.02 * len(values))
    _units(axes)


def negative_words(trace: HeadTrace) -> str:
    """How one-sided V is."""
    values = trace.v_all[np.isfinite(trace.v_all)]
    if not len(values):
        return "no finite V"
    return f"{percent(float((values < 0).mean()))} of V negative, mean {signed(float(values.mean(dtype=np.float64)))}"


def error_along_keys(axes: Axes, cumulative: CumulativeTrace, first: int, last: int) -> None:
    """The error of the running sum from position `first` to `last`: P-bar = 1, tile ends and half an ulp are marked."""
    place = slice(first, last + 1)
    at, error = np.arange(first, last + 1), cumulative.error[place]
    few = last - first < _MANY_MARKS
    _frame(axes, "key" if _is_ascending(cumulative) else "key, in the order of visits", "error of the running sum")
    if cumulative.half_ulp is not None:
        bound = cumulative.half_ulp[place]
        where, low, high = _thinned(at, -bound, bound)
        axes.fill_between(where, low, high, step="post", color=BAND, linewidth=0, label="± half an ulp")
    axes.axhline(0.0, color="black", linewidth=0.6)
    ends = at[cumulative.tile_end[place]]
    if len(ends) <= _MOST_LINES:
        for number, end in enumerate(ends):
            label = None if number else "tile end"
            axes.axvline(end, color="black", linewidth=0.8, linestyle=(0, (4, 3)), label=label)
    else:
        heights = np.full(len(ends), 0.012)
        axes.plot(
            ends, heights, "|", color="black", markersize=4, transform=axes.get_xaxis_transform(), label="tile end"
        )
    # Each value lasts until the next key, the last one too.
    _line(axes, np.append(at, last + 1), np.append(error, error[-1]), step=True)
    if few:
        axes.plot(at, error, ".", color=LINE, markersize=4)
    _ones(axes, at, error, cumulative, place)
    margin, keys = 0.02 * (last - first) + 0.5, cumulative.keys
    axes.set_xlim(first - margin, last + margin)

    def label_of(position: float, _: int | None) -> str:
        index = round(position)
        return str(int(keys[index])) if 0 <= index < len(keys) and abs(index - position) < 1e-9 else ""

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(label_of))
    _units(axes)


def zoom(cumulative: CumulativeTrace) -> tuple[int, int]:
    """First and last position of the region that holds most of the ten largest jumps."""
    keys = len(cumulative.keys)
    length = min(keys, max(24, keys // 16))
    weight = np.zeros(keys + 1)
    for jump in cumulative.jumps[:10]:
        weight[jump.position + 1] = abs(jump.size) if math.isfinite(jump.size) else 0.0
    summed = np.cumsum(weight)
    inside = summed[length:] - summed[: keys + 1 - length]
    # Of equally good regions the middle one: the jumps then stand inside and not at its edge.
    best = np.flatnonzero(inside >= inside.max() * (1 - 1e-12))
    first = int(best[len(best) // 2])
    return first, first + length - 1


def contributions(axes: Axes, strip: Axes, token: TokenTrace) -> None:
    """dO * (O_lp - O_hp) by feature, and below it the two signs."""
    items = sorted(token.features, key=lambda item: item.feature)
    at = np.array([item.feature for item in items])
    values = np.array([item.contribution for item in items])
    _frame(axes, "", "dO · (O_lp − O_hp)")
    above = values > 0
    axes.bar(at[above], values[above], width=0.85, color=MARK, linewidth=0)
    axes.bar(at[~above], values[~above], width=0.85, color=LINE, linewidth=0)
    axes.axhline(0.0, color="black", linewidth=0.6)
    axes.tick_params(labelbottom=False)
    signs = np.array([[np.sign(item.do) for item in items], [np.sign(item.o_err) for item in items]])
    edges = np.append(at - 0.5, at[-1] + 0.5)
    colours = ListedColormap(["#ffffff", "#b8b8b8", "#1a1a1a"])
    strip.pcolormesh(edges, np.array([0.0, 1.0, 2.0]), signs[::-1], cmap=colours, vmin=-1, vmax=1)
    strip.set_yticks([1.5, 0.5], labels=["sign dO", "sign error"], fontsize=7.5)
    strip.set_xlabel("feature  (black +, white −, grey 0)", fontsize=8)
    strip.tick_params(labelsize=7.5, length=2)
    strip.axhline(1.0, color="black", linewidth=0.6)
    strip.spines[:].set_linewidth(0.6)
    for each in (axes, strip):
        each.set_xlim(edges[0], edges[-1])
    strip.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    _units(axes)


def without(axes: Axes, words: str) -> None:
    """A panel that has nothing to show, and why."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(FAINT)
    axes.text(0.5, 0.5, words, ha="center", va="center", fontsize=9, transform=axes.transAxes, parse_math=False)


def ones_words(cumulative: CumulativeTrace) -> str:
    """How many keys the triangles mark."""
    return f"{count(int(np.count_nonzero(cumulative.is_one)), 'key')} at P̄ = 1"


def _is_ascending(cumulative: CumulativeTrace) -> bool:
    return bool((np.diff(cumulative.keys) > 0).all())


def _frame(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7.5, length=2.5)
    axes.spines[:].set_linewidth(0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)


def _ones(
    axes: Axes,
    at: NDArray[np.int64],
    values: NDArray[np.float64],
    cumulative: CumulativeTrace,
    place: slice | None = None,
) -> None:
    is_one = cumulative.is_one[slice(None) if place is None else place]
    size = 5.0 if int(np.count_nonzero(is_one)) <= _MANY_MARKS else 3.0
    axes.plot(
        at[is_one],
        values[is_one],
        "^",
        color=MARK,
        markersize=size,
        markeredgecolor="black",
        markeredgewidth=0.4,
        linestyle="none",
        label="P̄ = 1",
        zorder=4,
    )


def _line(axes: Axes, at: NDArray[np.int64], values: NDArray[np.float64], *, step: bool = False) -> None:
    """A line, or the range of each column where there are too many values to be seen one by one."""
    if len(values) > _MOST_VALUES:
        _range(axes, values, int(at[0]))
        return
    axes.plot(at, values, color=LINE, linewidth=1.0, drawstyle="steps-post" if step else "default")


def _range(
    axes: Axes, values: NDArray[np.float64], first: int = 0, *, colour: str = LINE, label: str | None = None
) -> None:
    drawn = envelope(np.asarray(values, dtype=np.float64), _COLUMNS)
    where = first + drawn.starts
    low, high = _held(drawn.low), _held(drawn.high)
    axes.fill_between(where, low, high, color=colour, linewidth=0.7, step="post", label=label)


def _thinned(
    at: NDArray[np.int64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Places and two series, one step longer; in few columns the least of the one and the largest of the other."""
    if len(at) > _MOST_VALUES:
        below, above = envelope(low, _COLUMNS), envelope(high, _COLUMNS)
        return np.append(at[below.starts[:-1]], at[-1] + 1), _held(below.low), _held(above.high)
    return np.append(at, at[-1] + 1), _held(low), _held(high)


def _held(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(values, values[-1])


def _units(axes: Axes) -> None:
    """Puts the power of ten of the y axis into its label, where no heading is in its way."""
    largest = max(map(abs, axes.get_ylim()))
    exponent = math.floor(math.log10(largest)) if largest > 0 and math.isfinite(largest) else 0
    if -3 <= exponent <= 3:
        return
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 10.0**exponent:.3g}".replace("-", "−")))
    axes.set_ylabel(f"{axes.get_ylabel()}  $\\times 10^{{{exponent}}}$", fontsize=8)
