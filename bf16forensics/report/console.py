"""Lines of a report on a stream: in colour on a terminal, plain otherwise, never with what the stream cannot carry."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from bf16forensics.report.layout import Line


def show_lines(lines: Callable[[int, str | None], Sequence[Line]], stream: TextIO | None = None) -> None:
    """Writes a report.

    Args:
        lines: makes the report for a number of columns and an encoding.
        stream: where to; standard output by default.
    """
    target = sys.stdout if stream is None else stream
    console = Console(file=target, highlight=False, markup=False)
    made = lines(console.width if console.is_terminal else _width_of_files(), getattr(target, "encoding", None))
    if not console.is_terminal:
        target.write(text_of(made))
        return
    for line in made:
        console.print(Text(line.text, style=line.style), soft_wrap=True)


def text_of(lines: Sequence[Line]) -> str:
    """The lines as plain text, each ending in a newline."""
    return "".join(f"{line.text}\n" for line in lines)


def encodable(line: Line, encoding: str | None) -> Line:
    """The line with what a stream cannot carry written as escapes; names of files and tensors may hold anything.

    Args:
        line: the line.
        encoding: of the stream; None or an unknown name counts as ASCII.
    """
    name = encoding or "ascii"
    try:
        text = line.text.encode(name, "backslashreplace").decode(name)
    except LookupError:
        text = line.text.encode("ascii", "backslashreplace").decode("ascii")
    return Line(text=text, style=line.style)


def _width_of_files() -> int:
    """Columns where no terminal says how many: what COLUMNS asks for, else 100."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() else 100
