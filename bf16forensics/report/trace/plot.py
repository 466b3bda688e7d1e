"""The figure of a trace-head run, as a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.evidence.trace.results import HeadTrace
from bf16forensics.report.figure_file import check_plot_target, figure_bytes
from bf16forensics.report.trace.context import TraceContext
from bf16forensics.report.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_trace_plot(path: Path, trace: HeadTrace, context: TraceContext, *, force: bool) -> None:
    """Draws a trace into a file. The same trace gives the same bytes.

    Args:
        path: the figure, its format by its suffix; its parents are made.
        trace: what was found out.
        context: where it comes from.
        force: replace an existing file.

    Raises:
        InputError: as for `check_plot_target`; or the file cannot be written.
    """
    check_plot_target(path, force=force)
    write_whole(path, render_trace_plot(trace, context, suffix=path.suffix.lower()))


def render_trace_plot(trace: HeadTrace, context: TraceContext, *, suffix: str) -> bytes:
    """The figure as the bytes of a file.

    Args:
        trace: what was found out.
        context: where it comes from.
        suffix: ".png", ".svg" or ".pdf".
    """

    def drawn() -> "Figure":
        from bf16forensics.report.trace.figure import draw_trace

        return draw_trace(trace, context)

    return figure_bytes(drawn, suffix)
