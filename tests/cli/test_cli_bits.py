"""`bf16forensics bits`: values on the command line, events of a case, what it prints and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bf16forensics
from bf16forensics.__main__ import main
from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.report.row_trace import RowTrace, write_row_trace

Run = Callable[..., Any]
DEMO = Path(bf16forensics.__file__).parent / "demo"

PUBLISHED = ["11000000000110100000111000101110", "11000000000100110000000000000000"]


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert text.endswith("}\n")
    return json.loads(text, parse_constant=refuse)


def shown(run_cli: Run, *args: str) -> Any:
    result = run_cli(["bits", *args, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    return strict(result.stdout)


def test_the_published_event(run_cli: Run) -> None:
    result = run_cli(["bits", *PUBLISHED])
    assert (result.exit_code, result.stderr) == (0, "")
    for text in ("1100000010010111", "-4.71875", "-4.703990459442139", "-0.014759540557861328", "-4.6875", "+0.015625"):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_is_one_document_with_its_command(run_cli: Run) -> None:
    document = shown(run_cli, *PUBLISHED)
    assert list(document)[:4] == ["schema_version", "tool", "command", "event"]
    assert document["command"] == ["bf16forensics", "bits", *PUBLISHED, "--json"]
    assert document["result"] == document["rounding"]["result"]
    assert document["result"]["bits"] == "0xC097"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["-2.40625", "-2.296875"], "0xC096"),
        (["-2.40625", "--to", "bf16", "-2.296875"], "0xC096"),
        (["-0x1.34p+1", "-0x1.26p1"], "0xC096"),
        (["0xC01A", "0xC013"], "0xC096"),
        (["0xC01A", "0xC0130002"], "0xC097"),
        (["0xC01A", "0xC012FFFE"], "0xC096"),
        (["-.5"], "0xBF00"),
        (["-1e-3", "-1E+2"], "0xC2C8"),
        (["-inf", "3"], "0xFF80"),
        (["-nan"], "0x7FC0"),
        (["-0"], "0x8000"),
        (["3", "-3"], "0x0000"),
        (["0x3F808000"], "0x3F80"),
        (["0x3F818000"], "0x3F82"),
        (["0x3F808001", "--mode", "rz"], "0x3F80"),
        (["0x3F808000", "--mode", "rna"], "0x3F81"),
        (["0x3C01", "0x0001", "--from", "fp16", "--to", "fp16"], "0x3C01"),
        (["500", "--to", "e4m3"], "0x7E"),
        (["500", "--to", "E4M3", "--from", "Fp16"], "0x7E"),
        (["500", "--to", "e4m3", "--overflow", "nonfinite"], "0x7F"),
        (["-2.40625", "-2.296875", "-2.3125", "-1.0", "--accumulator", "bf16-each-add"], "0xC100"),
        (["1", "0x1p-25", "-1", "--accumulator", "sm80"], "0x0000"),
        (["1", "0x1p-25", "-1", "--accumulator", "sm90"], "0x3300"),
        (["1", "0x1p-25", "-1", "--accumulator", "exact"], "0x3300"),
        (["1", "0x1p-25", "-1"], "0x0000"),
        (["0x3F80C000", "--mode", "stochastic", "--random", "5/8"], "0x3F81"),
        (["0x3F80C000", "--mode", "stochastic", "--random", "192/8"], "0x3F80"),
        (["0x3F80C000", "--mode", "stochastic", "--random", "191/8"], "0x3F81"),
    ],
    ids=" ".join,
)
def test_result(run_cli: Run, args: list[str], code: str) -> None:
    assert shown(run_cli, *args)["result"]["bits"] == code


def test_negative_values_work_behind_a_double_dash_too(run_cli: Run) -> None:
    assert run_cli(["bits", "--", "-2.40625", "-1"]) == run_cli(["bits", "-2.40625", "-1"])


def test_stochastic_without_randomness_has_two_outcomes_and_no_result(run_cli: Run) -> None:
    document = shown(run_cli, "0x3F80C000", "--mode", "stochastic")
    assert (document["result"], document["error"]) == (None, None)
    assert document["rounding"]["probability_up"]["value"] == 0.75


def test_a_seed_repeats(run_cli: Run) -> None:
    args = ["bits", "0.1", "0.2", "0.3", "--mode", "stochastic", "--seed", "3", "--accumulator", "each-add"]
    assert run_cli(args) == run_cli(args)
    assert run_cli(args).stdout != run_cli([*args[:7], "4", *args[8:]]).stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "one value to convert"),
        (["abc"], "'abc' is not a number"),
        (["1", "0x12345"], "has 20 bits"),
        (["-0xC01A"], "holds the sign in its first bit"),
        (["fp24:00"], "unknown prefix 'fp24'"),
        (["bf16:1"], "no bf16 pattern"),
        (["inf", "--from", "e4m3"], "e4m3 has no infinity"),
        (["--form", "bf16"], "no such option: --form"),
        (["-x"], "no such option: -x"),
        (["1", "--to", "fp8"], "fp8"),
        (["1", "--mode", "up"], "up"),
        (["1", "2", "--accumulator", "fp32"], "unknown accumulator 'fp32'"),
        (["1", "2", "--accumulator", "tile:4"], "unknown accumulator 'tile:4'"),
        (["0.1", "1", "--accumulator", "sm90"], "round them first"),
        (["1", "--random", "5/8"], "--mode stochastic"),
        (["1", "--mode", "stochastic", "--random", "256/8"], "256"),
        (["1", "--mode", "stochastic", "--random", "0.5"], "BITS/K"),
        (["1", "--mode", "stochastic", "--random", "0/0"], "BITS/K"),
        (["1", "--mode", "stochastic", "--random", "1/8", "--seed", "1"], "exclude"),
        (["1", "0x1p-9", "1", "--mode", "stochastic", "--accumulator", "each-add"], "give a seed"),
        (["1", "--seed", "-1"], "--seed"),
        (["--event", "case"], "names no event"),
        (["--event", "case:L1.H2:t3:f4"], "lacks the key"),
        (["--event", "case:L1.H2:t3:f4:k5:k5"], "key twice"),
        (["--event", "case:L1.H2:t3:f4:k-5"], "names no event"),
        (["--event", "case:L1.H2:t3:f4:k5", "1"], "own values"),
        (["--event", "case:L1.H2:t3:f4:k5", "--seed", "1"], "own values"),
        (["--event", "case:L1.H2:t3:f4:k5", "--mode", "stochastic"], "stochastic"),
        (["--event", "nowhere:L1.H2:t3:f4:k5"], "nowhere"),
    ],
    ids=" ".join,
)
def test_what_is_refused_in_one_line(run_cli: Run, args: list[str], words: str) -> None:
    result = run_cli(["bits", *args])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_help_fits_80_columns(run_cli: Run) -> None:
    result = run_cli(["bits", "--help"], env={"COLUMNS": "80"})
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    for option in (
        "--from",
        "--to",
        "--mode",
        "--overflow",
        "--accumulator",
        "--event",
        "--seed",
        "--random",
        "--json",
    ):
        assert option in result.stdout


@pytest.mark.parametrize("args", [PUBLISHED, ["1", "2", "3", "--json"], ["zzz"]], ids=["text", "json", "refused"])
def test_values_load_nothing_heavy(run_python: Run, args: list[str]) -> None:
    code = (
        "import sys\nfrom bf16forensics.__main__ import main\nmain(['bits', *sys.argv[1:]])\n"
        "heavy = ('torch', 'triton', 'numpy', 'rich', 'safetensors')\n"
        "print('loaded', *(name for name in heavy if name in sys.modules))"
    )
    assert run_python(["-c", code, *args]).stdout.splitlines()[-1] == "loaded"


def test_the_page_shows_what_the_command_prints(run_cli: Run, repository: Path) -> None:
    page = (repository / "docs" / "commands" / "bits.md").read_text(encoding="utf-8")
    for block in page.split("```text\n$ bf16forensics ")[1:]:
        command, _, expected = block.split("\n```")[0].partition("\n")
        printed = run_cli(command.split(), env={"COLUMNS": "80"}).stdout
        for part in expected.split("...\n"):
            assert part.removesuffix("\n...") in printed


# -- events -----------------------------------------------------------------------------------------------------------


def row(token: int = 2) -> RowTrace:
    """Keys -2.40625, a small product and -2.296875: the published addition is that of key 2."""
    small = 11 / 2**14
    p = np.array([1.0, small, 1.0], np.float32)
    v = np.array([[0.0, -2.40625], [0.0, -165 / 128], [0.0, -2.296875]], np.float32)
    walk = RowWalk(
        recipe="fa2",
        keys=np.arange(3),
        visible=np.ones(3, np.bool_),
        p_bar=p,
        p_operand=p,
        is_one=p == 1,
        tile=np.zeros(3, np.int64),
        tile_alpha=np.ones(1, np.float32),
        v=v,
        p_format="bf16",
        row_sum=2.0 + small,
        division="reciprocal",
        o_bar_format="bf16",
        o_bar_at="end",
        o_format="bf16",
        o=np.array([0.0, -2.359375], np.float32),
        lse=1.0,
    )
    return RowTrace(layer=1, head=2, sequence=0, token=token, step=None, run=walk, ascending=walk, o_hp=np.zeros(2))


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A case of which only the traces exist."""
    case = tmp_path / "my:case"
    write_row_trace(case / "traces" / row().file_name, row())
    return case


def test_an_event_is_explained_as_if_its_bits_had_been_given(run_cli: Run, traced: Path) -> None:
    document = shown(run_cli, "--event", f"{traced}:L1.H2:t2:f1:k2")
    given = shown(run_cli, *PUBLISHED)
    assert [operand["bits"] for operand in document["operands"]] == ["0xC01A0E2E", "0xC0130000"]
    assert (document["rounding"], document["error"]) == (given["rounding"], given["error"])
    event = document["event"]
    assert (event["layer"], event["head"], event["sequence"], event["token"], event["feature"], event["key"]) == (
        1,
        2,
        0,
        2,
        1,
        2,
    )
    assert (event["p_bar"], event["v"], event["is_one"], event["after"]) == (1.0, -2.296875, True, -4.71875)


@pytest.mark.parametrize(
    ("accumulator", "after", "operands"),
    [
        ("fp32-prefix", -4.71875, [-2.4071154594421387, -2.296875]),
        ("each-add", -4.6875, [-2.40625, -2.296875]),
        ("bf16-each-add", -4.6875, [-2.40625, -2.296875]),
        ("exact", -4.71875, [-2.4071154594421387, -2.296875]),
        ("sm90", -4.703990459442139, []),
    ],
)
def test_an_event_by_every_accumulator(
    run_cli: Run, traced: Path, accumulator: str, after: float, operands: list[float]
) -> None:
    document = shown(run_cli, "--event", f"{traced}:L1.H2:s0:k2:f1:t2", "--accumulator", accumulator)
    assert document["result"]["value"] == document["event"]["after"] == after
    assert [operand["value"] for operand in document["operands"]] == operands
    if not operands:
        assert document["labels"] == ["k0", "k1", "k2"]
        factors = [[factor["value"] for factor in addend["factors"]] for addend in document["blocks"][0]["addends"][1:]]
        assert factors == [[1.0, -2.40625], [11 / 2**14, -165 / 128], [1.0, -2.296875]]


def test_an_event_as_text_says_where_it_is(run_cli: Run, traced: Path) -> None:
    result = run_cli(["bits", "--event", f"{traced}:L1.H2:t2:f1:k2"])
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("L1.H2, sequence 0, token 2, feature 1, key 2", "the running sum before", "-4.71875", "0xC01A0E2E"):
        assert words in " ".join(result.stdout.split())


def test_an_event_takes_another_target(run_cli: Run, traced: Path) -> None:
    document = shown(run_cli, "--event", f"{traced}:L1.H2:t2:f1:k2", "--to", "fp16", "--mode", "rz")
    assert (document["target_format"], document["result"]["value"]) == ("fp16", -4.703125)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("L1.H2:t2:f1:k3", "does not see key 3"),
        ("L1.H2:t2:f2:k1", "features 0 to 1"),
        ("L1.H2:t5:f1:k1", "case"),
        ("L1.H3:t2:f1:k1", "case"),
        ("L1.H2:s1:t2:f1:k1", "case"),
    ],
)
def test_events_that_do_not_exist_are_refused(run_cli: Run, traced: Path, parts: str, words: str) -> None:
    result = run_cli(["bits", "--event", f"{traced}:{parts}"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_token_traced_in_several_sequences_needs_one_named(run_cli: Run, traced: Path) -> None:
    other = row()
    shutil.copy(traced / "traces" / other.file_name, traced / "traces" / "L1.H2.s7.t2.safetensors")
    assert ":s0, :s7" in run_cli(["bits", "--event", f"{traced}:L1.H2:t2:f1:k2"]).stderr
    assert run_cli(["bits", "--event", f"{traced}:L1.H2:s0:t2:f1:k2"]).exit_code == 0
    # The copy says inside that it is another row.
    assert "another row" in run_cli(["bits", "--event", f"{traced}:L1.H2:s7:t2:f1:k2"]).stderr


def test_a_damaged_row_is_refused(run_cli: Run, traced: Path) -> None:
    (traced / "traces" / row().file_name).write_bytes(b"\0" * 40)
    result = run_cli(["bits", "--event", f"{traced}:L1.H2:t2:f1:k2"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_row_that_was_not_traced_is_computed_from_the_case(run_cli: Run, tmp_path: Path) -> None:
    lines = (DEMO / "indices.txt").read_text().splitlines()[:2]
    (tmp_path / "indices.txt").write_text("\n".join(lines) + "\n")
    inputs = [DEMO / "planted.pt", "--batch", DEMO / "tokens.bin", "--indices", tmp_path / "indices.txt"]
    case = tmp_path / "case"
    assert main(["localize", *map(str, inputs), "-o", str(case)]) in (0, 1)
    name = f"{case}:L1.H2:s1:t40:f3:k20"
    computed = shown(run_cli, "--event", name)
    assert [path.name for path in (case / "traces").iterdir()] == ["L1.H2.s1.t40.safetensors"]
    kept = shown(run_cli, "--event", name)
    assert computed == kept
    assert computed["result"]["value"] == computed["event"]["after"]
    tiled = shown(run_cli, "--event", name, "--accumulator", "tile:16")
    assert tiled["event"]["recipe"] == "fa2+tile_k=16"
    assert tiled["result"]["value"] == tiled["event"]["after"]
    refused = run_cli(["bits", "--event", f"{case}:L1.H2:t41:f3:k20"])
    assert "add :s0" in refused.stderr
