"""The terminal report of trace-head: a head by token, a token by feature, a feature key by key; no colour needed."""

from typing import TextIO

from bf16forensics.evidence.trace.results import HeadTrace
from bf16forensics.report.console import encodable, show_lines, text_of
from bf16forensics.report.glyphs import Glyphs, glyphs_for
from bf16forensics.report.input_words import files_words
from bf16forensics.report.layout import BLANK, Line, labelled, shell
from bf16forensics.report.recipe_words import recipe_words
from bf16forensics.report.trace.advice import next_commands
from bf16forensics.report.trace.chart import carries_chart, key_chart
from bf16forensics.report.trace.context import TraceContext
from bf16forensics.report.trace.tables import feature_table, jump_table, token_table
from bf16forensics.report.trace.words import (
    bound_words,
    delta_words,
    ends_words,
    exists_words,
    head_words,
    jumps_words,
    place,
    ties_words,
)
from bf16forensics.verdict.words import count

_WIDEST, _NARROWEST = 120, 80
#: Most features and jumps shown, and lines of the chart.
_FEATURES, _JUMPS, _CHART = 6, 10, 10
#: Most notes, and lines of each: far above what a trace has. What a reader must know is not left to the JSON document.
_NOTES, _NOTE_LINES = 12, 5


def render_trace(
    trace: HeadTrace, context: TraceContext, *, width: int = 100, top: int = 10, encoding: str | None = "utf-8"
) -> str:
    """The report as plain text ending in a newline.

    Args:
        trace: what was found out.
        context: where it comes from.
        width: columns; below 80 is taken as 80, above 120 as 120.
        top: rows of the head in the table of tokens, and at most so many features and jumps in theirs.
        encoding: of the stream that will take the text; characters that it lacks are replaced, dots by ASCII.

    Returns:
        Text without control sequences that `encoding` can encode.
    """
    return text_of(_lines(trace, context, width, top, encoding))


def show_trace(trace: HeadTrace, context: TraceContext, *, top: int = 10, stream: TextIO | None = None) -> None:
    """Writes the report to a stream: in colour on a terminal, plain otherwise. Arguments as for `render_trace`."""
    show_lines(lambda width, encoding: _lines(trace, context, width, top, encoding), stream)


def _lines(trace: HeadTrace, context: TraceContext, width: int, top: int, encoding: str | None) -> list[Line]:
    columns = min(max(width, _NARROWEST), _WIDEST)
    glyphs = glyphs_for(encoding)
    lines = _header(trace, context, columns, glyphs)
    lines += token_table(trace, columns, glyphs, top=top)
    if trace.token is not None:
        lines += feature_table(trace.token, context, columns, glyphs, top=min(top, _FEATURES))
    lines += _cumulative(trace, columns, glyphs, top=top, dots=carries_chart(encoding))
    lines += _closing(trace, context, columns, glyphs)
    return [encodable(line, encoding) for line in lines]


def _header(trace: HeadTrace, context: TraceContext, width: int, glyphs: Glyphs) -> list[Line]:
    """What was read, and how it was computed."""
    recipe = context.recipe
    words = recipe_words(recipe, context.head_size, causal=context.causal, p_bar=glyphs.p_bar, delta=glyphs.delta)
    basis = f"version {recipe.version}; reference {context.reference}"
    if context.activations is not None:
        basis += f", activations {context.activations}"
    named = context.shape.casefold().startswith(context.kind.casefold())
    shape = context.shape if named else f"{context.kind}: {context.shape}"
    lines = labelled("read", files_words(context.inputs), width, most=3)
    lines += labelled("model", f"{shape}; {context.geometry}; stored {context.storage}", width, most=4)
    lines += labelled("recipe", f"{recipe.name} ({basis}); {words}", width, most=4)
    for note in trace.notes[:_NOTES]:
        lines += labelled("note", note, width, most=_NOTE_LINES)
    if len(trace.notes) > _NOTES:
        lines += labelled("", f"and {count(len(trace.notes) - _NOTES, 'more note')} in the JSON document", width)
    lines += labelled("head", head_words(trace), width)
    return [*lines, *labelled(glyphs.delta, delta_words(trace, glyphs.delta), width), BLANK]


def _cumulative(trace: HeadTrace, width: int, glyphs: Glyphs, *, top: int, dots: bool) -> list[Line]:
    """One feature key by key."""
    cumulative = trace.cumulative
    what = (
        f"feature {cumulative.feature} of {place(trace.traced)} over {count(len(cumulative.keys), 'visible key')}, by "
        f"{cumulative.accumulator} (walk of {cumulative.walk_recipe}): {cumulative.meaning}"
    )
    lines = labelled("sum", what, width, most=9)
    if len(cumulative.keys):
        chart = key_chart(
            cumulative.error,
            cumulative.keys,
            cumulative.is_one,
            cumulative.tile_end,
            width=width - 2,
            rows=_CHART,
            glyphs=glyphs,
            dots=dots,
        )
        lines += [BLANK, Line(text=f"error of the running sum of {glyphs.p_bar} V, lp - hp, by key", style="bold")]
        lines += [Line(text=text) for text in chart]
    lines += jump_table(trace, width, glyphs, top=min(top, _JUMPS))
    style = "bold red" if cumulative.bound_exceeded else ""
    lines += labelled("jumps", jumps_words(trace, glyphs.p_bar), width)
    lines += labelled("bound", f"{bound_words(cumulative)}; {exists_words(cumulative)}", width, style=style)
    return [*lines, *labelled("end", ends_words(cumulative), width)]


def _closing(trace: HeadTrace, context: TraceContext, width: int, glyphs: Glyphs) -> list[Line]:
    """The final rounding of the row, and what to run next."""
    lines = [] if trace.ties is None else labelled("ties", ties_words(trace.ties, glyphs.p_bar), width)
    label = "next"
    for step in next_commands(trace, context):
        lines += shell(label, step, width)
        label = ""
    found = context.environment
    versions = f"bf16forensics {found.tool_version}, torch {found.torch}, NumPy {found.numpy}, {found.device}"
    return [*lines, *labelled("done", f"{context.elapsed_s:.1f} s; {versions}", width)]
