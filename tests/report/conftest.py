"""The fakes that the tests of verdicts use too."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module fakes.py."""
    path = Path(__file__).resolve().parents[1] / "report" / "fakes.py"
    spec = importlib.util.spec_from_file_location("bf16forensics_test_fakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
