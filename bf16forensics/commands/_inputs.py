"""The input options of a command, taken together: which belong to which kind of input, and how they are opened."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bf16forensics.commands._given import ModelInput, RecordInput
from bf16forensics.commands._source import Opened, open_source
from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.recipe.model import Recipe

#: Options that only one of the two kinds of input has.
RECORD_OPTIONS = ("layout", "dtype", "causal", "window", "softcap", "scale")
MODEL_OPTIONS = ("batch", "indices", "lines", "first_step", "n_head", "activations", "allow_bin", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenInput:
    """What the command line says about the input: a checkpoint with a batch, or a record."""

    checkpoint: Path | None
    batch: Path | None
    indices: Path | None
    #: A:B.
    lines: str | None
    sequences: int | None
    first_step: int | None
    n_head: int | None
    allow_bin: bool
    #: "amp-bf16" or "fp32".
    activations: str
    record: Path | None
    #: "bhtd", "bthd" or None.
    layout: str | None
    #: "bf16", "fp16", "fp32" or None.
    dtype: str | None
    causal: bool
    window: int | None
    softcap: float | None
    scale: float | None
    #: Where a model runs: "auto", "cpu" or "cuda".
    device: str = "cpu"

    def check(self, context: typer.Context) -> None:
        """Refuses options of the kind of input that is not there.

        Raises:
            InputError: such an option was given.
        """
        if self.checkpoint is not None and self.record is None:
            refuse(context, RECORD_OPTIONS, "--record FILE")
        if self.record is not None and self.checkpoint is None:
            refuse(context, MODEL_OPTIONS, "a checkpoint")

    def open(self, recipe: "Recipe", *, gpu_computes: bool = False) -> Opened:
        """Opens the input, with a sign of life on a terminal.

        Args:
            recipe: recipe that the attention of a mixed-precision model runs by.
            gpu_computes: whether a GPU computes the dual pass; the device "auto" follows it.

        Raises:
            InputError: nothing or too much was given, or what was given cannot be used.
        """
        with reading():
            return open_source(self._model(recipe, gpu_computes), self._record())

    def _model(self, recipe: "Recipe", gpu_computes: bool) -> ModelInput | None:
        if self.checkpoint is None:
            return None
        from bf16forensics.capture.device import capture_device

        return ModelInput(
            checkpoint=self.checkpoint,
            batch=self.batch,
            indices=self.indices,
            lines=self.lines,
            sequences=self.sequences,
            first_step=self.first_step,
            n_head=self.n_head,
            activations=self.activations,
            recipe=recipe,
            allow_bin=self.allow_bin,
            device=capture_device(self.device, gpu_computes=gpu_computes).type,
        )

    def _record(self) -> RecordInput | None:
        if self.record is None:
            return None
        return RecordInput(
            path=self.record,
            layout=self.layout,
            dtype=self.dtype,
            sequences=self.sequences,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
        )


def refuse(context: typer.Context, names: tuple[str, ...], owner: str) -> None:
    """An option that would be ignored is refused: whoever gave it believes that it was applied.

    Raises:
        InputError: one of the options was given.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise InputError(f"--{name.replace('_', '-')} goes with {owner} only; leave it out")


def refuse_inside(path: Path, case: Path | None) -> None:
    """Refuses an output that would lie in a case.

    Raises:
        InputError: it would.
    """
    if case is not None and case.resolve() in path.resolve().parents:
        raise InputError(f"{path} lies in the case {case}, which holds nothing but the case; name a file outside it")


def reading() -> AbstractContextManager[object]:
    """A sign of life while files are hashed and libraries imported: on a terminal only."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status("reading the input") if console.is_terminal else nullcontext()
