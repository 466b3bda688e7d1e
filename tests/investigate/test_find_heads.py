"""localize over a source: reproducible, interruptible, bounded, and honest about non-finite inputs."""

import dataclasses
import functools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.errors import InputError
from bf16forensics.evidence.results import HeadEvidence
from bf16forensics.evidence.store import GradientStore
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.investigate import collect
from bf16forensics.investigate import localize as module
from bf16forensics.investigate.collect import Collector
from bf16forensics.investigate.interrupts import interrupts_deferred
from bf16forensics.investigate.localize import HeadsFound, SequencesDone, find_heads
from bf16forensics.investigate.sequence import LocalizeOptions
from bf16forensics.recipe.presets import FA2, PAPER

Make = Callable[..., Any]


def options(workers: int | None = 1, recipe: Any = FA2, reference: str = "fp64") -> LocalizeOptions:
    return LocalizeOptions(recipe=recipe, reference=reference, workers=workers)


def text(heads: tuple[HeadEvidence, ...]) -> str:
    """Every figure of every head, so that nan equals nan and -0 differs from 0."""
    return "\n".join(repr(dataclasses.asdict(head)) for head in heads)


def of(found: HeadsFound, layer: int, head: int) -> HeadEvidence:
    return next(item for item in found.heads if (item.layer, item.head) == (layer, head))


def test_every_head_of_every_layer_in_order(make_source: Make) -> None:
    found = find_heads(make_source(), options())
    assert [(head.layer, head.head) for head in found.heads] == [
        (layer, head) for layer in range(2) for head in range(4)
    ]
    assert found.sequences == 4
    assert found.loss == pytest.approx(1.5)
    assert not found.interrupted
    for head in found.heads:
        assert head.counts.rows == 80
        assert head.dw_q is not None
        assert head.dw_q.sequences == 4
        assert [(step.step, step.sequences) for step in head.dw_q.steps] == [(100, 2), (101, 2)]
        assert head.dw_q.norm > 0
        assert math.isfinite(head.dw_q.functional_relative)
        assert head.spectrum is not None
        assert head.nonfinite == ()


@pytest.mark.parametrize("recipe", [FA2, PAPER], ids=lambda recipe: recipe.name)
def test_threads_and_repetition_change_no_bit(make_source: Make, recipe: Any) -> None:
    source = make_source(groups=(0,) * 6)
    first = text(find_heads(source, options(1, recipe)).heads)
    threads = torch.get_num_threads()
    for workers in (1, 2, 5, None):
        assert text(find_heads(source, options(workers, recipe)).heads) == first
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert text(find_heads(source, options(2, recipe)).heads) == first
    finally:
        torch.set_num_threads(threads)


def test_companions_in_the_batch_do_not_matter(make_source: Make) -> None:
    three = make_source(groups=(0, 0, 0))
    alone = make_source(groups=(0, 0, 0))
    alone.sequences, alone.groups = alone.sequences[:1], (0,)
    partial: list[HeadsFound] = []

    def first_only(progress: HeadsFound) -> bool:
        partial.append(progress)
        return True

    three.groups = (0, 1, 2)
    stopped = find_heads(three, options(), is_decided=first_only)
    assert stopped.sequences == 1
    for a, b in zip(find_heads(alone, options()).heads, stopped.heads, strict=True):
        for name in ("delta_err", "delta_defect", "ds_row_sum", "output_err", "ones", "counts", "pairs"):
            assert repr(getattr(a, name)) == repr(getattr(b, name))
        assert a.dw_q is not None
        assert b.dw_q is not None
        assert a.dw_q.norm == b.dw_q.norm


def test_progress_is_told_in_order(make_source: Make) -> None:
    told: list[SequencesDone] = []
    find_heads(make_source(), options(2), told.append)
    assert [(item.done, item.planned) for item in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("after", [1, 3])
def test_an_interruption_returns_what_was_finished(make_source: Make, workers: int, after: int) -> None:
    def stop(progress: SequencesDone) -> None:
        if progress.done == after:
            raise KeyboardInterrupt

    found = find_heads(make_source(), options(workers), stop)
    assert found.interrupted
    assert found.sequences == after
    whole = make_source()
    whole.sequences, whole.groups = whole.sequences[:after], whole.groups[:after]
    assert text(found.heads) == text(find_heads(whole, options()).heads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sequence")]


def test_an_interruption_before_the_first_sequence_goes_on(make_source: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Collector, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        find_heads(make_source(), options())


@pytest.fixture
def _interrupts_raise() -> Iterator[None]:
    """Python's own handler: a process started in the background may ignore interrupts, and its children too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_raise")
def test_a_signal_in_the_middle_of_an_update_waits_for_its_end(
    make_source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Collector.add

    def interrupted(self: Collector, layers: Any) -> None:
        if self.num_sequences == 1:
            signal.raise_signal(signal.SIGINT)
        original(self, layers)

    monkeypatch.setattr(Collector, "add", interrupted)
    found = find_heads(make_source(), options())
    assert found.interrupted
    assert found.sequences == 2
    assert {head.counts.rows for head in found.heads} == {40}


@pytest.mark.usefixtures("_interrupts_raise")
def test_interrupts_are_deferred_in_the_main_thread_only() -> None:
    seen: list[str] = []

    def interrupted() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            seen.append("after the signal")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def elsewhere() -> None:
        with interrupts_deferred():
            seen.append("elsewhere")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[-1] == "elsewhere"
    with pytest.raises(ValueError, match="first"), interrupts_deferred():
        raise ValueError("first")


def test_is_decided_is_asked_at_the_end_of_each_step_and_stops(make_source: Make) -> None:
    asked: list[int] = []

    def decide(found: HeadsFound) -> bool:
        asked.append(found.sequences)
        return found.sequences >= 5

    source = make_source(groups=(0, 0, 1, 1, 1, 2, 2, 3, 3, 3))
    found = find_heads(source, options(1), is_decided=decide)
    assert asked == [2, 5]
    assert found.sequences == 5
    assert not found.interrupted
    # At most two sequences a worker are computed ahead.
    assert max(source.handed_out) <= 7


def test_an_undecided_run_ends_with_its_lines(make_source: Make) -> None:
    found = find_heads(make_source(), options(), is_decided=lambda _: False)
    assert found.sequences == 4
    assert text(found.heads) == text(find_heads(make_source(), options()).heads)


def test_interleaved_groups_are_still_one_step_each(make_source: Make) -> None:
    head = find_heads(make_source(groups=(0, 1, 0, 1)), options()).heads[0]
    assert head.dw_q is not None
    assert [(step.step, step.sequences) for step in head.dw_q.steps] == [(100, 2), (101, 2)]


def test_gradients_in_a_temporary_file_give_the_same_numbers(
    make_source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text(find_heads(make_source(), options()).heads)
    monkeypatch.setattr(collect, "GradientStore", functools.partial(GradientStore, budget_bytes=0))
    assert text(find_heads(make_source(), options()).heads) == expected


def test_an_error_in_a_sequence_is_the_callers(make_source: Make) -> None:
    source = make_source()
    source.change(0, 2, geometry=Geometry(scale=0.5, keep=torch.ones(1, 3, 3, dtype=torch.bool)))
    with pytest.raises(RuntimeError):
        find_heads(source, options(2))
    with pytest.raises(InputError, match="reference must be"):
        find_heads(make_source(), options(reference="bf16"))


def test_probes_are_the_first_sequences_within_the_budget(make_source: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_heads(make_source(groups=(0,) * 6), options(2))
    assert sorted({record.sequence for record in found.probes}) == [0, 1, 2, 3]
    monkeypatch.setattr(module, "PROBE_BUDGET_BYTES", 1)
    found = find_heads(make_source(groups=(0,) * 6), options(2))
    assert {record.sequence for record in found.probes} == {0}
    assert len(found.probes) == 2


def test_without_x_there_is_no_coupling_and_without_do_no_delta(make_source: Make) -> None:
    source = make_source()
    for sequence in range(4):
        for layer in range(2):
            source.change(layer, sequence, x=None)
    for head in find_heads(source, options()).heads:
        assert head.dw_q is None
        assert head.delta_err is not None
    for sequence in range(4):
        for layer in range(2):
            source.change(layer, sequence, do=None)
    for head in find_heads(source, options()).heads:
        assert head.delta_err is None


def spoil(source: Any, layer: int, sequence: int, name: str, at: tuple[int, ...], value: float) -> None:
    tensor = getattr(source.sequences[sequence][layer], name).clone()
    tensor[at] = value
    source.change(layer, sequence, **{name: tensor})


def assert_same_or_family(a: HeadEvidence, b: HeadEvidence) -> None:
    """All figures equal, but for the family-wise p, whose family is smaller by the damaged heads."""

    def alone(head: HeadEvidence) -> str:
        assert head.dw_q is not None
        plain = dataclasses.asdict(head)
        for part in ("defect", "total"):
            for name in ("p_adjusted", "minimum_detectable"):
                assert math.isfinite(plain["dw_q"][part].pop(name))
        for part in ("delta_err", "delta_defect", "ds_row_sum"):
            assert math.isfinite(plain[part]["clustered"].pop("p_adjusted"))
        return repr(plain)

    assert alone(a) == alone(b)


@pytest.mark.parametrize(
    ("name", "at", "value", "forward", "backward"),
    [
        ("k", (1, 3, 2), math.nan, False, False),
        ("k", (1, 19, 2), math.nan, False, False),
        ("q", (1, 0, 0), -math.inf, False, False),
        ("v", (1, 3, 2), math.inf, False, False),
        ("do", (1, 3, 2), math.nan, True, False),
    ],
    ids=["k visible", "k of the last token", "q", "v", "do"],
)
def test_a_bad_entry_touches_its_own_head_only(
    make_source: Make, name: str, at: tuple[int, ...], value: float, forward: bool, backward: bool
) -> None:
    clean = find_heads(make_source(), options())
    source = make_source()
    spoil(source, 1, 2, name, at, value)
    found = find_heads(source, options())
    bad = of(found, 1, 1)
    assert bad.nonfinite == (f"{name}[2, {', '.join(map(str, at))}]",)
    assert bad.dw_q is None
    assert math.isfinite(bad.output_err.max_abs) == forward
    assert bad.output_err.max_abs != 0
    assert bad.delta_err is not None
    assert bad.delta_defect is not None
    assert math.isfinite(bad.delta_err.sum) == math.isfinite(bad.delta_defect.z) == backward
    assert bad.spectrum == of(clean, 1, 1).spectrum
    if forward:
        assert bad.output_err == of(clean, 1, 1).output_err or name == "do"
    for head in found.heads:
        if head is not bad:
            assert_same_or_family(head, of(clean, head.layer, head.head))


def test_a_key_masked_for_every_query_is_still_named(make_source: Make) -> None:
    source = make_source()
    real = torch.arange(20) != 5
    for sequence in range(4):
        source.change(0, sequence, geometry=Geometry(scale=SIZE_ROOT, key_padding=real))
    clean = find_heads(source, options())
    spoil(source, 0, 0, "k", (1, 5, 0), math.nan)
    found = find_heads(source, options())
    assert of(found, 0, 1).nonfinite == ("k[0, 1, 5, 0]",)
    assert math.isnan(of(found, 0, 1).output_err.max_abs)
    assert_same_or_family(of(found, 0, 0), of(clean, 0, 0))


SIZE_ROOT = 8**-0.5


def test_a_bad_shared_key_touches_every_reader(make_source: Make) -> None:
    source = make_source(kv_heads=2)
    spoil(source, 0, 0, "k", (1, 3, 2), math.nan)
    found = find_heads(source, options())
    for head in range(4):
        assert bool(of(found, 0, head).nonfinite) == (head >= 2)
        assert (of(found, 0, head).dw_q is None) == (head >= 2)
        assert of(found, 0, head).kv_head == head // 2


def test_a_bad_x_takes_the_coupling_of_its_layer_only(make_source: Make) -> None:
    clean = find_heads(make_source(), options())
    source = make_source()
    spoil(source, 0, 1, "x", (4, 4), math.nan)
    found = find_heads(source, options())
    for head in found.heads:
        before = of(clean, head.layer, head.head)
        if head.layer == 0:
            assert head.nonfinite == ("x[1, 4, 4]",)
            assert head.dw_q is None
            assert (head.delta_err, head.output_err, head.ones) == (before.delta_err, before.output_err, before.ones)
        else:
            assert_same_or_family(head, before)


def test_bad_weights_of_one_head_are_named_by_position(make_source: Make) -> None:
    clean = find_heads(make_source(), options())
    source = make_source()
    source.layer_weights[0].w_q[1, 2, 3] = math.nan
    found = find_heads(source, options())
    bad = of(found, 0, 1)
    assert bad.nonfinite == ("w_q[1, 2, 3]",)
    assert bad.spectrum is not None
    assert math.isnan(bad.spectrum.w_q_spectral_norm)
    assert bad.delta_err == of(clean, 0, 1).delta_err
    for head in found.heads:
        if head is not bad:
            assert_same_or_family(head, of(clean, head.layer, head.head))


def test_many_bad_entries_name_a_few(make_source: Make) -> None:
    source = make_source(groups=(0,) * 12)
    for sequence in range(12):
        spoil(source, 0, sequence, "q", (0, 1, 1), math.nan)
    names = of(find_heads(source, options()), 0, 0).nonfinite
    assert names == tuple(f"q[{sequence}, 0, 1, 1]" for sequence in range(8))


def test_finite_inputs_that_overflow_are_never_called_small(make_source: Make) -> None:
    source = make_source()
    record = source.sequences[1][0]
    q, k = record.q.clone(), record.k.clone()
    q[2], k[2] = 1e30, 1e30
    source.change(0, 1, q=q, k=k)
    whole = find_heads(source, options(reference="fp32"))
    found = of(whole, 0, 2)
    assert not math.isfinite(found.output_err.max_abs)
    assert found.delta_err is not None
    assert not math.isfinite(found.delta_err.sum)
    assert found.nonfinite == ()
    assert found.dw_q is not None
    assert not math.isfinite(found.dw_q.norm)
    figures = dataclasses.asdict(found.dw_q)
    for part in ("defect", "total"):
        assert all(math.isnan(value) for value in figures[part].values())
    for name in ("error_full_relative", "error_defect_relative", "error_total_relative", "flat_share", "coherence"):
        assert math.isnan(figures[name])
    clean = find_heads(make_source(), options(reference="fp32"))
    for head in (0, 1, 3):
        assert_same_or_family(of(whole, 0, head), of(clean, 0, head))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flat_share_is_along_the_mean_of_the_heads_own_real_keys(make_source: Make, kv_heads: int) -> None:
    source = make_source(groups=(0,), kv_heads=kv_heads)
    real = torch.arange(20) > 3
    source.change(0, 0, geometry=Geometry(scale=SIZE_ROOT, key_padding=real, query_padding=real))
    found = find_heads(source, options())
    for layer in range(2):
        record = source.sequences[0][layer]
        dual = dual_pass(record, FA2, "fp64")
        for head in range(4):
            rows = real if layer == 0 else torch.ones(20, dtype=torch.bool)
            mean = record.k[head * kv_heads // 4][rows].double().mean(0)
            gradient = dual.dq.hp[head].T @ record.x.double()
            share = float((mean @ gradient).square().sum() / (mean @ mean) / gradient.square().sum())
            # Gradients are stored in FP32.
            assert of(found, layer, head).dw_q.flat_share_gradient == pytest.approx(share, rel=1e-4)
