"""Models of the accumulators that a dot product can run through: which partial sums exist and how each is rounded.

- "exact": the exact sum, rounded once to FP32, to nearest.
- "fp32-sequential": products one by one, each rounded to FP32 (a product of BF16 or FP16 values is exact unless it
  leaves FP32's range) and added in FP32, to nearest. A multiplication fused with its addition would not round products.
- "fp32-pairwise": such products summed in a tree: neighbours (0 and 1, 2 and 3, ...), then neighbouring sums, and so
  on; a last one without a neighbour gets +0. The accumulator is added to the root.
- "sm80", "sm90", "sm100", "sm90-fp8": a matrix unit's blocks in the order of the products, see `matrix_unit`.

None says in which order a library visits the products, or whether it splits them over several accumulators.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError
from bf16forensics.floats.exact_sum import exact_sums
from bf16forensics.floats.factors import Factors, as_float32, broadcast_shape, common_format, factors_of
from bf16forensics.floats.formats import FP32
from bf16forensics.floats.matrix_unit import SM80, SM90, SM90_FP8, SM100, add_block

_UNITS = {unit.name: unit for unit in (SM80, SM90, SM100, SM90_FP8)}

#: Every model.
ACCUMULATORS = ("exact", "fp32-sequential", "fp32-pairwise", *_UNITS)

#: Results that are worked on at once, and products where they are all needed at once: what stays in a cache.
_RESULTS_AT_ONCE = 1 << 15
_PRODUCTS_AT_ONCE = 1 << 18


def block_of(model: str) -> int:
    """Return how many products a model adds between two states of its accumulator.

    Raises:
        InputError: unknown model, or "fp32-pairwise", which has no accumulator before the end.
    """
    _check_model(model)
    if model == "fp32-pairwise":
        raise InputError("fp32-pairwise adds in a tree and has no running sum; choose another accumulator")
    return _UNITS[model].block if model in _UNITS else 1


def dot_add(
    c: NDArray[Any], a: NDArray[Any], b: NDArray[Any], model: str, *, operands: str | None = None
) -> NDArray[np.float32]:
    """Return c + sum over k of a[..., k] * b[..., k], as a model's accumulator has it.

    Zeros fill the last block up, which changes nothing. Without products the result is `c`. NaN and infinities go
    through as in IEEE 754 arithmetic; a matrix unit's NaN is 0x7fffffff. `matrix_unit.fused_dot_add` and
    `exact_sum.exact_sums` say what the sign of a zero is.

    Args:
        c: Any shape [...], FP32 values in float32 or float64.
        a: Factors [..., K], float32 or float64. A matrix unit takes BF16 or FP16 values ("sm90-fp8": E4M3 or E5M2), the
            other models any FP32 values.
        b: Factors [..., K]; all shapes broadcast, without being copied out.
        model: One of `ACCUMULATORS`.
        operands: For matrix units, the format of the factors; None for the first that holds them all. It matters only
            for FP16 subnormals that are BF16 values too (or E5M2 values that are E4M3 subnormals).

    Returns:
        float32 [...].

    Raises:
        InputError: unknown model or format, another dtype, values outside the format, or shapes that do not fit.
    """
    accumulator, first, second = as_float32(c, "c"), as_float32(a, "a"), as_float32(b, "b")
    shape = broadcast_shape(accumulator.shape, first, second)
    return _dot_add(accumulator, np.moveaxis(first, -1, 0), np.moveaxis(second, -1, 0), model, operands, shape)


def matmul_add(
    c: NDArray[Any], a: NDArray[Any], b: NDArray[Any], model: str, *, operands: str | None = None
) -> NDArray[np.float32]:
    """Return c + a @ b, every element as a model's accumulator has it; see `dot_add`.

    Args:
        c: FP32 values of a shape that broadcasts to [..., R, E], float32 or float64.
        a: [..., R, K].
        b: [..., K, E].
        model: One of `ACCUMULATORS`.
        operands: As in `dot_add`.

    Returns:
        float32 [..., R, E].

    Raises:
        InputError: as in `dot_add`.
    """
    accumulator, first, second = as_float32(c, "c"), as_float32(a, "a"), as_float32(b, "b")
    if first.ndim < 2 or second.ndim < 2:
        raise InputError(f"shapes do not fit: a {a.shape}, b {b.shape}; a and b are matrices")
    rows = first[..., :, np.newaxis, :]
    columns = second.swapaxes(-1, -2)[..., np.newaxis, :, :]
    shape = broadcast_shape(accumulator.shape, rows, columns)
    return _dot_add(accumulator, np.moveaxis(rows, -1, 0), np.moveaxis(columns, -1, 0), model, operands, shape)


def running(
    c: NDArray[Any], a: NDArray[Any], b: NDArray[Any], model: str, *, operands: str | None = None
) -> NDArray[np.float32]:
    """Return the states of a model's accumulator, after each block of `block_of(model)` products; see `dot_add`.

    Returns:
        float32 [..., B]; the last block may be shorter. In "exact" every prefix is rounded once, by itself.

    Raises:
        InputError: as in `dot_add` and `block_of`.
    """
    block = block_of(model)
    accumulator, first, second = as_float32(c, "c"), as_float32(a, "a"), as_float32(b, "b")
    shape = broadcast_shape(accumulator.shape, first, second)
    inner = shape or (1,)
    sides = _taken_apart(np.moveaxis(first, -1, 0), np.moveaxis(second, -1, 0), model, operands, inner)
    num_blocks = -(-first.shape[-1] // block)
    states = np.empty((num_blocks, *inner), np.float32)
    start = np.broadcast_to(accumulator, inner)
    if model == "exact":
        states[:] = exact_sums(_terms(start, *sides), running=True)[1:]
    else:
        for index, state in enumerate(_states(start, *sides, model)):
            states[index] = state
    return np.moveaxis(states, 0, -1).reshape(*shape, num_blocks)


def _dot_add(
    c: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    model: str,
    operands: str | None,
    shape: tuple[int, ...],
) -> NDArray[np.float32]:
    _check_model(model)
    # Without an axis NumPy would compute with scalars, which cannot be written into.
    inner = shape or (1,)
    first, second = _taken_apart(a, b, model, operands, inner)
    num_products = len(first.values)
    result = np.empty(inner, np.float32)
    start = np.broadcast_to(c, inner)
    at_once = _RESULTS_AT_ONCE
    if model in ("exact", "fp32-pairwise"):
        at_once = min(at_once, _PRODUCTS_AT_ONCE // (num_products + 1))
    axis = int(np.argmax(inner))
    step = max(1, at_once * inner[axis] // max(1, result.size))
    before = (slice(None),) * axis
    for low in range(0, inner[axis], step):
        some = slice(low, low + step)
        terms = (slice(None), *before, some)
        result[*before, some] = _end(start[*before, some], first.part(terms), second.part(terms), model)
    return result.reshape(shape)


def _taken_apart(
    a: NDArray[np.float32], b: NDArray[np.float32], model: str, operands: str | None, shape: tuple[int, ...]
) -> tuple[Factors, Factors]:
    """Return both sides, products first and spread to the shape of the results."""
    if model in _UNITS:
        fmt = common_format(a, b, _UNITS[model].operands, operands)
    elif operands is None:
        fmt = FP32
    else:
        raise InputError(f"{model} takes factors of any format; leave out operands {operands!r}")
    first, second = (factors_of(np.ascontiguousarray(side), fmt).spread((len(side), *shape)) for side in (a, b))
    return first, second


def _end(c: NDArray[np.float32], a: Factors, b: Factors, model: str) -> NDArray[np.float32]:
    if not len(a.values):
        return c
    if model == "exact":
        return exact_sums(_terms(c, a, b))
    if model == "fp32-pairwise":
        return _add(c, _tree(_products(a.all_values, b.all_values)))
    state = c
    for following in _states(c, a, b, model):
        state = following
    return state


def _states(c: NDArray[np.float32], a: Factors, b: Factors, model: str) -> Iterator[NDArray[np.float32]]:
    state = c
    if model in _UNITS:
        unit = _UNITS[model]
        for start in range(0, len(a.values), unit.block):
            block = (slice(start, start + unit.block),)
            state = add_block(state, a.part(block), b.part(block), unit)
            yield state
    else:
        for x, y in zip(a.all_values, b.all_values, strict=True):
            state = _add(state, _products(x, y))
            yield state


def _terms(c: NDArray[np.float32], a: Factors, b: Factors) -> NDArray[np.float64]:
    """Return c and the products, which float64 holds exactly, along a new first axis."""
    terms = np.empty((len(a.values) + 1, *c.shape))
    with np.errstate(invalid="ignore"):
        terms[0] = c
        np.multiply(a.all_values, b.all_values, out=terms[1:])
    return terms


def _tree(x: NDArray[np.float32]) -> NDArray[np.float32]:
    while len(x) > 1:
        if len(x) % 2:
            x = np.concatenate([x, np.zeros_like(x[:1])])
        x = _add(x[0::2], x[1::2])
    return x[0]


def _add(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return x + y


def _products(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float32]:
    # float64 holds a product of FP32 values exactly, so this is the only rounding.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (x * y).astype(np.float32)


def _check_model(model: str) -> None:
    if model not in ACCUMULATORS:
        raise InputError(f"unknown accumulator {model!r}; use one of {', '.join(ACCUMULATORS)}")
