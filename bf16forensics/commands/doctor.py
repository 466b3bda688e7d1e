"""`bf16forensics doctor`: the environment, and a self-test of the arithmetic that the tool relies on."""

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bf16forensics import __version__
from bf16forensics.commands._options import JsonFlag

if TYPE_CHECKING:
    from bf16forensics.investigate.doctor.result import DoctorReport

#: Seconds before a line of progress appears.
_QUIET_S = 2.0


class DeviceKind(StrEnum):
    """What to test."""

    CPU = "cpu"
    CUDA = "cuda"


def doctor(
    context: typer.Context,
    device: Annotated[
        DeviceKind | None,
        typer.Option(help="Test the processor or the GPUs alone (default: everything there is).", show_default=False),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Test the arithmetic of this machine: FP32 products, roundings, matrix units.

    Needs no input and takes seconds. Exit code 0 when everything holds that the tool relies on, 1 when something does
    not. Deviations that the tool works around are noted.
    """
    report = _examine(None if device is None else device.value)
    if as_json:
        from bf16forensics.report.doctor_json import doctor_document
        from bf16forensics.report.environment import collect
        from bf16forensics.report.jsonio import dumps

        tested = sorted({check.where for check in report.checks if check.status != "skipped"} - {"interpreter"})
        environment = collect(tool_version=__version__, device=", ".join(tested))
        command = ("bf16forensics", *(context.obj or ()))
        typer.echo(dumps(doctor_document(report, command=command, environment=environment)), nl=False)
    else:
        from bf16forensics.report.console import show_lines
        from bf16forensics.report.doctor_text import doctor_lines

        show_lines(lambda width, encoding: doctor_lines(report, __version__, width, encoding))
    raise typer.Exit(1 if report.verdict == "fail" else 0)


def _examine(device: str | None) -> "DoctorReport":
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from bf16forensics.investigate.doctor.checks import examine

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", visible=False)

        def on_progress(what: str) -> None:
            bar.update(task, description=what, visible=time.perf_counter() - started > _QUIET_S)

        return examine(device, on_progress)
