"""From the evidence of a run to its judgement. Plain Python: no tensor library."""

from collections.abc import Sequence

from bf16forensics.evidence.results import HeadEvidence
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.recipe.model import Recipe
from bf16forensics.verdict.advice import next_commands, not_checked
from bf16forensics.verdict.bias import bias_findings
from bf16forensics.verdict.findings import (
    CANNOT_JUDGE,
    NOISE_AT_CHANCE,
    SEVERITIES,
    VERDICTS,
    Finding,
    HeadVerdict,
    Judgement,
)
from bf16forensics.verdict.head import Context, harmless_limit, judge_head
from bf16forensics.verdict.inputs import input_findings
from bf16forensics.verdict.ranking import rank
from bf16forensics.verdict.thresholds import Thresholds
from bf16forensics.verdict.triggers import trigger_findings
from bf16forensics.verdict.undecided import undecided_findings
from bf16forensics.verdict.words import count, head_name, listing

__all__ = ["exit_code", "judge", "rank"]

#: Findings that say the input itself is at fault.
_INPUT_ERRORS = ("BF401", "BF404")
#: Heads named one by one before the rest of a code is counted: tried in this order until the findings fit.
_SINGLE_HEADS = (3, 2, 1)


def judge(result: LocalizeResult, thresholds: Thresholds | None = None, *, command: Sequence[str] = ()) -> Judgement:
    """Judges every head and the run.

    A number that is not finite never decides anything in favour of "noise": the head cannot be judged. A result
    without heads cannot be judged either.

    Args:
        result: what localize measured.
        thresholds: limits; None for the defaults.
        command: the command as run, program name first, so that the next commands can be given whole.

    Returns:
        The judgement, with heads in (layer, head) order and findings bounded in number.
    """
    limits = thresholds or Thresholds()
    ranked = rank(result.heads)
    verdicts = {(head.layer, head.head): head for head in _judge_heads(result, limits)}
    pairs = [(head, verdicts[head.layer, head.head]) for head in ranked]
    findings: tuple[Finding, ...] = ()
    for single in _SINGLE_HEADS:
        findings = _findings(result, pairs, limits, command, single)
        if len(findings) <= limits.max_findings:
            break
    ordered = tuple(verdicts[key] for key in sorted(verdicts))
    verdict = min((head.verdict for head in ordered), key=VERDICTS.index, default=CANNOT_JUDGE)
    return Judgement(
        verdict=verdict,
        summary=_summary(verdict, [head for _, head in pairs], result.recipe, result.reference),
        heads=ordered,
        ranking=tuple((head.layer, head.head) for head in ranked),
        findings=findings,
        next_commands=next_commands(result, verdict, findings, [head for _, head in pairs], command),
        not_checked=not_checked(result),
        thresholds=limits,
    )


def exit_code(judgement: Judgement, fail_on: str) -> int:
    """Exit code of a command that reports this judgement.

    Args:
        judgement: what was found.
        fail_on: the least severity that counts: "note", "warning" or "error".

    Returns:
        2 when an input holds non-finite values or the model has no output head, else 1 when a finding reaches
        `fail_on`, else 0. "Cannot judge" by itself is 0: its findings are notes.

    Raises:
        ValueError: `fail_on` is not a severity.
    """
    if fail_on not in SEVERITIES:
        raise ValueError(f"unknown severity {fail_on!r}; one of {', '.join(SEVERITIES)}")
    least = SEVERITIES.index(fail_on)
    if any(finding.code in _INPUT_ERRORS for finding in judgement.findings):
        return 2
    return int(any(SEVERITIES.index(finding.severity) >= least for finding in judgement.findings))


def _judge_heads(result: LocalizeResult, limits: Thresholds) -> list[HeadVerdict]:
    return [
        judge_head(
            head,
            limits,
            Context(
                limit=harmless_limit(head, result.step_sequences, limits),
                step_sequences=result.step_sequences,
                delta_p_adjusted=_delta_p(head, limits),
                no_gradient=result.no_gradient,
                no_output_head=result.no_output_head,
            ),
        )
        for head in result.heads
    ]


def _delta_p(head: HeadEvidence, limits: Thresholds) -> float:
    """Family-wise p of the delta defect; nan for heads outside the family and for too few sequences."""
    if head.nonfinite or head.delta_defect is None:
        return float("nan")
    clustered = head.delta_defect.clustered
    return clustered.p_adjusted if clustered.sequences >= limits.min_sequences else float("nan")


def _findings(
    result: LocalizeResult,
    pairs: Sequence[tuple[HeadEvidence, HeadVerdict]],
    limits: Thresholds,
    command: Sequence[str],
    single: int,
) -> tuple[Finding, ...]:
    found = [
        *input_findings(result, pairs),
        *bias_findings(result, pairs, limits, command, single),
        *trigger_findings(result, limits),
        *undecided_findings(result, pairs, limits, command),
    ]
    return tuple(sorted(found, key=lambda item: (-SEVERITIES.index(item.severity), item.code)))


def _summary(verdict: str, ranked: Sequence[HeadVerdict], recipe: Recipe, reference: str) -> str:
    basis = f"recipe {recipe.name} against {reference}"
    if not ranked:
        return f"{verdict}: no head was analysed ({basis})"
    concerned = [head for head in ranked if head.verdict == verdict]
    names = listing([head_name(head.layer, head.head) for head in concerned], 3)
    where = f"{len(concerned):,} of {count(len(ranked), 'head')}"
    if verdict == NOISE_AT_CHANCE:
        every = "all " if len(ranked) > 1 else ""
        return f"{verdict}: {every}{count(len(ranked), 'head')}, by the upper bound of the bias ({basis})"
    if verdict == CANNOT_JUDGE:
        first = concerned[0]
        alike = len({head.reason for head in concerned}) == 1
        reason = f", {first.reason}" if alike else f"; first {head_name(first.layer, first.head)}: {first.reason}"
        return f"{verdict}: {where}{reason} ({basis})"
    return f"{verdict}: {where}, {names} ({basis})"
