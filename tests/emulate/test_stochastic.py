"""Stochastic rounding of tensors against the exact specification, the NumPy twin and the expectation itself."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.emulate.rounding import round_to, ulp_of
from bf16forensics.emulate.stochastic import goes_up_exactly, round_stochastic, round_with_bits
from bf16forensics.errors import InputError
from bf16forensics.floats import arrays, scalar
from bf16forensics.floats.formats import format_named

NAMES = pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])

ALL_16_BITS = torch.arange(1 << 16)


@pytest.fixture
def flushing():
    """Flush subnormals on this thread, as a training script may."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def seeded(seed=1):
    return torch.Generator().manual_seed(seed)


def from_bits(codes):
    return torch.from_numpy(np.asarray(codes, dtype=np.uint32).view(np.float32))


def bits(t):
    return t.view({torch.float32: torch.int32, torch.float64: torch.int64}[t.dtype])


def same_bits(found, expected):
    assert found.dtype == expected.dtype
    same = (bits(found) == bits(expected)) | (found.isnan() & expected.isnan())
    assert same.all()


def values_with_distances_of_16_bits(fmt):
    """Values between neighbours of the subnormals, of an ordinary and of the largest binade, that FP32 holds."""
    one = 1 << fmt.fraction_bits
    for step_exponent, steps in (
        (fmt.step_exponent_min, (0, 1, one - 1, one)),
        (-fmt.fraction_bits, (one, 2 * one - 1)),
        (fmt.exponent_max - fmt.fraction_bits, (one, 2 * one - 3)),
    ):
        for num_steps in steps:
            # FP32 leaves this many of 16 bits below the last bit of a significand.
            num_bits = min(16, 23 - fmt.fraction_bits)
            for share in (0, 1, (1 << num_bits) // 3, (1 << num_bits) - 1):
                yield math.ldexp(num_steps + share / (1 << num_bits), step_exponent)


@NAMES
@DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_over_all_random_integers_the_expectation_is_the_value(name, dtype, sign):
    """T0: all 2**16 integers of 16 bits. The sums are exact in FP64: both neighbours are multiples of one step."""
    num_between = 0
    for value in values_with_distances_of_16_bits(format_named(name)):
        x = torch.tensor(sign * value, dtype=dtype)
        assert x.item() == sign * value
        found = round_with_bits(x.expand(1 << 16), name, ALL_16_BITS, 16)
        assert found.dtype == dtype
        assert found.double().sum().item() == sign * value * 2**16
        num_between += len(found.unique()) == 2
    assert num_between == 8 * 3


@given(
    value=st.floats(width=32) | st.floats(-500, 500, width=32),
    name=st.sampled_from(["bf16", "fp16", "e4m3", "e5m2"]),
    num_bits=st.sampled_from([1, 8, 15, 16, 17, 31, 32, 53]),
    overflow=st.sampled_from(["nonfinite", "saturate", None]),
    data=st.data(),
)
def test_all_three_agree_on_any_float32(value, name, num_bits, overflow, data):
    fmt = format_named(name)
    r = data.draw(st.integers(0, 2**num_bits - 1))
    random = scalar.fraction_from_bits(r, num_bits)
    expected = torch.tensor([scalar.round_to(value, fmt, "stochastic", random=random, overflow=overflow)]).float()
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([value], dtype=dtype)
        found = round_with_bits(x, name, torch.tensor([r]), num_bits, overflow=overflow)
        same_bits(found, expected.to(dtype))
    if num_bits in (8, 16, 32):
        numpy_bits = np.array([r], dtype=f"uint{num_bits}")
        twin = arrays.round_to(np.float32([value]), fmt, "stochastic", random=numpy_bits, overflow=overflow)
        same_bits(torch.from_numpy(twin), expected)


@given(
    value=st.floats(width=64) | st.floats(-500, 500),
    name=st.sampled_from(["bf16", "fp16", "e4m3", "e5m2", "fp32"]),
    r=st.integers(0, 2**53 - 1),
)
def test_float64_agrees_with_the_specification(value, name, r):
    fmt = format_named(name)
    for overflow in ("nonfinite", "saturate"):
        random = scalar.fraction_from_bits(r, 53)
        expected = scalar.round_to(value, fmt, "stochastic", random=random, overflow=overflow)
        x = torch.tensor([value], dtype=torch.float64)
        same_bits(
            round_with_bits(x, name, torch.tensor([r]), 53, overflow=overflow),
            torch.tensor([expected], dtype=torch.float64),
        )


@NAMES
@pytest.mark.parametrize("r", [0, 1, 2**15, 2**16 - 1])
def test_every_bf16_value_agrees_with_the_numpy_twin(name, r):
    """Every exponent and sign, with lower bits that put FP32 between two BF16 values; and every BF16 NaN."""
    codes = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 0x0001, 0x7FFF, 0x8000, 0xFFFF):
        x = (codes | np.uint32(lower)).view(np.float32)
        random = np.full(x.shape, r, dtype=np.uint16)
        for overflow in ("nonfinite", "saturate"):
            twin = arrays.round_to(x, format_named(name), "stochastic", random=random, overflow=overflow)
            found = round_with_bits(torch.from_numpy(x), name, torch.full(x.shape, r), 16, overflow=overflow)
            same_bits(found, torch.from_numpy(twin))


@NAMES
@DTYPES
def test_held_values_never_move(name, dtype):
    codes = np.arange(1 << 16, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore"):
        x = round_to(from_bits(codes).to(dtype), name, overflow="nonfinite")
    same_bits(round_stochastic(x, name, seeded(), overflow="nonfinite"), x)
    for r in (0, (1 << 53) - 1):
        same_bits(round_with_bits(x, name, torch.full(x.shape, r), 53, overflow="nonfinite"), x)


@NAMES
@DTYPES
def test_results_are_neighbours_and_unbiased(name, dtype):
    """T3: the mean error of 40,000 values is within five standard errors of zero; that of truncation is hundreds."""
    x = torch.rand(40_000, generator=seeded(3), dtype=torch.float64).add(1).to(dtype)
    found = round_stochastic(x, name, seeded(4))
    same_bits(round_to(found, name), found)
    error = (found - x).double()
    assert (error.abs() < ulp_of(x, name)).all()
    standard_error = float(error.std()) / 200
    assert abs(float(error.mean())) < 5 * standard_error
    assert float(ulp_of(x, name).double().mean()) / 2 > 100 * standard_error


@NAMES
def test_the_same_state_gives_the_same_rounding(name):
    x = torch.randn(37, 41, generator=seeded(5))
    first = round_stochastic(x, name, seeded(6))
    same_bits(round_stochastic(x, name, seeded(6)), first)
    # The same draws decide the same, whatever the dtype and the strides.
    same_bits(round_stochastic(x.double(), name, seeded(6)).float(), first)
    same_bits(round_stochastic(x.t().contiguous().t(), name, seeded(6)), first)
    assert (round_stochastic(x, name, seeded(7)) != first).any()
    generator = seeded(6)
    round_stochastic(x, name, generator)
    assert (round_stochastic(x, name, generator) != first).any()


@NAMES
def test_every_element_takes_one_draw(name):
    """Rounding a tensor in one piece or in two consumes the generator alike."""
    x = torch.randn(1000, generator=seeded(8))
    whole, halves = seeded(9), seeded(9)
    expected = round_stochastic(x, name, whole)
    same_bits(torch.cat([round_stochastic(part, name, halves) for part in (x[:300], x[300:])]), expected)
    assert torch.equal(whole.get_state(), halves.get_state())


@DTYPES
def test_strides_do_not_matter(dtype):
    t = torch.randn(6, 9, 10, generator=seeded(10), dtype=dtype)
    for name in ("bf16", "e4m3"):
        for view in (t.transpose(0, 2), t[:, ::2, 1:], t[:, :1].expand(6, 4, 10)):
            expected = round_stochastic(view.contiguous(), name, seeded(11))
            same_bits(round_stochastic(view, name, seeded(11)).contiguous(), expected)


def test_digits_are_drawn_until_they_decide():
    """All 2**6 sequences of six binary digits: n of them are below n/64."""
    for numerator in range(64):
        ups = 0
        for digits in product((0, 1), repeat=6):
            supply = iter(digits)
            rest = torch.tensor([numerator / 64], dtype=torch.float64)
            ups += int(goes_up_exactly(rest, lambda shape, supply=supply: torch.tensor([next(supply)]), 1))
        assert ups == numerator


def test_later_digits_are_drawn_for_the_undecided_alone():
    # 2**-40 is a 2**-9th part of the first digit's unit, and 2**22 units of the second.
    digits = iter([torch.tensor([[0, 1], [0, 0]]), torch.tensor([2**22 - 1, 2**22, 2**22 + 1])])
    rest = torch.full((2, 2), 2.0**-40, dtype=torch.float64)
    assert goes_up_exactly(rest, lambda shape: next(digits), 31).tolist() == [[True, False], [False, False]]
    assert next(digits, None) is None


def test_between_the_largest_value_and_the_next_step():
    """456 is a quarter of a step above 448, the largest E4M3 value."""
    x = torch.full((1 << 16,), -456.0)
    found = round_with_bits(x, "e4m3", ALL_16_BITS, 16, overflow="nonfinite")
    assert int(found.isnan().sum()) == 1 << 14
    assert set(found[~found.isnan()].tolist()) == {-448.0}
    assert set(round_with_bits(x, "e4m3", ALL_16_BITS, 16).tolist()) == {-448.0}
    x = from_bits([0x7F7F4000]).expand(1 << 16)
    found = round_with_bits(x, "bf16", ALL_16_BITS, 16)
    assert int(found.isinf().sum()) == 1 << 14
    assert round_with_bits(x, "bf16", ALL_16_BITS, 16, overflow="saturate").isfinite().all()


@DTYPES
def test_specials(dtype):
    nan, inf = math.nan, math.inf
    x = torch.tensor([0.0, -0.0, nan, inf, -inf, 1e6, -1e6], dtype=dtype)
    expected = {
        ("bf16", None): [0.0, -0.0, nan, inf, -inf],
        ("fp16", None): [0.0, -0.0, nan, inf, -inf, inf, -inf],
        ("fp16", "saturate"): [0.0, -0.0, nan, 65504.0, -65504.0, 65504.0, -65504.0],
        ("e5m2", None): [0.0, -0.0, nan, 57344.0, -57344.0, 57344.0, -57344.0],
        ("e5m2", "nonfinite"): [0.0, -0.0, nan, inf, -inf, inf, -inf],
        ("e4m3", None): [0.0, -0.0, nan, 448.0, -448.0, 448.0, -448.0],
        ("e4m3", "nonfinite"): [0.0, -0.0, nan, nan, nan, nan, nan],
    }
    for (name, overflow), values in expected.items():
        found = round_stochastic(x[: len(values)], name, seeded(), overflow=overflow)
        same_bits(found, torch.tensor(values, dtype=dtype))


@NAMES
@DTYPES
@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (2, 3)])
def test_shapes_dtypes_and_inputs_are_kept(name, dtype, shape):
    x = torch.full(shape, 1.001, dtype=dtype, requires_grad=True)
    before = x.detach().clone()
    found = round_stochastic(x, name, seeded())
    assert (found.shape, found.dtype, found.requires_grad) == (torch.Size(shape), dtype, False)
    given_bits = torch.zeros(shape, dtype=torch.int64)
    assert round_with_bits(x, name, given_bits, 16).shape == torch.Size(shape)
    assert (given_bits == 0).all()
    same_bits(x.detach(), before)


def test_a_format_that_holds_everything_draws_nothing():
    x, generator = torch.tensor([1.001, math.inf]), seeded()
    before = generator.get_state()
    assert round_stochastic(x, "fp32", generator) is x
    assert round_stochastic(x, "fp32", generator, overflow="saturate").isfinite().all()
    assert torch.equal(generator.get_state(), before)


def test_bf16_does_not_depend_on_flushing(flushing):
    """Subnormal FP32 elements, a quarter of a BF16 step above a BF16 value: that many go up, and none is lost."""
    x = from_bits([0x00014000]).expand(1 << 16)
    codes = bits(round_with_bits(x, "bf16", ALL_16_BITS, 16))
    assert int((codes == 0x00020000).sum()) == 1 << 14
    assert int((codes == 0x00010000).sum()) == 3 << 14
    held = from_bits([0x00010000, 0x80010000, 0x807F0000])
    assert (bits(round_stochastic(held, "bf16", seeded())) == bits(held)).all()


@pytest.mark.parametrize("name", ["fp16", "e4m3", "e5m2"])
def test_subnormals_of_narrow_formats_do_not_depend_on_flushing(flushing, name):
    step = format_named(name).min_subnormal
    x = torch.tensor([-1.25 * step]).expand(1 << 16)
    found = round_with_bits(x, name, ALL_16_BITS, 16)
    assert int((found == -2 * step).sum()) == 1 << 14
    assert int((found == -step).sum()) == 3 << 14
    # FP32 subnormals are zero here, and keep their sign.
    assert bits(round_stochastic(from_bits([0x80000001]), name, seeded())).tolist() == [-(1 << 31)]


def test_refusals():
    x = torch.ones(3)
    zeros = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InputError, match="unknown float format 'fp8'"):
        round_stochastic(x, "fp8", seeded())
    with pytest.raises(InputError, match="unknown overflow 'clip'"):
        round_stochastic(x, "e4m3", seeded(), overflow="clip")
    for dtype in (torch.bfloat16, torch.int64):
        with pytest.raises(InputError, match="convert it to torch.float32 or torch.float64 first"):
            round_stochastic(x.to(dtype), "bf16", seeded())
    with pytest.raises(InputError, match="the generator is on cpu, the tensor on meta; make one on that device"):
        round_stochastic(x.to("meta"), "bf16", seeded())
    for wrong in (zeros[:2], zeros.float(), zeros.to(torch.int16)):
        with pytest.raises(InputError, match=r"random bits are int32 or int64 of shape \(3,\), got "):
            round_with_bits(x, "bf16", wrong, 16)
    with pytest.raises(InputError, match="the random bits are on cpu, the tensor on meta; move one"):
        round_with_bits(x.to("meta"), "bf16", zeros, 16)
    for num_bits in (0, 54):
        with pytest.raises(InputError, match=f"num_bits must be 1 to 53, got {num_bits}"):
            round_with_bits(x, "bf16", zeros, num_bits)
    for value in (-1, 1 << 16):
        with pytest.raises(InputError, match=r"random bits lie outside \[0, 2\*\*16\); mask them to 16 bits"):
            round_with_bits(x, "bf16", zeros + value, 16)
