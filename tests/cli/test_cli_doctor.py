"""`bf16forensics doctor`: exit codes, streams, JSON; the checks themselves are tested where they are made."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bf16forensics.investigate.doctor import checks as doctor
from bf16forensics.investigate.doctor import environment
from bf16forensics.investigate.doctor.result import FAIL, NOTED, PASS, ROUNDING, SKIPPED, Check, DoctorReport

Run = Callable[..., Any]


def report(*statuses: str) -> DoctorReport:
    return DoctorReport(
        system=environment.system((), "torch is built without CUDA"),
        settings=(),
        checks=tuple(
            Check(
                group=ROUNDING,
                name=f"rounding [{index}]",
                where="cpu",
                status=status,
                observed="1 of 2 differ",
                expected="0 differ",
                what_it_means="What it means.",
            )
            for index, status in enumerate(statuses)
        ),
        units=(),
        wall_s=1.0,
    )


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Makes the command find the given statuses; returns the devices that it asks for."""

    def install(*statuses: str) -> list[Any]:
        asked: list[Any] = []

        def examine(device: str | None = None, on_progress: Any = None) -> DoctorReport:
            asked.append(device)
            on_progress("everything")
            return report(*statuses)

        monkeypatch.setattr(doctor, "examine", examine)
        return asked

    return install


@pytest.mark.parametrize(
    ("statuses", "code"), [((PASS,), 0), ((PASS, NOTED, SKIPPED), 0), ((PASS, FAIL, NOTED), 1)], ids=str
)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=str)
def test_only_a_failure_makes_the_exit_code_1(
    run_cli: Run, examined: Callable[..., list[Any]], statuses: tuple[str, ...], code: int, flags: list[str]
) -> None:
    examined(*statuses)
    result = run_cli(["doctor", *flags])
    assert (result.exit_code, result.stderr) == (code, "")


def test_the_text_fits_80_columns_and_keeps_brackets(run_cli: Run, examined: Callable[..., list[Any]]) -> None:
    examined(PASS, NOTED)
    result = run_cli(["doctor"], env={"COLUMNS": "200"})
    assert "noted     cpu, rounding [1]: 1 of 2 differ\n" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.splitlines()[-1].startswith("done      2 checks: 1 pass, 0 fail, 1 noted, 0 skipped")


def test_json_is_one_strict_document(run_cli: Run, examined: Callable[..., list[Any]]) -> None:
    examined(PASS, FAIL)
    result = run_cli(["doctor", "--json"])
    document = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    assert list(document)[:5] == ["schema_version", "tool", "command", "environment", "verdict"]
    assert document["command"] == ["bf16forensics", "doctor", "--json"]
    assert (document["verdict"], document["environment"]["device"]) == ("fail", "cpu")
    assert [check["status"] for check in document["checks"]] == ["pass", "fail"]


@pytest.mark.parametrize(
    ("flags", "device"), [([], None), (["--device", "cpu"], "cpu"), (["--device", "cuda"], "cuda")]
)
def test_the_device_is_passed_on(
    run_cli: Run, examined: Callable[..., list[Any]], flags: list[str], device: str | None
) -> None:
    asked = examined(PASS)
    assert run_cli(["doctor", *flags]).exit_code == 0
    assert asked == [device]


def test_a_missing_gpu_is_one_line(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run_cli(["doctor", "--device", "cuda"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: torch ")
    assert result.stderr.endswith("; leave --device out to test the processor\n")
    assert result.stderr.count("\n") == 1


def test_an_unknown_device_is_a_usage_error(run_cli: Run) -> None:
    result = run_cli(["doctor", "--device", "tpu"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_this_machine_passes(run_cli_process: Run, encoding: str) -> None:
    result = run_cli_process(["doctor", "--device", "cpu"], encoding=encoding)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "VERDICT   everything tested that the tool relies on holds here\n" in result.stdout
    assert " 0 fail, " in result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_without_triton_the_rest_is_tested(run_python: Run) -> None:
    code = (
        "import sys\n"
        "from importlib import util\n"
        "right = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'triton' else right(name, *rest)\n"
        "from bf16forensics.__main__ import main\n"
        "main(['doctor', '--device', 'cpu', '--json'])\n"
    )
    result = run_python(["-c", code])
    assert result.stderr == ""
    document = json.loads(result.stdout)
    kernel = [check for check in document["checks"] if check["where"] == "interpreter"]
    assert [check["status"] for check in kernel] == ["skipped", "skipped"]
    assert kernel[0]["observed"] == "Triton is not installed; install bf16forensics[gpu]"
    assert document["verdict"] == "pass"
    assert sys.version.split()[0] == document["environment"]["python"]
