"""One rounding event explained: the conversion of a value, or a sum that is kept in one format and stored in another.

Everything is exact, in integers and fractions; results are those of `scalar.encode`. Plain Python.
"""

from collections.abc import Sequence
from fractions import Fraction

from bf16forensics.floats.align import align, number_of
from bf16forensics.floats.explained import ExplainedSum, Rounding
from bf16forensics.floats.formats import BF16, FP32, FloatFormat
from bf16forensics.floats.pattern import Pattern
from bf16forensics.floats.round_bits import explain_rounding


def explain_conversion(
    operand: Pattern,
    target: FloatFormat = BF16,
    mode: str = "rne",
    *,
    overflow: str | None = None,
    random: Fraction | None = None,
) -> Rounding:
    """Explain the conversion of one value to a format, in one rounding.

    Infinity and NaN have a result and no bits; -0 stays -0. A target that holds the value gives an exact result.

    Args:
        operand: The value, of any format.
        target: The format.
        mode: "rne", "rz", "rna" or "stochastic".
        overflow: "nonfinite" or "saturate"; None for the target's own, which saturates FP8 alone.
        random: Number in [0, 1) for "stochastic"; without one the decision stays open.

    Raises:
        InputError: unknown mode or overflow, or a random number out of range or not asked for.
    """
    value = operand.value
    # Only a float tells -0, infinity and NaN.
    return explain_rounding(value if value else operand.number, target, mode, overflow=overflow, random=random)


def explain_sum(
    terms: Sequence[Pattern],
    source: FloatFormat | None = FP32,
    target: FloatFormat = BF16,
    mode: str = "rne",
    *,
    overflow: str | None = None,
    random: Fraction | None = None,
) -> ExplainedSum:
    """Explain a sum: aligned on one grid, added exactly, rounded to `source` and then to `target`.

    The rounding to `source` is to nearest, ties to even, as a unit adds; `mode`, `overflow` and `random` are those of
    the rounding to `target`. Zeros, infinities and NaN add as in IEEE 754.

    Args:
        terms: One or more values, of any formats.
        source: Format in which the sum is kept; None for an exact sum that rounds to `target` alone.
        target: Format in which it is stored.
        mode: "rne", "rz", "rna" or "stochastic".
        overflow: "nonfinite" or "saturate"; None for the target's own.
        random: Number in [0, 1) for "stochastic"; without one the decision stays open.

    Raises:
        InputError: unknown mode or overflow, or a random number out of range or not asked for.

    Reference: IEEE 754-2019, sections 4.3, 6.3 and 7.4.
    """
    total = align(terms)
    direct = explain_rounding(number_of(total), target, mode, overflow=overflow, random=random)
    if source is None or source is target:
        return ExplainedSum(sum=total, to_source=None, to_target=direct, direct=None)
    to_source = explain_rounding(number_of(total), source, overflow="nonfinite")
    # What drops nothing leaves the exact sum to be rounded, which is `direct`.
    if to_source.decision == "exact" or to_source.result is None:
        return ExplainedSum(sum=total, to_source=to_source, to_target=direct, direct=None)
    to_target = explain_conversion(to_source.result, target, mode, overflow=overflow, random=random)
    is_twice = to_target.result != direct.result
    if to_target.decision == direct.decision == "open":
        is_twice = to_target.probability_up != direct.probability_up
    return ExplainedSum(sum=total, to_source=to_source, to_target=to_target, direct=direct if is_twice else None)
