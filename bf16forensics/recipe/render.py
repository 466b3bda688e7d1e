"""Recipes as plain text and as JSON objects. Plain ASCII but for what a file's own texts contain."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from bf16forensics.recipe.derive import rounding_points
from bf16forensics.recipe.describe import base_preset, describe, describe_tiles
from bf16forensics.recipe.model import Recipe

#: Columns that names and values take in the table of points: the longest are "rescale_threshold" and "masked-first".
_NAME_WIDTH = 18
_VALUE_WIDTH = 13


def list_text(recipes: Sequence[Recipe], width: int) -> str:
    """One paragraph a recipe: name, version, summary, what rounds, source.

    Args:
        recipes: the first one is called the default.
        width: columns; lines are wrapped to it as far as words allow.
    """
    blocks = []
    for recipe in recipes:
        default = ", default" if recipe is recipes[0] else ""
        blocks.append(
            "\n".join(
                [
                    f"{recipe.name} (version {recipe.version}{default})",
                    *_wrap(recipe.summary, width, "  "),
                    *_labelled("rounds", ", ".join(rounding_points(recipe)) or "nothing", width),
                    *_labelled("source", recipe.source, width),
                ]
            )
        )
    hints = (
        "bf16forensics recipe show NAME explains every point.",
        "NAME+POINT=DTYPE[,...] sets points, for example fa2+o_bar=bf16; a .toml file holds a whole recipe.",
    )
    blocks.append("\n".join(line for hint in hints for line in _wrap(hint, width, "")))
    return "\n\n".join(blocks) + "\n"


def show_text(recipe: Recipe, width: int) -> str:
    """One recipe with its source, every point with its meaning, and the tile sizes of every head size.

    Points that differ from the preset carry a "*" and say what the preset has.
    """
    preset = base_preset(recipe)
    derived = preset is not None and preset.name != recipe.name
    origin = f"derived from {_preset_name(preset)} version {recipe.version}" if derived else f"version {recipe.version}"
    lines = [f"{recipe.name} ({origin})", *_wrap(recipe.summary, width, "  ")]
    lines += _labelled("source", recipe.source, width)
    group = ""
    changed = False
    for point in describe(recipe):
        if point.group != group:
            group = point.group
            lines += ["", group]
            if group == "tiles":
                lines += _tile_lines(recipe)
        changed |= point.is_changed
        meaning = (
            f"{point.meaning} ({_preset_name(preset)}: {point.preset_value})" if point.is_changed else point.meaning
        )
        head = f"{'*' if point.is_changed else ' '} {point.name:<{_NAME_WIDTH}}{point.value:<{_VALUE_WIDTH}}"
        lines += textwrap.wrap(
            meaning,
            width=max(width, len(head) + 20),
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
        )
    if preset is not None and preset.tiles != recipe.tiles:
        changed = True
    if changed:
        lines += ["", f"* differs from preset {_preset_name(preset)}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_object(recipe: Recipe) -> dict[str, object]:
    """The recipe as a JSON object; field names are stable, more may be added."""
    preset = base_preset(recipe)
    return {
        "name": recipe.name,
        "preset": None if preset is None else preset.name,
        "version": recipe.version,
        "source": recipe.source,
        "summary": recipe.summary,
        "rounding_points": list(rounding_points(recipe)),
        "points": [
            {
                "name": point.name,
                "value": point.value,
                "preset_value": point.preset_value,
                "meaning": point.meaning,
                "allowed": list(point.allowed),
            }
            for point in describe(recipe)
        ],
        "tiles": [asdict(rule) for rule in recipe.tiles],
    }


def _tile_lines(recipe: Recipe) -> list[str]:
    preset = base_preset(recipe)
    mark = "*" if preset is not None and preset.tiles != recipe.tiles else " "
    lines = []
    for tile in describe_tiles(recipe):
        size = "the whole row, no tiles" if tile.tile_k is None else f"{tile.tile_q} queries x {tile.tile_k} keys"
        calls = "" if tile.causal is None else ", causal or window" if tile.causal else ", neither causal nor window"
        lines.append(f"{mark} head size {tile.head_sizes:<12} {size}{calls}")
    return lines


def _preset_name(preset: Recipe | None) -> str:
    return "" if preset is None else preset.name


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _labelled(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=f"  {label}: ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
