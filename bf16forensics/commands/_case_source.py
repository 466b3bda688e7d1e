"""A head of a case as a source of records: from the tensors that were kept, or captured again from the same inputs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.commands._case import Case, KeptFile
from bf16forensics.commands._given import ModelInput, RecordInput
from bf16forensics.commands._inputs import reading
from bf16forensics.commands._source import Opened, open_source
from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.capture.raw import RawGeometry
    from bf16forensics.capture.source import RecordSource
    from bf16forensics.load.files import FileFacts
    from bf16forensics.load.tensors import TensorFile


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseHead:
    """Where the records of one head come from."""

    source: "RecordSource"
    #: Number of the head in the records of the source.
    head: int
    #: Sequences of the source that belong to the run, from the first on.
    sequences: int
    #: Captured again (True), or read from the tensors of the case.
    recaptured: bool
    notes: tuple[str, ...]


def case_head(case: Case, layer: int, head: int, *, recapture: bool = False) -> CaseHead:
    """The records of one head of a case: from its file where the case kept it, otherwise captured again.

    Args:
        case: the case.
        layer: layer of the head, below the case's number of layers.
        head: the head, below the case's number of heads.
        recapture: capture again even if the head was kept, which gives all sequences of the run.

    Raises:
        InputError: the kept file is missing or not what the case wrote; an input is missing or differs from what the
            case was made from; a case that does not say how its inputs were read.
    """
    kept = None if recapture else case.kept_file(layer, head)
    return _recaptured(case, head) if kept is None else _kept(case, kept)


def _kept(case: Case, kept: KeptFile) -> CaseHead:
    from bf16forensics.capture.kept import KeptSource
    from bf16forensics.capture.raw import raw_source
    from bf16forensics.load.records import load_record
    from bf16forensics.load.tensors import read_tensors
    from bf16forensics.report.case import TENSORS
    from bf16forensics.report.tensors import tensors_sha256
    from bf16forensics.verdict.words import head_name

    name = head_name(kept.layer, kept.head)
    path = case.directory / TENSORS / f"{name}.safetensors"
    if not path.is_file():
        raise InputError(f"{path}: no such file, but case.json lists it; restore it, or give --recapture")
    file = read_tensors(path, "record")
    found = tensors_sha256(dict(file.tensors))
    if found != kept.sha256:
        raise InputError(f"{path}: its tensors are not those that the case wrote (sha256 {found[:8]}, case.json has "
                         f"{kept.sha256[:8]}); restore the file, or give --recapture")  # fmt: skip
    geometry = _geometry(path, file, kept)
    raw = raw_source(load_record(path, dtype=file.texts["dtype"]), geometry)
    count = raw.shape.num_sequences
    if kept.sequences != tuple(range(count)) or count > case.sequences or raw.shape.num_heads != 1:
        raise InputError(f"{path}: holds {count} sequences of {raw.shape.num_heads} heads, not the first of the run of "
                         "the one head that case.json lists; restore the file, or give --recapture")  # fmt: skip
    source = KeptSource(raw=raw, layer=kept.layer, sequences=kept.sequences, steps=kept.steps)
    notes = [f"{name} is read from the tensors of the case"]
    if count < case.sequences:
        notes = [f"the case kept the first {count} of {case.sequences} sequences of {name}; --recapture traces all"]
    return CaseHead(source=source, head=0, sequences=count, recaptured=False, notes=tuple(notes))


def _geometry(path: Path, file: "TensorFile", kept: KeptFile) -> "RawGeometry":
    """The masks and modifiers that the file's own metadata states; the hash covers the tensors only."""
    from bf16forensics.capture.raw import RawGeometry

    texts = file.texts
    same = (str(kept.layer), str(kept.head), " ".join(map(str, kept.sequences)))
    causal = {"true": True, "false": False}.get(texts.get("causal", ""))
    damaged = InputError(f"{path}: its metadata is not what the case wrote; restore the file, or give --recapture")
    if (texts.get("layer"), texts.get("head"), texts.get("sequences")) != same or causal is None:
        raise damaged
    try:
        window = int(texts["window"]) if texts["window"] else None
        softcap = float(texts["softcap"]) if texts["softcap"] else None
        texts["dtype"], texts["layout"]
    except (KeyError, ValueError):
        raise damaged from None
    return RawGeometry(causal=causal, window=window, softcap=softcap)


def _recaptured(case: Case, head: int) -> CaseHead:
    from bf16forensics.capture.device import CPU
    from bf16forensics.capture.moved import MovedSource

    opened = _open_again(case)
    shape = opened.source.shape
    if (shape.num_layers, shape.num_heads) != (case.num_layers, case.num_heads):
        raise InputError(f"{case.directory}: case.json says {case.num_layers} layers of {case.num_heads} heads, "
                         f"its inputs have {shape.num_layers} of {shape.num_heads}; run localize again")  # fmt: skip
    if shape.num_sequences < case.sequences:
        raise InputError(f"{case.directory}: case.json says {case.sequences} sequences, its inputs have "
                         f"{shape.num_sequences}; run localize again with -o")  # fmt: skip
    notes = ["captured again from the inputs of the case, whose hashes are the same"]
    there, here = (case.options and case.options.device) or "cpu", opened.options.device or "cpu"
    if there != here:
        notes.append(f"the case was captured on {there}, which is not here, and again on {here}: the two are different "
                     "draws of the same rounding noise")  # fmt: skip
    torch_now = _torch_version()
    if case.torch_version not in (None, torch_now):
        notes.append(f"the case was made with torch {case.torch_version}, captured again with {torch_now}: last bits "
                     "may differ")  # fmt: skip
    source = opened.source if here == "cpu" else MovedSource(opened.source, CPU)
    return CaseHead(source=source, head=head, sequences=case.sequences, recaptured=True, notes=tuple(notes))


def _open_again(case: Case) -> Opened:
    model, record = _inputs(case)
    for facts in case.files:
        _check_file(case, facts)
    try:
        with reading():
            opened = open_source(model, record)
    except InputError:
        # A damaged file is told by its hash, which says more than what a reader stumbled over.
        for facts in case.files:
            _check_hash(case, facts)
        raise
    _compare(case, opened.files)
    return opened


def _inputs(case: Case) -> tuple[ModelInput | None, RecordInput | None]:
    options = case.options
    if options is None or (options.checkpoint is None) == (options.record is None):
        raise InputError(f"{case.directory}: case.json does not say how its inputs were read, so that nothing can be "
                         "captured again; run localize again with -o")  # fmt: skip
    if options.checkpoint is not None:
        return ModelInput(
            checkpoint=_found(case, options.checkpoint),
            batch=None if options.batch is None else _found(case, options.batch),
            indices=None if options.indices is None else _found(case, options.indices),
            lines=None if options.lines is None else f"{options.lines[0]}:{options.lines[1]}",
            sequences=options.sequences,
            first_step=options.first_step,
            n_head=options.n_head,
            activations=options.activations or "amp-bf16",
            recipe=case.recipe,
            allow_bin=bool(options.allow_bin),
            device=_device(options.device),
        ), None
    return None, RecordInput(
        path=_found(case, options.record or ""),
        layout=options.layout,
        dtype=options.dtype,
        sequences=options.sequences,
        causal=options.causal is not False,
        window=options.window,
        softcap=options.softcap,
        scale=options.scale,
    )


def _device(of_case: str | None) -> str:
    """Where the model runs this time: where it ran for the case, if that is here."""
    from bf16forensics.capture.device import capture_device

    try:
        return capture_device(of_case or "cpu").type
    except InputError:
        return "cpu"


def _found(case: Case, text: str) -> Path:
    """Where an input lies now: relative paths are tried from the run's directory, then from the present one."""
    given = Path(text)
    there = Path(case.working_directory) / given
    if there.exists() and not (given.exists() and os.path.samefile(there, given)):
        return there
    return given


def _check_file(case: Case, facts: "FileFacts") -> None:
    path = _found(case, facts.path)
    if not path.exists():
        raise InputError(f"{path}: no such file; the case {case.directory} was made from it (sha256 "
                         f"{facts.sha256[:8]}): put it back, or run localize again with -o")  # fmt: skip
    # Cheaper than reading a large file only to find that it is another one.
    if path.is_file() and path.stat().st_size != facts.size_bytes:
        _check_hash(case, facts)


def _check_hash(case: Case, facts: "FileFacts") -> None:
    from bf16forensics.load.files import file_facts

    path = _found(case, facts.path)
    if path.is_file():
        found = file_facts(facts.role, path)
        if found.sha256 != facts.sha256:
            raise _differs(case, path, found.sha256, facts.sha256)


def _compare(case: Case, files: "tuple[FileFacts, ...]") -> None:
    if [item.role for item in files] != [item.role for item in case.files]:
        raise InputError(f"{case.directory}: its inputs are now {len(files)} files, the case was made from "
                         f"{len(case.files)}; restore them, or run localize again with -o")  # fmt: skip
    for now, then in zip(files, case.files, strict=True):
        if now.sha256 != then.sha256:
            raise _differs(case, Path(now.path), now.sha256, then.sha256)


def _differs(case: Case, path: Path, now: str, then: str) -> InputError:
    return InputError(f"{path}: not the file that the case {case.directory} was made from (sha256 {now[:8]}, the case "
                      f"has {then[:8]}); restore it, or run localize again with -o")  # fmt: skip


def _torch_version() -> str | None:
    from bf16forensics.report.environment import package_version

    return package_version("torch")
