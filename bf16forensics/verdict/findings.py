"""What a verdict consists of: findings, one verdict a head, one judgement a run."""

from dataclasses import dataclass

from bf16forensics.verdict.thresholds import Thresholds

COMPOUNDING_BIAS = "compounding bias"
NOISE_ABOVE_SAMPLING = "rounding noise above sampling noise"
BIAS_WITHOUT_COUPLING = "bias without coupling"
CANNOT_JUDGE = "cannot judge"
NOISE_AT_CHANCE = "noise at chance level"

#: Every verdict, the most serious first.
VERDICTS = (COMPOUNDING_BIAS, NOISE_ABOVE_SAMPLING, BIAS_WITHOUT_COUPLING, CANNOT_JUDGE, NOISE_AT_CHANCE)

#: Severities in rising order; `--fail-on` names one of them.
SEVERITIES = ("note", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One coded statement about one head, or about several."""

    #: "BF301".
    code: str
    #: Kebab-case name of the code, as `explain` prints it.
    name: str
    #: "note", "warning" or "error".
    severity: str
    #: 0-based; None when the finding is about several heads or about the run.
    layer: int | None
    head: int | None
    #: Names of the heads concerned ("L1.H7"), the worst first, at most 12.
    heads: tuple[str, ...]
    #: Heads concerned in all; 0 for a finding about the run.
    num_heads: int
    #: One sentence.
    message: str
    #: Numbers with units, where, how measured.
    observed: str
    #: What follows from them, and by which rule.
    inferred: str
    #: Which observation would show the inference wrong.
    would_refute: str
    #: Command, or step, that gets further.
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadVerdict:
    """The verdict about one head and the numbers it was reached with."""

    #: 0-based.
    layer: int
    head: int
    #: One of `VERDICTS`.
    verdict: str
    #: Code of the finding that explains the verdict; None for noise at chance level.
    code: str | None
    #: One sentence.
    reason: str
    #: Largest harmless bias B of the head's dW_Q error, in the unit of |dW_Q|; nan when unknown.
    harmless_limit: float
    #: Sequences that would probably decide; None when more of them would not help or the number is unknown.
    sequences_needed: int | None
    #: The delta defect is biased by itself: sign-flip p of its sums by sequence, family-wise over heads, below alpha.
    delta_biased: bool
    #: The Holm-corrected p; nan when the head is not in the family.
    delta_p_adjusted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict of one run."""

    #: One of `VERDICTS`: the most serious over the heads; "cannot judge" without heads.
    verdict: str
    #: One sentence.
    summary: str
    #: One entry a head, in (layer, head) order.
    heads: tuple[HeadVerdict, ...]
    #: (layer, head) of every head, the most suspicious first.
    ranking: tuple[tuple[int, int], ...]
    #: Errors first, then warnings, then notes; by code within.
    findings: tuple[Finding, ...]
    #: What to run next, the most useful first.
    next_commands: tuple[str, ...]
    #: What this run says nothing about.
    not_checked: tuple[str, ...]
    #: Limits it was reached with.
    thresholds: Thresholds

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Number of heads for each verdict, in the order of `VERDICTS`."""
        return tuple((verdict, sum(head.verdict == verdict for head in self.heads)) for verdict in VERDICTS)
