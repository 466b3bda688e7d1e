"""Helpers of the tests of Hugging Face captures, as fixtures: pytest imports no module beside a test."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _module(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"bf16forensics_test_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plain() -> ModuleType:
    """Models written out in plain torch."""
    return _module("plain_models")


@pytest.fixture(scope="session")
def hf() -> ModuleType:
    """Tiny models on disk and their captures."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return _module("hf_models")
