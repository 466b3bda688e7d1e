"""Findings about triggers: BF101 to BF104. A trigger alone is a note: it says where bias could start."""

import math
from collections.abc import Sequence

from bf16forensics.evidence.results import HeadEvidence
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.verdict.findings import Finding
from bf16forensics.verdict.shared import SENTENCE_NAMES, finding, names_of
from bf16forensics.verdict.thresholds import Thresholds
from bf16forensics.verdict.words import count, head_name, number, percent

#: The ratio of a flat density is blurred by counting and by rows that are not independent: within this much it is
#: called "at chance" whatever the counts.
_CHANCE_BAND = 0.1
_CHANCE_ERRORS = 3.0


def trigger_findings(result: LocalizeResult, limits: Thresholds) -> list[Finding]:
    """At most one finding a code, with the worst heads named."""
    sound = [head for head in result.heads if not head.nonfinite]
    return [
        *_uncounted(result, sound),
        *_repeated(result, sound, limits),
        *_swamped(sound, limits),
        *_unlabelled(sound),
    ]


def at_chance(rows_near_max: int, rows_repeated_max: int, expected: float) -> bool:
    """Whether near-ties among ties are as frequent as under scores of flat density.

    Args:
        rows_near_max: rows with two or more keys within 1e-3 of the maximum.
        rows_repeated_max: rows with two or more P-bar that round to 1, at least 1.
        expected: the ratio under flat density.
    """
    error = math.sqrt(expected * (1 - expected) / rows_repeated_max)
    return abs(rows_near_max / rows_repeated_max - expected) <= max(_CHANCE_BAND, _CHANCE_ERRORS * error)


def _uncounted(result: LocalizeResult, heads: Sequence[HeadEvidence]) -> list[Finding]:
    found = [head for head in heads if head.ones is None]
    if not found:
        return []
    return [
        finding(
            "BF104",
            message=f"P-bar = 1 is not counted: recipe {result.recipe.name} does not anchor rows at their maximum",
            observed=f"conditional rescaling: P-bar may reach 2^{result.recipe.rescale_threshold}",
            inferred="a P-bar of 1 marks no maximum here; rows that share one are seen in a recipe that anchors at it",
            next_command="bf16forensics explain BF104",
        )
    ]


def _repeats(head: HeadEvidence) -> int:
    return head.counts.rows_repeated_max or 0


def _unlabelled_repeats(head: HeadEvidence) -> int:
    return head.counts.rows_repeated_max_unlabelled or 0


def _repeated(result: LocalizeResult, heads: Sequence[HeadEvidence], limits: Thresholds) -> list[Finding]:
    repeated = sum(_repeats(head) for head in heads)
    if not repeated:
        return []
    rows = sum(head.counts.rows for head in heads)
    near = sum(head.counts.rows_near_max for head in heads)
    worst = sorted(
        (head for head in heads if _repeats(head)), key=lambda head: (-_repeats(head), head.layer, head.head)
    )
    chance = at_chance(near, repeated, limits.chance_ratio)
    ratio = f"{number(near / repeated, 2)} against {number(limits.chance_ratio, 2)} for scores of flat density"
    if chance:
        inferred = "keys meet at the maximum as often as chance brings them there"
    elif near / repeated > limits.chance_ratio:
        inferred = "keys meet at the maximum more often than chance: equal or nearly equal keys"
    else:
        inferred = "fewer near-ties than flat scores give: the ties are made by the rounding of the scores"
    if result.recipe.scores != "fp32":
        inferred += f" (the recipe stores scores in {result.recipe.scores.upper()}, which makes ties by itself)"
    examples = "; ".join(_example(head) for head in worst[:2])
    return [
        finding(
            "BF101",
            message=f"{repeated:,} of {count(rows, 'row')} with two or more P-bar = 1, "
            f"{'at' if chance else 'not at'} chance level ({names_of(worst)})",
            observed=f"near-ties over ties {ratio}; {examples}",
            inferred=inferred,
            next_command="bf16forensics explain BF101",
            heads=worst,
        )
    ]


def _example(head: HeadEvidence) -> str:
    counts = head.counts
    text = f"{head_name(head.layer, head.head)} {_repeats(head):,} of {counts.rows:,} rows, "
    text += f"up to {counts.most_ones} ones"
    share = counts.repeated_sum_share
    return text + (f", {percent(share)} of its delta error" if math.isfinite(share) else "")


def _swamped(heads: Sequence[HeadEvidence], limits: Thresholds) -> list[Finding]:
    found = [head for head in heads if head.counts.swamped_power_share >= limits.swamped_share]
    if not found:
        return []
    found.sort(key=lambda head: (-head.counts.swamped_power_share, head.layer, head.head))
    shares = ", ".join(
        f"{head_name(head.layer, head.head)} {percent(head.counts.swamped_power_share)} "
        f"({head.counts.rows_swamped:,} of {head.counts.rows:,} rows)"
        for head in found[:SENTENCE_NAMES]
    )
    return [
        finding(
            "BF102",
            message=f"rows whose O is the value of one key carry much of the delta error ({names_of(found)})",
            observed=f"share of the squared delta defect: {shares}",
            inferred="there the error is the lost contribution of all other keys: deterministic, not noise",
            next_command="bf16forensics explain BF102",
            heads=found,
        )
    ]


def _unlabelled(heads: Sequence[HeadEvidence]) -> list[Finding]:
    found = [head for head in heads if _unlabelled_repeats(head)]
    if not found:
        return []
    found.sort(key=lambda head: (-_unlabelled_repeats(head), head.layer, head.head))
    unlabelled = sum(_unlabelled_repeats(head) for head in found)
    repeated = sum(_repeats(head) for head in heads)
    padding = sum(head.counts.rows_padding for head in heads)
    return [
        finding(
            "BF103",
            message=f"{unlabelled:,} of {count(repeated, 'row')} with repeated maxima have an ignored label "
            f"({names_of(found)})",
            observed=f"ignored labels {unlabelled:,}; padding rows, left out of every count, {padding:,}",
            inferred="a row whose dO is zero adds nothing to delta: its maxima are no evidence of a gradient error",
            next_command="bf16forensics explain BF103",
            heads=found,
        )
    ]
