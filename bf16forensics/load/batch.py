"""The recorded batch, and its nanoGPT form: a file of uint16 tokens and a file of window starts.

Shapes: S sequences, T positions.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bf16forensics.errors import InputError
from bf16forensics.load.files import FileFacts, file_facts, first_bytes, unreadable

#: Label of a position that does not count in the loss.
IGNORED_LABEL = -100
#: Tokens at the start of a token file that are looked at besides the windows (8 MiB of file).
_SAMPLE_TOKENS = 1 << 22
_ZERO_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """Sequences of one or several recorded steps, in recorded order."""

    #: [S, T] int64 token ids.
    ids: torch.Tensor
    #: [S, T] int64; labels[s, t] is the target of position t (already shifted), -100 where there is none.
    labels: torch.Tensor
    #: [S, T] bool, True where the token is real; None when nothing is padded.
    attention_mask: torch.Tensor | None
    #: [S, T] int64 rows of the position table; None for 0, 1, 2, ...
    position_ids: torch.Tensor | None
    #: Training step of each sequence; None where unknown.
    steps: tuple[int | None, ...]
    #: 0-based line of the index file each sequence came from; None for other sources.
    line_of_sequence: tuple[int | None, ...]
    #: Sequences of one whole recorded step or line, before any cut (the largest where lines differ).
    step_sequences: int
    #: What a reader must know of how the batch was read.
    notes: tuple[str, ...]
    #: The files the batch came from.
    files: tuple[FileFacts, ...]

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.ids.shape[1])


def load_token_batch(
    tokens_path: str | Path,
    indices_path: str | Path,
    *,
    lines: tuple[int, int] | None,
    sequences: int | None,
    block_size: int,
    vocab_size: int,
    iter_num: int | None,
    first_step: int | None = None,
) -> RecordedBatch:
    """Cuts the windows of the given lines out of a nanoGPT token file.

    Line i of the index file holds the comma-separated starts of one micro-batch, that of step `iter_num + 1 + i`; a
    window is block_size inputs and the same shifted by one as targets, so block_size + 1 tokens. Ids are checked in
    every window and in the first 4 Mi tokens of the file. An id of 65536 or more that was written as uint16 has
    wrapped around and cannot be detected.

    Args:
        tokens_path: little-endian uint16 ids, nothing else.
        indices_path: text, one micro-batch a line; the last lines may be blank.
        lines: half-open range of 0-based lines; None for all.
        sequences: the first so many of each line; None for all.
        block_size: T.
        vocab_size: rows of the embedding.
        iter_num: steps done at the checkpoint; None leaves the steps unknown.
        first_step: step of line 0, instead of iter_num + 1.

    Returns:
        The batch; no padding, every position labelled.

    Raises:
        InputError: either file unusable, lines or sequences out of range, a window past the end, an id out of range.
    """
    tokens = _open_tokens(tokens_path)
    starts_of_line = _read_indices(indices_path)
    begin, end = _line_range(lines, len(starts_of_line), indices_path)
    notes: list[str] = []
    starts: list[int] = []
    line_of: list[int] = []
    lengths: set[int] = set()
    last_start = len(tokens) - block_size - 1
    for line in range(begin, end):
        of_line = [_parse_start(piece, line, indices_path) for piece in starts_of_line[line].split(",")]
        lengths.add(len(of_line))
        for start in of_line:
            _check_start(start, line, last_start, len(tokens), block_size, tokens_path, indices_path)
        if sequences is not None:
            if not 1 <= sequences <= len(of_line):
                raise InputError(f"{indices_path}, {_line_name(line)}: holds {len(of_line)} sequences; "
                                 f"--sequences must be 1 to {len(of_line)}, got {sequences}")  # fmt: skip
            of_line = of_line[:sequences]
        starts += of_line
        line_of += [line] * len(of_line)
    sample = np.asarray(tokens[:_SAMPLE_TOKENS])
    _check_ids(sample, 0, vocab_size, tokens_path)
    _note_width(sample, tokens_path, notes)
    windows = np.empty((len(starts), block_size + 1), dtype=np.int64)
    for row, start in enumerate(starts):
        windows[row] = tokens[start : start + block_size + 1]
        _check_ids(windows[row], start, vocab_size, tokens_path)
    zero = first_step if first_step is not None else None if iter_num is None else iter_num + 1
    notes.insert(0, _meaning(zero))
    if len(lengths) > 1:
        notes.append(f"lines hold {min(lengths)} to {max(lengths)} sequences; a step is taken as {max(lengths)}")
    if (rank := re.search(r"rank_?(\d+)", Path(indices_path).name)) and int(rank.group(1)) > 0:
        notes.append(f"the index file is that of rank {int(rank.group(1))}: its part of each step, not the whole batch")
    both = torch.from_numpy(windows)
    return RecordedBatch(
        ids=both[:, :-1].contiguous(),
        labels=both[:, 1:].contiguous(),
        attention_mask=None,
        position_ids=None,
        steps=tuple(None if zero is None else zero + line for line in line_of),
        line_of_sequence=tuple(line_of),
        step_sequences=max(lengths),
        notes=tuple(notes),
        files=(file_facts("tokens", tokens_path), file_facts("indices", indices_path)),
    )


def _meaning(step_of_line_0: int | None) -> str:
    base = "line i of the index file (0-based) is the micro-batch of "
    return base + ("an unknown step" if step_of_line_0 is None else f"step {step_of_line_0} + i")


def _line_name(line: int) -> str:
    return f"line {line + 1} (index {line})"


def _open_tokens(path: str | Path) -> np.ndarray:
    first_bytes(path)
    size = Path(path).stat().st_size
    if size % 2:
        raise InputError(f"{path}: {size} bytes is an odd number; a token file holds 2-byte (uint16) ids only")
    try:
        return np.memmap(path, dtype="<u2", mode="r")
    except OSError as error:
        raise unreadable(path, error) from error


def _read_indices(path: str | Path) -> list[str]:
    first_bytes(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file; give the file of window starts, one micro-batch a line") from error
    lines = [line.strip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise InputError(f"{path}: no window starts in the file; expected one micro-batch a line, such as 0,513,1026")
    if "" in lines:
        raise InputError(f"{path}, {_line_name(lines.index(''))}: blank line inside the file; remove it")
    return lines


def _line_range(lines: tuple[int, int] | None, count: int, path: str | Path) -> tuple[int, int]:
    begin, end = (0, count) if lines is None else lines
    if begin < 0 or end <= begin:
        raise InputError(f"--lines {begin}:{end} selects nothing; give a half-open range such as 0:1")
    if end > count:
        raise InputError(
            f"{path}: --lines {begin}:{end} reaches beyond the file, which holds {count} lines (0:{count})"
        )
    return begin, end


def _parse_start(piece: str, line: int, path: str | Path) -> int:
    shown = piece.strip()
    if not re.fullmatch(r"[+-]?[0-9]+", shown):
        raise InputError(
            f"{path}, {_line_name(line)}: '{shown[:40]}' is not an integer; expected comma-separated window starts"
        )
    return int(shown)


def _check_start(
    start: int, line: int, last_start: int, count: int, block_size: int, tokens: str | Path, indices: str | Path
) -> None:
    where = f"{indices}, {_line_name(line)}: start {start}"
    if last_start < 0:
        raise InputError(f"{tokens}: holds {count} tokens, fewer than one window of {block_size} + 1; "
                         "give the file that the index file belongs to")  # fmt: skip
    if start < 0:
        raise InputError(f"{where} is negative; starts are 0 to {last_start}")
    if start > last_start:
        end = start + block_size
        raise InputError(f"{where} needs tokens {start} to {end} (inputs and targets) but {tokens} holds {count}; "
                         f"the last valid start is {last_start}")  # fmt: skip


def _check_ids(ids: np.ndarray, offset: int, vocab_size: int, path: str | Path) -> None:
    if int(ids.max()) >= vocab_size:
        at = int(np.argmax(ids >= vocab_size))
        raise InputError(f"{path}: token id {int(ids[at])} at offset {offset + at} is outside the vocabulary of "
                         f"{vocab_size}; the file belongs to another tokenizer or has another width")  # fmt: skip


def _note_width(sample: np.ndarray, path: str | Path, notes: list[str]) -> None:
    even, odd = sample[0::2], sample[1::2]
    if len(odd) >= 2 and (odd == 0).mean() >= _ZERO_SHARE and (even == 0).mean() < 1 - _ZERO_SHARE:
        notes.append(f"warning: every second token of {path} is 0: the file may hold 32-bit ids, read here as 16-bit")
