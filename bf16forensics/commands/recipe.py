"""`bf16forensics recipe`: lists the presets and shows where a recipe rounds."""

import shutil
from typing import Annotated

import typer

from bf16forensics import __version__
from bf16forensics.commands._options import JsonFlag
from bf16forensics.errors import InputError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List the recipes and show where each one rounds.")

_WIDEST = 100


@app.command("list")
def list_recipes(as_json: JsonFlag = False) -> None:
    """List the presets with their sources; the first one is the default."""
    from bf16forensics.recipe.presets import PRESETS
    from bf16forensics.recipe.render import as_object, list_text

    if as_json:
        typer.echo(_document(["list"], {"recipes": [as_object(preset) for preset in PRESETS]}), nl=False)
    else:
        typer.echo(list_text(PRESETS, _width()), nl=False)


@app.command("show")
def show_recipe(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A preset, PRESET+POINT=DTYPE[,...], or a .toml file.", show_default=False),
    ],
    as_json: JsonFlag = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Write the recipe as a TOML file with every field.")] = False,
) -> None:
    """Show every rounding point of a recipe, what it means, and the tile sizes."""
    if as_json and as_toml:
        raise InputError("--json and --toml exclude each other; give one")
    from bf16forensics.recipe.derive import resolve
    from bf16forensics.recipe.files import to_toml
    from bf16forensics.recipe.render import as_object, show_text

    recipe = resolve(name)
    if as_json:
        typer.echo(_document(["show", name], {"recipe": as_object(recipe)}), nl=False)
    elif as_toml:
        typer.echo(to_toml(recipe), nl=False)
    else:
        typer.echo(show_text(recipe, _width()), nl=False)


def _document(arguments: list[str], body: dict[str, object]) -> str:
    from bf16forensics.report.jsonio import dumps, opening

    return dumps(opening(("bf16forensics", "recipe", *arguments), tool_version=__version__) | body)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)
