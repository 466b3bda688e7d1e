"""The captured model's own attention: exact, differentiable, block of rows by block of rows.

Written out because the fused attention of a CPU approximates the exponential, and because an automatic backward pass
through masked scores makes a dozen copies of them. Keys that no row of a block may see are never touched.

Shapes: H query heads, G key/value heads (H a multiple of G), N queries, M keys, D and E head sizes of q/k and v.
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
        k: [G, M, D]; head h of q uses head h // (H / G).
        v: [G, M, E].
        geometry: scale, masks and score modifiers, on the device of the operands; a bias gets no gradient.

    Returns:
        [H, N, E]; 0 in rows that see no key. NaN operands give NaN rows.

    Raises:
        ValueError: H is no multiple of G.
    """
    if q.shape[0] % k.shape[0]:
        raise ValueError(f"{q.shape[0]} query heads cannot share {k.shape[0]} key/value heads evenly")
    return _ExactAttention.apply(q, k, v, geometry)


def _blocks(geometry: Geometry, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
    for start in range(0, num_queries, _ROWS):
        end = min(start + _ROWS, num_queries)
        first, last = geometry.key_range(start, end, num_queries, num_keys)
        if last > first:
            yield slice(start, end), slice(first, last)


def _grouped(rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[H, R, X] as [G, H / G * R, X]: the query heads of a key/value head are more rows of one product."""
    return rows.reshape(num_kv_heads, -1, rows.shape[-1])


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, geometry: Geometry, rows: slice, keys: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[H, R, K] probabilities of a block and the soft-cap's slope; None for a slope of 1."""
    block = q[:, rows]
    scores = torch.matmul(_grouped(block, k.shape[0]), k[:, keys].transpose(-1, -2)).mul_(geometry.scale)
    scores = scores.view(*block.shape[:2], -1)
    slope = None
    if geometry.softcap is not None:
        capped = scores.div_(geometry.softcap).tanh_()
        slope = 1.0 - capped * capped
        scores = capped.mul_(geometry.softcap)
    bias = geometry.bias_block((rows.start, rows.stop), (keys.start, keys.stop))
    if bias is not None:
        scores.add_(bias)
    visible = geometry.visible((rows.start, rows.stop), (keys.start, keys.stop), q.shape[1], k.shape[1], q.device)
    if visible is None:
        return torch.softmax(scores, dim=-1), slope
    # A row of -inf would turn into NaN: give it finite scores, then drop its result.
    empty = ~visible.any(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill_(~(visible | empty), -torch.inf), dim=-1)
    return (p.masked_fill_(empty, 0.0) if bool(empty.any()) else p), slope


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        keep = any(ctx.needs_input_grad) and q.shape[0] * q.shape[1] * k.shape[1] <= _KEPT_ELEMENTS
        kept: list[torch.Tensor | None] = []
        o = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        for rows, keys in _blocks(geometry, q.shape[1], k.shape[1]):
            p, slope = _probabilities(q, k, geometry, rows, keys)
            product = torch.matmul(_grouped(p, k.shape[0]), v[:, keys])
            o[:, rows] = product.view(*p.shape[:2], -1)
            if keep:
                kept += (p, slope)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.geometry = geometry
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        do = gradients[0].contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for index, (rows, keys) in enumerate(_blocks(ctx.geometry, q.shape[1], k.shape[1])):
            p, slope = kept[2 * index : 2 * index + 2] if kept else _probabilities(q, k, ctx.geometry, rows, keys)
            heads, block = p.shape[:2]
            q_rows, do_rows = _grouped(q[:, rows], k.shape[0]), _grouped(do[:, rows], k.shape[0])
            dv[:, keys] += torch.matmul(_grouped(p, k.shape[0]).transpose(-1, -2), do_rows)
            ds = torch.matmul(do_rows, v[:, keys].transpose(-1, -2)).view(p.shape).mul_(p)
            ds.sub_(p * ds.sum(-1, keepdim=True)).mul_(ctx.geometry.scale)
            if slope is not None:
                ds.mul_(slope)
            grouped = _grouped(ds, k.shape[0])
            dq[:, rows] = torch.matmul(grouped, k[:, keys]).view(heads, block, -1)
            dk[:, keys] += torch.matmul(grouped.transpose(-1, -2), q_rows)
        return dq, dk, dv, None
