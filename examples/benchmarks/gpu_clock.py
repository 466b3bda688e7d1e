"""Times on a GPU for benchmarks: contestants in turn, ceilings of the same run, peak memory. On a CPU, wall clock.

A time is that of the GPU: the launches of a round wait behind a kernel that sleeps, so that Python is ahead of them.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: Cycles that the GPU sleeps while Python queues a round: some 20 ms.
_HEAD_START = 40_000_000
#: Side of the square product, and bytes of the copy, that measure the ceilings.
_PRODUCT_SIDE, _COPY_BYTES = 8192, 2**30

#: What is timed, and its arguments for one round after the other.
Contestant = tuple[Callable[[Any], object], Sequence[Any]]


def wait(device: torch.device) -> None:
    """Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    contestants: Mapping[str, Contestant], device: torch.device, rounds: int, warm_up: int = 2
) -> dict[str, float]:
    """Median time of a call of each, all of them once a round, so that a change of clocks meets them alike.

    Args:
        contestants: by name.
        device: where they run.
        rounds: calls that count.
        warm_up: rounds before them.
    """
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-warm_up, rounds):
        for name, seconds in _round(contestants, device, number).items():
            if number >= 0:
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _round(contestants: Mapping[str, Contestant], device: torch.device, number: int) -> dict[str, float]:
    turns = {name: (call, given[number % len(given)]) for name, (call, given) in contestants.items()}
    if device.type != "cuda":
        seconds = {}
        for name, (call, argument) in turns.items():
            started = time.perf_counter()
            call(argument)
            seconds[name] = time.perf_counter() - started
        return seconds
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_HEAD_START)
    events = {}
    for name, (call, argument) in turns.items():
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call(argument)
        after.record()
        events[name] = before, after
    torch.cuda.synchronize(device)
    return {name: before.elapsed_time(after) / 1e3 for name, (before, after) in events.items()}


def ceilings(device: torch.device, rounds: int) -> tuple[float, float]:
    """FLOP/s of a BF16 product of torch, and bytes/s of a copy within the memory, read and written."""
    side, size = (_PRODUCT_SIDE, _COPY_BYTES) if device.type == "cuda" else (64, 2**16)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(
        {"product": (lambda pair: pair[0] @ pair[1], [(a, b)]), "copy": (target.copy_, [source])}, device, rounds
    )
    return 2 * side**3 / seconds["product"], 2 * size / seconds["copy"]


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a call takes beyond what was there before, its results included; None on a CPU."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
