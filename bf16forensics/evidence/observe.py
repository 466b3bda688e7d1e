"""The observation of (PK)[T]^T X[T], whose sum over tokens with the weights delta_lp - delta_hp is the error of dW_Q.

(PK)[T]^T X[T] is a column times a row: rank one. Its column c is PK[T] times the number X[T][c]. The cosine between
column c at tokens T1 and T2 is therefore cos(PK[T1], PK[T2]) times the sign of X[T1][c] X[T2][c], the same number for
every column up to that sign. A high column-wise cosine is a statement about PK alone.

Whether the terms of two tokens add up is decided by the whole matrices, whose cosine (Frobenius) is the product
cos(PK[T1], PK[T2]) cos(X[T1], X[T2]). Over all pairs of a sequence, each weighted by the lengths |PK||X| of both terms,
its mean is the coherence (|sum of the matrices|^2 - sum w^2) / ((sum w)^2 - sum w^2), w = |PK||X|.

PK is that of high precision, P times the slope of a soft-cap, and is taken where W_Q sees it: carried back through
rotation and QK-norm where the record has a query path. The cosines before that are given beside.

Shapes: H query heads, N queries, D head size, C width of X, P pairs.

Reference: arXiv 2510.04212, section 3.3.1, figure 4 and appendix D (figures 8 and 9).
"""

from dataclasses import dataclass

import numpy as np
import torch

from bf16forensics.attention.result import DualPass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence.observe_carrier import carried_back, exact_carrier
from bf16forensics.evidence.observe_inputs import Carriers, InputValues, input_values
from bf16forensics.evidence.observe_pairs import (
    PairValues,
    draw_pairs,
    drawn_cosines,
    lengths,
    next_cosines,
    pair_values,
)
from bf16forensics.evidence.observe_rows import RepeatedRows, repeated_rows
from bf16forensics.recipe.model import Recipe

#: Beginnings of the names of non-finite inputs that leave a head without any observation, and without what needs X.
TOUCHES_HEAD = ("q[", "k[", "v[", "PK[")
TOUCHES_X = "x["


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """How to observe."""

    #: Recipe of the dual pass.
    recipe: Recipe
    #: "fp32" or "fp64": precision of PK where the dual pass holds none.
    reference: str
    #: Values of a sequence kept for the medians.
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceObservation:
    """What one sequence contributes to the observation of one layer."""

    layer: int
    sequence: int
    #: For each head, names of non-finite inputs.
    nonfinite: tuple[tuple[str, ...], ...]
    #: [H] cosine of PK; and before it is carried back, None where it need not be.
    next: PairValues
    drawn: PairValues
    rotated_next: PairValues | None
    rotated_drawn: PairValues | None
    #: float64 [H, D] sum of PK / |PK| over rows, and number of rows in it, int64 [H].
    unit_sum: np.ndarray
    units: np.ndarray
    #: None without X.
    x: InputValues | None
    #: None where the recipe's anchor is not the row maximum.
    rows: RepeatedRows | None


def observe_sequence(
    record: AttentionRecord,
    dual: DualPass,
    options: ObserveOptions,
    nonfinite: tuple[tuple[str, ...], ...] = (),
) -> SequenceObservation:
    """Observes one record.

    Args:
        record: the finite record that went through the dual pass, with or without dO and X.
        dual: its dual pass by the recipe of the options.
        options: recipe and sizes.
        nonfinite: for each head, the names of what was not finite, as `FiniteRecord` gives them; empty for none.

    Returns:
        Sums and short samples. Padding and fully masked rows take no part, nor does any row of a head that is named in
        `nonfinite` for q, k or v or whose PK is not finite.
    """
    before = dual.dq.carrier_hp.double() if dual.dq is not None else exact_carrier(record, options.reference)
    carrier = carried_back(before, record.query_path)
    rows = dual.maxima.visible > 0
    if record.geometry.query_padding is not None:
        rows = rows & record.geometry.query_padding
    seen = rows.any(0)
    names = _names(record, carrier, rows, nonfinite)
    withheld = [any(name.startswith(TOUCHES_HEAD) for name in of_head) for of_head in names]
    rows = rows & ~torch.tensor(withheld).to(rows.device)[:, None]
    if not rows.all():
        carrier = carrier.masked_fill(~rows[..., None], 0.0)
    pairs = draw_pairs(seen, record.sequence)
    norms = lengths(carrier)
    carriers = Carriers(
        vectors=carrier,
        norms=norms,
        rows=rows,
        next=next_cosines(carrier, norms),
        next_rows=rows[:, 1:] & rows[:, :-1],
        drawn=drawn_cosines(carrier, norms, pairs),
        drawn_rows=rows[:, pairs[0]] & rows[:, pairs[1]],
    )
    rotated_next, rotated_drawn = None, None
    if record.query_path is not None:
        own = lengths(before)
        rotated_next = pair_values(next_cosines(before, own), carriers.next_rows, options.kept)
        rotated_drawn = pair_values(drawn_cosines(before, own, pairs), carriers.drawn_rows, options.kept)
    has_direction = norms > 0
    inverse = torch.where(has_direction, 1.0 / norms, 0.0)
    return SequenceObservation(
        layer=record.layer,
        sequence=record.sequence,
        nonfinite=names,
        next=pair_values(carriers.next, carriers.next_rows, options.kept),
        drawn=pair_values(carriers.drawn, carriers.drawn_rows, options.kept),
        rotated_next=rotated_next,
        rotated_drawn=rotated_drawn,
        unit_sum=torch.bmm(inverse[:, None], carrier)[:, 0].cpu().numpy(),
        units=has_direction.sum(1).cpu().numpy(),
        x=None if record.x is None else input_values(record.x, carriers, seen, pairs, options.kept),
        rows=repeated_rows(record, dual.maxima, rows, options.recipe) if options.recipe.anchored_at_maximum else None,
    )


def _names(
    record: AttentionRecord, carrier: torch.Tensor, rows: torch.Tensor, given: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], ...]:
    """The given names by head, with the first row whose PK is not finite where nothing given explains it."""
    names = list(given or ((),) * record.num_heads)
    broken = ~torch.isfinite(carrier.sum(-1)) & rows
    for head in broken.any(1).nonzero()[:, 0].cpu().tolist():
        if not any(name.startswith(TOUCHES_HEAD) for name in names[head]):
            token = int(broken[head].nonzero()[0, 0])
            names[head] = (*names[head], f"PK[{record.sequence}, {head}, {token}]")
    return tuple(names)
