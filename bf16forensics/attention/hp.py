"""One block of rows in high precision, anchored at the largest key.

In a saturated row O differs from the value v_j of its top key j by less than an FP32 sum of O can resolve. Everything
here is therefore computed as a difference from j: with p_k = exp(S_k - S_j) and l' = sum of p_k over k != j,
O - v_j = (sum_{k != j} p_k v_k - l' v_j) / (1 + l'). In float64 the anchor is not needed and does no harm.

Shapes: H heads, R rows, K keys, D and E head sizes of q/k and v.
"""

from dataclasses import dataclass

import torch

from bf16forensics.attention.scores import HpScores, exp_


@dataclass(frozen=True, slots=True, kw_only=True)
class HpRows:
    """High-precision attention of a block of rows."""

    #: [H, R] float64 row maximum in nats; -inf in rows that see no key.
    row_max: torch.Tensor
    #: [H, R] int64 top key j of each row, relative to the block's first key; 0 in rows that see no key.
    top: torch.Tensor
    #: [H, R, E] float64 O - v_j; 0 in rows that see no key.
    o_minus_top: torch.Tensor
    #: [H, R, K] probabilities with the top key's entry set to 0, in the dtype of the scores.
    p_others: torch.Tensor
    #: [H, R] float64 probability of the top key; 0 in rows that see no key.
    p_top: torch.Tensor
    #: [H, R] float64 log-sum-exp in nats; -inf in rows that see no key.
    lse: torch.Tensor


def gather_rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[h, index[h, r], :] for every h and r.

    Args:
        values: [H, K, E].
        index: [H, R] int64.

    Returns:
        [H, R, E].
    """
    return torch.gather(values, 1, index[..., None].expand(-1, -1, values.shape[-1]))


def reference_rows(scores: HpScores, v: torch.Tensor) -> HpRows:
    """Softmax and product with V of a block of rows in the dtype of the scores.

    Args:
        scores: [H, R, K] masked scores.
        v: [H, K, E] values, same dtype.

    Returns:
        The block's rows. Rows without a visible key are zero everywhere, with lse = -inf. NaN scores give NaN.
    """
    row_max, top = scores.values.max(-1)
    empty = row_max == -torch.inf
    p = exp_(scores.values - row_max.masked_fill(empty, 0.0)[..., None])
    p.scatter_(-1, top[..., None], 0.0)
    others = p.sum(-1)
    numerator = torch.matmul(p, v).double()
    others64 = others.double()
    top_value = gather_rows(v, top).double()
    total = 1.0 + others64
    o_minus_top = (numerator - others64[..., None] * top_value) / total[..., None]
    p.mul_((1.0 / total).to(p.dtype)[..., None])
    return HpRows(
        row_max=row_max.double(),
        top=top,
        o_minus_top=o_minus_top.masked_fill(empty[..., None], 0.0),
        p_others=p,
        p_top=(1.0 / total).masked_fill(empty, 0.0),
        lse=row_max.double() + torch.log(total).masked_fill(empty, 0.0),
    )
