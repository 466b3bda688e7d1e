"""A tensor core's fused dot-add, term by term: common exponent, alignment, what it cuts off, truncation. Plain Python.

The arithmetic is that of `matrix_unit`; this module shows what happens inside, with one block of products at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import FP32, format_named
from bf16forensics.floats.pattern import Pattern, leading_exponent, power_of_two
from bf16forensics.floats.scalar import encode

if TYPE_CHECKING:
    from bf16forensics.floats.matrix_unit import MatrixUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTerm:
    """One addend of a block: a product, or the accumulator."""

    #: Factors; one, the accumulator, in the first entry of a block.
    factors: tuple[Pattern, ...]
    #: The exact product.
    exact: Fraction
    #: Sum of the factors' exponents; None where the addend is zero, which takes no part in the common exponent.
    exponent: int | None
    #: What is left after alignment, a multiple of the grid, and what was cut off; exact = kept + lost.
    kept: Fraction
    lost: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fused dot-add."""

    #: 0-based position among the blocks of the chain, and of its first product among all.
    index: int
    first: int
    #: The accumulator first, then the products.
    addends: tuple[BlockTerm, ...]
    #: Largest exponent of the addends, but not below the unit's least one, and that of the last column kept.
    common_exponent: int
    grid_exponent: int
    #: Exact sum of the addends, and of what was kept of them.
    exact: Fraction
    aligned: Fraction
    #: The FP32 accumulator afterwards, and what the truncation to its format cut off: aligned - result; None where the
    #: result is not finite.
    result: Pattern
    cut: Fraction | None


def unit_named(name: str) -> "MatrixUnit":
    """Return the matrix unit that an accumulator's name stands for. Loads NumPy.

    Raises:
        InputError: no unit has this name.
    """
    from bf16forensics.floats.matrix_unit import SM80, SM90, SM90_FP8, SM100

    units = {unit.name: unit for unit in (SM80, SM90, SM100, SM90_FP8)}
    if name not in units:
        raise InputError(f"unknown matrix unit {name!r}; use one of {', '.join(units)}")
    return units[name]


def explain_blocks(
    products: Sequence[tuple[Pattern, Pattern]], start: Pattern, unit: "MatrixUnit"
) -> tuple[Block, ...]:
    """Explain a chain of fused dot-adds, in the order of the products.

    The factors are taken in the format that all of them have, or else in the first of `unit.operands` that holds them:
    that decides the exponent of a subnormal.

    Args:
        products: One or more pairs of finite values. The last block is filled up with zeros, which change nothing.
        start: The FP32 accumulator before the first block, finite.
        unit: The matrix unit.

    Raises:
        InputError: an infinity, a NaN, a factor that no format of the unit's operands holds, or an accumulator that
            overflows before the last block.
    """
    pairs = _in_operand_format(products, unit)
    if not start.is_finite:
        raise InputError(f"the accumulator starts at {start.number}; give a finite one, nothing else can be explained")
    blocks: list[Block] = []
    accumulator = start
    for first in range(0, len(pairs), unit.block):
        if not accumulator.is_finite:
            raise InputError(f"the accumulator overflows at product {first}; explain the products up to there")
        blocks.append(_block(pairs[first : first + unit.block], accumulator, unit, len(blocks), first))
        accumulator = blocks[-1].result
    return tuple(blocks)


def _in_operand_format(
    products: Sequence[tuple[Pattern, Pattern]], unit: "MatrixUnit"
) -> list[tuple[Pattern, Pattern]]:
    factors = [factor for pair in products for factor in pair]
    for position, factor in enumerate(factors):
        if not factor.is_finite:
            raise InputError(f"product {position // 2} has a factor {factor.number}; blocks take finite values only")
    shared = factors[0].fmt.name
    if shared in unit.operands and all(factor.fmt.name == shared for factor in factors):
        return list(products)
    for name in unit.operands:
        fmt = format_named(name)
        codes = [encode(factor.value or factor.number, fmt, overflow="nonfinite") for factor in factors]
        held = [Pattern(fmt=fmt, code=code) for code in codes]
        if all(found.value == factor.value for found, factor in zip(held, factors, strict=True)):
            return list(zip(held[::2], held[1::2], strict=True))
    known = " or ".join(unit.operands)
    raise InputError(f"{unit.name} multiplies {known} values, and neither format holds all of these; round them first")


def _block(
    pairs: Sequence[tuple[Pattern, Pattern]], start: Pattern, unit: "MatrixUnit", index: int, first: int
) -> Block:
    addends = [(start,), *pairs]
    exponents = [_exponent(factors) for factors in addends]
    common = max([unit.alignment_exponent_min, *(exponent for exponent in exponents if exponent is not None)])
    grid = common - unit.fraction_bits
    terms = []
    for factors, exponent in zip(addends, exponents, strict=True):
        exact = _product(factors)
        kept = _toward_zero(exact, grid)
        terms.append(BlockTerm(factors=tuple(factors), exact=exact, exponent=exponent, kept=kept, lost=exact - kept))
    aligned = sum((term.kept for term in terms), Fraction(0))
    result = Pattern(fmt=FP32, code=_truncate(aligned, unit.output_fraction_bits))
    reached = result.value
    return Block(
        index=index,
        first=first,
        addends=tuple(terms),
        common_exponent=common,
        grid_exponent=grid,
        exact=sum((term.exact for term in terms), Fraction(0)),
        aligned=aligned,
        result=result,
        cut=None if reached is None else aligned - reached,
    )


def _exponent(factors: Sequence[Pattern]) -> int | None:
    if any(factor.is_zero for factor in factors):
        return None
    return sum(factor.exponent for factor in factors)


def _product(factors: Sequence[Pattern]) -> Fraction:
    product = Fraction(1)
    for factor in factors:
        product *= factor.value or 0
    return product


def _toward_zero(value: Fraction, grid: int) -> Fraction:
    step = power_of_two(grid)
    return int(value / step) * step


def _truncate(value: Fraction, fraction_bits: int) -> int:
    if abs(value) >= power_of_two(FP32.exponent_max + 1):
        return FP32.infinity_code | (FP32.sign_mask if value < 0 else 0)
    if value:
        step = max(leading_exponent(abs(value)), FP32.exponent_min) - fraction_bits
        # A negative sum that truncates to zero becomes +0: a fraction has no negative zero.
        return encode(_toward_zero(value, step), FP32)
    return 0
