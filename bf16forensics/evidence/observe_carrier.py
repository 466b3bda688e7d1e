"""PK of every row: in high precision without a dual pass's gradients, and carried back to the output of W_Q.

Shapes: H query heads, G key/value heads, N queries, M keys, D head size.
"""

import torch

from bf16forensics.attention.dual import ELEMENTS_PER_BLOCK, ROWS_PER_BLOCK
from bf16forensics.attention.scores import Block, hp_scores
from bf16forensics.capture.path import QueryPath
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry

#: Share of a head's norm by which other heads may show before they are carried back one by one.
_SEPARATE = 1e-5


def exact_carrier(record: AttentionRecord, reference: str) -> torch.Tensor:
    """scale * P K of a record that may have no dO; what `QueryGradients.carrier_hp` holds where there is one.

    Args:
        record: one attention call; a non-finite score gives NaN rows.
        reference: "fp32" or "fp64", the precision it is computed in.

    Returns:
        float64 [H, N, D] on the device of the record; 0 in rows that see no key. With a soft-cap P is multiplied by its
        slope, as in dQ.
    """
    dtype = torch.float64 if reference == "fp64" else torch.float32
    heads, queries, size = record.q.shape
    group, num_keys = heads // record.num_kv_heads, record.k.shape[1]
    at_once = max(1, ELEMENTS_PER_BLOCK // (ROWS_PER_BLOCK * max(num_keys, ROWS_PER_BLOCK)))
    carrier = record.q.new_zeros((heads, queries, size), dtype=torch.float64)
    for first in range(0, heads, at_once):
        span = slice(first, min(first + at_once, heads))
        q = record.q[span].to(dtype)
        k = record.k[torch.arange(span.start, span.stop, device=record.k.device) // group].to(dtype)
        geometry = record.geometry.for_heads(span)
        for start in range(0, queries, ROWS_PER_BLOCK):
            rows = (start, min(start + ROWS_PER_BLOCK, queries))
            keys = geometry.key_range(*rows, queries, num_keys)
            if keys[0] < keys[1]:
                block = Block(rows=rows, keys=keys, num_queries=queries, num_keys=num_keys)
                found = _block(q[:, slice(*rows)], k[:, slice(*keys)], geometry, block)
                carrier[span, slice(*rows)] = found.double()
    return carrier


def _block(q: torch.Tensor, k: torch.Tensor, geometry: Geometry, block: Block) -> torch.Tensor:
    scores = hp_scores(q, k, geometry, block, geometry.bias_block(block.rows, block.keys))
    empty = scores.values.amax(-1) == -torch.inf
    p = torch.softmax(scores.values, -1).masked_fill_(empty[..., None], 0.0)
    return geometry.scale * torch.matmul(p if scores.slope is None else p * scores.slope, k)


def carried_back(carrier: torch.Tensor, path: QueryPath | None) -> torch.Tensor:
    """The carriers as gradients by W_Q x, each head's by itself: what stands left of X[T] in the gradient of its W_Q.

    A norm over all heads together mixes them: carried back at once, a head's result would hold a part of its
    neighbours'. Whether it does shows when each head is carried back under another factor.

    Args:
        carrier: float64 [H, N, D] scale * P K as a gradient by q.
        path: from W_Q x to q; None where they are the same.

    Returns:
        float64 [H, N, D], computed in the dtype of the path where there is one.
    """
    if path is None:
        return carrier
    heads = carrier.shape[0]
    given = carrier.to(path.query.dtype)
    factor = 1.0 + torch.arange(heads, dtype=given.dtype, device=given.device)[:, None, None] / heads
    once, scaled = path.pull_back(torch.stack([given, given * factor]))
    foreign = (scaled - factor * once).flatten(1).norm(dim=1)
    if bool((foreign <= _SEPARATE * scaled.flatten(1).norm(dim=1)).all()):
        return once.double()
    own, alone = torch.zeros_like(once), torch.zeros_like(given)
    for head in range(heads):
        alone.zero_()
        alone[head] = given[head]
        own[head] = path.pull_back(alone[None])[0, head]
    return own.double()
