"""The documentation of findings as text for a terminal and as a Markdown page."""

import textwrap
from collections.abc import Sequence

from bf16forensics.verdict.catalogue import Entry

#: Headings in order, with the field each one shows.
_SECTIONS = (
    ("What it says", "what"),
    ("Why it matters", "why"),
    ("How it is decided", "how"),
    ("Known limits", "limits"),
    ("What would refute it", "would_refute"),
    ("What to do next", "next_step"),
)


def as_text(item: Entry, width: int) -> str:
    """One entry for a terminal, ending in a newline; plain ASCII."""
    lines = [f"{item.code} {item.name} ({item.severity})", item.title]
    for heading, field in _SECTIONS:
        lines += ["", heading, *_wrapped(getattr(item, field), width)]
    lines += ["", "References", *(line for text in item.references for line in _wrapped(text, width))]
    return "\n".join(lines) + "\n"


def as_list(items: Sequence[Entry], width: int) -> str:
    """All codes, one a line where the width allows, ending in a newline."""
    lines = []
    for item in items:
        head = f"{item.code}  {item.severity:<8} "
        lines += textwrap.wrap(
            f"{item.title} ({item.name})",
            width=width,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


def as_markdown(items: Sequence[Entry]) -> str:
    """The page docs/findings.md."""
    lines = [
        "# Findings",
        "",
        "Every finding has a code; `bf16forensics explain CODE` prints the same text as this page. `--fail-on` names",
        "the least severity (note, warning, error) that makes the exit code 1. Codes keep their meaning.",
        "",
        "| code | severity | name | says |",
        "|---|---|---|---|",
        *(f"| [{item.code}](#{item.code.lower()}) | {item.severity} | {item.name} | {item.title} |" for item in items),
    ]
    for item in items:
        lines += ["", f"## {item.code}", "", f"**{item.title}** (`{item.name}`, {item.severity})"]
        for heading, field in _SECTIONS:
            lines += ["", f"### {heading}", "", *_wrapped(getattr(item, field), 118, indent="")]
        lines += ["", "### References", "", *(f"- {text}" for text in item.references)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
