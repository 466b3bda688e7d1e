"""How the input of a run was named: what it takes to read it again. Texts and numbers only, as a case stores them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """The options that name a checkpoint with its recorded batch, or a record. Paths are as the user gave them.

    Fields of the other kind of input are None.
    """

    #: Checkpoint file or directory; None for a record.
    checkpoint: str | None = None
    batch: str | None = None
    indices: str | None = None
    #: Half-open 0-based range of lines of the index file; None for all.
    lines: tuple[int, int] | None = None
    #: First so many sequences of each line, or of the record; None for all.
    sequences: int | None = None
    #: Step of line 0; None for the checkpoint's own + 1.
    first_step: int | None = None
    #: Heads, for a bare state dict.
    n_head: int | None = None
    #: "amp-bf16" or "fp32".
    activations: str | None = None
    #: Where the model ran, "cpu" or "cuda"; None for the CPU.
    device: str | None = None
    #: Whether pytorch_model.bin files may be read.
    allow_bin: bool | None = None
    #: Record file or folder; None for a checkpoint.
    record: str | None = None
    #: Axis order and storage format of a record; None where not given.
    layout: str | None = None
    dtype: str | None = None
    causal: bool | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
