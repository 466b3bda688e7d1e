"""What a reader of a trace must know of it, beside its numbers."""

from bf16forensics.investigate.trace_sequence import SequenceTrace
from bf16forensics.recipe.model import Recipe


def trace_notes(recipe: Recipe, found: SequenceTrace, *, ranked: bool) -> tuple[str, ...]:
    """One sentence each, in the order of the report.

    Args:
        recipe: of the run.
        found: the sequence of the traced row.
        ranked: whether all rows were computed.
    """
    notes = []
    if not ranked:
        notes.append("only the rows around the traced token were computed: tokens are not ranked, sums are of one row")
    if not found.has_do:
        notes.append("the input holds no dO: there is no delta error, and rows are ranked by the error of O in ulp")
    elif found.rows.delta_err is None:
        notes.append(
            f"recipe {recipe.name} is a forward pass only: there is no delta error, and rows are ranked by the error "
            "of O in ulp"
        )
    elif recipe.delta_source == "dp":
        notes.append(
            f"recipe {recipe.name} takes delta from dP * P, not from O: the contributions of O's errors are what they "
            "would be in a delta from O, and the remainder is everything else"
        )
    elif recipe.delta_products != "fp32":
        notes.append(
            f"recipe {recipe.name} rounds the products dO * O to {recipe.delta_products}: the remainder holds these "
            f"roundings and that of delta to {recipe.delta}"
        )
    else:
        notes.append(f"the remainder is the rounding of delta itself to {recipe.delta}")
    if not recipe.anchored_at_maximum:
        notes.append(
            f"recipe {recipe.name} lets the anchor lag behind the row maximum, so that P-bar = 1 does not mark it: "
            "ones are counted in the walk of one tile only"
        )
    if recipe.operands != "stored" and found.group > 1:
        notes.append(
            f"recipe {recipe.name} shares the factor of q among the {found.group} query heads of a key/value head; "
            "here it is taken over the traced head alone, so that numbers may differ from those of localize"
        )
    return tuple(notes)
