"""Small records with known answers, through the command line and through the Python interface."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.result import DualPass
from bf16forensics.capture.raw import RawGeometry, raw_source
from bf16forensics.load.records import load_record
from bf16forensics.recipe.derive import resolve

Tensors = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Localized:
    """What `localize --json` left behind."""

    exit_code: int
    #: None unless stdout was exactly one strict JSON document.
    document: dict[str, Any] | None
    stdout: str
    stderr: str

    @property
    def heads(self) -> list[dict[str, Any]]:
        assert self.document is not None, self.stderr
        found: list[dict[str, Any]] = self.document["heads"]
        return found

    @property
    def head(self) -> dict[str, Any]:
        """The only head."""
        assert len(self.heads) == 1
        return self.heads[0]

    def codes(self) -> list[str]:
        assert self.document is not None
        return [finding["code"] for finding in self.document["findings"]]

    def refusal(self) -> str:
        """The error line of a run that was refused before any number."""
        assert self.exit_code == 2, (self.exit_code, self.stderr)
        assert self.stdout == ""
        assert self.stderr.startswith("error: ")
        assert self.stderr.count("\n") == 1
        return self.stderr


def forbidden(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes a record: npz, safetensors, a torch file, or a folder of NAME.npy."""

    def write(tensors: Tensors, kind: str = "npz") -> Path:
        path = tmp_path / f"record-{len(list(tmp_path.iterdir()))}.{kind}"
        if kind == "npz":
            np.savez(path, **{name: np.asarray(value) for name, value in tensors.items()})
        elif kind == "npy":
            path.mkdir()
            for name, value in tensors.items():
                np.save(path / f"{name}.npy", value)
        else:
            as_torch = {
                n: v if isinstance(v, torch.Tensor) else torch.from_numpy(np.asarray(v)) for n, v in tensors.items()
            }
            if kind == "pt":
                torch.save(as_torch, path)
            else:
                from safetensors.torch import save_file

                save_file({name: value.contiguous() for name, value in as_torch.items()}, path)
        return path

    return write


@pytest.fixture
def localize(run_cli: Callable[..., Any], save: Callable[..., Path]) -> Callable[..., Localized]:
    """`bf16forensics localize --record FILE --json` on tensors or on a path."""

    def run(record: Tensors | Path, *options: object, layout: str | None = "bhtd", kind: str = "npz") -> Localized:
        path = record if isinstance(record, Path) else save(record, kind)
        given = [] if layout is None else ["--layout", layout]
        result = run_cli(["localize", "--record", path, *given, *options, "--json"])
        document = None
        if result.stdout:
            document = json.loads(result.stdout, parse_constant=forbidden)
            assert result.stdout.endswith("\n")
        return Localized(exit_code=result.exit_code, document=document, stdout=result.stdout, stderr=result.stderr)

    return run


@pytest.fixture
def passes(save: Callable[..., Path]) -> Callable[..., list[DualPass]]:
    """The dual pass of every sequence of a record, through the Python interface."""

    def run(
        tensors: Tensors | Path,
        recipe: str = "fa2",
        reference: str = "fp64",
        layout: str = "bhtd",
        kind: str = "npz",
        **options: Any,
    ) -> list[DualPass]:
        path = tensors if isinstance(tensors, Path) else save(tensors, kind)
        source = raw_source(load_record(path, layout=layout), RawGeometry(**options))
        return [
            dual_pass(record, resolve(recipe), reference)
            for sequence in range(source.shape.num_sequences)
            for record in source.records(sequence, lambda loss: None)
        ]

    return run


@pytest.fixture
def record() -> Callable[..., dict[str, np.ndarray]]:
    """[T, D] rows of one head as a record; dO defaults to ones."""

    def make(q: Any, k: Any, v: Any, do: Any = None, **more: Any) -> dict[str, np.ndarray]:
        tensors = {name: np.asarray(value, np.float32) for name, value in (("q", q), ("k", k), ("v", v))}
        tensors["do"] = (
            np.ones((len(tensors["q"]), tensors["v"].shape[1]), np.float32)
            if do is None
            else np.asarray(do, np.float32)
        )
        return {name: value[None, None] for name, value in tensors.items()} | more

    return make
