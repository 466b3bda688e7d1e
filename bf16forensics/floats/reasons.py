"""Why a rounding went as it did, as sentences. Plain Python."""

from fractions import Fraction

from bf16forensics.floats.formats import FloatFormat
from bf16forensics.floats.pattern import Pattern


def reason_of_decision(
    decision: str, mode: str, last_kept: int, guard: int, residue: Fraction, rest: Fraction, random: Fraction | None
) -> str:
    """Why a value went up, down or nowhere; nothing of one beyond the range. Arguments as in `explained.Rounding`.

    Args:
        decision: "exact", "up", "down", "beyond" or "open".
        mode: "rne", "rz", "rna" or "stochastic".
        last_kept: Last kept bit.
        guard: Guard bit.
        residue: Everything below the guard bit, in ulp.
        rest: All dropped bits, in ulp.
        random: Number of "stochastic"; None without one.
    """
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


def reason_of_range(extreme: str, result: Pattern | None, fmt: FloatFormat, mode: str) -> str:
    """What became of a value beyond the range; nothing of one within it. Arguments as in `explained.Rounding`."""
    if result is None or extreme not in ("overflow", "saturated"):
        return ""
    largest = f"the largest finite value of {fmt.name} is {fmt.max_finite:.7g}, and what lies beyond it"
    if extreme == "overflow":
        return f"{largest} becomes {'NaN' if result.is_nan else 'infinity'}"
    return f"{largest} is held there by {'rounding toward zero' if mode == 'rz' else 'saturation'}"
