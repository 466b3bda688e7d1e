"""`bf16forensics trace-head`: one head by token, one token by feature, one feature key by key."""

import time
from pathlib import Path
from typing import Annotated

import typer

from bf16forensics.commands._inputs import MODEL_OPTIONS, RECORD_OPTIONS, GivenInput, refuse
from bf16forensics.commands._options import (
    Activations,
    ActivationsOption,
    AllowBinFlag,
    BatchOption,
    CausalFlag,
    FirstStepOption,
    ForceFlag,
    IndicesOption,
    JsonFlag,
    LayoutOption,
    LinesOption,
    NumHeadsOption,
    RecordOption,
    Reference,
    ScaleOption,
    SequencesOption,
    SoftcapOption,
    StorageOption,
    WindowOption,
)
from bf16forensics.errors import InputError


def _accumulators() -> list[str]:
    from bf16forensics.evidence.trace.accumulators import ACCUMULATOR_NAMES

    return list(ACCUMULATOR_NAMES)


def trace_head(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="CASE|CKPT", help="Case of localize -o, or a checkpoint.", show_default=False),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer, 0-based (default: the first of the case's ranking).", show_default=False)
    ] = None,
    head: Annotated[int | None, typer.Option(help="Head, 0-based (likewise).", show_default=False)] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Sequence, as numbered in the run (default: the worst).", show_default=False)
    ] = None,
    token: Annotated[
        int | None, typer.Option(help="Token, 0-based (default: the worst |delta error|).", show_default=False)
    ] = None,
    feature: Annotated[
        int | None, typer.Option(help="Feature of O, 0-based (default: the worst).", show_default=False)
    ] = None,
    accumulator: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How P-bar V is summed: fp32-prefix, bf16-each-add, tile:N, sm80, sm90, sm100 or exact.",
            autocompletion=_accumulators,
        ),
    ] = "fp32-prefix",
    recipe: Annotated[
        str | None,
        typer.Option(help="Where the kernel rounds (default: the case's recipe, else fa2).", show_default=False),
    ] = None,
    reference: Annotated[
        Reference | None,
        typer.Option(help="Precision of the reference (default: the case's, else fp64).", show_default=False),
    ] = None,
    recapture: Annotated[
        bool, typer.Option("--recapture", help="Capture again although the case kept the head: all sequences.")
    ] = False,
    sequences: SequencesOption = None,
    batch: BatchOption = None,
    indices: IndicesOption = None,
    lines: LinesOption = None,
    first_step: FirstStepOption = None,
    n_head: NumHeadsOption = None,
    allow_bin: AllowBinFlag = False,
    activations: ActivationsOption = Activations.AMP_BF16,
    record: RecordOption = None,
    layout: LayoutOption = None,
    dtype: StorageOption = None,
    causal: CausalFlag = True,
    window: WindowOption = None,
    softcap: SoftcapOption = None,
    scale: ScaleOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg|pdf", help="Figure to write.", show_default=False)
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.safetensors", help="Every array of the trace.", show_default=False),
    ] = None,
    as_json: JsonFlag = False,
    top: Annotated[int, typer.Option(min=0, help="Tokens and features in the tables.")] = 10,
    force: ForceFlag = False,
) -> None:
    """Trace one head down to single additions: its tokens, a token's features, a feature's sum key by key.

    Either CASE, or CKPT --batch FILE [--indices FILE --lines A:B], or --record FILE --layout bhtd|bthd. A head that
    the case did not keep is captured again from the same inputs. Exit code 0 whatever is found.
    """
    from bf16forensics.commands._case import is_case, open_case
    from bf16forensics.commands._trace_input import case_input, opened_input
    from bf16forensics.commands._trace_run import Asked, TraceOutputs, TraceRun
    from bf16forensics.evidence.trace.accumulators import check_accumulator
    from bf16forensics.recipe.derive import resolve

    started = time.perf_counter()
    chosen = None if recipe is None else resolve(recipe)
    against = None if reference is None else reference.value
    asked = Asked(sequence=sequence, token=token, feature=feature, accumulator=check_accumulator(accumulator))
    case = open_case(source) if source is not None and record is None and is_case(source) else None
    outputs = TraceOutputs(plot=plot, export=export, as_json=as_json, top=top, force=force)
    outputs.check(None if case is None else case.directory)
    if case is not None:
        refuse(context, MODEL_OPTIONS, "a checkpoint")
        refuse(context, RECORD_OPTIONS, "--record FILE")
        found = case_input(case, layer, head, sequence=sequence, sequences=sequences, recapture=recapture)
        rounding, against = chosen or case.recipe, against or case.reference
    else:
        refuse(context, ("recapture",), "a case")
        if source is not None and batch is None and record is None:
            raise InputError(f"{source} is not a directory with a case.json; as a checkpoint it needs --batch FILE")
        given = GivenInput(
            checkpoint=source,
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
        )
        given.check(context)
        rounding, against = chosen or resolve("fa2"), against or "fp64"
        found = opened_input(given.open(rounding), layer, head)
    TraceRun(
        found=found,
        recipe=rounding,
        reference=against,
        asked=asked,
        command=("bf16forensics", *(context.obj or ())),
        started=started,
    ).execute(outputs)
