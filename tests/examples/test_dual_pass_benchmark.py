"""The benchmark of the fused dual pass: that it runs, tiny, where there is no GPU, and that it tells wrong results."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
MODULES = ("dual_pass", "dual_checks", "dual_counts", "dual_rivals", "dual_table", "gpu_clock")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """The script and its helpers."""
    pytest.importorskip("triton")
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def ran(benchmark: SimpleNamespace) -> SimpleNamespace:
    """One small pass, and what it is compared with."""
    recipe = benchmark.dual_pass.resolve("fa2")
    shape = benchmark.dual_table.Shape(heads=2, tokens=48, size=16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = benchmark.dual_pass.draw(shape, device, recipe, 3, sharp=True)
    forward, counts = benchmark.dual_pass.dual_pass(inputs, recipe)
    true = benchmark.dual_rivals.exact(inputs, weights=True)
    return SimpleNamespace(recipe=recipe, inputs=inputs, forward=forward, counts=counts, true=true)


def wrong(benchmark: SimpleNamespace, ran: SimpleNamespace, forward: Any, counts: Any) -> tuple[str, ...]:
    found = benchmark.dual_checks.check(ran.inputs, ran.recipe, forward, counts, ran.true, [47])
    return found.wrong


def test_a_right_pass_is_right(benchmark: SimpleNamespace, ran: SimpleNamespace) -> None:
    found = benchmark.dual_checks.check(ran.inputs, ran.recipe, ran.forward, ran.counts, ran.true, [0, 47])
    assert found.wrong == ()
    assert 0 < found.rms < 1e-6
    assert found.bias < 5e-7
    assert found.rows == 2 * 2 * 48
    # Rows with several candidates and saturated ones are among them.
    assert (ran.counts.ones_rounded > 1).any()
    assert (ran.counts.top >= 0).any()


def _noise(values: torch.Tensor, size: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return values * (1 + size * torch.randn(values.shape, generator=generator).to(values.device))


def _every(values: torch.Tensor, nth: int, factor: float) -> torch.Tensor:
    changed = values.clone()
    changed.view(-1)[::nth] *= factor
    return changed


#: What is planted in a result, and what must be said of it.
PLANTED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "noise": ("o_hp", lambda x: _noise(x, 3e-6), "rms of O_hp"),
    "drift toward zero": ("o_hp", lambda x: x * (1 - 2e-6), "bias of O_hp"),
    "NaN": ("o_hp", lambda x: _every(x, 7, float("nan")), "rms of O_hp is off by nan"),
    "log-sum-exp": ("lse_hp", lambda x: x + 1e-3, "log-sum-exp is off"),
    "P K": ("carrier", lambda x: x * 1.01, "P K is off"),
    "delta": ("delta_hp", lambda x: x + 0.01, "delta_hp is off"),
    "delta error": ("delta_err", lambda x: x * 1.1 + 1e-3, "delta error is off"),
    "one step of O": ("o_lp", lambda x: _every(x, 12, 1 + 2**-7), "elements of O_lp differ"),
    "two steps of O": ("o_lp", lambda x: _every(x, 150, 1 + 2**-5), "by over one BF16 number"),
    "log-sum-exp of the recipe": ("lse_lp", lambda x: x + 1e-3, "rows differ in the log-sum-exp of the recipe"),
}


@pytest.mark.parametrize(("name", "change", "said"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_error_is_told(
    benchmark: SimpleNamespace,
    ran: SimpleNamespace,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    said: str,
) -> None:
    forward = replace(ran.forward, **{name: change(getattr(ran.forward, name))})
    assert any(said in clause for clause in wrong(benchmark, ran, forward, ran.counts))


@pytest.mark.parametrize("name", ["ones_fp32", "ones_rounded", "near", "shared"])
@pytest.mark.parametrize(("row", "by"), [(0, 1), (0, -1), (47, 1)])
def test_a_count_that_is_off_by_one_is_told(
    benchmark: SimpleNamespace, ran: SimpleNamespace, name: str, row: int, by: int
) -> None:
    changed = getattr(ran.counts, name).clone()
    # The first row sees one key. The maximum of the last one is far above all other products.
    changed[1, row] += by
    said = wrong(benchmark, ran, ran.forward, replace(ran.counts, **{name: changed}))
    assert said == (f"1 of 96 counts {name} are not those of the reference",)


def test_other_bits_of_a_second_run_are_told(benchmark: SimpleNamespace, ran: SimpleNamespace) -> None:
    same = benchmark.dual_checks.not_reproduced
    assert same((ran.forward, ran.counts), (ran.forward, ran.counts)) == []
    other = replace(ran.forward, o_hp=_every(ran.forward.o_hp, 1000, 1 + 2**-23))
    assert same((ran.forward, ran.counts), (other, ran.counts)) == ["o_hp differs between two runs"]


def test_float64_in_chunks_is_attention(
    benchmark: SimpleNamespace, ran: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's own attention in float64; 1e-13 is some hundred roundings of it."""
    monkeypatch.setattr(benchmark.dual_rivals, "_FP64_ROWS", 20)
    monkeypatch.setattr(benchmark.dual_rivals, "_FP64_ELEMENTS", 20 * 48)
    q, k, v, do = (t.double() for t in (ran.inputs.q, ran.inputs.k, ran.inputs.v, ran.inputs.do))
    found = benchmark.dual_rivals.exact(ran.inputs, 2, weights=True)

    def attention(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, values, is_causal=True, scale=ran.inputs.scale)

    close = {"rtol": 0.0, "atol": 1e-13 * 48}
    torch.testing.assert_close(found.o, attention(v), **close)
    torch.testing.assert_close(found.carrier, attention(k), **close)
    torch.testing.assert_close(found.o_weight, attention(v.abs()), **close)
    torch.testing.assert_close(found.carrier_weight, attention(k.abs()), **close)
    torch.testing.assert_close(found.delta, (do * attention(v)).sum(-1), **close)
    scores = (q @ k.transpose(1, 2) * ran.inputs.scale).masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found.lse, torch.log(torch.exp(scores - 99.0).sum(-1)) + 99.0, rtol=1e-12, atol=1e-12)


def test_the_eager_pair_is_a_pair(
    benchmark: SimpleNamespace, ran: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark.dual_rivals, "_EAGER_ELEMENTS", 1)
    o_hp, delta_err = benchmark.dual_rivals.eager_pair().call(ran.inputs)
    # FP32 sums of 48 products, and of 16 for the scores, which reach 100.
    torch.testing.assert_close(o_hp.double(), ran.true.o, rtol=0.0, atol=1e-4)
    # The errors of a BF16 attention: a few roundings of 2^-9 of what delta adds up, and more than none.
    relative = delta_err.double().abs() / (ran.inputs.do.double().abs() * ran.true.o_weight).sum(-1)
    assert 1e-4 < relative.mean() < 2.0**-7


def test_rivals_that_compute_something_else_are_told(benchmark: SimpleNamespace, ran: SimpleNamespace) -> None:
    script = benchmark.dual_pass
    errors = script.rival_errors(ran.inputs, {script.FLASH: benchmark.dual_rivals.flash_forward(),
                                              script.EAGER: script.eager_pair(), script.FP64: script.chunked_fp64(),
                                              script.TRAINING: script.flash_forward_backward()})  # fmt: skip
    assert set(errors) == {script.FLASH, script.EAGER, script.FP64}
    assert list(script.far_rivals(errors)) == []
    assert len(list(script.far_rivals({script.FLASH: 0.02, script.EAGER: 2e-4, script.FP64: float("nan")}))) == 3


def test_shapes(benchmark: SimpleNamespace) -> None:
    script, shape = benchmark.dual_pass, benchmark.dual_table.Shape
    parsed = script.parse_shapes("96x4096x64,1x2x3")
    assert parsed == [shape(heads=96, tokens=4096, size=64), shape(heads=1, tokens=2, size=3)]
    for text in ("96x4096", "1x2x3x4", "axbxc", ""):
        with pytest.raises(Exception, match="HEADSxTOKENSxSIZE"):
            script.parse_shapes(text)
    sweep = script.sweep_shapes()
    assert {(s.tokens, s.size) for s in sweep} == {(2**n, d) for n in range(9, 16) for d in (64, 128)}
    assert all(s.heads % 16 == 0 for s in sweep)
    rows = {64: 96 * 4096, 128: 32 * 8192}
    assert all(2 / 3 <= s.heads * s.tokens / rows[s.size] <= 2 for s in sweep)
    # 2 products of 2 x 2 x 3 numbers, of which 3 pairs are visible, in each of 4 heads: 2 x 2 x 3 x 3 x 4.
    assert benchmark.dual_table.flops(shape(heads=4, tokens=2, size=3), 2) == 144


def test_a_wrong_pass_is_not_timed(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark.dual_pass
    right = script.count_and_anchor

    def planted(inputs: Any, recipe: Any, forward: Any, **options: Any) -> Any:
        counts = right(inputs, recipe, forward, **options)
        forward.o_hp.mul_(1 - 1e-5)
        return counts

    monkeypatch.setattr(script, "count_and_anchor", planted)
    monkeypatch.setattr(script, "compile_all", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["dual_pass.py", "--quick", "--shapes", "1x32x16", "--recipes", "fa2"])
    assert script.main() == 1
    done = capsys.readouterr()
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert done.err.startswith("nothing is reported: 1 x 32 x 16 sharp, fa2: rms of O_hp is off by 8")


def test_without_a_gpu_it_says_so(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["dual_pass.py"])
    assert benchmark.dual_pass.main() == 1
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_tiny_on_a_cpu(run_python: Callable[..., Any], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels run natively here")
    script = f"import sys, runpy; sys.path.insert(0, {str(FOLDER)!r}); sys.argv[0] = 'dual_pass.py'; " \
        f"runpy.run_path({str(FOLDER / 'dual_pass.py')!r}, run_name='__main__')"  # fmt: skip
    given = ["--quick", "--shapes", "1x32x16", "--recipes", "fa2", "--json", tmp_path / "times.json"]
    done = run_python(["-c", script, *given], env={"TRITON_INTERPRET": "1"})
    assert done.stderr == ""
    assert done.exit_code == 0
    assert re.search(r"^1 x 32 x 16: SDPA flash forward 1 \(", done.stdout, flags=re.M)
    assert re.search(r"^  fa2 +\d+\.\d\dx +\d+\.\d\dx", done.stdout, flags=re.M)
    assert re.search(r"fa2: O_hp rms \d\.\de-07", done.stdout)
    assert (tmp_path / "times.json").read_text().startswith("{")
