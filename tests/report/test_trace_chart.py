"""The terminal plot: every key is in it, nothing else is, and its labels say what it shows."""

import math
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bf16forensics.report.envelope import envelope, marked
from bf16forensics.report.glyphs import ASCII, UNICODE
from bf16forensics.report.trace.chart import carries_chart, key_chart

ROWS = 12
#: Unicode 16, chapter 21.1: bits of a braille cell from the left column of dots to the right one.
BRAILLE_BITS = ((0, 3), (1, 4), (2, 5), (6, 7))
SIDES = "│┤|+"


def chart(values, *, keys=None, ones=(), ends=(), width=78, rows=ROWS, dots=True):
    """The lines for a series, with marks at positions."""
    values = np.asarray(values, dtype=np.float64)
    marks = [np.isin(np.arange(len(values)), places) for places in (ones, ends)]
    keys = np.arange(len(values)) if keys is None else np.asarray(keys)
    glyphs = UNICODE if dots else ASCII
    return key_chart(values, keys.astype(np.int64), *marks, width=width, rows=rows, glyphs=glyphs, dots=dots)


def gutter(lines):
    """Characters before the plot in lines without a combining sign: up to the first side."""
    return min(line.index(side) for line in lines[:1] for side in SIDES if side in line) + 1


def dots_of(lines, dots=True, rows=ROWS, width=78):
    """The dots set, [rows of dots, columns of dots], read back from the characters."""
    start = gutter(lines)
    columns = width - start
    down, across = (4, 2) if dots else (2, 1)
    grid = np.zeros((rows * down, columns * across), dtype=bool)
    for number, line in enumerate(lines[:rows]):
        for column, sign in enumerate(line[start:]):
            if dots and 0x2800 <= ord(sign) <= 0x28FF:
                for r, bits in enumerate(BRAILLE_BITS):
                    for c, bit in enumerate(bits):
                        grid[number * 4 + r, column * 2 + c] = bool((ord(sign) - 0x2800) >> bit & 1)
            elif not dots and sign in "'.:":
                grid[number * 2, column] = sign in "':"
                grid[number * 2 + 1, column] = sign in ".:"
    return grid


def expected_rows(values, dot_rows):
    """Row of dots of each value, from the definition of the axis: the larger of 0 and the largest at the top."""
    top, bottom = max(0.0, max(values)), min(0.0, min(values))
    return [round((top - value) / (top - bottom) * (dot_rows - 1)) for value in values]


def strip(lines, label, rows=ROWS):
    """Columns marked in the strip of a label."""
    line = next(line for line in lines[rows:] if line.lstrip().startswith(label))
    start = line.index("│" if "│" in line else "|") + 1
    return [column for column, sign in enumerate(line[start:]) if sign != " "]


series = st.lists(st.floats(-1.0, 1.0, allow_nan=False).map(lambda x: round(x, 6)), min_size=1, max_size=400)


@pytest.mark.parametrize("dots", [True, False], ids=["braille", "ascii"])
@given(values=series)
def test_every_value_is_drawn_where_it_belongs(dots, values):
    lines = chart(values, dots=dots)
    grid = dots_of(lines, dots)
    if max(values) == min(values) == 0:
        return
    rows = expected_rows(values, grid.shape[0])
    runs = min(len(values), grid.shape[1])
    # With fewer values than columns of dots a value has several columns; with more, several share one.
    for position, row in enumerate(rows):
        if runs == len(values):
            columns = [d for d in range(grid.shape[1]) if d * runs // grid.shape[1] == position]
        else:
            run = max(r for r in range(runs) if r * len(values) // runs <= position)
            columns = [run]
        # One dot of latitude: the row is rounded from a quotient that the chart forms in another order.
        assert all(grid[max(row - 1, 0) : row + 2, column].any() for column in columns)


@given(values=series)
def test_nothing_is_drawn_beyond_the_values_and_the_way_to_them(values):
    grid = dots_of(chart(values))
    if max(values) == min(values) == 0:
        return
    rows = [expected_rows([0.0, *values], grid.shape[0])[0], *expected_rows(values, grid.shape[0])]
    runs = min(len(values), grid.shape[1])
    for column in range(grid.shape[1]):
        run = column * runs // grid.shape[1]
        first, last = run * len(values) // runs, (run + 1) * len(values) // runs
        # From the value before the first of the run (rows starts with that of 0) to the last of it.
        inside = rows[first : last + 1]
        drawn = np.flatnonzero(grid[:, column])
        assert len(drawn)
        assert min(inside) - 1 <= drawn.min()
        assert drawn.max() <= max(inside) + 1
        assert (np.diff(drawn) == 1).all()


@pytest.mark.parametrize("dots", [True, False], ids=["braille", "ascii"])
@pytest.mark.parametrize("size", [1, 2, 66, 67, 135, 1000, 16_385, 100_000])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_single_spike_is_never_lost(dots, size, where):
    values = np.zeros(size)
    position = {"first": 0, "middle": size // 2, "last": size - 1}[where]
    values[position] = -3.0
    lines = chart(values, dots=dots, ones=[position], ends=[size - 1])
    assert max(map(cell_len, lines)) <= 78
    grid = dots_of(lines, dots)
    columns = np.flatnonzero(grid[-1])
    width = grid.shape[1]
    share = [(position - 1) * width / size - 1, (position + 2) * width / size + 1]
    assert len(columns)
    assert share[0] <= columns.min()
    assert columns.max() <= share[1]
    # The mark of the key stands under its spike.
    across = 2 if dots else 1
    (marked_at,) = strip(lines, "P")
    assert marked_at in {column // across for column in columns}


def test_lines_and_time_of_a_long_row():
    values = np.cumsum(np.where(np.arange(100_000) % 2, 1.0, -0.99))
    started = time.perf_counter()
    lines = chart(values, ones=range(0, 100_000, 7), ends=range(127, 100_000, 128))
    # Tens of milliseconds on a slow core; a loop over keys would take seconds.
    assert time.perf_counter() - started < 2.0
    assert len(lines) == ROWS + 4
    assert strip(lines, "tiles") == list(range(len(strip(lines, "tiles"))))


@pytest.mark.parametrize("size", [1, 3, 66, 500])
def test_marks_are_where_their_keys_are(size):
    lines = chart(np.ones(size), ones=[0], ends=[size - 1])
    columns = 78 - gutter(lines)
    assert strip(lines, "P") == [0]
    runs = min(size, 2 * columns)
    first_dot = next(dot for dot in range(2 * columns) if dot * runs // (2 * columns) == runs - 1)
    assert strip(lines, "tiles") == [first_dot // 2]


def test_no_marks_no_signs():
    lines = chart([1.0, 2.0])
    assert strip(lines, "P") == strip(lines, "tiles") == []


@given(values=series, dots=st.booleans(), rows=st.integers(2, 20))
def test_labels_are_ends_zero_and_fall(values, dots, rows):
    lines = chart(values, dots=dots, rows=rows)
    start = gutter(lines)
    labels = [
        (number, float(line[: start - 1])) for number, line in enumerate(lines[:rows]) if line[: start - 1].strip()
    ]
    numbers = [value for _, value in labels]
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(numbers)) == len(numbers)
    assert 0.0 in numbers
    high, low = max(0.0, *values), min(0.0, *values)
    zero = next(row for row, value in labels if value == 0)
    # Three digits; the label of an end gives way to that of zero on the same line.
    assert zero == 0 or math.isclose(numbers[0], high, rel_tol=5e-3)
    assert zero == rows - 1 or math.isclose(numbers[-1], low, rel_tol=5e-3) or high == low
    spacing = [b - a for (a, _), (b, _) in pairwise(labels)]
    assert all(step >= 1 for step in spacing)


def test_the_zero_line_is_seen_between_the_values():
    lines = chart([1.0, -1.0], dots=True)
    zero = next(line for line in lines if line.lstrip().startswith("0 "))
    assert "┄" in zero
    assert "-" in next(line for line in chart([1.0, -1.0], dots=False) if line.lstrip().startswith("0 "))


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_zeros_are_one_line_labelled_zero(size):
    lines = chart(np.zeros(size))
    grid = dots_of(lines)
    assert grid.any(axis=1).sum() == 1
    assert grid.all(axis=1).sum() == 1
    assert [line.split()[0] for line in lines[:ROWS] if line[: gutter(lines) - 1].strip()] == ["0"]


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-45, 1.0, 1e38, 1.7e308])
def test_any_magnitude(scale):
    with np.errstate(all="raise"):
        lines = chart(np.array([0.0, 1.0, -1.0, 1.0]) * scale)
    grid = dots_of(lines)
    assert grid[0].any()
    assert grid[-1].any()
    assert float(lines[0].split()[0]) == pytest.approx(scale, rel=5e-3)


def test_what_is_not_finite_is_marked_and_left_out():
    values = [1.0, math.nan, math.inf, 0.5, -math.inf, 0.25]
    lines = chart(values)
    assert len(strip(lines, "not finite")) == 3
    assert float(lines[0].split()[0]) == 1.0
    assert max(map(cell_len, lines)) <= 78
    none = chart([math.nan, math.nan], dots=False)
    assert not dots_of(none, False).any()
    assert not any(line.lstrip().startswith("not finite") for line in chart([1.0, 2.0]))


def ticks(lines):
    """(column of the plot, number) of every tick."""
    base, numbers = lines[-2], lines[-1]
    start = base.index("└") + 1 if "└" in base else base.index("+") + 1
    places = [column for column, sign in enumerate(base[start:]) if sign in "┬+"]
    words = [word for word in numbers.split() if word != "key"]
    return list(zip(places, map(int, words), strict=True))


@pytest.mark.parametrize("size", [1, 2, 5, 20, 66, 67, 100, 1024, 16_384, 100_000])
@pytest.mark.parametrize("dots", [True, False], ids=["braille", "ascii"])
@pytest.mark.parametrize("width", [40, 78, 118])
def test_ticks_name_the_keys_of_their_columns(size, dots, width):
    lines = chart(np.ones(size), dots=dots, width=width)
    columns = width - gutter(lines)
    found = ticks(lines)
    assert found[0] == (0, 0)
    for column, key in found:
        assert abs(key * columns / size - column) <= 1
    assert max(map(cell_len, lines)) <= width


def test_ticks_of_a_descending_walk_name_its_keys():
    keys = [4, 5, 6, 7, 0, 1, 2, 3]
    lines = chart(np.ones(8), keys=keys)
    columns = 78 - gutter(lines)
    for column, key in ticks(lines):
        assert abs(keys.index(key) * columns / 8 - column) <= 1
    assert ticks(lines)[0][1] == 4


def test_large_key_numbers_do_not_run_into_one_another():
    keys = np.arange(60) + 999_999_900
    found = ticks(chart(np.ones(60), keys=keys, width=60))
    assert all(key in keys for _, key in found)


def test_ascii_is_ascii():
    assert all(line.isascii() for line in chart([0.5, -1.0, math.nan], ones=[1], ends=[2], dots=False))


@pytest.mark.parametrize(
    ("encoding", "carries"),
    [
        *(("utf-8", True), ("utf-16", True), ("gb18030", True)),
        *(("ascii", False), ("latin-1", False), ("cp1253", False), (None, False), ("no-such-encoding", False)),
    ],
)
def test_who_can_carry_dots(encoding, carries):
    assert carries_chart(encoding) is carries


@given(values=st.lists(st.floats(allow_nan=True), min_size=1, max_size=60), columns=st.integers(1, 70))
def test_an_envelope_is_least_largest_and_last(values, columns):
    found = envelope(np.array(values), columns)
    count = min(columns, len(values))
    assert list(found.starts) == [c * len(values) // count for c in range(count + 1)]
    for column in range(count):
        run = [v for v in values[found.starts[column] : found.starts[column + 1]] if math.isfinite(v)]
        want = (min(run), max(run), run[-1]) if run else (math.nan,) * 3
        np.testing.assert_array_equal((found.low[column], found.high[column], found.last[column]), want)


@given(marks=st.lists(st.booleans(), min_size=1, max_size=60), columns=st.integers(1, 70))
def test_a_column_is_marked_if_any_of_its_keys_is(marks, columns):
    starts = envelope(np.zeros(len(marks)), columns).starts
    found = marked(np.array(marks), starts)
    assert found.tolist() == [any(marks[a:b]) for a, b in pairwise(starts)]
