"""The file of a figure: refused early where it could not be written, drawn without a display, put in place whole."""

import io
import os
import secrets
from contextlib import suppress
from pathlib import Path

from bf16forensics.errors import InputError
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.verdict.findings import Judgement

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
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link; name the file itself")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file; name a file for the figure")
    if path.exists() and not force:
        raise InputError(f"{path} exists; pass --force to replace it, or name another file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(f"{folder} is not a folder that can be written; choose another for the figure {path.name}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError("a figure needs matplotlib, which is missing here; install bf16forensics[plot]") from error


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
    drawn = render_plot(result, judgement, tool_version=tool_version, suffix=path.suffix.lower())
    target = Path(os.path.abspath(path))
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as stream:
            stream.write(drawn)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    finally:
        with suppress(OSError):
            beside.unlink()


def render_plot(result: LocalizeResult, judgement: Judgement, *, tool_version: str, suffix: str) -> bytes:
    """The figure as the bytes of a file.

    Args:
        result: what was measured; any number of layers and heads.
        judgement: what was concluded about the same heads.
        tool_version: version of this package, for the footer.
        suffix: ".png", ".svg" or ".pdf".
    """
    import matplotlib

    from bf16forensics.report.plot_figure import draw

    date = _DATES[suffix]
    buffer = io.BytesIO()
    with matplotlib.rc_context():
        # Whatever the user's own configuration says, the same run gives the same figure.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "bf16forensics", "pdf.fonttype": 42, "hatch.linewidth": 0.6})
        figure = draw(result, judgement, tool_version)
        figure.savefig(
            buffer,
            format=suffix.removeprefix("."),
            dpi=min(_DPI, _MOST_DOTS / max(figure.get_size_inches())),
            metadata=None if date is None else {date: None},
        )
    return buffer.getvalue()
