"""`bf16forensics localize`: which layers and heads carry rounding error that matters, with signs and a verdict."""

import time
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bf16forensics.commands._localize_run import LocalizeRun, Outputs
from bf16forensics.commands._options import FailOn, FailOnOption, ForceFlag, JsonFlag, OutputDir
from bf16forensics.commands._source import ModelInput, RecordInput, open_source
from bf16forensics.errors import InputError

#: Options that only one of the two kinds of input has.
_RECORD_OPTIONS = ("layout", "dtype", "causal", "window", "softcap", "scale")
_MODEL_OPTIONS = ("batch", "indices", "lines", "first_step", "n_head", "activations", "allow_bin")


class Reference(StrEnum):
    """Precision of the high-precision side."""

    FP32 = "fp32"
    FP64 = "fp64"


class Activations(StrEnum):
    """What the captured model computes in."""

    AMP_BF16 = "amp-bf16"
    FP32 = "fp32"


class Layout(StrEnum):
    """Axis order of raw tensors: batch, head, time, dim."""

    BHTD = "bhtd"
    BTHD = "bthd"


class Storage(StrEnum):
    """Format in which the implementation holds q, k, v and dO."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def localize(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Argument(metavar="CKPT", help="nanoGPT file or Hugging Face directory.", show_default=False)
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(help="Recorded batch: token file, or tensors of ids.", show_default=False),
    ] = None,
    indices: Annotated[
        Path | None,
        typer.Option(help="Index file: one line of window starts a step.", show_default=False),
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Lines of the index file, 0-based, B excluded."),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="First N sequences of each line or record.", show_default=False)
    ] = None,
    first_step: Annotated[
        int | None,
        typer.Option(help="Step of line 0; default is the checkpoint's + 1."),
    ] = None,
    n_head: Annotated[
        int | None,
        typer.Option(min=1, help="Heads, for a bare state dict that does not say."),
    ] = None,
    allow_bin: Annotated[
        bool, typer.Option("--allow-bin", help="Read pytorch_model.bin where a directory has no safetensors.")
    ] = False,
    activations: Annotated[
        Activations, typer.Option(help="What the captured model computes in.")
    ] = Activations.AMP_BF16,
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="Stop at the first step after which no head is undecided."),
    ] = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="How alike (PK)^T X is across tokens, and each repeated maximum.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="q, k, v, do in one file or folder, instead of CKPT."),
    ] = None,
    layout: Annotated[Layout | None, typer.Option(help="Axis order of q, k, v, do.", show_default=False)] = None,
    dtype: Annotated[
        Storage | None,
        typer.Option(help="Storage format of q, k, v, do (default bf16)."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Bottom-right causal mask.")] = True,
    window: Annotated[int | None, typer.Option(help="Visible keys, the query's own included.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Soft-cap of the scores.")] = None,
    scale: Annotated[float | None, typer.Option(help="Softmax scale (default 1/sqrt(D)).")] = None,
    recipe: Annotated[
        str, typer.Option(help="Where the kernel rounds: NAME, NAME+POINT=DTYPE, or a TOML file.")
    ] = "fa2",
    reference: Annotated[Reference, typer.Option(help="Precision of the reference.")] = Reference.FP32,
    step_sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of one optimiser step (default: those of a recorded line)."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Sequences computed at once (default: one a core).", show_default=False)
    ] = None,
    output: OutputDir = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|svg|pdf", help="Figure of all heads to write.", show_default=False),
    ] = None,
    as_json: JsonFlag = False,
    top: Annotated[int, typer.Option(min=0, help="Heads in the table.")] = 10,
    fail_on: FailOnOption = FailOn.WARNING,
    force: ForceFlag = False,
) -> None:
    """Rank layers and heads by rounding error that matters, with signs, evidence and a verdict.

    Either CKPT --batch FILE [--indices FILE --lines A:B], or --record FILE --layout bhtd|bthd. Runs attention by the
    recipe and in high precision on the same tensors, for every head of every layer.
    """
    from bf16forensics.recipe.derive import resolve
    from bf16forensics.report.case import check_target

    chosen = resolve(recipe)
    if output is not None:
        check_target(output, force=force)
    if plot is not None:
        _check_plot(plot, output, force=force)
    if checkpoint is not None and record is None:
        _refuse(context, _RECORD_OPTIONS, "--record FILE")
    if record is not None and checkpoint is None:
        _refuse(context, _MODEL_OPTIONS, "a checkpoint")
    started = time.perf_counter()
    with _reading():
        opened = open_source(
            None
            if checkpoint is None
            else ModelInput(
                checkpoint=checkpoint,
                batch=batch,
                indices=indices,
                lines=lines,
                sequences=sequences,
                first_step=first_step,
                n_head=n_head,
                activations=activations.value,
                recipe=chosen,
                allow_bin=allow_bin,
            ),
            None
            if record is None
            else RecordInput(
                path=record,
                layout=None if layout is None else layout.value,
                dtype=None if dtype is None else dtype.value,
                sequences=sequences,
                causal=causal,
                window=window,
                softcap=softcap,
                scale=scale,
            ),
        )
    run = LocalizeRun(
        opened=opened,
        recipe=chosen,
        reference=reference.value,
        step_sequences=step_sequences,
        threads=threads,
        until_decided=until_decided,
        observe=observe,
        load_s=time.perf_counter() - started,
        command=("bf16forensics", *(context.obj or ())),
    )
    outputs = Outputs(case=output, plot=plot, as_json=as_json, top=top, fail_on=fail_on.value, force=force)
    raise typer.Exit(run.execute(outputs))


def _reading() -> AbstractContextManager[object]:
    """A sign of life while files are hashed and libraries imported: on a terminal only."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status("reading the input") if console.is_terminal else nullcontext()


def _check_plot(plot: Path, case: Path | None, *, force: bool) -> None:
    from bf16forensics.report.plot import check_plot_target

    check_plot_target(plot, force=force)
    if case is not None and case.resolve() in plot.resolve().parents:
        raise InputError(f"{plot} lies in the case {case}, which holds nothing but the case; name a file outside it")


def _refuse(context: typer.Context, names: tuple[str, ...], owner: str) -> None:
    """An option that would be ignored is refused: whoever gave it believes that it was applied."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise InputError(f"--{name.replace('_', '-')} goes with {owner} only; leave it out")
