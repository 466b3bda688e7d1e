"""A sum of several terms, one addition after another, every step explained. Plain Python.

Three ways to keep the running sum: in one format, while every prefix is rounded to another one to be looked at; stored
in the target format after every addition; exactly, with one rounding at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bf16forensics.errors import InputError
from bf16forensics.floats.explain import explain_sum
from bf16forensics.floats.explained import ExplainedSum
from bf16forensics.floats.formats import FloatFormat
from bf16forensics.floats.pattern import Pattern

#: What `explain_chain` knows, each with what it is and what it is not.
MEANINGS = {
    "fp32-prefix": (
        "The running sum stays in {source}, rounded to nearest after every addition; each prefix is rounded once to "
        "{target}. The errors are those of single roundings and do not add up: only the last one exists in a "
        "computation that stores the sum at its end."
    ),
    "each-add": (
        "The running sum is stored in {target} after every addition, in one rounding of the exact sum of what was "
        "stored and the term; the errors add up."
    ),
    "exact": "All terms are added exactly; the sum is rounded once to {target}. No hardware does this for any terms.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """One addition of a chain."""

    #: 0-based position of the last term added.
    index: int
    #: The terms that this step adds to `before`: one, or all of them in "exact".
    terms: tuple[Pattern, ...]
    #: Running sum before; None at the start.
    before: Pattern | None
    #: The addition and its roundings.
    event: ExplainedSum
    #: Running sum afterwards, as the chain keeps it; None where it is not a value of a format.
    running: Pattern | None
    #: Exact sum of all terms up to here; None from an infinity or NaN on.
    prefix: Fraction | None
    #: Stored value - `prefix`; None where either is no finite number, or the decision is open.
    error: Fraction | None


def explain_chain(
    terms: Sequence[Pattern],
    accumulator: str = "fp32-prefix",
    *,
    source: FloatFormat,
    target: FloatFormat,
    mode: str = "rne",
    overflow: str | None = None,
    randoms: Sequence[Fraction | None] = (),
) -> tuple[ChainStep, ...]:
    """Explain every step of a sum. A single term is a conversion, without a step in the source format.

    Args:
        terms: One or more values, added from left to right.
        accumulator: A key of `MEANINGS`.
        source: Format of the running sum in "fp32-prefix".
        target: Format that sums are rounded to, by `mode` and `overflow`; see `explain.explain_sum`.
        mode: "rne", "rz", "rna" or "stochastic".
        overflow: "nonfinite" or "saturate"; None for the target's own.
        randoms: One number a step for "stochastic", None for an open decision; fewer count as None.

    Returns:
        One step a term; in "exact" a single one.

    Raises:
        InputError: no terms, an unknown accumulator, or a sum that would go on from a decision left open.
    """
    if not terms:
        raise InputError("nothing to explain: give one value to convert, or two or more to add")
    if accumulator not in MEANINGS:
        raise InputError(f"unknown accumulator {accumulator!r}; use one of {', '.join(MEANINGS)}")
    if accumulator == "exact" or len(terms) == 1:
        random = randoms[0] if randoms else None
        event = explain_sum(terms, None, target, mode, overflow=overflow, random=random)
        stored = event.to_target.result
        step = _step(len(terms) - 1, terms, None, event, stored, event.sum.exact)
        return (step,)
    is_stored = accumulator == "each-add"
    steps: list[ChainStep] = []
    running: Pattern | None = None
    for index, term in enumerate(terms):
        if index and running is None:
            raise InputError(
                f"the sum cannot go on after term {index}: its stochastic rounding has no random number; give a seed"
            )
        event = explain_sum(
            (term,) if running is None else (running, term),
            None if is_stored else source,
            target,
            mode,
            overflow=overflow,
            random=randoms[index] if index < len(randoms) else None,
        )
        before, running = running, _kept(event, term, source, is_stored=is_stored)
        prefix = _plus(steps[-1].prefix if steps else Fraction(0), term.value)
        steps.append(_step(index, (term,), before, event, running, prefix))
    return tuple(steps)


def _kept(event: ExplainedSum, term: Pattern, source: FloatFormat, *, is_stored: bool) -> Pattern | None:
    if is_stored or event.to_source is None:
        # Without a step of its own the source is the target, but an open decision of the target is none of the source.
        return event.to_target.result
    return event.to_source.result


def _step(
    index: int,
    terms: Sequence[Pattern],
    before: Pattern | None,
    event: ExplainedSum,
    running: Pattern | None,
    prefix: Fraction | None,
) -> ChainStep:
    stored = event.to_target.result
    reached = None if stored is None else stored.value
    return ChainStep(
        index=index,
        terms=tuple(terms),
        before=before,
        event=event,
        running=running,
        prefix=prefix,
        error=None if reached is None or prefix is None else reached - prefix,
    )


def _plus(total: Fraction | None, value: Fraction | None) -> Fraction | None:
    return None if total is None or value is None else total + value
