"""Fresh processes: what starting up loads, and what works without the optional packages."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import typer

from bf16forensics.cli import build

HEAVY = ("torch", "triton", "numpy", "safetensors", "matplotlib", "transformers")

#: Runs main() on the arguments and prints, last, the exit code and which heavy modules are loaded.
PROBE = """
import json, sys
from bf16forensics.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
top = {name.split(".")[0] for name in sys.modules}
print(json.dumps({"code": code, "loaded": sorted(top), "kernels": "kernels" in sys.modules}))
"""

COMMANDS = sorted(typer.main.get_command(build()).commands)  # type: ignore[attr-defined]


def probe(run_python: Callable[..., Any], args: Sequence[str], **options: Any) -> dict[str, Any]:
    result = run_python(["-c", PROBE, *args], **options)
    assert result.stderr == ""
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ([], 2),
        (["--help"], 0),
        (["-h"], 0),
        (["--version"], 0),
        (["bits", "1", "2"], 0),
        (["recipe", "list"], 0),
        (["recipe", "list", "--json"], 0),
        (["recipe", "show", "paper+o_bar=fp32"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_light_commands_load_nothing_heavy(run_python: Callable[..., Any], args: list[str], code: int) -> None:
    answer = probe(run_python, args)
    assert answer["code"] == code
    assert set(answer["loaded"]).isdisjoint(HEAVY)
    assert not answer["kernels"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_loads_nothing_heavy(run_python: Callable[..., Any], command: str) -> None:
    answer = probe(run_python, [command, "--help"])
    assert answer["code"] == 0
    assert set(answer["loaded"]).isdisjoint(HEAVY)


def test_completion_loads_nothing_heavy(run_python: Callable[..., Any]) -> None:
    env = {
        "_BF16FORENSICS_COMPLETE": "complete_bash",
        "COMP_WORDS": "bf16forensics recipe ",
        "COMP_CWORD": "2",
    }
    result = run_python(["-c", PROBE], env=env)
    answer = json.loads(result.stdout.splitlines()[-1])
    assert set(answer["loaded"]).isdisjoint(HEAVY)
    assert {"list", "show"} <= set(result.stdout.split())


@pytest.mark.parametrize("args", [["--help"], ["recipe", "list"]], ids=" ".join)
def test_works_where_triton_cannot_be_imported(run_python: Callable[..., Any], args: list[str]) -> None:
    result = run_python(["-c", "import sys; sys.modules['triton'] = None\n" + PROBE, *args])
    assert result.stderr == ""
    assert json.loads(result.stdout.splitlines()[-1])["code"] == 0


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("bf16forensics", ("torch", "triton", "numpy")),
        ("bf16forensics.recipe.derive", ("torch", "triton", "numpy")),
        ("bf16forensics.recipe.render", ("torch", "triton", "numpy")),
        ("bf16forensics.evidence.results", ("torch", "triton")),
        ("bf16forensics.investigate.result", ("torch", "triton")),
        ("bf16forensics.report.plot", ("torch", "triton", "matplotlib")),
    ],
)
def test_module_loads_without(run_python: Callable[..., Any], module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*(name for name in {absent!r} if name in sys.modules))"
    result = run_python(["-c", code])
    assert (result.exit_code, result.stdout.strip(), result.stderr) == (0, "", "")


def test_importing_the_package_leaves_the_name_kernels_free(run_python: Callable[..., Any]) -> None:
    code = "import sys, bf16forensics.cli; print('kernels' in sys.modules)"
    assert run_python(["-c", code]).stdout.strip() == "False"
