"""The documentation of every finding code: the source of `explain`, of docs/findings.md and of texts in findings."""

import difflib
import functools
from dataclasses import dataclass

from bf16forensics.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a code means. Plain ASCII text, one paragraph a field."""

    #: "BF301".
    code: str
    #: Kebab-case name.
    name: str
    #: "note", "warning" or "error".
    severity: str
    #: One line.
    title: str
    #: What the finding states.
    what: str
    #: Why a reader should care.
    why: str
    #: Formula and thresholds.
    how: str
    #: Where the finding can mislead.
    limits: str
    #: What would show it wrong.
    would_refute: str
    #: What to do about it.
    next_step: str
    #: Where the reasoning comes from.
    references: tuple[str, ...]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Every entry, by code."""
    from bf16forensics.verdict import entries_bias, entries_inputs, entries_triggers, entries_undecided

    rooms = (entries_triggers, entries_bias, entries_inputs, entries_undecided)
    return tuple(sorted((item for room in rooms for item in room.ENTRIES), key=lambda item: item.code))


def entry(code: str) -> Entry:
    """The entry of a code; case and surrounding blanks do not matter.

    Raises:
        InputError: there is no such code; the message names the nearest ones.
    """
    wanted = code.strip().upper()
    known = {item.code: item for item in entries()}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    hint = f"nearest: {', '.join(near)}" if near else f"codes run from {min(known)} to {max(known)}"
    raise InputError(f"unknown finding code {code.strip()!r}; {hint}; list all with: bf16forensics explain")
