"""`bf16forensics explain`: the documentation of a finding."""

import shutil
from typing import Annotated

import typer

from bf16forensics import __version__
from bf16forensics.commands._options import JsonFlag

_WIDEST = 100


def _codes() -> list[str]:
    from bf16forensics.verdict.catalogue import entries

    return [item.code for item in entries()]


def explain(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]",
            help="Code of a finding, such as BF301; all codes are listed without one.",
            autocompletion=_codes,
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Explain a finding: what it says, how it is decided, what would refute it, what to do next."""
    from bf16forensics.report.findings_page import as_list, as_text
    from bf16forensics.verdict.catalogue import entries, entry

    items = entries() if code is None else (entry(code),)
    if as_json:
        from bf16forensics.report.jsonio import dumps, opening, plain

        command = ("bf16forensics", "explain", *(() if code is None else (code,)))
        document = {**opening(command, tool_version=__version__), "codes": plain(items)}
        typer.echo(dumps(document), nl=False)
        return
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    typer.echo(as_list(items, width) if code is None else as_text(items[0], width), nl=False)
