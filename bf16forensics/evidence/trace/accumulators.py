"""The accumulators that a trace knows: names, the walk that each follows, and what its numbers are and are not."""

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.matrix_sums import matrix_unit_sum
from bf16forensics.evidence.trace.row_sums import by_tile, each_addition, exact_sum, fp32_prefix
from bf16forensics.evidence.trace.running_sum import RunningSums, stored_format
from bf16forensics.recipe.model import Recipe
from bf16forensics.recipe.names import with_points
from bf16forensics.recipe.points import nearest

#: Names as a user writes them; N is a number of keys. The first is the default.
ACCUMULATOR_NAMES = ("fp32-prefix", "bf16-each-add", "tile:N", "sm80", "sm90", "sm100", "exact")

#: Accumulators over one ascending tile with the final row maximum as anchor.
_ONE_TILE = {"fp32-prefix": fp32_prefix, "bf16-each-add": each_addition}
#: Accumulators that add in blocks, as tensor cores do.
MATRIX_UNITS = ("sm80", "sm90", "sm100")
_TILE = "tile:"
#: Keys of the one tile where the length of the row is not known: more than any row has.
_WHOLE_ROW = 999_999_999


def check_accumulator(text: str) -> str:
    """The canonical name of an accumulator ("Tile:064" becomes "tile:64").

    Raises:
        InputError: there is none of this name, or N is not a positive whole number.
    """
    name = text.strip().casefold()
    if name.startswith(_TILE):
        size = name.removeprefix(_TILE).strip()
        if size.isascii() and size.isdecimal() and len(size) < 10 and int(size) > 0:
            return f"{_TILE}{int(size)}"
        raise InputError(f"accumulator {text.strip()!r}: N of tile:N is a positive number of keys, as in tile:128")
    if name in ACCUMULATOR_NAMES:
        return name
    raise InputError(
        f"unknown accumulator {text.strip()!r}{nearest(name, ACCUMULATOR_NAMES)}; known: {', '.join(ACCUMULATOR_NAMES)}"
    )


def walk_recipe_of(accumulator: str, recipe: Recipe, num_keys: int | None = None) -> Recipe:
    """The recipe whose walk an accumulator follows: the given one, or one derived from it.

    Args:
        accumulator: a name that `check_accumulator` takes.
        recipe: of the run.
        num_keys: keys of the sequence, for the name of a derived recipe with one tile over the row; None: a tile
            longer than any row.

    Raises:
        InputError: unknown accumulator, or "tile:N" with a recipe that multiplies whole rows of normalised P.
    """
    name = check_accumulator(accumulator)
    if name in _ONE_TILE:
        one_tile = {"tile_order": "ascending", "rescale_threshold": "0"}
        if recipe.tiles and recipe.p_bar_cast == "before":
            one_tile["tile_k"] = str(_WHOLE_ROW if num_keys is None else max(num_keys, 1))
        return with_points(recipe, one_tile)
    if name.startswith(_TILE):
        if recipe.p_bar_cast == "after":
            raise InputError(
                f"accumulator {name}: recipe {recipe.name} divides P-bar before its product with V, so that there are "
                "no tiles to rescale; use fp32-prefix"
            )
        return with_points(recipe, {"tile_k": name.removeprefix(_TILE)})
    return recipe


def running_sums(walk: RowWalk, feature: int, accumulator: str) -> RunningSums:
    """The running sum of a feature of V under an accumulator of canonical name.

    Raises:
        InputError: the walk is not one for the accumulator, or operands do not have the 16 bits that it needs.
    """
    if accumulator in MATRIX_UNITS:
        return matrix_unit_sum(walk, feature, accumulator)
    if accumulator.startswith(_TILE):
        return by_tile(walk, feature)
    if accumulator in _ONE_TILE:
        return _ONE_TILE[accumulator](walk, feature)
    return exact_sum(walk, feature)


def meaning(walk: RowWalk, accumulator: str) -> str:
    """What the numbers under an accumulator are, and what they are not: one to three sentences."""
    fmt = stored_format(walk).name
    if accumulator == "fp32-prefix":
        return (
            f"The FP32 sum up to each key, rounded once to {fmt}: the rounding error of each prefix, bounded by half "
            "an ulp. Steps are differences of two bounded numbers and nothing accumulates; of all the values at most "
            f"those at tile ends exist in the computation.{_never_rounded(walk, fmt)}"
        )
    if accumulator == "bf16-each-add":
        return (
            f"The running sum stored in {fmt} after each addition, against the exact sum: errors add up along the "
            "keys. No implementation known here accumulates so; each step shows what one such addition does."
        )
    if accumulator.startswith(_TILE):
        return (
            f"Tiles of {accumulator.removeprefix(_TILE)} keys as the paper's code adds them: each tile's FP32 "
            f"product, the rescaled sum and the new sum round to {fmt}, against the sum without rounding. Errors add "
            "up from tile to tile; inside a tile the value is what would be stored if the row ended there."
        )
    if accumulator in MATRIX_UNITS:
        return (
            f"The FP32 accumulator of an {accumulator} matrix unit, modelled bit by bit, against the sum without "
            "rounding: truncations toward zero add up. Values exist at the ends of its blocks; inside one the rest of "
            "the block counts as zero. The rounding of O-bar and O comes after and is not in it."
        )
    return (
        f"The sum without any rounding up to each key, rounded once to {fmt}: what remains of a perfect accumulator, "
        "bounded by half an ulp. Steps are differences of two bounded numbers and nothing accumulates; at most those "
        f"at tile ends have a counterpart in the computation.{_never_rounded(walk, fmt)}"
    )


def _never_rounded(walk: RowWalk, fmt: str) -> str:
    if walk.o_bar_format != "fp32":
        return ""
    if walk.division == "none":
        return f" The sums are those of the normalised P; the recipe rounds the last one to {fmt} as O."
    return f" The recipe itself keeps O-bar in FP32 and rounds O to {fmt} after the division."
