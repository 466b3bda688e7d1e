"""Findings about bias and about the coupling to the weights: BF201, BF301, BF302, BF303."""

from collections.abc import Sequence

from bf16forensics.evidence.results import ErrorStatistics, GradientCoupling, HeadEvidence
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.recipe.model import Recipe
from bf16forensics.verdict.advice import flipped, more_sequences, rerun
from bf16forensics.verdict.findings import BIAS_WITHOUT_COUPLING, Finding, HeadVerdict
from bf16forensics.verdict.head import WHOLE_ERROR, biased_part, noisy_part
from bf16forensics.verdict.shared import Pair, finding, per_head
from bf16forensics.verdict.thresholds import Thresholds
from bf16forensics.verdict.words import head_name, number, percent


def bias_findings(
    result: LocalizeResult, pairs: Sequence[Pair], limits: Thresholds, command: Sequence[str], single: int
) -> list[Finding]:
    """Findings about the heads that carry a bias or too much noise, in the order of the ranking.

    Args:
        result: the run.
        pairs: heads and verdicts, the most suspicious first.
        limits: thresholds of the judgement.
        command: the command as run; empty when unknown.
        single: heads that get a finding each, for every code; the others share one.
    """
    by_code = {code: [pair for pair in pairs if pair[1].code == code] for code in ("BF301", "BF302", "BF303")}
    delta = [pair for pair in pairs if pair[1].delta_biased and pair[1].code != "BF301"]
    return [
        *per_head(by_code["BF301"], single, lambda pair: _compounding(result, pair, limits, command)),
        *per_head(by_code["BF303"], single, lambda pair: _elsewhere(result, pair, limits, command)),
        *per_head(by_code["BF302"], single, lambda pair: _noise(result, pair, limits, command)),
        *per_head(delta, single, lambda pair: _delta(result, pair, limits, command)),
    ]


def _compounding(result: LocalizeResult, pair: Pair, limits: Thresholds, command: Sequence[str]) -> Finding:
    head, verdict = pair
    dw_q = _coupling(head)
    part = biased_part(dw_q, verdict.harmless_limit, limits.alpha)
    name = head_name(head.layer, head.head)
    return finding(
        "BF301",
        message=f"{name}: the error of dW_Q is biased beyond what sampling noise hides ({part})",
        observed=f"{_bias(dw_q.defect, dw_q, verdict, result, limits)}; {_delta_numbers(head, verdict)}",
        inferred=f"delta_lp is not the delta of the P that the backward uses, with a sign that stays; "
        f"over {limits.harmless_steps:,} steps it outgrows the sampling noise",
        next_command=_try_flip(result.recipe, "o" if result.recipe.o_bar == "fp32" else "o_bar", command, "BF301"),
        heads=(head,),
    )


def _elsewhere(result: LocalizeResult, pair: Pair, limits: Thresholds, command: Sequence[str]) -> Finding:
    head, verdict = pair
    dw_q = _coupling(head)
    shares = {
        "scores": dw_q.telescope.share_scores,
        "ds": dw_q.telescope.share_cast_ds,
        "dq": dw_q.telescope.share_cast_dq,
    }
    # A share that is not a number compares false both ways; it must not win.
    largest = max(shares, key=lambda point: shares[point] if shares[point] == shares[point] else float("-inf"))
    sources = {"scores": "the scores", "ds": "the cast of dS", "dq": "the cast of dQ"}
    name = head_name(head.layer, head.head)
    return finding(
        "BF303",
        message=f"{name}: the whole error of dW_Q is biased, its delta part is not: look at {sources[largest]}",
        observed=f"{_bias(dw_q.total, dw_q, verdict, result, limits)}; signed shares of the whole error: scores "
        f"{percent(shares['scores'])}, delta defect {percent(dw_q.telescope.share_defect)}, "
        f"dS {percent(shares['ds'])}, dQ {percent(shares['dq'])}",
        inferred=f"the bias enters through {sources[largest]}, not through delta; a consistent delta would not cure it",
        next_command=_try_flip(result.recipe, largest, command, "BF303"),
        heads=(head,),
    )


def _noise(result: LocalizeResult, pair: Pair, limits: Thresholds, command: Sequence[str]) -> Finding:
    head, _ = pair
    dw_q = _coupling(head)
    part = noisy_part(dw_q, limits.rho_limit)
    rho = max(item.rho for item in (dw_q.defect, dw_q.total) if item.rho > limits.rho_limit)
    name = head_name(head.layer, head.head)
    return finding(
        "BF302",
        message=f"{name}: rounding perturbs dW_Q more than the choice of the sequences does",
        observed=f"rho {number(dw_q.defect.rho)} (defect), {number(dw_q.total.rho)} (whole error) over "
        f"{dw_q.sequences} sequences; {_norm(dw_q, limits)}; {result.recipe.name} against {result.reference}",
        inferred=f"for this head a batch works like one {number(1 + rho * rho, 2)} times smaller ({part})",
        next_command=_try_flip(result.recipe, "scores" if part == WHOLE_ERROR else "o", command, "BF302"),
        heads=(head,),
    )


def _delta(result: LocalizeResult, pair: Pair, limits: Thresholds, command: Sequence[str]) -> Finding:
    head, verdict = pair
    name = head_name(head.layer, head.head)
    if verdict.verdict == BIAS_WITHOUT_COUPLING:
        felt = "but the bias of dW_Q stays below the harmless limit"
        following = "bf16forensics explain BF201"
    elif head.dw_q is None:
        felt = "and whether dW_Q feels it is unknown"
        following = "add x and w_q to the record, or localize from the checkpoint"
    else:
        felt = f"and for dW_Q the verdict is: {verdict.verdict}"
        following = more_sequences(result, command, verdict.sequences_needed)
    return finding(
        "BF201",
        message=f"{name}: delta is biased, {felt}",
        observed=f"{_delta_numbers(head, verdict)}; {result.recipe.name} against {result.reference}",
        inferred="the rounding of O and the gradient dO agree in sign more often than chance allows",
        next_command=following,
        heads=(head,),
        # Shown to be harmless for the weights: nothing that should stop a build.
        severity="note" if verdict.verdict == BIAS_WITHOUT_COUPLING else None,
    )


def _bias(
    part: ErrorStatistics, dw_q: GradientCoupling, verdict: HeadVerdict, result: LocalizeResult, limits: Thresholds
) -> str:
    return (
        f"B {number(part.bias)} (95 % bounds {number(part.bias_lower)} and {number(part.bias_upper)}) against a "
        f"harmless {number(verdict.harmless_limit)}, family-wise p {number(part.p_adjusted)}, {_norm(dw_q, limits)}, "
        f"rho {number(part.rho)}, {dw_q.sequences} sequences, {result.recipe.name} against {result.reference}"
    )


def _norm(dw_q: GradientCoupling, limits: Thresholds) -> str:
    detected = "" if dw_q.signal_p < limits.signal_alpha else ", mean gradient not detected"
    return f"|dW_Q| {number(dw_q.norm)}{detected}"


def _delta_numbers(head: HeadEvidence, verdict: HeadVerdict) -> str:
    delta = head.delta_defect
    if delta is None:
        return "no delta"
    return (
        f"delta defect {number(delta.mean)} a row, {delta.positive:,} up, {delta.negative:,} down, {delta.zero:,} "
        f"neither; by sequence t {number(delta.clustered.t)}, family-wise p {number(verdict.delta_p_adjusted)}"
    )


def _try_flip(recipe: Recipe, point: str, command: Sequence[str], code: str) -> str:
    name = flipped(recipe, point)
    return f"bf16forensics explain {code}" if name is None else rerun(command, "--recipe", name)


def _coupling(head: HeadEvidence) -> GradientCoupling:
    if head.dw_q is None:
        raise ValueError(f"{head_name(head.layer, head.head)} was judged on a gradient that it does not have")
    return head.dw_q
