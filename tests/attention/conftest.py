"""The oracles of the attention room, and records made of their calls."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry

RecordOf = Callable[..., AttentionRecord]


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The module tests/oracles.py."""
    path = Path(__file__).resolve().parents[1] / "oracles.py"
    spec = importlib.util.spec_from_file_location("bf16forensics_test_oracles", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def record_of() -> RecordOf:
    """Turns a call of the oracles into a record."""

    def tensor(values: np.ndarray | None) -> torch.Tensor | None:
        return None if values is None else torch.from_numpy(np.ascontiguousarray(values))

    def make(call: Any, x: torch.Tensor | None = None) -> AttentionRecord:
        masks = {
            name: tensor(getattr(call, name))
            for name in ("key_padding", "query_padding", "document_ids", "keep", "bias")
        }
        q, k, v, do = (tensor(getattr(call, name)) for name in ("q", "k", "v", "do"))
        assert q is not None
        assert k is not None
        assert v is not None
        return AttentionRecord(
            layer=0,
            sequence=0,
            step=None,
            storage="bf16",
            q=q,
            k=k,
            v=v,
            do=do,
            x=x,
            geometry=Geometry(scale=call.scale, causal=call.causal, window=call.window, softcap=call.softcap, **masks),
        )

    return make
