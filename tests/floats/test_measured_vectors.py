"""The measured vectors themselves: what they hold, and that a model which is wrong in one point fails them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import FP32, format_named
from bf16forensics.floats.matrix_unit import SM80, SM90, SM90_FP8, fused_dot_add

DATA = Path(__file__).parent / "data"
SINGLE = {
    "h200-bf16-mma.sync": SM90,
    "h200-bf16-wgmma": SM90,
    "h200-fp16-mma.sync": SM90,
    "h200-fp16-wgmma": SM90,
    "h200-e4m3-wgmma": SM90_FP8,
}
#: Instructions of eight products: Hopper's unit in blocks of eight.
SHORT = {"h200-bf16-m16n8k8": replace(SM90, block=8), "h200-fp16-m16n8k8": replace(SM90, block=8)}


def load(name):
    file = np.load(DATA / f"{name}.npz")
    a, b, c = (file[key].view(np.float32) for key in "abc")
    return a, b, c, file["d"], str(file["operands"]), file["kinds"][file["kind"]]


def num_differing(name, unit):
    a, b, c, d, operands, _ = load(name)
    for start in range(0, a.shape[1], unit.block):
        some = slice(start, start + unit.block)
        c = fused_dot_add(c, a[:, some], b[:, some], unit, operands=operands)
    return np.count_nonzero(c.view(np.uint32) != d)


@pytest.mark.parametrize("name", [*SINGLE, *SHORT])
def test_each_kind_of_problem_is_there(name):
    a, b, c, d, operands, kinds = load(name)
    counts = Counter(kinds.tolist())
    assert len(counts) == 13
    assert min(counts.values()) >= 40
    fmt = format_named(operands)
    for values in (a, b):
        finite = values[np.isfinite(values)]
        assert np.array_equal(round_to(finite, fmt, overflow="nonfinite"), finite)
        assert (np.abs(finite[finite != 0]) < fmt.min_normal).any()
    results = d.view(np.float32)
    assert np.isnan(results).any()
    assert (results == 0).any()
    assert np.signbit(c[c == 0]).any()
    if operands == "bf16":
        assert (np.abs(results[results != 0]) < FP32.min_normal).any()
    if operands != "e4m3":
        assert np.isinf(results).any()


def test_results_of_the_h200():
    """What was read off: every NaN is one code, and no zero is negative."""
    for path in DATA.glob("h200-*.npz"):
        d = np.load(path)["d"]
        assert set(d[(d & 0x7FFFFFFF) > 0x7F800000].tolist()) == {0x7FFFFFFF}, path.name
        assert not (d == 0x80000000).any(), path.name


def test_both_instructions_give_the_same_bits():
    for operands in ("bf16", "fp16"):
        for chain in ("", "-chain8"):
            first, second = (load(f"h200-{operands}-{name}{chain}") for name in ("mma.sync", "wgmma"))
            for mine, other in zip(first[:4], second[:4], strict=True):
                assert np.array_equal(mine.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("name", [*SINGLE, *SHORT])
def test_one_bit_more_or_less_fails(name):
    unit = {**SINGLE, **SHORT}[name]
    assert num_differing(name, unit) == 0
    for change in (-1, 1):
        assert num_differing(name, replace(unit, fraction_bits=unit.fraction_bits + change)) > 50
    assert num_differing(name, replace(unit, output_fraction_bits=unit.output_fraction_bits - 1)) > 100


@pytest.mark.parametrize("name", [name for name in SINGLE if "bf16" in name])
def test_the_end_of_the_grid_is_where_it_is(name):
    """Only BF16 reaches down there."""
    for exponent in (-131, -132, -134, -135):
        assert num_differing(name, replace(SM90, alignment_exponent_min=exponent)) > 0


def test_a_subnormal_that_counts_as_normalised_fails():
    """Subnormals of E4M3 are normal numbers in FP16."""
    assert num_differing("h200-e4m3-wgmma", replace(SM90_FP8, operands=("e4m3",))) == 0
    a, b, c, d, _, _ = load("h200-e4m3-wgmma")
    found = fused_dot_add(c, a, b, replace(SM90_FP8, operands=("fp16",)), operands="fp16")
    assert np.count_nonzero(found.view(np.uint32) != d) > 5


@pytest.mark.parametrize("name", SINGLE)
def test_other_blocks_fail(name):
    unit = SINGLE[name]
    assert num_differing(name, replace(unit, block=unit.block // 2)) > 50
    # Two instructions are not one of twice the length.
    assert num_differing(f"{name}-chain8", replace(unit, block=2 * unit.block)) > 10
    assert num_differing(f"{name}-chain8", unit) == 0


def test_the_unit_before_fails():
    assert num_differing("h200-bf16-mma.sync", SM80) > 100
    assert num_differing("h200-bf16-m16n8k8", SM80) > 50
