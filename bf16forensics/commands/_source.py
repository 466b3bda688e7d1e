"""From the options of a command to a source of records, with everything a report says about where they came from."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.commands._given import ModelInput, RecordInput, parse_lines
from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.capture.activations import Activations
    from bf16forensics.capture.source import RecordSource
    from bf16forensics.investigate.inputs import InputOptions
    from bf16forensics.load.batch import RecordedBatch
    from bf16forensics.load.files import FileFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A source and what is to be said about it."""

    source: "RecordSource"
    #: "nanogpt", "hf" or "record".
    kind: str
    shape: str
    activations: str | None
    scale: float
    causal: bool
    #: Window of each layer; None for full attention.
    layer_windows: tuple[int | None, ...]
    softcap: float | None
    #: Why there can be no gradient; None where nothing stands in the way.
    no_gradient: str | None
    no_output_head: bool
    files: "tuple[FileFacts, ...]"
    unused_tensors: tuple[str, ...]
    #: How the input was named.
    options: "InputOptions"


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
    """Loads a checkpoint and its batch: a Hugging Face directory, or a nanoGPT file.

    Raises:
        InputError: either cannot be used.
    """
    if given.batch is None:
        raise InputError("--batch FILE is missing: the recorded batch the checkpoint is run on")
    if given.checkpoint.is_dir():
        return _open_hf(given, given.batch)
    return _open_nanogpt(given, given.batch)


def _activations(given: ModelInput) -> "Activations":
    from bf16forensics.attention.gpu_attention import GpuAttention
    from bf16forensics.attention.recipe_attention import RecipeAttention
    from bf16forensics.capture.activations import AmpActivations, Fp32Activations

    if given.activations == "fp32":
        return Fp32Activations()
    on_gpu = given.device != "cpu"
    by_recipe = GpuAttention(given.recipe) if on_gpu else RecipeAttention(given.recipe)
    return AmpActivations(by_recipe=by_recipe, on_gpu=on_gpu)


def _batch(given: ModelInput, batch: Path, block_size: int, vocab_size: int, iter_num: int | None) -> "RecordedBatch":
    from bf16forensics.load.batch import load_token_batch
    from bf16forensics.load.tensor_batch import load_tensor_batch

    if given.indices is not None:
        return load_token_batch(
            batch,
            given.indices,
            lines=parse_lines(given.lines),
            sequences=given.sequences,
            block_size=block_size,
            vocab_size=vocab_size,
            iter_num=iter_num,
            first_step=given.first_step,
        )
    if given.lines is not None:
        raise InputError("--lines chooses lines of an index file; give --indices FILE")
    if batch.suffix == ".bin":
        raise InputError(f"{batch}: a token file says nothing about its batches; give --indices FILE too")
    return load_tensor_batch(batch, block_size=block_size, vocab_size=vocab_size, sequences=given.sequences)


def _open_nanogpt(given: ModelInput, recorded: Path) -> Opened:
    from bf16forensics.capture.device import capture_device
    from bf16forensics.capture.nanogpt import NanoGPTCapture
    from bf16forensics.capture.nanogpt_source import NanoGPTSource
    from bf16forensics.load.files import FileFacts
    from bf16forensics.load.nanogpt import load_nanogpt

    if given.allow_bin:
        raise InputError("--allow-bin goes with a Hugging Face directory only; leave it out")
    checkpoint = load_nanogpt(given.checkpoint, n_head=given.n_head)
    config = checkpoint.config
    batch = _batch(given, recorded, config.block_size, config.vocab_size, checkpoint.iter_num)
    head_size = config.n_embd // config.n_head
    facts = FileFacts(
        role="checkpoint", path=checkpoint.path, size_bytes=checkpoint.size_bytes, sha256=checkpoint.sha256
    )
    device = capture_device(given.device)
    capture = NanoGPTCapture(checkpoint=checkpoint, activations=_activations(given), device=device)
    return Opened(
        source=NanoGPTSource(capture=capture, batch=batch),
        kind="nanogpt",
        shape=f"nanoGPT, {config.n_layer} layers, {config.n_head} heads, head size {head_size}, "
        f"width {config.n_embd}, weights {checkpoint.weight_dtype}",
        activations=given.activations,
        scale=1.0 / math.sqrt(head_size),
        causal=True,
        layer_windows=(None,) * config.n_layer,
        softcap=None,
        no_gradient=None,
        no_output_head=False,
        files=(facts, *batch.files),
        unused_tensors=checkpoint.unused_tensors,
        options=given.options,
    )


def _open_hf(given: ModelInput, recorded: Path) -> Opened:
    from bf16forensics.capture.device import capture_device
    from bf16forensics.capture.hf.capture import hf_capture
    from bf16forensics.capture.hf.model import load_hf_model
    from bf16forensics.capture.hf.source import HFSource

    if given.n_head is not None:
        raise InputError("--n-head goes with a bare nanoGPT state dict only: config.json says it; leave it out")
    model = load_hf_model(given.checkpoint, allow_bin=given.allow_bin)
    positions, entries = model.config.max_position_embeddings, model.config.vocab_size
    batch = _batch(given, recorded, positions, entries, None)
    source = HFSource(capture=hf_capture(model, _activations(given), capture_device(given.device)), batch=batch)
    missing = None if model.has_output_head else f"no output head: {given.checkpoint} holds no lm_head and ties none"
    return Opened(
        source=source,
        kind="hf",
        shape=source.shape_words,
        activations=given.activations,
        scale=source.layer_scales[0],
        causal=source.causal,
        layer_windows=source.layer_windows,
        softcap=source.softcap,
        no_gradient=missing,
        no_output_head=not model.has_output_head,
        files=(*model.directory.files, *batch.files),
        unused_tensors=model.unused_tensors,
        options=given.options,
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
        layer_windows=(given.window,),
        softcap=given.softcap,
        no_gradient=None,
        no_output_head=False,
        files=(raw.facts,),
        unused_tensors=raw.unused_tensors,
        options=given.options,
    )
