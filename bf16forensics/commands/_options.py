"""Options that mean the same in every command."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class FailOn(StrEnum):
    """Severity from which findings make the exit code 1."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


JsonFlag = Annotated[bool, typer.Option("--json", help="Write one JSON document to standard output.")]

ForceFlag = Annotated[bool, typer.Option("--force", help="Replace an output that already exists.")]

OutputDir = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="CASE", help="Directory to write the case to.", show_default=False),
]

FailOnOption = Annotated[
    FailOn, typer.Option("--fail-on", help="Lowest severity of a finding that makes the exit code 1.")
]
