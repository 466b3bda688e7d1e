"""Processors of this process."""

import os

import pytest

from bf16forensics.investigate.cores import usable_cores


def test_a_process_bound_to_some_cores_counts_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores() == 3


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_without_an_affinity_all_processors_count(
    monkeypatch: pytest.MonkeyPatch, counted: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert usable_cores() == expected
