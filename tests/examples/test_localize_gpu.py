"""The benchmark of localize on a GPU: that it runs, tiny, where there is none, and that it tells differences apart."""

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.attention.backend import REFERENCE
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import SourceShape
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
LAYERS, HEADS, TOKENS, SIZE, WIDTH, SEQUENCES = 2, 2, 48, 16, 24, 3


@pytest.fixture(scope="module")
def alike() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bf16forensics_test_found_alike", FOLDER / "found_alike.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def held(alike: ModuleType) -> Any:
    """Records of random BF16 tensors, with keys that repeat, so that rows have several maxima."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float()

    def record(sequence: int, layer: int) -> AttentionRecord:
        k = draw(HEADS, TOKENS, SIZE)
        k[:, 1::3] = k[:, 0:1]
        return AttentionRecord(
            layer=layer, sequence=sequence, step=None, storage="bf16", q=draw(HEADS, TOKENS, SIZE), k=k,
            v=draw(HEADS, TOKENS, SIZE), do=draw(HEADS, TOKENS, SIZE), x=draw(TOKENS, WIDTH),
            geometry=Geometry(scale=SIZE**-0.5),
        )  # fmt: skip

    return alike.HeldSource(
        shape=SourceShape(
            num_layers=LAYERS, num_heads=HEADS, num_kv_heads=HEADS, head_size=SIZE, width=WIDTH, num_queries=TOKENS,
            steps=(None,) * SEQUENCES, groups=(0,) * SEQUENCES, step_sequences=SEQUENCES,
        ),
        held=tuple(tuple(record(s, layer) for layer in (1, 0)) for s in range(SEQUENCES)),
        projections=tuple(
            LayerWeights(layer=layer, w_q=draw(HEADS, SIZE, WIDTH), w_k=draw(HEADS, SIZE, WIDTH)) for layer in range(2)
        ),
        losses=(1.0, 2.0, 3.0),
    )  # fmt: skip


@pytest.mark.slow
def test_it_runs_tiny_on_a_cpu(run_python: Callable[..., Any]) -> None:
    sizes = {"layers": 1, "heads": 2, "width": 16, "tokens": 24, "vocabulary": 31, "sequences": 2, "repeats": 1}
    given = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    # -P keeps the script's own folder off the path, where its helpers lie.
    script = f"import sys, runpy; sys.path.insert(0, {str(FOLDER)!r}); sys.argv[0] = 'localize_gpu.py'; " \
        f"runpy.run_path({str(FOLDER / 'localize_gpu.py')!r}, run_name='__main__')"  # fmt: skip
    done = run_python(["-c", script, "--device", "cpu", "--backend", "reference", *given])
    assert done.stderr == ""
    assert done.exit_code == 0
    assert re.search(r"localize, capture to evidence: \d+\.\d\dx", done.stdout)
    assert "same records on the CPU" in done.stdout
    assert "capture " in done.stdout.splitlines()[-1]
    assert "dual pass " in done.stdout.splitlines()[-1]


def test_the_same_run_agrees_and_another_recipe_does_not(alike: ModuleType, held: Any) -> None:
    fa2, again, paper = (alike.analyse(held, resolve(name), REFERENCE, threads=1) for name in ("fa2", "fa2", "paper"))
    said, wrong = alike.compare(held, fa2, again)
    assert wrong == []
    assert len(said) == 3
    assert any("standard errors apart" in line for line in alike.compare(held, fa2, paper)[1])


def test_a_count_that_differs_needs_close_keys(alike: ModuleType, held: Any) -> None:
    """The budget is counted independently: keys by their float64 gap to the row's maximum."""
    done = alike.analyse(held, resolve("fa2"), REFERENCE, threads=1)
    budget = alike.close_keys(held, 1, resolve("fa2"))
    expected = dict.fromkeys(alike.THRESHOLDS, 0)
    for records in held.held:
        record = records[0]
        q, k = record.q[1].double(), record.k[1].double()
        for query in range(TOKENS):
            scores = [float(q[query] @ k[key]) * SIZE**-0.5 for key in range(query + 1)]
            gaps = [score - max(scores) for score in scores]
            gaps.remove(0.0)
            for name, threshold in alike.THRESHOLDS.items():
                expected[name] += sum(abs(gap - threshold) <= alike.SCORE_ERROR for gap in gaps)
    assert {name: int(by_head[1]) for name, by_head in budget.items()} == expected
    assert expected["fp32"] > 0

    def moved(by: int) -> Any:
        head = done.result.heads[3]
        ones = replace(head.ones, fp32_exact=head.ones.fp32_exact + by)
        heads = (*done.result.heads[:3], replace(head, ones=ones))
        return replace(done, result=replace(done.result, heads=heads))

    said, wrong = alike.compare(held, done, moved(expected["fp32"]))
    assert wrong == []
    assert f"but for {expected['fp32']} keys" in said[1]
    _, wrong = alike.compare(held, done, moved(expected["fp32"] + 1))
    assert [line.split(":")[0] for line in wrong] == ["L1.H1"]


def test_a_stored_score_near_a_halfway_point_is_close(alike: ModuleType, held: Any) -> None:
    """One product of a row lies at the point halfway between two BF16 scores, the larger of which is the maximum."""
    record = held.held[0][0]
    q, k = torch.zeros_like(record.q), torch.zeros_like(record.k)
    q[..., 0] = 1.0
    # 4 and 4 + 2^-6 are scores that BF16 tells apart (step 2^-5: the latter is halfway and goes to the even one).
    for at, key in ((0, 4.0 + 2.0**-5), (1, 4.0 + 2.0**-6)):
        k[:, at, 0] = key
    k[:, 2:, 0] = -4.0
    moved = replace(held, held=((replace(record, q=q, k=k),),))
    close = alike.close_keys(moved, record.layer, resolve("paper"))
    apart = alike.close_keys(moved, record.layer, resolve("fa2"))
    # Every query but the first sees both keys.
    assert {name: set(keys.tolist()) for name, keys in close.items()} == {name: {TOKENS - 1} for name in close}
    assert {name: set(keys.tolist()) for name, keys in apart.items()} == {name: {0} for name in apart}


def test_another_sign_and_another_flagged_head_are_told(alike: ModuleType, held: Any) -> None:
    done = alike.analyse(held, resolve("fa2"), REFERENCE, threads=1)
    first = done.result.heads[0]
    clear = replace(first.delta_err, clustered=replace(first.delta_err.clustered, t=-9.0))
    turned = replace(clear, mean=-clear.mean, standard_error=1.0)

    def with_head(head: Any) -> Any:
        return replace(done, result=replace(done.result, heads=(head, *done.result.heads[1:])))

    _, wrong = alike.compare(
        held, with_head(replace(first, delta_err=clear)), with_head(replace(first, delta_err=turned))
    )
    assert [line.split(",")[0] for line in wrong] == ["L0.H0"]
    assert "the sign differs" in wrong[0]
    verdicts = (replace(done.judgement.heads[0], verdict="compounding bias"), *done.judgement.heads[1:])
    _, wrong = alike.compare(held, done, replace(done, judgement=replace(done.judgement, heads=verdicts)))
    assert wrong == ["flagged heads differ: none against L0.H0"]


def test_saved_records_are_the_same(alike: ModuleType, held: Any, tmp_path: Path) -> None:
    alike.save(held, tmp_path / "records.safetensors")
    again = alike.load(tmp_path / "records.safetensors", held)
    assert again.losses == held.losses
    for mine, wanted in zip(again.held, held.held, strict=True):
        for a, b in zip(mine, wanted, strict=True):
            assert (a.layer, a.sequence, a.geometry) == (b.layer, b.sequence, b.geometry)
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("q", "k", "v", "do", "x"))
