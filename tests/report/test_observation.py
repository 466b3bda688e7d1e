"""The observation in the terminal report and in the JSON document: golden text, bounds, what must be said."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

from bf16forensics.evidence.observe_results import (
    ColumnCosine,
    ColumnSigns,
    HeadObservation,
    LayerObservation,
    Observation,
    PairStatistics,
    RepeatedRow,
)
from bf16forensics.report.glyphs import ASCII, UNICODE
from bf16forensics.report.jsonio import dumps
from bf16forensics.report.observation import observation_json, observation_section


def pairs(mean: float, **fields: Any) -> PairStatistics:
    values = {"pairs": 96, "undefined": 0, "mean": mean, "median": mean + 0.01, "minimum": -0.25, "maximum": 0.999994}
    return PairStatistics(**{**values, **fields})


UNDEFINED = pairs(math.nan, pairs=0, median=math.nan, minimum=math.nan, maximum=math.nan)


def head(layer: int = 0, number: int = 0, **fields: Any) -> HeadObservation:
    values: dict[str, Any] = {
        "layer": layer,
        "head": number,
        "next": pairs(0.999994, median=0.999996),
        "drawn": pairs(0.75),
        "rotated_next": None,
        "rotated_drawn": None,
        "matrix_next": pairs(0.3125),
        "matrix_drawn": pairs(-0.0625),
        "coherence": 0.125,
        "across_sequences": 0.5,
        "columns": (ColumnCosine(column=546, pairs=96, mean=0.98), ColumnCosine(column=678, pairs=95, mean=-0.875)),
        "rows_repeated": 3,
        "rows_exact": 2,
        "most_ones": 5,
        "nonfinite": (),
    }
    return HeadObservation(**{**values, **fields})


def layer(number: int = 0, **fields: Any) -> LayerObservation:
    values: dict[str, Any] = {
        "layer": number,
        "next": pairs(0.3125),
        "drawn": pairs(-0.0833),
        "signs_next": pairs(0.61),
        "signs_drawn": pairs(0.495),
        "columns": (
            ColumnSigns(column=546, mean_abs=3.25, sign=1, share=0.984),
            ColumnSigns(column=678, mean_abs=2.5, sign=-1, share=0.71),
            ColumnSigns(column=12, mean_abs=0.875, sign=0, share=0.5),
        ),
        "nonfinite": (),
    }
    return LayerObservation(**{**values, **fields})


def repeated(number: int = 0, **fields: Any) -> RepeatedRow:
    values: dict[str, Any] = {
        "layer": 0,
        "head": 0,
        "sequence": 2,
        "query": 40 + number,
        "ones": 2,
        "ones_exact": 2,
        "gap_nats": 0.0,
        "keys": (0, 17),
        "labelled": True,
    }
    return RepeatedRow(**{**values, **fields})


def observation(*heads: HeadObservation, **fields: Any) -> Observation:
    values: dict[str, Any] = {
        "recipe": "fa2",
        "sequences": 4,
        "pairs_drawn": 256,
        "seed": 0,
        "layers": (layer(),),
        "heads": heads,
        "rows_counted": True,
        "rows_total": 0,
        "rows": (),
    }
    return Observation(**{**values, **fields})


def mixed() -> Observation:
    """Every kind of cell: rotation, a head that is not finite, a row with many keys, an ignored label."""
    turned = {"rotated_next": pairs(0.41), "rotated_drawn": pairs(0.02)}
    broken = dict.fromkeys(("next", "drawn", "rotated_next", "rotated_drawn", "matrix_next", "matrix_drawn"), UNDEFINED)
    return observation(
        head(0, 0, **turned),
        head(0, 1, coherence=-0.0000004, across_sequences=-0.0123456, **turned),
        head(
            1,
            0,
            **broken,
            coherence=math.nan,
            across_sequences=math.nan,
            columns=(),
            rows_repeated=None,
            rows_exact=None,
            most_ones=None,
            nonfinite=("k[0, 3, 7, 1]",),
        ),
        head(1, 1, coherence=0.875, **turned),
        layers=(layer(0), layer(1)),
        rows_total=1234,
        rows=(
            repeated(1, layer=1, head=1, ones=40, ones_exact=3, gap_nats=0.00171875, keys=tuple(range(100, 116))),
            repeated(2, ones=3, keys=(0, 17, 31), labelled=False),
            repeated(3),
        ),
    )


def text_of(found: Observation, width: int = 80, glyphs: Any = UNICODE, **options: Any) -> str:
    return "".join(f"{line.text}\n" for line in observation_section(found, width, glyphs, **options))


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("width", "name"), [(80, "utf-8"), (80, "ascii"), (100, "utf-8")])
def test_golden_sections(fakes: Any, repository: Any, width: int, name: str) -> None:
    text = text_of(mixed(), width, ASCII if name == "ascii" else UNICODE)
    text.encode(name)
    fakes.check_golden(repository / "tests" / "golden" / f"observe-{width}-{name}.txt", text)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_section_of_any_run_is_bounded(width: int) -> None:
    names = tuple(f"k[{index}, 0, 0, 0]" for index in range(8))
    many = observation(
        *(
            head(index // 64, index % 64, nonfinite=names, rotated_next=pairs(0.1), rotated_drawn=pairs(0.1))
            for index in range(4096)
        ),
        layers=tuple(
            layer(
                number,
                columns=tuple(ColumnSigns(column=99990 + i, mean_abs=1.234e-5, sign=0, share=0.5) for i in range(5)),
            )
            for number in range(64)
        ),
        rows_total=10**9,
        rows=tuple(
            repeated(
                index,
                layer=100,
                head=100,
                query=10**5,
                ones=10**5,
                keys=tuple(range(10**5, 10**5 + 16)),
                labelled=False,
            )
            for index in range(1000)
        ),
    )
    # Ten heads of ten layers, so that as many layers as possible are described.
    lines = text_of(many, width, ranking=[(number, 0) for number in range(10)], top=500).splitlines()
    assert max(map(cell_len, lines)) <= width
    if width >= 80:
        assert len(lines) <= 75
    assert sum(line.startswith("L100.H100") for line in lines) == 20
    assert "10 of 4,096 heads; all are in the JSON document" in lines
    assert "1,000,000,000 rows" in words("\n".join(lines))


def test_what_the_section_must_say() -> None:
    said = words(text_of(mixed(), 100))
    for part in (
        "(PK)[T]^T X[T] is rank one",
        "0.999994",
        "withheld L1.H0 (k[0, 3, 7, 1])",
        "546 (mean |X| 3.25, + in 98 %)",
        "12 (mean |X| 0.875, + and - in 50 %)",
        "cosine 0.312500 to the next token, -0.08330 any; columns of equal sign 61 % and 50 %",
        "columns of L0.H0, mean cosine to the next token: 546: 0.980000, 678: -0.87500",
        "1,234 rows with two or more P\u0304 = 1 after rounding (recipe fa2)",
        "all up to 256, else as many drawn, seed 0",
        "2 42* 3 2 0 0, 17, 31",
        "*: the label is ignored",
    ):
        assert part in said
    plain = text_of(observation(head(), rows_total=1, rows=(repeated(),)))
    assert "withheld" not in plain
    assert "*" not in plain


def test_heads_come_by_coherence_or_by_the_ranking_given() -> None:
    def order(**options: Any) -> list[str]:
        table = text_of(replace(mixed(), rows=()), **options).splitlines()
        return [line.split()[0] for line in table if line.startswith(("L0.", "L1."))]

    assert order() == ["L1.H1", "L0.H0", "L0.H1", "L1.H0"]
    assert order(ranking=[(1, 0), (0, 1), (7, 7), (0, 0), (1, 1)]) == ["L1.H0", "L0.H1", "L0.H0", "L1.H1"]
    assert order(top=2) == ["L1.H1", "L0.H0"]
    assert order(top=0) == []


def test_columns_that_do_not_exist_are_not_shown() -> None:
    bare = head(matrix_next=None, matrix_drawn=None, coherence=None, columns=())
    text = text_of(observation(bare, layers=()), 120)
    assert "q next" not in text
    assert "kappa" not in text
    assert "X of" not in text
    assert "q next" in text_of(mixed(), 120)


def test_columns_left_out_are_named() -> None:
    assert "Left out at this width: max, median, min, q next, M any." in words(text_of(mixed(), 60))
    assert "Left out" not in text_of(mixed(), 120)


def test_rows_that_were_not_counted() -> None:
    uncounted = observation(head(rows_repeated=None), rows_counted=False, recipe="fa4")
    assert "not counted, recipe fa4 anchors rows elsewhere than at their maximum" in words(text_of(uncounted))
    assert observation_json(uncounted)["repeated_rows"] == {"counted": False, "total": None, "listed": 0, "rows": []}
    assert "no row with two or more P-bar = 1 (recipe fa2)" in words(text_of(observation(head()), glyphs=ASCII))


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (0.999994, "0.999994"),
        (1.0, "1.000000"),
        (-0.999994, "-0.99999"),
        (-1e-9, "0.000000"),
        (0.0, "0.000000"),
        (math.nan, "nan"),
    ],
)
def test_cosines_fit_their_column(value: float, cell: str) -> None:
    lines = text_of(observation(head(coherence=value))).splitlines()
    row = next(line for line in lines if line.startswith("L0.H0"))
    assert row.split()[-2] == cell


def test_the_json_part_is_strict_and_keeps_everything() -> None:
    found = mixed()
    document = observation_json(found)
    read = json.loads(dumps(document))
    assert list(read) == ["recipe", "sequences", "pairs_drawn", "seed", "layers", "heads", "repeated_rows"]
    assert [item["name"] for item in read["heads"]] == ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]
    first = read["heads"][0]
    assert first["next"] == {
        "pairs": 96,
        "undefined": 0,
        "mean": 0.999994,
        "median": 0.999996,
        "minimum": -0.25,
        "maximum": 0.999994,
    }
    assert first["columns"][1] == {"column": 678, "pairs": 95, "mean": -0.875}
    assert read["heads"][2]["coherence"] == "nan"
    assert read["heads"][2]["rows_repeated"] is None
    assert read["layers"][1]["columns"][0] == {"column": 546, "mean_abs": 3.25, "sign": 1, "share": 0.984}
    rows = read["repeated_rows"]
    assert (rows["counted"], rows["total"], rows["listed"]) == (True, 1234, 3)
    assert rows["rows"][1] == {
        "name": "L0.H0",
        "layer": 0,
        "head": 0,
        "sequence": 2,
        "query": 42,
        "ones": 3,
        "ones_exact": 3 - 1,
        "gap_nats": 0.0,
        "keys": [0, 17, 31],
        "labelled": False,
    }
    bare = observation_json(observation(replace(head(), matrix_next=None, coherence=None)))
    assert bare["heads"][0]["coherence"] is None  # type: ignore[index]
