"""What trace-head says: a head by token, a token by feature, a feature key by key. Scalars and small arrays only.

Every index is 0-based. Signs: errors are lp - hp; "+ away" marks quantities that count away from zero.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenError:
    """One row of the head."""

    #: Position among the sequences traced, and among all sequences of the run.
    index: int
    sequence: int
    #: Training step; None when unknown.
    step: int | None
    token: int
    #: delta_lp - delta_hp, and delta_lp - rowsum(P_lp dP) / rowsum(P_lp).
    delta_err: float
    defect: float
    #: Visible keys, and those with P-bar = 1 after rounding to BF16 (None where the anchor is not the maximum).
    visible: int
    ones: int | None
    #: Whether the sign of delta_err counts (beyond the order of an FP32 sum).
    sign_counts: bool
    #: Largest |O_lp - O_hp| over the features, in ulp of O's format, and its feature.
    o_err_max_ulp: float
    o_err_feature: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureContribution:
    """One feature of one token: dO * (O_lp - O_hp)."""

    feature: int
    do: float
    o_lp: float
    o_hp: float
    #: O_lp - O_hp, and in ulp of O's format at O_hp.
    o_err: float
    o_err_ulp: float
    #: do * o_err.
    contribution: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SignCell:
    """Features of one token with one pair of signs."""

    #: -1 or 1 each.
    sign_do: int
    sign_err: int
    features: int
    #: Sum of their contributions.
    contribution: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SignTable:
    """The paper's figure 5 b-d as counts: which signs of dO and O_lp - O_hp meet in one token."""

    #: (+,+), (-,-), (+,-), (-,+) in the order (dO, error).
    cells: tuple[SignCell, ...]
    #: Features where either is zero; their contribution is 0.
    zero: int
    #: Mean of sign(dO) sign(error) over the others; nan where there are none.
    correlation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """One token by feature. The contributions and the remainder add up to delta_err."""

    token: TokenError
    #: All features, largest |contribution| first.
    features: tuple[FeatureContribution, ...]
    signs: SignTable
    #: math.fsum of all contributions.
    contributions: float
    #: delta_err - contributions: what rounding delta itself adds (or, where delta does not come from O, everything).
    remainder: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A step of the cumulative error: the difference of two bounded prefix errors, not an accumulated one."""

    #: Position in the arrays of the trace, and the key there.
    position: int
    key: int
    #: error[position] - error[position - 1] (the error before the first key is 0).
    size: float
    p_bar: float
    v: float
    is_one: bool
    #: Whether the value after this key exists in the computation.
    exists: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJumps:
    """The steps of the cumulative errors of all features of a row, ranked together."""

    #: The largest ones looked at (ten, or all where there are fewer), and how many of them sit at P-bar = 1.
    top: int
    top_at_ones: int
    #: Share of the sum of all |steps| that sits at P-bar = 1 (nan without a step), and the share of keys there.
    share_at_ones: float
    share_of_keys: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CumulativeTrace:
    """One token and feature along the keys, under one accumulator; arrays of the K visible keys in order of visits.

    `running_lp[i]` is what the accumulator would hold (or store) if the row ended after key i; it exists in the
    computation only where `exists`.
    """

    feature: int
    #: "fp32-prefix", "bf16-each-add", "tile:N", "sm80", "sm90", "sm100" or "exact".
    accumulator: str
    #: One or two sentences: what the accumulator is, and what it is not.
    meaning: str
    #: Recipe whose walk (order, tiles, anchors) the arrays follow.
    walk_recipe: str
    keys: NDArray[np.int64]
    #: float32: operand of the product, and the value of V.
    p_bar: NDArray[np.float32]
    v: NDArray[np.float32]
    is_one: NDArray[np.bool_]
    tile_end: NDArray[np.bool_]
    exists: NDArray[np.bool_]
    #: float64: running sum by the accumulator, its reference, and their difference lp - hp.
    running_lp: NDArray[np.float64]
    running_hp: NDArray[np.float64]
    error: NDArray[np.float64]
    #: Half an ulp of the stored format at each reference value where the error of a single rounding must lie within
    #: it; None for accumulators whose errors add up.
    half_ulp: NDArray[np.float64] | None
    #: Keys whose |error| exceeds `half_ulp`: 0 unless something is wrong; None without a bound.
    bound_exceeded: int | None
    #: Largest |jump| first; at most 1,000.
    jumps: tuple[Jump, ...]
    #: Of the ten largest jumps (or of all, where there are fewer), how many sit at P-bar = 1; and how many there are.
    top_jumps_at_ones: int
    top_jumps: int
    #: O of this feature from the accumulator's end by the recipe's division and cast, the recipe's own O, and hp's.
    o_accumulator: float
    o_lp: float
    o_hp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTies:
    """The final rounding of a row over its features, against the law b(r) for ties and residues."""

    #: "o_bar" or "o": the rounding that ends the sum.
    point: str
    #: Keys with P-bar = 1.
    ones: int
    #: One entry a feature: bits of the main sum below the last kept bit, the residue in ulp (+ same sign as the main
    #: sum), the error of the rounding in ulp (+ away from zero), and what the law expects.
    bits_dropped: tuple[int, ...]
    residue_ulp: tuple[float, ...]
    error_ulp: tuple[float, ...]
    law_ulp: tuple[float, ...]
    #: Means over the features.
    mean_error_ulp: float
    mean_law_ulp: float
    #: Share of features whose main sum alone lies halfway, and of non-zero residues with the main sum's sign.
    tie_share: float
    same_sign_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrace:
    """Everything that trace-head found out about one head."""

    #: 0-based.
    layer: int
    head: int
    #: Sequences traced, as numbered in the run, and of how many.
    sequences: tuple[int, ...]
    sequences_of_run: int
    #: Queries a sequence and features.
    num_queries: int
    num_features: int
    #: Sum of delta_err over all rows traced (math.fsum of the rows), and rows with a positive and a negative sign.
    delta_err_sum: float
    rows: int
    positive: int
    negative: int
    #: delta_err of every row, float64 [S, N]; nan in padding and fully masked rows.
    delta_err: NDArray[np.float64]
    #: All rows, largest |delta_err| first; at most 1,000.
    tokens: tuple[TokenError, ...]
    #: None where the record has no dO; then the chosen token is the one with the largest output error.
    token: TokenTrace | None
    #: The row and feature that the cumulative trace is about.
    traced: TokenError
    cumulative: CumulativeTrace
    #: Steps of all features of the row; None for the matrix units, whose sums have no step at a key.
    row_jumps: RowJumps | None = None
    #: float32 [M] values of V[:, feature] of the whole sequence, for the drawing.
    v_all: NDArray[np.float32]
    #: None where the recipe's anchor is not the maximum.
    ties: RowTies | None
    #: Things a reader must know, one sentence each.
    notes: tuple[str, ...]
