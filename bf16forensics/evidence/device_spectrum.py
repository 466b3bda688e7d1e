"""Spectral norms of the projections of all heads of a model at once, on a device.

A decomposition of hundreds of small matrices waits for each of them on a GPU; products of them do not. The largest
eigenvalue comes from squaring a matrix over and over: tr(A^p)^(1/p) falls to it from above as p grows, whatever the
matrix, and no starting vector can be the wrong one.

Shapes: H query heads, G key/value heads, D head size, C width, B matrices.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from bf16forensics.capture.record import LayerWeights
from bf16forensics.evidence.host import on_host
from bf16forensics.evidence.results import Spectrum

#: p = 2^50 leaves a relative excess of log(rank) / p, which float64 hardly resolves.
_SQUARINGS = 50


def largest_eigenvalue(matrices: torch.Tensor) -> torch.Tensor:
    """Largest eigenvalue of matrices whose eigenvalues are real and not negative.

    Args:
        matrices: float64 [B, D, D]: A A^T, or products of two such, which have the eigenvalues of one.

    Returns:
        float64 [B]; 0 for matrices that are 0, NaN where an entry is NaN or Inf.
    """
    scale = _trace(matrices)
    power = matrices / scale[:, None, None]
    logarithm = torch.zeros_like(scale)
    for step in range(1, _SQUARINGS + 1):
        power = power @ power
        trace = _trace(power)
        logarithm += trace.log() / 2.0**step
        power = power / trace[:, None, None]
    is_zero = (matrices == 0).all(-1).all(-1)
    return (scale * logarithm.exp()).masked_fill(is_zero, 0.0)


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def device_spectra(
    weights: Sequence[LayerWeights], num_heads: int, device: torch.device
) -> list[tuple[Spectrum | None, ...]]:
    """Norms of every query head of every layer, as `layer_spectra` gives them but for the last digits of float64.

    Args:
        weights: projections by head, one entry a layer; the same fields known and the same shapes in every layer.
        num_heads: H.
        device: that computes them.
    """
    known = [name for name in ("w_q", "w_k") if all(getattr(own, name) is not None for own in weights)]
    if not known:
        return [(None,) * num_heads for _ in weights]
    by_head = {name: torch.stack([getattr(own, name).to(device) for own in weights]).double() for name in known}
    found = on_host(_figures(by_head, num_heads))
    return [
        tuple(_spectrum(found, layer, head, num_heads) for head in range(num_heads)) for layer in range(len(weights))
    ]


def _figures(by_head: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """[L, H or G] norm, stable rank and whether all is zero of each projection; [L, H] norm of both together."""
    figures: dict[str, torch.Tensor] = {}
    grams = {name: heads @ heads.mT for name, heads in by_head.items()}
    for name, gram in grams.items():
        square = largest_eigenvalue(gram.flatten(0, 1)).view(gram.shape[:2])
        figures[f"{name}_norm"] = square.sqrt()
        # |W|_F^2 is the trace; a matrix without any entry has stable rank 0.
        rank = _trace(gram) / square
        figures[f"{name}_rank"] = torch.where(square == 0, 0.0, rank)
    if "w_q" in by_head:
        figures["zero"] = (by_head["w_q"] == 0).all(-1).all(-1)
    if len(by_head) == 2 and by_head["w_q"].shape[2:] == by_head["w_k"].shape[2:]:
        group = num_heads // by_head["w_k"].shape[1]
        # W_K^T W_Q W_Q^T W_K has the eigenvalues of the small product of the two Gram matrices, and zeros.
        both = grams["w_q"] @ grams["w_k"].repeat_interleave(group, 1)
        square = largest_eigenvalue(both.flatten(0, 1)).view(both.shape[:2])
        figures["both"] = square.sqrt() / math.sqrt(both.shape[-1])
    return figures


def _spectrum(found: dict[str, np.ndarray], layer: int, head: int, num_heads: int) -> Spectrum:
    def figure(name: str) -> float:
        if name not in found:
            return math.nan
        of_layer = found[name][layer]
        return float(of_layer[head // (num_heads // len(of_layer))])

    return Spectrum(
        w_q_spectral_norm=figure("w_q_norm"),
        w_k_spectral_norm=figure("w_k_norm"),
        w_q_stable_rank=figure("w_q_rank"),
        w_k_stable_rank=figure("w_k_rank"),
        qk_spectral_norm=figure("both"),
        w_q_all_zero="zero" in found and bool(figure("zero")),
    )
