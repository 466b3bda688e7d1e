"""The line about ties: which heads, which rows, what it says."""

import dataclasses
import json
import math

import pytest

from bf16forensics.report.document import document
from bf16forensics.report.glyphs import ASCII, UNICODE
from bf16forensics.report.jsonio import dumps
from bf16forensics.report.terminal import MAX_LINES, render
from bf16forensics.report.ties import ties
from bf16forensics.verdict.judge import judge


@pytest.fixture
def line(fakes):
    """The line of a run as one text."""

    def of(result, glyphs=ASCII, width=100):
        found = ties(result, judge(result, command=fakes.COMMAND), width, glyphs)
        assert len(found) <= 4
        assert all(len(part.text) <= width for part in found)
        return " ".join(" ".join(part.text for part in found).split())

    return of


def test_the_class_with_most_rows_is_told(fakes, line):
    few, many = fakes.tie_class(rows=30), fakes.tie_class(ones_min=5, ones_max=8, rows=1204)
    text = line(fakes.result(fakes.head(1, 2, ties=fakes.ties(few, many))))
    assert text == (
        "ties L1.H2: 1,204 rows with 5 to 8 P-bar = 1, error of O +0.198 ulp (s.e. 0.006, law +0.201), 49 % ties, "
        "97 % same sign"
    )
    assert "with 5 to 8 P\u0304 = 1," in line(fakes.result(fakes.head(1, 2, ties=fakes.ties(many))), UNICODE)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"same_sign_share": math.nan}, "49 % ties, no residue"),
        ({"error_ulp_mean": -0.2, "law_ulp_mean": 0.0}, "error of O -0.2 ulp (s.e. 0.006, law 0)"),
        ({"standard_error": math.nan}, "(s.e. nan, law +0.201)"),
    ],
)
def test_words(fakes, line, fields, words):
    assert words in line(fakes.result(fakes.head(ties=fakes.ties(fakes.tie_class(**fields)))))


def test_the_rounding_of_o_bar_is_named(fakes, line):
    statistics = fakes.ties(fakes.tie_class(), point="o_bar")
    assert "error of O-bar +0.198 ulp" in line(fakes.result(fakes.head(ties=statistics)))


def test_two_heads_in_the_order_of_the_ranking(fakes, line):
    """The biased head ranks first; heads with hardly any such rows, or none, are passed over."""
    statistics = fakes.ties(fakes.tie_class())
    run = fakes.result(
        fakes.head(0, 0, ties=statistics),
        fakes.head(0, 1, ties=fakes.ties(fakes.tie_class(rows=19))),
        fakes.head(0, 2, ties=fakes.ties(rows_beyond=400)),
        fakes.head(0, 3),
        fakes.head(1, 0, ties=statistics),
        fakes.head(1, 1, ties=statistics, dw_q=fakes.biased()),
    )
    text = line(run)
    assert [word for word in text.split() if word.endswith(":")] == ["L1.H1:", "L0.H0:"]


def test_no_line_without_such_rows(fakes, line):
    assert line(fakes.result(fakes.head(), fakes.head(0, 1, ties=fakes.ties(rows_beyond=3)))) == ""


@pytest.mark.parametrize("width", [60, 100, 120])
def test_the_report_keeps_its_bounds(fakes, width):
    statistics = fakes.ties(*(fakes.tie_class(ones_min=5, ones_max=8, rows=10**9) for _ in range(5)))
    heads = [fakes.head(layer, number, ties=statistics) for layer in range(20) for number in range(8)]
    run = fakes.result(*heads)
    text = render(run, judge(run, command=fakes.COMMAND), width=width, encoding="ascii")
    assert "\nties " in text
    assert len(text.splitlines()) <= (MAX_LINES if width >= 100 else 2 * MAX_LINES)
    assert max(map(len, text.splitlines())) <= width


def test_every_field_is_in_the_document(fakes):
    statistics = fakes.ties(fakes.tie_class(), fakes.tie_class(ones_min=3, ones_max=3, z=math.nan), rows_beyond=7)
    run = fakes.result(fakes.head(), fakes.head(0, 1, ties=statistics))
    built = document(run, judge(run, command=fakes.COMMAND), command=fakes.COMMAND, environment=fakes.ENVIRONMENT)
    none, found = (head["ties"] for head in json.loads(dumps(built))["heads"])
    assert none is None
    assert list(found) == ["point", "format", "classes", "rows_beyond"]
    assert list(found["classes"][0]) == [field.name for field in dataclasses.fields(fakes.tie_class())]
    assert found["classes"][0]["bits_dropped"] == [0.0, 0.75, 0.1875, 0.0625]
    assert found["classes"][1]["z"] == "nan"
    assert found["rows_beyond"] == 7


def test_no_message_of_a_finding_makes_room_for_the_line(fakes):
    """A run with a finding of nearly every kind fills the report: its ties are in the JSON document only."""
    run = fakes.mixed()
    judgement = judge(run, command=fakes.COMMAND)
    assert ties(run, judgement, 100, ASCII)
    text = render(run, judgement, width=100, encoding="ascii", case="case")
    assert "\nties " not in text
    assert all(finding.code in text for finding in judgement.findings)
