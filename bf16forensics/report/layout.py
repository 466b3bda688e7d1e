"""Lines of text with a style, and how they are wrapped. Plain strings: nothing here is read as markup."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

#: Columns of the labels at the left.
LABEL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the report."""

    text: str
    #: Style for terminals, such as "bold red"; colour never carries a meaning of its own.
    style: str = ""


BLANK = Line(text="")


def labelled(label: str, text: str, width: int, *, style: str = "", most: int | None = None) -> list[Line]:
    """A label and its text, wrapped and indented by `LABEL` columns.

    Args:
        label: at most `LABEL` - 1 columns.
        text: the text; words longer than a line are cut over lines.
        width: columns.
        style: style of every line.
        most: lines at most; what is left out is marked by "...".
    """
    wrapped = textwrap.wrap(" ".join(text.split()), width=width - LABEL, break_on_hyphens=False) or [""]
    if most is not None and len(wrapped) > most:
        wrapped = [*wrapped[: most - 1], f"{wrapped[most - 1][: width - LABEL - 4].rstrip()} ..."]
    labels = [label, *[""] * (len(wrapped) - 1)]
    return [
        Line(text=f"{head:<{LABEL}}{part}".rstrip(), style=style) for head, part in zip(labels, wrapped, strict=True)
    ]


def shell(label: str, command: str, width: int) -> list[Line]:
    """A shell command, continued by backslashes so that it can be copied. Words are never cut."""
    lines, current = [], ""
    for word in command.split(" "):
        if current and len(current) + 1 + len(word) > width - LABEL - 2:
            lines.append(f"{current} \\")
            current = f"  {word}"
        else:
            current = f"{current} {word}" if current else word
    labels = [label, *[""] * len(lines)]
    return [Line(text=f"{head:<{LABEL}}{part}") for head, part in zip(labels, [*lines, current], strict=True)]


def pad(text: str, width: int, *, left: bool = False) -> str:
    """Pads to `width` columns as a terminal counts them (a combining sign takes none)."""
    blanks = " " * max(width - cell_len(text), 0)
    return text + blanks if left else blanks + text


def row(cells: Sequence[tuple[str, int]]) -> str:
    """One line of a table: the first cell to the left, the others to the right."""
    first, *rest = cells
    parts = [pad(*first, left=True), *(pad(text, width) for text, width in rest)]
    return " ".join(parts).rstrip()
