"""The command line as a whole: exit codes, one-line errors, consoles."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer

import bf16forensics
from bf16forensics import cli
from bf16forensics.__main__ import main
from bf16forensics.errors import InputError, InterruptedRun

Run = Callable[..., Any]


def failing_app(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise error

    return app


def test_no_arguments_print_the_help_and_exit_2(run_cli: Run) -> None:
    result = run_cli([])
    assert result.exit_code == 2
    assert result.stdout.startswith("Usage: bf16forensics")
    assert result.stderr == ""


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_commands_and_exit_codes(run_cli: Run, flag: str) -> None:
    result = run_cli([flag])
    assert (result.exit_code, result.stderr) == (0, "")
    for word in ("recipe", "Exit codes", "130", "--version"):
        assert word in result.stdout


def test_version(run_cli: Run) -> None:
    result = run_cli(["--version"])
    assert (result.exit_code, result.stdout) == (0, f"bf16forensics {bf16forensics.__version__}\n")


@pytest.mark.parametrize("args", [["--nope"], ["nope"], ["recipe", "show"], ["recipe", "list", "--nope"]], ids=" ".join)
def test_usage_errors_are_one_line_and_exit_2(run_cli: Run, args: list[str]) -> None:
    result = run_cli(args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "--help" in result.stderr


def test_usage_error_points_to_the_help_of_its_command(run_cli: Run) -> None:
    assert "bf16forensics recipe show --help" in run_cli(["recipe", "show"]).stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("q.npy: empty;\nwrite it again"), 2, "error: q.npy: empty; write it again\n"),
        (InterruptedRun("stopped after 3 of 8 sequences"), 130, "error: stopped after 3 of 8 sequences\n"),
        (typer.BadParameter("must be even"), 2, "error: Invalid value: must be even (see: bf16forensics --help)\n"),
        (typer.Abort(), 130, "error: interrupted\n"),
        (typer.Exit(1), 1, ""),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exit_code_of_an_exception(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    monkeypatch.setattr(cli, "build", lambda *_: failing_app(error))
    result = run_cli([])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", message)


def test_an_internal_error_is_one_line_and_exits_3(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build", lambda *_: failing_app(ValueError("a [bf16]\nsurprise")))
    result = run_cli([])
    assert result.exit_code == 3
    assert result.stderr == (
        "error: internal error: ValueError: a [bf16] surprise (set BF16FORENSICS_TRACEBACK=1 for the traceback)\n"
    )


@pytest.mark.parametrize(("value", "is_shown"), [("1", True), ("0", False), ("", False)])
def test_traceback_on_request(run_cli: Run, monkeypatch: pytest.MonkeyPatch, value: str, is_shown: bool) -> None:
    monkeypatch.setattr(cli, "build", lambda *_: failing_app(ValueError("surprise")))
    result = run_cli([], env={"BF16FORENSICS_TRACEBACK": value})
    assert ("Traceback (most recent call last)" in result.stderr) == is_shown
    assert result.exit_code == 3


def test_system_exit_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build", lambda *_: failing_app(SystemExit(7)))
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 7


def test_a_returned_number_is_the_exit_code(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(lambda: 1)
    monkeypatch.setattr(cli, "build", lambda *_: app)
    assert run_cli([]).exit_code == 1


def test_the_streams_are_the_callers_again_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["--version"]) == 0
        assert sys.stdout is stream
    assert (tmp_path / "out").read_text() == f"bf16forensics {bf16forensics.__version__}\n"


def test_works_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["--version"]) == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_console_encoding_carries_any_message(run_cli_process: Run, encoding: str) -> None:
    result = run_cli_process(["recipe", "show", "fa2+\u03b4=bf16"], encoding=encoding)
    assert result.exit_code == 2
    assert ("\u03b4" if encoding == "utf-8" else "\\u03b4") in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("args", [["--help"], ["recipe", "list"], ["recipe", "show", "paper"]], ids=" ".join)
def test_legacy_consoles_lose_nothing(run_cli_process: Run, encoding: str, args: list[str]) -> None:
    plain = run_cli_process(args)
    legacy = run_cli_process(args, encoding=encoding)
    assert legacy == plain
    assert plain.exit_code == 0


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"GITHUB_ACTIONS": "true"}], ids=str)
def test_no_escape_codes_in_a_pipe(run_cli_process: Run, variables: dict[str, str]) -> None:
    result = run_cli_process(["--help"], env=variables)
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.parametrize("args", [["--help"], ["recipe", "--help"], ["recipe", "list", "--help"]], ids=" ".join)
def test_help_fits_80_columns(run_cli: Run, args: list[str]) -> None:
    result = run_cli(args, env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.skipif(os.name == "nt", reason="the pipe is closed in the POSIX way")
@pytest.mark.parametrize(("args", "code"), [(["recipe", "list"], 0), (["recipe", "show", "nope"], 2), ([], 2)], ids=str)
def test_a_reader_that_went_away_changes_nothing(args: list[str], code: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bf16forensics", *args],
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert done.returncode == code
    assert b"Broken" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_command_named_first_comes_alone_and_is_the_same() -> None:
    whole = typer.main.get_command(cli.build()).commands  # type: ignore[attr-defined]
    assert set(whole) == set(cli._COMMANDS)
    for name in whole:
        alone = typer.main.get_command(cli.build(name)).commands  # type: ignore[attr-defined]
        assert list(alone) == [name]
        assert [option.opts for option in alone[name].params] == [option.opts for option in whole[name].params]
    for other in ("--help", "localise", "--version"):
        assert list(typer.main.get_command(cli.build(other)).commands) == list(whole)  # type: ignore[attr-defined]
