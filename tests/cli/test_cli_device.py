"""`--device`: where the captured model runs, as far as a machine without a GPU can tell."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def inputs() -> ModuleType:
    """The module test_cli_localize.py: a tiny model and records."""
    path = Path(__file__).with_name("test_cli_localize.py")
    spec = importlib.util.spec_from_file_location("bf16forensics_test_inputs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(inputs: ModuleType, tmp_path: Path) -> list[object]:
    """Arguments of a tiny model over two lines of two sequences."""
    checkpoint = inputs.save_checkpoint(tmp_path / "ckpt.pt", inputs.state())
    tokens = torch.randint(0, inputs.VOCABULARY, (100,), generator=torch.Generator().manual_seed(0))
    tokens.to(torch.uint16).numpy().tofile(tmp_path / "train.bin")
    (tmp_path / "indices.txt").write_text("3,40\n17,60\n")
    return [checkpoint, "--batch", tmp_path / "train.bin", "--indices", tmp_path / "indices.txt"]


def test_a_missing_gpu_is_said(run_cli: Run, model: list[object]) -> None:
    done = run_cli(["localize", *model, "--device", "cuda"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["error: --device cuda: no CUDA device; use --device cpu"]


def test_a_record_has_no_device(run_cli: Run, inputs: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(inputs.tensors(), tmp_path / "record.safetensors")
    given = ["--record", tmp_path / "record.safetensors", "--layout", "bhtd", "--device", "cpu"]
    done = run_cli(["localize", *given])
    assert done.exit_code == 2
    assert "--device goes with a checkpoint only; leave it out" in done.stderr


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_document_says_where_the_model_ran(run_cli: Run, model: list[object], device: str) -> None:
    document = json.loads(run_cli(["localize", *model, "--device", device, "--json"]).stdout)
    assert document["inputs"]["capture"]["device"] == "cpu"
    assert not any("the model ran on" in note for note in document["inputs"]["notes"])


@pytest.mark.parametrize("device", ["cuda", None], ids=["captured on a GPU", "an older case"])
def test_a_case_of_another_device_is_captured_again_and_says_so(
    run_cli: Run, model: list[object], tmp_path: Path, device: str | None
) -> None:
    case = tmp_path / "case"
    run_cli(["localize", *model, "-o", case])
    document = json.loads((case / "case.json").read_text())
    document["inputs"]["capture"]["device"] = device
    (case / "case.json").write_text(json.dumps(document))
    traced = run_cli(["trace-head", case, "--layer", "1", "--head", "2", "--recapture", "--json"])
    notes = " ".join(json.loads(traced.stdout)["notes"])
    assert "captured again from the inputs of the case" in notes
    assert ("the case was captured on cuda, which is not here, and again on cpu" in notes) is (device == "cuda")
