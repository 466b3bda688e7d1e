"""The table of the most suspicious heads."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bf16forensics.evidence.results import GradientCoupling, HeadEvidence
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.report.glyphs import Glyphs
from bf16forensics.report.layout import BLANK, Line, labelled, row
from bf16forensics.verdict.findings import (
    BIAS_WITHOUT_COUPLING,
    CANNOT_JUDGE,
    COMPOUNDING_BIAS,
    NOISE_ABOVE_SAMPLING,
    NOISE_AT_CHANCE,
    HeadVerdict,
    Judgement,
)
from bf16forensics.verdict.words import count, head_name, number

#: Verdicts in a table; the line of counts above it gives the meanings.
SHORT = {
    COMPOUNDING_BIAS: "BIAS",
    NOISE_ABOVE_SAMPLING: "NOISE>S",
    BIAS_WITHOUT_COUPLING: "delta",
    CANNOT_JUDGE: "?",
    NOISE_AT_CHANCE: "noise",
}
#: What a cell holds when the evidence does not exist (nan means that it exists and is not defined).
_NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    title: str
    #: Columns of the terminal, the blank before it not counted.
    width: int
    cell: Callable[[HeadEvidence, HeadVerdict, int], str]
    #: Columns leave narrow tables in falling order of this; 0 never leaves.
    leaves: int = 0


def head_table(
    result: LocalizeResult, judgement: Judgement, width: int, glyphs: Glyphs, *, top: int, room: int
) -> list[Line]:
    """The first `top` heads of the ranking as far as `room` lines hold them, with a legend.

    Args:
        result: what was measured.
        judgement: ranking and verdicts.
        width: columns; columns of the table that do not fit are left out and named.
        glyphs: signs to use.
        top: heads wanted, at least 0.
        room: lines for everything, headings, legend and the blank at the end included.

    Returns:
        The lines; none without heads or where not even one head fits.
    """
    columns, left_out = _fitting(_columns(glyphs, judgement.thresholds.signal_alpha), width)
    evidence = {(head.layer, head.head): head for head in result.heads}
    verdicts = {(head.layer, head.head): head for head in judgement.heads}
    legend = _legend(result, judgement, left_out, glyphs, width)
    total = len(judgement.ranking)
    # Beside the rows: heading, legend and blank; one more line where not every head is shown.
    rows = room - len(legend) - 2
    rows = total if total <= min(rows, top) else min(rows - 1, top)
    shown = judgement.ranking[: max(rows, 0)]
    if not shown:
        return []
    lines = [Line(text=row([(column.title, column.width) for column in columns]), style="bold")]
    for key in shown:
        head, verdict = evidence[key], verdicts[key]
        cells = [(column.cell(head, verdict, column.width), column.width) for column in columns]
        lines.append(Line(text=row(cells), style="bold" if verdict.verdict == COMPOUNDING_BIAS else ""))
    if len(shown) < total:
        lines.append(Line(text=f"{len(shown)} of {count(total, 'head')}; all are in the JSON document"))
    return [*lines, *legend, BLANK]


def _columns(glyphs: Glyphs, signal_alpha: float) -> tuple[_Column, ...]:
    return (
        _Column(title="head", width=7, cell=lambda head, _, __: head_name(head.layer, head.head)),
        _Column(title="verdict", width=7, cell=lambda _, verdict, __: SHORT[verdict.verdict]),
        _Column(title="rho", width=5, cell=_coupling(lambda dw_q, _: dw_q.defect.rho)),
        _Column(title="(all)", width=5, leaves=4, cell=_coupling(lambda dw_q, _: dw_q.total.rho)),
        _Column(title="B/lim", width=5, cell=_coupling(lambda dw_q, limit: dw_q.defect.bias / limit)),
        _Column(title="upper", width=5, cell=_coupling(lambda dw_q, limit: _larger_upper(dw_q) / limit)),
        _Column(title="|dW_Q|", width=7, cell=_coupling(lambda dw_q, _: dw_q.norm)),
        _Column(title="err", width=7, cell=_relative_error(signal_alpha)),
        _Column(title=glyphs.delta, width=8, cell=_delta_mean),
        _Column(title="t", width=5, cell=_delta_t),
        _Column(title="O ulp", width=7, leaves=3, cell=lambda head, _, width: _fit(head.output_err.mean_ulp, width)),
        _Column(title="2+ rows", width=7, cell=_repeated),
        _Column(title=glyphs.sigma, width=5, leaves=2, cell=_sigma),
        _Column(title="n_eff", width=5, leaves=1, cell=_coupling(lambda dw_q, _: dw_q.defect.n_effective)),
    )


def _fitting(columns: tuple[_Column, ...], width: int) -> tuple[tuple[_Column, ...], list[str]]:
    kept, left_out = list(columns), []
    while sum(column.width + 1 for column in kept) - 1 > width:
        leaving = max(kept, key=lambda column: column.leaves)
        if not leaving.leaves:
            # Below the narrowest layout the last columns go, whatever they are.
            leaving = kept[-1]
        kept.remove(leaving)
        left_out.append(leaving.title)
    return tuple(kept), left_out


def _legend(
    result: LocalizeResult, judgement: Judgement, left_out: list[str], glyphs: Glyphs, width: int
) -> list[Line]:
    delta = glyphs.delta
    text = (
        f"rho: rounding over sampling noise, {delta} part (all: whole error); B/lim: bias of the {delta} part over the "
        f"harmless limit; upper: larger 95 % bound of the two; err: {delta} part over |dW_Q|; {delta}: mean defect a "
        f"row, t by sequence; 2+ rows: two or more {glyphs.p_bar} = 1; {glyphs.sigma}: of W_Q."
    )
    limit = judgement.thresholds.signal_alpha
    if any(head.dw_q is not None and not head.dw_q.signal_p < limit for head in result.heads):
        text += " (err): the mean gradient is not detected, the ratio is to noise."
    if left_out:
        text += f" Left out at this width: {', '.join(left_out)}."
    return labelled("legend", text, width)


def _coupling(read: Callable[[GradientCoupling, float], float]) -> Callable[[HeadEvidence, HeadVerdict, int], str]:
    def cell(head: HeadEvidence, verdict: HeadVerdict, width: int) -> str:
        return _NONE if head.dw_q is None else _fit(read(head.dw_q, verdict.harmless_limit), width)

    return cell


def _larger_upper(dw_q: GradientCoupling) -> float:
    """The larger upper bound of the two parts; nan if either is, because "noise" needs both."""
    bounds = (dw_q.defect.bias_upper, dw_q.total.bias_upper)
    return math.nan if any(math.isnan(bound) for bound in bounds) else max(bounds)


def _relative_error(signal_alpha: float) -> Callable[[HeadEvidence, HeadVerdict, int], str]:
    def cell(head: HeadEvidence, _: HeadVerdict, width: int) -> str:
        if head.dw_q is None:
            return _NONE
        text = _fit(head.dw_q.error_defect_relative, width - 2)
        return text if head.dw_q.signal_p < signal_alpha else f"({text})"

    return cell


def _delta_mean(head: HeadEvidence, _: HeadVerdict, width: int) -> str:
    return _NONE if head.delta_defect is None else _fit(head.delta_defect.mean, width)


def _delta_t(head: HeadEvidence, _: HeadVerdict, width: int) -> str:
    return _NONE if head.delta_defect is None else _fit(head.delta_defect.clustered.t, width)


def _sigma(head: HeadEvidence, _: HeadVerdict, width: int) -> str:
    return _NONE if head.spectrum is None else _fit(head.spectrum.w_q_spectral_norm, width)


def _repeated(head: HeadEvidence, _: HeadVerdict, __: int) -> str:
    rows = head.counts.rows_repeated_max
    return _NONE if rows is None else _whole(rows)


def _whole(value: int) -> str:
    return str(value) if value < 10**7 else number(float(value), 2)


def _fit(value: float, width: int) -> str:
    """The number with as many of three digits as `width` columns hold."""
    if not math.isfinite(value):
        return str(value)
    return next((text for text in (number(value, digits) for digits in (3, 2)) if len(text) <= width), number(value, 1))
