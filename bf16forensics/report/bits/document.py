"""The explanation of a conversion or a sum as a JSON object.

A number is {"value": nearest double or text, "hex": exact hexadecimal float}; a bit pattern has its format and code.
"""

from fractions import Fraction

from bf16forensics.floats.bits import Bits
from bf16forensics.floats.blocks import Block
from bf16forensics.floats.chain import ChainStep
from bf16forensics.floats.explained import AlignedSum, Rounding
from bf16forensics.floats.literal import Operand
from bf16forensics.floats.pattern import Pattern
from bf16forensics.report.bits.numbers import hex_text
from bf16forensics.report.jsonio import plain


def bits_object(bits: Bits) -> dict[str, object]:
    """Everything about one explanation, as plain values; field names are stable, more may be added."""
    return {
        "kind": "sum" if bits.accumulator else "conversion",
        "accumulator": bits.accumulator or None,
        "meaning": bits.meaning or None,
        "source_format": bits.source.name,
        "target_format": bits.target.name,
        "mode": bits.mode,
        "overflow": bits.final.overflow,
        "seed": bits.seed,
        "labels": list(bits.labels) or None,
        "operands": [_operand(operand) for operand in bits.operands],
        "exact_sum": _number(bits.exact),
        "result": _pattern(bits.final.result),
        "error": _number(bits.error),
        "rounding": _rounding(bits.final),
        "double_rounding_of_text": _rounding(bits.from_text),
        "steps": [_step(step) for step in bits.steps],
        "blocks": [_block(block) for block in bits.blocks],
    }


def _operand(operand: Operand) -> dict[str, object]:
    return {
        "text": operand.text,
        "reading": operand.reading,
        "written": _number(operand.written),
        "is_rounded": operand.is_rounded,
        **(_pattern(operand.pattern) or {}),
    }


def _pattern(pattern: Pattern | None) -> dict[str, object] | None:
    if pattern is None:
        return None
    sign, exponent, fraction = pattern.fields
    return {
        "format": pattern.fmt.name,
        "bits": pattern.hex,
        "binary": pattern.binary,
        "fields": {"sign": sign, "exponent": exponent, "fraction": fraction},
        "value": plain(pattern.number),
    }


def _number(number: Fraction | None) -> dict[str, object] | None:
    if number is None:
        return None
    try:
        value = float(number)
    except OverflowError:
        # Beyond every double; "hex" is exact all the same.
        value = float("-inf") if number < 0 else float("inf")
    is_binary = number.denominator & (number.denominator - 1) == 0
    return {"value": plain(value), "hex": hex_text(number) if is_binary else None}


def _sum(total: AlignedSum) -> dict[str, object]:
    return {
        "exact": _number(total.exact),
        "is_negative": total.is_negative,
        "is_nan": total.is_nan,
        "top_exponent": total.top_exponent,
        "grid_exponent": total.grid_exponent,
        "rows": list(total.rows),
        "total": total.total,
        "carry": total.is_carry,
        "normalising_shift": total.shift,
        "reason": total.reason,
    }


def _rounding(rounding: Rounding | None) -> dict[str, object] | None:
    if rounding is None:
        return None
    return {
        "format": rounding.fmt.name,
        "mode": rounding.mode,
        "overflow": rounding.overflow,
        "exact": _number(rounding.exact),
        "is_negative": rounding.is_negative,
        "ulp_exponent": rounding.step_exponent,
        "kept": rounding.kept,
        "dropped": rounding.dropped,
        "last_kept_bit": rounding.last_kept,
        "guard": rounding.guard,
        "round": rounding.round_bit,
        "sticky": rounding.sticky,
        "residue_ulp": _number(rounding.residue_ulp),
        "tie": rounding.is_tie,
        "decision": rounding.decision,
        "reason": rounding.reason,
        "extreme": rounding.extreme or None,
        "toward_zero": _pattern(rounding.toward_zero),
        "away": _pattern(rounding.away),
        "result": _pattern(rounding.result),
        "error": _number(rounding.error),
        "error_ulp": _number(rounding.error_ulp),
        "probability_up": _number(rounding.probability_up),
        "random": _number(rounding.random),
        "without": [
            {
                "cleared": other.cleared,
                "exact": _number(other.exact),
                "result": _pattern(other.result),
                "error": _number(other.error),
                "tie": other.is_tie,
                "another_result": other.is_other,
            }
            for other in rounding.without
        ],
    }


def _step(step: ChainStep) -> dict[str, object]:
    return {
        "index": step.index,
        "terms": [_pattern(term) for term in step.terms],
        "before": _pattern(step.before),
        "sum": _sum(step.event.sum),
        "to_source": _rounding(step.event.to_source),
        "to_target": _rounding(step.event.to_target),
        "double_rounding": _rounding(step.event.direct),
        "running": _pattern(step.running),
        "exact_prefix": _number(step.prefix),
        "error": _number(step.error),
    }


def _block(block: Block) -> dict[str, object]:
    return {
        "index": block.index,
        "first_product": block.first,
        "common_exponent": block.common_exponent,
        "grid_exponent": block.grid_exponent,
        "addends": [
            {
                "factors": [_pattern(factor) for factor in addend.factors],
                "exact": _number(addend.exact),
                "exponent": addend.exponent,
                "kept": _number(addend.kept),
                "lost": _number(addend.lost),
            }
            for addend in block.addends
        ],
        "exact": _number(block.exact),
        "aligned": _number(block.aligned),
        "result": _pattern(block.result),
        "cut": _number(block.cut),
    }
