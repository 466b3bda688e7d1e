"""A recipe explained point by point, for people and for JSON."""

from dataclasses import dataclass

from bf16forensics.recipe.model import Recipe
from bf16forensics.recipe.names import find_preset, split_name
from bf16forensics.recipe.points import POINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class PointDescription:
    """One point of one recipe."""

    #: Field name, as written in NAME+POINT=VALUE.
    name: str
    #: Heading the point belongs to, e.g. "backward".
    group: str
    #: Value in this recipe.
    value: str
    #: What rounds or what is chosen, in plain words.
    meaning: str
    #: Values the point can be set to.
    allowed: tuple[str, ...]
    #: Value in the preset that the recipe was derived from; None for the recipe of a file.
    preset_value: str | None

    @property
    def is_changed(self) -> bool:
        """Whether the recipe sets the point to something else than its preset."""
        return self.preset_value is not None and self.preset_value != self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class TileDescription:
    """Tile sizes for one range of head sizes, in all calls or in one kind of them."""

    #: Range of head sizes, elements, in words: "up to 64", "65 to 128", "above 256", "any".
    head_sizes: str
    #: Query rows a tile; None when the whole head is one tile.
    tile_q: int | None
    #: Keys a tile; None when the whole row is one tile.
    tile_k: int | None
    #: True: calls with a causal mask or a window only; False: the others only; None: all.
    causal: bool | None = None


def base_preset(recipe: Recipe) -> Recipe | None:
    """The preset that a recipe's name starts with; None for the recipe of a file."""
    return find_preset(split_name(recipe.name)[0])


def describe(recipe: Recipe) -> tuple[PointDescription, ...]:
    """Every point of a recipe in the order of the computation."""
    preset = base_preset(recipe)
    return tuple(
        PointDescription(
            name=point.name,
            group=point.group,
            value=getattr(recipe, point.name),
            meaning=point.meaning,
            allowed=point.values,
            preset_value=None if preset is None else getattr(preset, point.name),
        )
        for point in POINTS
    )


def describe_tiles(recipe: Recipe) -> tuple[TileDescription, ...]:
    """The tile rule of a recipe: together the entries cover every head size in every call."""
    if not recipe.tiles:
        return (TileDescription(head_sizes="any", tile_q=None, tile_k=None),)
    entries = []
    above = {True: 0, False: 0}
    for rule in recipe.tiles:
        kinds = (True, False) if rule.causal is None else (rule.causal,)
        # A rule for all calls is two entries where an earlier rule left it different head sizes in the two kinds.
        together = rule.causal is None and above[True] == above[False]
        for causal in (None,) if together else kinds:
            words = _range_words(above[True if causal is None else causal], rule.head_size_max)
            entries.append(TileDescription(head_sizes=words, tile_q=rule.tile_q, tile_k=rule.tile_k, causal=causal))
        for kind in kinds:
            above[kind] = rule.head_size_max or above[kind]
    return tuple(entries)


def _range_words(above: int, limit: int | None) -> str:
    if limit is None:
        return f"above {above}" if above else "any"
    return f"{above + 1} to {limit}" if above else f"up to {limit}"
