"""How much of a W_Q error the softmax feels.

Moving W_Q by E moves the scores of row T by alpha X_T E^T K^T. The softmax ignores a shift common to a row's keys, so
what matters is the variance of that movement under P_T; the functional figure is the root of its sum over rows.

Shapes: H heads, N queries, M keys, D head size, C width.
"""

from collections.abc import Sequence

import numpy as np
import torch

from bf16forensics.attention.scores import Block, hp_scores
from bf16forensics.capture.record import AttentionRecord

_ROWS = 128
#: Elements of one [H, rows, keys] tensor on a GPU, where few large kernels are wanted.
_ELEMENTS = 2**26


def score_variance(record: AttentionRecord, moves: torch.Tensor) -> torch.Tensor:
    """Sum over rows of Var_{P_T}(alpha X_T E^T K^T) for every head and every given E.

    Soft-caps and biases are part of P; the slope of a soft-cap is not applied to the movement.

    Args:
        record: a record with X.
        moves: [K, H, D, C] K changes of W_Q by head, any floating dtype, on the device of the record.

    Returns:
        float64 [K, H] there; 0 for a record without rows.

    Raises:
        ValueError: the record has no X.
    """
    if record.x is None:
        raise ValueError("score_variance needs a record with X")
    heads, queries, _ = record.q.shape
    num_keys, group = record.k.shape[1], heads // record.num_kv_heads
    k = record.k.repeat_interleave(group, 0)
    moved_q = record.geometry.scale * (record.x @ moves.float().transpose(-1, -2))
    if record.query_path is not None:
        moved_q = record.query_path.push_forward(moved_q).float()
    total = torch.zeros(moves.shape[:2], dtype=torch.float64, device=moves.device)
    at_once = _ROWS if moves.device.type == "cpu" else max(_ROWS, _ELEMENTS // (heads * num_keys))
    for start in range(0, queries, at_once):
        rows = (start, min(start + at_once, queries))
        keys = record.geometry.key_range(*rows, queries, num_keys)
        if keys[0] == keys[1]:
            continue
        block = Block(rows=rows, keys=keys, num_queries=queries, num_keys=num_keys)
        own, seen = slice(*rows), k[:, slice(*keys)]
        scores = hp_scores(record.q[:, own], seen, record.geometry, block, record.geometry.bias_block(rows, keys))
        p = torch.softmax(scores.values, -1).nan_to_num_(nan=0.0)
        for index, moved in enumerate(moved_q):
            change = moved[:, own] @ seen.transpose(-1, -2)
            change -= (p * change).sum(-1, keepdim=True)
            total[index] += change.square_().mul_(p).sum((1, 2)).double()
    return total


def summed_variance(records: Sequence[AttentionRecord], moves: torch.Tensor) -> np.ndarray:
    """Sum of `score_variance` over records, float64 [K, H].

    Args:
        records: of one layer, with X, at least one; on any device.
        moves: [K, H, D, C]. Where they lie decides what computes, but on the CPU the records decide.
    """
    device = records[0].q.device if moves.device.type == "cpu" else moves.device
    moves = moves.to(device)
    total = torch.zeros(moves.shape[:2], dtype=torch.float64, device=device)
    for record in records:
        total += score_variance(record.to(device), moves)
    return np.asarray(total.cpu().numpy())
