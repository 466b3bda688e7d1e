"""A recipe in one sentence."""

from bf16forensics.recipe.model import Recipe

#: Rounding points in the order of the computation.
_POINTS = {
    "scores": "S",
    "shifted": "S - m",
    "p_bar": "{p_bar}",
    "row_sum_input": "the input of the row sum",
    "row_sum": "the row sum",
    "o_bar": "O-bar",
    "o": "O",
    "lse": "LSE",
    "delta_products": "dO * O",
    "delta": "{delta}",
    "dp": "dP",
    "p_backward": "P for dV",
    "ds": "dS",
    "dq": "dQ",
    "dkv": "dK and dV",
}


#: Those of the backward pass.
_BACKWARD = ("lse", "delta_products", "delta", "dp", "p_backward", "ds", "dq", "dkv")
#: How the exponential is computed, where it is neither exp nor exp2.
_EXPONENTIALS = {"exp2-cubic": "cubic exp2 in part", "fexp_u20": "exp to 20 bits"}


def recipe_words(
    recipe: Recipe, head_size: int, *, causal: bool = True, p_bar: str = "P-bar", delta: str = "delta"
) -> str:
    """Every rounding point by format, where delta comes from, what else is special, the tiles and the products.

    Args:
        recipe: the recipe.
        head_size: elements of one query vector, which decides on the tiles.
        causal: whether the call is causal or has a window, which may decide on them too.
        p_bar: how P-bar is written.
        delta: how delta is written.
    """
    by_format: dict[str, list[str]] = {}
    forward_only = recipe.passes == "forward"
    for field, words in _POINTS.items():
        if forward_only and field in _BACKWARD:
            continue
        point = words.format(p_bar=p_bar, delta=delta)
        if field == "p_bar" and recipe.p_bar_cast == "after":
            point = "P (normalised)"
        if field == "o_bar" and recipe.o_bar_at == "tile":
            point += " at every tile"
        by_format.setdefault(getattr(recipe, field), []).append(point)
    low = [f"{name.upper()}: {', '.join(points)}" for name, points in by_format.items() if name != "fp32"]
    source = "dO * O" if recipe.delta_source == "o" else "dP * P"
    backward = "forward pass only" if forward_only else f"{delta} = rowsum({source})"
    special = [*_special(recipe, p_bar), backward]
    tile_q, tile_k = recipe.tile(head_size, 0, causal)
    tiles = f"tiles {tile_q} x {tile_k} {recipe.tile_order}" if recipe.tiles else "no tiles"
    products = "FP32" if recipe.arithmetic == "fp32" else recipe.arithmetic
    rounds = "; ".join(low) if low else "nothing is rounded"
    return f"{rounds}; all else FP32; {'; '.join(special)}; {tiles}; {products} products"


def _special(recipe: Recipe, p_bar: str) -> list[str]:
    """What a reader of the rounding points alone would not expect."""
    words = []
    if recipe.operands != "stored":
        words.append(f"q, k, v quantised to {recipe.operands.upper()}")
    if recipe.exponential in _EXPONENTIALS:
        words.append(_EXPONENTIALS[recipe.exponential])
    if recipe.p_scale != "1":
        words.append(f"{p_bar} times {recipe.p_scale}")
    if not recipe.anchored_at_maximum:
        words.append(f"rows anchored within 2^{recipe.rescale_threshold} of their maximum")
    return words
