"""The same bytes in every run, for any number of threads, alone or in company, whatever the process's settings (T0)."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.recipe.derive import resolve

RECIPES = ("fa2", "paper", "sdpa-math")


def digest(value: Any) -> str:
    """A hash of every byte of a dual pass."""
    sha = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            sha.update(str((item.dtype, tuple(item.shape))).encode())
            sha.update(item.contiguous().numpy().tobytes())
        elif item is not None:
            for name in item.__dataclass_fields__:
                add(getattr(item, name))

    add(value)
    return sha.hexdigest()


@contextmanager
def threads(number: int) -> Iterator[None]:
    was = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(was)


@contextmanager
def medium_precision() -> Iterator[None]:
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was)


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], Any]] = {
    "medium": medium_precision,
    "autocast": autocast,
    "flush": flushed_subnormals,
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reference", ["fp32", "fp64"])
def test_repeated_runs_and_thread_counts(oracle: ModuleType, record_of: Any, recipe: str, reference: str) -> None:
    record = record_of(oracle.draw(100, heads=2, kv_heads=1, queries=200, size=64))
    found = set()
    for number in (1, 2, 2):
        with threads(number):
            found.add(digest(dual_pass(record, resolve(recipe), reference)))
    assert len(found) == 1


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("reference", ["fp32", "fp64"])
def test_settings_of_the_process_do_not_leak(oracle: ModuleType, record_of: Any, name: str, reference: str) -> None:
    """Values down to 2^-130 make flushed subnormals visible; 160 rows make oneDNN's reduced modes visible."""
    call = oracle.draw(101, queries=160, size=64)
    call.v[:, :, 0] *= 2.0**-128
    call.do[:, ::3] *= 2.0**-60
    record = record_of(call)
    for recipe in RECIPES:
        expected = digest(dual_pass(record, resolve(recipe), reference))
        with SETTINGS[name]():
            found = dual_pass(record, resolve(recipe), reference)
        assert digest(found) == expected, recipe
        assert not found.o_lp.requires_grad


def test_the_settings_would_change_something(oracle: ModuleType) -> None:
    """The test above can fail: outside of the guard these settings do change products."""
    a = torch.from_numpy(oracle.draw(102, heads=1, queries=160, size=160).q[0]) * 1.2345678
    plain = a @ a
    with autocast():
        assert not torch.equal((a @ a).float(), plain)
    with flushed_subnormals():
        assert (torch.full((4,), 2.0**-140) * 0.5).view(torch.int32).sum() == 0


def test_settings_are_put_back(oracle: ModuleType, record_of: Any) -> None:
    record = record_of(oracle.draw(103))
    with medium_precision(), autocast(), threads(2):
        dual_pass(record, resolve("fa2"))
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_num_threads() == 2
    with flushed_subnormals():
        dual_pass(record, resolve("fa2"))
        assert (torch.full((4,), 2.0**-140) * 0.5).view(torch.int32).sum() == 0


def test_memory_layout_does_not_matter(oracle: ModuleType, record_of: Any) -> None:
    """A head that is a view into something larger, or transposed, gives the same bytes."""
    from dataclasses import replace

    record = record_of(oracle.draw(104, heads=4, queries=140, size=48))
    expected = digest(dual_pass(record, resolve("fa2")))
    views = {
        name: torch.stack([getattr(record, name)] * 2, -1)[..., 1].transpose(0, 1).contiguous().transpose(0, 1)
        for name in ("q", "k", "v", "do")
    }
    assert not views["q"].is_contiguous()
    assert digest(dual_pass(replace(record, **views), resolve("fa2"))) == expected


def test_a_head_alone_and_in_company(oracle: ModuleType, record_of: Any) -> None:
    """Each head of eight gives the bytes that it gives alone."""
    from dataclasses import replace

    record = record_of(oracle.draw(105, heads=8, queries=140, size=64))
    together = dual_pass(record, resolve("fa2"))
    for head in (0, 3, 7):
        one = {name: getattr(record, name)[head : head + 1] for name in ("q", "k", "v", "do")}
        alone = dual_pass(replace(record, **one), resolve("fa2"))
        for name in ("o_lp", "o_hp", "o_err", "lse_lp", "lse_hp"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[head]), name
        for part in ("delta", "dq", "maxima"):
            mine, all_of_them = getattr(alone, part), getattr(together, part)
            for name in mine.__dataclass_fields__:
                assert torch.equal(getattr(mine, name)[0], getattr(all_of_them, name)[head]), name


def test_inputs_are_left_alone(oracle: ModuleType, record_of: Any) -> None:
    record = record_of(oracle.draw(106, queries=140, softcap=2.0))
    before = {name: getattr(record, name).clone() for name in ("q", "k", "v", "do")}
    for recipe in RECIPES:
        dual_pass(record, resolve(recipe), "fp32")
    for name, value in before.items():
        assert torch.equal(getattr(record, name), value), name
