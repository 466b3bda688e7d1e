"""From the gradients of all sequences to `GradientCoupling`, head by head, with family-wise tests.

Shapes: F heads of the family, n sequences, D head size, C width.
"""

import math
from dataclasses import dataclass

import numpy as np

from bf16forensics.evidence.gradient import SummedParts
from bf16forensics.evidence.results import ErrorStatistics, GradientCoupling, StepRatio, Telescope
from bf16forensics.evidence.statistics import (
    UNDEFINED_TEST,
    FlipTest,
    bias_bounds,
    effective_number,
    flip_tests,
    signed_root,
    u_statistic,
)
from bf16forensics.evidence.store import GradientStore

#: p below which the mean gradient counts as detected; without it a gain has nothing to refer to.
_DETECTED_P = 0.05


#: Recorded steps listed one by one for a head.
MOST_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """The sequences of one recorded step."""

    step: int | None
    #: Positions among all sequences, ascending; at least one.
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGrams:
    """Inner products over sequences of one head, float64 [n, n] each."""

    hp: np.ndarray
    defect: np.ndarray
    total: np.ndarray
    #: <hp_i, defect_j> and <hp_i, total_j>.
    hp_defect: np.ndarray
    hp_total: np.ndarray

    @property
    def finite(self) -> bool:
        """Whether every inner product is finite."""
        return all(bool(np.isfinite(m).all()) for m in (self.hp, self.defect, self.total))

    def undefined(self) -> "HeadGrams":
        """The same with nothing known, for a head whose gradients overflowed."""
        unknown = np.full_like(self.hp, math.nan)
        return HeadGrams(hp=unknown, defect=unknown, total=unknown, hp_defect=unknown, hp_total=unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTests:
    """Sign-flip tests of one head for the gradient and for two parts of its error."""

    hp: FlipTest
    defect: FlipTest
    total: FlipTest


#: Tests of a head that is not in the family.
NOT_TESTED = FamilyTests(hp=UNDEFINED_TEST, defect=UNDEFINED_TEST, total=UNDEFINED_TEST)


def head_grams(store: GradientStore, head: int, num_sequences: int) -> HeadGrams:
    """Gram matrices of one head's stored gradients."""
    hp, defect, total = (store.vectors(kind, head, num_sequences) for kind in GradientStore.KINDS)
    # Gradients that overflowed make products that are not finite, which `finite` tells.
    with np.errstate(invalid="ignore", over="ignore"):
        return HeadGrams(
            hp=hp @ hp.T,
            defect=defect @ defect.T,
            total=total @ total.T,
            hp_defect=hp @ defect.T,
            hp_total=hp @ total.T,
        )


def family_tests(grams: list[HeadGrams]) -> list[FamilyTests]:
    """Tests all heads of a run together; only heads with finite Gram matrices may be given."""
    tests = [flip_tests([getattr(gram, kind) for gram in grams]) for kind in GradientStore.KINDS]
    return [FamilyTests(hp=hp, defect=defect, total=total) for hp, defect, total in zip(*tests, strict=True)]


def error_statistics(
    error: np.ndarray, cross: np.ndarray, signal: np.ndarray, test: FlipTest, signal_p: float
) -> ErrorStatistics:
    """U-statistics of one part of the error against the gradient.

    Args:
        error: [n, n] Gram matrix of the error.
        cross: [n, n] inner products <gradient_i, error_j>.
        signal: [n, n] Gram matrix of the gradient.
        test: sign-flip test of the error.
        signal_p: p of the sign-flip test of the gradient.
    """
    bias = bias_bounds(error, test.family_quantile)
    noise = _noise_power(error)
    sampling = _noise_power(signal)
    s_square = u_statistic(signal)
    return ErrorStatistics(
        rho=math.sqrt(noise / sampling) if sampling > 0 else math.nan,
        bias=bias.value,
        bias_lower=bias.lower,
        bias_upper=bias.upper,
        minimum_detectable=bias.minimum_detectable,
        p=test.p,
        p_adjusted=test.p_adjusted,
        n_effective=effective_number(np.diag(error)),
        gain=u_statistic(cross) / s_square if s_square > 0 and signal_p < _DETECTED_P else math.nan,
    )


def _noise_power(gram: np.ndarray) -> float:
    """mean |x_i|^2 - U: power of the vectors around their mean; nan for n < 2."""
    if gram.shape[0] < 2:
        return math.nan
    noise = float(np.diag(gram).mean()) - u_statistic(gram)
    # U never exceeds the mean square: a negative difference is rounding.
    return 0.0 if noise < 0 else noise


def gradient_coupling(
    store: GradientStore,
    head: int,
    grams: HeadGrams,
    tests: FamilyTests,
    sums: SummedParts,
    head_in_layer: int,
    key_mean: np.ndarray,
    steps: tuple[StepSpan, ...],
    functional_relative: float,
) -> GradientCoupling:
    """Everything about how one head's delta error reaches its W_Q.

    Args:
        store: gradients of all heads.
        head: index of the head in the store.
        grams: its inner products.
        tests: its tests.
        sums: the layer's sums of the parts that are not stored by sequence.
        head_in_layer: index of the head in `sums`.
        key_mean: [D] mean key as the head's W_Q sees it.
        steps: the recorded steps in order.
        functional_relative: see `functional.score_variance`; nan when not computed.
    """
    n = grams.hp.shape[0]
    hp, defect, total = (store.vectors(kind, head, n) for kind in GradientStore.KINDS)
    g, e_defect, e_total = hp.mean(0), defect.mean(0), total.mean(0)
    norm = float(np.linalg.norm(g))
    shape = sums.full.shape[1:]
    parts = {
        name: getattr(sums, name)[head_in_layer].reshape(-1) / n for name in ("full", "scores", "cast_ds", "cast_dq")
    }
    return GradientCoupling(
        norm=norm,
        error_full_relative=_relative(parts["full"], norm),
        error_defect_relative=_relative(e_defect, norm),
        error_total_relative=_relative(e_total, norm),
        sequences=n,
        sampling_noise=math.sqrt(_noise_power(grams.hp)),
        signal=signed_root(u_statistic(grams.hp)),
        signal_p=tests.hp.p,
        defect=error_statistics(grams.defect, grams.hp_defect, grams.hp, tests.defect, tests.hp.p),
        total=error_statistics(grams.total, grams.hp_total, grams.hp, tests.total, tests.hp.p),
        telescope=_telescope(parts, e_defect, e_total, norm),
        functional_relative=functional_relative,
        flat_share=_flat_share(defect.reshape(n, *shape), key_mean),
        flat_share_gradient=_flat_share(hp.reshape(n, *shape), key_mean),
        coherence=_coherence(defect.sum(0), sums, head_in_layer),
        coherence_direction=_coherence(sums.direction[head_in_layer], sums, head_in_layer),
        coherence_steps=_split_half(grams.defect, steps),
        steps=tuple(_step_ratio(span, hp, defect, total) for span in steps[:MOST_STEPS]),
    )


def _relative(error: np.ndarray, norm: float) -> float:
    return float(np.linalg.norm(error)) / norm if 0 < norm < math.inf else math.nan


def _telescope(parts: dict[str, np.ndarray], e_defect: np.ndarray, e_total: np.ndarray, norm: float) -> Telescope:
    power = float(e_total @ e_total)

    def share(part: np.ndarray) -> float:
        return float(part @ e_total) / power if power > 0 else math.nan

    shares = [share(part) for part in (parts["scores"], e_defect, parts["cast_ds"], parts["cast_dq"])]
    return Telescope(
        share_scores=shares[0],
        share_defect=shares[1],
        share_cast_ds=shares[2],
        share_cast_dq=shares[3],
        share_rest=1.0 - sum(shares),
        scores_relative=_relative(parts["scores"], norm),
        defect_relative=_relative(e_defect, norm),
        cast_ds_relative=_relative(parts["cast_ds"], norm),
        cast_dq_relative=_relative(parts["cast_dq"], norm),
    )


def _flat_share(gradients: np.ndarray, key_mean: np.ndarray) -> float:
    """Share of the gradients' power [n, D, C] along the mean key, the direction of W_Q that shifts whole rows."""
    power, length = float((gradients**2).sum()), float(key_mean @ key_mean)
    if not (power > 0 and length > 0):
        return math.nan
    along = np.einsum("d,ndc->nc", key_mean, gradients)
    return float((along**2).sum()) / (length * power)


def _coherence(total: np.ndarray, sums: SummedParts, head: int) -> float:
    """(|sum of rank-one terms|^2 - sum w^2) / ((sum w)^2 - sum w^2)."""
    square = float(sums.weight_square_sum[head])
    cross = float(sums.weight_sum[head]) ** 2 - square
    return (float((total**2).sum()) - square) / cross if cross > 0 else math.nan


def _split_half(gram: np.ndarray, steps: tuple[StepSpan, ...]) -> float:
    """<E_A, E_B> / sqrt(U_A U_B) for the even and the odd recorded steps; nan where a half shows no error."""
    halves = [[index for span in steps[i::2] for index in span.sequences] for i in (0, 1)]
    if min(len(half) for half in halves) < 2:
        return math.nan
    a, b = (u_statistic(gram[np.ix_(half, half)]) for half in halves)
    between = float(gram[np.ix_(halves[0], halves[1])].mean())
    return between / math.sqrt(a * b) if a > 0 and b > 0 else math.nan


def _step_ratio(span: StepSpan, hp: np.ndarray, defect: np.ndarray, total: np.ndarray) -> StepRatio:
    chosen = list(span.sequences)
    norm = float(np.linalg.norm(hp[chosen].mean(0)))
    return StepRatio(
        step=span.step,
        sequences=len(span.sequences),
        norm=norm,
        error_defect_relative=_relative(defect[chosen].mean(0), norm),
        error_total_relative=_relative(total[chosen].mean(0), norm),
    )
