"""Sign-flip tests over sequences, family-wise by the maximum over heads under common flips.

n is the number of sequences, F heads of a family. Everything is float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bf16forensics.evidence.statistics import CONFIDENCE, null_deviation, trace

#: Sign flips of the test; the smallest p it can give is 1 / (flips + 1).
NUM_FLIPS = 4000
_SEED = 0x5EED
#: Numbers that `flip_tests` holds at once on a device.
_ELEMENTS = 2**25


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


def flip_tests(grams: Sequence[np.ndarray], device: torch.device | None = None) -> list[FlipTest]:
    """Tests every head of a family for a non-zero mean vector.

    Heads with a non-finite Gram matrix must have left the family before: one of them would spoil every p.

    Args:
        grams: one [n, n] matrix a head, all of the same n.
        device: that computes all heads at once; None for the CPU, head by head. Sums differ in their last bits.

    Returns:
        One result a head; p is nan for n < 2.
    """
    if len(grams) == 0:
        return []
    n = grams[0].shape[0]
    if n < 2:
        return [UNDEFINED_TEST for _ in grams]
    signs, whole = sign_matrix(n), np.stack(list(grams))
    if device is None:
        flipped = np.stack([flipped_statistics(gram, signs) for gram in grams])
    else:
        flipped = _flipped_on_device(whole, signs, device)
    observed = _scaled(whole, (np.ones((1, n)) @ whole).sum(-1))[:, 0]
    largest = flipped.max(0)
    quantile = float(np.quantile(largest, CONFIDENCE))
    # A flip that restores the data exactly must count although its sum may differ in the last bit.
    needed = observed - 1e-9 * np.maximum(1.0, np.abs(observed))
    return [
        FlipTest(p=p, p_adjusted=p_adjusted, family_quantile=quantile)
        for p, p_adjusted in zip(_shares(flipped, needed), _shares(largest[None], needed), strict=True)
    ]


def _flipped_on_device(grams: np.ndarray, signs: np.ndarray, device: torch.device) -> np.ndarray:
    """`flipped_statistics` of all Gram matrices [F, n, n] at once, [F, flips]."""
    of_all, chosen = torch.from_numpy(signs).to(device), torch.from_numpy(grams).to(device)
    at_once = max(1, _ELEMENTS // signs.size)
    quadratic = torch.cat([((of_all @ some) * of_all).sum(-1) for some in chosen.split(at_once)]).cpu().numpy()
    return _scaled(grams, quadratic)


def _scaled(grams: np.ndarray, quadratic: np.ndarray) -> np.ndarray:
    """U-statistics over their null deviations of quadratic forms [F, flips]; zeros where the deviation is 0."""
    n, deviation = grams.shape[-1], null_deviation(grams)[:, None]
    has_any = deviation > 0
    statistics = (quadratic - trace(grams)[:, None]) / (n * (n - 1)) / np.where(has_any, deviation, 1.0)
    return np.where(has_any, statistics, 0.0)


def _shares(flipped: np.ndarray, needed: np.ndarray) -> list[float]:
    """Share of flips [F or 1, flips] no smaller than what each head needs [F], the data themselves among them."""
    counts = (flipped >= needed[:, None]).sum(1)
    shares: list[float] = ((1 + counts) / (flipped.shape[1] + 1)).tolist()
    return shares


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
    # As in `flip_tests`: a flip that restores the data exactly must count.
    needed = observed - 1e-9 * np.maximum(1.0, observed)
    return [
        SumTest(p=p, p_adjusted=p_adjusted)
        for p, p_adjusted in zip(_shares(flipped.T, needed), _shares(flipped.max(1)[None], needed), strict=True)
    ]
