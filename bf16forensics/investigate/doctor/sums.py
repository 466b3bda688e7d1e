"""The accumulation models that are nobody's matrix unit, against sums in exact integers."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from bf16forensics.floats.accumulate import dot_add
from bf16forensics.floats.formats import BF16, FP32
from bf16forensics.floats.scalar import round_to
from bf16forensics.investigate.doctor.result import FAIL, PASS, SUMS, Check
from bf16forensics.investigate.doctor.unit_vectors import unit_vectors

#: Every so many of the vectors that tell matrix units apart one is summed in integers.
_STRIDE = 29


def sum_checks() -> Iterator[Check]:
    """Sums of BF16 products: rounded once, one by one, in a tree."""
    a, b, c = (part[::_STRIDE] for part in unit_vectors(BF16))
    rows = [
        ([Fraction(float(x)) * Fraction(float(y)) for x, y in zip(xs, ys, strict=True)], Fraction(float(start)))
        for xs, ys, start in zip(a, b, c, strict=True)
    ]
    for model, add in _SPECIFIED.items():
        found = dot_add(c, a, b, model)
        expected = np.array([float(add(products, start)) for products, start in rows])
        # The sign of a zero is a convention of the model.
        num_differing = int(np.count_nonzero(found != expected))
        yield Check(
            group=SUMS,
            name=f"accumulation model {model}",
            where="cpu",
            status=FAIL if num_differing else PASS,
            observed=f"{num_differing:,} of {len(rows):,} sums differ",
            expected="0 sums differ from exact integers rounded as the model says",
            what_it_means=(
                "The model does not add as it says: do not use this accumulator, and report this line."
                if num_differing
                else "Traces with this accumulator add as documented."
            ),
        )


def _fp32(value: Fraction) -> Fraction:
    return Fraction(round_to(value, FP32))


def _exact(products: Sequence[Fraction], start: Fraction) -> Fraction:
    return _fp32(start + sum(products))


def _sequential(products: Sequence[Fraction], start: Fraction) -> Fraction:
    total = start
    for product in products:
        total = _fp32(total + _fp32(product))
    return total


def _pairwise(products: Sequence[Fraction], start: Fraction) -> Fraction:
    level = [_fp32(product) for product in products]
    while len(level) > 1:
        level += [Fraction(0)] * (len(level) % 2)
        level = [_fp32(left + right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return _fp32(start + level[0])


_SPECIFIED: dict[str, Callable[[Sequence[Fraction], Fraction], Fraction]] = {
    "exact": _exact,
    "fp32-sequential": _sequential,
    "fp32-pairwise": _pairwise,
}
