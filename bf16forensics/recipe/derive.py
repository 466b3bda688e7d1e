"""From what a user writes to a recipe, and the flips of the isolation experiments.

A recipe is given as a preset ("fa2"), a preset with points set ("fa2+o_bar=bf16"), a TOML file ("mine.toml"), or a
file with points set ("mine.toml+o=fp32").
"""

import re
from pathlib import Path

from bf16forensics.errors import RecipeError
from bf16forensics.recipe.files import read_recipe
from bf16forensics.recipe.model import Recipe
from bf16forensics.recipe.names import parse_points, preset_named, with_points
from bf16forensics.recipe.points import POINTS, is_rounding_point, point_named

_FILE = re.compile(r"(?P<path>.*\.toml)\s*(?:\+(?P<points>.*))?", re.IGNORECASE | re.DOTALL)


def resolve(text: str) -> Recipe:
    """The recipe that `text` names.

    The result's name has one spelling: formats and points are normalised, points that already have that value in the
    preset are dropped, the user's order is kept. So `resolve(resolve(text).name) == resolve(text)` for presets.

    Args:
        text: "fa2", "fa2+o_bar=bf16,row_sum=bf16", "fa2+o_bar=bf16+row_sum=bf16", "mine.toml".

    Raises:
        RecipeError: unknown preset, point or value (each lists what is known), contradictory points, or a file that
            cannot be used.
    """
    text = text.strip()
    if not text:
        raise RecipeError("the recipe is empty; name a preset such as fa2 (see: bf16forensics recipe list)")
    file = _FILE.fullmatch(text)
    if file is not None:
        recipe, rest = read_recipe(Path(file["path"])), file["points"]
    else:
        base, plus, after = text.partition("+")
        recipe, rest = preset_named(base), after if plus else None
    return recipe if rest is None else with_points(recipe, parse_points(rest, text))


def flip(recipe: Recipe, point: str) -> Recipe:
    """The recipe with exactly one rounding point set to FP32; the same recipe when the point is FP32 already.

    Args:
        recipe: any recipe.
        point: name of a rounding point, e.g. "o_bar".

    Raises:
        RecipeError: not a field, or one that is no rounding point.
    """
    name = point_named(point, f"a flip of recipe {recipe.name!r}")
    if not is_rounding_point(name):
        known = ", ".join(spec.name for spec in POINTS if spec.is_rounding_point)
        raise RecipeError(f"{name} is not a rounding point and cannot be flipped to fp32; rounding points: {known}")
    return with_points(recipe, {name: "fp32"})


def rounding_points(recipe: Recipe) -> tuple[str, ...]:
    """Names of the points that the recipe rounds below FP32, in the order of the computation."""
    return tuple(spec.name for spec in POINTS if spec.is_rounding_point and getattr(recipe, spec.name) != "fp32")
