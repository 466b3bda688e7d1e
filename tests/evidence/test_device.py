"""Evidence on a device: what leaves it, what stays, and that it says what the CPU says."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.path import QueryPath
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence.device_series import DeviceSeries
from bf16forensics.evidence.finite import make_finite
from bf16forensics.evidence.flat import flat_direction
from bf16forensics.evidence.functional import score_variance
from bf16forensics.evidence.gradient import gradient_parts
from bf16forensics.evidence.host import on_host
from bf16forensics.evidence.observe import ObserveOptions, observe_sequence
from bf16forensics.evidence.observe_carrier import exact_carrier
from bf16forensics.evidence.series import SignedSeries
from bf16forensics.evidence.sign_flips import flip_tests
from bf16forensics.evidence.summary import DeltaSummary, RecordSummary, summarise
from bf16forensics.recipe.derive import resolve

Make = Callable[..., AttentionRecord]
GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"causal": False, "window": 5},
    {"key_padding": torch.arange(24) < 20, "query_padding": torch.arange(24) < 20},
    {"document_ids": torch.arange(24) // 9, "softcap": 4.0},
    {"keep": torch.arange(576).reshape(1, 24, 24) % 5 > 0, "bias": -(torch.arange(576) // 2).reshape(1, 24, 24) / 64},
]
NAMES = ["causal", "window", "padding", "documents", "keep"]


def _load() -> ModuleType:
    name = "bf16forensics_test_simulated_device"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("simulated_device.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


simulated = _load()


def close(found: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    """Compares dataclasses of arrays field by field, wherever they lie."""
    for field in fields(expected):
        own, other = getattr(found, field.name), getattr(expected, field.name)
        if other is None or isinstance(other, int):
            assert own == other, field.name
        elif isinstance(other, (np.ndarray, torch.Tensor)):
            own, other = (t.cpu().numpy() if isinstance(t, torch.Tensor) else t for t in (own, other))
            assert own.shape == other.shape, field.name
            if other.dtype.kind in "bi":
                np.testing.assert_array_equal(own, other, err_msg=field.name)
            else:
                size = np.abs(other[np.isfinite(other)]).max(initial=0.0)
                np.testing.assert_allclose(own, other, rtol=rtol, atol=atol * size + 1e-300, err_msg=field.name)
        elif hasattr(other, "__dataclass_fields__"):
            close(own, other, rtol, atol)


def test_the_simulated_device_refuses_what_a_gpu_refuses() -> None:
    with simulated.SimulatedDevice():
        here = simulated.on_device(torch.ones(3))
        assert here.device == simulated.DEVICE
        assert torch.equal((here + torch.zeros(3, device=simulated.DEVICE)).cpu(), torch.ones(3))
        with pytest.raises(RuntimeError, match="and on the CPU"):
            here + torch.ones(3)
        with pytest.raises(RuntimeError, match="numpy"):
            here.numpy()
        with pytest.raises(RuntimeError, match="and on the CPU"):
            here[torch.tensor([True, False, True])]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=NAMES)
def test_a_record_moves_as_a_whole_and_comes_back(make_record: Make, geometry: dict[str, Any]) -> None:
    record = make_record(1, labelled=torch.arange(24) > 2, **geometry)
    with simulated.SimulatedDevice():
        moved = record.to(simulated.DEVICE)
        for part in (moved, moved.geometry):
            for field in fields(part):
                value = getattr(part, field.name)
                assert not isinstance(value, torch.Tensor) or value.device == simulated.DEVICE, field.name
        back = moved.to(torch.device("cpu"))
    for own, other in ((back, record), (back.geometry, record.geometry)):
        for field in fields(other):
            value, expected = getattr(own, field.name), getattr(other, field.name)
            if isinstance(expected, torch.Tensor):
                assert value.dtype == expected.dtype
                assert torch.equal(value, expected), field.name
            elif field.name != "geometry":
                assert value == expected, field.name


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=NAMES)
def test_visibility_is_made_where_the_masks_are(make_record: Make, geometry: dict[str, Any]) -> None:
    record = make_record(1, **geometry)
    expected = record.geometry.visible((3, 17), (0, 24), 24, 24)
    scores = torch.zeros(2, 14, 24)
    until = record.geometry.hide(scores, (3, 17), 24, 0, 24)
    with simulated.SimulatedDevice():
        there = record.geometry.to(simulated.DEVICE)
        found = there.visible((3, 17), (0, 24), 24, 24, simulated.DEVICE)
        hidden = torch.zeros(2, 14, 24, device=simulated.DEVICE)
        assert there.hide(hidden, (3, 17), 24, 0, 24) == until
        assert expected is not None
        assert found is not None
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(hidden.cpu(), scores)


def test_one_transfer_keeps_every_dtype_and_value() -> None:
    tensors = {
        "bool": torch.tensor([[True, False]]),
        "int": torch.tensor([2**53, -1, 0]),
        "wide": torch.tensor([1.0 + 2.0**-52, float("nan"), -float("inf"), -0.0], dtype=torch.float64),
        "fp32": torch.tensor(2.0**-149),
        "none": torch.zeros(2, 0),
    }
    with simulated.SimulatedDevice():
        found = on_host({name: tensor.to(simulated.DEVICE) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.numpy().dtype
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.numpy().tobytes()


def twins(record: AttentionRecord) -> AttentionRecord:
    """The same with each second key equal to the one before it, so that many rows have several maxima."""
    k = record.k.clone()
    k[:, 1::2] = k[:, ::2]
    return replace(record, k=k)


def summaries(record: AttentionRecord, recipe: str, narrow: bool) -> tuple[RecordSummary, RecordSummary]:
    """The summary of a record from the CPU and from the device."""
    dual = dual_pass(record, resolve(recipe), "fp64")
    given = simulated.in_fp32(dual) if narrow else dual
    # The fused pass leaves the ties on the CPU.
    there = replace(simulated.on_device(given), ties=dual.ties)
    return summarise(record, dual, "bf16"), summarise(record.to(simulated.DEVICE), there, "bf16")


@pytest.mark.parametrize("recipe", ["fa2", "paper"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=NAMES)
def test_the_summary_of_a_device_is_that_of_the_cpu(make_record: Make, geometry: dict[str, Any], recipe: str) -> None:
    labelled = torch.arange(24) % 4 > 0
    record = twins(make_record(3, heads=4, kv_heads=2, sharpness=4.0, labelled=labelled, **geometry))
    with simulated.SimulatedDevice():
        expected, found = summaries(record, recipe, narrow=False)
    assert expected.maxima.rows_repeated.sum() > 0
    assert isinstance(found.delta, DeltaSummary)
    assert isinstance(found.delta.defect, torch.Tensor)
    assert found.delta.defect.device == simulated.DEVICE
    assert isinstance(found.output.ulp_sum, np.ndarray)
    # The same float64 operations.
    close(found, expected, 1e-15)


def test_sums_of_an_fp32_pass_are_float64(make_record: Make) -> None:
    record = make_record(4, tokens=400, sharpness=3.0)
    with simulated.SimulatedDevice():
        expected, found = summaries(record, "fa2", narrow=True)
    # Rounding to FP32 moves each of 3,200 terms by 2^-24 of it at most; FP32 sums would lose ten times as much.
    np.testing.assert_allclose(found.maxima.sink_sum, expected.maxima.sink_sum, rtol=2.0**-24)
    np.testing.assert_allclose(found.maxima.defect_power, expected.maxima.defect_power, rtol=2.0**-22)
    assert found.output.ulp_sum.dtype == np.float64
    size = np.abs(expected.output.ulp_sum).max() + expected.output.ulp_count.max() * 2.0**-24 * 8
    np.testing.assert_allclose(found.output.ulp_sum, expected.output.ulp_sum, atol=size * 2.0**-10)


@pytest.mark.parametrize("do", [True, False], ids=["do", "no-do"])
def test_a_record_without_do_has_no_delta_there_either(make_record: Make, do: bool) -> None:
    record = make_record(5)
    record = record if do else replace(record, do=None)
    with simulated.SimulatedDevice():
        expected, found = summaries(record, "fa2", narrow=False)
    assert (found.delta is None) == (expected.delta is None) == (not do)
    close(found.output, expected.output, 1e-15)


def with_path(record: AttentionRecord) -> AttentionRecord:
    """The same with q = 2 raw + 3 raw of the other half: a linear path with known derivatives."""
    heads, tokens, size = record.q.shape
    raw = torch.zeros(tokens, heads * size).requires_grad_()
    by_head = raw.view(tokens, heads, size).transpose(0, 1)
    query = 2 * by_head + 3 * by_head.roll(size // 2, -1)
    columns = torch.arange(heads * size).view(heads, size)
    return replace(record, query_path=QueryPath(raw=raw, query=query, columns=columns))


@pytest.mark.parametrize("path", [False, True], ids=["plain", "path"])
@pytest.mark.parametrize("narrow", [False, True], ids=["fp64", "fp32"])
def test_gradient_parts_stay_on_the_device(make_record: Make, narrow: bool, path: bool) -> None:
    record = make_record(6, heads=4, sharpness=3.0)
    record = with_path(record) if path else record
    dual = dual_pass(record, resolve("fa2"), "fp64")
    assert dual.delta is not None
    assert dual.dq is not None
    assert record.x is not None
    expected = gradient_parts(dual.delta, dual.dq, record.x, record.query_path)
    with simulated.SimulatedDevice():
        there = simulated.on_device(simulated.in_fp32(dual.dq) if narrow else dual.dq)
        moved = record.to(simulated.DEVICE)
        found = gradient_parts(simulated.on_device(dual.delta), there, moved.x, moved.query_path)
        assert isinstance(found.total, torch.Tensor)
        assert found.total.device == simulated.DEVICE
        # Stages in FP32 differ by 2^-24 of dQ, and so do their differences.
        noise = np.abs(expected.hp).max() * 24 * 2.0**-22 if narrow else 1e-300
        for field in fields(expected):
            own, other = getattr(found, field.name).cpu().numpy(), getattr(expected, field.name)
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=noise, err_msg=field.name)


@pytest.mark.parametrize("path", [False, True], ids=["plain", "path"])
def test_the_flat_direction_is_the_same(make_record: Make, path: bool) -> None:
    record = make_record(7, heads=4, kv_heads=2, **GEOMETRIES[2])
    record = with_path(record) if path else record
    expected, count = flat_direction(record)
    with simulated.SimulatedDevice():
        found, number = flat_direction(record.to(simulated.DEVICE))
    assert number == count
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=NAMES)
def test_the_functional_figure_is_the_same(make_record: Make, geometry: dict[str, Any]) -> None:
    record = make_record(8, heads=4, kv_heads=2, **geometry)
    moves = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(1))
    expected = score_variance(record, moves)
    with simulated.SimulatedDevice():
        found = score_variance(record.to(simulated.DEVICE), moves.to(simulated.DEVICE))
        assert found.dtype == torch.float64
        # FP32 scores in blocks of another size.
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=0.0)


def test_non_finite_inputs_are_named_and_zeroed_there(make_record: Make) -> None:
    record = make_record(9, heads=4, kv_heads=2)
    record.k[1, 5, 2] = float("nan")
    assert record.x is not None
    record.x[4, 3] = float("inf")
    expected = make_finite(record)
    with simulated.SimulatedDevice():
        found = make_finite(record.to(simulated.DEVICE))
        assert found.nonfinite == expected.nonfinite
        assert expected.nonfinite[2] == ("k[0, 1, 5, 2]", "x[0, 4, 3]")
        for name in ("q", "k", "v", "do", "x"):
            assert torch.equal(getattr(found.record, name).cpu(), getattr(expected.record, name)), name
        clean = make_record(9).to(simulated.DEVICE)
        assert make_finite(clean).record is clean


@pytest.mark.parametrize("path", [False, True], ids=["plain", "path"])
@pytest.mark.parametrize("with_do", [True, False], ids=["do", "no-do"])
def test_the_observation_is_the_same(make_record: Make, path: bool, with_do: bool) -> None:
    record = twins(make_record(10, heads=4, kv_heads=2, sharpness=4.0, **GEOMETRIES[2]))
    record = with_path(record) if path else record
    record = record if with_do else replace(record, do=None)
    recipe = resolve("fa2")
    options = ObserveOptions(recipe=recipe, reference="fp64", kept=100)
    dual = dual_pass(record, recipe, "fp64")
    expected = observe_sequence(record, dual, options)
    assert expected.rows is not None
    assert expected.rows.listed
    with simulated.SimulatedDevice():
        there = replace(simulated.on_device(dual), ties=dual.ties)
        found = observe_sequence(record.to(simulated.DEVICE), there, options)
        carrier = exact_carrier(record.to(simulated.DEVICE), "fp64")
        torch.testing.assert_close(carrier.cpu(), exact_carrier(record, "fp64"), rtol=1e-12, atol=1e-15)
    assert found.rows is not None
    assert found.rows.listed == expected.rows.listed
    close(found, expected, 1e-6, 1e-6)


@pytest.mark.parametrize("tokens", [(7,), (50, 30), (333, 20, 400)])
def test_a_series_on_a_device_is_the_series(tokens: tuple[int, ...]) -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    plain = [SignedSeries(3, sum(tokens)) for _ in range(2)]
    with simulated.SimulatedDevice():
        series = DeviceSeries(2, 3, sum(tokens), simulated.DEVICE)
        for count in tokens:
            rows = generator.random((3, count)) > 0.2
            values = generator.standard_t(2, (2, 3, count)) * rows
            floor = np.abs(generator.standard_normal((3, count))) * 0.3
            for own, one in zip(plain, values, strict=True):
                own.add(one, rows, floor)
            series.add(*(torch.from_numpy(t).to(simulated.DEVICE) for t in (values, rows, floor)))
        totals = series.totals()
        assert [repr(t) for t in series.totals()] == [repr(t) for t in totals]
    for own, found in zip(plain, totals, strict=True):
        loaded = SignedSeries(3, sum(tokens))
        loaded.load(found)
        for head in range(3):
            a, b = own.result(head, steps=[[0]]), loaded.result(head, steps=[[0]])
            assert (a.positive, a.negative, a.zero) == (b.positive, b.negative, b.zero)
            assert b.sum == pytest.approx(a.sum, rel=1e-12)
            assert b.z == pytest.approx(a.z, rel=1e-12)
            assert b.running_tokens == pytest.approx(a.running_tokens, rel=1e-12)
            assert b.running_steps == pytest.approx(a.running_steps, rel=1e-12)
            assert b.clustered.mean == pytest.approx(a.clustered.mean, rel=1e-12)
            assert b.robust.n_effective == pytest.approx(a.robust.n_effective, rel=1e-12)
            assert b.robust.largest_share == pytest.approx(a.robust.largest_share, rel=1e-12)
            assert b.robust.sign_without_top_1_percent == a.robust.sign_without_top_1_percent


@pytest.mark.parametrize("sequences", [2, 8, 17])
def test_flips_on_a_device_give_the_same_tests(sequences: int) -> None:
    generator = np.random.Generator(np.random.PCG64(2))
    vectors = generator.standard_normal((5, sequences, 30)) + np.linspace(0, 0.5, 5)[:, None, None]
    grams = [*(vectors @ vectors.transpose(0, 2, 1)), np.zeros((sequences, sequences))]
    with simulated.SimulatedDevice():
        found = flip_tests(grams, simulated.DEVICE)
    for own, expected in zip(found, flip_tests(grams), strict=True):
        # A flip whose statistic differs in its last bit counts all the same: the tests allow for more than that.
        assert (own.p, own.p_adjusted) == (expected.p, expected.p_adjusted)
        assert own.family_quantile == pytest.approx(expected.family_quantile, rel=1e-12)
