"""How much of a W_Q error the softmax feels.

Moving W_Q by E moves the scores of row T by alpha X_T E^T K^T. The softmax ignores a shift common to a row's keys, so
what matters is the variance of that movement under P_T; the functional figure is the root of its sum over rows.

Shapes: H heads, N queries, M keys, D head size, C width.
"""

import torch

from bf16forensics.attention.scores import Block, hp_scores
from bf16forensics.capture.record import AttentionRecord

_ROWS = 256


def score_variance(record: AttentionRecord, move: torch.Tensor) -> torch.Tensor:
    """Sum over rows of Var_{P_T}(alpha X_T E^T K^T) for every head.

    Soft-caps and biases are part of P; the slope of a soft-cap is not applied to the movement.

    Args:
        record: a record with X.
        move: [H, D, C] change of W_Q by head, any floating dtype.

    Returns:
        float64 [H]; 0 for a record without rows.

    Raises:
        ValueError: the record has no X.
    """
    if record.x is None:
        raise ValueError("score_variance needs a record with X")
    heads, queries, _ = record.q.shape
    num_keys, group = record.k.shape[1], heads // record.num_kv_heads
    total = torch.zeros(heads, dtype=torch.float64)
    for head in range(heads):
        k = record.k[head // group][None]
        moved_q = record.geometry.scale * (record.x @ move[head].float().T)
        geometry = record.geometry.for_heads(slice(head, head + 1))
        for start in range(0, queries, _ROWS):
            rows = (start, min(start + _ROWS, queries))
            keys = geometry.key_range(*rows, queries, num_keys)
            if keys[0] == keys[1]:
                continue
            block = Block(rows=rows, keys=keys, num_queries=queries, num_keys=num_keys)
            keys_here, queries_here = k[:, slice(*keys)], record.q[head : head + 1, slice(*rows)]
            scores = hp_scores(queries_here, keys_here, geometry, block, geometry.bias_block(rows, keys))
            p = torch.softmax(scores.values, -1).nan_to_num(nan=0.0)
            change = moved_q[None, slice(*rows)] @ keys_here.transpose(-1, -2)
            mean = (p * change).sum(-1, keepdim=True)
            total[head] += (p * (change - mean).square()).sum().double()
    return total
