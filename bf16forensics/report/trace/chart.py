"""A terminal plot of a series along the keys, in dots of braille or plain ASCII, in which no key is lost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from bf16forensics.report.envelope import Envelope, envelope, marked
from bf16forensics.report.glyphs import Glyphs
from bf16forensics.report.layout import pad
from bf16forensics.verdict.words import number

#: Bits of a braille cell by dot row and dot column.
_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
#: ASCII cells of two dots, one above the other.
_ASCII_CELLS = " '.:"
#: Rows from one label of the y axis to the next, at least, and columns from one tick to the next.
_LABEL_ROWS, _TICK_COLUMNS = 3, 10
#: Least columns of the plot itself.
_NARROWEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signs:
    """Signs of the frame."""

    zero: str
    side: str
    side_tick: str
    corner: str
    base: str
    base_tick: str


_UNICODE = _Signs(zero="\u2504", side="\u2502", side_tick="\u2524", corner="\u2514", base="\u2500", base_tick="\u252c")
_ASCII = _Signs(zero="-", side="|", side_tick="+", corner="+", base="-", base_tick="+")


def carries_chart(encoding: str | None) -> bool:
    """Whether a stream can carry the dots and the frame; None or an unknown name counts as ASCII."""
    try:
        f"\u2800\u28ff{_UNICODE.zero}{_UNICODE.side_tick}{_UNICODE.base_tick}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def key_chart(
    values: NDArray[np.float64],
    keys: NDArray[np.int64],
    is_one: NDArray[np.bool_],
    tile_end: NDArray[np.bool_],
    *,
    width: int,
    rows: int,
    glyphs: Glyphs,
    dots: bool,
) -> list[str]:
    """Plots a series that starts at 0 and keeps each value until the next key.

    Every column shows everything between the least and the largest value of its keys. Below the plot stand the columns
    that hold a key with P-bar = 1, the columns with the end of a tile, the columns with values that are not finite
    (only where there are any; those are left out of the plot), and the x axis with key numbers.

    Args:
        values: [K], K at least 1.
        keys: [K] positions of the keys, in the order of visits.
        is_one: [K] keys with P-bar = 1.
        tile_end: [K] last keys of tiles.
        width: columns of everything, labels included; below 10 columns of plot it is exceeded.
        rows: lines of the plot without the lines below it, at least 2.
        glyphs: signs of the labels.
        dots: braille and box characters; False: ASCII.

    Returns:
        Lines of at most `width` columns without blanks at their ends.
    """
    signs, (across, down) = (_UNICODE, (2, 4)) if dots else (_ASCII, (1, 2))
    scale = _Scale.of(values, rows, down)
    ones = f"{glyphs.p_bar} = 1"
    labels = scale.labels()
    strips = [(ones, "1", is_one), ("tiles", "|", tile_end)]
    if not bool(np.isfinite(values).all()):
        strips.append(("not finite", "!", ~np.isfinite(values)))
    gutter = max(cell_len(text) for text in (*labels.values(), *(label for label, _, _ in strips))) + 1
    columns = max(width - gutter - 1, _NARROWEST)
    drawn = envelope(values, columns * across)
    grid = _grid(values, drawn, scale, columns * across)
    cells = _braille(grid) if dots else _ascii(grid)
    lines = []
    for line in range(rows):
        text = "".join(cells[line])
        if line == scale.zero_row // down:
            text = "".join(signs.zero if cell == " " else cell for cell in text)
        label = labels.get(line)
        side = signs.side if label is None else signs.side_tick
        lines.append(f"{pad(label or '', gutter - 1)} {side}{text}")
    of_column = _columns_of(len(drawn.low), columns, across)
    for label, sign, marks in strips:
        strip = "".join(sign if mark else " " for mark in _strip(marked(marks, drawn.starts), of_column))
        lines.append(f"{pad(label, gutter - 1)} {signs.side}{strip}")
    lines += _axis(keys, drawn.starts, of_column, gutter, columns, signs)
    return [line.rstrip() for line in lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The y axis. Values are divided by the largest magnitude first, so that no difference overflows."""

    unit: float
    #: Ends in units; high is at least 0, low at most 0.
    low: float
    high: float
    #: Lines, and rows of dots of all lines together.
    lines: int
    dot_rows: int

    @classmethod
    def of(cls, values: NDArray[np.float64], lines: int, down: int) -> "_Scale":
        finite = values[np.isfinite(values)]
        unit = float(np.abs(finite).max(initial=0.0)) or 1.0
        low = min(float(finite.min(initial=0.0)) / unit, 0.0)
        high = max(float(finite.max(initial=0.0)) / unit, 0.0)
        return cls(unit=unit, low=low, high=high, lines=lines, dot_rows=lines * down)

    @property
    def zero_row(self) -> int:
        return int(self.rows_of(np.zeros(1))[0])

    def rows_of(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Row of dots of each value, 0 at the top; all in the middle where there is nothing but 0."""
        span = self.high - self.low
        if span == 0:
            return np.full(len(values), (self.dot_rows - 1) // 2, dtype=np.int64)
        return np.rint((self.high - values / self.unit) / span * (self.dot_rows - 1)).astype(np.int64)

    def labels(self) -> dict[int, str]:
        """Label by line: zero, both ends, and every third line that is far enough from those."""
        down = self.dot_rows // self.lines
        zero = self.zero_row // down
        if self.high == self.low:
            return {zero: "0"}
        chosen = {zero: "0"}
        chosen.setdefault(0, number(self.high * self.unit))
        chosen.setdefault(self.lines - 1, number(self.low * self.unit))
        for line in range(self.lines):
            if all(abs(line - other) >= _LABEL_ROWS for other in chosen):
                # The middle of the line.
                share = (line * down + (down - 1) / 2) / (self.dot_rows - 1)
                chosen[line] = number((self.high - share * (self.high - self.low)) * self.unit)
        return chosen


def _grid(values: NDArray[np.float64], drawn: Envelope, scale: _Scale, dot_columns: int) -> NDArray[np.bool_]:
    """Dots set: [dot rows, dot columns]."""
    count = len(drawn.low)
    # Each run of keys also covers the way from the last value before it.
    finite = ~np.isnan(drawn.last)
    position = np.maximum.accumulate(np.where(finite, np.arange(count), -1))
    before = np.where(position[:-1] >= 0, drawn.last[position[:-1]], 0.0)
    before = np.concatenate([np.zeros(1), before])
    top = scale.rows_of(np.where(finite, np.maximum(drawn.high, before), 0.0))
    bottom = scale.rows_of(np.where(finite, np.minimum(drawn.low, before), 0.0))
    # Where keys are fewer than columns, a key covers several: the way to it in the first, its value alone in the rest.
    high = scale.rows_of(np.where(finite, drawn.high, 0.0))
    low = scale.rows_of(np.where(finite, drawn.low, 0.0))
    run = np.arange(dot_columns) * count // dot_columns
    first = np.ones(dot_columns, dtype=np.bool_)
    first[1:] = run[1:] != run[:-1]
    line = np.arange(scale.dot_rows)[:, None]
    upper, lower = np.where(first, top[run], high[run]), np.where(first, bottom[run], low[run])
    return (line >= upper) & (line <= lower) & finite[run]


def _braille(grid: NDArray[np.bool_]) -> list[list[str]]:
    rows, columns = grid.shape[0] // 4, grid.shape[1] // 2
    codes = (grid.reshape(rows, 4, columns, 2) * _BRAILLE[None, :, None, :]).sum(axis=(1, 3))
    return [[chr(0x2800 + int(code)) if code else " " for code in line] for line in codes]


def _ascii(grid: NDArray[np.bool_]) -> list[list[str]]:
    codes = grid[0::2] * 1 + grid[1::2] * 2
    return [[_ASCII_CELLS[int(code)] for code in line] for line in codes]


def _columns_of(runs: int, columns: int, across: int) -> NDArray[np.int64]:
    """Column of the terminal of each run of keys: that of the first dot it covers."""
    return -(-np.arange(runs) * columns * across // runs) // across


def _strip(marks: NDArray[np.bool_], of_column: NDArray[np.int64]) -> list[bool]:
    strip = [False] * (int(of_column[-1]) + 1)
    for column, mark in zip(of_column.tolist(), marks.tolist(), strict=True):
        strip[column] |= mark
    return strip


def _axis(
    keys: NDArray[np.int64],
    starts: NDArray[np.int64],
    of_column: NDArray[np.int64],
    gutter: int,
    columns: int,
    signs: _Signs,
) -> list[str]:
    """The base line with ticks, and the key numbers below them."""
    base, numbers = [signs.base] * columns, [" "] * (gutter + 1 + columns)
    used_until = 0
    for position in _ticks(len(keys), columns):
        run = int(np.searchsorted(starts, position, side="right")) - 1
        column = int(of_column[run])
        text = str(int(keys[position]))
        left = min(max(gutter + 1 + column - (len(text) - 1) // 2, 0), gutter + 1 + columns - len(text))
        if left < used_until or left < 0:
            continue
        base[column] = signs.base_tick
        numbers[left : left + len(text)] = text
        # Two blanks between numbers, so that two are never read as one.
        used_until = left + len(text) + 2
    label = pad("key", gutter - 1)
    line = "".join(numbers)
    if not line[:gutter].strip():
        line = f"{label} {line[gutter:]}"
    return [f"{' ' * gutter}{signs.corner}{''.join(base)}", line]


def _ticks(count: int, columns: int) -> Sequence[int]:
    """Positions of ticks: multiples of a round number."""
    most = max(columns // _TICK_COLUMNS, 1)
    least = count / most
    decade = 10 ** max(math.floor(math.log10(least)), 0) if least > 0 else 1
    step = next(step for step in (decade, 2 * decade, 5 * decade, 10 * decade) if step >= least)
    return range(0, count, step)
