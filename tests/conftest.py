"""Fixtures of every test: the command line with a fixed console, and the real data where it is present."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

# Triton decides when a jit function is defined, its own library's among them, whether kernels are interpreted: so the
# variable is set before any test module is read.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

try:
    from hypothesis import settings
except ImportError:
    # The kernel tests run on machines that have little more than torch and pytest.
    pass
else:
    # The same examples in every run and no time limit an example: a failure never depends on luck or on a busy machine.
    settings.register_profile("project", derandomize=True, deadline=None, database=None)
    settings.load_profile("project")

#: Repository root.
ROOT = Path(__file__).resolve().parents[1]

#: A console without colours, 100 columns wide; FORCE_COLOR and GITHUB_ACTIONS would put escapes into the help text.
CONSOLE = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}
CONSOLE_UNSET = ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "BF16FORENSICS_TRACEBACK", "PYTHONIOENCODING")


@dataclass(frozen=True, slots=True, kw_only=True)
class CliResult:
    """What one command left behind."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def repository() -> Path:
    """The repository root."""
    return ROOT


@pytest.fixture
def run_cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[object]], CliResult]:
    """Runs `bf16forensics ARGS` in this process, through main()."""
    from bf16forensics.__main__ import main

    def run(args: Sequence[object], *, env: Mapping[str, str] | None = None) -> CliResult:
        with monkeypatch.context() as patch:
            for name in CONSOLE_UNSET:
                patch.delenv(name, raising=False)
            for name, value in {**CONSOLE, **(env or {})}.items():
                patch.setenv(name, value)
            capsys.readouterr()
            try:
                exit_code = main([str(arg) for arg in args])
            except SystemExit as stop:
                exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
        return CliResult(exit_code=exit_code, stdout=captured.out, stderr=captured.err)

    return run


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[[Sequence[object]], CliResult]:
    """Runs `python ARGS` in a fresh process, in an empty directory that is not on sys.path."""

    def run(
        args: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        encoding: str = "utf-8",
        timeout: float = 300,
    ) -> CliResult:
        inherited = {name: value for name, value in os.environ.items() if name not in CONSOLE_UNSET}
        done = subprocess.run(
            [sys.executable, "-P", *(str(arg) for arg in args)],
            env={**inherited, **CONSOLE, "PYTHONIOENCODING": encoding, **(env or {})},
            cwd=cwd or tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        return CliResult(
            exit_code=done.returncode, stdout=done.stdout.decode(encoding), stderr=done.stderr.decode(encoding)
        )

    return run


@pytest.fixture
def run_cli_process(run_python: Callable[..., CliResult]) -> Callable[[Sequence[object]], CliResult]:
    """Runs `python -m bf16forensics ARGS` in a fresh process."""

    def run(args: Sequence[object], **options: object) -> CliResult:
        return run_python(["-m", "bf16forensics", *args], **options)

    return run


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Finds a folder of real data beside the repository by name, and skips the test where it is absent."""

    def find(name: str) -> Path:
        path = ROOT.parent / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"real data {name!r} is not present beside the repository")
        return path

    return find


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module tests/report/fakes.py: made-up results for the tests of verdicts and reports."""
    path = ROOT / "tests" / "report" / "fakes.py"
    spec = importlib.util.spec_from_file_location("bf16forensics_test_fakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
