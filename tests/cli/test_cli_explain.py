"""`bf16forensics explain`."""

import json

import pytest
import typer
from typer.testing import CliRunner

from bf16forensics.commands.explain import explain
from bf16forensics.errors import InputError
from bf16forensics.verdict.catalogue import entries


@pytest.fixture
def run_explain(monkeypatch):
    """Runs the command by itself."""
    app = typer.Typer()
    app.command()(explain)

    def run(*args, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        return CliRunner().invoke(app, list(args))

    return run


@pytest.mark.parametrize("item", entries(), ids=lambda item: item.code)
def test_every_code_is_explained(run_explain, item):
    done = run_explain(item.code.lower())
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{item.code} {item.name} ({item.severity})\n{item.title}\n")
    flat = " ".join(done.stdout.split())
    for text in (item.what, item.why, item.how, item.limits, item.would_refute, item.next_step, *item.references):
        assert text in flat
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.isascii()


@pytest.mark.parametrize("item", entries(), ids=lambda item: item.code)
def test_json_of_a_code(run_explain, item):
    document = json.loads(run_explain(item.code, "--json").stdout)
    assert document["schema_version"] == 1
    (code,) = document["codes"]
    assert (code["code"], code["how"]) == (item.code, item.how)


def test_without_a_code_all_are_listed(run_explain):
    done = run_explain()
    assert [line[:5] for line in done.stdout.splitlines() if line.startswith("BF")] == [i.code for i in entries()]
    assert len(json.loads(run_explain("--json").stdout)["codes"]) == len(entries())


def test_an_unknown_code_is_an_input_error(run_explain):
    error = run_explain("BF310").exception
    assert isinstance(error, InputError)
    assert error.exit_code == 2
    assert "nearest:" in str(error)
    assert "BF301" in str(error)
