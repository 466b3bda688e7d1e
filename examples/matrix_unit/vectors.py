"""Dot products that show how a matrix unit aligns, adds and rounds: random, adversarial and special operands.

Shapes: n problems, K products each.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import FloatFormat

Floats = NDArray[np.float64]
Problems = tuple[Floats, Floats, Floats]
Maker = Callable[[np.random.Generator, FloatFormat, int, int], Problems]

#: Fraction bits at which units were seen to cut addends off.
CUTS = (13, 23, 24, 25)


def signs(rng: np.random.Generator, *shape: int) -> Floats:
    """+1 or -1, evenly."""
    return 1.0 - 2.0 * rng.integers(0, 2, shape)


def significands(rng: np.random.Generator, fmt: FloatFormat, *shape: int) -> Floats:
    """Significands of a format, 1 <= x < 2."""
    one = 1 << fmt.fraction_bits
    return rng.integers(one, 2 * one, shape) / one


def factors(rng: np.random.Generator, fmt: FloatFormat, exponents: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Two factors of which each has half of a product's exponent, within the format's normal range."""
    low, high = fmt.exponent_min, fmt.exponent_max
    first = np.clip(exponents // 2 + rng.integers(-3, 4, exponents.shape), low, high)
    second = np.clip(exponents - first, low, high)
    a = np.ldexp(significands(rng, fmt, *exponents.shape), first)
    b = np.ldexp(significands(rng, fmt, *exponents.shape), second)
    return np.minimum(a, fmt.max_finite) * signs(rng, *exponents.shape), np.minimum(b, fmt.max_finite)


def accumulator(rng: np.random.Generator, exponents: NDArray[np.int64]) -> Floats:
    """FP32 numbers of given exponents with full significands, either sign."""
    one = 1 << 23
    return np.ldexp(rng.integers(one, 2 * one, exponents.shape) / one, exponents) * signs(rng, *exponents.shape)


def normal(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Standard normal operands and addends, as in most validations."""
    return rng.standard_normal((n, k)), rng.standard_normal((n, k)), rng.standard_normal(n)


def spread(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Exponents of products and addend spread over +-40 around each other, or as far as the format goes."""
    reach = min(40, 2 * min(-fmt.exponent_min, fmt.exponent_max))
    a, b = factors(rng, fmt, rng.integers(-reach, reach + 1, (n, k)))
    return a, b, accumulator(rng, rng.integers(-reach, reach + 1, n))


def cancellation(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Two huge products that cancel, at any two places, over small ones."""
    a, b = factors(rng, fmt, rng.integers(-4, 5, (n, k)))
    huge = rng.integers(4, 2 * fmt.exponent_max - 2 if fmt.exponent_max < 40 else 40, n)
    x, y = factors(rng, fmt, huge)
    places = rng.permuted(np.tile(np.arange(k), (n, 1)), axis=1)[:, :2]
    rows = np.arange(n)
    for column, sign in ((0, 1.0), (1, -1.0)):
        a[rows, places[:, column]], b[rows, places[:, column]] = sign * x, y
    return a, b, accumulator(rng, rng.integers(-8, 9, n))


def cut(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """One large addend or product, and the others around the last bits that a unit keeps beside it."""
    below = rng.choice(CUTS, (n, 1)) + rng.integers(-2, 4, (n, k))
    top = np.full((n, 1), fmt.exponent_max if fmt.exponent_max < 40 else 6)
    lowest = 2 * fmt.exponent_min
    a, b = factors(rng, fmt, np.maximum(top - below, lowest))
    x, y = factors(rng, fmt, top[:, 0])
    c = accumulator(rng, top[:, 0] + rng.integers(-1, 2, n))
    in_product = rng.random(n) < 0.5
    place = rng.integers(0, k, n)
    rows = np.arange(n)
    a[rows, place] = np.where(in_product, x, a[rows, place])
    b[rows, place] = np.where(in_product, y, b[rows, place])
    small = accumulator(rng, top[:, 0] - rng.integers(20, 30, n))
    return a, b, np.where(in_product, small, c)


def sticky(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Powers of two alone, few and far apart, so that every rounding is near a tie or a sticky bit."""
    reach = min(30, 2 * min(-fmt.exponent_min, fmt.exponent_max))
    exponents = -rng.integers(0, reach + 1, (n, k))
    first = np.maximum(exponents // 2, fmt.exponent_min)
    a = np.ldexp(signs(rng, n, k), first) * (rng.random((n, k)) < 0.5)
    b = np.ldexp(1.0, np.maximum(exponents - first, fmt.exponent_min))
    last = np.ldexp(rng.integers(-3, 4, n).astype(np.float64), -23)
    return a, b, signs(rng, n) * (1.0 + last)


def carries(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Products and addend of one exponent and nearly full significands, mostly of one sign: carries of several bits."""
    one = 1 << fmt.fraction_bits
    a, b = (2.0 - rng.integers(1, 4, (n, k)) / one for _ in range(2))
    flipped = np.where(rng.random((n, k)) < rng.choice([0.0, 0.05, 0.5], (n, 1)), -1.0, 1.0)
    c = (2.0 - rng.integers(1, 9, n) * 2.0**-23) * 2.0 ** rng.integers(-1, 6, n)
    whole = signs(rng, n)
    return a * flipped * whole[:, None], b, c * whole


def addend_alone(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """An addend far above the products, or none at all."""
    a, b = factors(rng, fmt, rng.integers(-6, 7, (n, k)))
    a *= rng.random((n, k)) < 0.4
    return a, b, accumulator(rng, rng.integers(15, 35, n)) * (rng.random(n) < 0.6)


def subnormal(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Subnormal operands times large, middling and small ones; the addend of about the size of a product."""
    one = 1 << fmt.fraction_bits
    a = rng.integers(0, one, (n, k)) * fmt.min_subnormal * signs(rng, n, k)
    middle = rng.integers(fmt.exponent_min, fmt.exponent_max + 1, (n, 1))
    exponents = np.clip(middle + rng.integers(-4, 5, (n, k)), fmt.exponent_min, fmt.exponent_max)
    b = np.minimum(np.ldexp(significands(rng, fmt, n, k), exponents), fmt.max_finite)
    c = accumulator(rng, fmt.exponent_min + middle[:, 0] - rng.integers(0, 8, n))
    in_b = rng.random((n, k)) < 0.5
    return np.where(in_b, b, a), np.where(in_b, a, b), c * (rng.random(n) < 0.7)


def last_bit(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """A power of two and products that add up to exactly one step of the result, unless a unit cuts some of them off.

    The step is cut into pieces, each half of the one before; the smallest comes twice. In BF16 most of the sums lie at
    the lower end of FP32, where a unit's grid stops following the largest product.
    """
    highest, lowest = 2 * fmt.exponent_max, 2 * fmt.exponent_min
    step_bits = 13 if fmt.bits == 8 else 23
    pieces = rng.integers(1, min(7, k - 1), n) if k > 3 else np.ones(n, dtype=np.int64)
    whole_bits = rng.integers(1, fmt.fraction_bits + 2, n)
    top = rng.integers(max(-24, lowest + step_bits + 2), min(24, highest) + 1, n)
    if lowest < -140:
        top = np.where(rng.random(n) < 0.7, rng.integers(-141, -125, n), top)
    step = np.maximum(top - step_bits, -149)
    exponents = np.zeros((n, k), dtype=np.int64)
    scale = np.zeros((n, k))
    exponents[:, 0], scale[:, 0] = top, 1.0
    exponents[:, 1], scale[:, 1] = step, 1.0 - 2.0**-whole_bits
    for j in range(2, k):
        piece = j - 1
        exponents[:, j] = step - whole_bits - np.minimum(piece, pieces)
        scale[:, j] = piece <= pieces + 1
    first = np.clip(exponents // 2, fmt.exponent_min, fmt.exponent_max)
    a = np.ldexp(scale, first) * signs(rng, n, 1)
    b = np.ldexp(1.0, exponents - first)
    order = rng.permuted(np.tile(np.arange(k), (n, 1)), axis=1)
    a, b = (np.take_along_axis(x, order, axis=1) for x in (a, b))
    return a, b, np.zeros(n)


def tiny(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Sums around the smallest FP32 numbers: subnormal results, and products below every FP32 number."""
    middle = -rng.integers(118, 160, (n, 1))
    a, b = factors(rng, fmt, middle + rng.integers(-12, 13, (n, k)))
    codes = rng.integers(0, 1 << 24, n)
    c = codes.astype(np.uint32).view(np.float32).astype(np.float64) * signs(rng, n)
    return a * (rng.random((n, k)) < 0.5), b, c * (rng.random(n) < 0.6)


def zeros(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Zeros of both signs, and sums that cancel to nothing, with addends of zero of either sign."""
    a, b = (np.copysign(0.0, signs(rng, n, k)) for _ in range(2))
    b = np.where(rng.random((n, 1)) < 0.5, b, signs(rng, n, k))
    b = np.where(rng.random((n, 1)) < 0.3, np.abs(b), b)
    a = np.where(rng.random((n, 1)) < 0.3, -np.abs(a), a)
    x = significands(rng, fmt, n)
    cancels = rng.random(n) < 0.3
    a[:, 0], a[:, k // 2] = np.where(cancels, x, a[:, 0]), np.where(cancels, -x, a[:, k // 2])
    b[:, 0], b[:, k // 2] = np.where(cancels, 1.0, b[:, 0]), np.where(cancels, 1.0, b[:, k // 2])
    with_addend = rng.random(n) < 0.2
    a[with_addend, 1], b[with_addend, 1] = -x[with_addend], 1.0
    return a, b, np.where(with_addend, x, np.copysign(0.0, signs(rng, n)))


def nonfinite(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Infinities and NaN in operands and addends; infinity times zero, infinity minus infinity."""
    a, b, c = normal(rng, fmt, n, k)
    special = np.array([np.inf, -np.inf, np.nan] if fmt.has_infinity else [np.nan, np.nan, -np.nan])
    for values in (a, b):
        hit = rng.random((n, k)) < rng.choice([0.0, 1.0 / k], (n, 1))
        values[hit] = rng.choice(special, np.count_nonzero(hit))
        values[rng.random((n, k)) < rng.choice([0.0, 0.3], (n, 1))] = 0.0
    hit = rng.random(n) < 0.3
    c[hit] = rng.choice([np.inf, -np.inf, np.nan], np.count_nonzero(hit))
    return a, b, c


def overflow(rng: np.random.Generator, fmt: FloatFormat, n: int, k: int) -> Problems:
    """Products and addends at or beyond the largest FP32 number, some of which cancel."""
    top = 2 * fmt.exponent_max
    middle = np.minimum(rng.integers(122, 136, (n, 1)), top)
    a, b = factors(rng, fmt, middle - rng.integers(0, 4, (n, k)))
    a *= rng.random((n, k)) < rng.choice([0.1, 0.6], (n, 1))
    a = np.where(rng.random((n, 1)) < 0.3, np.abs(a), a)
    c = accumulator(rng, rng.integers(118, 128, n))
    largest = np.float64(np.finfo(np.float32).max)
    c = np.where(rng.random(n) < 0.2, largest * signs(rng, n), c)
    return a, b, c * (rng.random(n) < 0.7)


#: Maker and share of the problems.
CLASSES: tuple[tuple[Maker, float], ...] = (
    (normal, 0.1),
    (spread, 0.1),
    (cancellation, 0.1),
    (last_bit, 0.06),
    (cut, 0.14),
    (sticky, 0.1),
    (carries, 0.08),
    (addend_alone, 0.06),
    (subnormal, 0.06),
    (tiny, 0.06),
    (zeros, 0.05),
    (nonfinite, 0.05),
    (overflow, 0.04),
)


def problems(
    fmt: FloatFormat, n: int, k: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], list[str]]:
    """About n problems of k products each: a and b hold values of the format, c any FP32.

    Args:
        fmt: of the operands.
        n: problems wanted; a class never has fewer than 8.
        k: products of one problem, at least 2.
        seed: of the generator.

    Returns:
        a [n, k], b [n, k], c [n] and the class of each problem.
    """
    rng = np.random.default_rng(seed)
    parts, names = [], []
    for make, share in CLASSES:
        count = max(8, round(n * share))
        a, b, c = make(rng, fmt, count, k)
        with np.errstate(over="ignore", under="ignore"):
            parts.append((held(a, fmt), held(b, fmt), c.astype(np.float32)))
        names += [make.__name__] * count
    a, b, c = (np.concatenate(values) for values in zip(*parts, strict=True))
    return a, b, c, names


def held(values: Floats, fmt: FloatFormat) -> NDArray[np.float32]:
    """Values rounded to a format, in which infinities stay if it has any; FP32 holds every value of it."""
    return round_to(values, fmt, overflow="nonfinite").astype(np.float32)
