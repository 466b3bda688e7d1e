"""`bf16forensics localize` as scripts and people meet it."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bf16forensics.investigate import localize as investigation
from bf16forensics.investigate.localize import SequencesDone

Run = Callable[..., Any]

LAYERS, HEADS, WIDTH, TOKENS, VOCABULARY = 2, 4, 16, 12, 23
LINES, PER_LINE = 9, 2


def state(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    built = {"transformer.wte.weight": draw(VOCABULARY, WIDTH), "transformer.wpe.weight": draw(TOKENS, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}."
        built |= {
            f"{prefix}ln_1.weight": torch.ones(WIDTH),
            f"{prefix}attn.c_attn.weight": draw(3 * WIDTH, WIDTH),
            f"{prefix}attn.c_proj.weight": draw(WIDTH, WIDTH),
            f"{prefix}ln_2.weight": torch.ones(WIDTH),
            f"{prefix}mlp.c_fc.weight": draw(4 * WIDTH, WIDTH),
            f"{prefix}mlp.c_proj.weight": draw(WIDTH, 4 * WIDTH),
        }
    built["transformer.ln_f.weight"] = torch.ones(WIDTH)
    built["lm_head.weight"] = built["transformer.wte.weight"]
    return built


def save_checkpoint(path: Path, weights: dict[str, torch.Tensor], dropout: float = 0.0) -> Path:
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": TOKENS, "vocab_size": VOCABULARY}
    torch.save({"model": weights, "model_args": {**sizes, "bias": False, "dropout": dropout}, "iter_num": 40}, path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> list[object]:
    """Arguments CKPT --batch --indices of a tiny model over nine lines of two sequences."""
    generator = np.random.Generator(np.random.PCG64(1))
    generator.integers(0, VOCABULARY, 400).astype("<u2").tofile(tmp_path / "train.bin")
    starts = generator.integers(0, 380, (LINES, PER_LINE))
    (tmp_path / "indices.txt").write_text("".join(",".join(map(str, line)) + "\n" for line in starts))
    checkpoint = save_checkpoint(tmp_path / "ckpt.pt", state())
    return [checkpoint, "--batch", tmp_path / "train.bin", "--indices", tmp_path / "indices.txt"]


def tensors(seed: int = 2, batch: int = 2, extras: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    built = {name: draw(batch, 4, 10, 8).bfloat16() for name in ("q", "k", "v", "do")}
    return built | ({"x": draw(batch, 10, 12), "w_q": draw(32, 12), "w_k": draw(32, 12)} if extras else {})


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., list[object]]:
    def write(built: dict[str, torch.Tensor] | None = None, name: str = "record.safetensors") -> list[object]:
        save_file(tensors() if built is None else built, tmp_path / name)
        return ["--record", tmp_path / name, "--layout", "bhtd"]

    return write


def strict(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert text.endswith("}\n")
    return dict(json.loads(text, parse_constant=refuse))


def one_line_error(result: Any, *words: str, code: int = 2) -> None:
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


NUMBER = (int, float, str)
SIGNED = {
    "sum": NUMBER,
    "mean": NUMBER,
    "standard_error": NUMBER,
    "z": NUMBER,
    "positive": int,
    "negative": int,
    "zero": int,
    "clustered": dict,
    "robust": dict,
}
HEAD = {
    "layer": int,
    "head": int,
    "delta_err": dict,
    "delta_defect": dict,
    "output_err": dict,
    "ones": dict,
    "rows": int,
    "rows_repeated_max": int,
    "rows_fully_masked": int,
    "w_q_spectral_norm": NUMBER,
    "w_k_spectral_norm": NUMBER,
    "dw_q": dict,
}
DW_Q = (
    "norm error_full_relative error_defect_relative error_total_relative sequences n_effective rho bias bias_upper "
    "minimum_detectable p_adjusted functional_relative flat_share coherence"
).split()
TOP = {
    "schema_version": int,
    "tool": dict,
    "command": list,
    "environment": dict,
    "inputs": dict,
    "recipe": dict,
    "reference": str,
    "verdict": str,
    "findings": list,
    "heads": list,
    "unused_tensors": list,
}


def assert_fields(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, kind in expected.items():
        assert isinstance(found[name], kind), name
        assert not (kind is NUMBER and isinstance(found[name], str) and found[name] not in ("nan", "inf", "-inf")), name


def test_the_contract_of_the_document(run_cli: Run, model: list[object]) -> None:
    result = run_cli(["localize", *model, "--lines", "0:2", "--reference", "fp64", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    document = strict(result.stdout)
    assert list(document)[: len(TOP)] == list(TOP)
    assert_fields(document, TOP)
    assert document["recipe"]["name"] == "fa2"
    assert document["reference"] == "fp64"
    assert document["verdict"] == "cannot judge"
    assert document["command"][:2] == ["bf16forensics", "localize"]
    assert [item["role"] for item in document["inputs"]["files"]] == ["checkpoint", "tokens", "indices"]
    assert all(re.fullmatch("[0-9a-f]{64}", item["sha256"]) for item in document["inputs"]["files"])
    assert document["inputs"]["steps"] == [41, 42]
    assert document["inputs"]["activations"] == "amp-bf16"
    assert [(h["layer"], h["head"]) for h in document["heads"]] == [(a, b) for a in range(LAYERS) for b in range(HEADS)]
    for head in document["heads"]:
        assert_fields(head, HEAD)
        for name in ("delta_err", "delta_defect"):
            assert_fields(head[name], SIGNED)
            assert head[name]["positive"] + head[name]["negative"] + head[name]["zero"] == head["rows"]
            assert head[name]["clustered"]["sequences"] == 4
        assert_fields(head["output_err"], {"mean_ulp": NUMBER, "max_abs": NUMBER, "token": int, "feature": int})
        assert_fields(head["ones"], {"fp32_exact": int, "rounded": int, "shared_maximum": int})
        assert_fields(head["dw_q"], dict.fromkeys(DW_Q, NUMBER))
        assert head["rows"] == 4 * TOKENS
        assert head["dw_q"]["sequences"] == 4
        assert [step["step"] for step in head["dw_q"]["steps"]] == [41, 42]
    for finding in document["findings"]:
        assert_fields(finding, {"code": str, "severity": str, "message": str})
        assert re.fullmatch(r"BF[1-9]\d\d", finding["code"])


def test_both_references_say_the_same(run_cli: Run, model: list[object]) -> None:
    args = ["localize", *model, "--lines", "0:2", "--json", "--reference"]
    narrow, wide = (strict(run_cli([*args, name]).stdout) for name in ("fp32", "fp64"))
    assert (narrow["reference"], wide["reference"]) == ("fp32", "fp64")
    assert narrow["verdict"] == wide["verdict"]
    for a, b in zip(narrow["heads"], wide["heads"], strict=True):
        # A rounding error of O is 2^-9 of it, FP32 noise some 2^-22: three to four digits of each figure remain.
        size = abs(b["delta_defect"]["standard_error"]) * b["rows"]
        assert a["delta_defect"]["sum"] == pytest.approx(b["delta_defect"]["sum"], abs=2e-3 * size)
        assert a["dw_q"]["norm"] == pytest.approx(b["dw_q"]["norm"], rel=1e-4)
        assert a["dw_q"]["rho"] == pytest.approx(b["dw_q"]["rho"], rel=1e-2)
        assert a["ones"]["rounded"] == b["ones"]["rounded"]


def test_options_are_frozen(run_cli: Run) -> None:
    text = run_cli(["localize", "--help"], env={"COLUMNS": "200"}).stdout
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text.split("Options:", 1)[-1]))
    assert found - {"--help"} == {
        "--activations",
        "--allow-bin",
        "--backend",
        "--batch",
        "--causal",
        "--device",
        "--dtype",
        "--fail-on",
        "--first-step",
        "--force",
        "--hp-products",
        "--indices",
        "--json",
        "--layout",
        "--lines",
        "--lp-products",
        "--n-head",
        "--no-causal",
        "--observe",
        "--output",
        "--plot",
        "--recipe",
        "--record",
        "--reference",
        "--scale",
        "--sequences",
        "--softcap",
        "--step-sequences",
        "--threads",
        "--top",
        "--until-decided",
        "--window",
    }


def test_help_needs_no_tensor_library(run_python: Run) -> None:
    code = (
        "import sys; from bf16forensics.__main__ import main; main(['localize', '--help']); "
        "sys.exit(bool({'torch', 'triton', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    assert run_python(["-c", code]).exit_code == 0


def test_the_terminal_report_is_bounded_and_goes_to_stdout(run_cli: Run, model: list[object]) -> None:
    result = run_cli(["localize", *model, "--lines", "0:1"])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    for word in ("cannot judge", "fa2", "L0.H", "needs"):
        assert word in result.stdout


@pytest.mark.parametrize("top", [0, 1, 3])
def test_top_limits_the_table(run_cli: Run, model: list[object], top: int) -> None:
    text = run_cli(["localize", *model, "--lines", "0:1", "--top", top]).stdout
    assert len(re.findall(r"(?m)^L\d\.H\d\b", text)) == top


def volatile_apart(text: str) -> dict[str, Any]:
    document = strict(text)
    assert document["environment"].pop("volatile")
    return document


def test_repeated_runs_are_the_same_bytes(run_cli: Run, model: list[object]) -> None:
    args = ["localize", *model, "--lines", "0:3", "--json"]
    first, second = (run_cli(args).stdout for _ in range(2))
    mask = r'"volatile": \{[^}]*\}'
    assert re.sub(mask, "", first) == re.sub(mask, "", second)
    assert len(re.findall(mask, first)) == 1


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math"])
def test_the_number_of_threads_changes_no_figure(run_cli: Run, model: list[object], recipe: str) -> None:
    documents = []
    for threads in (1, 2):
        args = ["localize", *model, "--lines", "0:3", "--recipe", recipe, "--json", "--threads", threads]
        document = volatile_apart(run_cli(args).stdout)
        # What was typed differs.
        assert document.pop("command")[-1] == str(threads)
        document.pop("next_commands")
        for finding in document["findings"]:
            finding.pop("next_command")
        documents.append(json.dumps(document))
    assert documents[0] == documents[1]


def test_triton_gpu_and_library_threads_change_nothing(run_python: Run, run_cli: Run, model: list[object]) -> None:
    args = [str(arg) for arg in ("localize", *model, "--lines", "0:2", "--json")]
    code = (
        f"import sys; sys.modules['triton'] = None; from bf16forensics.__main__ import main; sys.exit(main({args!r}))"
    )
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    result = run_python(["-c", code], env=variables)
    assert (result.exit_code, result.stderr) == (0, "")
    assert volatile_apart(result.stdout) == volatile_apart(run_cli(args).stdout)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_legacy_consoles_get_the_same_report(
    run_cli: Run, model: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str
) -> None:
    args = ["localize", *model, "--lines", "0:1"]
    plain = run_cli(args)
    for extra in ([], ["--json"]):
        path = tmp_path / f"out{len(extra)}"
        with path.open("w", encoding=encoding) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            result = run_cli([*args, *extra])
        assert (result.exit_code, result.stderr) == (plain.exit_code, plain.stderr) == (0, "")
        text = path.read_text(encoding=encoding)
        if extra:
            assert_fields(strict(text), TOP)
        else:
            # The longer names of P-bar and delta can wrap a line or two.
            assert abs(len(text.splitlines()) - len(plain.stdout.splitlines())) <= 2
            assert (
                re.sub(r"\W", "", text.split("VERDICT")[1])[:80]
                == re.sub(r"\W", "", plain.stdout.split("VERDICT")[1])[:80]
            )
            assert "\\u" not in text


def test_a_case_is_written_kept_and_replaced(run_cli: Run, model: list[object], tmp_path: Path) -> None:
    case = tmp_path / "new" / "case"
    args = ["localize", *model, "--lines", "0:1", "-o", case]
    first = run_cli(args)
    assert (first.exit_code, first.stderr) == (0, "")
    # A long path may break across lines.
    assert "case.json" in re.sub(r"\s+", "", first.stdout)
    document = strict((case / "case.json").read_text())
    assert_fields(document, TOP)
    files = sorted(path.name for path in (case / "tensors").iterdir())
    assert len(files) == 4
    assert files == sorted(f"{name}.safetensors" for name in document["ranking"][:4])
    one_line_error(run_cli(args), str(case), "--force")
    again = run_cli([*args, "--force", "--json"])
    assert again.exit_code == 0
    written = (case / "case.json").read_text()
    assert strict(again.stdout) == strict(written)
    assert written.isascii()


def test_a_kept_record_is_a_record(run_cli: Run, model: list[object], tmp_path: Path) -> None:
    case = tmp_path / "case"
    document = strict(run_cli(["localize", *model, "--lines", "0:1", "-o", case, "--json"]).stdout)
    name = document["ranking"][0]
    head = next(item for item in document["heads"] if item["name"] == name)
    again = strict(run_cli(["localize", "--record", case / "tensors" / f"{name}.safetensors", "--json"]).stdout)
    (kept,) = again["heads"]
    for field in ("delta_err", "delta_defect", "output_err", "ones", "rows", "score_abs_max"):
        assert kept[field] == head[field]
    assert kept["w_q_spectral_norm"] == pytest.approx(head["w_q_spectral_norm"], rel=1e-12)
    for field in ("norm", "rho", "error_total_relative", "functional_relative"):
        assert kept["dw_q"][field] == pytest.approx(head["dw_q"][field], rel=1e-4), field


def test_fail_on_chooses_the_exit_code(run_cli: Run, model: list[object]) -> None:
    args = ["localize", *model, "--lines", "0:1", "--json"]
    document = strict(run_cli(args).stdout)
    severities = {finding["severity"] for finding in document["findings"]}
    assert severities == {"note"}
    for level, code in (("note", 1), ("warning", 0), ("error", 0)):
        assert run_cli([*args, "--fail-on", level]).exit_code == code
    one_line_error(run_cli([*args, "--fail-on", "never"]), "--fail-on")


def test_sixteen_sequences_can_be_judged_by_bounds(run_cli: Run, model: list[object]) -> None:
    document = strict(run_cli(["localize", *model, "--json"]).stdout)
    assert document["inputs"]["sequences"] == 18
    for head in document["heads"]:
        assert head["code"] != "BF901"
        assert isinstance(head["dw_q"]["bias_upper"], float)
        assert 0 < head["dw_q"]["p_adjusted"] <= 1


def test_until_decided_stops_or_reads_all_lines(
    run_cli: Run, model: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["localize", *model, "--json", "--until-decided", "--threads", "1"]
    whole = strict(run_cli(args).stdout)
    undecided = any(head["verdict"] == "cannot judge" for head in whole["heads"])
    assert (whole["inputs"]["sequences"] == 18) or not undecided
    from bf16forensics.commands._localize_run import LocalizeRun

    monkeypatch.setattr(LocalizeRun, "_is_decided", lambda self, found: found.sequences >= 6)
    stopped = strict(run_cli(args).stdout)
    assert stopped["inputs"]["sequences"] == 6
    assert stopped["inputs"]["sequences_planned"] == 18
    assert stopped["inputs"]["steps"] == [41, 42, 43]
    assert not stopped["inputs"]["interrupted"]


@pytest.mark.parametrize("as_json", [True, False])
def test_an_interruption_reports_what_was_finished(
    run_cli: Run, model: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    original = investigation.find_heads

    def interrupted(source: Any, options: Any, on_progress: Any, is_decided: Any) -> Any:
        def stop(progress: SequencesDone) -> None:
            on_progress(progress)
            if progress.done == 3:
                raise KeyboardInterrupt

        return original(source, options, stop, is_decided)

    monkeypatch.setattr(investigation, "find_heads", interrupted)
    case = tmp_path / "case"
    result = run_cli(["localize", *model, "-o", case, *(["--json"] if as_json else [])])
    assert result.exit_code == 130
    assert result.stderr.count("\n") == 1
    assert "3 of 18" in result.stderr
    document = strict((case / "case.json").read_text())
    assert document["inputs"]["interrupted"] is True
    assert document["inputs"]["sequences"] == 3
    if as_json:
        assert strict(result.stdout) == document
    else:
        assert "stopped" in result.stdout


def test_dropout_is_forced_to_0_and_said(run_cli: Run, model: list[object], tmp_path: Path) -> None:
    plain = strict(run_cli(["localize", *model, "--lines", "0:1", "--json"]).stdout)
    save_checkpoint(tmp_path / "ckpt.pt", state(), dropout=0.1)
    dropped = strict(run_cli(["localize", *model, "--lines", "0:1", "--json"]).stdout)
    assert any("dropout 0.1" in note for note in dropped["inputs"]["notes"])
    assert dropped["heads"] == plain["heads"]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_wrapped_names_give_the_same_report(run_cli: Run, model: list[object], tmp_path: Path, prefix: str) -> None:
    plain = strict(run_cli(["localize", *model, "--lines", "0:1", "--json"]).stdout)
    save_checkpoint(tmp_path / "ckpt.pt", {prefix + name: value for name, value in state().items()})
    wrapped = strict(run_cli(["localize", *model, "--lines", "0:1", "--json"]).stdout)
    assert wrapped["heads"] == plain["heads"]
    assert wrapped["verdict"] == plain["verdict"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--lines", "5"], ("--lines", "0:8")),
        (["--lines", "a:b"], ("--lines",)),
        (["--lines", "1:1"], ("selects nothing",)),
        (["--lines", "0:10"], ("9 lines",)),
        (["--lines=-1:2"], ("--lines",)),
        (["--sequences", "3"], ("line 1 (index 0)", "2 sequences")),
        (["--sequences", "0"], ("--sequences",)),
        (["--threads", "0"], ("--threads",)),
        (["--recipe", "fa9"], ("fa9", "fa2")),
        (["--recipe", "fa2+o=int8"], ("int8",)),
        (["--reference", "bf16"], ("--reference",)),
        (["--activations", "bf16"], ("--activations",)),
        (["--n-head", "3"], ("n_head",)),
        (["--window", "4"], ("--window", "--record")),
        (["--no-causal"], ("--causal", "--record")),
        (["--layout", "bhtd"], ("--layout", "--record")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_of_a_model(run_cli: Run, model: list[object], extra: list[str], words: tuple[str, ...]) -> None:
    one_line_error(run_cli(["localize", *model, *extra, "--json"]), *words)


def test_what_is_missing_or_too_much_is_said(
    run_cli: Run, model: list[object], record: Callable[..., list[object]], tmp_path: Path
) -> None:
    one_line_error(run_cli(["localize"]), "CKPT", "--record")
    one_line_error(run_cli(["localize", model[0]]), "--batch")
    one_line_error(run_cli(["localize", *model[:3], "--lines", "0:1"]), "--indices")
    one_line_error(run_cli(["localize", *model, *record()]), "not both")
    one_line_error(run_cli(["localize", tmp_path / "nope.pt", *model[1:]]), "nope.pt")
    one_line_error(run_cli(["localize", *record()[:2]]), "--layout")
    one_line_error(run_cli(["localize", *record(), "--batch", "b"]), "--batch", "checkpoint")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"hello, this is no checkpoint\n", "checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "LFS"),
    ],
    ids=["empty", "text", "pointer"],
)
def test_files_that_are_no_checkpoint(run_cli: Run, model: list[object], content: bytes, word: str) -> None:
    path = Path(str(model[0]))
    path.write_bytes(content)
    one_line_error(run_cli(["localize", *model, "--json"]), str(path), word)


def test_a_truncated_checkpoint(run_cli: Run, model: list[object]) -> None:
    path = Path(str(model[0]))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    one_line_error(run_cli(["localize", *model, "--json"]), str(path), "truncated")


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ("0,5\n387\n", None),
        ("0,5\n388\n", ("line 2 (index 1)", "388", "387")),
        ("0,5\n400\n", ("line 2 (index 1)", "400", "387")),
        ("-1\n", ("negative",)),
        ("1,x\n", ("'x'",)),
    ],
)
def test_windows_past_the_end(
    run_cli: Run, model: list[object], tmp_path: Path, starts: str, words: tuple[str, ...] | None
) -> None:
    (tmp_path / "indices.txt").write_text(starts)
    result = run_cli(["localize", *model, "--json"])
    if words is None:
        assert result.exit_code == 0
    else:
        one_line_error(result, "indices.txt", *words)


def test_a_token_outside_the_vocabulary(run_cli: Run, model: list[object], tmp_path: Path) -> None:
    tokens = np.fromfile(tmp_path / "train.bin", "<u2")
    tokens[77] = 60000
    tokens.tofile(tmp_path / "train.bin")
    one_line_error(run_cli(["localize", *model, "--json"]), "60000", "offset 77", str(VOCABULARY))


def test_a_record_needs_no_model(run_cli: Run, record: Callable[..., list[object]]) -> None:
    result = run_cli(["localize", *record(), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    document = strict(result.stdout)
    assert document["inputs"]["kind"] == "record"
    assert document["inputs"]["activations"] is None
    assert document["inputs"]["sequences"] == 2
    assert [head["head"] for head in document["heads"]] == [0, 1, 2, 3]
    for head in document["heads"]:
        assert_fields(head, HEAD)


def test_a_record_without_x_or_weights_has_no_dw_q(run_cli: Run, record: Callable[..., list[object]]) -> None:
    for left_out in (("x",), ("w_q",), ("x", "w_q", "w_k")):
        built = {name: value for name, value in tensors().items() if name not in left_out}
        document = strict(run_cli(["localize", *record(built), "--json"]).stdout)
        for head in document["heads"]:
            assert head["dw_q"] is None
            assert isinstance(head["delta_err"]["sum"], float)
            assert isinstance(head["w_q_spectral_norm"], float) == ("w_q" not in left_out or "w_q" in built)


def test_options_of_a_record_are_applied(run_cli: Run, record: Callable[..., list[object]]) -> None:
    def pairs(*extra: object) -> int:
        return int(strict(run_cli(["localize", *record(), "--json", *extra]).stdout)["heads"][0]["pairs"])

    assert pairs() == pairs("--causal") == 2 * 55
    assert pairs("--no-causal") == 2 * 100
    assert pairs("--window", "3") == 2 * (1 + 2 + 3 * 8)
    assert pairs("--sequences", "1") == 55
    document = strict(run_cli(["localize", *record(), "--json", "--scale", "0.5", "--softcap", "2"]).stdout)
    assert (document["inputs"]["scale"], document["inputs"]["softcap"]) == (0.5, 2.0)
    assert all(head["score_abs_max"] <= 2.0 for head in document["heads"])
    for extra in (["--scale", "0"], ["--window", "0"], ["--softcap", "-1"], ["--sequences", "3"]):
        one_line_error(run_cli(["localize", *record(), *extra]))


def test_the_layout_is_never_guessed(run_cli: Run, tmp_path: Path) -> None:
    built = {name: torch.zeros(1, 8, 4, 16).bfloat16() for name in ("q", "k", "v", "do")}
    save_file(built, tmp_path / "r.safetensors")
    ones = {}
    for layout in ("bhtd", "bthd"):
        result = run_cli(["localize", "--record", tmp_path / "r.safetensors", "--layout", layout, "--json"])
        document = strict(result.stdout)
        ones[layout] = sum(head["ones"]["rounded"] for head in document["heads"])
        assert layout in document["inputs"]["shape"]
    assert ones == {"bhtd": 80, "bthd": 144}


@pytest.mark.parametrize(
    ("name", "at", "value", "shown"),
    [
        ("k", (1, 2, 3, 4), math.nan, "k[1, 2, 3, 4]"),
        ("k", (0, 2, 9, 4), math.nan, "k[0, 2, 9, 4]"),
        ("v", (0, 1, 3, 4), math.inf, "v[0, 1, 3, 4]"),
        ("do", (1, 0, 3, 4), math.nan, "do[1, 0, 3, 4]"),
    ],
)
def test_a_non_finite_tensor_is_a_finding_and_exit_2(
    run_cli: Run,
    record: Callable[..., list[object]],
    name: str,
    at: tuple[int, ...],
    value: float,
    shown: str,
) -> None:
    built = tensors()
    clean = strict(run_cli(["localize", *record(), "--json"]).stdout)
    built[name][at] = value
    result = run_cli(["localize", *record(built), "--json"])
    assert result.exit_code == 2
    document = strict(result.stdout)
    finding = next(item for item in document["findings"] if item["code"] == "BF401")
    assert shown in finding["message"]
    bad = document["heads"][at[1]]
    assert bad["nonfinite"] == [shown]
    assert bad["verdict"] == "cannot judge"
    assert bad["delta_err"]["sum"] == "nan"
    assert bad["output_err"]["max_abs"] != 0
    assert (bad["output_err"]["max_abs"] == "nan") == (name != "do")
    for head in range(4):
        if head != at[1]:
            for field in ("delta_err", "delta_defect", "output_err", "ones"):
                assert document["heads"][head][field] == clean["heads"][head][field]
    text = run_cli(["localize", *record(built)])
    assert text.exit_code == 2
    assert shown in text.stdout


def test_a_key_that_no_query_sees_is_reported_without_harm(run_cli: Run, record: Callable[..., list[object]]) -> None:
    built = tensors() | {"key_padding": torch.ones(2, 10, dtype=torch.bool)}
    built["key_padding"][:, 4] = False
    built["k"][0, 1, 4, 0] = math.nan
    result = run_cli(["localize", *record(built), "--json"])
    assert result.exit_code == 2
    document = strict(result.stdout)
    assert document["heads"][1]["nonfinite"] == ["k[0, 1, 4, 0]"]
    assert isinstance(document["heads"][0]["delta_err"]["sum"], float)


def test_a_broken_query_projection_of_one_head_of_four(run_cli: Run, model: list[object], tmp_path: Path) -> None:
    clean = strict(run_cli(["localize", *model, "--lines", "0:1", "--json"]).stdout)
    weights = state()
    weights["transformer.h.0.attn.c_attn.weight"][1 * 4 + 2, 5] = math.nan
    save_checkpoint(tmp_path / "ckpt.pt", weights)
    result = run_cli(["localize", *model, "--lines", "0:1", "--json"])
    assert result.exit_code == 2
    document = strict(result.stdout)
    bad = document["heads"][1]
    assert "w_q[1, 2, 5]" in bad["nonfinite"]
    assert bad["w_q_spectral_norm"] == "nan"
    for index, head in enumerate(document["heads"]):
        if index != 1:
            assert head["w_q_spectral_norm"] == clean["heads"][index]["w_q_spectral_norm"]
    # The forward pass of the other heads of the layer was computed before anything was spoilt.
    for index in (0, 2, 3):
        assert document["heads"][index]["output_err"]["max_abs"] == clean["heads"][index]["output_err"]["max_abs"]
        assert document["heads"][index]["verdict"] == "cannot judge"
    assert document["inputs"]["loss"] == "nan"


def test_finite_tensors_that_overflow_are_not_judged(run_cli: Run, record: Callable[..., list[object]]) -> None:
    built = tensors()
    built["q"][:, 2] = 1e30
    built["k"][:, 2] = 1e30
    result = run_cli(["localize", *record(built), "--json"])
    assert result.stderr == ""
    bad = strict(result.stdout)["heads"][2]
    assert bad["verdict"] == "cannot judge"
    assert bad["output_err"]["max_abs"] == "nan"
    assert "unknown" not in bad["reason"]


def test_all_kept_tensors_are_the_records(run_cli: Run, record: Callable[..., list[object]], tmp_path: Path) -> None:
    built = tensors()
    run_cli(["localize", *record(built), "-o", tmp_path / "case"])
    kept = load_file(tmp_path / "case" / "tensors" / "L0.H3.safetensors")
    for name in ("q", "k", "v", "do"):
        assert torch.equal(kept[name][:, 0], built[name][:, 3])
    assert torch.equal(kept["x"], built["x"])
    assert torch.equal(kept["w_q"], built["w_q"][24:32])
