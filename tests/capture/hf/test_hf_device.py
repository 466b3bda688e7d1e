"""A Hugging Face model that runs on another device: simulated, because what is asked is where its tensors lie."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.capture.activations import Fp32Activations
from bf16forensics.capture.hf import capture as capture_module
from bf16forensics.capture.hf.capture import hf_capture
from bf16forensics.capture.hf.model import load_hf_model
from bf16forensics.capture.hf.placed import PlacedWeights
from bf16forensics.capture.hf.skeleton import Skeleton

TENSORS = ("q", "k", "v", "do", "x")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module tests/evidence/simulated_device.py under another name than meta, which has a meaning of its own here.

    Its tensors have no addresses, by which graphs are counted: none is kept.
    """
    path = Path(__file__).resolve().parents[2] / "evidence" / "simulated_device.py"
    spec = importlib.util.spec_from_file_location("bf16forensics_test_simulated_lazy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", torch.device("lazy"))
    monkeypatch.setattr(capture_module, "GRAPH_BUDGET_BYTES", 0)
    return module


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "olmo2", "deepseek"])
def test_a_capture_keeps_to_its_device(
    hf: ModuleType, simulated: ModuleType, tmp_path: Path, family: str, padded: bool
) -> None:
    """Learned positions, rotation, windows and two kinds of norm, experts; twice, with weights moved and held."""
    name, settings, _ = hf.FAMILIES[family]
    hf.save(hf.build(name, settings), tmp_path)
    ids, labels = hf.draw()
    more: dict[str, Any] = {"real": torch.arange(len(ids)) >= 3} if padded else {}
    expected, loss = hf.run(hf_capture(load_hf_model(tmp_path), Fp32Activations()), ids, labels, **more)
    model = load_hf_model(tmp_path)
    with simulated.SimulatedDevice():
        capture = hf_capture(model, Fp32Activations(), simulated.DEVICE)
        runs = [hf.run(capture, ids, labels, **more) for _ in range(2)]
    for found, found_loss in runs:
        assert found_loss == loss
        for mine, wanted in zip(found, expected, strict=True):
            for field in TENSORS:
                tensor, truth = getattr(mine, field), getattr(wanted, field)
                assert (tensor is None) == (truth is None), field
                if truth is not None:
                    assert tensor.device == simulated.DEVICE, field
                    assert torch.equal(tensor.held, truth), (mine.layer, field)
            assert (mine.query_path is None) == (wanted.query_path is None)
            if wanted.query_path is not None:
                assert mine.query_path.columns.device == simulated.DEVICE
                assert torch.equal(mine.query_path.query.detach().held, wanted.query_path.query.detach())
    assert f"the model ran on {simulated.DEVICE}" in capture.notes


@pytest.mark.parametrize("room", [0, 2**30])
def test_weights_are_held_while_they_fit(
    hf: ModuleType, simulated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    from bf16forensics.capture.hf import placed as placed_module

    monkeypatch.setattr(placed_module, "room_on", lambda device: room)
    name, settings, _ = hf.FAMILIES["llama"]
    hf.save(hf.build(name, settings), tmp_path, torch.bfloat16)
    model = load_hf_model(tmp_path)
    with simulated.SimulatedDevice():
        placed = PlacedWeights(model.weights, simulated.DEVICE)
        key = next(name for name in model.weights if name.endswith("q_proj.weight"))
        first, again = placed.get(key), placed.get(key)
        assert first is not None
        assert again is not None
        assert (first is again) is (room > 0)
        assert first.device == simulated.DEVICE
        assert first.dtype == torch.float32
        assert torch.equal(first.held, model.weights[key].float())
        assert len(list(placed.kept())) == (1 if room else 0)
        assert placed.get("no such weight") is None
        tables = Skeleton(model, [f"model.layers.{index}" for index in range(2)], placed).module
        real = [buffer for _, buffer in tables.named_buffers() if not buffer.is_meta]
        assert real
        assert all(buffer.device == simulated.DEVICE for buffer in real)
