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


def recipe_words(recipe: Recipe, head_size: int, *, p_bar: str = "P-bar", delta: str = "delta") -> str:
    """Every rounding point by format, where delta comes from, the tiles and the products.

    Args:
        recipe: the recipe.
        head_size: elements of one query vector, which decides on the tiles.
        p_bar: how P-bar is written.
        delta: how delta is written.
    """
    by_format: dict[str, list[str]] = {}
    for field, words in _POINTS.items():
        point = words.format(p_bar=p_bar, delta=delta)
        if field == "p_bar" and recipe.p_bar_cast == "after":
            point = "P (normalised)"
        if field == "o_bar" and recipe.o_bar_at == "tile":
            point += " at every tile"
        by_format.setdefault(getattr(recipe, field), []).append(point)
    low = [f"{name.upper()}: {', '.join(points)}" for name, points in by_format.items() if name != "fp32"]
    source = "dO * O" if recipe.delta_source == "o" else "dP * P"
    tile_q, tile_k = recipe.tile(head_size, 0)
    tiles = f"tiles {tile_q} x {tile_k} {recipe.tile_order}" if recipe.tiles else "no tiles"
    products = "FP32" if recipe.arithmetic == "fp32" else recipe.arithmetic
    rounds = "; ".join(low) if low else "nothing is rounded"
    return f"{rounds}; all else FP32; {delta} = rowsum({source}); {tiles}; {products} products"
