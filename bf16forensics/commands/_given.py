"""An input as the options of a command name it, before anything is opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.investigate.inputs import InputOptions
    from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """A checkpoint and its recorded batch."""

    checkpoint: Path
    batch: Path | None
    indices: Path | None
    lines: str | None
    sequences: int | None
    first_step: int | None
    n_head: int | None
    #: "amp-bf16" or "fp32".
    activations: str
    #: Recipe of the run: the attention of a mixed-precision model runs by it.
    recipe: "Recipe"
    #: Whether pytorch_model.bin files may be read.
    allow_bin: bool = False
    #: Where the model runs: "cpu", or "cuda" where there is a GPU.
    device: str = "cpu"

    @property
    def options(self) -> "InputOptions":
        """The same as a case stores it.

        Raises:
            InputError: `lines` is not of the form A:B.
        """
        from bf16forensics.investigate.inputs import InputOptions

        return InputOptions(
            checkpoint=str(self.checkpoint),
            batch=None if self.batch is None else str(self.batch),
            indices=None if self.indices is None else str(self.indices),
            lines=parse_lines(self.lines),
            sequences=self.sequences,
            first_step=self.first_step,
            n_head=self.n_head,
            activations=self.activations,
            allow_bin=self.allow_bin,
            device=self.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInput:
    """A file or folder of raw tensors."""

    path: Path
    layout: str | None
    dtype: str | None
    sequences: int | None
    causal: bool
    window: int | None
    softcap: float | None
    scale: float | None

    @property
    def options(self) -> "InputOptions":
        """The same as a case stores it."""
        from bf16forensics.investigate.inputs import InputOptions

        return InputOptions(
            record=str(self.path),
            layout=self.layout,
            dtype=self.dtype,
            sequences=self.sequences,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
        )


def parse_lines(text: str | None) -> tuple[int, int] | None:
    """Reads A:B, a half-open range of 0-based lines; None for None.

    Raises:
        InputError: not of that form.
    """
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--lines must be A:B, 0-based and half-open, such as 0:8; got {text!r}")
    return int(parts[0]), int(parts[1])
