"""The final rounding of rows with several P-bar = 1 in the fused pass.

The kernels say which keys are the ones; the rows themselves, few as a rule, go once more through the recipe's own
steps, which is what shows the value before the rounding.

Shapes: H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v; A heads with such rows, R
rows of each of them, n rows in all.
"""

from collections.abc import Iterator

import torch

from bf16forensics.attention.fused_inputs import visible_pairs
from bf16forensics.attention.lp import LpRows, forward_rows
from bf16forensics.attention.operands import value_format
from bf16forensics.attention.result import MOST_ONES, TieRows
from bf16forensics.attention.scores import Block, LpScores, lp_scores
from bf16forensics.attention.ties import DROPPED, FP32_NOISE, final_format, final_point, has_ties, no_ties
from bf16forensics.attention.tiles import plan_tiles
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.tie_terms import TieTensors, tensor_steps_at, tie_tensors
from bf16forensics.floats.formats import format_named
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.kernels.fused_types import FusedInputs, RowCounts
from bf16forensics.recipe.model import Recipe

#: Elements of one [A, R, M] tensor; about six of them live at once.
_ELEMENTS = 2**24


def fused_ties(inputs: FusedInputs, counts: RowCounts, record: AttentionRecord, recipe: Recipe) -> TieRows | None:
    """Takes the final roundings apart on the device of the kernels; None where the recipe has no ties.

    Args:
        inputs: operands and masks, on the device of the kernels.
        counts: with the positions of the ones.
        record: where the operands come from.
        recipe: of the pass.
    """
    if not has_ties(recipe) or counts.ones_keys is None:
        return None
    sums = no_ties(counts.ones_rounded.shape, inputs.q.device)
    several = (counts.ones_rounded > 1) & (counts.ones_rounded <= MOST_ONES)
    for heads, rows, wanted in _gathered(several, max(inputs.k.shape[1], 4 * inputs.v.shape[-1])):
        lp = _through_recipe(inputs, record, recipe, heads, rows)
        if lp.final is None:
            return None
        of_row, row = heads[:, None].expand_as(rows)[wanted], rows[wanted]
        # [n, MOST_ONES], ascending, filled up with -1.
        keys = counts.ones_keys[of_row, row].long()
        terms = _terms(inputs, keys, of_row, lp.final.before[wanted], lp.final.after[wanted], record, recipe)
        sums.ones[of_row, row] = (keys >= 0).sum(-1)
        sums.label[of_row, row] = _label(keys)
        for name, per_row in _row_sums(terms).items():
            getattr(sums, name)[of_row, row] = per_row
    return sums


def _gathered(several: torch.Tensor, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Heads int64 [A], rows int64 [A, R] and which of these are wanted, bool [A, R], for rows `width` elements wide."""
    per_head = several.sum(-1)
    heads = per_head.nonzero()[:, 0]
    if len(heads) == 0:
        return
    wanted = several[heads]
    most = int(per_head.max())
    # Wanted rows first, in order; heads with fewer of them are filled up with others.
    rows = torch.sort(wanted.to(torch.uint8), dim=-1, descending=True, stable=True).indices[:, :most]
    for some in rows.split(max(1, _ELEMENTS // (len(heads) * width)), dim=1):
        yield heads, some, wanted.gather(1, some)


def _through_recipe(
    inputs: FusedInputs, record: AttentionRecord, recipe: Recipe, heads: torch.Tensor, rows: torch.Tensor
) -> LpRows:
    """The recipe's forward pass over some rows of some heads, with what its final rounding did."""
    num_queries, num_keys, head_size = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[-1]
    kv = heads // (inputs.q.shape[0] // inputs.k.shape[0])
    q, k, v = inputs.q[heads[:, None], rows].float(), inputs.k[kv].float(), inputs.v[kv].float()
    # The rows are no range: they are hidden from below, not by the geometry.
    bare = Geometry(scale=inputs.scale, causal=False)
    some = Block(rows=(0, rows.shape[1]), keys=(0, num_keys), num_queries=rows.shape[1], num_keys=num_keys)
    scores = lp_scores(q, k, bare, recipe, some, None)
    visible = visible_pairs(inputs, rows, heads)
    values = scores.values.masked_fill_(~visible, -torch.inf)
    whole = Block(rows=(0, num_queries), keys=(0, num_keys), num_queries=num_queries, num_keys=num_keys)
    plan = plan_tiles(recipe, record.geometry, whole, head_size)
    return forward_rows(LpScores(values=values, unit=scores.unit), v, plan, recipe, keep_final=True)


def _terms(
    inputs: FusedInputs, keys: torch.Tensor, heads: torch.Tensor, before: torch.Tensor, after: torch.Tensor,
    record: AttentionRecord, recipe: Recipe,
) -> TieTensors:  # fmt: skip
    """The final roundings of n rows. A recipe with a fused form gives its ones the weight 1, or 1 over their number.

    Args:
        inputs: with the values.
        keys: int64 [n, MOST_ONES] positions of the ones.
        heads: int64 [n].
        before: FP32 [n, E] of the final rounding.
        after: FP32 [n, E].
        record: for the format of the values.
        recipe: for that of the rounding.
    """
    kv = heads // (inputs.q.shape[0] // inputs.k.shape[0])
    added = torch.zeros(before.shape, dtype=torch.float64, device=before.device)
    smallest = torch.full_like(added, torch.inf)
    counts = (keys >= 0).sum(-1)
    for number in range(int(counts.max())):
        is_none = (number >= counts)[:, None]
        value = inputs.v[kv, keys[:, number].clamp(min=0)].double()
        added += value.masked_fill(is_none, 0.0)
        smallest = torch.minimum(smallest, value.abs().masked_fill(is_none | (value == 0), torch.inf))
    # As `_weight` of `ties` has it.
    divided = recipe.p_bar_cast == "after" or final_point(recipe) == "o"
    divisor = counts if divided else torch.ones_like(counts)
    even = divisor & -divisor
    odd = (divisor // even)[:, None]
    factor = 1.0 / even[:, None].double()
    grid = tensor_steps_at(smallest, format_named(value_format(record, recipe))) * factor
    grid = grid.masked_fill(smallest == torch.inf, torch.inf)
    fmt = format_named(final_format(recipe))
    return tie_tensors(added * factor / odd, grid, before.double(), after.double(), fmt, odd, FP32_NOISE)


def _row_sums(terms: TieTensors) -> dict[str, torch.Tensor]:
    """As `_row_sums` of `ties`."""
    residue = terms.residue.clamp(-1.0, 1.0)
    elements = terms.defined.sum(-1)
    dropped = [((terms.bits_dropped == bits) & terms.defined).sum(-1) for bits in range(DROPPED - 1)]
    return {
        "elements": elements,
        "halfway": terms.halfway.sum(-1),
        "residues": (residue != 0).sum(-1),
        "same_sign": (residue > 0).sum(-1),
        "error": terms.error.sum(-1),
        "law": terms.law.sum(-1),
        "residue": residue.sum(-1),
        "residue_size": residue.abs().sum(-1),
        "dropped": torch.stack([*dropped, elements - sum(dropped)], -1),
    }


def _label(keys: torch.Tensor) -> torch.Tensor:
    """As `_label` of `ties`, added up by row, [n]; products and sums wrap around."""
    mixed = (keys + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)).masked_fill(keys < 0, 0).sum(-1)


def _signed(value: int) -> int:
    """The 64 bits of a number as those of a signed one."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
