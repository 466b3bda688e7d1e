"""One rounding, bit by bit: kept and dropped digits, guard, round and sticky bit, and what decided. Plain Python."""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from bf16forensics.floats.explained import Counterfactual, Rounding
from bf16forensics.floats.formats import FloatFormat
from bf16forensics.floats.pattern import Pattern, leading_exponent, power_of_two
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
    step_exponent = _step_exponent(abs(exact), fmt)
    num_steps, rest = divmod(abs(exact) / power_of_two(step_exponent), 1)
    is_beyond = _code_of_steps(num_steps, step_exponent, fmt) > fmt.max_finite_code
    decision = "beyond" if is_beyond else _decision(num_steps, rest, mode, random)
    shown = None if decision == "open" else result
    reached = None if shown is None else shown.value
    error = None if reached is None else reached - exact
    dropped = _digits(rest)
    guard, round_bit = (int(dropped[i : i + 1] or "0") for i in (0, 1))
    residue = rest - Fraction(guard, 2)
    extreme = _extreme(abs(exact), decision, shown, fmt)
    neighbours = _neighbours(num_steps, step_exponent, fmt, chosen, is_negative, is_exact=rest == 0)
    reason = _reason(decision, mode, num_steps % 2, guard, residue, rest, random)
    rounding = Rounding(
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
        sticky=int(residue != Fraction(round_bit, 4)),
        residue_ulp=residue,
        is_tie=rest == Fraction(1, 2),
        decision=decision,
        reason="; ".join(part for part in (reason, _reason_of_range(extreme, shown, fmt, mode)) if part),
        extreme=extreme,
        toward_zero=neighbours[0],
        away=neighbours[1],
        result=shown,
        error=error,
        error_ulp=None if error is None else error / power_of_two(step_exponent),
        probability_up=rest if mode == "stochastic" else None,
        random=random,
        without=(),
    )
    if not residue or is_beyond or mode == "stochastic":
        return rounding
    return replace(rounding, without=tuple(_counterfactuals(rounding, num_steps)))


def _counterfactuals(rounding: Rounding, num_steps: int) -> Iterator[Counterfactual]:
    step = power_of_two(rounding.step_exponent)
    rests = {"residue": Fraction(rounding.guard, 2)}
    if rounding.round_bit and rounding.sticky:
        rests = {"sticky": Fraction(rounding.guard, 2) + Fraction(1, 4)} | rests
    for cleared, rest in rests.items():
        magnitude = (num_steps + rest) * step
        exact = -magnitude if rounding.is_negative else magnitude
        # A float -0.0 keeps the sign that a fraction 0 has not.
        value = exact if exact else (-0.0 if rounding.is_negative else 0.0)
        code = encode(value, rounding.fmt, rounding.mode, overflow=rounding.overflow)
        result = Pattern(fmt=rounding.fmt, code=code)
        reached = result.value
        yield Counterfactual(
            cleared=cleared,
            exact=exact,
            result=result,
            error=None if reached is None else reached - exact,
            is_tie=rest == Fraction(1, 2),
            is_other=result != rounding.result,
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
    num_steps: int, step_exponent: int, fmt: FloatFormat, overflow: str, is_negative: bool, *, is_exact: bool
) -> tuple[Pattern, Pattern | None]:
    sign_bit = fmt.sign_mask if is_negative else 0
    below = _code_of_steps(num_steps, step_exponent, fmt)
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


def _extreme(magnitude: Fraction, decision: str, result: Pattern | None, fmt: FloatFormat) -> str:
    if magnitude == 0:
        return "zero"
    if result is not None and magnitude > Fraction(fmt.max_finite) and decision != "down":
        return "saturated" if result.is_finite else "overflow"
    return "subnormal" if magnitude < Fraction(fmt.min_normal) else ""


def _reason(
    decision: str, mode: str, last_kept: int, guard: int, residue: Fraction, rest: Fraction, random: Fraction | None
) -> str:
    if decision == "beyond":
        return ""
    if decision == "exact":
        return "nothing is dropped: the format holds the value"
    if mode == "rz":
        return "toward zero: the dropped bits are cut off, whatever they are"
    if mode == "stochastic":
        if random is None:
            return "up with a probability equal to the dropped bits in ulp; no random number was given"
        relation = "below" if decision == "up" else "not below"
        return f"the random number {float(random):.6g} is {relation} the dropped bits in ulp, {float(rest):.6g}"
    if mode == "rna":
        return f"ties away from zero: the guard bit alone decides, and it is {guard}"
    if not guard:
        return "guard 0: the dropped bits are less than half an ulp"
    if residue:
        return "guard 1 and a bit below it is 1: the dropped bits are more than half an ulp"
    if last_kept:
        return "a tie, exactly half an ulp; the last kept bit is 1 (odd), so to the even neighbour"
    return "a tie, exactly half an ulp; the last kept bit is 0 (even) and stays"


def _reason_of_range(extreme: str, result: Pattern | None, fmt: FloatFormat, mode: str) -> str:
    if result is None or extreme not in ("overflow", "saturated"):
        return ""
    largest = f"the largest finite value of {fmt.name} is {fmt.max_finite:.7g}, and what lies beyond it"
    if extreme == "overflow":
        return f"{largest} becomes {'NaN' if result.is_nan else 'infinity'}"
    return f"{largest} is held there by {'rounding toward zero' if mode == 'rz' else 'saturation'}"
