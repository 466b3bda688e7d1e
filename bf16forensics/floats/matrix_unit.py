"""The fused dot product and addition of a matrix unit (tensor core), bit for bit.

One step adds a block of exact products to an FP32 accumulator in one go:

1. Each product is exact and is not normalised: its exponent is the sum of its factors' exponents, its significand lies
   in [0, 4). Subnormals keep the exponent of their format's smallest normal number.
2. The largest exponent of the products that are not zero and of the accumulator, unless it is zero, sets a grid of
   `fraction_bits` bits below it.
3. Everything is truncated to the grid, toward zero and one by one; nothing remembers what was cut off.
4. The sum on the grid is exact, so the order within a block is irrelevant.
5. It is truncated toward zero to the output's fraction bits.

Reference: MMA-Sim (arXiv 2511.10909), simulator at commit c785138; MATLAB-tensor-core (arXiv 2512.07004), models at
commit b12b5a7. `docs/adr/0010-accumulation-models.md` lists what was measured and what is assumed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError
from bf16forensics.floats.factors import Factors, as_float32, broadcast_shape, common_format, factors_of
from bf16forensics.floats.formats import FP32, FP64

#: Bits of the NaN that a unit writes, whatever NaN went in.
CANONICAL_NAN_CODE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUnit:
    """What distinguishes one matrix unit from another."""

    #: Name as accumulation models write it ("sm90").
    name: str
    #: Products that are added at once.
    block: int
    #: Bits of the grid below the largest exponent.
    fraction_bits: int
    #: Fraction bits that the FP32 result keeps; the others are zero.
    output_fraction_bits: int
    #: Formats of the factors, in the order in which they are tried on values that several of them hold.
    operands: tuple[str, ...] = ("bf16", "fp16")
    #: The largest exponent counts as at least this one.
    alignment_exponent_min: int = -133
    #: Where the numbers come from.
    source: str


SM80 = MatrixUnit(
    name="sm80",
    block=8,
    fraction_bits=24,
    output_fraction_bits=23,
    alignment_exponent_min=-132,
    source="MMA-Sim c785138; A100 vectors of MATLAB-tensor-core b12b5a7",
)
SM90 = MatrixUnit(
    name="sm90",
    block=16,
    fraction_bits=25,
    output_fraction_bits=23,
    source="MMA-Sim c785138; H200 vectors of MATLAB-tensor-core b12b5a7 and of this project",
)
SM100 = MatrixUnit(
    name="sm100",
    block=16,
    fraction_bits=25,
    output_fraction_bits=23,
    source="MMA-Sim c785138; not measured by this project",
)
SM90_FP8 = MatrixUnit(
    name="sm90-fp8",
    block=32,
    fraction_bits=13,
    output_fraction_bits=13,
    operands=("e4m3", "e5m2"),
    source="MMA-Sim c785138; H200 vectors of this project",
)


def fused_dot_add(
    c: NDArray[Any], a: NDArray[Any], b: NDArray[Any], unit: MatrixUnit, *, operands: str | None = None
) -> NDArray[np.float32]:
    """Add one block of products to an accumulator, as one step of a matrix unit does.

    A result of zero is +0, whatever the signs of its terms, also where a negative sum truncates to zero. Results of
    2**128 or more are infinite. A NaN, zero times infinity and infinities of both signs give the NaN 0x7fffffff;
    otherwise an infinite product or accumulator gives itself.

    Args:
        c: Accumulator of any shape [...], FP32 values in float32 or float64.
        a: Factors [..., K], float32 or float64; K is at most `unit.block` and 0 still makes a step.
        b: Factors [..., K]; all shapes broadcast.
        unit: The matrix unit.
        operands: Format of the factors; None for the first of `unit.operands` that holds them all (see
            `factors.common_format`).

    Returns:
        float32 [...].

    Raises:
        InputError: another dtype, more products than a block, shapes that do not fit, or values outside the format.
    """
    accumulator, first, second = as_float32(c, "c"), as_float32(a, "a"), as_float32(b, "b")
    num_products = first.shape[-1] if first.ndim else 0
    if num_products > unit.block:
        raise InputError(f"{unit.name} adds {unit.block} products a step, got {num_products}; split them into blocks")
    fmt = common_format(first, second, unit.operands, operands)
    shape = broadcast_shape(accumulator.shape, first, second)
    # Without an axis NumPy would compute with scalars, which cannot be written into.
    inner = shape or (1,)
    a_factors, b_factors = (
        factors_of(np.moveaxis(x, -1, 0), fmt).spread((num_products, *inner)) for x in (first, second)
    )
    return add_block(np.broadcast_to(accumulator, inner), a_factors, b_factors, unit).reshape(shape)


def add_block(c: NDArray[np.float32], a: Factors, b: Factors, unit: MatrixUnit) -> NDArray[np.float32]:
    """Add at most one block of products to FP32 accumulators; see `fused_dot_add`.

    Args:
        c: float32 [...].
        a: [K, ...], K at most `unit.block`; what follows K has the shape of `c`.
        b: [K, ...].
        unit: The matrix unit.

    Returns:
        float32, shape of `c`.
    """
    start = factors_of(c, FP32)
    largest = np.maximum(start.exponents, np.int16(unit.alignment_exponent_min))
    exponent = np.empty_like(largest)
    for e_a, e_b in zip(a.exponents, b.exponents, strict=True):
        np.add(e_a, e_b, out=exponent)
        np.maximum(largest, exponent, out=largest)
    to_grid = _powers_of_two(unit.fraction_bits - largest)
    # A product of two factors, its multiple of the grid and the sum of a block are all exact in float64: a sum is below
    # 2**(fraction_bits + 2) times the number of terms, and products lie within 2**-270 and 2**258.
    total = np.trunc(start.values * to_grid)
    product = np.empty_like(total)
    for x, y in zip(a.values, b.values, strict=True):
        np.multiply(x, y, out=product)
        np.multiply(product, to_grid, out=product)
        np.trunc(product, out=product)
        np.add(total, product, out=total)
    result = _truncated(total * _powers_of_two(largest - unit.fraction_bits), unit.output_fraction_bits)
    if start.nonfinite is None and a.nonfinite is None and b.nonfinite is None:
        return result
    return _with_nonfinite(result, c, a, b)


def _powers_of_two(exponent: NDArray[np.int16]) -> NDArray[np.float64]:
    biased = exponent.astype(np.int64) + FP64.bias
    return (biased << FP64.fraction_bits).view(np.float64)


def _truncated(x: NDArray[np.float64], fraction_bits: int) -> NDArray[np.float32]:
    dropped = (1 << (FP64.fraction_bits - fraction_bits)) - 1
    kept = (x.view(np.int64) & np.int64(~dropped)).view(np.float64)
    is_small = np.abs(x) < FP32.min_normal
    if is_small.any():
        step = 2.0 ** (FP32.exponent_min - fraction_bits)
        kept = np.where(is_small, np.trunc(x / step) * step, kept)
    # Adding +0 leaves no zero negative.
    with np.errstate(over="ignore"):
        return kept.astype(np.float32) + np.float32(0.0)


def _with_nonfinite(result: NDArray[np.float32], c: NDArray[np.float32], a: Factors, b: Factors) -> NDArray[np.float32]:
    # Sums of finite products stay far below the end of float64, so only what is not finite makes this sum so.
    with np.errstate(invalid="ignore"):
        total = c.astype(np.float64)
        for x, y in zip(a.all_values, b.all_values, strict=True):
            total += x * y
    canonical_nan = np.uint32(CANONICAL_NAN_CODE)
    infinite = np.where(total > 0, np.float32(np.inf), np.float32(-np.inf)).view(np.uint32)
    nonfinite = np.where(np.isnan(total), canonical_nan, infinite)
    return np.where(np.isfinite(total), result.view(np.uint32), nonfinite).view(np.float32)
