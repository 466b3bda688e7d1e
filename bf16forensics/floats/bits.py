"""Everything that `bits` says about a conversion or a sum, from its operands. Plain Python but for matrix units."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError
from bf16forensics.floats.chain import MEANINGS, ChainStep, explain_chain
from bf16forensics.floats.explain import explain_conversion
from bf16forensics.floats.explained import Rounding
from bf16forensics.floats.formats import FP32, FloatFormat
from bf16forensics.floats.literal import Operand
from bf16forensics.floats.pattern import Pattern
from bf16forensics.floats.round_bits import explain_rounding

if TYPE_CHECKING:
    from bf16forensics.floats.blocks import Block
    from bf16forensics.floats.matrix_unit import MatrixUnit

#: Matrix units by name, without loading anything to know them.
UNITS = ("sm80", "sm90", "sm100", "sm90-fp8")
#: How a sum can be kept, the default first.
ACCUMULATORS = (*MEANINGS, *UNITS)
#: Other names of the same.
ALIASES = {"bf16-each-add": "each-add"}

#: Random bits that a seed gives to every rounding.
SEED_BITS = 32

_UNIT_MEANING = (
    "The products are added as by the matrix unit of {name}: in blocks of {block}, aligned to their largest exponent, "
    "cut off {fraction_bits} bits below it, added exactly and truncated toward zero to {output_fraction_bits} fraction "
    "bits of fp32; the end is rounded to {target}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """An explained conversion (one operand) or sum."""

    operands: tuple[Operand, ...]
    #: An entry of `ACCUMULATORS`; "" for a conversion.
    accumulator: str
    #: What the accumulator is and is not; "" for a conversion.
    meaning: str
    #: Format of numbers that are not given as bits, and of the running sum.
    source: FloatFormat
    target: FloatFormat
    #: Of roundings to the target; all others are to nearest, ties to even.
    mode: str
    #: One step a term, one in all for "exact"; empty for a matrix unit.
    steps: tuple[ChainStep, ...]
    #: Fused dot-adds of a matrix unit; empty otherwise.
    blocks: "tuple[Block, ...]"
    #: The last rounding to the target, and the exact sum of all operands (None from an infinity or NaN on).
    final: Rounding
    exact: Fraction | None
    #: The result - `exact`: all roundings together; None where either is not finite.
    error: Fraction | None
    #: The number as written, rounded once to the target, where its rounding to the source changed the result.
    from_text: Rounding | None
    #: Seed of the random numbers of "stochastic".
    seed: int | None
    #: Names of the operands, or of the products of a matrix unit; empty for letters.
    labels: tuple[str, ...] = ()


def check_accumulator(name: str) -> str:
    """Return the accumulator that a name stands for.

    Raises:
        InputError: no accumulator has this name.
    """
    found = ALIASES.get(name.lower(), name.lower())
    if found not in ACCUMULATORS:
        raise InputError(f"unknown accumulator {name!r}; use one of {', '.join(ACCUMULATORS)}")
    return found


def explain_bits(
    operands: Sequence[Operand],
    *,
    accumulator: str = "fp32-prefix",
    source: FloatFormat,
    target: FloatFormat,
    mode: str = "rne",
    overflow: str | None = None,
    seed: int | None = None,
    random: Fraction | None = None,
    labels: Sequence[str] = (),
) -> Bits:
    """Explain the conversion of one operand, or the sum of several.

    In "stochastic" a seed gives every rounding to the target, in order, the next 32 bits of Python's
    `random.Random(seed)`; `random` is the number of the last rounding. Without both that decision stays open.

    Args:
        operands: One or more.
        accumulator: A name that `check_accumulator` takes.
        source: Format of the running sum of "fp32-prefix".
        target: Format to round to.
        mode: "rne", "rz", "rna" or "stochastic".
        overflow: "nonfinite" or "saturate"; None for the target's own.
        seed: For "stochastic" only.
        random: For "stochastic" only, and not with a seed; in [0, 1).
        labels: Names of the operands in reports; letters without.

    Raises:
        InputError: no operands, names or random numbers that do not fit, or a sum that cannot be explained.
    """
    name = check_accumulator(accumulator)
    if not operands:
        raise InputError("nothing to explain: give one value to convert, or two or more to add")
    if mode != "stochastic" and (seed is not None or random is not None):
        raise InputError(f"random numbers go with mode stochastic, not with {mode}; give --mode stochastic")
    if seed is not None and random is not None:
        raise InputError("a seed and a random number exclude each other; give one")
    terms = [operand.pattern for operand in operands]
    is_conversion = len(terms) == 1
    # A conversion is the same whatever would keep a sum.
    name = "exact" if is_conversion else name
    num_roundings = 1 if name == "exact" or name in UNITS else len(terms)
    randoms = _randoms(num_roundings, seed, random)
    steps: tuple[ChainStep, ...] = ()
    blocks: tuple[Block, ...] = ()
    if name in UNITS:
        from bf16forensics.floats.blocks import explain_blocks, unit_named

        unit = unit_named(name)
        one = [_one(term) for term in terms]
        blocks = explain_blocks(list(zip(terms, one, strict=True)), Pattern(fmt=FP32, code=0), unit)
        final = explain_conversion(blocks[-1].result, target, mode, overflow=overflow, random=randoms[-1])
        meaning = f"Each term is a product with 1. {_unit_meaning(unit, target)}"
    else:
        steps = explain_chain(terms, name, source=source, target=target, mode=mode, overflow=overflow, randoms=randoms)
        final = steps[-1].event.to_target
        meaning = "" if is_conversion else MEANINGS[name].format(source=source.name, target=target.name)
    values = [term.value for term in terms]
    exact = sum((value for value in values if value is not None), Fraction(0)) if None not in values else None
    reached = None if final.result is None else final.result.value
    return Bits(
        operands=tuple(operands),
        accumulator="" if is_conversion else name,
        meaning=meaning,
        source=source,
        target=target,
        mode=mode,
        steps=steps,
        blocks=blocks,
        final=final,
        exact=exact,
        error=None if exact is None or reached is None else reached - exact,
        from_text=_from_text(operands[0], final, mode, overflow, random) if is_conversion else None,
        seed=seed,
        labels=tuple(labels),
    )


def explain_unit(
    products: Sequence[tuple[Pattern, Pattern]],
    start: Pattern,
    name: str,
    *,
    target: FloatFormat = FP32,
    mode: str = "rne",
    overflow: str | None = None,
    labels: Sequence[str] = (),
) -> Bits:
    """Explain products that a matrix unit adds to an accumulator, and the rounding of the end to a format.

    Args:
        products: One or more pairs of factors; see `blocks.explain_blocks`.
        start: The FP32 accumulator before them.
        name: A name that `blocks.unit_named` takes.
        target: Format to round the accumulator to.
        mode: "rne", "rz" or "rna".
        overflow: "nonfinite" or "saturate"; None for the target's own.
        labels: Names of the products in reports; letters without.

    Raises:
        InputError: no products, an unknown unit, or what `blocks.explain_blocks` refuses.
    """
    from bf16forensics.floats.blocks import explain_blocks, unit_named

    unit = unit_named(name)
    blocks = explain_blocks(products, start, unit)
    final = explain_conversion(blocks[-1].result, target, mode, overflow=overflow)
    exact = start.value or Fraction(0)
    for first, second in products:
        exact += (first.value or 0) * (second.value or 0)
    reached = None if final.result is None else final.result.value
    return Bits(
        operands=(),
        accumulator=name,
        meaning=_unit_meaning(unit, target),
        source=FP32,
        target=target,
        mode=mode,
        steps=(),
        blocks=blocks,
        final=final,
        exact=exact,
        error=None if reached is None else reached - exact,
        from_text=None,
        seed=None,
        labels=tuple(labels),
    )


def _unit_meaning(unit: "MatrixUnit", target: FloatFormat) -> str:
    return _UNIT_MEANING.format(
        name=unit.name,
        block=unit.block,
        fraction_bits=unit.fraction_bits,
        output_fraction_bits=unit.output_fraction_bits,
        target=target.name,
    )


def _randoms(count: int, seed: int | None, random: Fraction | None) -> list[Fraction | None]:
    if seed is None:
        return [*[None] * (count - 1), random]
    # Loading it costs more than everything else here, and few ask for it.
    from random import Random

    source = Random(seed)
    return [Fraction(source.getrandbits(SEED_BITS), 1 << SEED_BITS) for _ in range(count)]


def _one(term: Pattern) -> Pattern:
    return Pattern(fmt=term.fmt, code=term.fmt.bias << term.fmt.fraction_bits)


def _from_text(
    operand: Operand, final: Rounding, mode: str, overflow: str | None, random: Fraction | None
) -> Rounding | None:
    if not operand.is_rounded or operand.written is None or final.result is None or mode == "stochastic":
        return None
    once = explain_rounding(operand.written, final.fmt, mode, overflow=overflow, random=random)
    return once if once.result != final.result else None
