"""The file of a figure: refused early where it could not be written, drawn without a display, put in place whole."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError
from bf16forensics.report.whole_file import check_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What can be written, by the suffix of the file, with the field of its metadata that holds the time of writing.
_DATES = {".png": None, ".svg": "Date", ".pdf": "CreationDate"}
#: Dots an inch of PNG, and dots along the longer side of figures that are too large for that.
_DPI, _MOST_DOTS = 200, 20_000


def check_plot_target(path: Path, *, force: bool) -> None:
    """Refuses a figure that could not be written at the end; call it before a long run.

    Raises:
        InputError: the suffix is unknown, the file may not be replaced, its folder not be written, or matplotlib is
            not installed.
    """
    if path.suffix.lower() not in _DATES:
        *others, last = _DATES
        raise InputError(f"{path} names no format of a figure; let it end in {', '.join(others)} or {last}")
    check_target(path, force=force, what="figure")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError("a figure needs matplotlib, which is missing here; install bf16forensics[plot]") from error


def figure_bytes(draw: "Callable[[], Figure]", suffix: str) -> bytes:
    """A figure as the bytes of a file; the same figure gives the same bytes.

    Args:
        draw: makes the figure; called with matplotlib's own settings, whatever the user's are.
        suffix: ".png", ".svg" or ".pdf".
    """
    import matplotlib

    date = _DATES[suffix]
    buffer = io.BytesIO()
    with matplotlib.rc_context():
        # Whatever the user's own configuration says, the same run gives the same figure.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "bf16forensics", "pdf.fonttype": 42, "hatch.linewidth": 0.6})
        figure = draw()
        figure.savefig(
            buffer,
            format=suffix.removeprefix("."),
            dpi=min(_DPI, _MOST_DOTS / max(figure.get_size_inches())),
            metadata=None if date is None else {date: None},
        )
    return buffer.getvalue()
