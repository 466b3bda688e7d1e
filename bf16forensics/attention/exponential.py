"""The exponential of a recipe: P-bar from scores and an anchor.

Shapes: K keys; any leading axes.
"""

import torch

from bf16forensics.attention.cubic import cubic_exp2, fused_multiply_subtract
from bf16forensics.attention.fexp import row_exp
from bf16forensics.attention.scores import LOG2_E, exp_, round_visible
from bf16forensics.recipe.model import Recipe


def exponential(
    values: torch.Tensor,
    row_max: torch.Tensor,
    unit: float,
    recipe: Recipe,
    *,
    log2_offset: float = 0.0,
    cubic: torch.Tensor | None = None,
) -> torch.Tensor:
    """exp(values - row_max) * 2^log2_offset by the recipe, FP32.

    Args:
        values: [..., K] scores in units of `unit`; -inf gives 0.
        row_max: [...] finite anchor of each row, same units.
        unit: factor to nats.
        recipe: `exponential`, `shifted`.
        log2_offset: an integer, added to the exponent of base 2.
        cubic: bool [K], keys whose exponential is a polynomial; None for none.
    """
    anchor = row_max[..., None]
    if recipe.exponential in ("exp", "fexp_u20"):
        shifted = round_visible(values - anchor, recipe.shifted)
        exponent = shifted if unit == 1.0 else shifted * unit
        p_bar = exp_(exponent) if recipe.exponential == "exp" else row_exp(exponent, cubic)
        return p_bar if log2_offset == 0.0 else p_bar * 2.0**log2_offset
    factor = unit * LOG2_E
    if recipe.shifted != "fp32":
        exponent = round_visible(values - anchor, recipe.shifted) * factor
        exponent = exponent if log2_offset == 0.0 else exponent + log2_offset
    else:
        minus = anchor * factor if log2_offset == 0.0 else anchor * factor - log2_offset
        if recipe.exponential == "exp2-cubic":
            exponent = fused_multiply_subtract(values, factor, minus)
        else:
            exponent = (values * factor).sub_(minus)
    p_bar = torch.exp2(exponent)
    if cubic is not None:
        p_bar[..., cubic] = cubic_exp2(exponent[..., cubic])
    return p_bar
