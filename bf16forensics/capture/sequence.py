"""One sequence of a recorded batch, as a model takes it."""

from dataclasses import dataclass

import torch

from bf16forensics.load.batch import RecordedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """One sequence of a recorded batch."""

    #: Position among all sequences analysed, 0-based.
    index: int
    #: Training step; None when unknown.
    step: int | None
    #: [T] int64 token ids.
    ids: torch.Tensor
    #: [T] int64 targets aligned with `ids`; -100 is ignored.
    labels: torch.Tensor
    #: [T] int64 positions; None for 0, 1, 2, ...
    position_ids: torch.Tensor | None = None
    #: [T] bool, True where the token is real; None when nothing is padded.
    real: torch.Tensor | None = None


def sequence_of(batch: RecordedBatch, index: int) -> SequenceInput:
    """The sequence `index` (0-based) of a batch."""
    return SequenceInput(
        index=index,
        step=batch.steps[index],
        ids=batch.ids[index],
        labels=batch.labels[index],
        position_ids=None if batch.position_ids is None else batch.position_ids[index],
        real=None if batch.attention_mask is None else batch.attention_mask[index],
    )


def step_groups(batch: RecordedBatch) -> tuple[int, ...]:
    """Equal numbers for sequences of one recorded step: those of one line, or of one step where there are no lines."""
    lines = zip(batch.line_of_sequence, batch.steps, strict=True)
    return tuple(line if line is not None else step or 0 for line, step in lines)
