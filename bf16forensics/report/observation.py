"""The observation of (PK)[T]^T X[T] and of rows with several maxima, for the terminal and for the JSON document."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bf16forensics.evidence.observe_results import (
    HeadObservation,
    LayerObservation,
    Observation,
    PairStatistics,
    RepeatedRow,
)
from bf16forensics.report.glyphs import Glyphs
from bf16forensics.report.jsonio import plain
from bf16forensics.report.layout import BLANK, Line, labelled, row
from bf16forensics.verdict.words import count, head_name, listing, number, percent

#: Most heads, layers and rows of the section, whatever the run's size.
_HEADS = 10
_LAYERS = 3
_ROWS = 20
#: Columns of a cosine.
_CELL = 8
_MATHEMATICS = (
    "(PK)[T]^T X[T] is rank one: its column c is PK[T] times the number X[T][c]. Between two tokens every column has "
    "the cosine of PK, up to a sign; the terms add up as far as the whole matrices agree, cos(PK) cos(X)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    title: str
    read: Callable[[HeadObservation], float | None]
    legend: str
    #: Columns leave narrow tables in falling order of this; 0 never leaves.
    leaves: int = 0


def observation_json(observation: Observation) -> dict[str, object]:
    """The observation as plain values: at most 1,000 rows with several maxima, and how many there are in all."""
    heads = [{"name": head_name(head.layer, head.head), **_fields(head)} for head in observation.heads]
    rows = [{"name": head_name(item.layer, item.head), **_fields(item)} for item in observation.rows]
    built: dict[str, object] = {
        "recipe": observation.recipe,
        "sequences": observation.sequences,
        "pairs_drawn": observation.pairs_drawn,
        "seed": observation.seed,
        "layers": observation.layers,
        "heads": heads,
        "repeated_rows": {
            "counted": observation.rows_counted,
            "total": observation.rows_total if observation.rows_counted else None,
            "listed": len(rows),
            "rows": rows,
        },
    }
    return {key: plain(value) for key, value in built.items()}


def observation_section(
    observation: Observation,
    width: int,
    glyphs: Glyphs,
    *,
    ranking: Sequence[tuple[int, int]] = (),
    top: int = _HEADS,
) -> list[Line]:
    """The section of the terminal report: at most 75 lines from 80 columns on, ending in a blank one.

    Args:
        observation: what was observed.
        width: columns, at least 60; columns of the table that do not fit are left out and named.
        glyphs: signs to use.
        ranking: (layer, head) in the order wanted, as the table of the report has them; empty for the most coherent
            heads first.
        top: heads wanted; 10 are shown at most.
    """
    shown = _ordered(observation, ranking)[: min(top, _HEADS)]
    lines = labelled("observed", _MATHEMATICS, width)
    lines += _table(observation, shown, width)
    lines += _withheld(observation, width)
    lines += _inputs(observation, shown, width)
    return [*lines, *_maxima(observation, width, glyphs), BLANK]


def _ordered(observation: Observation, ranking: Sequence[tuple[int, int]]) -> list[HeadObservation]:
    if ranking:
        known = {(head.layer, head.head): head for head in observation.heads}
        return [known[key] for key in ranking if key in known]

    def coherence(head: HeadObservation) -> float:
        value = head.drawn.mean if head.coherence is None else head.coherence
        return math.inf if math.isnan(value) else -value

    return sorted(observation.heads, key=coherence)


def _table(observation: Observation, shown: Sequence[HeadObservation], width: int) -> list[Line]:
    if not shown:
        return []
    columns, left_out = _fitting(_columns(observation), width)
    titles = [("head", 7), *((column.title, _CELL) for column in columns)]
    lines = [Line(text=row(titles), style="bold")]
    for head in shown:
        cells = [(_cosine(column.read(head)), _CELL) for column in columns]
        lines.append(Line(text=row([(head_name(head.layer, head.head), 7), *cells])))
    if len(shown) < len(observation.heads):
        lines.append(
            Line(text=f"{len(shown)} of {count(len(observation.heads), 'head')}; all are in the JSON document")
        )
    text = "; ".join(column.legend for column in columns if column.legend)
    if left_out:
        text += f". Left out at this width: {', '.join(left_out)}"
    return [*lines, *labelled("legend", f"{text}.", width)]


def _columns(observation: Observation) -> list[_Column]:
    with_x = any(head.matrix_next is not None for head in observation.heads)
    rotated = any(head.rotated_next is not None for head in observation.heads)
    drawn = f"pairs of one sequence: all up to {observation.pairs_drawn}, else as many drawn, seed {observation.seed}"
    columns = [
        _Column(
            title="PK next",
            read=lambda head: head.next.mean,
            legend="PK next: mean cosine of PK between a token and the next, and median, min, max over them",
        ),
        _Column(title="median", read=lambda head: head.next.median, legend="", leaves=5),
        _Column(title="min", read=lambda head: head.next.minimum, legend="", leaves=4),
        _Column(title="max", read=lambda head: head.next.maximum, legend="", leaves=6),
        _Column(title="PK any", read=lambda head: head.drawn.mean, legend=f"any: {drawn}"),
    ]
    if rotated:
        legend = "q next: PK before it is carried back through rotation and QK-norm to the output of W_Q"
        columns.append(_Column(title="q next", read=lambda head: _mean(head.rotated_next), legend=legend, leaves=3))
    if with_x:
        legend = "M: whole matrices, cos(PK) cos(X)"
        columns.append(_Column(title="M next", read=lambda head: _mean(head.matrix_next), legend=legend))
        columns.append(_Column(title="M any", read=lambda head: _mean(head.matrix_drawn), legend="", leaves=2))
        legend = "kappa: M over all pairs of a sequence, weighted by |PK||X|"
        columns.append(_Column(title="kappa", read=lambda head: head.coherence, legend=legend))
    legend = "across: PK of tokens of different sequences"
    return [*columns, _Column(title="across", read=lambda head: head.across_sequences, legend=legend, leaves=1)]


def _fitting(columns: list[_Column], width: int) -> tuple[list[_Column], list[str]]:
    kept, left_out = list(columns), []
    while 7 + len(kept) * (_CELL + 1) > width and any(column.leaves for column in kept):
        leaving = max(kept, key=lambda column: column.leaves)
        kept.remove(leaving)
        left_out.append(leaving.title)
    return kept, left_out


def _withheld(observation: Observation, width: int) -> list[Line]:
    named = [
        f"{head_name(head.layer, head.head)} ({head.nonfinite[0]})" for head in observation.heads if head.nonfinite
    ]
    return labelled("withheld", listing(named, 6), width, most=2) if named else []


def _inputs(observation: Observation, shown: Sequence[HeadObservation], width: int) -> list[Line]:
    """X of the first few layers shown, each followed by the columns of its first head."""
    lines: list[Line] = []
    layers = {layer.layer: layer for layer in observation.layers}
    for number_ in list(dict.fromkeys(head.layer for head in shown if head.layer in layers))[:_LAYERS]:
        layer = layers[number_]
        lines += labelled(f"X of L{number_}", _layer_words(layer), width, most=4)
        head = next(head for head in shown if head.layer == number_)
        if head.columns:
            words = ", ".join(f"{column.column}: {_cosine(column.mean)}" for column in head.columns)
            text = f"columns of {head_name(head.layer, head.head)}, mean cosine to the next token: {words}"
            lines += labelled("", text, width, most=3)
    return lines


def _layer_words(layer: LayerObservation) -> str:
    signs = {1: "+", -1: "-", 0: "+ and -"}
    columns = ", ".join(
        f"{column.column} (mean |X| {number(column.mean_abs)}, {signs[column.sign]} in {percent(column.share)})"
        for column in layer.columns
    )
    return (
        f"cosine {_cosine(layer.next.mean)} to the next token, {_cosine(layer.drawn.mean)} any; columns of equal sign "
        f"{percent(layer.signs_next.mean)} and {percent(layer.signs_drawn.mean)}; largest columns {columns or 'nan'}"
    )


def _maxima(observation: Observation, width: int, glyphs: Glyphs) -> list[Line]:
    ones = f"two or more {glyphs.p_bar} = 1"
    if not observation.rows_counted:
        text = (
            f"rows with {ones}: not counted, recipe {observation.recipe} anchors rows elsewhere than at their maximum"
        )
        return labelled("maxima", text, width)
    if not observation.rows:
        return labelled("maxima", f"no row with {ones} (recipe {observation.recipe})", width)
    shown = observation.rows[:_ROWS]
    text = f"{count(observation.rows_total, 'row')} with {ones} after rounding (recipe {observation.recipe})"
    if len(shown) < observation.rows_total:
        text += f"; the {len(shown)} with most; up to 1,000 are in the JSON document"
    titles = (("head", 7), ("sequence", 8), ("query", 7), ("ones", 5), ("FP32", 5), ("gap nats", 8))
    lines = [*labelled("maxima", text, width), Line(text=f"{row(titles)}  keys", style="bold")]
    lines += [Line(text=_row_words(item, width)) for item in shown]
    legend = "FP32: of the ones, those exactly 1 before rounding; gap: between their scores"
    if not all(item.labelled for item in shown):
        legend += "; *: the label is ignored"
    return [*lines, *labelled("legend", legend, width)]


def _row_words(item: RepeatedRow, width: int) -> str:
    cells = (
        (head_name(item.layer, item.head), 7),
        (str(item.sequence), 8),
        (f"{item.query}{'' if item.labelled else '*'}", 7),
        (str(item.ones), 5),
        (str(item.ones_exact), 5),
        (number(item.gap_nats), 8),
    )
    text = f"{row(cells)}  "
    room = width - len(text)
    for shown in range(len(item.keys), 0, -1):
        more = item.ones - shown
        keys = ", ".join(map(str, item.keys[:shown])) + (f" + {more:,}" if more else "")
        if len(keys) <= room:
            return f"{text}{keys}"
    return text.rstrip()


def _mean(statistics: PairStatistics | None) -> float | None:
    return None if statistics is None else statistics.mean


def _cosine(value: float | None) -> str:
    """Six decimals, five where there is a sign; "-" for what does not exist."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    text = f"{value:.5f}" if value < 0 else f"{value:.6f}"
    return text if float(text) else "0.000000"


def _fields(value: object) -> dict[str, object]:
    """The fields of a dataclass, unconverted, in their order."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
