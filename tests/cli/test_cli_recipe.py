"""`bf16forensics recipe`: list and show, as text, JSON and TOML."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.presets import PRESETS

Run = Callable[..., Any]


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_list_shows_every_preset(run_cli: Run) -> None:
    result = run_cli(["recipe", "list"])
    assert (result.exit_code, result.stderr) == (0, "")
    for preset in PRESETS:
        assert f"\n{preset.name} (version {preset.version}" in "\n" + result.stdout


def test_list_as_json(run_cli: Run) -> None:
    result = run_cli(["recipe", "list", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    document = strict_json(result.stdout)
    assert list(document) == ["schema_version", "tool", "command", "recipes"]
    assert [recipe["name"] for recipe in document["recipes"]] == [preset.name for preset in PRESETS]
    assert all(recipe["source"] and recipe["version"] for recipe in document["recipes"])


@pytest.mark.parametrize("name", [*(preset.name for preset in PRESETS), "fa2+o_bar=bf16", "FA2+O-BAR=bfloat16"])
def test_show(run_cli: Run, name: str) -> None:
    result = run_cli(["recipe", "show", name])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{resolve(name).name} (")


def test_show_as_json(run_cli: Run) -> None:
    result = run_cli(["recipe", "show", "paper+o_bar=fp32", "--json"])
    document = strict_json(result.stdout)
    assert document["command"] == ["bf16forensics", "recipe", "show", "paper+o_bar=fp32"]
    assert document["recipe"]["name"] == "paper+o_bar=fp32"
    assert document["recipe"]["preset"] == "paper"


def test_show_as_toml_is_a_recipe_file(run_cli: Run, tmp_path: Path) -> None:
    result = run_cli(["recipe", "show", "fa2+o_bar=bf16", "--toml"])
    path = tmp_path / "mine.toml"
    path.write_text(result.stdout, encoding="ascii")
    assert resolve(str(path)) == resolve("fa2+o_bar=bf16")
    shown = run_cli(["recipe", "show", path])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("fa2+o_bar=bf16 (derived from fa2 version 1)")


@pytest.mark.parametrize("columns", ["80", "100", "500"])
@pytest.mark.parametrize("args", [["list"], ["show", "fa2"], ["show", "paper+o_bar=fp32"]], ids=" ".join)
def test_lines_fit_the_console(run_cli: Run, args: list[str], columns: str) -> None:
    result = run_cli(["recipe", *args], env={"COLUMNS": columns})
    assert max(map(len, result.stdout.splitlines())) <= min(int(columns), 100)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["show", "fa9"], "unknown recipe 'fa9'"),
        (["show", "fa2+obar=bf16"], "did you mean 'o_bar'"),
        (["show", "fa2+o_bar=int8"], "allowed: bf16, fp16, fp32"),
        (["show", "absent.toml"], "absent.toml: no such recipe file"),
        (["show", "fa2", "--json", "--toml"], "exclude each other"),
        (["show", "fa2+[bf16]=[/x]"], "unknown point '[bf16]'"),
    ],
)
def test_errors_are_one_line_and_exit_2(run_cli: Run, args: list[str], part: str) -> None:
    result = run_cli(["recipe", *args])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert part in result.stderr


def test_recipe_alone_prints_its_help(run_cli: Run) -> None:
    result = run_cli(["recipe"])
    assert result.exit_code == 2
    assert "list" in result.stdout
    assert "show" in result.stdout
