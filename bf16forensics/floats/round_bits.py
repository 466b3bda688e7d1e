"""One rounding, bit by bit: kept and dropped digits, guard, round and sticky bit, and what decided. Plain Python."""

import math
from fractions import Fraction

from bf16forensics.floats.explained import Counterfactual, Rounding
from bf16forensics.floats.formats import FloatFormat
from bf16forensics.floats.pattern import Pattern, leading_exponent, power_of_two
from bf16forensics.floats.reasons import reason_of_decision, reason_of_range
from bf16forensics.floats.scalar import encode

#: Dropped digits at most where they never end: only a fraction that is not binary, such as 1/3, has such digits.
DROPPED_MOST = 64


def explain_rounding(
    value: Fraction | float,
    fmt: FloatFormat,
    mode: str = "rne",
    *,
    overflow: str | None = None,
    random: Fraction | None = None,
) -> Rounding:
    """Explain the rounding of one exact value; the result is that of `scalar.encode`.

    NaN and infinity have a result and no bits. A float -0.0 keeps its sign.

    Args:
        value: An int, a float or a Fraction.
        fmt: The format.
        mode: "rne", "rz", "rna" or "stochastic".
        overflow: "nonfinite" or "saturate"; None for the format's own.
        random: Number in [0, 1) for "stochastic"; without one the decision stays open.

    Raises:
        InputError: unknown mode or overflow, or a random number out of range or not asked for.

    Reference: IEEE 754-2019, sections 4.3 and 7.4.
    """
    # A decision that stays open is checked like any other, with a number that is not used.
    is_random_missing = mode == "stochastic" and random is None
    code = encode(value, fmt, mode, overflow=overflow, random=Fraction(0) if is_random_missing else random)
    chosen = fmt.overflow if overflow is None else overflow
    result = Pattern(fmt=fmt, code=code)
    if isinstance(value, float) and not math.isfinite(value):
        return _special(value, fmt, mode, chosen, result)
    exact = Fraction(value)
    is_negative = math.copysign(1.0, value) < 0 if isinstance(value, float) else exact < 0
    magnitude = abs(exact)
    step_exponent = _step_exponent(magnitude, fmt)
    num_steps, rest = _in_steps(magnitude, step_exponent)
    below = _code_of_steps(num_steps, step_exponent, fmt)
    is_beyond = below > fmt.max_finite_code
    decision = "beyond" if is_beyond else _decision(num_steps, rest, mode, random)
    shown = None if decision == "open" else result
    reached = None if shown is None else shown.value
    error = None if reached is None else reached - exact
    dropped = _digits(rest)
    guard, round_bit = (int(dropped[i : i + 1] or "0") for i in (0, 1))
    residue = rest - Fraction(guard, 2) if guard else rest
    sticky = int(residue != Fraction(round_bit, 4))
    is_outside = is_beyond or (below == fmt.max_finite_code and rest > 0)
    extreme = _extreme(magnitude, decision, shown, fmt, is_outside=is_outside)
    neighbours = _neighbours(below, fmt, chosen, is_negative, is_exact=rest == 0)
    reason = reason_of_decision(decision, mode, num_steps % 2, guard, residue, rest, random)
    without: tuple[Counterfactual, ...] = ()
    if residue and not is_beyond and mode != "stochastic":
        # In quarters of an ulp: what is left of the dropped bits.
        cleared = {"sticky": 2 * guard + 1} if round_bit and sticky else {}
        cleared["residue"] = 2 * guard
        quarter = power_of_two(step_exponent - 2)
        without = tuple(
            _counterfactual(name, (4 * num_steps + left) * quarter, left == 2, is_negative, mode, chosen, result)
            for name, left in cleared.items()
        )
    return Rounding(
        fmt=fmt,
        mode=mode,
        overflow=chosen,
        exact=exact,
        is_negative=is_negative,
        step_exponent=step_exponent,
        kept=f"{num_steps:0{fmt.fraction_bits + 1}b}",
        dropped=dropped,
        last_kept=num_steps % 2,
        guard=guard,
        round_bit=round_bit,
        sticky=sticky,
        residue_ulp=residue,
        is_tie=guard == 1 and not residue,
        decision=decision,
        reason="; ".join(part for part in (reason, reason_of_range(extreme, shown, fmt, mode)) if part),
        extreme=extreme,
        toward_zero=neighbours[0],
        away=neighbours[1],
        result=shown,
        error=error,
        error_ulp=None if error is None else error / power_of_two(step_exponent),
        probability_up=rest if mode == "stochastic" else None,
        random=random,
        without=without,
    )


def _counterfactual(
    cleared: str, magnitude: Fraction, is_tie: bool, is_negative: bool, mode: str, overflow: str, actual: Pattern
) -> Counterfactual:
    exact = -magnitude if is_negative else magnitude
    # A float -0.0 keeps the sign that a fraction 0 has not.
    value = exact if exact else (-0.0 if is_negative else 0.0)
    result = Pattern(fmt=actual.fmt, code=encode(value, actual.fmt, mode, overflow=overflow))
    reached = result.value
    return Counterfactual(
        cleared=cleared,
        exact=exact,
        result=result,
        error=None if reached is None else reached - exact,
        is_tie=is_tie,
        is_other=result != actual,
    )


def _special(value: float, fmt: FloatFormat, mode: str, overflow: str, result: Pattern) -> Rounding:
    if math.isnan(value):
        reason = f"NaN stays NaN; shown is the quiet NaN of {fmt.name}, payloads differ between implementations"
    elif not result.is_finite:
        reason = "infinity stays infinity" if not result.is_nan else f"{fmt.name} has no infinity: it becomes NaN"
    else:
        reason = f"saturating: infinity becomes the largest finite value of {fmt.name}"
    return Rounding(
        fmt=fmt,
        mode=mode,
        overflow=overflow,
        exact=None,
        is_negative=math.copysign(1.0, value) < 0,
        step_exponent=0,
        kept="",
        dropped="",
        last_kept=0,
        guard=0,
        round_bit=0,
        sticky=0,
        residue_ulp=Fraction(0),
        is_tie=False,
        decision="none",
        reason=reason,
        extreme="",
        toward_zero=None,
        away=None,
        result=result,
        error=None,
        error_ulp=None,
        probability_up=None,
        random=None,
        without=(),
    )


def _step_exponent(magnitude: Fraction, fmt: FloatFormat) -> int:
    if magnitude == 0:
        return fmt.step_exponent_min
    return max(leading_exponent(magnitude), fmt.exponent_min) - fmt.fraction_bits


def _in_steps(magnitude: Fraction, step_exponent: int) -> tuple[int, Fraction]:
    """Whole steps of 2**step_exponent, and the rest in steps: [0, 1)."""
    numerator, denominator = magnitude.numerator, magnitude.denominator
    if step_exponent >= 0:
        denominator <<= step_exponent
    else:
        numerator <<= -step_exponent
    whole, rest = divmod(numerator, denominator)
    return whole, Fraction(rest, denominator)


def _digits(rest: Fraction) -> str:
    """Binary digits of a fraction in [0, 1) behind the point, without trailing zeros."""
    width = rest.denominator.bit_length() - 1
    if rest.denominator == 1 << width:
        return f"{rest.numerator:0{width}b}" if width else ""
    return f"{int(rest * (1 << DROPPED_MOST)):0{DROPPED_MOST}b}"


def _code_of_steps(num_steps: int, step_exponent: int, fmt: FloatFormat) -> int:
    # Codes of one sign are consecutive over consecutive values, and a full fraction carries into the exponent field.
    return ((step_exponent - fmt.step_exponent_min) << fmt.fraction_bits) + num_steps


def _neighbours(
    below: int, fmt: FloatFormat, overflow: str, is_negative: bool, *, is_exact: bool
) -> tuple[Pattern, Pattern | None]:
    sign_bit = fmt.sign_mask if is_negative else 0
    toward_zero = Pattern(fmt=fmt, code=sign_bit | min(below, fmt.max_finite_code))
    if is_exact and below <= fmt.max_finite_code:
        return toward_zero, toward_zero
    if below < fmt.max_finite_code:
        return toward_zero, Pattern(fmt=fmt, code=sign_bit | (below + 1))
    if overflow == "saturate" or not fmt.has_infinity:
        return toward_zero, None
    return toward_zero, Pattern(fmt=fmt, code=sign_bit | fmt.infinity_code)


def _decision(num_steps: int, rest: Fraction, mode: str, random: Fraction | None) -> str:
    if rest == 0:
        return "exact"
    if mode == "rz":
        is_up = False
    elif mode == "stochastic":
        if random is None:
            return "open"
        is_up = random < rest
    elif rest == Fraction(1, 2):
        is_up = mode == "rna" or num_steps % 2 == 1
    else:
        is_up = rest > Fraction(1, 2)
    return "up" if is_up else "down"


def _extreme(magnitude: Fraction, decision: str, result: Pattern | None, fmt: FloatFormat, *, is_outside: bool) -> str:
    if magnitude == 0:
        return "zero"
    if result is not None and is_outside and decision != "down":
        return "saturated" if result.is_finite else "overflow"
    return "subnormal" if magnitude < power_of_two(fmt.exponent_min) else ""
