"""localize with records and dual passes on a device other than the CPU: the same heads, from there."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.attention.backend import RanPass
from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence import device_store
from bf16forensics.investigate import collect, localize, sequence
from bf16forensics.investigate.localize import HeadsFound, find_heads
from bf16forensics.investigate.sequence import LocalizeOptions
from bf16forensics.recipe.presets import FA2, PAPER

Make = Callable[..., Any]


def _load() -> ModuleType:
    name = "bf16forensics_test_simulated_device"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "evidence" / "simulated_device.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


simulated = _load()


class HereAndNow:
    """An executor without threads: the simulated device is known to the calling thread alone."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __enter__(self) -> "HereAndNow":
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)


class DeviceSource:
    """The records of another source, on the simulated device."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def records(self, number: int, on_loss: Any) -> Iterator[AttentionRecord]:
        for record in self._source.records(number, on_loss):
            yield record.to(simulated.DEVICE)


@pytest.fixture
def find_there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HeadsFound]:
    """`find_heads` on the simulated device; records for which `by_reference` says so go through the CPU's pass."""

    def find(
        source: Any, recipe: Any, by_reference: Callable[[AttentionRecord], bool] = lambda record: False, **more: Any
    ) -> HeadsFound:
        def run(record: AttentionRecord, recipe: Any, reference: str, backend: Any) -> RanPass:
            dual = dual_pass(record.to(torch.device("cpu")), recipe, reference)
            if by_reference(record):
                return RanPass(dual=dual, why_reference="asked")
            return RanPass(dual=replace(simulated.on_device(dual), ties=dual.ties))

        monkeypatch.setattr(sequence, "run_dual_pass", run)
        for module in (collect, localize):
            monkeypatch.setattr(module, "ThreadPoolExecutor", HereAndNow)
        options = LocalizeOptions(recipe=recipe, reference="fp64", workers=1, **more)
        with simulated.SimulatedDevice():
            return find_heads(DeviceSource(source), options)

    return find


def same(found: Any, expected: Any, where: str = "") -> None:
    """Equal but for the order of sums: FP32 matrices of gradients, float64 statistics of them."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            same(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, float):
        # What is left of a share of 1 is rounding alone.
        slack = 1e-6 if where.endswith("share_rest") else 1e-9
        assert found == pytest.approx(expected, rel=1e-4, abs=slack, nan_ok=True), where
    else:
        assert found == expected, where


def compare(found: HeadsFound, expected: HeadsFound) -> None:
    assert found.sequences == expected.sequences
    assert len(found.heads) == len(expected.heads)
    for own, other in zip(found.heads, expected.heads, strict=True):
        same(asdict(own), asdict(other), f"L{other.layer}.H{other.head}")


@pytest.mark.parametrize(("recipe", "kv_heads"), [(FA2, 4), (PAPER, 2)], ids=["fa2", "paper-shared-keys"])
def test_heads_from_a_device_are_those_of_the_cpu(
    make_source: Make, find_there: Callable[..., HeadsFound], recipe: Any, kv_heads: int
) -> None:
    source = make_source(groups=(0, 0, 0, 1), kv_heads=kv_heads)
    expected = find_heads(source, LocalizeOptions(recipe=recipe, reference="fp64", workers=1))
    compare(find_there(source, recipe), expected)


def test_observation_from_a_device(make_source: Make, find_there: Callable[..., HeadsFound]) -> None:
    source = make_source()
    expected = find_heads(source, LocalizeOptions(recipe=FA2, reference="fp64", workers=1, observe=True))
    found = find_there(source, FA2, observe=True)
    compare(found, expected)
    assert found.observation is not None
    assert expected.observation is not None
    same(asdict(found.observation), asdict(expected.observation))


@pytest.mark.parametrize(("layer", "first"), [(0, True), (1, True), (1, False)])
def test_calls_that_the_reference_takes_join_the_others(
    make_source: Make, find_there: Callable[..., HeadsFound], layer: int, first: bool
) -> None:
    source = make_source()
    expected = find_heads(source, LocalizeOptions(recipe=FA2, reference="fp64", workers=1))

    def by_reference(record: AttentionRecord) -> bool:
        return record.layer == layer and (record.sequence == 0) == first

    compare(find_there(source, FA2, by_reference), expected)


def test_gradients_that_do_not_fit_are_kept_on_the_cpu(
    make_source: Make, find_there: Callable[..., HeadsFound], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_store, "MEMORY_BUDGET_BYTES", 0)
    source = make_source()
    expected = find_heads(source, LocalizeOptions(recipe=FA2, reference="fp64", workers=1))
    compare(find_there(source, FA2), expected)


def test_a_head_that_is_not_finite_withholds_its_own_evidence_alone(
    make_source: Make, find_there: Callable[..., HeadsFound]
) -> None:
    source = make_source()
    q = source.sequences[1][1].q.clone()
    q[2, 3, 1] = float("nan")
    source.change(1, 1, q=q)
    expected = find_heads(source, LocalizeOptions(recipe=FA2, reference="fp64", workers=1))
    found = find_there(source, FA2)
    compare(found, expected)
    assert [head.dw_q is None for head in found.heads] == [False] * 6 + [True] + [False]


def test_without_x_there_is_no_coupling(make_source: Make, find_there: Callable[..., HeadsFound]) -> None:
    source = make_source()
    for number in range(4):
        for layer in range(2):
            source.change(layer, number, x=None)
    expected = find_heads(source, LocalizeOptions(recipe=FA2, reference="fp64", workers=1))
    found = find_there(source, FA2)
    compare(found, expected)
    assert all(head.dw_q is None for head in found.heads)
