"""One sequence of a recorded batch, as a model takes it."""

from dataclasses import dataclass, replace

import torch

from bf16forensics.load.batch import IGNORED_LABEL, RecordedBatch


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

    def to(self, device: torch.device) -> "SequenceInput":
        """The same sequence with its tensors on a device."""
        return replace(
            self,
            ids=self.ids.to(device),
            labels=self.labels.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            real=None if self.real is None else self.real.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Which tokens have a label, asked once and where asking does not wait for a GPU."""

    any: bool
    all: bool

    @classmethod
    def of(cls, labels: torch.Tensor) -> "Labels":
        """Looks at [T] targets."""
        is_labelled = labels != IGNORED_LABEL
        return cls(any=bool(is_labelled.any()), all=bool(is_labelled.all()))


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
