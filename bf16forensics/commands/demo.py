"""`bf16forensics demo`: a planted culprit head and its healthy twin, localized without any input."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bf16forensics import __version__
from bf16forensics.commands._options import ForceFlag, JsonFlag


class TwinName(StrEnum):
    """The bundled checkpoints."""

    PLANTED = "planted"
    HEALTHY = "healthy"


def demo(
    context: typer.Context,
    twin: Annotated[TwinName | None, typer.Option(help="Run one of the two only.", show_default=False)] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Sequences computed at once (default: one a core).", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Write DIR/planted and DIR/healthy.", show_default=False),
    ] = None,
    as_json: JsonFlag = False,
    force: ForceFlag = False,
) -> None:
    """Localize a small bundled model with a planted culprit head, and its healthy twin.

    Needs no input. Exit code 0 when the planted head comes first with a compounding bias and the healthy twin is at
    noise level, 1 otherwise.
    """
    from bf16forensics.commands._demo_report import show_closing, show_twin
    from bf16forensics.commands._demo_twins import BUNDLED, TWINS
    from bf16forensics.report.case import check_target

    chosen = [item for item in TWINS if twin is None or item.name == twin.value]
    cases = {item.name: None if output is None else output / item.name for item in chosen}
    if output is not None:
        _check_directory(output)
    for case in cases.values():
        if case is not None:
            check_target(case, force=force)
    runs, documents, deviations = [], {}, list[str]()
    for item in chosen:
        case = cases[item.name]
        run = item.run(BUNDLED, threads=threads)
        done = run.analyse()
        documents[item.name] = run.record(done, case, force=force)
        if not as_json:
            show_twin(item, done, case=None if case is None else str(case))
        done.raise_if_interrupted()
        deviations += item.deviations(done.judgement)
        runs.append((item, run))
    if as_json:
        _write_json(documents, deviations, ("bf16forensics", *(context.obj or ())))
    else:
        show_closing(runs, deviations)
    raise typer.Exit(1 if deviations else 0)


def _check_directory(directory: Path) -> None:
    from bf16forensics.errors import InputError

    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; name a directory for the two cases")


def _write_json(documents: dict[str, dict[str, object]], deviations: list[str], command: tuple[str, ...]) -> None:
    from bf16forensics.report.jsonio import dumps, opening

    first = next(iter(documents.values()))
    document = {
        **opening(command, tool_version=__version__),
        "environment": first["environment"],
        "verdict": "not as documented" if deviations else "as documented",
        "deviations": deviations,
        "twins": documents,
    }
    typer.echo(dumps(document), nl=False)
