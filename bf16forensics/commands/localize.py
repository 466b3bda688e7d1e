"""`bf16forensics localize`: which layers and heads carry rounding error that matters, with signs and a verdict."""

import time
from pathlib import Path
from typing import Annotated

import typer

from bf16forensics.commands._inputs import GivenInput, refuse_inside
from bf16forensics.commands._localize_run import LocalizeRun, Outputs
from bf16forensics.commands._options import (
    Activations,
    ActivationsOption,
    AllowBinFlag,
    Backend,
    BackendOption,
    BatchOption,
    CausalFlag,
    Device,
    DeviceOption,
    FailOn,
    FailOnOption,
    FirstStepOption,
    ForceFlag,
    HpProductsOption,
    IndicesOption,
    JsonFlag,
    LayoutOption,
    LinesOption,
    LpProductsOption,
    NumHeadsOption,
    OutputDir,
    RecordOption,
    Reference,
    ScaleOption,
    SequencesOption,
    SoftcapOption,
    StorageOption,
    WindowOption,
)
from bf16forensics.errors import InputError


def localize(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Argument(metavar="CKPT", help="nanoGPT file or Hugging Face directory.", show_default=False)
    ] = None,
    batch: BatchOption = None,
    indices: IndicesOption = None,
    lines: LinesOption = None,
    sequences: SequencesOption = None,
    first_step: FirstStepOption = None,
    n_head: NumHeadsOption = None,
    allow_bin: AllowBinFlag = False,
    activations: ActivationsOption = Activations.AMP_BF16,
    device: DeviceOption = Device.AUTO,
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="Stop at the first step after which no head is undecided."),
    ] = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="How alike (PK)^T X is across tokens, and each repeated maximum.")
    ] = False,
    record: RecordOption = None,
    layout: LayoutOption = None,
    dtype: StorageOption = None,
    causal: CausalFlag = True,
    window: WindowOption = None,
    softcap: SoftcapOption = None,
    scale: ScaleOption = None,
    recipe: Annotated[
        str, typer.Option(help="Where the kernel rounds: NAME, NAME+POINT=DTYPE, or a TOML file.")
    ] = "fa2",
    reference: Annotated[Reference, typer.Option(help="Precision of the reference.")] = Reference.FP32,
    backend: BackendOption = Backend.AUTO,
    hp_products: HpProductsOption = None,
    lp_products: LpProductsOption = None,
    step_sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of one optimiser step (default: those of a recorded line)."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences computed at once (default: one a core, 1 on a GPU).", show_default=False),
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
    from bf16forensics.attention.backend import choose_backend
    from bf16forensics.recipe.derive import resolve
    from bf16forensics.report.case import check_target

    chosen = resolve(recipe)
    if output is not None:
        check_target(output, force=force)
    if plot is not None:
        _check_plot(plot, output, force=force)
    given = GivenInput(
        checkpoint=checkpoint,
        batch=batch,
        indices=indices,
        lines=lines,
        sequences=sequences,
        first_step=first_step,
        n_head=n_head,
        allow_bin=allow_bin,
        activations=activations.value,
        record=record,
        layout=None if layout is None else layout.value,
        dtype=None if dtype is None else dtype.value,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        device=device.value,
    )
    given.check(context)
    computes = choose_backend(
        backend.value,
        chosen,
        reference.value,
        hp_products=None if hp_products is None else hp_products.value,
        lp_products=None if lp_products is None else lp_products.value,
    )
    started = time.perf_counter()
    opened = given.open(chosen, gpu_computes=computes.on_gpu)
    if computes.on_gpu and opened.options.device == "cuda" and threads not in (None, 1):
        raise InputError(
            f"--threads {threads}: a GPU that runs the model too takes one sequence at a time; leave it out"
        )
    run = LocalizeRun(
        opened=opened,
        recipe=chosen,
        reference=reference.value,
        backend=computes,
        step_sequences=step_sequences,
        threads=threads,
        until_decided=until_decided,
        observe=observe,
        load_s=time.perf_counter() - started,
        command=("bf16forensics", *(context.obj or ())),
    )
    outputs = Outputs(case=output, plot=plot, as_json=as_json, top=top, fail_on=fail_on.value, force=force)
    raise typer.Exit(run.execute(outputs))


def _check_plot(plot: Path, case: Path | None, *, force: bool) -> None:
    from bf16forensics.report.plot import check_plot_target

    check_plot_target(plot, force=force)
    refuse_inside(plot, case)
