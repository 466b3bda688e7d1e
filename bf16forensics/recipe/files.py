"""Recipes in TOML files, read strictly and written so that they read back equal."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path

from bf16forensics.errors import RecipeError
from bf16forensics.recipe.model import Recipe, TileRule
from bf16forensics.recipe.names import BASE_NAME, find_preset, preset_named, split_name, with_points
from bf16forensics.recipe.points import POINTS, TILE_POINTS, nearest, value_named

_TEXT_FIELDS = ("name", "source", "summary")
_POINT_FIELDS = tuple(point.name for point in POINTS)
_KEYS = ("base", *(field.name for field in fields(Recipe)), *TILE_POINTS)
_TILE_KEYS = ("head_size_max", "tile_q", "tile_k", "causal")


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe from a TOML file.

    The file holds `base = "fa2"` and the fields that differ from it, or every field (one that came later than the
    first recipe files may be left out and then changes nothing). `tiles` is an array of
    `{head_size_max, tile_q, tile_k}` by growing head size; the last one leaves `head_size_max` out and covers the rest;
    an entry with `causal` holds for calls with a causal mask or a window (true) or for the others (false) only. An
    empty array means one tile over the whole row. With a base, `tile_q` and `tile_k` set the size for every head
    size. `name` is the file's stem unless given.

    Raises:
        RecipeError: the file is missing, is not TOML, has an unknown key, a value out of its list, an incomplete set
            of fields, or the name of a preset that it does not equal. The message names file and key.
    """
    return recipe_of_table(_parse(path), path)


def recipe_of_table(table: Mapping[str, object], path: Path) -> Recipe:
    """The recipe that the fields of a file spell out, checked as strictly as `read_recipe` does.

    Args:
        table: values by field name, as TOML or the `recipe` of a JSON document holds them (tiles as a list).
        path: the file, for messages; its stem is the name where the table gives none.

    Raises:
        RecipeError: as `read_recipe`.
    """
    unknown = [key for key in table if key not in _KEYS]
    if unknown:
        raise RecipeError(
            f"{path}: unknown key {unknown[0]!r}{nearest(unknown[0], _KEYS)}; a recipe has: {', '.join(_KEYS)}"
        )
    values: dict[str, object] = {}
    for key, value in table.items():
        if key in _TEXT_FIELDS:
            values[key] = _text(value, key, path)
        elif key == "version":
            values[key] = _positive(value, key, path)
        elif key == "tiles":
            values[key] = _tiles(value, path)
        elif key in _POINT_FIELDS:
            values[key] = value_named(key, _text(value, key, path), str(path))
    sizes = {key: str(_positive(table[key], key, path)) for key in TILE_POINTS if key in table}
    if sizes and "tiles" in values:
        raise RecipeError(f"{path}: has both tiles and {next(iter(sizes))}; keep one")
    values.setdefault("name", path.stem)
    if "base" in table:
        recipe = _derive(_text(table["base"], "base", path), values, sizes, path)
    else:
        recipe = _whole(values, sizes, path)
    _check_name(recipe, path)
    return recipe


def to_toml(recipe: Recipe) -> str:
    """The recipe as a TOML file with every field, which `read_recipe` reads back equal."""
    lines = []
    for field in fields(Recipe):
        value = getattr(recipe, field.name)
        if field.name == "tiles":
            lines.append(_tiles_to_toml(recipe.tiles))
        else:
            lines.append(f"{field.name} = {_quoted(value) if isinstance(value, str) else value}")
    return "\n".join(lines) + "\n"


def _parse(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe file: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a recipe: not UTF-8 text; write TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not valid TOML: {' '.join(str(error).split())}") from None


def _text(value: object, key: str, path: Path) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RecipeError(f"{path}: {key} must be a non-empty string; got {value!r}")
    return value


def _positive(value: object, key: str, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"{path}: {key} must be a positive whole number; got {value!r}")
    return value


def _tiles(value: object, path: Path) -> tuple[TileRule, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise RecipeError(f"{path}: tiles must be an array of {{head_size_max, tile_q, tile_k}}")
    rules = tuple(_tile(entry, f"tiles, entry {number}", path) for number, entry in enumerate(value, start=1))
    for causal in (True, False) if rules else ():
        numbered = [(number, rule) for number, rule in enumerate(rules, start=1) if rule.causal in (None, causal)]
        _check_tiles(numbered, path)
    return rules


def _tile(entry: Mapping[str, object], where: str, path: Path) -> TileRule:
    unknown = [key for key in entry if key not in _TILE_KEYS]
    missing = [key for key in TILE_POINTS if key not in entry]
    if unknown or missing:
        problem = f"unknown key {unknown[0]!r}" if unknown else f"{missing[0]} is missing"
        raise RecipeError(f"{path}: {where}: {problem}; an entry has head_size_max, tile_q, tile_k and may have causal")
    causal = entry.get("causal")
    if causal is not None and not isinstance(causal, bool):
        raise RecipeError(f"{path}: {where}: causal must be true or false; got {causal!r}; leave it out for all calls")
    limit = entry.get("head_size_max")
    tile_q, tile_k = (_positive(entry[key], f"{where}: {key}", path) for key in TILE_POINTS)
    return TileRule(
        head_size_max=None if limit is None else _positive(limit, f"{where}: head_size_max", path),
        tile_q=tile_q,
        tile_k=tile_k,
        causal=causal,
    )


def _check_tiles(rules: list[tuple[int, TileRule]], path: Path) -> None:
    """The rules of one kind of calls, with their numbers, must cover every head size once."""
    above = 0
    for position, (number, rule) in enumerate(rules, start=1):
        where, limit, last = f"{path}: tiles, entry {number}", rule.head_size_max, position == len(rules)
        if last and limit is not None:
            raise RecipeError(f"{where}: the last entry covers all larger head sizes: leave head_size_max out")
        if not last and limit is None:
            raise RecipeError(f"{where}: head_size_max is missing")
        if limit is not None and limit <= above:
            raise RecipeError(f"{where}: head_size_max {limit} does not grow; order the entries by it")
        above = limit or above
    if not rules:
        raise RecipeError(f"{path}: tiles: every entry has the same causal; cover the other calls too")


def _derive(base: str, values: dict[str, object], sizes: dict[str, str], path: Path) -> Recipe:
    try:
        preset = preset_named(base)
        sized = with_points(preset, sizes)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    values.setdefault("source", f"{path.name}, from preset {preset.name} version {preset.version}")
    return replace(sized, **values)  # type: ignore[arg-type]


def _whole(values: dict[str, object], sizes: dict[str, str], path: Path) -> Recipe:
    if sizes:
        raise RecipeError(f"{path}: {next(iter(sizes))} needs a base; without one, give tiles")
    values.setdefault("version", 1)
    values.setdefault("source", path.name)
    values.setdefault("summary", f"recipe of the file {path.name}")
    missing = [field.name for field in fields(Recipe) if field.name not in values and field.default is MISSING]
    if missing:
        raise RecipeError(f'{path}: {", ".join(missing)} missing; add them, or base = "fa2" to start from a preset')
    return Recipe(**values)  # type: ignore[arg-type]


def _check_name(recipe: Recipe, path: Path) -> None:
    """A name is a promise about every printed number, so it may not contradict the fields."""
    try:
        base, points = split_name(recipe.name)
    except RecipeError as error:
        raise RecipeError(f'{path}: {error}; or give the recipe another name with name = "..."') from None
    if not BASE_NAME.fullmatch(base):
        raise RecipeError(
            f'{path}: {base!r} cannot be a recipe\'s name; add name = "..." of letters, digits, ".", "_", "-"'
        )
    preset = find_preset(base)
    if preset is not None:
        expected = with_points(preset, points)
        if _without_texts(expected) != _without_texts(recipe):
            raise RecipeError(
                f"{path}: its name {recipe.name!r} promises a preset that it does not equal; give it another name"
            )
    elif with_points(recipe, points) != recipe:
        raise RecipeError(f"{path}: its name {recipe.name!r} contradicts its fields; give it another name")


def _without_texts(recipe: Recipe) -> Recipe:
    return replace(recipe, source="", summary="")


def _quoted(text: str) -> str:
    """A TOML basic string in plain ASCII, which no console can damage."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if " " <= char <= "~" else f"\\U{ord(char):08X}" for char in escaped) + '"'


def _tiles_to_toml(tiles: tuple[TileRule, ...]) -> str:
    if not tiles:
        return "tiles = []"
    lines = ["tiles = ["]
    for rule in tiles:
        limit = "" if rule.head_size_max is None else f"head_size_max = {rule.head_size_max}, "
        calls = "" if rule.causal is None else f", causal = {str(rule.causal).lower()}"
        lines.append(f"  {{ {limit}tile_q = {rule.tile_q}, tile_k = {rule.tile_k}{calls} }},")
    return "\n".join([*lines, "]"])
