"""What the three heat maps of a figure show: numbers by layer and head, scales and letters. Nothing is drawn here."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16forensics.evidence.results import GradientCoupling, HeadEvidence
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.verdict.findings import (
    BIAS_WITHOUT_COUPLING,
    CANNOT_JUDGE,
    COMPOUNDING_BIAS,
    NOISE_ABOVE_SAMPLING,
    NOISE_AT_CHANCE,
    Judgement,
)
from bf16forensics.verdict.words import number

#: The letter of a verdict in a cell.
LETTERS = {
    COMPOUNDING_BIAS: "B",
    NOISE_ABOVE_SAMPLING: "S",
    BIAS_WITHOUT_COUPLING: "d",
    CANNOT_JUDGE: "?",
    NOISE_AT_CHANCE: "n",
}
#: log10 rho that the scale covers in any case, and decades that it covers at most: dark is never far below rho = 1.
_RHO_ENDS, _RHO_DECADES = (-3.0, 0.0), 6.0
#: Decades that either half of the scale of the bias covers at least and at most.
_BIAS_DECADES = (1.0, 3.0)
#: The end of the scale of t lies between these: what chance gives never looks like much, and beyond 12 all is certain.
_T_ENDS = (6.0, 12.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One heat map."""

    #: Two lines of heading.
    title: str
    note: str
    #: Label of the colour bar.
    unit: str
    #: (layers, heads); nan where not defined, else as printed in the cells. May lie beyond the scale.
    values: NDArray[np.float64]
    #: Ends of the colour scale; both positive where `log`.
    low: float
    high: float
    log: bool
    #: The middle of the scale has a meaning.
    diverging: bool
    #: Marks of the colour bar.
    ticks: tuple[float, ...]
    #: A value as printed in a cell, at most about five characters.
    text: Callable[[float], str]


def letters(judgement: Judgement) -> dict[tuple[int, int], str]:
    """Letter of the verdict by (layer, head)."""
    return {(head.layer, head.head): LETTERS[head.verdict] for head in judgement.heads}


def panels(result: LocalizeResult, judgement: Judgement) -> tuple[Panel, Panel, Panel]:
    """The three panels: of the gradient where any head has one, else of the forward pass.

    Args:
        result: what was measured. Heads that it lacks are nan.
        judgement: the harmless limits of the same heads.
    """
    if all(head.dw_q is None for head in result.heads):
        return _defect(result), _output(result), _repeated(result)
    limits = {(head.layer, head.head): head.harmless_limit for head in judgement.heads}
    return _rho(result), _bias(result, limits), _defect(result)


def _rho(result: LocalizeResult) -> Panel:
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log10(_grid(result, lambda head: math.nan if head.dw_q is None else head.dw_q.defect.rho))
    finite = values[np.isfinite(values)]
    high = math.ceil(2 * float(finite.max(initial=_RHO_ENDS[1]))) / 2
    low = max(math.floor(2 * float(finite.min(initial=_RHO_ENDS[0]))) / 2, high - _RHO_DECADES)
    return Panel(
        title="log\u2081\u2080 \u03c1 of the \u03b4 part",
        note="\u03c1: rounding noise over sampling noise of dW_Q",
        unit="log\u2081\u2080 \u03c1   (0: as large as sampling noise)",
        values=values,
        low=low,
        high=high,
        log=False,
        diverging=False,
        ticks=_steps(low, high),
        text=lambda value: f"{value:.1f}",
    )


def _bias(result: LocalizeResult, limits: dict[tuple[int, int], float]) -> Panel:
    def ratio(head: HeadEvidence) -> float:
        limit = limits.get((head.layer, head.head), math.nan)
        return math.nan if head.dw_q is None else _larger_upper(head.dw_q) / limit

    values = _grid(result, ratio)
    positive = values[np.isfinite(values) & (values > 0)]
    half = float(np.abs(np.log10(positive)).max(initial=0.0))
    half = min(max(math.ceil(2 * half) / 2, _BIAS_DECADES[0]), _BIAS_DECADES[1])
    marks = [digit * 10.0**power for power in range(-3, 4) for digit in ((1, 3) if half < 2 else (1,))]
    return Panel(
        title="bias of dW_Q over the harmless limit",
        note="95 % upper bound; below 1 a harmful bias is excluded",
        unit="upper bound of B / limit",
        values=values,
        low=10.0**-half,
        high=10.0**half,
        log=True,
        diverging=True,
        ticks=tuple(mark for mark in marks if 10.0**-half <= mark <= 10.0**half),
        text=lambda value: f"{value:.0f}" if 99.5 <= value < 9999.5 else number(value, 2),
    )


def _defect(result: LocalizeResult) -> Panel:
    values = _grid(result, lambda head: math.nan if head.delta_defect is None else head.delta_defect.clustered.t)
    end = min(max(math.ceil(_largest(values)), _T_ENDS[0]), _T_ENDS[1])
    return Panel(
        title="t of the \u03b4 defect",
        note="signed; mean over sequences / its standard error",
        unit="t by sequence",
        values=values,
        low=-end,
        high=end,
        log=False,
        diverging=True,
        ticks=_steps(-end, end),
        text=lambda value: f"{value:+.1f}" if abs(value) < 9.95 else f"{value:+.0f}",
    )


def _output(result: LocalizeResult) -> Panel:
    values = _grid(result, lambda head: head.output_err.mean_ulp)
    end = _largest(values) or 1.0
    # Up to the next 1, 2 or 5 of its decade.
    decade = 10.0 ** math.floor(math.log10(end))
    end = next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= 0.999 * end)
    return Panel(
        title="mean error of O",
        note="signed, O_lp \u2212 O_hp; + is away from zero",
        unit="ulp of O",
        values=values,
        low=-end,
        high=end,
        log=False,
        diverging=True,
        ticks=(-end, -end / 2, 0.0, end / 2, end),
        text=lambda value: number(value, 1),
    )


def _repeated(result: LocalizeResult) -> Panel:
    def share(head: HeadEvidence) -> float:
        repeated = head.counts.rows_repeated_max
        return repeated / head.counts.rows if head.counts.rows and repeated is not None else math.nan

    values = 100 * _grid(result, share)
    end = next(end for end in (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0) if end >= min(_largest(values), 100.0))
    return Panel(
        title="rows with repeated maxima",
        note="two or more P\u0304 = 1 after rounding to BF16",
        unit="% of the rows",
        values=values,
        low=0.0,
        high=end,
        log=False,
        diverging=False,
        ticks=_steps(0.0, end),
        text=lambda value: f"{value:.0f}" if value >= 9.95 else number(value, 2),
    )


def _grid(result: LocalizeResult, read: Callable[[HeadEvidence], float]) -> NDArray[np.float64]:
    layers = max([result.num_layers, 1, *(head.layer + 1 for head in result.heads)])
    heads = max([result.num_heads, 1, *(head.head + 1 for head in result.heads)])
    values = np.full((layers, heads), math.nan)
    for head in result.heads:
        values[head.layer, head.head] = read(head)
    return values


def _larger_upper(dw_q: GradientCoupling) -> float:
    """The larger upper bound of the two parts; nan if either is, because "noise" needs both."""
    bounds = (dw_q.defect.bias_upper, dw_q.total.bias_upper)
    return math.nan if any(math.isnan(bound) for bound in bounds) else max(bounds)


def _largest(values: NDArray[np.float64]) -> float:
    """Largest finite magnitude; 0 without any."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _steps(low: float, high: float) -> tuple[float, ...]:
    """Round marks from one end to the other, seven at most."""
    step = next(step for step in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0) if (high - low) / step <= 6)
    first, last = math.ceil(low / step), math.floor(high / step)
    return tuple(index * step for index in range(first, last + 1))
