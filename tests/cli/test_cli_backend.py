"""`localize --backend`: what is chosen, what the report says of it, and that both backends find the same."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bf16forensics.attention.kernel_rounding import INTERPRET_VARIABLE

Run = Callable[..., Any]

HEADS, TOKENS, SIZE, SEQUENCES = 2, 20, 16, 2


@pytest.fixture
def record(tmp_path: Path) -> list[object]:
    """A record with its projections; head 1 repeats keys, so that its rows have several maxima."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    built = {name: draw(SEQUENCES, HEADS, TOKENS, SIZE).bfloat16() for name in ("q", "k", "v", "do")}
    built["q"][:, 1] *= 4
    built["k"][:, 1, 1::2] = built["k"][:, 1, ::2]
    built |= {"x": draw(SEQUENCES, TOKENS, 24), "w_q": draw(HEADS * SIZE, 24), "w_k": draw(HEADS * SIZE, 24)}
    save_file(built, tmp_path / "record.safetensors")
    return ["--record", tmp_path / "record.safetensors", "--layout", "bhtd"]


def document(run_cli: Run, *args: object) -> dict[str, Any]:
    done = run_cli(["localize", *args, "--json"])
    assert done.stderr == ""
    assert done.exit_code in (0, 1)
    return dict(json.loads(done.stdout))


def one_line_error(done: Any, *words: str) -> None:
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("recipe", ["fa2", pytest.param("paper", marks=pytest.mark.slow)])
def test_both_backends_find_the_same(run_cli: Run, record: list[object], recipe: str) -> None:
    pytest.importorskip("triton")
    args = (*record, "--recipe", recipe, "--backend")
    fused, reference = document(run_cli, *args, "triton"), document(run_cli, *args, "reference")
    assert (fused["backend"]["name"], reference["backend"]["name"]) == ("triton", "reference")
    assert fused["backend"]["hp_products"] == "split"
    assert fused["backend"]["lp_products"] == "shared"
    assert fused["backend"]["reference_layers"] == []
    assert fused["environment"]["device"] == fused["backend"]["device"]
    assert fused["ranking"] == reference["ranking"]
    assert fused["verdict"] == reference["verdict"]
    counted = ("rows", "pairs", "ones", "rows_repeated_max", "rows_near_max", "most_ones", "rows_fully_masked")
    for ours, theirs in zip(fused["heads"], reference["heads"], strict=True):
        assert {name: ours[name] for name in counted} == {name: theirs[name] for name in counted}
        assert ours["verdict"] == theirs["verdict"]
        # A BF16 rounding of O is 2^-9 of it and the fused pass of high precision 2^-17, so that two digits stay.
        size = abs(theirs["delta_defect"]["standard_error"]) * theirs["rows"]
        assert ours["delta_defect"]["sum"] == pytest.approx(theirs["delta_defect"]["sum"], abs=2e-2 * size)
        assert ours["dw_q"]["norm"] == pytest.approx(theirs["dw_q"]["norm"], rel=1e-4)
        assert ours["dw_q"]["rho"] == pytest.approx(theirs["dw_q"]["rho"], rel=2e-2)
        assert ours["sink_share"] == pytest.approx(theirs["sink_share"], rel=1e-5)
        assert ours["score_abs_max"] == pytest.approx(theirs["score_abs_max"], rel=1e-6)
    assert any(head["rows_repeated_max"] for head in fused["heads"])


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_bytes(run_cli: Run, record: list[object]) -> None:
    pytest.importorskip("triton")
    first, second = (document(run_cli, *record, "--backend", "triton", "--observe") for _ in range(2))
    for found in (first, second):
        found["environment"].pop("volatile")
    assert json.dumps(first) == json.dumps(second)


@pytest.mark.parametrize("args", [[], ["--backend", "auto"], ["--reference", "fp64"]], ids=" ".join)
def test_without_a_gpu_the_reference_runs_and_the_report_says_why(
    run_cli: Run, record: list[object], args: list[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    env = {INTERPRET_VARIABLE: "0"}
    done = run_cli(["localize", *record, *args], env=env)
    assert "\nbackend   reference on cpu (no CUDA device)\n" in done.stdout
    found = json.loads(run_cli(["localize", *record, *args, "--json"], env=env).stdout)
    assert found["backend"] == {
        "name": "reference",
        "device": "cpu",
        "why": "no CUDA device",
        "hp_products": None,
        "lp_products": None,
        "reference_layers": [],
    }
    assert found["environment"]["device"] == "cpu"


def test_the_report_names_the_fused_pass(run_cli: Run, record: list[object]) -> None:
    pytest.importorskip("triton")
    done = run_cli(["localize", *record, "--backend", "triton", "--hp-products", "ieee", "--lp-products", "own"])
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("backend   triton on "))
    assert "(asked for); high-precision products ieee, the recipe's own" in line


def test_triton_that_cannot_run_is_one_line(
    run_cli: Run, record: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["localize", *record, "--backend", "triton"]
    one_line_error(run_cli([*args, "--recipe", "fa4"]), "--backend triton: exponential=exp2-cubic")
    one_line_error(run_cli([*args, "--reference", "fp64"]), "no --reference fp64; it takes fp32")
    one_line_error(run_cli([*args, "--softcap", "30"]), "layer 0", "softcap 30", "use --backend auto or reference")
    if not torch.cuda.is_available():
        one_line_error(run_cli(args, env={INTERPRET_VARIABLE: "0"}), "no CUDA device")
    monkeypatch.setitem(sys.modules, "triton", None)
    one_line_error(run_cli(args), "Triton is not installed; install bf16forensics[gpu]")


def test_a_choice_of_the_fused_pass_is_not_dropped(run_cli: Run, record: list[object]) -> None:
    for option, value in (("--hp-products", "ieee"), ("--lp-products", "own")):
        done = run_cli(["localize", *record, "--backend", "reference", option, value])
        one_line_error(done, f"{option} {value} is a choice of the fused pass")


#: As on a machine without Triton: no finder finds it.
WITHOUT_TRITON = """
import importlib.util
import sys

class Finder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, *rest)

sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
assert importlib.util.find_spec("triton") is None
from bf16forensics.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "command", ["localize", *(pytest.param(name, marks=pytest.mark.slow) for name in ("trace-head", "doctor"))]
)
def test_commands_work_where_triton_is_not_installed(run_python: Run, record: list[object], command: str) -> None:
    args = {"localize": record, "trace-head": [*record, "--head", 1], "doctor": []}[command]
    done = run_python(["-c", WITHOUT_TRITON, command, *args], env={INTERPRET_VARIABLE: "0"})
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_layer_that_the_fused_pass_lacks_is_named(
    run_cli: Run, record: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under "auto": such a layer goes through the reference, and the report says which one, and why."""
    pytest.importorskip("triton")
    from bf16forensics.attention import backend

    chosen = backend.ChosenBackend(
        name="triton", device="cpu (interpreter)", why="made up", hp_products="split", lp_products="shared"
    )
    monkeypatch.setattr(backend, "choose_backend", lambda *args, **options: chosen)
    found = document(run_cli, *record, "--softcap", "30")
    assert found["backend"]["name"] == "triton"
    assert found["backend"]["reference_layers"] == [0]
    assert "computed by the reference: layer 0: the fused pass has no soft-cap (softcap 30)" in found["inputs"]["notes"]
    done = run_cli(["localize", *record, "--softcap", "30"])
    assert "note      computed by the reference: layer 0" in done.stdout
