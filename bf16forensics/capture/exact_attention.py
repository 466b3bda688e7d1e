"""The captured model's own attention: exact, differentiable, block of rows by block of rows.

Written out because the fused attention of a CPU approximates the exponential, and because an automatic backward pass
through masked scores makes a dozen copies of them. Keys that no row of a block may see are never touched.

Shapes: H heads, N queries, M keys, D and E head sizes of q/k and v.
"""

from collections.abc import Iterator
from typing import Any

import torch

from bf16forensics.geometry.geometry import Geometry

_ROWS = 128
#: Probabilities kept for the backward pass at most; beyond it they are computed again there.
_KEPT_ELEMENTS = 2**24


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Softmax attention in the dtype of its operands.

    Args:
        q: [H, N, D].
        k: [H, M, D].
        v: [H, M, E].
        geometry: scale and masks; a soft-cap or a bias is not supported here.

    Returns:
        [H, N, E]; 0 in rows that see no key. NaN operands give NaN rows.

    Raises:
        ValueError: the geometry has a soft-cap or a bias.
    """
    if geometry.softcap is not None or geometry.bias is not None:
        raise ValueError("exact_attention knows neither soft-cap nor bias")
    return _ExactAttention.apply(q, k, v, geometry)


def _blocks(geometry: Geometry, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
    for start in range(0, num_queries, _ROWS):
        end = min(start + _ROWS, num_queries)
        first, last = geometry.key_range(start, end, num_queries, num_keys)
        if last > first:
            yield slice(start, end), slice(first, last)


def _probabilities(q: torch.Tensor, k: torch.Tensor, geometry: Geometry, rows: slice, keys: slice) -> torch.Tensor:
    scores = torch.matmul(q[:, rows], k[:, keys].transpose(-1, -2)).mul_(geometry.scale)
    visible = geometry.visible((rows.start, rows.stop), (keys.start, keys.stop), q.shape[1], k.shape[1])
    if visible is None:
        return torch.softmax(scores, dim=-1)
    # A row of -inf would turn into NaN: give it finite scores, then drop its result.
    empty = ~visible.any(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill_(~(visible | empty), -torch.inf), dim=-1)
    return p.masked_fill_(empty, 0.0) if bool(empty.any()) else p


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        keep = any(ctx.needs_input_grad) and q.shape[0] * q.shape[1] * k.shape[1] <= _KEPT_ELEMENTS
        kept: list[torch.Tensor] = []
        o = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        for rows, keys in _blocks(geometry, q.shape[1], k.shape[1]):
            p = _probabilities(q, k, geometry, rows, keys)
            o[:, rows] = torch.matmul(p, v[:, keys])
            if keep:
                kept.append(p)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.geometry = geometry
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        do = gradients[0].contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for index, (rows, keys) in enumerate(_blocks(ctx.geometry, q.shape[1], k.shape[1])):
            p = kept[index] if kept else _probabilities(q, k, ctx.geometry, rows, keys)
            dv[:, keys] += torch.matmul(p.transpose(-1, -2), do[:, rows])
            ds = torch.matmul(do[:, rows], v[:, keys].transpose(-1, -2)).mul_(p)
            ds.sub_(p * ds.sum(-1, keepdim=True)).mul_(ctx.geometry.scale)
            dq[:, rows] = torch.matmul(ds, k[:, keys])
            dk[:, keys] += torch.matmul(ds.transpose(-1, -2), q[:, rows])
        return dq, dk, dv, None
