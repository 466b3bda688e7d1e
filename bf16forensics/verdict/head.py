"""The verdict about one head. A number that is not finite never decides in favour of "noise"."""

import math
from dataclasses import dataclass

from bf16forensics.evidence.results import ErrorStatistics, GradientCoupling, HeadEvidence, SignedStatistics
from bf16forensics.verdict.findings import (
    BIAS_WITHOUT_COUPLING,
    CANNOT_JUDGE,
    COMPOUNDING_BIAS,
    NOISE_ABOVE_SAMPLING,
    NOISE_AT_CHANCE,
    HeadVerdict,
)
from bf16forensics.verdict.thresholds import Thresholds
from bf16forensics.verdict.words import about, count, listing, number

#: Names of the parts of the dW_Q error in sentences.
DELTA_PART = "delta part"
WHOLE_ERROR = "whole error"
DELTA_AND_WHOLE = "delta part and whole error"

#: More sequences than anyone would record; a larger estimate is not printed.
_MOST_SEQUENCES = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the run, and not the head alone, says about one head."""

    #: `harmless_limit` of the head.
    limit: float
    #: Sequences of one optimiser step, M.
    step_sequences: int
    #: Family-wise sign-flip p of the delta defect; nan when the head is not in the family.
    delta_p_adjusted: float
    #: Why the run has no gradient at all, in words; None where nothing stands in the way.
    no_gradient: str | None = None
    #: True when the model has no output head.
    no_output_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    verdict: str
    code: str | None
    reason: str
    sequences_needed: int | None = None


def harmless_limit(head: HeadEvidence, step_sequences: int, limits: Thresholds) -> float:
    """Largest bias B that stays below the sampling noise over `harmless_steps` steps.

    Returns:
        sqrt(V_g / M) / sqrt(K) in units of the gradient; nan without a gradient, without steps, or where the sampling
        noise is not a positive finite number (the gradient did not vary, so there is nothing to compare with).
    """
    if head.dw_q is None or step_sequences < 1:
        return math.nan
    noise = head.dw_q.sampling_noise
    if not (math.isfinite(noise) and noise > 0):
        return math.nan
    limit = noise / math.sqrt(step_sequences) / math.sqrt(limits.harmless_steps)
    return limit if limit > 0 else math.nan


def biased_part(dw_q: GradientCoupling, limit: float, alpha: float) -> str | None:
    """Which part of the dW_Q error is surely biased beyond the limit: one of the names below, or None."""
    return _part(_compounds(dw_q.defect, limit, alpha), _compounds(dw_q.total, limit, alpha))


def noisy_part(dw_q: GradientCoupling, rho_limit: float) -> str | None:
    """Which part's rho is above the limit: one of the names below, or None."""
    defect, total = (math.isfinite(part.rho) and part.rho > rho_limit for part in (dw_q.defect, dw_q.total))
    return _part(defect, total)


def _part(defect: bool, total: bool) -> str | None:
    if defect:
        return DELTA_AND_WHOLE if total else DELTA_PART
    return WHOLE_ERROR if total else None


def judge_head(head: HeadEvidence, limits: Thresholds, context: Context) -> HeadVerdict:
    """Judges one head by the first rule that applies; the rules are in the order of `_decide`."""
    decision = _decide(head, limits, context)
    return HeadVerdict(
        layer=head.layer,
        head=head.head,
        verdict=decision.verdict,
        code=decision.code,
        reason=decision.reason,
        harmless_limit=context.limit,
        sequences_needed=decision.sequences_needed,
        delta_biased=_delta_biased(head, limits, context),
        delta_p_adjusted=context.delta_p_adjusted,
    )


def _decide(head: HeadEvidence, limits: Thresholds, context: Context) -> _Decision:
    if head.nonfinite:
        return _undecided("BF401", f"non-finite input: {listing(head.nonfinite, 3)}")
    if head.counts.rows == 0:
        return _undecided("BF904", "nothing was compared: no real row sees a key")
    if head.delta_defect is None:
        code = "BF404" if context.no_output_head else "BF905"
        return _undecided(code, context.no_gradient or "no dO: only the forward pass was compared")
    if head.dw_q is None:
        return _undecided("BF906", "the input of the projection is unknown, so the coupling to W_Q is too")
    dw_q, limit = head.dw_q, context.limit
    if dw_q.sequences < limits.min_sequences:
        needed = max(limits.min_sequences, _sequences_needed(dw_q, limit) or 0)
        needs = f"needs at least {limits.min_sequences}"
        needs += f", probably about {about(needed)} sequences" if needed > limits.min_sequences else ""
        return _undecided("BF901", f"{count(dw_q.sequences, 'sequence')}; {needs}", needed)
    decided = _few_carry_it(dw_q, limit, limits)
    return decided or _by_bounds(head.delta_defect, dw_q, limits, context)


def _few_carry_it(dw_q: GradientCoupling, limit: float, limits: Thresholds) -> _Decision | None:
    """Undecided when too few sequences carry the error power; None when the bounds may be read."""
    # A recipe whose delta is exact has a defect of zero and no n_effective; then the whole error is the primary one.
    primary = dw_q.total if _vanishes(dw_q.defect) else dw_q.defect
    if _vanishes(primary):
        return None
    n_effective = primary.n_effective
    if math.isnan(n_effective):
        return _undecided("BF902", "the effective number of sequences is not defined")
    if n_effective >= limits.min_n_effective:
        return None
    estimate = dw_q.sequences * limits.min_n_effective / n_effective if n_effective > 0 else math.inf
    needed = _whole(max(estimate, _sequences_needed(dw_q, limit) or 0))
    reason = (
        f"{number(n_effective, 2)} of {dw_q.sequences} sequences carry the error; "
        f"needs an effective {number(limits.min_n_effective)}{_roughly(needed)}"
    )
    return _undecided("BF902", reason, needed)


def _by_bounds(delta: SignedStatistics, dw_q: GradientCoupling, limits: Thresholds, context: Context) -> _Decision:
    limit = context.limit
    if math.isnan(limit):
        return _undecided("BF903", "the sampling noise of dW_Q is zero or undefined, so no bias can be called harmless")
    part = biased_part(dw_q, limit, limits.alpha)
    if part is not None:
        worst = dw_q.total if part == WHOLE_ERROR else dw_q.defect
        lower = f"lower bound of the bias {number(worst.bias_lower / limit)} times the harmless limit"
        code = "BF303" if part == WHOLE_ERROR else "BF301"
        return _Decision(
            verdict=COMPOUNDING_BIAS,
            code=code,
            reason=f"{lower}, family-wise p {number(worst.p_adjusted)} ({part})",
        )
    part = noisy_part(dw_q, limits.rho_limit)
    if part is not None:
        rho = max(item.rho for item in (dw_q.defect, dw_q.total) if math.isfinite(item.rho))
        return _Decision(
            verdict=NOISE_ABOVE_SAMPLING,
            code="BF302",
            reason=f"rounding noise is {number(rho)} times the sampling noise ({part})",
        )
    undefined = _undefined(delta, dw_q, context)
    if undefined:
        return _undecided("BF903", f"not defined: {', '.join(undefined)}")
    upper = max(dw_q.defect.bias_upper, dw_q.total.bias_upper)
    if upper <= limit:
        if context.delta_p_adjusted < limits.alpha:
            reason = f"delta is biased (family-wise p {number(context.delta_p_adjusted)}) but dW_Q hardly feels it"
            return _Decision(verdict=BIAS_WITHOUT_COUPLING, code="BF201", reason=reason)
        reason = f"upper bound of the bias {number(upper / limit)} times the harmless limit"
        return _Decision(verdict=NOISE_AT_CHANCE, code=None, reason=reason)
    needed = _sequences_needed(dw_q, limit)
    detectable = max(dw_q.defect.minimum_detectable, dw_q.total.minimum_detectable)
    reason = (
        f"the bias may reach {number(upper / limit)} times the harmless limit, "
        f"{number(detectable / limit)} times is detectable{_roughly(needed)}"
    )
    return _undecided("BF903", reason, needed)


def _compounds(part: ErrorStatistics, limit: float, alpha: float) -> bool:
    """Whether the bias surely exceeds the limit. False for NaN: then nothing is sure."""
    return math.isfinite(part.bias_lower) and part.bias_lower > limit and part.p_adjusted < alpha


def _vanishes(part: ErrorStatistics) -> bool:
    """Whether the error is exactly zero in every sequence."""
    return part.rho == 0 and part.bias == 0 and part.bias_upper == 0


def _undefined(delta: SignedStatistics, dw_q: GradientCoupling, context: Context) -> list[str]:
    """Names of the numbers that "noise" rests on and that are not finite."""
    names = []
    for name, part in (("defect", dw_q.defect), ("total", dw_q.total)):
        needed = ["rho", "bias_lower", "bias_upper", "minimum_detectable"]
        # Without any error there is nothing to test, and p has no meaning.
        if not _vanishes(part):
            needed.append("p_adjusted")
        names += [f"{name} {field}" for field in needed if not math.isfinite(getattr(part, field))]
    exact = delta.sum == 0 and delta.positive == 0 and delta.negative == 0
    if math.isnan(context.delta_p_adjusted) and not exact:
        names.append("p of the delta defect")
    return names


def _delta_biased(head: HeadEvidence, limits: Thresholds, context: Context) -> bool:
    return head.counts.rows > 0 and not head.nonfinite and context.delta_p_adjusted < limits.alpha


def _sequences_needed(dw_q: GradientCoupling, limit: float) -> int | None:
    """Sequences at which the bounds would reach the limit; None when unknown.

    The standard deviation of U(e, e) falls as 1/n and B is its root, so the bound on B falls as 1/sqrt(n).
    """
    parts = (dw_q.defect, dw_q.total)
    reach = [value for part in parts for value in (part.bias_upper, part.minimum_detectable)]
    if not all(math.isfinite(value) for value in (*reach, limit)):
        return None
    ratio = max(reach) / limit
    return _whole(dw_q.sequences * ratio * ratio)


def _whole(sequences: float) -> int | None:
    return math.ceil(sequences) if sequences <= _MOST_SEQUENCES else None


def _roughly(needed: int | None) -> str:
    return "" if needed is None else f"; needs about {about(needed)} sequences"


def _undecided(code: str, reason: str, needed: int | None = None) -> _Decision:
    return _Decision(verdict=CANNOT_JUDGE, code=code, reason=reason, sequences_needed=needed)
