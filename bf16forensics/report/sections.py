"""The sections of the terminal report, the table apart."""

import math
import os
from collections.abc import Sequence

from bf16forensics.investigate.result import BackendUsed, LocalizeResult
from bf16forensics.report.glyphs import Glyphs
from bf16forensics.report.input_words import files_words
from bf16forensics.report.layout import BLANK, Line, labelled, shell
from bf16forensics.report.recipe_words import recipe_words
from bf16forensics.report.table import SHORT
from bf16forensics.verdict.findings import (
    BIAS_WITHOUT_COUPLING,
    CANNOT_JUDGE,
    COMPOUNDING_BIAS,
    NOISE_ABOVE_SAMPLING,
    NOISE_AT_CHANCE,
    Finding,
    Judgement,
)
from bf16forensics.verdict.words import count, number

#: Most notes that the header names.
_NOTES = 3
_STYLES = {"error": "bold red", "warning": "yellow", "note": ""}
_VERDICT_STYLES = {
    COMPOUNDING_BIAS: "bold red",
    NOISE_ABOVE_SAMPLING: "bold yellow",
    BIAS_WITHOUT_COUPLING: "bold yellow",
    CANNOT_JUDGE: "bold",
    NOISE_AT_CHANCE: "bold green",
}


def header(result: LocalizeResult, width: int, glyphs: Glyphs) -> list[Line]:
    """What was read, and how it was computed."""
    recipe = result.recipe
    edge = result.causal or any(window is not None for window in result.layer_windows)
    words = recipe_words(recipe, result.head_size, causal=edge, p_bar=glyphs.p_bar, delta=glyphs.delta)
    basis = f"reference {result.reference}"
    if result.activations is not None:
        basis += f", activations {result.activations}"
    lines = labelled("read", files_words(result.inputs), width, most=3)
    named = result.shape.casefold().startswith(result.kind.casefold())
    shape = result.shape if named else f"{result.kind}: {result.shape}"
    lines += labelled("model", f"{shape}; {_geometry(result)}", width, most=2)
    lines += labelled("recipe", f"{recipe.name} (version {recipe.version}; {basis}); {words}", width, most=4)
    lines += labelled("backend", _backend(result.backend), width, most=2)
    lines += labelled("data", _data(result), width, most=2)
    for note in result.notes[:_NOTES]:
        lines += labelled("note", note, width, most=2)
    if len(result.notes) > _NOTES:
        lines += labelled("", f"and {count(len(result.notes) - _NOTES, 'more note')} in the JSON document", width)
    index = "L1.H7 = layer 1, head 7, counted from 0 (the paper's layer 2, head 8)"
    return [*lines, *labelled("heads", index, width), BLANK]


def verdict(judgement: Judgement, width: int) -> list[Line]:
    """The verdict and how many heads got which."""
    counts = ", ".join(f"{number:,} {SHORT[name]} ({name})" for name, number in judgement.counts() if number)
    return [
        *labelled("VERDICT", judgement.summary, width, style=_VERDICT_STYLES[judgement.verdict], most=3),
        *labelled("", f"heads: {counts or 'none'}", width, most=2),
        BLANK,
    ]


def findings(judgement: Judgement, width: int, room: int) -> list[Line]:
    """The findings within `room` lines, the most important parts first; what does not fit is counted by code."""
    found = judgement.findings
    if not found:
        return [*labelled("findings", "none", width), BLANK]
    blocks = _chosen(found, width, room - 1)
    if len(blocks) == len(found):
        return [*[line for index in sorted(blocks) for line in blocks[index]], BLANK]
    blocks = _chosen(found, width, room - 2)
    missing = [item.code for index, item in enumerate(found) if index not in blocks]
    text = f"and {count(len(missing), 'more finding')} ({', '.join(dict.fromkeys(missing))}) in the JSON document"
    return [*[line for index in sorted(blocks) for line in blocks[index]], *labelled("", text, width, most=1), BLANK]


def message_lines(judgement: Judgement, width: int) -> int:
    """Lines for the message of every finding, the evidence of the first and the blank below."""
    found = judgement.findings
    parts = [_part(item, "message", width) for item in found] + [_part(item, "observed", width) for item in found[:1]]
    return sum(map(len, parts)) + 1


def _chosen(found: Sequence[Finding], width: int, room: int) -> dict[int, list[Line]]:
    """Lines by finding: messages of errors and warnings, evidence of the first, messages of notes, other evidence."""
    serious = [index for index, item in enumerate(found) if item.severity != "note"]
    notes = [index for index, item in enumerate(found) if item.severity == "note"]
    wanted = [(index, "message") for index in serious]
    wanted += [(index, "observed") for index in serious[:1]]
    wanted += [(index, "message") for index in notes]
    wanted += [(index, "observed") for index in (*serious[1:], *notes)]
    wanted += [(index, "inferred") for index in (*serious, *notes)]
    blocks: dict[int, list[Line]] = {}
    messages_end = False
    for index, field in wanted:
        lines = _part(found[index], field, width)
        fits = len(lines) <= room
        # Messages are in order: after the first that does not fit none follows.
        messages_end |= field == "message" and not fits
        if fits and (index in blocks or (field == "message" and not messages_end)):
            blocks[index] = [*blocks.get(index, []), *lines]
            room -= len(lines)
    return blocks


def unchecked(judgement: Judgement, width: int) -> list[Line]:
    """What the run says nothing about."""
    return [*labelled("unchecked", "; ".join(judgement.not_checked), width, most=4)]


def next_steps(judgement: Judgement, width: int, case: str | None) -> list[Line]:
    """What to run next."""
    lines = [] if case is None else labelled("case", os.path.join(case, "case.json"), width)
    label = "next"
    for step in judgement.next_commands:
        lines += shell(label, step, width) if step.startswith("bf16forensics ") else labelled(label, step, width)
        label = ""
    return lines


def closing(result: LocalizeResult, judgement: Judgement, width: int) -> list[Line]:
    """Findings by severity, times and memory."""
    timing = result.timing
    by_severity = dict.fromkeys(("error", "warning", "note"), 0)
    for item in judgement.findings:
        by_severity[item.severity] += 1
    counts = ", ".join(count(value, name) for name, value in by_severity.items())
    text = (
        f"{counts}; analysis {timing.analysis_s:.1f} s (capture {timing.capture_s:.1f} s, evidence "
        f"{timing.evidence_s:.1f} s), loading {timing.load_s:.1f} s, peak memory {timing.peak_rss_bytes / 1e6:,.0f} MB"
    )
    return labelled("done", text, width)


def _part(finding: Finding, field: str, width: int) -> list[Line]:
    if field != "message":
        return labelled("", f"{field}: {getattr(finding, field)}", width, most=3)
    text = f"{finding.code} {finding.name}: {finding.message}"
    return labelled(finding.severity, text, width, style=_STYLES[finding.severity], most=3)


def _backend(used: BackendUsed) -> str:
    if used.hp_products is None:
        return f"{used.name} on {used.device} ({used.why})"
    products = f"high-precision products {used.hp_products}, the recipe's {used.lp_products}"
    return f"{used.name} on {used.device} ({used.why}); {products}"


def _geometry(result: LocalizeResult) -> str:
    window = _window(result)
    softcap = "no soft-cap" if result.softcap is None else f"soft-cap {number(result.softcap)}"
    causal = "causal (bottom-right)" if result.causal else "not causal"
    return f"scale {number(result.scale, 6)}, {causal}, {window}, {softcap}"


def _window(result: LocalizeResult) -> str:
    windows = sorted({window for window in result.layer_windows if window is not None})
    if not windows:
        return "no window"
    text = f"window {', '.join(map(str, windows))} (own key included)"
    layers, full = len(result.layer_windows), result.layer_windows.count(None)
    return text if not full else f"{text} in {layers - full} of {count(layers, 'layer')}"


def _pairs(result: LocalizeResult) -> list[str]:
    """Visible pairs of a head, and rows that took no part; ranges where heads have masks of their own."""
    parts = [f"{_range([head.pairs for head in result.heads])} visible pairs a head"]
    for name, values in (
        ("fully masked row", [head.counts.rows_fully_masked for head in result.heads]),
        ("padding row", [head.counts.rows_padding for head in result.heads]),
    ):
        if any(values):
            parts.append(f"{_range(values)} {name if set(values) == {1} else name + 's'}")
    return parts


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _data(result: LocalizeResult) -> str:
    parts = [f"{count(result.sequences, 'sequence')} of {count(result.tokens, 'token')}"]
    if result.interrupted:
        parts[0] += f" (stopped: {result.sequences_planned:,} were asked for)"
    known = [step for step in result.steps if step is not None]
    if len(known) == len(result.steps) and known:
        span = f"step {known[0]:,}" if len(known) == 1 else f"{len(known)} steps ({min(known):,} to {max(known):,})"
        parts.append(span)
    elif result.steps:
        parts.append(f"{count(len(result.steps), 'step')} of unknown number")
    parts.append(f"{count(result.step_sequences, 'sequence')} a step")
    if math.isfinite(result.loss):
        parts.append(f"mean loss {number(result.loss, 4)}")
    return ", ".join(parts + (_pairs(result) if result.heads else []))
