"""A recipe as the compile-time constants of the fused kernels, and why some recipes have no such form.

Importing this needs no Triton.
"""

from bf16forensics.errors import RecipeError
from bf16forensics.kernels.fused_types import FusedRecipe
from bf16forensics.recipe.model import Recipe

#: Values of a recipe's fields that the kernels have. Fields that are not listed may have any value: they change no
#: result of the dual pass (dV, dK, the query tiles), or are the kernels' constants.
_TAKEN: dict[str, tuple[str, ...]] = {
    "operands": ("stored",),
    "exponential": ("exp2", "exp"),
    "p_scale": ("1",),
    "rescale_threshold": ("0",),
    "row_sum_order": ("any",),
    "tile_order": ("ascending", "descending"),
    "dp": ("fp32",),
    "ds_scale": ("gradients",),
    "arithmetic": ("fp32",),
}
#: Rounding points that round to BF16 or not at all.
_BF16_POINTS = (
    "scores",
    "shifted",
    "p_bar",
    "row_sum_input",
    "row_sum",
    "o_bar",
    "o",
    "lse",
    "delta_products",
    "delta",
    "ds",
    "dq",
)


def why_not_fused(recipe: Recipe) -> str | None:
    """One clause that names the point for which a recipe has no fused form, with its value; None where it has one."""
    for point, taken in _TAKEN.items():
        value = getattr(recipe, point)
        if value not in taken:
            return f"{point}={value} is not in the fused pass, which has {' and '.join(taken)}"
    for point in _BF16_POINTS:
        value = getattr(recipe, point)
        if value not in ("bf16", "fp32"):
            return f"{point}={value} is not in the fused pass, which has bf16 and fp32"
    if recipe.p_bar_cast == "after":
        # P-bar is multiplied unnormalised there; what is rounded after the division would be rounded before it.
        for point in ("p_bar", "o_bar"):
            if getattr(recipe, point) != "fp32":
                return f"p_bar_cast=after with {point}={getattr(recipe, point)} is not in the fused pass"
    if recipe.gradients_at == "buffer" and recipe.dq != "fp32":
        return f"gradients_at=buffer with dq={recipe.dq} is not in the fused pass, which has end and tile"
    return None


def fused_recipe(recipe: Recipe, head_size: int, num_keys: int, has_edge: bool) -> FusedRecipe:
    """The constants of a recipe for the calls of one head size.

    Args:
        recipe: rounding points.
        head_size: elements of one query vector.
        num_keys: M.
        has_edge: whether the calls have a causal mask or a window.

    Raises:
        RecipeError: `why_not_fused` has an answer.
    """
    reason = why_not_fused(recipe)
    if reason is not None:
        raise RecipeError(f"recipe {recipe.name}: {reason}; use --backend reference")

    def rounds(point: str) -> bool:
        return bool(getattr(recipe, point) == "bf16")

    # As `folds_scale` of the reference has it: a score that rounds is stored, and so is its product with the scale.
    scale_in = recipe.scale_placement
    if scale_in == "exponent" and rounds("scores"):
        scale_in = "scores"
    # A cast after the division takes the whole row at once, whatever the tiles.
    whole_row = recipe.p_bar_cast == "after" or not recipe.tiles
    return FusedRecipe(
        scale_in=scale_in,
        exp2=recipe.exponential == "exp2",
        scores=rounds("scores"),
        shifted=rounds("shifted"),
        p_bar=rounds("p_bar"),
        row_sum_input=rounds("row_sum_input"),
        row_sum=rounds("row_sum"),
        o_bar=rounds("o_bar"),
        o_bar_by_tile=rounds("o_bar") and recipe.o_bar_at == "tile",
        o=rounds("o"),
        reciprocal=recipe.division == "reciprocal",
        lse=rounds("lse"),
        tile_k=0 if whole_row else recipe.tile(head_size, num_keys, has_edge)[1],
        descending=not whole_row and recipe.tile_order == "descending",
        delta_from_dp=recipe.delta_source == "dp",
        delta_products=rounds("delta_products"),
        delta=rounds("delta"),
        p_saved=recipe.p_source == "saved",
        ds=rounds("ds"),
        dq=rounds("dq"),
        dq_by_tile=rounds("dq") and recipe.gradients_at == "tile",
    )
