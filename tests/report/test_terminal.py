"""The terminal report: goldens, bounds, encodings, what must be said."""

import io
import math
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bf16forensics.recipe.derive import resolve
from bf16forensics.report.glyphs import ASCII, UNICODE, glyphs_for
from bf16forensics.report.layout import labelled, shell
from bf16forensics.report.recipe_words import recipe_words
from bf16forensics.report.terminal import MAX_LINES, render, show
from bf16forensics.verdict.judge import judge


@pytest.fixture
def report(fakes):
    """The report of a run as text."""

    def of(result, **options):
        return render(result, judge(result, command=fakes.COMMAND), **options)

    return of


@pytest.mark.parametrize(("width", "encoding"), [(100, "utf-8"), (80, "utf-8"), (100, "ascii"), (80, "ascii")])
def test_golden_reports(report, fakes, repository, width, encoding):
    text = report(fakes.mixed(), width=width, encoding=encoding, case="case")
    assert max(map(cell_len, text.splitlines())) <= width
    fakes.check_golden(repository / "tests" / "golden" / f"localize-{width}-{encoding}.txt", text)


@pytest.mark.parametrize("name", ["healthy", "two-sequences", "record"])
def test_golden_reports_of_plain_runs(report, fakes, repository, name):
    few = fakes.coupling(sequences=2, defect=fakes.errors(bias_upper=9.0), signal_p=0.5)
    runs = {
        "healthy": fakes.result(*[fakes.head(0, number) for number in range(4)]),
        "two-sequences": fakes.result(
            *[fakes.head(index // 6, index % 6, dw_q=few) for index in range(36)], sequences=2, steps=(101,)
        ),
        "record": fakes.result(
            fakes.head(dw_q=None, spectrum=None),
            kind="record",
            activations=None,
            loss=math.nan,
            steps=(None,),
            softcap=50.0,
            window=128,
            notes=(),
        ),
    }
    fakes.check_golden(repository / "tests" / "golden" / f"localize-{name}.txt", report(runs[name]))


def test_what_the_report_must_say(report, fakes):
    text = " ".join(report(fakes.mixed(), case="out/case").split())
    for part in (
        "sha256 01234567",
        "fa2 (version 1; reference fp64, activations fp32)",
        "compounding bias: 1 of 8 heads, L1.H0",
        "3 ? (cannot judge)",
        "L1.H7 = layer 1, head 7, counted from 0 (the paper's layer 2, head 8)",
        "dropout 0.1 forced to 0",
        "k[0, 3, 7, 1]",
        "case.json",
        "analysis 3.1 s (capture 1.2 s, evidence 2.0 s), loading 0.5 s, peak memory 812 MB",
    ):
        assert part in text
    assert text.count("the paper's layer 2, head 8") == 1


def test_a_ratio_to_an_undetected_gradient_is_in_parentheses(report, fakes):
    def row_of(signal_p):
        text = report(fakes.result(fakes.head(dw_q=fakes.coupling(signal_p=signal_p))))
        return next(line for line in text.splitlines() if line.startswith("L0.H0")), "(err)" in text

    assert "(0.024)" in row_of(0.05)[0]
    assert "(0.024)" in row_of(math.nan)[0]
    assert row_of(math.nan)[1]
    assert " 0.024 " in row_of(0.049)[0]
    assert not row_of(0.049)[1]


def test_1536_heads_stay_within_60_lines(fakes):
    kinds = [
        {},
        {"dw_q": fakes.biased()},
        {"nonfinite": tuple(f"k[0, 0, 0, {index}]" for index in range(300))},
        {"dw_q": None},
        {"dw_q": fakes.coupling(defect=fakes.errors(n_effective=2.0))},
        {"delta_defect": fakes.signed(p=1e-12), "counts": fakes.counts(rows_repeated_max=9, swamped_power_share=0.4)},
    ]
    result = fakes.result(
        *[fakes.head(index // 32, index % 32, **kinds[index % 6]) for index in range(1536)],
        unused_tensors=tuple(f"transformer.h.{index}.attn.q_norm.weight" for index in range(96)),
        notes=tuple("one note of many, with a long text that goes on and on " * 8 for _ in range(50)),
        inputs=fakes.mixed().inputs * 30,
    )
    judgement = judge(result, command=fakes.COMMAND)
    for width in (60, 80, 100, 120):
        for top in (0, 1, 10, 500):
            lines = render(result, judgement, width=width, top=top).splitlines()
            assert len(lines) <= MAX_LINES
            assert any("compounding bias" in line for line in lines)
            assert any("BF401" in line for line in lines)
            if width >= 100:
                shown = sum(line.startswith("L") for line in lines)
                assert shown == top if top <= 10 else shown >= 10


def test_top_is_obeyed(report, fakes):
    result = fakes.result(*[fakes.head(0, number) for number in range(20)])
    for top in (1, 7, 20):
        lines = report(result, top=top).splitlines()
        assert sum(line.startswith("L0.H") for line in lines) == top
    assert "7 of 20 heads; all are in the JSON document" in report(result, top=7)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "no-such-encoding", None])
def test_narrow_encodings_get_plain_words(report, fakes, encoding):
    result = fakes.result(fakes.head(), notes=("caf\u00e9 \u03b4 [bf16] [/x]",))
    text = report(result, encoding=encoding)
    text.encode(encoding if encoding in ("ascii", "cp1252", "latin-1") else "ascii")
    assert "P-bar" in text
    assert "sigma" in text
    assert "[bf16] [/x]" in text
    assert glyphs_for(encoding) is ASCII


def test_wide_encodings_get_signs_in_the_same_layout(report, fakes):
    wide, plain = report(fakes.mixed(), encoding="utf-8"), report(fakes.mixed(), encoding="ascii")
    assert "P\u0304" in wide
    assert glyphs_for("utf-8") is UNICODE

    def table(text):
        return [line for line in text.splitlines() if line.startswith(("L0.", "L1."))]

    assert table(wide) == table(plain)


def test_a_redirected_report_is_plain_and_equals_render(report, fakes, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    result = fakes.mixed()
    for encoding in ("ascii", "cp1252", "utf-8"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
        show(result, judge(result, command=fakes.COMMAND), stream=stream)
        stream.flush()
        assert raw.getvalue().decode(encoding) == report(result, encoding=encoding)
    monkeypatch.setenv("COLUMNS", "80")
    buffer = io.StringIO()
    show(result, judge(result, command=fakes.COMMAND), stream=buffer)
    assert buffer.getvalue() == report(result, encoding=None, width=80)


def test_colour_on_a_terminal_changes_nothing_but_colour(report, fakes, monkeypatch):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    result = fakes.result(fakes.head(nonfinite=("[bf16][/x]",)), notes=("[red]",))
    stream = Terminal()
    show(result, judge(result, command=fakes.COMMAND), stream=stream)
    coloured = stream.getvalue()
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == report(result)


def test_missing_evidence_is_a_dash_and_undefined_is_nan(report, fakes):
    undefined = fakes.coupling(defect=fakes.errors(rho=math.nan, bias_upper=math.nan), sampling_noise=math.nan)
    text = report(fakes.result(fakes.head(0, 0, dw_q=undefined), fakes.head(0, 1, dw_q=None, delta_defect=None)))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("L0.")}
    assert rows["L0.H0"][2] == "nan"
    assert rows["L0.H1"][2] == "-"


FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1e-300, -1e300, 123456.0])


@given(FLOATS, FLOATS, FLOATS, st.integers(min_value=0, max_value=2**40))
def test_any_number_keeps_the_table_within_the_width(fakes, first, second, third, rows):
    head = fakes.head(
        31,
        31,
        dw_q=fakes.coupling(defect=fakes.errors(rho=first, bias=second), norm=third, sampling_noise=abs(first)),
        delta_defect=fakes.signed(mean=second, t=third),
        counts=fakes.counts(rows_repeated_max=rows),
    )
    result = fakes.result(head)
    text = render(result, judge(result), width=100)
    line = next(line for line in text.splitlines() if line.startswith("L31.H31"))
    # Every cell fits its column but for exponents of three digits, which may push the rest to the right.
    assert cell_len(line) <= 100 + 14


def test_wrapping_keeps_labels_and_words():
    lines = labelled("note", "alpha beta gamma", 20)
    assert [line.text for line in lines] == ["note      alpha beta", "          gamma"]
    assert labelled("x", "a " * 100, 30, most=2)[-1].text.endswith(" ...")
    assert [line.text for line in labelled("x", "", 30)] == ["x"]


def test_commands_can_be_copied():
    command = "bf16forensics localize 'a b' " + " ".join(f"--option-{index} value" for index in range(20))
    text = "\n".join(line.text[10:] for line in shell("next", command, 80))
    assert shlex.split(text.replace("\\\n", "")) == shlex.split(command)
    assert max(map(len, text.splitlines())) <= 70


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fa2", ("BF16: P-bar, O", "all else FP32", "delta = rowsum(dO * O)", "tiles 128 x 128 descending")),
        ("paper", ("S - m", "the row sum", "O-bar at every tile", "tiles 512 x 512 ascending")),
        ("sdpa-math", ("delta = rowsum(dP * P)", "no tiles")),
        ("fa2+o=fp16", ("FP16: O",)),
        ("sdpa-math+p_bar=bf16", ("P (normalised)",)),
    ],
)
def test_recipes_in_words(name, parts):
    words = recipe_words(resolve(name), 64)
    for part in parts:
        assert part in words
