"""The figure of a run: its files, its refusals, and what can be read from it."""

import errno
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("matplotlib")
import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bf16forensics.errors import InputError
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.report.plot import check_plot_target, render_plot, write_plot
from bf16forensics.report.plot_figure import draw
from bf16forensics.report.plot_map import DIVERGING, SEQUENTIAL, lightness
from bf16forensics.report.plot_panels import LETTERS, panels
from bf16forensics.verdict.findings import VERDICTS
from bf16forensics.verdict.judge import judge

SUFFIXES = (".png", ".svg", ".pdf")
MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


@pytest.fixture
def mixed(fakes: ModuleType) -> LocalizeResult:
    return fakes.mixed()  # type: ignore[no-any-return]


def drawn(result: LocalizeResult) -> Figure:
    return draw(result, judge(result), "0.1.0")


def rendered(result: LocalizeResult, suffix: str = ".svg") -> bytes:
    return render_plot(result, judge(result), tool_version="0.1.0", suffix=suffix)


def write(path: Path, result: LocalizeResult, *, force: bool = False) -> None:
    write_plot(path, result, judge(result), tool_version="0.1.0", force=force)


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def hatched(figure: Figure, index: int) -> set[tuple[int, int]]:
    """(layer, head) of the hatched cells of one map."""
    patches = [patch for patch in figure.axes[2 * index].patches if patch.get_hatch() and isinstance(patch, Rectangle)]
    return {(round(patch.get_y() + 0.5), round(patch.get_x() + 0.5)) for patch in patches}


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".PNG"])
def test_a_file_is_written_whole_and_alone(tmp_path: Path, mixed: LocalizeResult, suffix: str) -> None:
    path = tmp_path / "new" / f"run{suffix}"
    write(path, mixed)
    data = path.read_bytes()
    assert data.startswith(MAGIC[suffix.lower()])
    assert len(data) > 10_000
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_run_gives_the_same_bytes(mixed: LocalizeResult, suffix: str) -> None:
    first = rendered(mixed, suffix)
    with matplotlib.rc_context({"font.size": 23.0, "axes.facecolor": "red", "svg.fonttype": "none"}):
        assert rendered(mixed, suffix) == first
    assert b"dc:date" not in first
    assert b"CreationDate" not in first


def test_global_settings_are_left_alone(mixed: LocalizeResult) -> None:
    with matplotlib.rc_context({"font.size": 7.5}):
        # Asking for the backend would choose one.
        names = [name for name in matplotlib.rcParams if name != "backend"]
        before = {name: matplotlib.rcParams[name] for name in names}
        rendered(mixed, ".png")
        assert {name: matplotlib.rcParams[name] for name in names} == before


def test_an_existing_file_needs_force(tmp_path: Path, mixed: LocalizeResult) -> None:
    path = tmp_path / "run.svg"
    path.write_text("mine")
    with pytest.raises(InputError, match="--force"):
        write(path, mixed)
    assert path.read_text() == "mine"
    write(path, mixed, force=True)
    assert path.read_bytes() == rendered(mixed)


@pytest.mark.parametrize("name", ["run.gif", "run", ".png", "run.png.txt"])
def test_other_suffixes_are_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
        check_plot_target(tmp_path / name, force=True)


def test_what_is_no_file_is_refused(tmp_path: Path, mixed: LocalizeResult) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "elsewhere.png")
    (tmp_path / "file").write_text("mine")
    for name in ("folder.png", "link.png"):
        with pytest.raises(InputError, match=name):
            check_plot_target(tmp_path / name, force=True)
    with pytest.raises(InputError, match=r"file is not a folder"):
        write(tmp_path / "file" / "run.png", mixed)


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, mixed: LocalizeResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"cannot write .*run\.svg: No space left"):
        write(tmp_path / "run.svg", mixed)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"install bf16forensics\[plot\]"):
        check_plot_target(tmp_path / "run.png", force=False)


def test_title_footer_and_legend(mixed: LocalizeResult) -> None:
    figure = drawn(mixed)
    text = " ".join(words(figure).split())
    assert judge(mixed).summary in text
    for part in ("01234567", "fedcba98", "00ff00ff", "32 sequences", "fa2 (version 1)", "fp64", "bf16forensics 0.1.0"):
        assert part in text
    legend = [entry.get_text() for entry in figure.legends[0].get_texts()]
    for (verdict, heads), entry in zip(judge(mixed).counts(), legend, strict=False):
        assert entry.startswith(f"{LETTERS[verdict]} = {verdict} ({heads} head")
    assert legend[-1] == "hatched = not defined (nan)"


def test_every_cell_has_its_letter_and_number(mixed: LocalizeResult) -> None:
    figure = drawn(mixed)
    for axes in figure.axes[::2]:
        found = {
            (round(t.get_position()[1]), t.get_position()[0]): t.get_text()
            for t in axes.texts
            if len(t.get_text()) == 1
        }
        assert found == {(head.layer, head.head): LETTERS[head.verdict] for head in judge(mixed).heads}
    numbers = [[t.get_text() for t in axes.texts if len(t.get_text()) > 1] for axes in figure.axes[::2]]
    assert "3.6" in numbers[1]
    assert "+9.2" in numbers[2]
    assert "\u22126.5" in numbers[2]


def test_compounding_bias_is_outlined_and_nothing_else(mixed: LocalizeResult) -> None:
    for axes in drawn(mixed).axes[::2]:
        thick = [p for p in axes.patches if isinstance(p, Rectangle) and not p.get_fill() and p.get_linewidth() >= 2]
        assert {(round(p.get_y() + 0.44), round(p.get_x() + 0.44)) for p in thick} == {(1, 0)}


def test_letters_are_one_each() -> None:
    assert set(LETTERS) == set(VERDICTS)
    assert sorted(LETTERS.values()) == sorted("BSd?n")


def test_undefined_cells_are_hatched(fakes: ModuleType) -> None:
    broken = fakes.coupling(defect=fakes.errors(rho=math.nan), total=fakes.errors(bias_upper=math.nan))
    result = fakes.result(fakes.head(0, 0), fakes.head(0, 1, dw_q=broken), num_layers=1, num_heads=3)
    figure = drawn(result)
    # Head 2 was not analysed at all.
    assert [hatched(figure, index) for index in range(3)] == [{(0, 1), (0, 2)}, {(0, 1), (0, 2)}, {(0, 2)}]
    whole = fakes.result(fakes.head(0, 0), num_layers=1, num_heads=1)
    assert "hatched" not in "".join(entry.get_text() for entry in drawn(whole).legends[0].get_texts())


def test_zero_and_infinity_are_drawn_at_the_ends(fakes: ModuleType) -> None:
    exact = fakes.errors(rho=0.0, bias=0.0, bias_upper=0.0)
    huge = fakes.errors(rho=math.inf, bias_upper=math.inf)
    below = fakes.errors(bias_upper=-0.5)
    heads = [fakes.head(0, i, dw_q=fakes.coupling(defect=e, total=e)) for i, e in enumerate((exact, huge, below))]
    result = fakes.result(*heads, num_layers=1, num_heads=3)
    rho, bias, _ = panels(result, judge(result))
    assert (rho.values[0, 0], rho.values[0, 1]) == (-math.inf, math.inf)
    assert math.isfinite(rho.high - rho.low)
    assert bias.low * bias.high == pytest.approx(1.0)
    assert not any(hatched(drawn(result), index) for index in range(3))
    assert rendered(result)


def test_the_larger_bound_of_the_two_parts_is_shown(fakes: ModuleType) -> None:
    dw_q = fakes.coupling(defect=fakes.errors(bias_upper=0.25), total=fakes.errors(bias_upper=0.75))
    result = fakes.result(fakes.head(0, 0, dw_q=dw_q))
    limit = judge(result).heads[0].harmless_limit
    assert panels(result, judge(result))[1].values[0, 0] == 0.75 / limit


def test_scales_are_centred_and_hold_what_matters(fakes: ModuleType) -> None:
    for t, end in ((0.5, 6.0), (-8.2, 9.0), (70.0, 12.0)):
        result = fakes.result(fakes.head(delta_defect=fakes.signed(t=t)))
        defect = panels(result, judge(result))[2]
        assert (defect.low, defect.high) == (-end, end)
    for rho, ends in ((0.02, (-3.0, 0.0)), (20.0, (-3.0, 1.5)), (1e-9, (-6.0, 0.0))):
        result = fakes.result(fakes.head(dw_q=fakes.coupling(defect=fakes.errors(rho=rho))))
        panel = panels(result, judge(result))[0]
        assert (panel.low, panel.high) == ends


@pytest.mark.parametrize("colours", [SEQUENTIAL, DIVERGING], ids=["sequential", "diverging"])
def test_lightness_falls_from_end_to_end(colours: Any) -> None:
    values = [lightness(colours(float(x))) for x in np.linspace(0, 1, 65)]
    assert all(a > b for a, b in pairwise(values))
    assert values[0] - values[-1] > 0.7


def without_x(fakes: ModuleType) -> LocalizeResult:
    output = fakes.head().output_err
    return fakes.result(  # type: ignore[no-any-return]
        fakes.head(0, 0, dw_q=None, output_err=replace(output, mean_ulp=-0.003)),
        fakes.head(0, 1, dw_q=None, counts=fakes.counts(rows=200, rows_repeated_max=50)),
        fakes.head(0, 2, dw_q=None, delta_defect=None, counts=fakes.counts(rows=0)),
        num_layers=1,
        num_heads=3,
    )


def test_a_record_without_x_shows_the_forward_pass(fakes: ModuleType) -> None:
    result = without_x(fakes)
    defect, output, repeated = panels(result, judge(result))
    assert ("defect" in defect.title, "O" in output.title, "repeated" in repeated.title) == (True, True, True)
    np.testing.assert_array_equal(defect.values, [[0.7, 0.7, math.nan]])
    np.testing.assert_array_equal(output.values, [[-0.003, 0.0004, 0.0004]])
    np.testing.assert_array_equal(repeated.values, [[0.0, 25.0, math.nan]])
    assert output.low == -output.high
    assert output.high >= 0.003
    assert rendered(result, ".png").startswith(MAGIC[".png"])


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 40), (40, 1), (30, 20)])
def test_any_shape_stays_on_the_page(fakes: ModuleType, layers: int, heads: int) -> None:
    cells = [fakes.head(i, j) for i in range(layers) for j in range(heads)]
    figure = drawn(fakes.result(*cells, num_layers=layers, num_heads=heads))
    boxes = [axes.get_position() for axes in figure.axes]
    assert len(boxes) == 6
    assert all(box.x0 > 0 and box.y0 > 0 and box.x1 < 1 and box.y1 < 1 for box in boxes)
    width, height = figure.get_size_inches()
    maps = boxes[::2]
    assert all(not a.overlaps(b) for a in maps for b in maps if a is not b)
    assert all(math.isclose(box.width * width / heads, box.height * height / layers, rel_tol=1e-9) for box in maps)
    # The lowest colour bar stays above the legend.
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent().transformed(figure.transFigure.inverted())
    assert legend.y1 < min(axes.get_tightbbox().transformed(figure.transFigure.inverted()).y0 for axes in figure.axes)


def test_a_run_without_heads_is_all_hatched(fakes: ModuleType) -> None:
    figure = drawn(fakes.result(num_layers=1, num_heads=2))
    assert [len(hatched(figure, index)) for index in range(3)] == [2, 2, 2]


def test_text_is_no_formula(mixed: LocalizeResult) -> None:
    odd = replace(judge(mixed), summary="cannot judge: $x^{ (recipe a$b)")
    assert render_plot(mixed, odd, tool_version="0.1.0", suffix=".svg")


@pytest.fixture
def record(tmp_path: Path) -> list[object]:
    generator = torch.Generator().manual_seed(5)
    shape = (2, 2, 6, 8)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name in ("q", "k", "v", "do")}
    save_file(tensors, tmp_path / "record.safetensors")
    return ["--record", tmp_path / "record.safetensors", "--layout", "bhtd"]


def test_the_command_writes_and_replaces_the_figure(
    run_cli: Callable[..., Any], record: list[object], tmp_path: Path
) -> None:
    path = tmp_path / "run.svg"
    args = ["localize", *record, "--plot", path, "--json"]
    plain = run_cli(["localize", *record, "--json"])
    assert run_cli(args).exit_code == plain.exit_code
    data = path.read_bytes()
    assert b"repeated maxima" in data
    refused = run_cli(args)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--force" in refused.stderr
    assert run_cli([*args, "--force"]).exit_code == plain.exit_code
    assert path.read_bytes() == data


def test_no_display_is_asked_for(run_python: Callable[..., Any], record: list[object], tmp_path: Path) -> None:
    args = ["localize", *map(str, record), "--plot", str(tmp_path / "run.png")]
    code = (
        f"import sys; from bf16forensics.__main__ import main; code = main({args!r}); "
        "sys.exit(7 if 'matplotlib.pyplot' in sys.modules else code)"
    )
    result = run_python(["-c", code], env={"DISPLAY": "", "MPLBACKEND": "TkAgg"})
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "run.png").read_bytes().startswith(MAGIC[".png"])


@pytest.mark.parametrize(
    ("target", "message"), [("run.gif", r"\.png, \.svg or \.pdf"), ("case/run.png", "lies in the case")]
)
def test_the_command_refuses_before_anything_is_read(
    run_cli: Callable[..., Any], tmp_path: Path, target: str, message: str
) -> None:
    args = ["localize", "--record", tmp_path / "absent.pt", "-o", tmp_path / "case", "--plot", tmp_path / target]
    result = run_cli(args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr)
    assert result.stderr.count("\n") == 1


def test_the_command_names_the_extra_before_anything_is_read(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run_cli(["localize", "--record", tmp_path / "absent.pt", "--plot", tmp_path / "run.png"])
    assert result.exit_code == 2
    assert "install bf16forensics[plot]" in result.stderr
