"""One run of trace-head from the records of a head to its outputs."""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics import __version__
from bf16forensics.commands._case_row import row_trace_of
from bf16forensics.commands._trace_input import TraceInput, WatchedSource
from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.investigate.trace import TracedHead
    from bf16forensics.recipe.model import Recipe
    from bf16forensics.report.row_trace import RowTrace
    from bf16forensics.report.trace.context import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What of the head is to be traced; None: the worst."""

    #: As numbered in the run.
    sequence: int | None
    token: int | None
    feature: int | None
    accumulator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOutputs:
    """What the user wants to have afterwards."""

    #: File of the figure, and of the arrays; None for none.
    plot: Path | None
    export: Path | None
    as_json: bool
    #: Lines of the tables.
    top: int
    force: bool

    def check(self, case: Path | None) -> None:
        """Refuses, before a long run, outputs that could not be written after it.

        Raises:
            InputError: such an output, or one that would lie in the case.
        """
        from bf16forensics.commands._inputs import refuse_inside
        from bf16forensics.report.figure_file import check_plot_target
        from bf16forensics.report.trace.export import check_export_target

        for path, check in ((self.plot, check_plot_target), (self.export, check_export_target)):
            if path is not None:
                check(path, force=self.force)
                refuse_inside(path, case)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """A run of trace-head, ready to start."""

    found: TraceInput
    recipe: "Recipe"
    #: "fp32" or "fp64".
    reference: str
    asked: Asked
    #: Command line for the report.
    command: tuple[str, ...]
    #: Reading of the clock when the command began, seconds.
    started: float

    def execute(self, outputs: TraceOutputs) -> None:
        """Traces, keeps the row in the case, prints, draws and exports.

        Raises:
            InputError: nothing of the kind can be traced, or an output cannot be written.
        """
        from bf16forensics.report.jsonio import dumps
        from bf16forensics.report.trace.document import trace_document
        from bf16forensics.report.trace.terminal import show_trace

        watched = WatchedSource(self.found.source, self.found.layer)
        traced = self._trace(watched)
        rows = row_trace_of(traced)
        not_kept = self._keep(rows)
        result = replace(
            traced.result,
            sequences_of_run=self.found.sequences_of_run,
            notes=(*self.found.notes, *not_kept, *traced.result.notes),
        )
        context = self._context(watched, keeps_row=not not_kept)
        if outputs.as_json:
            sys.stdout.write(dumps(trace_document(result, context)))
        else:
            show_trace(result, context, top=outputs.top)
        if outputs.plot is not None:
            from bf16forensics.report.trace.plot import write_trace_plot

            write_trace_plot(outputs.plot, result, context, force=outputs.force)
        if outputs.export is not None:
            from bf16forensics.report.trace.export import write_export

            write_export(outputs.export, result, rows, context, force=outputs.force)

    def _trace(self, watched: WatchedSource) -> "TracedHead":
        from bf16forensics.commands._progress import sequence_bar
        from bf16forensics.investigate.cores import usable_cores
        from bf16forensics.investigate.localize import SequencesDone
        from bf16forensics.investigate.trace import TraceRequest, trace_head

        found, asked = self.found, self.asked
        # Somebody who names a row has seen the ranking, or does not want to wait for it.
        rank = asked.sequence is None or asked.token is None
        request = TraceRequest(
            layer=found.layer,
            head=found.head,
            head_of_record=found.head_of_source,
            recipe=self.recipe,
            reference=self.reference,
            accumulator=asked.accumulator,
            sequence=asked.sequence,
            token=asked.token,
            feature=asked.feature,
            sequences=tuple(range(found.sequences)),
            rank=rank,
            workers=usable_cores(),
        )
        with sequence_bar(found.sequences if rank else 1) as show_done:

            def on_progress(progress: SequencesDone) -> None:
                show_done(progress.done)

            return trace_head(watched, request, on_progress)

    def _keep(self, rows: "RowTrace") -> tuple[str, ...]:
        """Writes the row into the case; why it was not written, as a note, where that does not work."""
        case = self.found.case
        if case is None:
            return ()
        captured = self.found.case_recipe
        if captured is not None and self.recipe != captured:
            return (f"the tensors were captured under the case's own recipe, {captured.name}; recipe "
                    f"{self.recipe.name} is applied to these, and the row is not kept in the case",)  # fmt: skip
        from bf16forensics.report.case import write_row_trace_into_case

        try:
            write_row_trace_into_case(case, rows)
        except InputError as error:
            return (f"the row is not kept in the case: {error}",)
        return ()

    def _context(self, watched: WatchedSource, *, keeps_row: bool) -> "TraceContext":
        from bf16forensics.report.environment import collect
        from bf16forensics.report.trace.context import TraceContext

        found, call = self.found, watched.call
        if call is None:
            raise InputError(f"layer {found.layer} was not captured: the model never ran it")
        return TraceContext(
            recipe=self.recipe,
            reference=self.reference,
            activations=found.activations,
            inputs=found.files,
            kind=found.kind,
            shape=found.shape,
            geometry=call.geometry,
            head_size=call.head_size,
            causal=call.has_edge,
            storage=call.storage,
            case=None if found.case is None else str(found.case),
            keeps_row=keeps_row,
            command=self.command,
            environment=collect(tool_version=__version__),
            elapsed_s=time.perf_counter() - self.started,
        )
