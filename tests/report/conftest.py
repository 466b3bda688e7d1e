"""Fixtures of the report tests."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def traces() -> ModuleType:
    """The module trace_fakes.py: made-up traces of heads."""
    path = Path(__file__).with_name("trace_fakes.py")
    spec = importlib.util.spec_from_file_location("bf16forensics_test_trace_fakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
