"""What the dual pass hands to the evidence: per-row tensors of one record, lp beside hp.

Shapes: H query heads, N queries, D and E head sizes of q/k and v. Everything is float64 unless said otherwise.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch

#: Ones of a row up to which its final rounding is taken apart. With more, 6 and more bits of the main sum are dropped,
#: and the bias is below 0.01 ulp.
MOST_ONES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMaxima:
    """What happens at the maximum of each row. int64 [H, N] unless said otherwise."""

    #: Keys with P-bar exactly 1 in FP32, by the recipe's own scores.
    ones_fp32: torch.Tensor
    #: Keys with P-bar equal to 1 after rounding to BF16, by the recipe's own scores.
    ones_rounded: torch.Tensor
    #: Keys within 1e-3 nats of the maximum, by the recipe's own scores.
    near: torch.Tensor
    #: Keys sharing the true maximum, by the hp scores.
    shared: torch.Tensor
    #: Visible keys; 0 in fully masked rows.
    visible: torch.Tensor
    #: Probability of the first visible key (hp), float64.
    sink: torch.Tensor
    #: Largest |score| of the row (hp, nats), float64; 0 in fully masked rows.
    score_abs_max: torch.Tensor
    #: bool: O_lp equals the value of the top key in over 90 % of the features.
    swamped: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRows:
    """delta and its errors, [H, N]."""

    #: delta as the recipe computes it.
    delta_lp: torch.Tensor
    #: rowsum(dO * O_hp).
    delta_hp: torch.Tensor
    #: delta_lp - delta_hp, computed as a difference from the top key.
    delta_err: torch.Tensor
    #: delta_lp - rowsum(P_lp * dP) / rowsum(P_lp): the part that the recipe's own P does not excuse.
    defect: torch.Tensor
    #: rowsum(P_lp) of the recipe's backward pass.
    p_row_sum: torch.Tensor
    #: sum |dO * O_lp|: the scale below which the order of an FP32 sum decides the sign.
    magnitude: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGradients:
    """dQ in stages from hp to lp, and the carriers of a delta error, all [H, N, D] with the scale applied.

    hp -> consistent (the recipe's P and dP, delta consistent with them) -> with the recipe's delta
    (= consistent - carrier_lp * defect) -> cast_ds (dS rounded, accumulated as the recipe does) -> lp (dQ rounded).
    """

    hp: torch.Tensor
    consistent: torch.Tensor
    cast_ds: torch.Tensor
    lp: torch.Tensor
    #: scale * P_hp K and scale * P_lp K (times the soft-cap's slope inside the sum).
    carrier_hp: torch.Tensor
    carrier_lp: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TieRows:
    """Sums over the features of each row, [H, N]; 0 in rows with fewer than 2 or more than `MOST_ONES` ones."""

    #: int64 keys with P-bar = 1 after rounding to BF16.
    ones: torch.Tensor
    #: int64: equal for rows with the same keys, different (but for a chance of 2^-64) for others.
    label: torch.Tensor
    #: int64 features that count: the sum is finite and not 0. Of these, main sum halfway; residue not 0; and with the
    #: sign of the main sum.
    elements: torch.Tensor
    halfway: torch.Tensor
    residues: torch.Tensor
    same_sign: torch.Tensor
    #: float64 sums in ulp: error (+ away from zero), law, residue (+ along the main sum) and its size, both of them
    #: limited to one ulp an element.
    error: torch.Tensor
    law: torch.Tensor
    residue: torch.Tensor
    residue_size: torch.Tensor
    #: int64 [H, N, 4]: features by bits dropped: 0, 1, 2, and 3 or more.
    dropped: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPass:
    """One record through a recipe and through high precision."""

    #: [H, N, E] output by the recipe, values of its output format.
    o_lp: torch.Tensor
    #: [H, N, E] high-precision output.
    o_hp: torch.Tensor
    #: [H, N, E] O_lp - O_hp, computed as a difference from the top key.
    o_err: torch.Tensor
    #: [H, N] log-sum-exp in nats by the recipe and in high precision.
    lse_lp: torch.Tensor
    lse_hp: torch.Tensor
    maxima: RowMaxima
    #: The final rounding of rows with several P-bar = 1, [H, N]; None where P-bar = 1 does not mark the maximum in the
    #: recipe, or where the recipe does not round what the row adds up to.
    ties: TieRows | None
    #: None without dO, or by a recipe that is a forward pass only.
    delta: DeltaRows | None
    dq: QueryGradients | None


def on_device(dual: DualPass, device: torch.device) -> DualPass:
    """The same result on a device; what comes to the CPU in FP32 becomes float64, as everything there is."""
    found: DualPass = _on_device(dual, device)
    return found


def _on_device(part: Any, device: torch.device) -> Any:
    if part is None:
        return None
    if not isinstance(part, torch.Tensor):
        return type(part)(**{field.name: _on_device(getattr(part, field.name), device) for field in fields(part)})
    moved = part.to(device)
    return moved.double() if device.type == "cpu" and moved.dtype == torch.float32 else moved
