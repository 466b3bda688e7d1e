"""Recorded batches kept as tensors: ids, labels, attention mask, position ids and steps.

Shapes: S sequences, T positions.
"""

from pathlib import Path

import torch

from bf16forensics.errors import InputError
from bf16forensics.load.batch import IGNORED_LABEL, RecordedBatch
from bf16forensics.load.names import three_of
from bf16forensics.load.tensors import NAMELESS, TensorFile, read_tensors

_IDS = ("ids", "input_ids")
_NAMES = frozenset({*_IDS, "labels", "targets", "attention_mask", "position_ids", "steps"})


def load_tensor_batch(
    path: str | Path, *, block_size: int, vocab_size: int, sequences: int | None = None
) -> RecordedBatch:
    """Reads a batch from safetensors, npz, npy (ids only) or a torch file.

    Entries: `ids` or `input_ids` [S, T] or [T]; at most one of `targets` (aligned: targets[t] belongs to position t)
    and `labels` (Hugging Face convention: same positions as the ids, shifted here by one); `attention_mask` (1 real);
    `position_ids`; `steps` [S] or one number. Without either kind of labels the next token is the target. A target
    whose own token is padding is ignored. How the labels were read is noted.

    Args:
        path: the file.
        block_size: longest sequence of the model.
        vocab_size: rows of the embedding.
        sequences: the first so many of each step (of the file when it has no steps); None for all.

    Returns:
        The batch, int64.

    Raises:
        InputError: unreadable; no ids; a dtype that is no integer; another shape; values out of range (with sequence
            and position); a sequence too long, empty, or without any label.
    """
    file = read_tensors(path, "batch")
    where = file.path
    ids = _ids(file, block_size, vocab_size)
    count, length = ids.shape
    notes = list(file.notes)
    attention = _attention_mask(file, count, length)
    labels = _labels(file, ids, attention, vocab_size, notes)
    positions = _optional(file, "position_ids", count, length)
    if positions is not None:
        _check_range(positions, "position_ids", 0, block_size, where, "the position table has", "rows")
    steps = _steps(file, count)
    kept, per_step = _first_of_each(steps, sequences, where)
    unused = [name for name in file.tensors if name not in _NAMES and name != NAMELESS]
    if unused:
        notes.append(f"entries of the batch file not used: {', '.join(unused)}")
    labels = labels[kept]
    empty = (labels == IGNORED_LABEL).all(dim=1)
    if bool(empty.any()):
        raise InputError(f"{where}: sequence {kept[int(empty.int().argmax())]} has no label to learn from (every label "
                         "is ignored); leave it out")  # fmt: skip
    return RecordedBatch(
        ids=ids[kept],
        labels=labels,
        attention_mask=None if attention is None else attention[kept],
        position_ids=None if positions is None else positions[kept],
        steps=tuple(steps[row] for row in kept),
        line_of_sequence=(None,) * len(kept),
        step_sequences=per_step,
        notes=tuple(notes),
        files=(file.facts,),
    )


def _ids(file: TensorFile, block_size: int, vocab_size: int) -> torch.Tensor:
    names = [name for name in _IDS if name in file.tensors]
    if len(names) == 2:
        raise InputError(f"{file.path}: holds both ids and input_ids; keep one")
    if not names and list(file.tensors) == [NAMELESS]:
        names = [NAMELESS]
    if not names:
        raise InputError(f"{file.path}: no ids or input_ids; found {three_of(file.tensors)}")
    label = names[0] or "ids"
    ids = _integers(file.tensors[names[0]], label, file.path)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2:
        raise InputError(f"{file.path}: '{label}' has shape {list(ids.shape)}; expected [sequences, positions]")
    if ids.numel() == 0:
        raise InputError(f"{file.path}: '{label}' is empty (shape {list(ids.shape)}); give at least one token")
    if ids.shape[1] > block_size:
        raise InputError(f"{file.path}: sequences of {ids.shape[1]} tokens are longer than the model's {block_size} "
                         "positions; cut them")  # fmt: skip
    _check_range(ids, label, 0, vocab_size, file.path, "the vocabulary has", "entries")
    return ids


def _labels(
    file: TensorFile, ids: torch.Tensor, attention: torch.Tensor | None, vocab_size: int, notes: list[str]
) -> torch.Tensor:
    count, length = ids.shape
    targets = _optional(file, "targets", count, length)
    labels = _optional(file, "labels", count, length)
    if targets is not None and labels is not None:
        raise InputError(f"{file.path}: holds both labels (shifted here) and targets (aligned); keep one")
    for name, values in (("targets", targets), ("labels", labels)):
        if values is not None:
            kept = torch.where(values == IGNORED_LABEL, torch.zeros_like(values), values)
            _check_range(kept, name, 0, vocab_size, file.path, "the vocabulary has", "entries (-100 ignores)")
    if targets is not None:
        notes.append("targets are aligned: targets[t] is what position t predicts")
        return targets
    source = ids if labels is None else labels
    if labels is None:
        notes.append("no labels: each position predicts the next token, the last one nothing")
        if attention is not None:
            source = torch.where(attention, source, torch.full_like(source, IGNORED_LABEL))
    else:
        notes.append("labels are at the positions of their ids (Hugging Face): position t predicts labels[t + 1]")
    shifted = torch.full_like(ids, IGNORED_LABEL)
    shifted[:, :-1] = source[:, 1:]
    if labels is None and attention is not None:
        shifted = torch.where(attention, shifted, torch.full_like(shifted, IGNORED_LABEL))
    return shifted


def _attention_mask(file: TensorFile, count: int, length: int) -> torch.Tensor | None:
    values = file.tensors.get("attention_mask")
    if values is None:
        return None
    full = values[None] if values.dim() == 1 else values
    if tuple(full.shape) != (count, length):
        raise InputError(f"{file.path}: 'attention_mask' has shape {list(values.shape)}, expected [{count}, {length}]")
    wide = full.to(torch.float64)
    if not bool(((wide == 0) | (wide == 1)).all()):
        raise InputError(f"{file.path}: 'attention_mask' holds values other than 0 and 1; expected 1 for real tokens")
    padded = ~(wide == 1).any(dim=1)
    if bool(padded.any()):
        raise InputError(f"{file.path}: sequence {int(padded.int().argmax())} is padding only; leave it out")
    return wide == 1


def _steps(file: TensorFile, count: int) -> list[int | None]:
    values = file.tensors.get("steps")
    if values is None:
        return [None] * count
    steps = _integers(values, "steps", file.path).flatten()
    if steps.numel() == 1:
        steps = steps.expand(count)
    if steps.numel() != count:
        raise InputError(f"{file.path}: 'steps' holds {steps.numel()} numbers for {count} sequences; give one each")
    return [int(step) for step in steps.tolist()]


def _first_of_each(steps: list[int | None], sequences: int | None, where: str) -> tuple[list[int], int]:
    of_step: dict[int | None, list[int]] = {}
    for row, step in enumerate(steps):
        of_step.setdefault(step, []).append(row)
    sizes = [len(rows) for rows in of_step.values()]
    if sequences is None:
        return list(range(len(steps))), max(sizes)
    if not 1 <= sequences <= min(sizes):
        raise InputError(f"{where}: holds {min(sizes)} sequences a step; --sequences must be 1 to {min(sizes)}, got "
                         f"{sequences}")  # fmt: skip
    return sorted(row for rows in of_step.values() for row in rows[:sequences]), max(sizes)


def _optional(file: TensorFile, name: str, count: int, length: int) -> torch.Tensor | None:
    if name not in file.tensors:
        return None
    values = _integers(file.tensors[name], name, file.path)
    if values.dim() == 1 and (count == 1 or name == "position_ids"):
        values = values[None].expand(count, -1)
    if tuple(values.shape) != (count, length):
        raise InputError(f"{file.path}: '{name}' has shape {list(file.tensors[name].shape)}, expected "
                         f"[{count}, {length}]")  # fmt: skip
    return values


def _integers(tensor: torch.Tensor, name: str, where: str) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{where}: '{name}' has dtype {kind}; expected integers")
    return tensor.to(torch.int64)


def _check_range(values: torch.Tensor, name: str, low: int, end: int, where: str, what: str, unit: str) -> None:
    outside = (values < low) | (values >= end)
    if bool(outside.any()):
        sequence, position = (int(number) for number in outside.nonzero()[0])
        raise InputError(f"{where}: '{name}' of sequence {sequence}, position {position} is "
                         f"{int(values[sequence, position])}; {what} {end} {unit}")  # fmt: skip
