"""One run of localize from an opened source to its outputs and its exit code."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics import __version__
from bf16forensics.commands._source import Opened
from bf16forensics.errors import InterruptedRun

if TYPE_CHECKING:
    from bf16forensics.attention.backend import ChosenBackend
    from bf16forensics.investigate.keep import KeptRecord
    from bf16forensics.investigate.localize import HeadsFound, SequencesDone
    from bf16forensics.investigate.result import BackendUsed, LocalizeResult
    from bf16forensics.recipe.model import Recipe
    from bf16forensics.verdict.findings import Judgement

#: Heads whose records a case keeps.
_KEPT_HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What the user wants to have afterwards."""

    #: Directory of the case; None for none.
    case: Path | None
    #: File of the figure; None for none.
    plot: Path | None
    as_json: bool
    #: Heads in the table.
    top: int
    #: "note", "warning" or "error".
    fail_on: str
    force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizeRun:
    """A run of localize, ready to start."""

    opened: Opened
    recipe: "Recipe"
    reference: str
    #: What computes the dual pass.
    backend: "ChosenBackend"
    #: Sequences of one optimiser step; None takes those of a recorded line.
    step_sequences: int | None
    threads: int | None
    until_decided: bool
    #: Whether to make the observation of the paper's appendix D as well.
    observe: bool
    load_s: float
    #: Command line for the report.
    command: tuple[str, ...]

    def execute(self, outputs: Outputs) -> int:
        """Runs, judges, writes the case, prints, draws, and returns the exit code.

        Raises:
            InputError: the case or the figure cannot be written; the figure comes last, after the report.
            InterruptedRun: stopped by the user; what was finished has been written and printed.
        """
        from bf16forensics.report.jsonio import dumps
        from bf16forensics.report.terminal import show
        from bf16forensics.verdict.judge import exit_code

        done = self.analyse()
        built = self.record(done, outputs.case, force=outputs.force)
        if outputs.as_json:
            sys.stdout.write(dumps(built))
        else:
            case = None if outputs.case is None else str(outputs.case)
            show(done.result, done.judgement, top=outputs.top, case=case)
        if outputs.plot is not None:
            from bf16forensics.report.plot import write_plot

            write_plot(outputs.plot, done.result, done.judgement, tool_version=__version__, force=outputs.force)
        done.raise_if_interrupted()
        return exit_code(done.judgement, outputs.fail_on)

    def analyse(self) -> "Analysed":
        """Runs and judges."""
        from bf16forensics.verdict.judge import judge

        found = self._find()
        result = self._result(found)
        return Analysed(found=found, result=result, judgement=judge(result, command=self.command))

    def record(self, done: "Analysed", case: Path | None, *, force: bool) -> dict[str, object]:
        """The JSON document of what `analyse` gave, written as a case too where a directory is named."""
        from bf16forensics.report.case import write_case
        from bf16forensics.report.document import document
        from bf16forensics.report.environment import collect

        threads = 1 if self.threads is None and self.backend.on_gpu else self.threads
        environment = collect(tool_version=__version__, threads=threads, device=self.backend.device)
        built = document(done.result, done.judgement, command=self.command, environment=environment)
        return built if case is None else write_case(case, built, self._kept(done.found, done.judgement), force=force)

    def _find(self) -> "HeadsFound":
        from bf16forensics.commands._progress import sequence_bar
        from bf16forensics.investigate.localize import find_heads
        from bf16forensics.investigate.sequence import LocalizeOptions

        with sequence_bar(self.opened.source.shape.num_sequences) as show_done:

            def on_progress(progress: "SequencesDone") -> None:
                show_done(progress.done)

            return find_heads(
                self.opened.source,
                LocalizeOptions(
                    recipe=self.recipe,
                    reference=self.reference,
                    workers=self.threads,
                    observe=self.observe,
                    backend=self.backend,
                ),
                on_progress,
                self._is_decided if self.until_decided else None,
            )

    def _is_decided(self, found: "HeadsFound") -> bool:
        from bf16forensics.verdict.findings import CANNOT_JUDGE
        from bf16forensics.verdict.judge import judge

        return all(head.verdict != CANNOT_JUDGE for head in judge(self._result(found)).heads)

    def _result(self, found: "HeadsFound") -> "LocalizeResult":
        from bf16forensics.investigate.result import LocalizeResult, Timing

        opened, shape = self.opened, self.opened.source.shape
        work = found.capture_work_s + found.evidence_work_s
        share = found.capture_work_s / work if work > 0 else 0.0
        return LocalizeResult(
            recipe=self.recipe,
            reference=self.reference,
            activations=opened.activations,
            inputs=opened.files,
            kind=opened.kind,
            shape=opened.shape,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            scale=opened.scale,
            window=opened.layer_windows[0] if len(set(opened.layer_windows)) == 1 else None,
            softcap=opened.softcap,
            causal=opened.causal,
            layer_windows=opened.layer_windows,
            sequences=found.sequences,
            sequences_planned=shape.num_sequences,
            tokens=shape.num_queries,
            steps=tuple(dict.fromkeys(shape.steps[: found.sequences])),
            step_sequences=self.step_sequences or shape.step_sequences,
            loss=found.loss,
            no_gradient=opened.no_gradient or self._forward_only(),
            no_output_head=opened.no_output_head,
            heads=found.heads,
            unused_tensors=opened.unused_tensors,
            notes=(*opened.source.notes, *_by_reference(found)),
            interrupted=found.interrupted,
            observation=found.observation,
            options=opened.options,
            backend=self._used(found),
            timing=Timing(
                load_s=self.load_s,
                capture_s=found.analysis_s * share,
                evidence_s=found.analysis_s * (1.0 - share),
                analysis_s=found.analysis_s,
                peak_rss_bytes=_peak_rss_bytes(),
            ),
        )

    def _used(self, found: "HeadsFound") -> "BackendUsed":
        from bf16forensics.investigate.result import BackendUsed

        return BackendUsed(
            name=self.backend.name,
            device=self.backend.device,
            why=self.backend.why,
            hp_products=self.backend.hp_products,
            lp_products=self.backend.lp_products,
            reference_layers=tuple(sorted({layer for layer, _ in found.by_reference})),
        )

    def _forward_only(self) -> str | None:
        if self.recipe.passes == "both":
            return None
        return f"recipe {self.recipe.name} is a forward pass only: outputs were compared, gradients were not"

    def _kept(self, found: "HeadsFound", judgement: "Judgement") -> tuple["KeptRecord", ...]:
        from bf16forensics.investigate.kept import kept_records

        return kept_records(self.opened.source, found.probes, judgement.ranking[:_KEPT_HEADS], self.recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """A run that has ended, judged, before anything of it was written."""

    found: "HeadsFound"
    result: "LocalizeResult"
    judgement: "Judgement"

    def raise_if_interrupted(self) -> None:
        """Tells that the run was stopped, if it was.

        Raises:
            InterruptedRun: stopped by the user before the last sequence.
        """
        if self.found.interrupted:
            raise InterruptedRun(
                f"interrupted after {self.found.sequences} of {self.result.sequences_planned} sequences; "
                "the report covers those that were finished"
            )


def _by_reference(found: "HeadsFound") -> tuple[str, ...]:
    """A note for each reason for which the reference took layers in the place of the fused pass."""
    layers: dict[str, list[str]] = {}
    for layer, why in found.by_reference:
        layers.setdefault(why, []).append(str(layer))
    return tuple(
        f"computed by the reference: layer{'s' if len(names) > 1 else ''} {', '.join(names)}: {why}"
        for why, names in layers.items()
    )


def _peak_rss_bytes() -> int:
    """Peak resident memory of this process; 0 where the platform does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
