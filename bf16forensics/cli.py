"""The Typer application: global options and the commands in the order of the help text."""

from collections.abc import Callable
from typing import Annotated

import typer

from bf16forensics import __version__


def _localize(app: typer.Typer) -> None:
    from bf16forensics.commands import localize

    app.command("localize")(localize.localize)


def _trace_head(app: typer.Typer) -> None:
    from bf16forensics.commands import trace_head

    app.command("trace-head")(trace_head.trace_head)


def _bits(app: typer.Typer) -> None:
    from bf16forensics.commands import bits

    app.command("bits", context_settings=bits.CONTEXT_SETTINGS)(bits.bits)


def _explain(app: typer.Typer) -> None:
    from bf16forensics.commands import explain

    app.command("explain")(explain.explain)


def _recipe(app: typer.Typer) -> None:
    from bf16forensics.commands import recipe

    app.add_typer(recipe.app, name="recipe")


def _doctor(app: typer.Typer) -> None:
    from bf16forensics.commands import doctor

    app.command("doctor")(doctor.doctor)


def _demo(app: typer.Typer) -> None:
    from bf16forensics.commands import demo

    app.command("demo")(demo.demo)


#: How each command is added, in the order of the help text.
_COMMANDS: dict[str, Callable[[typer.Typer], None]] = {
    "localize": _localize,
    "trace-head": _trace_head,
    "bits": _bits,
    "explain": _explain,
    "recipe": _recipe,
    "doctor": _doctor,
    "demo": _demo,
}


def build(first: str | None = None) -> typer.Typer:
    """The application.

    Args:
        first: the first argument of the command line. Where it names a command, only that one is there: a command then
            starts without importing its neighbours. Else (help, completion, a misspelt name) all are.
    """
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name, add in _COMMANDS.items():
        if first not in _COMMANDS or first == name:
            add(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bf16forensics {__version__}")
        raise typer.Exit()


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find out whether low-precision rounding in attention is ruining a training run, and where.

    Exit codes: 0 nothing found, 1 findings at or above --fail-on, 2 bad input or usage, 3 internal error,
    130 interrupted.
    """
