"""Statistics over sequences: jackknife, U-statistics of vectors given by their Gram matrix, sign-flip tests.

n is the number of sequences. Everything is float64 NumPy.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

#: Sign flips of the test; the smallest p it can give is 1 / (flips + 1).
NUM_FLIPS = 4000
_SEED = 0x5EED
#: Normal quantile of 80 % power.
_POWER_80 = 0.8416212335729143
_CONFIDENCE = 0.95


def student_two_sided(t: float, degrees: int) -> float:
    """Two-sided p of Student's t; nan for a nan t or without degrees of freedom."""
    if degrees < 1 or math.isnan(t):
        return math.nan
    return float(2.0 * stdtr(degrees, -abs(t)))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and jackknife standard error (for a mean: standard deviation over sqrt(n)); nan error for n < 2."""
    if values.size == 0:
        return math.nan, math.nan
    error = float(values.std(ddof=1)) / math.sqrt(values.size) if values.size > 1 else math.nan
    return float(values.mean()), error


def u_statistic(gram: np.ndarray) -> float:
    """(sum over i != j of gram[i, j]) / (n (n - 1)): unbiased for |mean|^2 of the vectors behind a Gram matrix.

    Args:
        gram: [n, n]; for two samples paired by sequence, the matrix of their inner products.

    Returns:
        The statistic; nan for n < 2.
    """
    n = gram.shape[0]
    if n < 2:
        return math.nan
    return float((gram.sum() - np.trace(gram)) / (n * (n - 1)))


def null_deviation(gram: np.ndarray) -> float:
    """Standard deviation of the U-statistic when the vectors' signs are random; nan for n < 2."""
    n = gram.shape[0]
    if n < 2:
        return math.nan
    off = float((gram**2).sum() - (np.diag(gram) ** 2).sum())
    return math.sqrt(2.0 * max(off, 0.0)) / (n * (n - 1))


def jackknife_error(gram: np.ndarray) -> float:
    """Jackknife standard error of `u_statistic` by leaving out one sequence at a time; nan for n < 3."""
    n = gram.shape[0]
    if n < 3:
        return math.nan
    off_sum = gram.sum() - np.trace(gram)
    off_row = gram.sum(1) - np.diag(gram)
    left_out = (off_sum - 2.0 * off_row) / ((n - 1) * (n - 2))
    return math.sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum()))


def centred_null_deviation(gram: np.ndarray) -> float:
    """`null_deviation` of the vectors less their mean: the noise alone, where the mean is not small; nan for n < 2."""
    rows = gram.mean(0, keepdims=True)
    return null_deviation(gram - rows - rows.T + gram.mean())


def variance_along_mean(gram: np.ndarray) -> float:
    """Variance of the mean vector along its own direction; 0 for vectors without a mean, nan for n < 2.

    Each vector is projected on the mean of the others, so that its own noise does not count as agreement.
    """
    n, square = gram.shape[0], float(gram.mean())
    if n < 2:
        return math.nan
    projections = (gram.sum(1) - np.diag(gram)) / (n - 1)
    return float(projections.var(ddof=1)) / (square * n) if square > 0 else 0.0


def signed_root(value: float) -> float:
    """sign(value) sqrt(|value|)."""
    return math.copysign(math.sqrt(abs(value)), value)


def effective_number(weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2; nan when all weights are 0."""
    square = float((weights**2).sum())
    return float(weights.sum()) ** 2 / square if square > 0 else math.nan


def sign_matrix(n: int) -> np.ndarray:
    """[NUM_FLIPS, n] of -1 and 1, the same for every head and every run."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    return generator.integers(0, 2, size=(NUM_FLIPS, n)).astype(np.float64) * 2.0 - 1.0


def flipped_statistics(gram: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """U-statistic over its null deviation under every row of signs, [flips]; zeros when the deviation is 0."""
    n = gram.shape[0]
    deviation = null_deviation(gram)
    if n < 2 or not deviation > 0:
        return np.zeros(signs.shape[0])
    quadratic = np.einsum("fi,fi->f", signs @ gram, signs)
    return np.asarray((quadratic - np.trace(gram)) / (n * (n - 1)) / deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipTest:
    """Sign-flip test of one head within its family."""

    #: p of the head alone and family-wise (maximum over heads under common flips).
    p: float
    p_adjusted: float
    #: 95 % quantile of the family's maximum under flips.
    family_quantile: float


#: Result where there is nothing to test.
UNDEFINED_TEST = FlipTest(p=math.nan, p_adjusted=math.nan, family_quantile=math.nan)


def flip_tests(grams: list[np.ndarray]) -> list[FlipTest]:
    """Tests every head of a family for a non-zero mean vector.

    Heads with a non-finite Gram matrix must have left the family before: one of them would spoil every p.

    Args:
        grams: one [n, n] matrix a head, all of the same n.

    Returns:
        One result a head; p is nan for n < 2.
    """
    if not grams:
        return []
    n = grams[0].shape[0]
    if n < 2:
        return [UNDEFINED_TEST for _ in grams]
    signs = sign_matrix(n)
    flipped = np.stack([flipped_statistics(gram, signs) for gram in grams])
    observed = np.array([flipped_statistics(gram, np.ones((1, n)))[0] for gram in grams])
    largest = flipped.max(0)
    # A flip that restores the data exactly must count although its sum may differ in the last bit.
    slack = 1e-9 * np.maximum(1.0, np.abs(observed))
    quantile = float(np.quantile(largest, _CONFIDENCE))
    return [
        FlipTest(
            p=float((1 + (flipped[i] >= observed[i] - slack[i]).sum()) / (NUM_FLIPS + 1)),
            p_adjusted=float((1 + (largest >= observed[i] - slack[i]).sum()) / (NUM_FLIPS + 1)),
            family_quantile=quantile,
        )
        for i in range(len(grams))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTest:
    """Two-sided sign-flip test of a sum over sequences."""

    #: p of the head alone and family-wise (maximum over heads under common flips).
    p: float
    p_adjusted: float


#: Result where there is nothing to test.
UNDEFINED_SUM_TEST = SumTest(p=math.nan, p_adjusted=math.nan)


def sum_tests(sums: np.ndarray) -> list[SumTest]:
    """Tests every head of a family for a sum that does not average to zero over sequences.

    The statistic is |sum x| / sqrt(sum x^2), whose denominator no flip changes, so heavy tails do no harm. Heads with
    non-finite sums must have left the family before.

    Args:
        sums: [F, n] one signed number a head and sequence.

    Returns:
        One result a head; p is nan for n < 2, and 1 for a head whose sums are all 0.
    """
    heads, n = sums.shape
    if n < 2 or heads == 0:
        return [UNDEFINED_SUM_TEST for _ in range(heads)]
    scale = np.sqrt((sums**2).sum(1))
    scaled = np.divide(sums, scale[:, None], out=np.zeros_like(sums), where=scale[:, None] > 0)
    flipped = np.abs(sign_matrix(n) @ scaled.T)
    observed = np.abs(scaled.sum(1))
    largest = flipped.max(1)
    # As in `flip_tests`: a flip that restores the data exactly must count.
    slack = 1e-9 * np.maximum(1.0, observed)
    return [
        SumTest(
            p=float((1 + (flipped[:, i] >= observed[i] - slack[i]).sum()) / (NUM_FLIPS + 1)),
            p_adjusted=float((1 + (largest >= observed[i] - slack[i]).sum()) / (NUM_FLIPS + 1)),
        )
        for i in range(heads)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """|mean| of the vectors behind a Gram matrix, signed root of the U-statistic, with bounds."""

    value: float
    lower: float
    upper: float
    minimum_detectable: float


def bias_bounds(gram: np.ndarray, family_quantile: float) -> Bias:
    """Bias with one-sided 95 % bounds and the smallest bias the test would find with 80 % power.

    Student's t has n - 1 degrees of freedom. The lower bound lies t standard errors below U, the standard error being
    the larger of the jackknife's and the null deviation. The upper bound is the largest B whose own U-statistic
    would be found no more than t deviations below B^2; the variance of U at B is that of the noise plus 4 B^2 times
    the variance along the mean, so a U that came out low does not shrink its own error bar. It starts from
    max(U, 0): a U-statistic that fell below 0 by chance is no reason to promise less. nan throughout for n < 3.
    """
    n = gram.shape[0]
    if n < 3:
        value = signed_root(u_statistic(gram)) if n == 2 else math.nan
        return Bias(value=value, lower=math.nan, upper=math.nan, minimum_detectable=math.nan)
    u, deviation = u_statistic(gram), null_deviation(gram)
    t = float(stdtrit(n - 1, _CONFIDENCE))
    margin = t * max(jackknife_error(gram), deviation)
    return Bias(
        value=signed_root(u),
        lower=math.sqrt(max(u - margin, 0.0)),
        upper=math.sqrt(_largest_square(gram, max(u, 0.0), t)),
        minimum_detectable=math.sqrt((family_quantile + _POWER_80) * deviation),
    )


def _largest_square(gram: np.ndarray, u: float, t: float) -> float:
    """The larger root y of (y - u)^2 = t^2 (noise^2 + 4 y v): the upper bound of B^2."""
    noise = min(null_deviation(gram), centred_null_deviation(gram))
    v = variance_along_mean(gram)
    return u + 2.0 * t * t * v + t * math.sqrt(noise**2 + 4.0 * u * v + (2.0 * t * v) ** 2)
