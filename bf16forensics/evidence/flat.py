"""The direction in which the softmax feels nothing: a move of W_Q along the mean key shifts all scores of a row alike.

Shapes: H query heads, G key/value heads, N queries, M keys, D head size.
"""

import numpy as np

from bf16forensics.capture.record import AttentionRecord


def flat_direction(record: AttentionRecord) -> tuple[np.ndarray, int]:
    """The mean key as each head's W_Q sees it, as a sum and a number of terms.

    Where q is W_Q x itself the terms are the keys of the real positions. Behind a rotation or a norm there is one such
    direction a query: the terms are then the sequence's mean key carried back at each real query.

    Args:
        record: finite.

    Returns:
        (float64 [H, D] sum, number of terms); zeros and 0 when nothing is real.
    """
    real = record.geometry.key_padding
    group = record.num_heads // record.num_kv_heads
    keys = record.k if real is None else record.k * real[None, :, None]
    count = record.k.shape[1] if real is None else int(real.sum())
    total = keys.sum(1).double().repeat_interleave(group, 0)
    path = record.query_path
    if path is None:
        return total.cpu().numpy(), count
    queries = record.q.shape[1]
    mean = (total / max(count, 1))[:, None, :].expand(-1, queries, -1)
    back = path.pull_back(mean[None])[0].double()
    own = record.geometry.query_padding
    if own is not None:
        back = back * own[None, :, None]
    return back.sum(1).cpu().numpy(), queries if own is None else int(own.sum())
