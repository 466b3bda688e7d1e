"""Random decisions of stochastic rounding for NumPy arrays: up with a probability equal to the distance."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError

#: A generator, or an unsigned array of random bits.
RandomSource = np.random.Generator | NDArray[np.unsignedinteger[Any]]

_DIGIT_BITS = 32


def goes_up(rest: NDArray[np.float64], random: RandomSource) -> NDArray[np.bool_]:
    """Decide for every element whether it goes up, with probability `rest`.

    Args:
        rest: Any shape, float64 in [0, 1): distance from the value below, in steps.
        random: A generator: the probability is exactly `rest`, because random digits are drawn, in row-major order,
            until they decide. Or random bits, an unsigned array of the shape of `rest`: an element r of k bits goes up
            exactly if r / 2**k < rest, as `scalar.encode` does with that fraction.

    Returns:
        Same shape.

    Raises:
        InputError: bits of another shape or dtype.
    """
    if isinstance(random, np.random.Generator):
        return goes_up_exactly(rest.reshape(-1), _digits(random), _DIGIT_BITS).reshape(rest.shape)
    if not np.issubdtype(random.dtype, np.unsignedinteger) or random.shape != rest.shape:
        raise InputError(
            f"random bits are an unsigned array of shape {rest.shape}, got {random.dtype.name} of shape {random.shape}"
        )
    # r < y and r < ceil(y) are the same for an integer r; the ceiling fits uint64 because rest <= 1 - 2**-53.
    threshold = np.ceil(np.ldexp(rest, 8 * random.dtype.itemsize)).astype(np.uint64)
    return np.asarray(random.astype(np.uint64) < threshold)


def goes_up_exactly(
    rest: NDArray[np.float64], draw: Callable[[int], NDArray[Any]], digit_bits: int
) -> NDArray[np.bool_]:
    """Compare every element with a random number in [0, 1) of which only as many digits are drawn as decide.

    Args:
        rest: One axis, float64 in [0, 1).
        draw: Takes a count and returns that many random integers in [0, 2**digit_bits).
        digit_bits: At most 52.

    Returns:
        Same shape: whether the random number is below the element.
    """
    gap = np.ldexp(rest, digit_bits) - draw(rest.size)
    is_up = gap > 0
    is_open = is_up & (gap < 1)
    if is_open.any():
        is_up[is_open] = goes_up_exactly(gap[is_open], draw, digit_bits)
    return is_up


def _digits(generator: np.random.Generator) -> Callable[[int], NDArray[Any]]:
    return lambda count: generator.integers(0, 1 << _DIGIT_BITS, size=count, dtype=np.uint32)
