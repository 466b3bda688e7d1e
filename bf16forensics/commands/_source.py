"""From the options of a command to a source of records, with everything a report says about where they came from."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.capture.source import RecordSource
    from bf16forensics.load.files import FileFacts


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
    activations: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A source and what is to be said about it."""

    source: "RecordSource"
    #: "nanogpt" or "record".
    kind: str
    shape: str
    activations: str | None
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    files: "tuple[FileFacts, ...]"
    notes: tuple[str, ...]
    unused_tensors: tuple[str, ...]


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


def open_source(model: ModelInput | None, record: RecordInput | None) -> Opened:
    """Opens whichever of the two was given.

    Raises:
        InputError: neither or both were given, or what was given cannot be used.
    """
    if model is not None and record is not None:
        raise InputError("give either a checkpoint or --record, not both")
    if model is not None:
        return open_model(model)
    if record is not None:
        return open_record(record)
    raise InputError("nothing to analyse: give CKPT --batch FILE, or --record FILE --layout bhtd|bthd")


def open_model(given: ModelInput) -> Opened:
    """Loads a checkpoint and its batch.

    Raises:
        InputError: either cannot be used.
    """
    from bf16forensics.capture.nanogpt import NanoGPTCapture
    from bf16forensics.capture.nanogpt_source import NanoGPTSource
    from bf16forensics.load.batch import load_token_batch
    from bf16forensics.load.files import FileFacts
    from bf16forensics.load.nanogpt import load_nanogpt
    from bf16forensics.load.tensor_batch import load_tensor_batch

    if given.batch is None:
        raise InputError("--batch FILE is missing: the recorded batch the checkpoint is run on")
    checkpoint = load_nanogpt(given.checkpoint, n_head=given.n_head)
    config = checkpoint.config
    if given.indices is not None:
        batch = load_token_batch(
            given.batch,
            given.indices,
            lines=parse_lines(given.lines),
            sequences=given.sequences,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            iter_num=checkpoint.iter_num,
            first_step=given.first_step,
        )
    else:
        if given.lines is not None:
            raise InputError("--lines chooses lines of an index file; give --indices FILE")
        if given.batch.suffix == ".bin":
            raise InputError(f"{given.batch}: a token file says nothing about its batches; give --indices FILE too")
        batch = load_tensor_batch(
            given.batch, block_size=config.block_size, vocab_size=config.vocab_size, sequences=given.sequences
        )
    head_size = config.n_embd // config.n_head
    facts = FileFacts(
        role="checkpoint", path=checkpoint.path, size_bytes=checkpoint.size_bytes, sha256=checkpoint.sha256
    )
    source = NanoGPTSource(capture=NanoGPTCapture(checkpoint=checkpoint, activations=given.activations), batch=batch)
    return Opened(
        source=source,
        kind="nanogpt",
        shape=f"nanoGPT, {config.n_layer} layers, {config.n_head} heads, head size {head_size}, "
        f"width {config.n_embd}, weights {checkpoint.weight_dtype}",
        activations=given.activations,
        scale=1.0 / math.sqrt(head_size),
        causal=True,
        window=None,
        softcap=None,
        files=(facts, *batch.files),
        notes=(*checkpoint.notes, *batch.notes),
        unused_tensors=checkpoint.unused_tensors,
    )


def open_record(given: RecordInput) -> Opened:
    """Loads a raw record.

    Raises:
        InputError: it cannot be used.
    """
    from bf16forensics.capture.raw import RawGeometry, raw_source
    from bf16forensics.load.records import load_record

    raw = load_record(given.path, layout=given.layout, dtype=given.dtype)
    source = raw_source(
        raw,
        RawGeometry(causal=given.causal, window=given.window, softcap=given.softcap, scale=given.scale),
        sequences=given.sequences,
    )
    batch, heads, queries, head_size = source.raw.q.shape
    groups, keys, value_size = raw.k.shape[1], raw.k.shape[2], raw.v.shape[-1]
    shape = (
        f"record B {batch}, H {heads}, kv heads {groups}, T {queries}, keys {keys}, D {head_size}, "
        f"V {value_size}, layout {raw.layout}, storage {raw.storage}"
    )
    return Opened(
        source=source,
        kind="record",
        shape=shape,
        activations=None,
        scale=source.scale,
        causal=given.causal,
        window=given.window,
        softcap=given.softcap,
        files=(raw.facts,),
        notes=raw.notes,
        unused_tensors=raw.unused_tensors,
    )
