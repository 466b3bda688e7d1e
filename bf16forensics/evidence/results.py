"""What the evidence says about one head: scalars only, so that verdicts and reports need no tensor library.

"Row" is one (sequence, query) pair that is neither padding nor fully masked. Non-finite numbers are allowed in every
float field and mean "not defined here" (nan) or an overflow (inf).
"""

from dataclasses import dataclass

from bf16forensics.evidence.tie_results import TieStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredStatistics:
    """A signed quantity summed within each sequence first, so that rows of one sequence need not be independent."""

    #: Sequences.
    sequences: int
    #: Mean over sequences of the sequence's sum.
    mean: float
    #: Jackknife standard error of `mean`.
    standard_error: float
    #: mean / standard_error, to be read against Student's t with sequences - 1 degrees of freedom.
    t: float
    #: Two-sided p of t.
    p: float
    #: Two-sided p when the signs of whole sequences are flipped: for the head alone, and family-wise over heads.
    p_flip: float
    p_adjusted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustStatistics:
    """How much of a sum hangs on few rows."""

    #: (sum |x|)^2 / sum x^2 over rows.
    n_effective: float
    #: |largest row| / sum |x|.
    largest_share: float
    #: Sign (-1, 0, 1) of the sum without the 1 % of rows largest in magnitude.
    sign_without_top_1_percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedStatistics:
    """A signed per-row quantity over all rows of all sequences."""

    sum: float
    mean: float
    #: Standard error of `mean` treating rows as independent (secondary; see `clustered`).
    standard_error: float
    #: mean / standard_error.
    z: float
    #: Rows whose sign counts, |x| > 2^-22 sum |dO * O| of the row.
    positive: int
    negative: int
    #: Rows whose sign does not count.
    zero: int
    clustered: ClusteredStatistics
    robust: RobustStatistics
    #: Running sum over query positions, all sequences together, at up to 16 evenly spaced positions; the last is `sum`.
    running_tokens: tuple[float, ...]
    #: Running sum over the recorded steps, in order, for the first 64 steps.
    running_steps: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputError:
    """O_lp - O_hp."""

    #: Signed mean in ulp of O's format over elements whose error is within one ulp; + is away from zero.
    mean_ulp: float
    #: Largest |O_lp - O_hp|.
    max_abs: float
    #: The same element's error in ulp of O's format at O_hp.
    max_ulp: float
    #: Its sequence, query token and feature, 0-based; None when nothing was compared.
    sequence: int | None
    token: int | None
    feature: int | None
    #: Over features: mean of sign(dO) * sign(O_lp - O_hp) for the feature where its magnitude is largest.
    sign_correlation: float
    sign_correlation_feature: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ones:
    """Three counts of (query, key) pairs at the row maximum; masked pairs never count."""

    #: P-bar exactly 1 in FP32, from the recipe's own scores.
    fp32_exact: int
    #: P-bar equal to 1 after rounding to BF16, from the recipe's own scores.
    rounded: int
    #: Keys sharing the true maximum, from the hp scores.
    shared_maximum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows by what happens at their maximum."""

    #: Rows analysed (neither padding nor fully masked).
    rows: int
    #: Rows with two or more P-bar = 1 after rounding to BF16; None where the recipe's anchor is not the row maximum.
    rows_repeated_max: int | None
    #: Of these, rows whose label is ignored (their dO is usually 0).
    rows_repeated_max_unlabelled: int | None
    #: Rows with two or more keys within 1e-3 nats of the maximum.
    rows_near_max: int
    #: Real queries that see no key.
    rows_fully_masked: int
    #: Padding queries, left out of everything.
    rows_padding: int
    #: Rows where O_lp equals the value of the top key in over 90 % of the features.
    rows_swamped: int
    #: Share of the squared delta defect that the swamped rows carry.
    swamped_power_share: float
    #: Share of the delta defect's sum that disappears when rows with repeated maxima use hp's O (counterfactual).
    repeated_sum_share: float
    #: Mean of P on the first visible key of a row.
    sink_share: float
    #: Largest number of P-bar = 1 (rounded) in one row.
    most_ones: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRatio:
    """One recorded step: the error of its whole gradient."""

    #: Training step, None when unknown.
    step: int | None
    sequences: int
    #: |dW_Q| of the step's mean gradient.
    norm: float
    #: Norm of the defect part of the step's error over `norm`.
    error_defect_relative: float
    #: Norm of the whole error (lp - hp backward) over `norm`.
    error_total_relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatistics:
    """U-statistics over sequences of one part of the dW_Q error against dW_Q itself (signed roots)."""

    #: Rounding noise over sampling noise, sqrt(V_e / V_g).
    rho: float
    #: Bias B, signed root of the U-statistic of the error.
    bias: float
    #: Lower and upper bound of B (one-sided 95 %).
    bias_lower: float
    bias_upper: float
    #: Smallest B that the sign-flip test would find with 80 % power.
    minimum_detectable: float
    #: Sign-flip p, by itself and family-wise over heads.
    p: float
    p_adjusted: float
    #: Effective number of sequences, (sum w)^2 / sum w^2 of the per-sequence error powers.
    n_effective: float
    #: Signed gain U(g, e) / S^2; nan when the mean gradient is not detected.
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Telescope:
    """g_lp - g_hp of the batch as a sum of parts: signed shares <E_i, E> / |E|^2 that add up to 1."""

    share_scores: float
    share_defect: float
    share_cast_ds: float
    share_cast_dq: float
    share_rest: float
    #: Norm of each part over |dW_Q|.
    scores_relative: float
    defect_relative: float
    cast_ds_relative: float
    cast_dq_relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCoupling:
    """How the delta error reaches the gradient of the head's W_Q. The gradient is the batch's mean over sequences."""

    #: |dW_Q| (hp, Frobenius).
    norm: float
    #: Norm of alpha * sum (delta_lp - delta_hp) (PK)^T X over `norm` (full hp delta).
    error_full_relative: float
    #: Norm of the defect part over `norm`.
    error_defect_relative: float
    #: Norm of the whole lp - hp gradient over `norm`.
    error_total_relative: float
    sequences: int
    #: Sampling noise sqrt(V_g) and detected signal S (signed root) of the gradient over sequences.
    sampling_noise: float
    signal: float
    #: p of the sign-flip test of S; the mean gradient is "detected" below 0.05.
    signal_p: float
    #: Statistics of the defect part (primary) and of the whole error.
    defect: ErrorStatistics
    total: ErrorStatistics
    telescope: Telescope
    #: sqrt(sum Var_P(alpha X E^T K^T)) over the same for the gradient: how much of the error the softmax feels.
    functional_relative: float
    #: Share of the error's and the gradient's power along the mean key.
    flat_share: float
    flat_share_gradient: float
    #: Coherence of the rows' rank-one terms, with their signs; 0 for random directions, 1 for parallel ones.
    coherence: float
    #: The same with |delta error|: coherence of the directions alone.
    coherence_direction: float
    #: Split-half coherence across recorded steps; nan with fewer than 2 steps.
    coherence_steps: float
    #: One entry a recorded step, for the first 64 steps.
    steps: tuple[StepRatio, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Norms of a head's projections."""

    #: Largest singular value of W_Q and W_K of the head (W_K of its key/value head).
    w_q_spectral_norm: float
    w_k_spectral_norm: float
    #: |W|_F^2 / sigma_max^2.
    w_q_stable_rank: float
    w_k_stable_rank: float
    #: sigma_max(W_Q^T W_K) / sqrt(d), which no rescaling between the two changes.
    qk_spectral_norm: float
    #: True when W_Q is zero everywhere.
    w_q_all_zero: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadEvidence:
    """Everything that was found out about one head."""

    #: 0-based.
    layer: int
    head: int
    #: Key/value head that this query head reads.
    kv_head: int
    #: delta_lp - delta_hp against full hp; None without dO.
    delta_err: SignedStatistics | None
    #: delta_lp - rowsum(P_lp * dP) / rowsum(P_lp); None without dO.
    delta_defect: SignedStatistics | None
    #: Row sum of dS_lp before the scale (zero in exact arithmetic); None without dO.
    ds_row_sum: SignedStatistics | None
    output_err: OutputError
    #: None where the recipe's anchor is not the row maximum, so that P-bar = 1 says nothing.
    ones: Ones | None
    counts: RowCounts
    #: None where ones are not counted, no row has several, or the recipe does not round the sum.
    ties: TieStatistics | None
    #: Visible (query, key) pairs.
    pairs: int
    #: Largest |score| (hp, scaled, capped, biased).
    score_abs_max: float
    #: None when the projections are unknown.
    spectrum: Spectrum | None
    #: None without dO or X.
    dw_q: GradientCoupling | None
    #: Names of inputs of this head that hold NaN or Inf, with a position ("k[0, 7, 3, 1]"); empty when all finite.
    nonfinite: tuple[str, ...]
