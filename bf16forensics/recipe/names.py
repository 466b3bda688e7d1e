"""Recipe names: `PRESET+POINT=VALUE[,POINT=VALUE...]`, parsed, applied and written back in one spelling."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bf16forensics.errors import RecipeError
from bf16forensics.recipe.model import Recipe, TileRule
from bf16forensics.recipe.points import TILE_POINTS, nearest, point_named, value_named
from bf16forensics.recipe.presets import PRESETS

#: What a recipe of a file may be called.
BASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def find_preset(name: str) -> Recipe | None:
    """The preset of that name (case does not matter), or None."""
    return next((preset for preset in PRESETS if preset.name == name.strip().casefold()), None)


def preset_named(name: str) -> Recipe:
    """The preset of that name.

    Raises:
        RecipeError: there is none; the message lists them.
    """
    preset = find_preset(name)
    if preset is None:
        known = [preset.name for preset in PRESETS]
        raise RecipeError(
            f"unknown recipe {name.strip()!r}{nearest(name, known)}; known: {', '.join(known)}, "
            "or a file ending in .toml"
        )
    return preset


def parse_points(text: str, where: str) -> dict[str, str]:
    """Reads "o_bar=bf16,row_sum=bf16" (or "+" between the parts) into canonical points and values.

    Args:
        text: everything after the first "+" of a recipe's name.
        where: the whole name, for messages.

    Returns:
        Canonical value by canonical point, in the order written.

    Raises:
        RecipeError: an empty part, a part without "=", an unknown point or value, one point with two values.
    """
    points: dict[str, str] = {}
    for part in re.split(r"[+,]", text):
        point_text, equals, value_text = part.partition("=")
        if not equals or not point_text.strip() or not value_text.strip():
            raise RecipeError(f"cannot read {part.strip()!r} in recipe {where!r}; write NAME+POINT=VALUE[,POINT=VALUE]")
        point = point_named(point_text, f"recipe {where!r}")
        value = value_named(point, value_text, f"recipe {where!r}")
        if points.setdefault(point, value) != value:
            raise RecipeError(f"recipe {where!r} sets {point} to both {points[point]} and {value}; keep one")
    return points


def format_name(base: str, points: Mapping[str, str]) -> str:
    """The canonical name of `base` with `points` set."""
    if not points:
        return base
    return base + "+" + ",".join(f"{point}={value}" for point, value in points.items())


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """The base name and the points of a recipe's name.

    Raises:
        RecipeError: the part after "+" cannot be read.
    """
    base, plus, rest = name.partition("+")
    return base.strip(), parse_points(rest, name) if plus else {}


def with_points(recipe: Recipe, points: Mapping[str, str]) -> Recipe:
    """Sets canonical points to canonical values; the name says so, values already there are dropped from it.

    Points that an earlier derivation set are merged: setting one back to its preset's value takes it off the name.

    Args:
        recipe: a preset, a derived recipe, or the recipe of a file.
        points: canonical value by canonical point.

    Raises:
        RecipeError: tile_q alone for a recipe that has no tiles.
    """
    base_name, earlier = split_name(recipe.name)
    base = find_preset(base_name)
    changed = recipe
    kept = dict(earlier)
    for point, value in points.items():
        if _value_of(changed, point) == value:
            continue
        changed = _set(changed, point, value, points)
        kept[point] = value
    if base is not None:
        kept = {point: value for point, value in kept.items() if _value_of(base, point) != value}
    return replace(changed, name=format_name(base_name, kept))


def _value_of(recipe: Recipe, point: str) -> str | None:
    """The value of a point; for a tile size, only when it is the same for every head size."""
    if point in TILE_POINTS:
        sizes = {getattr(rule, point) for rule in recipe.tiles}
        return str(sizes.pop()) if len(sizes) == 1 else None
    value = getattr(recipe, point)
    return str(value)


def _set(recipe: Recipe, point: str, value: str, points: Mapping[str, str]) -> Recipe:
    if point not in TILE_POINTS:
        field: dict[str, Any] = {point: value}
        return replace(recipe, **field)
    if not recipe.tiles and "tile_k" not in points:
        raise RecipeError(f"recipe {recipe.name!r} has no tiles, so tile_q alone means nothing; set tile_k as well")
    # Without tiles the recipe visits whole rows in blocks of queries that change nothing; 128 is what `tile` returns.
    rules = recipe.tiles or (TileRule(head_size_max=None, tile_q=128, tile_k=int(value)),)
    size = int(value)
    resized = (replace(rule, tile_q=size) if point == "tile_q" else replace(rule, tile_k=size) for rule in rules)
    return replace(recipe, tiles=_merged(tuple(resized)))


def _merged(rules: tuple[TileRule, ...]) -> tuple[TileRule, ...]:
    """The same sizes in as few rules as possible: neighbouring head sizes and the two kinds of calls joined."""
    limits = sorted({rule.head_size_max for rule in rules if rule.head_size_max is not None})
    merged: list[tuple[int | None, tuple[TileRule, TileRule]]] = []
    for limit in (*limits, None):
        size = limits[-1] + 1 if limit is None and limits else limit or 1
        pair = _rule_of(rules, size, True), _rule_of(rules, size, False)
        if merged and all(_sizes(old) == _sizes(new) for old, new in zip(merged[-1][1], pair, strict=True)):
            merged.pop()
        merged.append((limit, pair))
    found: list[TileRule] = []
    for limit, (causal, other) in merged:
        if _sizes(causal) == _sizes(other):
            found.append(replace(causal, head_size_max=limit, causal=None))
        else:
            found += [
                replace(causal, head_size_max=limit, causal=True),
                replace(other, head_size_max=limit, causal=False),
            ]
    return tuple(found)


def _rule_of(rules: tuple[TileRule, ...], head_size: int, causal: bool) -> TileRule:
    return next(rule for rule in rules if rule.covers(head_size, causal))


def _sizes(rule: TileRule) -> tuple[int, int]:
    return rule.tile_q, rule.tile_k
