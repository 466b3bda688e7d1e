"""What an explained sum and an explained rounding consist of. Plain Python.

"Up" and "away" mean away from zero, "down" toward zero; errors are result minus exact value, with the sign of that
difference. An ulp is the step of the format in the binade of the exact value, as if exponents had no upper end.
"""

from dataclasses import dataclass
from fractions import Fraction

from bf16forensics.floats.formats import FloatFormat
from bf16forensics.floats.pattern import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """The same rounding with some of the dropped bits cleared."""

    #: "sticky": everything below the round bit cleared; "residue": everything below the guard bit.
    cleared: str
    #: The value with those bits cleared.
    exact: Fraction
    result: Pattern
    #: result - `exact` of this counterfactual; None where the result is not finite.
    error: Fraction | None
    is_tie: bool
    #: The result is another one than with the bits.
    is_other: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """One exact value rounded once to a format."""

    fmt: FloatFormat
    #: "rne", "rz", "rna" or "stochastic".
    mode: str
    #: "nonfinite" or "saturate".
    overflow: str
    #: The value; None for infinity and NaN, of which only `result` and `reason` speak.
    exact: Fraction | None
    #: Sign of the value, that of a zero or an infinity too.
    is_negative: bool
    #: Exponent of one ulp.
    step_exponent: int
    #: The significand cut at the last kept bit, as binary digits: one before the point, then `fmt.fraction_bits`. The
    #: first is 0 below the normal range.
    kept: str
    #: All dropped digits; empty where the format holds the value. Cut after `DROPPED_MOST` where they do not end.
    dropped: str
    #: Last bit of `kept`, then the first and second bit of `dropped` and the OR of all others.
    last_kept: int
    guard: int
    round_bit: int
    sticky: int
    #: Everything below the guard bit, in ulp: [0, 1/2).
    residue_ulp: Fraction
    #: The dropped bits are exactly half an ulp.
    is_tie: bool
    #: "exact", "up", "down", "beyond" (at or past the step after the largest finite value), "open" (stochastic without
    #: a random number); "none" for infinity and NaN.
    decision: str
    #: Why, as one sentence.
    reason: str
    #: "", "zero", "subnormal", "overflow" (beyond the largest finite value) or "saturated" (held at it).
    extreme: str
    #: Neighbours of the value in the format; the value itself, twice, where the format holds it. What lies beyond the
    #: largest finite value is what an overflow becomes, None where it saturates or is NaN.
    toward_zero: Pattern | None
    away: Pattern | None
    #: None while the decision is open.
    result: Pattern | None
    #: result - exact, also in ulp; None where there is no finite result.
    error: Fraction | None
    error_ulp: Fraction | None
    #: Probability of going away from zero in "stochastic", and the random number compared with it.
    probability_up: Fraction | None
    random: Fraction | None
    #: Empty where nothing lies below the guard bit, where the decision is "beyond", and in "stochastic".
    without: tuple[Counterfactual, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedSum:
    """The exact sum of finite values on one grid, or what becomes of infinities and NaNs."""

    terms: tuple[Pattern, ...]
    #: None for infinity and NaN.
    exact: Fraction | None
    #: Sign of the sum, that of a zero or an infinity too; meaningless for NaN.
    is_negative: bool
    is_nan: bool
    #: Exponents of the first and the last column.
    top_exponent: int
    grid_exponent: int
    #: Largest exponent among the terms: the binary point stands behind this column.
    lead_exponent: int
    #: Magnitudes as binary digits, one column a power of two; a row for every term, and that of the sum.
    rows: tuple[str, ...]
    total: str
    #: The sum is wider than its largest term.
    is_carry: bool
    #: How far the sum's significand moves to stand behind one digit again: right (positive, after a carry) or left
    #: (negative, after cancellation).
    shift: int
    #: What happened, as one sentence.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedSum:
    """A sum, kept in one format and then rounded to another."""

    sum: AlignedSum
    #: Rounding of the exact sum to the format of the running sum; None where there is no such step.
    to_source: Rounding | None
    #: Rounding to the target of what the step before left.
    to_target: Rounding
    #: One rounding of the exact sum to the target, where it gives another result than the two (or, with the decision
    #: open, other probabilities): double rounding.
    direct: Rounding | None
