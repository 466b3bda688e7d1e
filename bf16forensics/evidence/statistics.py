"""Statistics over sequences: jackknife, U-statistics of vectors given by their Gram matrix, bounds of their mean.

n is the number of sequences. Everything is float64 NumPy. What takes a Gram matrix takes those of several heads at
once, [..., n, n], and gives each of them the same bits as alone.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

#: Normal quantile of 80 % power.
_POWER_80 = 0.8416212335729143
#: Of every bound and quantile.
CONFIDENCE = 0.95


def student_two_sided(t: float, degrees: int) -> float:
    """Two-sided p of Student's t; nan for a nan t or without degrees of freedom."""
    if degrees < 1 or math.isnan(t):
        return math.nan
    return float(2.0 * stdtr(degrees, -abs(t)))


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the last axis, [...], and its jackknife standard error; nan error for n < 2.

    For a mean that is the standard deviation over sqrt(n).
    """
    n = values.shape[-1]
    unknown = np.full(values.shape[:-1], math.nan)[()]
    if n == 0:
        return unknown, unknown
    return values.mean(-1), values.std(-1, ddof=1) / math.sqrt(n) if n > 1 else unknown


def u_statistic(gram: np.ndarray) -> np.ndarray:
    """(sum over i != j of gram[i, j]) / (n (n - 1)): unbiased for |mean|^2 of the vectors behind a Gram matrix.

    Args:
        gram: [..., n, n]; for two samples paired by sequence, the matrix of their inner products.

    Returns:
        The statistic [...]; nan for n < 2.
    """
    n = gram.shape[-1]
    if n < 2:
        return _unknown(gram)
    return (_total(gram) - trace(gram)) / (n * (n - 1))


def null_deviation(gram: np.ndarray) -> np.ndarray:
    """Standard deviation of the U-statistic when the vectors' signs are random, [...]; nan for n < 2."""
    n = gram.shape[-1]
    if n < 2:
        return _unknown(gram)
    off = _total(gram**2) - (_diagonal(gram) ** 2).sum(-1)
    return np.sqrt(2.0 * np.maximum(off, 0.0)) / (n * (n - 1))


def jackknife_error(gram: np.ndarray) -> np.ndarray:
    """Jackknife standard error of `u_statistic`, leaving out one sequence at a time, [...]; nan for n < 3."""
    n = gram.shape[-1]
    if n < 3:
        return _unknown(gram)
    off_sum = _total(gram) - trace(gram)
    off_row = gram.sum(-1) - _diagonal(gram)
    left_out = (off_sum[..., None] - 2.0 * off_row) / ((n - 1) * (n - 2))
    return np.sqrt((n - 1) / n * ((left_out - left_out.mean(-1)[..., None]) ** 2).sum(-1))


def centred_null_deviation(gram: np.ndarray) -> np.ndarray:
    """`null_deviation` of the vectors less their mean: the noise alone, where the mean is not small; nan for n < 2."""
    rows = gram.mean(-2)[..., None, :]
    return null_deviation(gram - rows - np.swapaxes(rows, -1, -2) + gram.mean((-2, -1))[..., None, None])


def variance_along_mean(gram: np.ndarray) -> np.ndarray:
    """Variance of the mean vector along its own direction, [...]; 0 for vectors without a mean, nan for n < 2.

    Each vector is projected on the mean of the others, so that its own noise does not count as agreement.
    """
    n, square = gram.shape[-1], gram.mean((-2, -1))
    if n < 2:
        return _unknown(gram)
    projections = (gram.sum(-1) - _diagonal(gram)) / (n - 1)
    has_mean = square > 0
    return np.where(has_mean, projections.var(-1, ddof=1) / np.where(has_mean, square * n, 1.0), 0.0)[()]


def _total(gram: np.ndarray) -> np.ndarray:
    return gram.reshape(*gram.shape[:-2], -1).sum(-1)


def _diagonal(gram: np.ndarray) -> np.ndarray:
    return np.diagonal(gram, axis1=-2, axis2=-1)


def trace(gram: np.ndarray) -> np.ndarray:
    """Sum of the diagonal, [...]."""
    return _diagonal(gram).sum(-1)


def _unknown(gram: np.ndarray) -> np.ndarray:
    return np.full(gram.shape[:-2], math.nan)[()]


def signed_root(value: np.ndarray | float) -> np.ndarray:
    """sign(value) sqrt(|value|), [...]."""
    return np.copysign(np.sqrt(np.abs(value)), value)


def effective_number(weights: np.ndarray) -> np.ndarray:
    """(sum w)^2 / sum w^2 over the last axis, [...]; nan where all weights are 0."""
    square = (weights**2).sum(-1)
    is_some = square > 0
    return np.where(is_some, squared(weights.sum(-1)) / np.where(is_some, square, 1.0), math.nan)[()]


def squared(values: np.ndarray | float) -> np.ndarray:
    """value^2 as Python computes it.

    The last bit of a product may differ from it, and no figure should depend on how many heads were computed at once.
    """
    flat = [value**2 for value in np.ravel(values).tolist()]
    return np.array(flat, np.float64).reshape(np.shape(values))[()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """|mean| of the vectors behind Gram matrices, signed root of the U-statistic, with bounds; [...] each."""

    value: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    minimum_detectable: np.ndarray


def bias_bounds(gram: np.ndarray, family_quantile: np.ndarray | float) -> Bias:
    """Bias with one-sided 95 % bounds and the smallest bias the test would find with 80 % power.

    Student's t has n - 1 degrees of freedom. The lower bound lies t standard errors below U, the standard error being
    the larger of the jackknife's and the null deviation. The upper bound is the largest B whose own U-statistic
    would be found no more than t deviations below B^2; the variance of U at B is that of the noise plus 4 B^2 times
    the variance along the mean, so a U that came out low does not shrink its own error bar. It starts from
    max(U, 0): a U-statistic that fell below 0 by chance is no reason to promise less. nan throughout for n < 3.

    Args:
        gram: [..., n, n].
        family_quantile: [...] 95 % quantile of the family's maximum under flips.
    """
    n = gram.shape[-1]
    if n < 3:
        unknown = _unknown(gram)
        value = signed_root(u_statistic(gram)) if n == 2 else unknown
        return Bias(value=value, lower=unknown, upper=unknown, minimum_detectable=unknown)
    u, deviation = u_statistic(gram), null_deviation(gram)
    t = float(stdtrit(n - 1, CONFIDENCE))
    margin = t * np.maximum(jackknife_error(gram), deviation)
    return Bias(
        value=signed_root(u),
        lower=np.sqrt(np.maximum(u - margin, 0.0)),
        upper=np.sqrt(_largest_square(gram, np.maximum(u, 0.0), t)),
        minimum_detectable=np.sqrt((family_quantile + _POWER_80) * deviation),
    )


def _largest_square(gram: np.ndarray, u: np.ndarray, t: float) -> np.ndarray:
    """The larger root y of (y - u)^2 = t^2 (noise^2 + 4 y v): the upper bound of B^2."""
    noise = np.minimum(null_deviation(gram), centred_null_deviation(gram))
    v = variance_along_mean(gram)
    return u + 2.0 * t * t * v + t * np.sqrt(squared(noise) + 4.0 * u * v + squared(2.0 * t * v))
