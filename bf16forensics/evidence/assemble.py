"""From a layer's running sums to `HeadEvidence`. Evidence that a non-finite input touches becomes nan, never 0."""

import math
from dataclasses import dataclass

import numpy as np

from bf16forensics.evidence.accumulate import LayerAccumulator
from bf16forensics.evidence.coupling import MOST_STEPS
from bf16forensics.evidence.gradient_products import StepSpan
from bf16forensics.evidence.results import (
    GradientCoupling,
    HeadEvidence,
    Ones,
    OutputError,
    RowCounts,
    SignedStatistics,
    Spectrum,
)
from bf16forensics.evidence.series import SignedSeries, undefined_statistics
from bf16forensics.evidence.sign_flips import UNDEFINED_SUM_TEST, SumTest
from bf16forensics.evidence.summary import MaximaSummary
from bf16forensics.evidence.ties import TiePoint, tie_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTests:
    """Sign-flip tests of one head's signed quantities within the family of all heads."""

    delta_err: SumTest = UNDEFINED_SUM_TEST
    defect: SumTest = UNDEFINED_SUM_TEST
    ds_row_sum: SumTest = UNDEFINED_SUM_TEST


#: Tests of a head that is not in the family.
NOT_TESTED = DeltaTests()


def head_evidence(
    layer: int,
    head: int,
    kv_head: int,
    accumulator: LayerAccumulator,
    spectrum: Spectrum | None,
    dw_q: GradientCoupling | None,
    nonfinite: tuple[str, ...],
    tests: DeltaTests = NOT_TESTED,
    steps: tuple[StepSpan, ...] = (),
    ones_counted: bool = True,
    tie_point: TiePoint | None = None,
) -> HeadEvidence:
    """Assembles one head.

    Args:
        layer: 0-based.
        head: 0-based query head.
        kv_head: key/value head it reads.
        accumulator: the layer's sums, at least one sequence.
        spectrum: norms of its projections.
        dw_q: gradient coupling; the caller passes None where there is no dO or X, or where it is undefined.
        nonfinite: names of non-finite inputs of this head.
        tests: of its signed quantities, within the family of all heads.
        steps: the recorded steps in order.
        ones_counted: whether P-bar = 1 marks the row maximum in the recipe.
        tie_point: the rounding that ends the recipe's sums; None for no tie statistics.
    """
    forward = not _touched(nonfinite, ("q[", "k[", "v["))
    backward = delta_defined(nonfinite)
    maxima = accumulator.maxima
    if maxima is None:
        raise ValueError("head_evidence needs at least one sequence")

    ties = None
    if ones_counted and forward and tie_point is not None and accumulator.ties is not None:
        ties = tie_statistics(accumulator.ties, head, tie_point)

    def signed(series: SignedSeries, test: SumTest) -> SignedStatistics | None:
        if not accumulator.has_delta:
            return None
        spans = [span.sequences for span in steps[:MOST_STEPS]]
        return series.result(head, test, spans) if backward else undefined_statistics(accumulator.num_sequences)

    return HeadEvidence(
        layer=layer,
        head=head,
        kv_head=kv_head,
        delta_err=signed(accumulator.delta_err, tests.delta_err),
        delta_defect=signed(accumulator.defect, tests.defect),
        ds_row_sum=signed(accumulator.ds_row_sum, tests.ds_row_sum),
        output_err=_output(accumulator, head) if forward else _undefined_output(),
        ones=_ones(maxima, head, forward) if ones_counted else None,
        counts=_counts(maxima, head, forward, accumulator.has_delta and backward, ones_counted),
        ties=ties,
        pairs=int(maxima.pairs[head]),
        score_abs_max=float(maxima.score_abs_max[head]) if forward else math.nan,
        spectrum=spectrum,
        dw_q=dw_q,
        nonfinite=nonfinite,
    )


def delta_defined(nonfinite: tuple[str, ...]) -> bool:
    """Whether delta and its errors mean anything for a head with these non-finite inputs."""
    return not _touched(nonfinite, ("q[", "k[", "v[", "do["))


def _touched(nonfinite: tuple[str, ...], tensors: tuple[str, ...]) -> bool:
    return any(name.startswith(tensors) for name in nonfinite)


def _ones(maxima: MaximaSummary, head: int, forward: bool) -> Ones:
    if not forward:
        return Ones(fp32_exact=0, rounded=0, shared_maximum=0)
    return Ones(
        fp32_exact=int(maxima.ones_fp32[head]),
        rounded=int(maxima.ones_rounded[head]),
        shared_maximum=int(maxima.shared[head]),
    )


def _counts(maxima: MaximaSummary, head: int, forward: bool, backward: bool, ones_counted: bool) -> RowCounts:
    rows = int(maxima.rows[head]) if forward else 0

    def share(part: np.ndarray, whole: np.ndarray) -> float:
        return float(part[head]) / float(whole[head]) if backward and whole[head] != 0 else math.nan

    def count(values: np.ndarray) -> int:
        return int(values[head]) if forward else 0

    return RowCounts(
        rows=rows,
        rows_repeated_max=count(maxima.rows_repeated) if ones_counted else None,
        rows_repeated_max_unlabelled=count(maxima.rows_repeated_unlabelled) if ones_counted else None,
        rows_near_max=count(maxima.rows_near),
        rows_fully_masked=int(maxima.rows_fully_masked[head]),
        rows_padding=int(maxima.rows_padding[head]),
        rows_swamped=count(maxima.rows_swamped),
        swamped_power_share=share(maxima.defect_power_swamped, maxima.defect_power),
        repeated_sum_share=share(maxima.defect_sum_repeated, maxima.defect_sum) if ones_counted else math.nan,
        sink_share=float(maxima.sink_sum[head]) / rows if rows else math.nan,
        most_ones=count(maxima.most_ones) if ones_counted else None,
    )


def _output(accumulator: LayerAccumulator, head: int) -> OutputError:
    output = accumulator.output
    if output is None or output.max_position[head] < 0:
        return _undefined_output()
    features = output.sign_sum.shape[1]
    count = output.sign_count[head]
    correlation = np.divide(output.sign_sum[head], count, out=np.zeros(features), where=count > 0)
    strongest = int(np.abs(correlation).argmax())
    position, elements = int(output.max_position[head]), float(output.ulp_count[head])
    return OutputError(
        mean_ulp=float(output.ulp_sum[head]) / elements if elements else math.nan,
        max_abs=float(output.max_abs[head]),
        max_ulp=float(output.max_ulp[head]),
        sequence=int(accumulator.max_sequence[head]),
        token=position // features,
        feature=position % features,
        sign_correlation=float(correlation[strongest]) if count.any() else math.nan,
        sign_correlation_feature=strongest if count.any() else None,
    )


def _undefined_output() -> OutputError:
    return OutputError(
        mean_ulp=math.nan,
        max_abs=math.nan,
        max_ulp=math.nan,
        sequence=None,
        token=None,
        feature=None,
        sign_correlation=math.nan,
        sign_correlation_feature=None,
    )
