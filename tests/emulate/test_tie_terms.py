"""The torch twin of the tie terms against the original, element by element and bit by bit (T0)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.emulate.rounding import round_to
from bf16forensics.emulate.tie_terms import tensor_steps_at, tie_tensors
from bf16forensics.floats.formats import format_named
from bf16forensics.floats.ties import steps_at, tie_terms

NOISE = 3 * 2.0**-24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def same(first, second, message=""):
    """Equal bits, but for those inside a NaN."""
    assert first.dtype == second.numpy().dtype
    nan = np.isnan(first)
    assert (nan == np.isnan(second.numpy())).all(), message
    assert first[~nan].tobytes() == second.numpy()[~nan].tobytes(), message


def compare(main, grid, before, after, fmt, odd, device):
    """All arguments NumPy; rows share a divisor."""
    known = tie_terms(main, grid, before, after, fmt, odd, NOISE)
    given = (torch.from_numpy(part).to(device) for part in (main, grid, before, after))
    found = tie_tensors(*given, fmt, torch.from_numpy(odd).to(device), NOISE)
    for name in ("defined", "bits_dropped", "halfway"):
        same(getattr(known, name), getattr(found, name).cpu(), name)
    for name in ("residue", "error", "law"):
        # NaN in the original, 0 in the twin.
        same(np.where(known.defined, getattr(known, name), 0.0), getattr(found, name).cpu(), name)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sums_of_values_and_their_roundings(device, name):
    """What rows of a pass look like: sums of 2 to 64 values over a divisor, residues of every size, zeros."""
    rng = np.random.default_rng(5)
    fmt, rows, features = format_named(name), 600, 40
    counts = rng.integers(2, 65, (rows, 1))
    even = counts & -counts
    value = torch.from_numpy(rng.standard_normal((rows, features)))
    added = round_to(value, name).numpy() * rng.choice([0.0, 1.0, 1.0, 1.0], (rows, features))
    grid = np.where(added == 0, np.inf, 2.0 ** rng.integers(-40, 3, (rows, features)))
    main = added / even / (counts // even)
    residue = rng.standard_normal((rows, features)) * 2.0 ** rng.integers(-30, 2, (rows, features))
    before = (main + residue * rng.choice([0.0, 1.0], (rows, features))).astype(np.float32).astype(np.float64)
    after = round_to(torch.from_numpy(before), name).numpy()
    compare(main, grid, before, after, fmt, counts // even, device)


def test_what_is_not_defined(device):
    odd_ones = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.5, 1e300, 5e-324, 2.0**-133]
    main, before, after = (part.ravel() for part in np.meshgrid(odd_ones, odd_ones, odd_ones))
    for grid in (np.inf, 2.0**-8):
        with np.errstate(all="ignore"):
            compare(
                main, np.full_like(main, grid), before, after, format_named("bf16"), np.ones(len(main), int), device
            )


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(main=finite, before=finite, after=finite, exponent=st.integers(-200, 200), odd=st.sampled_from([1, 3, 5, 63]))
def test_any_numbers(main, before, after, exponent, odd):
    parts = (np.array([part]) for part in (main, 2.0**exponent, before, after))
    with np.errstate(all="ignore"):
        compare(*parts, format_named("bf16"), np.array([odd]), torch.device("cpu"))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_steps(device, name):
    rng = np.random.default_rng(6)
    values = np.concatenate([rng.standard_normal(500) * 2.0 ** rng.integers(-300, 300, 500), [0.0, np.inf, -np.inf]])
    fmt = format_named(name)
    same(steps_at(values, fmt), tensor_steps_at(torch.from_numpy(values).to(device), fmt).cpu())
