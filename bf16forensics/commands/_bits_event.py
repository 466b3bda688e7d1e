"""An addition of a traced row, found again in its case: `bits --event CASE:L1.H7:t718:f20:k652`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.attention.row_walk import RowWalk
    from bf16forensics.evidence.trace.event import TraceEvent
    from bf16forensics.floats.bits import Bits
    from bf16forensics.floats.formats import FloatFormat
    from bf16forensics.floats.literal import Operand
    from bf16forensics.floats.pattern import Pattern
    from bf16forensics.report.row_trace import RowTrace

_EVENT = re.compile(r"(.+):L([0-9]{1,6})\.H([0-9]{1,6})((?::[stfk][0-9]{1,12})+)", re.DOTALL)
_FORM = "write CASE:L1.H7:t718:f20:k652, with :s3 for the sequence where the case has traced several"
_NAMES = {"s": "sequence", "t": "token", "f": "feature", "k": "key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Which addition is meant; every number 0-based."""

    case: Path
    layer: int
    head: int
    #: None: the only one that the case has traced for the token.
    sequence: int | None
    token: int
    feature: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedEvent:
    """An addition of a traced row and its explanation."""

    bits: "Bits"
    #: What of the row it is: numbers and names, plain values for JSON.
    facts: dict[str, object]
    #: The same as sentences.
    about: tuple[str, ...]


def parse_event(text: str) -> Event:
    """Reads the name of an event; its parts may stand in any order behind the head.

    Raises:
        InputError: another form, a part that is missing, or one given twice.
    """
    match = _EVENT.fullmatch(text)
    if match is None:
        raise InputError(f"--event {text!r} names no event; {_FORM}")
    parts: dict[str, int] = {}
    for part in match[4].split(":")[1:]:
        if part[0] in parts:
            raise InputError(f"--event {text!r} names its {_NAMES[part[0]]} twice; {_FORM}")
        parts[part[0]] = int(part[1:])
    for letter in "tfk":
        if letter not in parts:
            raise InputError(f"--event {text!r} lacks the {_NAMES[letter]} (:{letter}N); {_FORM}")
    return Event(
        case=Path(match[1]),
        layer=int(match[2]),
        head=int(match[3]),
        sequence=parts.get("s"),
        token=parts["t"],
        feature=parts["f"],
        key=parts["k"],
    )


def explain_event(
    event: Event, accumulator: str, *, target: "FloatFormat | None", mode: str, overflow: str | None
) -> ExplainedEvent:
    """Explains the addition with which a key enters a running sum.

    Args:
        event: which one.
        accumulator: as trace-head takes it.
        target: format to round to; None for the one in which the accumulator's sum is stored.
        mode: rounding mode of the last rounding.
        overflow: "nonfinite" or "saturate"; None for the target's own.

    Raises:
        InputError: no such case, row, feature or key, or an accumulator that has no single event.
    """
    from bf16forensics.evidence.trace.accumulators import check_accumulator
    from bf16forensics.evidence.trace.event import event_at

    name = check_accumulator({"each-add": "bf16-each-add"}.get(accumulator, accumulator))
    trace = _row(event)
    if name in ("fp32-prefix", "bf16-each-add"):
        walk = trace.ascending
    elif name.startswith("tile:"):
        walk = _captured_walk(event, trace.sequence, name)
    else:
        walk = trace.run
    num_features = walk.v.shape[1]
    if event.feature >= num_features:
        raise InputError(f"feature {event.feature} does not exist: the row has features 0 to {num_features - 1}")
    found = event_at(walk, event.feature, name, event.key)
    bits = _explained(found, walk, target=target, mode=mode, overflow=overflow)
    facts: dict[str, object] = {
        "case": str(event.case),
        "layer": event.layer,
        "head": event.head,
        "sequence": trace.sequence,
        "token": event.token,
        "feature": event.feature,
        "key": event.key,
        "accumulator": name,
        "recipe": walk.recipe,
        "p_bar": found.p_bar,
        "v": found.v,
        "is_one": found.is_one,
        "before": found.before,
        "after": found.after,
        "stored": found.stored,
    }
    return ExplainedEvent(bits=bits, facts=facts, about=_about(event, trace, found, walk))


def _row(event: Event) -> "RowTrace":
    """The row as the case keeps it, or computed again from the case's tensors or inputs."""
    from bf16forensics.commands._case import open_case
    from bf16forensics.commands._case_row import trace_row_of_case
    from bf16forensics.report.case import TRACES
    from bf16forensics.report.row_trace import read_row_trace, row_file_name

    numbers = [event.sequence] if event.sequence is not None else _traced_sequences(event)
    if len(numbers) > 1:
        names = ", ".join(f":s{number}" for number in numbers)
        raise InputError(f"{event.case} has traced token {event.token} in several sequences; add one of {names}")
    if not numbers:
        count = open_case(event.case).sequences
        if count != 1:
            raise InputError(
                f"{event.case} has {count} sequences and has traced this token in none; add :s0 or another"
            )
        numbers = [0]
    path = event.case / TRACES / row_file_name(event.layer, event.head, numbers[0], event.token)
    if not path.is_file():
        # What is no case is refused before torch is loaded.
        open_case(event.case)
        return trace_row_of_case(event.case, event.layer, event.head, numbers[0], event.token)
    trace = read_row_trace(path)
    if (trace.layer, trace.head, trace.sequence, trace.token) != (event.layer, event.head, numbers[0], event.token):
        raise InputError(f"{path} holds another row than its name says; run trace-head again to write it")
    return trace


def _traced_sequences(event: Event) -> list[int]:
    from bf16forensics.report.case import TRACES

    name = re.compile(rf"L{event.layer}\.H{event.head}\.s([0-9]{{1,12}})\.t{event.token}\.safetensors")
    folder = event.case / TRACES
    found = [name.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match is not None)


def _captured_walk(event: Event, sequence: int, accumulator: str) -> "RowWalk":
    """The walk of an accumulator that follows tiles of its own, which no row file holds."""
    from bf16forensics.commands._case import open_case
    from bf16forensics.commands._trace_input import case_input
    from bf16forensics.investigate.trace import TraceRequest, trace_head

    case = open_case(event.case)
    found = case_input(case, event.layer, event.head, sequence=sequence)
    request = TraceRequest(
        layer=event.layer,
        head=event.head,
        head_of_record=found.head_of_source,
        recipe=case.recipe,
        reference=case.reference,
        accumulator=accumulator,
        sequence=sequence,
        token=event.token,
        rank=False,
    )
    return trace_head(found.source, request).walk


def _explained(
    found: "TraceEvent", walk: "RowWalk", *, target: "FloatFormat | None", mode: str, overflow: str | None
) -> "Bits":
    from bf16forensics.floats.bits import explain_bits, explain_unit
    from bf16forensics.floats.formats import FP32, format_named

    stored = target or format_named(found.stored)
    if found.accumulator in ("sm80", "sm90", "sm100"):
        position = {int(key): at for at, key in enumerate(walk.keys)}
        pairs = []
        for key in found.keys:
            at = position[key]
            pairs.append((_pattern(float(walk.p_operand[at])), _pattern(float(walk.v[at, found.feature]))))
        labels = tuple(f"k{key}" for key in found.keys)
        return explain_unit(
            pairs, _pattern(found.before), found.accumulator, target=stored, mode=mode, overflow=overflow, labels=labels
        )
    by = {"bf16-each-add": "each-add", "exact": "exact"}.get(found.accumulator, "fp32-prefix")
    return explain_bits(
        [_operand(found.before, "the running sum before"), _operand(found.addends[0], "what is added")],
        accumulator=by,
        source=FP32,
        target=stored,
        mode=mode,
        overflow=overflow,
        labels=("run", "add"),
    )


def _operand(number: float, reading: str) -> "Operand":
    from bf16forensics.floats.literal import Operand

    pattern = _pattern(number)
    return Operand(text=repr(number), pattern=pattern, reading=reading, written=pattern.value, is_rounded=False)


def _pattern(number: float) -> "Pattern":
    """The number in FP32 where that holds it, else in FP64."""
    from bf16forensics.floats.formats import FP32, FP64
    from bf16forensics.floats.pattern import Pattern
    from bf16forensics.floats.scalar import encode

    for fmt in (FP32, FP64):
        pattern = Pattern(fmt=fmt, code=encode(number, fmt, overflow="nonfinite"))
        if pattern.number == number:
            return pattern
    return pattern


def _about(event: Event, trace: "RowTrace", found: "TraceEvent", walk: "RowWalk") -> tuple[str, ...]:
    place = f"L{event.layer}.H{event.head}, sequence {trace.sequence}, token {event.token}, feature {event.feature}"
    one = ", which is a one" if found.is_one else ""
    sentences = [
        f"{event.case}: {place}, key {event.key}, accumulator {found.accumulator}, recipe {walk.recipe}.",
        f"P-bar {found.p_bar!r}{one}, V {found.v!r}; the accumulator holds {found.after!r} afterwards.",
    ]
    if found.accumulator == "exact":
        sentences.append("The exact sum before the key is shown as its nearest double.")
    return tuple(sentences)
