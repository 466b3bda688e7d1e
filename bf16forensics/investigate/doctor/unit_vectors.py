"""Dot products on which accumulation models part: ordinary ones, and those made to meet each of their rules."""

import numpy as np
from numpy.typing import NDArray

from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import FloatFormat
from bf16forensics.investigate.doctor.result import ModelMatch
from bf16forensics.investigate.doctor.unit import NUM_PRODUCTS, Dot

#: Dot products of each kind.
NUM_EACH = 256
_SEED = 90

F32 = NDArray[np.float32]


def unit_vectors(fmt: FloatFormat) -> tuple[F32, F32, F32]:
    """Builds the dot products, the same ones every time.

    Args:
        fmt: format of the factors.

    Returns:
        a and b [n, `NUM_PRODUCTS`] and c [n], float32; a and b hold values of the format, all finite. In half of them
        only the first 8 products are not zero.
    """
    generator = np.random.default_rng(_SEED)
    kinds = (_normal, _spread, _border, _carries, _large_c, _tiny, _zeros)
    parts = [_finished(kind(generator, fmt), fmt) for kind in kinds]
    a, b, c = (np.concatenate([part[index] for part in parts]) for index in range(3))
    return a, b, c


def compare(dot: Dot, models: dict[str, Dot], vectors: tuple[F32, F32, F32]) -> tuple[ModelMatch, ...]:
    """Counts the results of a unit that differ in their bits from those of each model, NaN equal to NaN.

    Args:
        dot: the unit.
        models: by name.
        vectors: a, b, c as of `unit_vectors`.
    """
    found = dot(*vectors)
    return tuple(ModelMatch(model=name, differing=_differing(found, model(*vectors))) for name, model in models.items())


def _differing(found: F32, expected: F32) -> int:
    is_same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    return int(np.count_nonzero(~is_same))


def _finished(parts: tuple[NDArray[np.float64], ...], fmt: FloatFormat) -> tuple[F32, F32, F32]:
    a, b = (round_to(part.astype(np.float64), fmt, overflow="saturate").astype(np.float32) for part in parts[:2])
    a[: NUM_EACH // 2, 8:] = 0.0
    return a, b, parts[2].astype(np.float32)


def _shape() -> tuple[int, int]:
    return NUM_EACH, NUM_PRODUCTS


def _powers(generator: np.random.Generator, low: int, high: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Numbers of random sign and significand whose exponents lie in [low, high]."""
    significand = generator.uniform(1.0, 2.0, shape) * generator.choice([-1.0, 1.0], shape)
    return np.ldexp(significand, generator.integers(low, high, shape, endpoint=True))


def _normal(generator: np.random.Generator, fmt: FloatFormat) -> tuple[NDArray[np.float64], ...]:
    return generator.normal(size=_shape()), generator.normal(size=_shape()), generator.normal(size=NUM_EACH)


def _spread(generator: np.random.Generator, fmt: FloatFormat) -> tuple[NDArray[np.float64], ...]:
    low, high = max(fmt.exponent_min, -20), min(fmt.exponent_max, 20)
    c = _powers(generator, 2 * low, 2 * high, (NUM_EACH,))
    return _powers(generator, low, high, _shape()), _powers(generator, low, high, _shape()), c


def _border(generator: np.random.Generator, fmt: FloatFormat) -> tuple[NDArray[np.float64], ...]:
    """Two large products that cancel, among products around the end of the alignment."""
    high = min(fmt.exponent_max, 10)
    low = max(fmt.exponent_min, high - 16)
    a, b = _powers(generator, low, low + 4, _shape()), _powers(generator, low, low + 3, _shape())
    rows = np.arange(NUM_EACH)
    first = generator.integers(0, 8, NUM_EACH)
    second = (first + generator.integers(1, 8, NUM_EACH)) % 8
    a[rows, first], b[rows, first] = 2.0**high, 2.0**high
    a[rows, second], b[rows, second] = -(2.0**high), 2.0**high
    return a, b, _powers(generator, 2 * low, 2 * low + 8, (NUM_EACH,))


def _carries(generator: np.random.Generator, fmt: FloatFormat) -> tuple[NDArray[np.float64], ...]:
    """Products of one sign with long significands, so that sums carry and lose bits at every step."""
    largest = 2.0 - 2.0**-fmt.fraction_bits
    a = largest * np.ldexp(1.0, generator.integers(-2, 2, _shape()))
    b = largest * np.ldexp(1.0, generator.integers(-2, 2, _shape()))
    sign = generator.choice([-1.0, 1.0], (NUM_EACH, 1))
    return sign * a, b, sign[:, 0] * _powers(generator, -4, 4, (NUM_EACH,))


def _large_c(generator: np.random.Generator, fmt: FloatFormat) -> tuple[NDArray[np.float64], ...]:
    c = _powers(generator, 2, 30, (NUM_EACH,))
    return generator.normal(size=_shape()), generator.normal(size=_shape()), c


def _tiny(generator: np.random.Generator, fmt: FloatFormat) -> tuple[NDArray[np.float64], ...]:
    """Factors at the lower end of the format, subnormal ones among them, against ordinary and equally small ones."""
    low = fmt.exponent_min - fmt.fraction_bits
    a = _powers(generator, low, fmt.exponent_min + 2, _shape())
    b = _powers(generator, -2, 2, _shape())
    return a, b, _powers(generator, max(low, -140), max(low, -140) + 10, (NUM_EACH,))


def _zeros(generator: np.random.Generator, fmt: FloatFormat) -> tuple[NDArray[np.float64], ...]:
    """Sums that vanish, and zeros of both signs."""
    values = generator.choice([0.0, -0.0, 1.0, -1.0], _shape())
    return values, generator.choice([-0.0, 0.0, 1.0], _shape()), generator.choice([0.0, -0.0, 1.0, -1.0], NUM_EACH)
