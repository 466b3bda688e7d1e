"""From the gradients of all sequences to `GradientCoupling`, head by head, with family-wise tests.

Shapes: F heads of the family, n sequences, D head size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from bf16forensics.evidence.gradient_products import HeadGrams, HeadProducts, StepSpan
from bf16forensics.evidence.results import ErrorStatistics, GradientCoupling, StepRatio, Telescope
from bf16forensics.evidence.sign_flips import UNDEFINED_TEST, FlipTest, flip_tests
from bf16forensics.evidence.statistics import bias_bounds, effective_number, signed_root, u_statistic
from bf16forensics.evidence.store import GradientStore

#: p below which the mean gradient counts as detected; without it a gain has nothing to refer to.
_DETECTED_P = 0.05

#: Recorded steps listed one by one for a head.
MOST_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTests:
    """Sign-flip tests of one head for the gradient and for two parts of its error."""

    hp: FlipTest
    defect: FlipTest
    total: FlipTest


#: Tests of a head that is not in the family.
NOT_TESTED = FamilyTests(hp=UNDEFINED_TEST, defect=UNDEFINED_TEST, total=UNDEFINED_TEST)


def family_tests(grams: Sequence[HeadGrams], device: torch.device | None = None) -> list[FamilyTests]:
    """Tests all heads of a run together; only heads with finite Gram matrices may be given.

    Args:
        grams: of all heads.
        device: see `flip_tests`.
    """
    tests = [flip_tests([getattr(gram, kind) for gram in grams], device) for kind in GradientStore.KINDS]
    return [FamilyTests(hp=hp, defect=defect, total=total) for hp, defect, total in zip(*tests, strict=True)]


def error_statistics(
    error: np.ndarray, cross: np.ndarray, signal: np.ndarray, tests: Sequence[FlipTest], signal_p: np.ndarray
) -> list[ErrorStatistics]:
    """U-statistics of one part of the error against the gradient, for F heads at once.

    Args:
        error: [F, n, n] Gram matrices of the error.
        cross: [F, n, n] inner products <gradient_i, error_j>.
        signal: [F, n, n] Gram matrices of the gradient.
        tests: [F] sign-flip tests of the error.
        signal_p: [F] p of the sign-flip tests of the gradient.
    """
    bias = bias_bounds(error, np.array([test.family_quantile for test in tests]))
    noise, sampling = _noise_power(error), _noise_power(signal)
    s_square = u_statistic(signal)
    has_gain = (s_square > 0) & (signal_p < _DETECTED_P)
    figures = {
        "rho": np.where(sampling > 0, np.sqrt(noise / np.where(sampling > 0, sampling, 1.0)), math.nan),
        "bias": bias.value,
        "bias_lower": bias.lower,
        "bias_upper": bias.upper,
        "minimum_detectable": bias.minimum_detectable,
        "n_effective": effective_number(np.diagonal(error, axis1=-2, axis2=-1)),
        "gain": np.where(has_gain, u_statistic(cross) / np.where(has_gain, s_square, 1.0), math.nan),
    }
    rows = zip(tests, *(values.tolist() for values in figures.values()), strict=True)
    return [
        ErrorStatistics(p=test.p, p_adjusted=test.p_adjusted, **dict(zip(figures, row, strict=True)))
        for test, *row in rows
    ]


def _noise_power(gram: np.ndarray) -> np.ndarray:
    """mean |x_i|^2 - U, [...]: power of the vectors around their mean; nan for n < 2."""
    # U never exceeds the mean square: a negative difference is rounding.
    return np.maximum(np.diagonal(gram, axis1=-2, axis2=-1).mean(-1) - u_statistic(gram), 0.0)


def gradient_couplings(
    grams: Sequence[HeadGrams],
    products: Sequence[HeadProducts],
    tests: Sequence[FamilyTests],
    steps: tuple[StepSpan, ...],
    functional_relative: Sequence[float],
) -> list[GradientCoupling]:
    """Everything about how the delta errors of F heads reach their W_Q.

    Args:
        grams: [F] Gram matrices, all of the same n.
        products: [F] lengths and inner products, of the first `MOST_STEPS` of the steps.
        tests: [F] sign-flip tests.
        steps: the recorded steps in order.
        functional_relative: [F], see `functional.score_variance`; nan when not computed.
    """
    if len(grams) == 0:
        return []
    hp, defect, total, hp_defect, hp_total = (
        np.stack([getattr(gram, field.name) for gram in grams]) for field in fields(HeadGrams)
    )
    signal_p = np.array([test.hp.p for test in tests])
    of_defect = error_statistics(defect, hp_defect, hp, [test.defect for test in tests], signal_p)
    of_total = error_statistics(total, hp_total, hp, [test.total for test in tests], signal_p)
    noise, signal = np.sqrt(_noise_power(hp)).tolist(), signed_root(u_statistic(hp)).tolist()
    halves = _split_halves(defect, steps)
    return [
        GradientCoupling(
            norm=own.norm,
            error_full_relative=_relative(own.lengths["full"], own.norm),
            error_defect_relative=_relative(own.lengths["defect"], own.norm),
            error_total_relative=_relative(own.lengths["total"], own.norm),
            sequences=hp.shape[-1],
            sampling_noise=noise[index],
            signal=signal[index],
            signal_p=tests[index].hp.p,
            defect=of_defect[index],
            total=of_total[index],
            telescope=_telescope(own),
            functional_relative=functional_relative[index],
            flat_share=_flat_share(own.flat_defect, own.key_square),
            flat_share_gradient=_flat_share(own.flat_hp, own.key_square),
            coherence=_coherence(own.coherent, own),
            coherence_direction=_coherence(own.coherent_direction, own),
            coherence_steps=halves[index],
            steps=tuple(
                StepRatio(
                    step=span.step,
                    sequences=len(span.sequences),
                    norm=length,
                    error_defect_relative=_relative(defect_length, length),
                    error_total_relative=_relative(total_length, length),
                )
                for span, (length, defect_length, total_length) in zip(steps, own.steps, strict=False)
            ),
        )
        for index, own in enumerate(products)
    ]


def _relative(length: float, norm: float) -> float:
    return length / norm if 0 < norm < math.inf else math.nan


def _telescope(own: HeadProducts) -> Telescope:
    power = own.along_total["total"]
    shares = [
        own.along_total[name] / power if power > 0 else math.nan for name in ("scores", "defect", "cast_ds", "cast_dq")
    ]
    return Telescope(
        share_scores=shares[0],
        share_defect=shares[1],
        share_cast_ds=shares[2],
        share_cast_dq=shares[3],
        share_rest=1.0 - sum(shares),
        scores_relative=_relative(own.lengths["scores"], own.norm),
        defect_relative=_relative(own.lengths["defect"], own.norm),
        cast_ds_relative=_relative(own.lengths["cast_ds"], own.norm),
        cast_dq_relative=_relative(own.lengths["cast_dq"], own.norm),
    )


def _flat_share(flat: tuple[float, float], key_square: float) -> float:
    """Share of the gradients' power along the mean key, the direction of W_Q that shifts whole rows."""
    along, power = flat
    return along / (key_square * power) if power > 0 and key_square > 0 else math.nan


def _coherence(coherent: float, own: HeadProducts) -> float:
    """(|sum of rank-one terms|^2 - sum w^2) / ((sum w)^2 - sum w^2)."""
    cross = own.weight_sum**2 - own.weight_square_sum
    return (coherent - own.weight_square_sum) / cross if cross > 0 else math.nan


def _split_halves(grams: np.ndarray, steps: tuple[StepSpan, ...]) -> list[float]:
    """<E_A, E_B> / sqrt(U_A U_B) for the even and the odd recorded steps, [F]; nan where a half shows no error."""
    halves = [[index for span in steps[i::2] for index in span.sequences] for i in (0, 1)]
    if min(len(half) for half in halves) < 2:
        return [math.nan] * len(grams)
    a, b = (u_statistic(_chosen(grams, half, half)) for half in halves)
    between = _chosen(grams, *halves).mean((-2, -1))
    is_some = (a > 0) & (b > 0)
    found: list[float] = np.where(is_some, between / np.sqrt(np.where(is_some, a * b, 1.0)), math.nan).tolist()
    return found


def _chosen(grams: np.ndarray, rows: list[int], columns: list[int]) -> np.ndarray:
    return np.ascontiguousarray(grams[:, rows][..., columns])
