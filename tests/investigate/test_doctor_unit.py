"""The probe of a matrix unit, on units made of exact fractions whose every property is known."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bf16forensics.floats.accumulate import ACCUMULATORS
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FP16, FP32, FloatFormat
from bf16forensics.floats.scalar import round_to as round_exactly
from bf16forensics.investigate.doctor.result import NOTED, PASS, UnitFacts
from bf16forensics.investigate.doctor.unit import NUM_PRODUCTS, measure
from bf16forensics.investigate.doctor.unit_checks import facts_text, model_dot, probe_unit, unit_check
from bf16forensics.investigate.doctor.unit_vectors import compare, unit_vectors

#: Values are integers here, in units of 2**-SCALE.
SCALE = 600


def toward_zero(x: int, shift: int) -> int:
    return (abs(x) >> shift) * (-1 if x < 0 else 1)


def to_nearest_even(x: int, shift: int) -> int:
    whole, rest = x >> shift, x & ((1 << shift) - 1)
    return whole + (2 * rest + (whole & 1) > 1 << shift)


def to_nearest_away(x: int, shift: int) -> int:
    return toward_zero(2 * x + (1 << shift) * (-1 if x < 0 else 1), shift + 1)


#: x / 2**shift as an integer.
ROUNDINGS: dict[str, Callable[[int, int], int]] = {
    "toward zero": toward_zero,
    "to nearest even": to_nearest_even,
    "to nearest away": to_nearest_away,
    "downward": lambda x, shift: x >> shift,
    "upward": lambda x, shift: -(-x >> shift),
}


@dataclass(frozen=True)
class Unit:
    """A unit by its definition, in integers: align, add exactly, round; one sum at a time."""

    bits: int = 25
    block: int = 16
    output_bits: int = 23
    alignment: str = "toward zero"
    output: str = "toward zero"
    aligns_c: bool = True
    #: Least exponent that terms are aligned to.
    lowest: int = -133
    #: Operands: their subnormals have the exponent of the smallest normal number.
    fmt: FloatFormat = BF16

    def __call__(self, a: Any, b: Any, c: Any) -> Any:
        e = exponents(a, self.fmt) + exponents(b, self.fmt)
        # Products of 16-bit values are exact in FP64.
        products = a.astype(np.float64) * b.astype(np.float64)
        rows = zip(products.tolist(), e.tolist(), c.tolist(), strict=True)
        return np.array([self._chain(*row) for row in rows], dtype=np.float32)

    def _chain(self, products: list[float], e: list[int], c: float) -> float:
        total = scaled(c)
        for start in range(0, len(products), self.block):
            block = range(start, start + self.block)
            total = self._step(total, [(scaled(products[k]), e[k]) for k in block if products[k]])
        return math.ldexp(1.0, -SCALE) * total if abs(total) < 1 << 1000 else math.inf

    def _step(self, c: int, terms: list[tuple[int, int]]) -> int:
        extra = 0
        if c and self.aligns_c:
            terms = [*terms, (c, exponent(c))]
        elif c:
            extra = c
        if not terms:
            return self._rounded(extra)
        shift = SCALE + max(self.lowest, *(e for _, e in terms)) - self.bits
        total = sum(ROUNDINGS[self.alignment](value, shift) << shift for value, _ in terms) + extra
        return self._rounded(total)

    def _rounded(self, total: int) -> int:
        if not total:
            return total
        shift = SCALE + exponent(total) - self.output_bits
        return ROUNDINGS[self.output](total, shift) << shift


def scaled(value: float) -> int:
    return int(math.ldexp(value, SCALE))


def exponent(value: int) -> int:
    return max(abs(value).bit_length() - 1 - SCALE, FP32.exponent_min)


def exponents(values: Any, fmt: FloatFormat) -> Any:
    return np.maximum(np.frexp(values.astype(np.float64))[1] - 1, fmt.exponent_min)


def expected(unit: Unit) -> UnitFacts:
    return UnitFacts(
        alignment_bits=unit.bits,
        alignment_rounding=unit.alignment,
        aligns_c=True,
        block=unit.block,
        chains_in_order=True,
        order_free=True if unit.block > 1 else None,
        output_bits=unit.output_bits,
        output_rounding=None if 1 < unit.block < 5 else unit.output,
    )


KNOWN = {
    "sm80": Unit(bits=24, block=8, lowest=-132),
    "sm90": Unit(),
    "sm90-fp8": Unit(bits=13, block=32, output_bits=13),
}


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_a_known_unit_is_recognised(name: str, fmt: FloatFormat) -> None:
    probe = probe_unit(replace(KNOWN[name], fmt=fmt), fmt, where="cuda:0", instruction="mma.sync")
    assert probe.facts == expected(KNOWN[name])
    assert probe.models == {"sm80": ("sm80",), "sm90": ("sm90", "sm100")}[name]
    check = unit_check(probe)
    assert (check.status, check.where, check.name) == (PASS, "cuda:0", f"mma.sync, {fmt.name}")
    assert f"(0 of {probe.num_vectors:,} differ)" in check.observed


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", ["sm90-fp8", "sm90"])
def test_fp8_goes_through_its_own_unit_or_is_widened(name: str, fmt: FloatFormat) -> None:
    probe = probe_unit(model_dot(name), fmt, where="cuda:0", instruction="wgmma")
    assert probe.facts == expected(KNOWN[name])
    assert probe.models == (("sm90-fp8",) if name == "sm90-fp8" else ("sm90", "sm100"))


NEIGHBOURS = [
    replace(KNOWN["sm90"], bits=24),
    replace(KNOWN["sm90"], bits=26),
    replace(KNOWN["sm90"], block=8),
    replace(KNOWN["sm90"], block=32),
    replace(KNOWN["sm90"], output_bits=22),
    replace(KNOWN["sm90"], output="to nearest even"),
    replace(KNOWN["sm90"], alignment="to nearest even"),
    replace(KNOWN["sm90"], alignment="downward"),
    replace(KNOWN["sm80"], bits=23),
    replace(KNOWN["sm80"], block=4),
    replace(KNOWN["sm80"], output="upward"),
]


@pytest.mark.parametrize("unit", NEIGHBOURS, ids=lambda unit: facts_text(expected(unit)))
def test_a_unit_that_differs_in_one_property_has_no_model(unit: Unit) -> None:
    probe = probe_unit(unit, BF16, where="cuda:0", instruction="wgmma")
    assert probe.facts == expected(unit)
    assert probe.models == ()
    check = unit_check(probe)
    assert check.status == NOTED
    assert check.what_it_means == "No model matches this device: hardware-faithful traces are off."
    assert facts_text(probe.facts) in check.observed


@given(
    bits=st.integers(8, 40),
    block=st.sampled_from([4, 8, 16, 32]),
    output_bits=st.integers(8, 23),
    alignment=st.sampled_from(sorted(ROUNDINGS)),
    output=st.sampled_from(sorted(ROUNDINGS)),
    fmt=st.sampled_from([BF16, FP16]),
)
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
def test_every_property_is_measured(
    bits: int, block: int, output_bits: int, alignment: str, output: str, fmt: FloatFormat
) -> None:
    output_bits = min(output_bits, bits)
    unit = Unit(bits=bits, block=block, output_bits=output_bits, alignment=alignment, output=output, fmt=fmt)
    assert measure(unit, fmt) == expected(unit)


def test_an_accumulator_outside_the_alignment_is_seen() -> None:
    facts = measure(replace(KNOWN["sm90"], aligns_c=False), BF16)
    assert (facts.alignment_bits, facts.aligns_c) == (25, False)
    assert "C apart" in facts_text(facts)


def test_the_order_of_blocks_is_seen() -> None:
    def backwards(a: Any, b: Any, c: Any) -> Any:
        return KNOWN["sm90"](a[:, ::-1], b[:, ::-1], c)

    def interleaved(a: Any, b: Any, c: Any) -> Any:
        order = np.arange(NUM_PRODUCTS).reshape(16, 4).T.reshape(-1)
        return KNOWN["sm90"](a[:, order], b[:, order], c)

    for dot in (backwards, interleaved):
        probe = probe_unit(dot, BF16, where="cuda:0", instruction="mma.sync")
        assert probe.facts.chains_in_order is not True
        assert probe.models == ()


def sequential(a: Any, b: Any, c: Any) -> Any:
    total = c.copy()
    for k in range(a.shape[1]):
        total = total + a[:, k] * b[:, k]
    return total


def exact(a: Any, b: Any, c: Any) -> Any:
    found = []
    for x, y, start in zip(a, b, c, strict=True):
        (places,) = np.nonzero((x != 0) & (y != 0))
        terms = (Fraction(float(x[k])) * Fraction(float(y[k])) for k in places)
        found.append(round_exactly(sum(terms, Fraction(float(start))), FP32))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize("dot", [sequential, exact])
def test_what_is_no_matrix_unit_has_no_model(dot: Any) -> None:
    probe = probe_unit(dot, BF16, where="cuda:0", instruction="mma.sync")
    assert probe.models == ()
    assert probe.facts.alignment_bits is None
    assert (probe.facts.output_bits, probe.facts.output_rounding) == (23, "to nearest even")
    assert facts_text(probe.facts) == "terms keep all bits when aligned; result 23 bits to nearest even"


@pytest.mark.parametrize("model", [name for name in ACCUMULATORS if name.startswith("fp32") or name == "exact"])
def test_models_that_are_no_unit_are_not_taken_for_one(model: str) -> None:
    assert probe_unit(model_dot(model), BF16, where="cuda:0", instruction="mma.sync").models == ()


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_vectors_are_values_of_the_format_and_part_the_models(fmt: FloatFormat) -> None:
    a, b, c = unit_vectors(fmt)
    assert a.shape == b.shape == (len(c), NUM_PRODUCTS)
    assert {part.dtype for part in (a, b, c)} == {np.dtype(np.float32)}
    for part in (a, b):
        assert np.isfinite(part).all()
        assert (round_to(part, fmt) == part).all()
    again = unit_vectors(fmt)
    assert all((x.view(np.uint32) == y.view(np.uint32)).all() for x, y in zip((a, b, c), again, strict=True))
    names = ("sm80", "sm90", "sm90-fp8") if fmt.bits == 8 else ("sm80", "sm90")
    for name in names:
        others = {other: model_dot(other) for other in names if other != name}
        for match in compare(model_dot(name), others, (a, b, c)):
            assert match.differing > len(c) / 10


def test_bits_are_compared_and_nan_equals_nan() -> None:
    def giving(*values: float) -> Any:
        return lambda a, b, c: np.array(values, dtype=np.float32)

    nothing = (np.zeros((4, 1), np.float32),) * 2 + (np.zeros(4, np.float32),)
    models = {"same": giving(0.0, 1.0, -np.nan, np.inf), "zeros": giving(-0.0, 1.0, np.nan, np.inf)}
    models["two"] = giving(0.0, 1.0000001, 1.0, np.inf)
    found = compare(giving(0.0, 1.0, np.nan, np.inf), models, nothing)
    assert {match.model: match.differing for match in found} == {"same": 0, "zeros": 1, "two": 2}
