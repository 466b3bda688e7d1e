"""examples/matrix_unit/vectors.py: operands that are values of their format, and sums that are what they say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import FP32, format_named

PATH = Path(__file__).resolve().parents[2] / "examples" / "matrix_unit" / "vectors.py"


@pytest.fixture(scope="module")
def vectors() -> ModuleType:
    specification = importlib.util.spec_from_file_location("matrix_unit_vectors", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("k", [2, 3, 8, 16, 64])
@pytest.mark.parametrize("operands", ["bf16", "fp16", "e4m3"])
def test_operands_are_values_of_the_format(vectors: ModuleType, operands: str, k: int) -> None:
    fmt = format_named(operands)
    a, b, c, names = vectors.problems(fmt, 300, k, seed=k)
    assert (a.shape, b.shape, c.shape, len(names)) == ((len(c), k), (len(c), k), (len(names),), len(c))
    for values in (a, b):
        held = round_to(values, fmt, overflow="nonfinite")
        assert np.array_equal(values, held, equal_nan=True)
    kinds, counts = np.unique(names, return_counts=True)
    assert len(kinds) == 13
    assert counts.min() >= 8
    again = vectors.problems(fmt, 300, k, seed=k)
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip((a, b, c), again[:3], strict=True))


def test_every_kind_does_what_it_says(vectors: ModuleType) -> None:
    a, b, c, names = vectors.problems(format_named("bf16"), 2000, 16, seed=3)
    with np.errstate(invalid="ignore"):
        products = a.astype(np.float64) * b.astype(np.float64)
        exact = products.sum(1) + c
    of = {name: np.array(names) == name for name in set(names)}
    # A float64 sum of these is exact: few bits, close together.
    top, total = (np.abs(x[of["last_bit"]]) for x in (np.abs(products).max(1), exact))
    step = np.maximum(np.spacing(top.astype(np.float32)), FP32.min_subnormal)
    ulps = (total - top) / step
    assert set(ulps.tolist()) == {1.0}
    assert (np.abs(products).max(1) > 2**4 * np.abs(exact))[of["cancellation"]].mean() > 0.3
    assert (exact == 0)[of["zeros"]].all()
    assert (products == 0)[of["zeros"]].mean() > 0.9
    tiny = np.abs(exact[of["tiny"]])
    assert (tiny[tiny > 0] < FP32.min_normal).mean() > 0.2
    with np.errstate(over="ignore"):
        assert not np.isfinite(exact.astype(np.float32))[of["overflow"]].all()
        assert np.isfinite(exact.astype(np.float32))[of["overflow"]].any()
    assert not np.isfinite(exact)[of["nonfinite"]].all()
    some = a[of["subnormal"]]
    assert ((np.abs(some) < format_named("bf16").min_normal) & (some != 0)).mean() > 0.3
