"""The JSON document of a localize run: the contract for scripts.

Keys keep their order. Fields may be added within a schema version, never renamed or removed. Everything outside
`environment.volatile` is the same, byte for byte, for repeated runs and for any number of threads.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from bf16forensics.evidence.results import ErrorStatistics, GradientCoupling, HeadEvidence, SignedStatistics
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.report.environment import Environment, environment_object
from bf16forensics.report.jsonio import opening, plain
from bf16forensics.report.observation import observation_json
from bf16forensics.verdict.findings import HeadVerdict, Judgement
from bf16forensics.verdict.words import head_name

#: The flat fields of `dw_q` that come from the defect part, in the contract's order and after it.
_DEFECT_FIELDS = ("rho", "bias", "bias_upper", "minimum_detectable", "p_adjusted")
_MORE_DEFECT_FIELDS = ("bias_lower", "p", "gain")
#: Fields of a signed quantity that stand apart in the document, and their names there.
_RUNNING = {"running_tokens": "tokens", "running_steps": "steps"}


def document(
    result: LocalizeResult, judgement: Judgement, *, command: Sequence[str], environment: Environment
) -> dict[str, object]:
    """Builds the document of one run.

    Args:
        result: what was measured.
        judgement: what was concluded.
        command: the command as run, program name first.
        environment: versions and machine.

    Returns:
        Dictionaries, lists, strings, integers, booleans, None and finite floats only; floats that are not finite are
        the strings "nan", "inf" and "-inf".
    """
    verdicts = {(head.layer, head.head): head for head in judgement.heads}
    heads = sorted(result.heads, key=lambda head: (head.layer, head.head))
    built: dict[str, object] = {
        **opening(command, tool_version=environment.tool_version),
        "environment": environment_object(environment, _fields(result.timing)),
        "inputs": _inputs(result),
        "recipe": result.recipe,
        "reference": result.reference,
        "verdict": judgement.verdict,
        "findings": judgement.findings,
        "heads": [_head(head, verdicts[head.layer, head.head], judgement) for head in heads],
        "unused_tensors": result.unused_tensors,
        "backend": result.backend,
        "summary": judgement.summary,
        "verdict_counts": dict(judgement.counts()),
        "ranking": [head_name(*key) for key in judgement.ranking],
        "thresholds": judgement.thresholds,
        "not_checked": judgement.not_checked,
        "next_commands": judgement.next_commands,
    }
    if result.observation is not None:
        built["observation"] = observation_json(result.observation)
    return {key: plain(value) for key, value in built.items()}


def _inputs(result: LocalizeResult) -> dict[str, object]:
    names = (
        "kind activations shape num_layers num_heads num_kv_heads head_size scale causal window softcap sequences "
        "sequences_planned interrupted tokens steps step_sequences loss notes layer_windows no_gradient"
    ).split()
    return {
        "files": result.inputs,
        **{name: getattr(result, name) for name in names},
        "capture": result.options,
    }


def _head(head: HeadEvidence, verdict: HeadVerdict, judgement: Judgement) -> dict[str, object]:
    counts, spectrum = _fields(head.counts), head.spectrum
    first = ("rows", "rows_repeated_max", "rows_fully_masked")
    return {
        "layer": head.layer,
        "head": head.head,
        "delta_err": _signed(head.delta_err),
        "delta_defect": _signed(head.delta_defect),
        "output_err": _reordered(head.output_err, ("mean_ulp", "max_abs", "token", "feature")),
        "ones": head.ones,
        **{name: counts.pop(name) for name in first},
        "w_q_spectral_norm": None if spectrum is None else spectrum.w_q_spectral_norm,
        "w_k_spectral_norm": None if spectrum is None else spectrum.w_k_spectral_norm,
        "dw_q": None if head.dw_q is None else _coupling(head.dw_q, judgement.thresholds.signal_alpha),
        "name": head_name(head.layer, head.head),
        "kv_head": head.kv_head,
        "verdict": verdict.verdict,
        "code": verdict.code,
        "reason": verdict.reason,
        "harmless_limit": verdict.harmless_limit,
        "sequences_needed": verdict.sequences_needed,
        "delta_biased": verdict.delta_biased,
        "delta_p_adjusted": verdict.delta_p_adjusted,
        **counts,
        "pairs": head.pairs,
        "score_abs_max": head.score_abs_max,
        "ds_row_sum": _signed(head.ds_row_sum),
        "running_sums": {
            "delta_err": _running(head.delta_err),
            "delta_defect": _running(head.delta_defect),
            "ds_row_sum": _running(head.ds_row_sum),
        },
        "spectrum": spectrum,
        "nonfinite": head.nonfinite,
        "ties": head.ties,
    }


def _signed(statistics: SignedStatistics | None) -> dict[str, object] | None:
    """The statistics without the running sums, which depend on where a row stands in its sequence."""
    if statistics is None:
        return None
    return {name: value for name, value in _fields(statistics).items() if name not in _RUNNING}


def _running(statistics: SignedStatistics | None) -> dict[str, object] | None:
    if statistics is None:
        return None
    return {short: getattr(statistics, name) for name, short in _RUNNING.items()}


def _coupling(dw_q: GradientCoupling, signal_alpha: float) -> dict[str, object]:
    defect: ErrorStatistics = dw_q.defect
    rest = _fields(dw_q)
    for name in ("defect", "total", "telescope", "steps"):
        del rest[name]
    head = ("norm", "error_full_relative", "error_defect_relative", "error_total_relative", "sequences")
    tail = ("functional_relative", "flat_share", "coherence")
    return {
        **{name: rest.pop(name) for name in head},
        "n_effective": defect.n_effective,
        **{name: getattr(defect, name) for name in _DEFECT_FIELDS},
        **{name: rest.pop(name) for name in tail},
        **{name: getattr(defect, name) for name in _MORE_DEFECT_FIELDS},
        **rest,
        "norm_detected": dw_q.signal_p < signal_alpha,
        "total": dw_q.total,
        "telescope": dw_q.telescope,
        "steps": dw_q.steps,
    }


def _fields(value: object) -> dict[str, object]:
    """The fields of a dataclass, unconverted, in their order."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]


def _reordered(value: object, first: Sequence[str]) -> Mapping[str, object]:
    fields = _fields(value)
    return {**{name: fields.pop(name) for name in first}, **fields}
