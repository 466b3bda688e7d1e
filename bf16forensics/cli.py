"""The Typer application: global options and the commands in the order of the help text."""

from typing import Annotated

import typer

from bf16forensics import __version__
from bf16forensics.commands import demo, explain, localize, recipe

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bf16forensics {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find out whether low-precision rounding in attention is ruining a training run, and where.

    Exit codes: 0 nothing found, 1 findings at or above --fail-on, 2 bad input or usage, 3 internal error,
    130 interrupted.
    """


# One line a command, in the order of the help text: app.command("NAME")(module.function).
app.command("localize")(localize.localize)
app.command("explain")(explain.explain)
app.add_typer(recipe.app, name="recipe")
app.command("demo")(demo.demo)
