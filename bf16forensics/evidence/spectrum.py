"""Spectral norms of the projections of a head.

Singular values come from a full decomposition in float64: power iteration can start in, or stall near, the wrong
singular vector, and BF16 has no decomposition at all.

Shapes: H query heads, G key/value heads, D head size, C width.
"""

import math

import torch

from bf16forensics.capture.record import LayerWeights
from bf16forensics.evidence.results import Spectrum


def spectral_norm(matrix: torch.Tensor) -> tuple[float, float]:
    """Largest singular value and stable rank |W|_F^2 / sigma_max^2.

    Args:
        matrix: [rows, columns], any floating dtype.

    Returns:
        (norm, stable rank); (0.0, 0.0) for a zero or empty matrix; (nan, nan) if any entry is NaN or Inf.
    """
    wide = matrix.double()
    if not torch.isfinite(wide).all():
        return math.nan, math.nan
    if wide.numel() == 0 or not wide.any():
        return 0.0, 0.0
    values = torch.linalg.svdvals(wide)
    largest = float(values[0])
    return largest, float(values.square().sum()) / largest**2


def query_key_norm(w_q: torch.Tensor, w_k: torch.Tensor) -> float:
    """sigma_max(W_Q^T W_K) / sqrt(d): unchanged when W_Q is scaled up and W_K down.

    Args:
        w_q: [D, C].
        w_k: [D, C].

    Returns:
        The norm; nan if any entry is NaN or Inf, and where the two have other inputs or head sizes (a low-rank key
        path), so that no such product exists.
    """
    if w_q.shape != w_k.shape:
        return math.nan
    if not (torch.isfinite(w_q).all() and torch.isfinite(w_k).all()):
        return math.nan
    # W_Q^T W_K = Q_q R_q R_k^T Q_k^T with orthonormal Q: its singular values are those of the small R_q R_k^T.
    r_q = torch.linalg.qr(w_q.double().T, mode="r")[1]
    r_k = torch.linalg.qr(w_k.double().T, mode="r")[1]
    return float(torch.linalg.matrix_norm(r_q @ r_k.T, ord=2)) / math.sqrt(w_q.shape[0])


def layer_spectra(weights: LayerWeights, num_heads: int) -> tuple[Spectrum | None, ...]:
    """Norms of every query head of a layer, each beside its key/value head's.

    Args:
        weights: projections by head; fields may be None.
        num_heads: H.

    Returns:
        One entry a query head; None where neither projection is known. nan for the unknown one of two.
    """
    if weights.w_q is None and weights.w_k is None:
        return (None,) * num_heads
    keys = [] if weights.w_k is None else [spectral_norm(head) for head in weights.w_k]
    spectra: list[Spectrum | None] = []
    for head in range(num_heads):
        q_norm, q_rank, zero, both = math.nan, math.nan, False, math.nan
        kv = 0 if weights.w_k is None else head // (num_heads // weights.w_k.shape[0])
        if weights.w_q is not None:
            q_norm, q_rank = spectral_norm(weights.w_q[head])
            zero = not bool(weights.w_q[head].any())
            if weights.w_k is not None:
                both = query_key_norm(weights.w_q[head], weights.w_k[kv])
        k_norm, k_rank = keys[kv] if keys else (math.nan, math.nan)
        spectra.append(
            Spectrum(
                w_q_spectral_norm=q_norm,
                w_k_spectral_norm=k_norm,
                w_q_stable_rank=q_rank,
                w_k_stable_rank=k_rank,
                qk_spectral_norm=both,
                w_q_all_zero=zero,
            )
        )
    return tuple(spectra)
