"""`bf16forensics trace-head` as scripts and people meet it: on the bundled planted model, and on records."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bf16forensics
from bf16forensics.__main__ import main
from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.commands._case_row import trace_row_of_case
from bf16forensics.errors import InputError
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve
from bf16forensics.report.row_trace import read_row_trace

Run = Callable[..., Any]

DEMO = Path(bf16forensics.__file__).parent / "demo"
#: Eight sequences of 64 tokens in two steps; a case keeps the first four of them.
SEQUENCES, KEPT, TOKENS = 8, 4, 64


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the planted checkpoint, its tokens and two lines of its index file."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("planted.pt", "tokens.bin"):
        shutil.copy(DEMO / name, folder / name)
    lines = (DEMO / "indices.txt").read_text().splitlines()[:2]
    (folder / "indices.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def checkpoint(inputs: Path) -> list[object]:
    """Arguments that name the input."""
    return [inputs / "planted.pt", "--batch", inputs / "tokens.bin", "--indices", inputs / "indices.txt"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, checkpoint: list[object]) -> Path:
    """The case of a run against FP32, whose reference a trace takes over; never changed by a test."""
    folder = tmp_path_factory.mktemp("made") / "case"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        assert main(["localize", *map(str, checkpoint), "-o", str(folder)]) in (0, 1)
    return folder


@pytest.fixture
def case(made: Path, tmp_path: Path) -> Path:
    """A copy of the case, for one test to change."""
    return Path(shutil.copytree(made, tmp_path / "case"))


def strict(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert text.endswith("}\n")
    return dict(json.loads(text, parse_constant=refuse))


def one_line_error(result: Any, *words: object) -> None:
    assert result.exit_code == 2, result
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert str(word) in result.stderr


@pytest.fixture
def trace(run_cli: Run) -> Callable[..., dict[str, Any]]:
    """The document of one trace that works."""

    def of(*args: object) -> dict[str, Any]:
        result = run_cli(["trace-head", *args, "--json"])
        assert (result.exit_code, result.stderr) == (0, ""), result.stderr
        return strict(result.stdout)

    return of


def findings(document: dict[str, Any]) -> dict[str, Any]:
    """What was found out, without what the input is called."""
    names = ("head", "tokens", "token", "traced", "cumulative", "jumps", "row_jumps", "ties", "recipe", "reference")
    found = {name: document[name] for name in names}
    found["head"] = {name: value for name, value in found["head"].items() if name != "sequences_of_run"}
    return found


def rewrite(case: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((case / "case.json").read_text())
    change(document)
    (case / "case.json").write_text(json.dumps(document))


# -- the command -------------------------------------------------------------------------------------------------


def test_options_are_frozen(run_cli: Run) -> None:
    text = run_cli(["trace-head", "--help"], env={"COLUMNS": "200"}).stdout
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text.split("Options:", 1)[-1]))
    assert found - {"--help"} == {
        *("--accumulator", "--activations", "--allow-bin", "--batch", "--causal", "--dtype", "--export", "--feature"),
        *("--first-step", "--force", "--head", "--indices", "--json", "--layer", "--layout", "--lines", "--n-head"),
        *("--no-causal", "--plot", "--recapture", "--recipe", "--record", "--reference", "--scale", "--sequence"),
        *("--sequences", "--softcap", "--token", "--top", "--window"),
    }


def test_help_fits_80_columns_and_needs_no_tensor_library(run_cli: Run, run_python: Run) -> None:
    text = run_cli(["trace-head", "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    code = (
        "import sys; from bf16forensics.__main__ import main; main(['trace-head', '--help']); "
        "sys.exit(bool({'torch', 'triton', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    assert run_python(["-c", code]).exit_code == 0


def test_accumulator_names_are_completed() -> None:
    from bf16forensics.commands.trace_head import _accumulators

    assert {"fp32-prefix", "bf16-each-add", "sm80", "sm90", "sm100", "exact"} <= set(_accumulators())


def test_the_report_goes_to_stdout_and_says_which_head(run_cli: Run, case: Path) -> None:
    result = run_cli(["trace-head", case])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    # A word of a command that can be copied is never cut, however long the path in it.
    assert max(len(line) for line in lines if str(case) not in line) <= 100
    for word in ("L1.H2", "ranks first", "fa2", "fp32-prefix", f"{KEPT} of {SEQUENCES} sequences"):
        assert word in re.sub(r"\s+", " ", result.stdout)


def test_top_limits_the_table_of_tokens(run_cli: Run, case: Path) -> None:
    def rows(top: int) -> int:
        text = run_cli(["trace-head", case, "--top", top]).stdout
        return len(re.findall(r"(?m)^\d+ +401 +\d+ ", text))

    assert [rows(top) for top in (0, 1, 3)] == [0, 1, 3]


def test_repeated_traces_are_the_same_bytes(run_cli: Run, case: Path) -> None:
    first, second = (run_cli(["trace-head", case, "--json"]).stdout for _ in range(2))
    mask = r'"volatile": \{[^}]*\}'
    assert re.sub(mask, "", first) == re.sub(mask, "", second)
    assert len(re.findall(mask, first)) == 1


# -- heads of a case ---------------------------------------------------------------------------------------------


def test_a_kept_head_is_read_and_a_recaptured_one_is_the_same(trace: Run, case: Path) -> None:
    kept = trace(case, "--layer", 1, "--head", 2)
    again = trace(case, "--layer", 1, "--head", 2, "--recapture", "--sequences", KEPT)
    assert kept["head"]["name"] == again["head"]["name"] == "L1.H2"
    assert kept["head"]["sequences"] == list(range(KEPT))
    assert kept["head"]["sequences_of_run"] == again["head"]["sequences_of_run"] == SEQUENCES
    assert findings(kept) == findings(again)
    assert any("kept the first 4 of 8" in note for note in kept["notes"])
    assert any("captured again" in note for note in again["notes"])


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (1, 2)])
def test_the_sum_over_all_sequences_is_that_of_the_case(trace: Run, case: Path, layer: int, head: int) -> None:
    document = trace(case, "--layer", layer, "--head", head, "--recapture")
    run = json.loads((case / "case.json").read_text())
    expected = next(item for item in run["heads"] if (item["layer"], item["head"]) == (layer, head))["delta_err"]
    found = document["head"]
    assert found["sequences"] == list(range(SEQUENCES))
    assert found["rows"] == SEQUENCES * TOKENS
    assert (found["positive"], found["negative"]) == (expected["positive"], expected["negative"])
    # Two orders of a float64 sum of 512 terms, each at most the standard error times the root of the rows.
    size = expected["standard_error"] * expected["positive"]
    assert found["delta_err_sum"] == pytest.approx(expected["sum"], abs=512 * 2**-53 * size)
    assert math.fsum(found["delta_err_by_sequence"]) == pytest.approx(found["delta_err_sum"], abs=512 * 2**-53 * size)


def test_what_a_token_consists_of_adds_up(trace: Run, case: Path) -> None:
    document = trace(case)
    token = document["token"]
    contributions = [item["contribution"] for item in token["features"]]
    assert len(contributions) == 32
    assert math.fsum(contributions) == token["contributions"]
    error = token["token"]["delta_err"]
    assert token["contributions"] + token["remainder"] == pytest.approx(error, abs=2**-52 * abs(error))
    # The remainder is the FP32 sum of delta's 32 products and their rounding: far below the error of O.
    assert abs(token["remainder"]) < 1e-6 * abs(error)
    assert [item["feature"] for item in token["features"]] != sorted(item["feature"] for item in token["features"])
    assert sorted(item["feature"] for item in token["features"]) == list(range(32))
    for item in token["features"]:
        assert item["o_err"] == pytest.approx(item["o_lp"] - item["o_hp"], abs=2**-24 * abs(item["o_hp"]))
        assert item["contribution"] == item["do"] * item["o_err"]


def test_the_largest_jumps_of_the_planted_head_sit_where_keys_share_the_maximum(trace: Run, case: Path) -> None:
    document = trace(case)
    arrays = document["cumulative"]["arrays"]
    assert [key for key, one in zip(arrays["keys"], arrays["is_one"], strict=True) if one] == [
        key for key, p_bar in zip(arrays["keys"], arrays["p_bar"], strict=True) if p_bar == 1
    ]
    assert document["traced"]["ones"] == sum(arrays["is_one"]) == 2
    # One step of half an ulp at the second of two tied keys, in every feature whose sum is halfway: half of the 32.
    assert document["jumps"][0]["is_one"]
    assert abs(document["jumps"][0]["size"]) == 2**-6
    assert document["row_jumps"]["top_at_ones"] == 10
    assert document["ties"]["tie_share"] == 0.5
    assert document["cumulative"]["bound_exceeded"] == 0


def test_the_worst_row_is_the_default_and_can_be_named(trace: Run, case: Path) -> None:
    whole = trace(case)
    worst = whole["tokens"][0]
    assert abs(worst["delta_err"]) == max(abs(item["delta_err"]) for item in whole["tokens"])
    assert whole["traced"] == worst
    named = trace(case, "--sequence", worst["sequence"], "--token", worst["token"])
    assert named["cumulative"] == whole["cumulative"]
    assert named["token"]["features"] == whole["token"]["features"]
    other = trace(case, "--token", 17, "--feature", 5)
    assert (other["traced"]["token"], other["cumulative"]["feature"]) == (17, 5)
    assert other["cumulative"]["num_keys"] == 18


def test_a_sequence_that_was_not_kept_is_captured(trace: Run, case: Path) -> None:
    document = trace(case, "--sequence", 6, "--token", 20)
    assert (document["traced"]["sequence"], document["traced"]["step"]) == (6, 402)
    assert any("captured again" in note for note in document["notes"])


def test_the_traced_row_is_kept_in_the_case(trace: Run, run_cli: Run, case: Path, checkpoint: list[object]) -> None:
    document = trace(case)
    row = document["traced"]
    path = case / "traces" / f"L1.H2.s{row['sequence']}.t{row['token']}.safetensors"
    kept = read_row_trace(path)
    assert (kept.layer, kept.head, kept.sequence, kept.token, kept.step) == (1, 2, row["sequence"], row["token"], 401)
    assert kept.run.recipe == "fa2"
    assert kept.o_hp.shape == (32,)
    # The case with its traces is still one that localize may replace.
    assert run_cli(["localize", *checkpoint, "-o", case, "--force", "--json"]).exit_code in (0, 1)
    assert not path.exists()


def test_a_case_that_cannot_be_written_is_traced_all_the_same(trace: Run, case: Path) -> None:
    (case / "traces").write_text("no folder")
    document = trace(case)
    assert any("not kept in the case" in note for note in document["notes"])
    assert (case / "traces").read_text() == "no folder"


def test_another_recipe_is_said_and_not_kept(trace: Run, case: Path) -> None:
    document = trace(case, "--recipe", "fa2+o=fp32")
    assert document["recipe"]["name"] == "fa2+o=fp32"
    assert any("fa2+o=fp32" in note and "captured under" in note for note in document["notes"])
    assert not (case / "traces").exists()
    # O is not rounded: what is left of the error is FP32 noise.
    assert abs(document["head"]["delta_err_sum"]) < 1e-3 * abs(trace(case)["head"]["delta_err_sum"])


def test_a_row_of_a_case_on_request(trace: Run, case: Path, tmp_path: Path) -> None:
    trace(case, "--sequence", 2, "--token", 30)
    path = case / "traces" / "L1.H2.s2.t30.safetensors"
    written = path.read_bytes()
    path.unlink()
    row = trace_row_of_case(case, 1, 2, 2, 30)
    assert path.read_bytes() == written
    assert np.array_equal(row.run.o, read_row_trace(path).run.o)
    assert trace_row_of_case(case, 0, 3, 7, 5).file_name == "L0.H3.s7.t5.safetensors"
    for place in ((2, 0, 0, 0), (1, 4, 0, 0), (1, 2, SEQUENCES, 0), (1, 2, 0, TOKENS)):
        with pytest.raises(InputError):
            trace_row_of_case(case, *place)


# -- what does not fit together is refused -----------------------------------------------------------------------


def test_changed_tensors_are_refused(run_cli: Run, case: Path) -> None:
    path = case / "tensors" / "L1.H2.safetensors"
    tensors = load_file(path)
    tensors["v"][1, 0, 3, 4] += 0.5
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    save_file(tensors, path, metadata=header["__metadata__"])
    one_line_error(run_cli(["trace-head", case]), path, "sha256", "--recapture")
    assert run_cli(["trace-head", case, "--recapture", "--json"]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "value"), [("window", "x"), ("causal", "maybe"), ("layer", "0"), ("sequences", "0 1"), ("softcap", None)]
)
def test_changed_metadata_is_refused(run_cli: Run, case: Path, name: str, value: str | None) -> None:
    path = case / "tensors" / "L1.H2.safetensors"
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    metadata = {**header["__metadata__"], name: value}
    save_file(load_file(path), path, metadata={key: text for key, text in metadata.items() if text is not None})
    one_line_error(run_cli(["trace-head", case]), path, "metadata")


def test_a_missing_file_of_tensors_is_refused(run_cli: Run, case: Path) -> None:
    (case / "tensors" / "L1.H2.safetensors").unlink()
    one_line_error(run_cli(["trace-head", case]), "L1.H2.safetensors", "--recapture")


@pytest.fixture
def own(run_cli: Run, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A case made with relative paths, beside inputs that the test may change."""
    shutil.copytree(inputs, tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    args = ["planted.pt", "--batch", "tokens.bin", "--indices", "indices.txt", "--lines", "0:1"]
    assert run_cli(["localize", *args, "-o", "case", "--json"]).exit_code in (0, 1)
    return tmp_path / "own"


def test_relative_inputs_are_found_from_elsewhere(
    trace: Run, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = trace("case", "--layer", 0, "--head", 0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert findings(trace(own / "case", "--layer", 0, "--head", 0)) == findings(here)
    # A folder that was moved as a whole: the paths are right again from inside.
    own.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert findings(trace("case", "--layer", 0, "--head", 0)) == findings(here)


@pytest.mark.parametrize("name", ["planted.pt", "tokens.bin", "indices.txt"])
def test_moved_and_changed_inputs_are_refused(run_cli: Run, own: Path, name: str) -> None:
    args = ["trace-head", "case", "--layer", 0, "--head", 0]
    whole = (own / name).read_bytes()
    (own / name).rename(own / "away")
    one_line_error(run_cli(args), name, "no such file", "sha256")
    changed = bytearray(whole)
    # One digit of a window start, one token, one byte of a tensor: everything still reads.
    changed[-2 if name == "indices.txt" else len(whole) // 2] ^= 1
    (own / name).write_bytes(changed)
    one_line_error(run_cli(args), name, "sha256", "restore")
    (own / name).write_bytes(whole[:-3])
    one_line_error(run_cli(args), name, "sha256", "restore")
    (own / name).write_bytes(whole)
    assert run_cli(args).exit_code == 0


def test_a_case_that_does_not_name_its_inputs(run_cli: Run, case: Path) -> None:
    rewrite(case, lambda document: document["inputs"].pop("capture"))
    assert run_cli(["trace-head", case]).exit_code == 0
    one_line_error(run_cli(["trace-head", case, "--recapture"]), case, "localize again")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d.pop("inputs"), "inputs"),
        (lambda d: d["inputs"].update(sequences="8"), "sequences"),
        (lambda d: d["inputs"].update(num_layers=True), "num_layers"),
        (lambda d: d["inputs"]["files"].append(3), "files"),
        (lambda d: d["inputs"]["capture"].update(lines=[1]), "lines"),
        (lambda d: d["inputs"]["capture"].update(batch=7), "batch"),
        (lambda d: d.update(reference="bf16"), "reference"),
        (lambda d: d.update(ranking=["L1"]), "ranking"),
        (lambda d: d.update(ranking=["L9.H0"]), "9"),
        (lambda d: d["recipe"].update(o="int8"), "int8"),
        (lambda d: d["recipe"].update(o="fp32"), "fa2"),
        (lambda d: d["tensors"][0].update(steps=[]), "steps"),
        (lambda d: d.update(schema_version=2), "schema version 2"),
        (lambda d: d["environment"].pop("volatile"), "volatile"),
    ],
)
def test_a_damaged_document_is_one_line(
    run_cli: Run, case: Path, change: Callable[[dict[str, Any]], None], word: str
) -> None:
    rewrite(case, change)
    one_line_error(run_cli(["trace-head", case]), word)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--layer", "2", "--head", "0"], ("--layer 2", "0 to 1")),
        (["--layer", "1", "--head", "4"], ("--head 4", "0 to 3")),
        (["--layer", "1", "--head=-1"], ("--head -1", "0 to 3")),
        (["--layer", "1"], ("--head", "missing")),
        (["--head", "1"], ("--layer", "missing")),
        (["--token", "64"], ("token 64", "0 to 63")),
        (["--token=-1"], ("token -1",)),
        (["--sequence", "8"], ("sequence 8", "0 to 7")),
        (["--feature", "32"], ("feature 32", "0 to 31")),
        (["--sequences", "5"], ("--sequences 5", "--recapture")),
        (["--accumulator", "sm75"], ("sm75", "sm80")),
        (["--accumulator", "tile:0"], ("tile:0",)),
        (["--accumulator", "tile:x"], ("tile:x",)),
        (["--accumulator", "sm90", "--recipe", "sdpa-math"], ("sm90",)),
        (["--recipe", "fa9"], ("fa9", "fa2")),
        (["--reference", "bf16"], ("--reference",)),
        (["--batch", "b"], ("--batch", "checkpoint")),
        (["--window", "4"], ("--window", "--record")),
        (["--activations", "fp32"], ("--activations", "checkpoint")),
        (["--plot", "figure.txt"], ("figure.txt",)),
        (["--export", "figure.npz"], ("figure.npz", ".safetensors")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options(run_cli: Run, made: Path, extra: list[str], words: tuple[str, ...]) -> None:
    one_line_error(run_cli(["trace-head", made, *extra]), *words)


def test_what_is_missing_or_too_much_is_said(
    run_cli: Run, made: Path, checkpoint: list[object], tmp_path: Path
) -> None:
    one_line_error(run_cli(["trace-head"]), "CKPT", "--record")
    one_line_error(run_cli(["trace-head", tmp_path]), tmp_path, "case.json", "--batch")
    for name in ("nowhere", "case.json"):
        one_line_error(run_cli(["trace-head", tmp_path / name]), tmp_path / name, "case.json", "--batch")
    one_line_error(run_cli(["trace-head", *checkpoint]), "--layer", "localize")
    one_line_error(run_cli(["trace-head", *checkpoint, "--recapture"]), "--recapture", "case")
    one_line_error(run_cli(["trace-head", made, "--record", tmp_path / "r"]), "not both")


def test_an_interruption_is_130(run_cli: Run, case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bf16forensics.capture.kept import KeptSource

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(KeptSource, "records", stop)
    result = run_cli(["trace-head", case])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


# -- outputs -----------------------------------------------------------------------------------------------------


def test_the_export_holds_the_arrays_of_the_document(trace: Run, run_cli: Run, case: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.safetensors"
    document = trace(case, "--export", path)
    stored = load_file(path)
    assert stored["cumulative.error"].tolist() == document["cumulative"]["arrays"]["error"]
    assert stored["delta_err"].shape == (KEPT, TOKENS)
    assert math.fsum(stored["delta_err"].flatten().tolist()) == document["head"]["delta_err_sum"]
    assert read_row_trace(path).token == document["traced"]["token"]
    one_line_error(run_cli(["trace-head", case, "--export", path]), path, "--force")
    before = path.read_bytes()
    assert run_cli(["trace-head", case, "--export", path, "--force"]).exit_code == 0
    assert path.read_bytes() == before


def test_the_figure_is_written_and_replaced_with_force(run_cli: Run, case: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.svg"
    path.write_text("older")
    one_line_error(run_cli(["trace-head", case, "--plot", path]), path, "--force")
    assert path.read_text() == "older"
    assert run_cli(["trace-head", case, "--plot", path, "--force"]).exit_code == 0
    assert path.read_text().startswith("<?xml")


def test_outputs_inside_the_case_are_refused(run_cli: Run, case: Path) -> None:
    pytest.importorskip("matplotlib")
    for option, name in (("--plot", "figure.png"), ("--export", "traces/all.safetensors")):
        one_line_error(run_cli(["trace-head", case, option, case / name]), name, "lies in the case")


# -- straight from an input --------------------------------------------------------------------------------------


def test_a_checkpoint_gives_what_its_case_gives(trace: Run, case: Path, checkpoint: list[object]) -> None:
    whole = trace(case, "--recapture")
    direct = trace(*checkpoint, "--layer", 1, "--head", 2, "--reference", "fp32")
    assert findings(direct) == findings(whole)
    assert direct["inputs"]["case"] is None
    assert [item["sha256"] for item in direct["inputs"]["files"]] == [
        item["sha256"] for item in whole["inputs"]["files"]
    ]
    # Without a case the other side is float64.
    assert trace(*checkpoint, "--layer", 1, "--head", 2, "--sequences", 1)["reference"] == "fp64"


def tensors(heads: int = 6, groups: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    counts = {"q": heads, "k": groups, "v": groups, "do": heads}
    return {name: draw(2, count, 12, 8) for name, count in counts.items()}


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., list[object]]:
    def write(built: dict[str, torch.Tensor], name: str = "record.safetensors") -> list[object]:
        save_file(built, tmp_path / name)
        return ["--record", tmp_path / name, "--layout", "bhtd"]

    return write


@pytest.mark.parametrize(("recipe", "head"), [("fa2", 5), ("fa2", 0), ("paper", 3), ("sdpa-math", 2)])
def test_a_record_of_grouped_heads(trace: Run, record: Run, recipe: str, head: int) -> None:
    built = tensors()
    document = trace(*record(built), "--head", head, "--recipe", recipe, "--window", 7, "--scale", 0.5)
    expected: list[float] = []
    for index in range(2):
        # All six heads at once, as localize computes them.
        whole = AttentionRecord(
            layer=0,
            sequence=index,
            step=None,
            storage="bf16",
            **{name: built[name][index].float() for name in ("q", "k", "v", "do")},
            x=None,
            geometry=Geometry(scale=0.5, window=7),
        )
        delta = dual_pass(whole, resolve(recipe), "fp64").delta
        assert delta is not None
        expected += delta.delta_err[head].tolist()
    assert document["head"]["name"] == f"L0.H{head}"
    assert document["head"]["delta_err_sum"] == math.fsum(expected)
    assert document["tokens"][0]["delta_err"] == max(expected, key=abs)
    assert (document["head"]["rows"], len(document["tokens"])) == (24, 24)
    assert "window 7" in document["inputs"]["geometry"]


def test_a_record_needs_its_head_only_where_it_has_several(trace: Run, run_cli: Run, record: Run) -> None:
    one_line_error(run_cli(["trace-head", *record(tensors())]), "--head", "0 to 5")
    assert trace(*record(tensors(1, 1)))["head"]["name"] == "L0.H0"


def test_a_case_of_a_record_is_captured_again(trace: Run, run_cli: Run, record: Run, tmp_path: Path) -> None:
    args = [*record(tensors()), "--window", 5, "--softcap", 3.0, "--scale", 0.7]
    case = tmp_path / "case"
    assert run_cli(["localize", *args, "-o", case, "--reference", "fp64"]).exit_code in (0, 1)
    names = {path.stem for path in (case / "tensors").iterdir()}
    for head in range(6):
        found = findings(trace(case, "--layer", 0, "--head", head))
        assert found == findings(trace(*args, "--head", head)), (head, f"L0.H{head}" in names)
        assert found == findings(trace(case, "--layer", 0, "--head", head, "--recapture"))


def test_a_record_without_do_is_traced_by_its_output(trace: Run, record: Run) -> None:
    built = tensors()
    del built["do"]
    document = trace(*record(built), "--head", 1)
    assert document["token"] is None
    assert document["head"]["delta_err_sum"] == "nan"
    assert any("no dO" in note for note in document["notes"])
    worst = max(item["o_err_max_ulp"] for item in document["tokens"])
    assert document["traced"]["o_err_max_ulp"] == worst


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_tensor_is_named_and_exit_2(run_cli: Run, record: Run, tmp_path: Path, value: float) -> None:
    built = tensors()
    built["v"][1, 1, 3, 4] = value
    args = record(built)
    # Heads 3 to 5 read key/value head 1.
    assert run_cli(["trace-head", *args, "--head", 2]).exit_code == 0
    one_line_error(run_cli(["trace-head", *args, "--head", 4]), "L0.H4", "v[1", f"is {value}")
    run_cli(["localize", *args, "-o", tmp_path / "case", "--json"])
    kept = sorted(int(path.stem.partition(".H")[2]) for path in (tmp_path / "case" / "tensors").iterdir())
    assert set(kept) & {3, 4, 5}
    for head in set(kept) & {3, 4, 5}:
        one_line_error(run_cli(["trace-head", tmp_path / "case", "--layer", 0, "--head", head]), f"L0.H{head}", "v[1")


@pytest.mark.slow
def test_a_padded_hugging_face_model_of_grouped_heads(trace: Run, run_cli: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
    common = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
    config = transformers.MistralConfig(**sizes, **common, sliding_window=5, initializer_range=0.2)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    mask[2, :3] = 0
    save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "batch.safetensors")
    args = [tmp_path / "model", "--batch", tmp_path / "batch.safetensors"]
    case = tmp_path / "case"
    assert run_cli(["localize", *args, "-o", case, "--reference", "fp64"]).exit_code in (0, 1)
    run = json.loads((case / "case.json").read_text())
    # The first was kept, the last was not: four of eight are.
    for item in (head for head in run["heads"] if head["name"] in (run["ranking"][0], run["ranking"][-1])):
        where = ("--layer", item["layer"], "--head", item["head"])
        again = trace(case, *where, "--recapture")
        assert again["head"]["delta_err_sum"] == pytest.approx(item["delta_err"]["sum"], rel=1e-9)
        assert (
            again["head"]["rows"]
            == item["delta_err"]["positive"] + item["delta_err"]["negative"] + (item["delta_err"]["zero"])
        )
        assert "window 5" in again["inputs"]["geometry"]
        # From the file where the case kept the head.
        assert findings(trace(case, *where)) == findings(again)
