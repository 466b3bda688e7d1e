"""What the observation of (PK)[T]^T X[T] says: scalars and short tuples only, bounded whatever the run's size.

"Next" compares a token with the one after it, "drawn" compares pairs of tokens of one sequence at any distance: all of
them where there are few, else a fixed number drawn with a fixed seed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStatistics:
    """One quantity over pairs of tokens of all sequences. nan without a pair."""

    #: Pairs for which it is defined.
    pairs: int
    #: Pairs left out because a vector is zero or not finite.
    undefined: int
    mean: float
    #: Over at most about 1,024 of the pairs, spread evenly over all sequences.
    median: float
    minimum: float
    maximum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSigns:
    """One column of X, an input feature of the layer's query projection."""

    #: 0-based.
    column: int
    #: Mean |X| over tokens.
    mean_abs: float
    #: The sign of most tokens (-1, 1; 0 where both are equally frequent), and the share of all tokens that have it.
    sign: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerObservation:
    """X of one layer, which all its heads share."""

    layer: int
    #: Cosine of X between tokens.
    next: PairStatistics
    drawn: PairStatistics
    #: Share of the columns of X with the same sign in both tokens, of those that are zero in neither; 0.5 is chance.
    signs_next: PairStatistics
    signs_drawn: PairStatistics
    #: Columns with the largest mean |X|, largest first; none where X is not finite.
    columns: tuple[ColumnSigns, ...]
    #: Names of non-finite entries of X; empty when finite.
    nonfinite: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnCosine:
    """Column c of (PK)[T]^T X[T] between a token and the next: cos(PK) times the sign of X[T][c] X[T+1][c]."""

    #: 0-based.
    column: int
    #: Pairs for which it is defined, and the mean over them; nan without one.
    pairs: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadObservation:
    """The rank-one matrices (PK)[T]^T X[T] of one head."""

    layer: int
    head: int
    #: Cosine of PK between tokens, carried back to the output of W_Q where q is more than W_Q x.
    next: PairStatistics
    drawn: PairStatistics
    #: The same before it is carried back (with rotation and QK-norm); None where q is W_Q x itself.
    rotated_next: PairStatistics | None
    rotated_drawn: PairStatistics | None
    #: Cosine of the whole matrices between tokens, cos(PK) cos(X); None without X.
    matrix_next: PairStatistics | None
    matrix_drawn: PairStatistics | None
    #: Mean of the matrices' cosine over all pairs of tokens of a sequence, weighted by |PK||X| of both; None without X.
    coherence: float | None
    #: Mean cosine of PK over all pairs of tokens of different sequences; nan with fewer than two.
    across_sequences: float
    #: The layer's columns with the largest mean |X|; empty without X.
    columns: tuple[ColumnCosine, ...]
    #: Rows with two or more P-bar = 1 after rounding to BF16, and with two or more exactly 1 in FP32; most in one row.
    #: None where the recipe's anchor is not the row maximum, and for a head that is not finite.
    rows_repeated: int | None
    rows_exact: int | None
    most_ones: int | None
    #: Names of non-finite inputs, empty when finite: q, k, v and PK make everything here nan, X what needs X.
    nonfinite: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRow:
    """One row with several maxima, by the recipe's own scores."""

    layer: int
    head: int
    sequence: int
    query: int
    #: Keys with P-bar = 1 after rounding to BF16 (at least 2), and those exactly 1 in FP32.
    ones: int
    ones_exact: int
    #: Distance in nats between the largest and the smallest of their scores.
    gap_nats: float
    #: The first 16 of the keys, ascending.
    keys: tuple[int, ...]
    #: False where the label of the query is ignored.
    labelled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The observation of one run."""

    #: Name of the recipe whose scores the maxima were counted with.
    recipe: str
    sequences: int
    #: Most pairs drawn from a sequence, and the seed.
    pairs_drawn: int
    seed: int
    #: Empty without X.
    layers: tuple[LayerObservation, ...]
    #: In (layer, head) order.
    heads: tuple[HeadObservation, ...]
    #: False where the recipe's anchor is not the row maximum, so that P-bar = 1 says nothing.
    rows_counted: bool
    #: Rows with several maxima, over the sequences in which their head is finite.
    rows_total: int
    #: The first 1,000 of them: most ones first, then by layer, head, query, sequence.
    rows: tuple[RepeatedRow, ...]
