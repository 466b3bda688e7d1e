"""The figure of a localize run, as a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.report.figure_file import check_plot_target as check_plot_target
from bf16forensics.report.figure_file import figure_bytes
from bf16forensics.report.whole_file import write_whole
from bf16forensics.verdict.findings import Judgement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_plot(path: Path, result: LocalizeResult, judgement: Judgement, *, tool_version: str, force: bool) -> None:
    """Draws a run into a file. The same run gives the same bytes.

    Args:
        path: the figure, its format by its suffix; its parents are made.
        result: what was measured.
        judgement: what was concluded.
        tool_version: version of this package, for the footer.
        force: replace an existing file.

    Raises:
        InputError: as for `check_plot_target`; or the file cannot be written.
    """
    check_plot_target(path, force=force)
    write_whole(path, render_plot(result, judgement, tool_version=tool_version, suffix=path.suffix.lower()))


def render_plot(result: LocalizeResult, judgement: Judgement, *, tool_version: str, suffix: str) -> bytes:
    """The figure as the bytes of a file.

    Args:
        result: what was measured; any number of layers and heads.
        judgement: what was concluded about the same heads.
        tool_version: version of this package, for the footer.
        suffix: ".png", ".svg" or ".pdf".
    """

    def drawn() -> "Figure":
        from bf16forensics.report.plot_figure import draw

        return draw(result, judgement, tool_version)

    return figure_bytes(drawn, suffix)
