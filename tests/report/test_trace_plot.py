"""The figure of trace-head: its files, and what can be read from its panels."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
import matplotlib

from bf16forensics.errors import InputError
from bf16forensics.report.trace.axes import zoom
from bf16forensics.report.trace.figure import draw_trace
from bf16forensics.report.trace.plot import render_trace_plot, write_trace_plot

SUFFIXES = (".png", ".svg", ".pdf")
MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


@pytest.fixture
def drawn(traces):
    def of(trace=None, **context):
        return draw_trace(trace or traces.trace(), traces.context(**context))

    return of


def panel(figure, letter):
    return next(axes for axes in figure.axes if axes.get_label() == f"panel {letter}")


def words(figure):
    return "\n".join(text.get_text() for text in figure.texts)


def line(axes, label=None, marker=None):
    """Coordinates of the one line with a label or marker."""
    (found,) = [
        each
        for each in axes.lines
        if (label is None or each.get_label() == label) and (marker is None or each.get_marker() == marker)
    ]
    return np.asarray(found.get_xdata(), float), np.asarray(found.get_ydata(), float)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_written_whole_alone_and_repeats(traces, tmp_path, suffix):
    path = tmp_path / "new" / f"head{suffix}"
    write_trace_plot(path, traces.trace(), traces.context(), force=False)
    data = path.read_bytes()
    assert data.startswith(MAGIC[suffix])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    if suffix == ".png":
        return
    with matplotlib.rc_context({"font.size": 23.0, "axes.facecolor": "red", "svg.fonttype": "none"}):
        assert render_trace_plot(traces.trace(), traces.context(), suffix=suffix) == data
    assert b"dc:date" not in data
    assert b"CreationDate" not in data


def test_an_existing_file_needs_force_and_the_suffix_is_checked(traces, tmp_path):
    path = tmp_path / "head.svg"
    path.write_text("mine")
    for target, message in ((path, "--force"), (tmp_path / "head.gif", r"\.png, \.svg or \.pdf")):
        with pytest.raises(InputError, match=message):
            write_trace_plot(target, traces.trace(), traces.context(), force=False)
    assert path.read_text() == "mine"
    write_trace_plot(path, traces.trace(), traces.context(), force=True)
    assert path.read_bytes().startswith(MAGIC[".svg"])


def test_title_footer_and_headings(drawn):
    text = " ".join(words(drawn()).split())
    for part in (
        "L1.H2",
        "token 50 of sequence 3 (step 401), feature 20",
        "checkpoint sha256 01234567",
        "recipe fa2 (version 1), reference fp64",
        "walk of fa2+tile_k=all, fp32-prefix",
        "nothing accumulates",
        "within half an ulp",
        "bf16forensics 0.1.0",
        "2 of the ten largest jumps sit at P̄ = 1",
    ):
        assert part in text


def test_delta_errors_of_the_traced_sequence(drawn, traces):
    trace = traces.trace()
    axes = panel(drawn(trace), "a")
    (segments,) = [each for each in axes.collections if hasattr(each, "get_segments")]
    heights = [segment[1][1] for segment in segments.get_segments()]
    np.testing.assert_array_equal(heights, trace.delta_err[0])
    x, y = line(axes, marker="o")
    assert (x[0], y[0]) == (50, trace.delta_err[0, 50])
    second = replace(trace.traced, sequence=4)
    (segments,) = [
        each for each in panel(drawn(traces.trace(traced=second)), "a").collections if hasattr(each, "get_segments")
    ]
    assert len(segments.get_segments()) == 64


def test_the_running_sum_ends_at_the_sum_of_the_head(drawn, traces):
    trace = traces.trace()
    x, y = line(panel(drawn(trace), "b"), marker="o")
    assert y[0] == pytest.approx(trace.delta_err_sum, rel=1e-12)
    assert x[0] == 127


@pytest.mark.parametrize("letter", ["c", "d"])
def test_ones_are_marked_at_their_keys(drawn, traces, letter):
    cumulative = traces.cumulative()
    x, y = line(panel(drawn(), letter), label="P̄ = 1")
    np.testing.assert_array_equal(x, cumulative.keys[cumulative.is_one])
    want = cumulative.v if letter == "c" else cumulative.error
    np.testing.assert_array_equal(y, np.asarray(want[cumulative.is_one], float))


def test_the_error_lasts_from_each_key_to_the_next(drawn, traces):
    error = traces.cumulative().error
    axes = panel(drawn(), "d")
    (steps,) = [each for each in axes.lines if each.get_drawstyle() == "steps-post"]
    np.testing.assert_array_equal(steps.get_ydata(), [*error, error[-1]])
    np.testing.assert_array_equal(steps.get_xdata(), np.arange(161))
    ends = sorted(each.get_xdata()[0] for each in axes.lines if each.get_linestyle() == "--")
    assert ends == [63, 127, 159]


def test_the_zoom_holds_the_largest_jumps(drawn, traces):
    cumulative = traces.cumulative()
    first, last = zoom(cumulative)
    sizes = [abs(jump.size) for jump in cumulative.jumps[:10] if first <= jump.position <= last]
    best = max(
        sum(abs(jump.size) for jump in cumulative.jumps[:10] if start <= jump.position <= start + last - first)
        for start in range(160 - (last - first))
    )
    assert sum(sizes) == pytest.approx(best)
    axes = panel(drawn(), "e")
    (steps,) = [each for each in axes.lines if each.get_drawstyle() == "steps-post"]
    np.testing.assert_array_equal(steps.get_xdata(), np.arange(first, last + 2))
    np.testing.assert_array_equal(steps.get_ydata()[:-1], cumulative.error[first : last + 1])


@pytest.mark.parametrize("keys", [1, 2, 24, 25, 5000])
def test_a_zoom_of_any_row_is_inside_it(traces, keys):
    first, last = zoom(traces.cumulative(keys))
    assert 0 <= first <= last < keys
    assert last - first + 1 == min(keys, max(24, keys // 16))
    flat = traces.cumulative(keys, jumps=(), top_jumps=0, top_jumps_at_ones=0)
    assert zoom(flat)[1] < keys


def test_a_walk_that_descends_is_labelled_with_its_keys(drawn, traces):
    keys = np.concatenate([np.arange(80, 160), np.arange(80)])
    figure = drawn(traces.trace(cumulative=replace(traces.cumulative(), keys=keys)))
    axes = panel(figure, "d")
    assert axes.get_xlabel() == "key, in the order of visits"
    figure.draw_without_rendering()
    for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        if 0 <= place < 160:
            assert int(label.get_text()) == keys[round(place)]


def test_contributions_and_both_signs(drawn, traces):
    trace = traces.trace()
    figure = drawn(trace)
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in panel(figure, "f").patches}
    assert bars == {item.feature: item.contribution for item in trace.token.features}
    (strip,) = [axes for axes in figure.axes if axes.get_label() == "signs"]
    values = np.asarray(strip.collections[0].get_array()).reshape(2, 32)
    by_feature = sorted(trace.token.features, key=lambda item: item.feature)
    # The upper row is dO; rows of the mesh count from below.
    np.testing.assert_array_equal(values[1], [np.sign(item.do) for item in by_feature])
    np.testing.assert_array_equal(values[0], [np.sign(item.o_err) for item in by_feature])


def one_row(traces):
    """A row computed alone: of all others nothing is known."""
    rows = np.full((1, 64), math.nan)
    rows[0, 50] = -2.5e-9
    traced = replace(traces.token_trace().token, delta_err=-2.5e-9)
    return traces.trace(sequences=(3,), delta_err=rows, rows=1, delta_err_sum=-2.5e-9, traced=traced)


def test_rows_that_were_not_computed_are_not_drawn_as_zero(drawn, traces):
    figure = drawn(one_row(traces))
    first, second = panel(figure, "a"), panel(figure, "b")
    assert not first.lines
    assert not second.lines
    assert [text.get_text() for text in first.texts] == ["−2.5e−9"]
    assert [text.get_text() for text in second.texts] == ["one row alone was computed"]
    assert "a bias climbs" not in words(figure)


def shapes(traces):
    """Traces of every odd shape."""
    many = np.where(np.arange(3 * 5000).reshape(3, 5000) % 2, 1e-7, -1.1e-7)
    wide = traces.trace(
        sequences=(3, 4, 5), delta_err=many, num_queries=5000, rows=15_000, delta_err_sum=float(many.sum())
    )
    return {
        "usual": traces.trace(),
        "no gradient": traces.without_gradient(),
        "no backward": traces.without_gradient(token=traces.token_trace()),
        "one key": traces.trace(cumulative=traces.cumulative(1), v_all=np.zeros(1, np.float32)),
        "exact": traces.trace(
            cumulative=traces.cumulative(error=np.zeros(160), jumps=(), top_jumps=0, top_jumps_at_ones=0)
        ),
        "no bound": traces.trace(cumulative=traces.cumulative(half_ulp=None, bound_exceeded=None)),
        "long": replace(wide, cumulative=traces.cumulative(5000), v_all=traces.row(5000)[1]),
        "wide": traces.trace(token=traces.token_trace(count=256)),
        "one row": one_row(traces),
        "nan": traces.trace(cumulative=traces.cumulative(error=np.full(160, math.nan))),
    }


@pytest.mark.parametrize(
    "name", ["usual", "no gradient", "no backward", "one key", "exact", "no bound", "long", "wide", "one row", "nan"]
)
def test_any_shape_is_drawn_without_overlap(drawn, traces, name):
    figure = drawn(shapes(traces)[name], recipe=replace(traces.context().recipe, name="fa2$x^{"))
    figure.draw_without_rendering()
    boxes = {axes.get_label(): axes.get_tightbbox() for axes in figure.axes}
    page = figure.bbox
    for label, box in boxes.items():
        assert page.x0 <= box.x0, label
        assert box.x1 <= page.x1, label
        assert page.y0 <= box.y0, label
    # The strip of signs belongs to the panel above it and touches it.
    panels = [(label, box) for label, box in boxes.items() if label != "signs"]
    assert not [(one, other) for one, a in panels for other, b in panels if one < other and a.overlaps(b)]
    texts = [text.get_window_extent() for text in figure.texts]
    for text, extent in zip(figure.texts, texts, strict=True):
        assert page.x0 <= extent.x0, text.get_text()
        assert extent.x1 <= page.x1, text.get_text()
        # Legends count as part of their panel, and stand at the right of the note: those may share a line.
        inner = [axes.get_window_extent() for axes in figure.axes]
        assert not any(extent.overlaps(box) for box in inner), text.get_text()
        legends = [axes.get_legend().get_window_extent() for axes in figure.axes if axes.get_legend()]
        assert not any(extent.overlaps(box) for box in legends), text.get_text()
    assert not [(i, j) for i, a in enumerate(texts) for j, b in enumerate(texts) if i < j and a.overlaps(b)]


def test_no_tick_label_hides_another(drawn):
    figure = drawn()
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
            inside = [box for box in boxes if box.width > 0 and box.height > 0]
            assert not [1 for a, b in pairwise(inside) if a.overlaps(b)]


def test_powers_of_ten_stand_in_the_label(drawn):
    figure = drawn()
    figure.draw_without_rendering()
    for letter in "abcdef":
        assert panel(figure, letter).yaxis.get_offset_text().get_text() == ""
    assert "10^{-6}" in panel(figure, "a").get_ylabel()


def test_blue_and_orange_differ_in_grey():
    from bf16forensics.report.plot_map import lightness
    from bf16forensics.report.trace.axes import BAND, FAINT, LINE, MARK

    greys = sorted(lightness(matplotlib.colors.to_rgba(colour)) for colour in (LINE, MARK, FAINT, BAND, "white"))
    assert min(b - a for a, b in pairwise(greys)) > 0.05


def test_no_display_is_asked_for(run_python, tmp_path):
    fakes = Path(__file__).with_name("trace_fakes.py")
    code = (
        f"import sys; sys.path.insert(0, {str(fakes.parent)!r}); import trace_fakes as f; from pathlib import Path; "
        "from bf16forensics.report.trace.plot import write_trace_plot; "
        f"write_trace_plot(Path({str(tmp_path / 'a.png')!r}), f.trace(), f.context(), force=False); "
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    result = run_python(["-c", code], env={"DISPLAY": "", "MPLBACKEND": "TkAgg"})
    assert result.stdout.split() == ["False", "False"], result.stderr
