"""How a matrix unit adds, found from outside by sums whose result depends on one property at a time.

Every sum holds a term H. Terms written as a part of it are products of two powers of two (or 1.5 times one), so nothing
but the unit itself rounds. What a unit is asked: how far below H a term survives, alone and in company; which products
share that limit; how the result is rounded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, takewhile

import numpy as np
from numpy.typing import NDArray

from bf16forensics.floats.formats import FloatFormat
from bf16forensics.investigate.doctor.result import UnitFacts

#: c + sum a b of [n, K], [n, K] and [n] float32 to [n] float32, by whatever is to be probed.
Dot = Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]]
#: Products of every sum: several blocks of every unit known.
NUM_PRODUCTS = 64

#: Results of positive and of negative parts of a bit, to the name of the rounding that gives them.
_Roundings = Mapping[tuple[tuple[int, ...], tuple[int, ...]], str]

_TOWARD_ZERO, _IRREGULAR = "toward zero", "irregular"
#: What half and three quarters of the last bit kept become, by sign, after an even bit.
_OF_PARTS: _Roundings = {
    ((0, 0), (0, 0)): _TOWARD_ZERO,
    ((0, 1), (0, -1)): "to nearest even",
    ((1, 1), (-1, -1)): "to nearest away",
    ((0, 0), (-1, -1)): "downward",
    ((1, 1), (0, 0)): "upward",
}
#: The same for 1, 2, 3 and 6 quarters of the last bit.
_OF_QUARTERS: _Roundings = {
    ((0, 0, 0, 1), (0, 0, 0, -1)): _TOWARD_ZERO,
    ((0, 0, 1, 2), (0, 0, -1, -2)): "to nearest even",
    ((0, 1, 1, 2), (0, -1, -1, -2)): "to nearest away",
    ((0, 0, 0, 1), (-1, -1, -1, -2)): "downward",
    ((1, 1, 1, 2), (0, 0, 0, -1)): "upward",
}
_SIGNS = (1.0, -1.0)


@dataclass(frozen=True, slots=True)
class _Sum:
    """One sum to ask for: products by place, and C."""

    products: Mapping[int, float]
    c: float = 0.0


def measure(dot: Dot, fmt: FloatFormat) -> UnitFacts:
    """Finds out how a unit aligns, in which blocks, and how it rounds.

    Args:
        dot: the unit; asked for a few thousand sums of `NUM_PRODUCTS` products.
        fmt: format of the operands.
    """
    unit = _Asked(dot, fmt)
    bits = _alignment_bits(unit)
    block = None if bits is None else _block(unit, bits)
    output_bits = _output_bits(unit, bits, block)
    return UnitFacts(
        alignment_bits=bits,
        alignment_rounding=None if bits is None else _alignment_rounding(unit, bits),
        aligns_c=None if bits is None else _aligns_c(unit, bits),
        block=block,
        chains_in_order=None if bits is None or block is None else _chains_in_order(unit, bits, block),
        order_free=None if bits is None or block is None else _order_free(unit, bits, block),
        output_bits=output_bits,
        output_rounding=None if output_bits is None else _output_rounding(unit, output_bits, block),
    )


class _Asked:
    """A unit, asked in terms of H."""

    def __init__(self, dot: Dot, fmt: FloatFormat) -> None:
        self._dot, self._fmt = dot, fmt
        # Far enough up that terms below it are still products of normal numbers, and sums stay finite.
        exponent = min(2 * fmt.exponent_max, 20)
        self.large = 2.0**exponent
        #: Bits below H at which a product of normal numbers exists.
        self.depth = min(exponent - 2 * fmt.exponent_min, 60)

    def __call__(self, sums: Sequence[_Sum]) -> NDArray[np.float64]:
        """Results of sums whose terms are given in units of H, in units of H."""
        a = np.zeros((len(sums), NUM_PRODUCTS), dtype=np.float32)
        b = np.zeros_like(a)
        c = np.array([self.large * each.c for each in sums], dtype=np.float32)
        for row, each in enumerate(sums):
            for place, part in each.products.items():
                a[row, place], b[row, place] = self._factors(self.large * part)
        return self._dot(a, b, c).astype(np.float64) / self.large

    def _factors(self, product: float) -> tuple[float, float]:
        significand, exponent = np.frexp(product)
        # Shared evenly, so that both factors are normal numbers of the format.
        half = min(max((exponent - 1) // 2, self._fmt.exponent_min), self._fmt.exponent_max)
        return float(np.ldexp(2.0 * significand, half)), float(np.ldexp(1.0, exponent - 1 - half))


def _alignment_bits(unit: _Asked) -> int | None:
    """How many bits below two terms that cancel a third survives, of either sign; None: all that can be tried."""
    depths = range(1, unit.depth + 1)
    is_kept = [_is_kept(unit, [_Sum({0: 1.0, 1: -1.0, 2: sign * 2.0**-depth}) for sign in _SIGNS]) for depth in depths]
    bits = sum(1 for _ in takewhile(bool, is_kept))
    return None if bits == unit.depth else bits


def _is_kept(unit: _Asked, sums: Sequence[_Sum]) -> bool:
    """Whether every sum comes out exact."""
    exact = [sum(each.products.values()) + each.c for each in sums]
    return bool((unit(sums) == np.array(exact)).all())


def _alignment_rounding(unit: _Asked, bits: int) -> str:
    """What becomes of half and of three quarters of the last bit, in a product."""
    if any(_is_kept(unit, [_Sum({0: 1.0, 1: -1.0, 2: 2.0**-depth})]) for depth in range(bits + 1, unit.depth + 1)):
        return _IRREGULAR
    parts = (0.5, 0.75)
    sums = [_Sum({0: 1.0, 1: -1.0, 2: sign * part * 2.0**-bits}) for sign in _SIGNS for part in parts]
    return _named(unit(sums) * 2.0**bits, _OF_PARTS)


def _named(found: NDArray[np.float64], table: _Roundings) -> str:
    half = len(found) // 2
    if not (found == np.rint(found)).all():
        return _IRREGULAR
    plus, minus = (tuple(int(value) for value in part) for part in (found[:half], found[half:]))
    return table.get((plus, minus), _IRREGULAR)


def _aligns_c(unit: _Asked, bits: int) -> bool:
    """Whether products lose to a large C what they lose to a large product, and a small C to large products."""
    for depth in (bits, bits + 1):
        small = 2.0**-depth
        among_products = _Sum({0: 1.0, 1: -1.0, 2: small})
        found = unit([among_products, _Sum({0: -1.0, 1: small}, c=1.0), _Sum({0: 1.0, 1: -1.0}, c=small)])
        if not (found == found[0]).all():
            return False
    return True


def _lost(unit: _Asked, bits: int) -> float:
    """A term that does not survive beside H, whatever the rounding."""
    return 2.0 ** -min(bits + 3, unit.depth)


def _block(unit: _Asked, bits: int) -> int | None:
    """The first place whose product outlives a C that the first product cancels; None: no place does."""
    small = _lost(unit, bits)
    places = range(1, NUM_PRODUCTS)
    survives = unit([_Sum({0: -1.0, place: small}, c=1.0) for place in places]) == small
    return int(np.argmax(survives)) + 1 if survives.any() else None


def _chains_in_order(unit: _Asked, bits: int, block: int) -> bool:
    """Whether two terms that cancel in any block wipe out all before and beside them, and nothing after them."""
    small = _lost(unit, bits)
    sums, is_after = [], []
    for first in range(0, NUM_PRODUCTS - block, block):
        last = max(first + 1, first + block - 1)
        end = (last // block + 1) * block
        for place in range(NUM_PRODUCTS):
            if place not in (first, last):
                sums.append(_Sum({first: 1.0, last: -1.0, place: small}))
                is_after.append(place >= end)
    return bool(((unit(sums) == small) == np.array(is_after)).all())


def _order_free(unit: _Asked, bits: int, block: int) -> bool | None:
    """Whether the last bit kept survives wherever it stands in a block; None for blocks of one product."""
    places = list(permutations(range(block), 2))
    if not places:
        return None
    return _is_kept(unit, [_Sum({first: -1.0, second: 2.0**-bits}, c=1.0) for first, second in places])


def _output_bits(unit: _Asked, bits: int | None, block: int | None) -> int | None:
    """Fraction bits of a result; None where it keeps all that the alignment leaves."""
    depths = range(1, unit.depth + 1)
    is_kept = unit([_Sum({0: 1.0, 1: 2.0**-depth}) for depth in depths]) == np.array(
        [1.0 + 2.0**-depth for depth in depths]
    )
    reach = len(is_kept) if is_kept.all() else int(np.argmin(is_kept))
    if bits is None or reach < bits:
        return reach
    # The alignment ends here too. A carry moves the leading bit up, and the last one kept by the alignment with it.
    doublings = 0
    while 2 ** (doublings + 1) < (block or NUM_PRODUCTS):
        doublings += 1
        ones = dict.fromkeys(range(2**doublings), 1.0)
        if not _is_kept(unit, [_Sum({**ones, 2**doublings: 2.0**-bits})]):
            return bits + doublings - 1
    return None


def _output_rounding(unit: _Asked, output_bits: int, block: int | None) -> str | None:
    """What becomes of quarters of the last bit of 4 H, which the alignment to H has kept; None for short blocks."""
    if block is not None and 1 < block < 5:
        return None
    quarter = 2.0**-output_bits
    ones = dict.fromkeys(range(4), 1.0)
    sums = [
        _Sum({place: sign * part for place, part in {**ones, 4: quarters * quarter}.items()})
        for sign in _SIGNS
        for quarters in (1, 2, 3, 6)
    ]
    base = np.repeat([4.0, -4.0], 4)
    return _named((unit(sums) - base) / (4.0 * quarter), _OF_QUARTERS)
