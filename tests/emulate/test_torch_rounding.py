"""What the torch twin promises beyond the values, which tests/floats compares with the specification."""

import numpy as np
import pytest
import torch

from bf16forensics.emulate.rounding import changed_by_cast, round_to, ulp_of
from bf16forensics.errors import InputError
from bf16forensics.floats import ulp
from bf16forensics.floats.formats import format_named


@pytest.fixture
def flushing():
    """Flush subnormals on this thread, as a training script may."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def from_bits(codes, dtype=torch.float32):
    as_int = {torch.float32: np.int32, torch.float64: np.int64}[dtype]
    return torch.from_numpy(np.asarray(codes).astype(as_int)).view(dtype)


def bits(t):
    return t.view({torch.float32: torch.int32, torch.float64: torch.int64}[t.dtype])


def test_a_format_as_wide_as_the_tensor_returns_the_tensor_itself():
    t = torch.tensor([1.001])
    assert round_to(t, "fp32") is t
    assert round_to(t, "fp64") is t
    wide = t.double()
    assert round_to(wide, "fp64") is wide


def test_float64_rounds_once():
    """1 + 2**-8 + 2**-40 lies above the tie; FP32 cannot tell it from the tie, which would go down."""
    t = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_to(t, "bf16").item() == 1 + 2.0**-7
    assert t.float().to(torch.bfloat16).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 0, 2), (5, 7, 33)])
def test_shapes_dtypes_and_values_are_kept(dtype, shape):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=dtype)
    for name in ("e4m3", "e5m2", "bf16", "fp16"):
        rounded = round_to(t, name)
        assert rounded.shape == t.shape
        assert rounded.dtype == dtype
        assert ulp_of(t, name).shape == t.shape
        assert ((rounded - t).abs() <= ulp_of(t, name) / 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strides_do_not_matter(dtype):
    t = torch.randn(6, 9, 10, generator=torch.Generator().manual_seed(6), dtype=dtype)
    for view in (t.transpose(0, 2), t[:, ::2, 1:], t[:, :1].expand(6, 4, 10)):
        for name in ("e4m3", "e5m2", "bf16"):
            for function in (round_to, ulp_of):
                expected = function(view.contiguous(), name)
                assert (bits(function(view, name).contiguous()) == bits(expected)).all()
            assert changed_by_cast(view, name) == changed_by_cast(view.contiguous(), name)


def test_input_is_left_alone():
    for dtype in (torch.float32, torch.float64):
        t = torch.tensor([1.001, -3.3, 1e6, float("nan")], dtype=dtype)
        before = t.clone()
        for name in ("e4m3", "e5m2", "bf16"):
            for overflow in (None, "nonfinite", "saturate"):
                round_to(t, name, overflow=overflow)
                changed_by_cast(t, name, overflow=overflow)
            ulp_of(t, name)
        assert (bits(t) == bits(before)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_detached(dtype):
    t = torch.ones(3, dtype=dtype, requires_grad=True)
    assert not round_to(t, "bf16").requires_grad
    assert not round_to(t, "e4m3").requires_grad
    assert not round_to(t, "e5m2").requires_grad
    assert not ulp_of(t, "bf16").requires_grad
    assert changed_by_cast(t, "bf16") == (0, 0.0)


@pytest.mark.parametrize("size", [1, 1000])
def test_rounding_does_not_depend_on_flushing(flushing, size):
    codes = np.tile(np.array([0x8000, 0x8001, 0x80018001, 0x007FFFFF, 0x00018000, 0x80000001, 0x477FF000]), size)
    expected = np.tile(np.array([0, 0x10000, 0x80020000, 0x00800000, 0x00020000, 0x80000000, 0x47800000]), size)
    found = round_to(from_bits(codes), "bf16")
    assert (bits(found).numpy().view(np.uint32) == expected.astype(np.uint32)).all()


def test_rounding_float64_to_subnormals_does_not_depend_on_flushing(flushing):
    steps = torch.arange(-300, 300, dtype=torch.float64) / 4
    for name, step in (("bf16", 2.0**-133), ("fp16", 2.0**-24), ("fp32", 2.0**-149)):
        found = round_to(steps * step, name)
        assert (bits(found) == bits(steps.round().copysign(steps) * step)).all()


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("overflow", ["nonfinite", "saturate"])
@pytest.mark.parametrize(("name", "step"), [("e4m3", 2.0**-9), ("e5m2", 2.0**-16)])
def test_rounding_to_fp8_does_not_depend_on_flushing(flushing, name, step, overflow, size):
    for dtype in (torch.float32, torch.float64):
        steps = torch.arange(-300, 300, dtype=dtype).div(64).repeat(size)
        found = round_to(steps * step, name, overflow=overflow)
        assert (bits(found) == bits(steps.round().copysign(steps) * step)).all()
    tiny = from_bits(np.tile([0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x80000000], size))
    zeros = from_bits(np.tile([0, 0x80000000, 0, 0x80000000, 0x80000000], size))
    assert (bits(round_to(tiny, name, overflow=overflow)) == bits(zeros)).all()


def test_ulp_does_not_depend_on_flushing(flushing):
    # The bits of an FP32 number whose exponent field alone is set, and of its step.
    expected = {
        0: 1,
        0x80000001: 1,
        0x007FFFFF: 1,
        0x00800000: 1,
        0x01000000: 2,
        0x0B800000: 1 << 22,
        0x0C000000: 1 << 23,
    }
    found = ulp_of(from_bits(list(expected)), "fp32")
    assert bits(found).tolist() == list(expected.values())


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "fp16", "fp32"])
def test_ulp_of_fp32_tensors_is_the_specified_one(name):
    """T1: the top 16 bits take every value, with lower bits that leave the exponent alone."""
    codes = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x1234
    x = codes.view(np.float32)
    found = ulp_of(torch.from_numpy(x), name)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.double().numpy(), ulp.ulp_array(x, format_named(name)))


def test_steps_too_small_for_the_tensor_are_refused():
    with pytest.raises(InputError, match=r"steps of fp64 do not fit into torch\.float32; convert the tensor"):
        ulp_of(torch.ones(1), "fp64")
    assert ulp_of(torch.ones(1, dtype=torch.float64), "fp64").item() == 2.0**-52


def test_changed_by_cast_counts_and_measures():
    t = torch.tensor([1.0, 1 + 2.0**-9, -2 - 2.0**-7, 0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    assert changed_by_cast(t, "bf16") == (2, 2.0**-7)
    assert changed_by_cast(t.double(), "bf16") == (2, 2.0**-7)
    assert changed_by_cast(t, "fp32") == (0, 0.0)
    assert changed_by_cast(t[:1], "bf16") == (0, 0.0)
    assert changed_by_cast(t[:0], "bf16") == (0, 0.0)


def test_changed_by_cast_counts_overflow_as_an_infinite_error():
    t = torch.tensor([1.0, 70000.0])
    assert changed_by_cast(t, "fp16") == (1, float("inf"))
    assert changed_by_cast(t, "bf16")[0] == 1


def test_changed_by_cast_to_fp8_measures_from_the_largest_value():
    """Infinities are no finite elements: not counted, though they saturate."""
    t = torch.tensor([1.0, 500.0, -0.0, float("inf"), float("nan"), 2.0**-10])
    assert changed_by_cast(t, "e4m3") == (2, 52.0)
    assert changed_by_cast(t.double(), "e4m3") == (2, 52.0)
    assert changed_by_cast(t, "e4m3", overflow="nonfinite") == (2, float("inf"))
    assert changed_by_cast(t, "e5m2") == (1, 12.0)
    assert changed_by_cast(t[:1] * 60000, "e5m2") == (1, 60000.0 - 57344.0)
    assert changed_by_cast(t[:1] * 62000, "e5m2", overflow="nonfinite") == (1, float("inf"))
    assert changed_by_cast(t, "fp32", overflow="saturate") == (0, 0.0)


def test_changed_by_cast_counts_subnormals_even_when_flushed(flushing):
    assert changed_by_cast(from_bits([0x00000001, 0x00010000, 0x80018000]), "bf16")[0] == 2


@pytest.mark.parametrize("function", [round_to, ulp_of, changed_by_cast])
def test_refusals(function):
    with pytest.raises(InputError, match="unknown float format 'fp8'"):
        function(torch.ones(1), "fp8")
    for dtype in (torch.bfloat16, torch.int64):
        with pytest.raises(InputError, match="convert it to torch.float32 or torch.float64 first"):
            function(torch.ones(1).to(dtype), "bf16")
