"""Every field of a recipe that can be set by name: its meaning in plain words and the values it takes."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from bf16forensics.errors import RecipeError
from bf16forensics.recipe.model import POINT_FORMATS

#: Other spellings of the formats.
_FORMAT_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8_e4m3fn": "e4m3",
    "e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSpec:
    """What one field of a recipe means."""

    #: Field name in `Recipe`.
    name: str
    #: "scores", "P-bar and O", "tiles", "backward" or "products": the heading it is listed under.
    group: str
    #: Allowed values; the formats for a rounding point, a closed list for a structural choice.
    values: tuple[str, ...]
    #: What rounds or what is chosen, in plain words, at most about 60 characters.
    meaning: str

    @property
    def is_rounding_point(self) -> bool:
        """Whether the field names a storage format (and can therefore be flipped)."""
        return self.values == POINT_FORMATS


def _rounding(name: str, group: str, meaning: str) -> PointSpec:
    return PointSpec(name=name, group=group, values=POINT_FORMATS, meaning=meaning)


def _choice(name: str, group: str, values: tuple[str, ...], meaning: str) -> PointSpec:
    return PointSpec(name=name, group=group, values=values, meaning=meaning)


#: Settable fields in the order of `Recipe`, which is the order of the computation.
POINTS: tuple[PointSpec, ...] = (
    _choice("operands", "scores", ("stored", "e4m3"), "q, k and v as they are, or E4M3 with a factor for each head"),
    _choice(
        "scale_placement",
        "scores",
        ("exponent", "scores", "operands"),
        "softmax scale: inside the exponential, on stored S, or on q and k",
    ),
    _rounding("scores", "scores", "S = q.k each time it is stored (product, scale, cap, bias)"),
    _rounding("shifted", "scores", "S - m, the score minus the row maximum"),
    _choice(
        "exponential",
        "scores",
        ("exp2", "exp", "exp2-cubic", "fexp_u20"),
        "exp2 with scale log2(e) folded in, plain exp, or either with a cubic for some keys",
    ),
    _choice("p_scale", "P-bar and O", ("1", "256"), "factor that P-bar and the row sum carry"),
    _choice(
        "rescale_threshold",
        "P-bar and O",
        ("0", "8"),
        "lag behind the maximum, in log2, up to which m is kept (0: none)",
    ),
    _rounding("p_bar", "P-bar and O", "P-bar (or P) as the operand of the product with V"),
    _choice(
        "p_bar_cast", "P-bar and O", ("before", "after"), "P-bar is cast before or after the division by the row sum"
    ),
    _rounding("row_sum_input", "P-bar and O", "the P-bar that the row sum adds up (fp32: before its cast)"),
    _choice(
        "row_sum_order",
        "P-bar and O",
        ("any", "avx2", "avx512"),
        "order of the row sum: any, or by 8 or 16 vector lanes",
    ),
    _rounding("row_sum", "P-bar and O", "the running row sum l, stored after each tile"),
    _rounding("o_bar", "P-bar and O", "the unnormalised output O-bar = P-bar V"),
    _choice("o_bar_at", "P-bar and O", ("end", "tile"), "O-bar rounds once at the end, or at every tile"),
    _rounding("o", "P-bar and O", "the output O = O-bar / l"),
    _choice("division", "P-bar and O", ("reciprocal", "divide"), "O-bar times 1/l, or O-bar divided by l"),
    _rounding("lse", "P-bar and O", "the log-sum-exp handed to the backward pass"),
    _choice(
        "query_tiles", "tiles", ("fixed", "by-length"), "query rows a tile: as given, or fewer in calls of few queries"
    ),
    _choice("tile_order", "tiles", ("ascending", "descending", "masked-first"), "order in which key tiles are visited"),
    _choice("passes", "backward", ("both", "forward"), "a backward pass exists, or a forward pass only"),
    _choice("p_source", "backward", ("lse", "saved"), "P is recomputed as exp(S - lse), or saved by the forward pass"),
    _choice("delta_source", "backward", ("o", "dp"), "delta = rowsum(dO * O), or rowsum(dP * P)"),
    _rounding("delta_products", "backward", "the products dO * O before they are added"),
    _rounding("delta", "backward", "delta, the row sum of dO * O"),
    _rounding("dp", "backward", "dP = dO V^T"),
    _rounding("p_backward", "backward", "P as the operand of dV = P^T dO"),
    _rounding("ds", "backward", "dS as the operand of the products with K and Q"),
    _choice(
        "ds_scale",
        "backward",
        ("gradients", "ds"),
        "the scale multiplies dQ and dK, or dS, which then rounds again",
    ),
    _rounding("dq", "backward", "the gradient dQ"),
    _rounding("dkv", "backward", "the gradients dK and dV"),
    _choice(
        "gradients_at",
        "backward",
        ("end", "tile", "buffer"),
        "gradients round once at the end, at every key tile, or as sums only",
    ),
    _choice(
        "arithmetic",
        "products",
        ("fp32", "exact", "torch-blocks"),
        "how products are added: in FP32, exactly and rounded once, or tile by tile",
    ),
)

#: Tile sizes that a derived recipe may set, replacing the rule of every head size.
TILE_POINTS = ("tile_q", "tile_k")

_BY_NAME = {point.name: point for point in POINTS}


def nearest(text: str, known: Iterable[str]) -> str:
    """The hint " (did you mean 'x'?)" for the known name closest to `text`, or nothing."""
    names = list(known)
    close = difflib.get_close_matches(text.casefold(), names, n=max(len(names), 1))
    if not close:
        return ""
    # Of several equally close names the first listed one is the likeliest.
    ratios = {name: difflib.SequenceMatcher(None, name, text.casefold()).ratio() for name in close}
    best = max((name for name in names if name in ratios), key=lambda name: ratios[name])
    return f" (did you mean {best!r}?)"


def point_named(text: str, where: str) -> str:
    """The field name for a spelling of it; case and hyphens do not matter.

    Args:
        text: e.g. "O-bar".
        where: for the message: the recipe or file in which it was written.

    Raises:
        RecipeError: no such field; the message lists all of them.
    """
    name = text.strip().casefold().replace("-", "_")
    if name in _BY_NAME or name in TILE_POINTS:
        return name
    known = (*_BY_NAME, *TILE_POINTS)
    raise RecipeError(f"unknown point {text.strip()!r} in {where}{nearest(name, known)}; known: {', '.join(known)}")


def value_named(point: str, text: str, where: str) -> str:
    """The canonical value of a field ("bfloat16" becomes "bf16", "0128" becomes "128").

    Args:
        point: a name that `point_named` returned.
        text: the value as written.
        where: for the message: the recipe or file in which it was written.

    Raises:
        RecipeError: the field does not take this value; the message lists those it takes.
    """
    value = text.strip().casefold()
    if point in TILE_POINTS:
        if value.isascii() and value.isdecimal() and 0 < len(value) < 10 and int(value) > 0:
            return str(int(value))
        raise RecipeError(f"{point} must be a positive whole number; got {text.strip()!r} in {where}")
    spec = _BY_NAME[point]
    if spec.is_rounding_point:
        value = _FORMAT_ALIASES.get(value, value)
    if value in spec.values:
        return value
    raise RecipeError(
        f"{point} cannot be {text.strip()!r} in {where}{nearest(value, spec.values)}; allowed: {', '.join(spec.values)}"
    )


def is_rounding_point(name: str) -> bool:
    """Whether `name` is a field that holds a storage format."""
    return name in _BY_NAME and _BY_NAME[name].is_rounding_point
