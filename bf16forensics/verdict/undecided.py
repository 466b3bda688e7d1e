"""Findings about what could not be judged: BF901 to BF906. All are notes: they are no fault of the input."""

from collections.abc import Sequence

from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.verdict.advice import more_sequences
from bf16forensics.verdict.findings import Finding
from bf16forensics.verdict.shared import Pair, finding, names_of
from bf16forensics.verdict.thresholds import Thresholds
from bf16forensics.verdict.words import about, count, head_name, number

_MESSAGES = {
    "BF901": "too few sequences to judge",
    "BF902": "too few sequences carry the error",
    "BF903": "the bias can be neither shown nor excluded",
    "BF904": "nothing was compared",
    "BF905": "there is no dO: forward evidence only",
    "BF906": "the coupling to W_Q cannot be computed",
}
_INFERRED = {
    "BF901": "a test by sign flips over so few sequences cannot reach a small p, family-wise over heads",
    "BF902": "bounds on a mean that a few sequences carry would not hold",
    "BF903": "a bias that was not detected is not absent: the harmless limit is below what these sequences show",
    "BF904": "no verdict follows from no rows",
    "BF905": "without dO there is no delta, and without delta no gradient error",
    "BF906": "without the input of the projection the delta error cannot be carried to W_Q",
}


def undecided_findings(
    result: LocalizeResult, pairs: Sequence[Pair], limits: Thresholds, command: Sequence[str]
) -> list[Finding]:
    """One finding for each reason, whatever the number of heads; one when there is no head at all.

    Args:
        result: the run.
        pairs: heads and verdicts, the most suspicious first.
        limits: thresholds of the judgement.
        command: the command as run; empty when unknown.
    """
    if not pairs:
        return [
            finding(
                "BF904",
                message=f"{_MESSAGES['BF904']}: the input gave no head",
                observed="0 heads",
                inferred=_INFERRED["BF904"],
                next_command="check the input and the range of lines",
            )
        ]
    return [
        _one(code, [pair for pair in pairs if pair[1].code == code], result, limits, command)
        for code in _MESSAGES
        if any(pair[1].code == code for pair in pairs)
    ]


def _one(
    code: str, pairs: Sequence[Pair], result: LocalizeResult, limits: Thresholds, command: Sequence[str]
) -> Finding:
    heads = [head for head, _ in pairs]
    estimates = [verdict.sequences_needed for _, verdict in pairs if verdict.sequences_needed is not None]
    needed = max(estimates, default=None)
    first = pairs[0][1]
    observed = f"{head_name(first.layer, first.head)}: {first.reason}"
    if len(set(estimates)) > 1:
        observed += f"; over these heads between {about(min(estimates))} and {about(max(estimates))} sequences"
    message = f"{count(len(heads), 'head')}: {_MESSAGES[code]} ({names_of(heads)})"
    if code == "BF901":
        message = (
            f"{count(len(heads), 'head')}: {count(result.sequences, 'sequence')}, needs at least {limits.min_sequences}"
            f" ({names_of(heads)})"
        )
    elif code == "BF902":
        observed += f"; limit {number(limits.min_n_effective)}"
    return finding(
        code,
        message=message,
        observed=observed,
        inferred=_INFERRED[code],
        next_command=_next(code, result, command, needed),
        heads=heads,
    )


def _next(code: str, result: LocalizeResult, command: Sequence[str], needed: int | None) -> str:
    if code in ("BF901", "BF902", "BF903"):
        return more_sequences(result, command, needed)
    if code == "BF904":
        return "check masks, padding and the range of lines"
    if code == "BF905":
        if result.no_gradient is not None:
            return "use a recipe with a backward pass to see gradients"
        return "give a batch with labels, or a record with do"
    return "add x and w_q to the record, or localize from the checkpoint"
