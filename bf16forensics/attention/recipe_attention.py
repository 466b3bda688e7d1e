"""Attention of a captured model by a recipe: forward and backward with every rounding, as one differentiable operation.

The steps are those of `recipe_gradients`, which is the specification; here all heads that fit the working-set budget go
through a block of rows at once, and what the forward pass found is kept for the backward pass where it fits.

Shapes: H query heads, G key/value heads (H a multiple of G), N queries, M keys, D and E head sizes of q/k and v, R rows
and K keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from bf16forensics.attention.backward import BackwardBlock, add_gradients
from bf16forensics.attention.lp import LpRows, backward_probabilities, forward_rows
from bf16forensics.attention.operands import Operands, forward_operands, shares_factors
from bf16forensics.attention.scores import Block, LpScores, lp_scores
from bf16forensics.attention.tiles import TilePlan, heads_differ, plan_tiles, query_tile, seen_keys
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import round_to
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import RecipeError
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.model import Recipe

#: Elements of one [H, R, K] tensor of a block; about six of them live at once.
ELEMENTS_PER_BLOCK = 2**21
#: Elements of P (and of the soft-cap's tanh) kept for the backward pass at most; beyond it they are computed again.
KEPT_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class RecipeAttention:
    """Differentiable attention of one sequence by a recipe, an `Attend` on BF16 tensors."""

    #: Rounding points, tiles and order of both passes.
    recipe: Recipe

    def __post_init__(self) -> None:
        if self.recipe.passes == "forward":
            raise RecipeError(
                f"recipe {self.recipe.name} is a forward pass only: --activations amp-bf16 needs a recipe with a "
                "backward pass; use --activations fp32"
            )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry, /) -> torch.Tensor:
        """Runs the forward pass; the recipe's backward pass runs when the gradient of the output arrives.

        Args:
            q: [H, N, D] BF16.
            k: [G, M, D] BF16.
            v: [G, M, E] BF16.
            geometry: masks, scale and score modifiers, on the device of the operands; a bias gets no gradient.

        Returns:
            [H, N, E] BF16; 0 in rows that see no key. The gradients are BF16 too: where a recipe keeps its output or a
            gradient in FP32, it is rounded at this border, once. NaN operands give NaN rows.

        Raises:
            ValueError: an operand is not BF16, or H is no multiple of G.
        """
        for name, operand in (("q", q), ("k", k), ("v", v)):
            if operand.dtype != torch.bfloat16:
                raise ValueError(f"attention by a recipe takes BF16 operands; {name} is {operand.dtype}")
        if q.shape[0] % k.shape[0]:
            raise ValueError(f"{q.shape[0]} query heads cannot share {k.shape[0]} key/value heads evenly")
        o: torch.Tensor = _RecipeAttention.apply(q, k, v, geometry, self.recipe)
        return o

    @property
    def notes(self) -> tuple[str, ...]:
        """None: the recipe is obeyed in every call."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Some query heads of a call, key/value heads repeated for them."""

    span: slice
    #: What the forward pass multiplies.
    forward: Operands
    #: [H, N, D], [H, M, D], [H, M, E] as stored, for the backward pass.
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    geometry: Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A block of rows of some heads."""

    heads: _Heads
    block: Block
    plan: TilePlan

    @property
    def rows(self) -> slice:
        """The queries."""
        return slice(*self.block.rows)

    @property
    def keys(self) -> slice:
        """The keys that any of them may see."""
        return slice(*self.block.keys)

    def scores(self, recipe: Recipe) -> LpScores:
        """Scores by the recipe."""
        forward, geometry = self.heads.forward, self.heads.geometry
        bias = geometry.bias_block(self.block.rows, self.block.keys)
        scaled = replace(geometry, scale=forward.scale)
        return lp_scores(forward.q[:, self.rows], forward.k[:, self.keys], scaled, recipe, self.block, bias)

    def forward_rows(self, scores: LpScores, recipe: Recipe) -> LpRows:
        """Output and row statistics by the recipe."""
        forward = self.heads.forward
        return forward_rows(scores, forward.v[:, self.keys], self.plan, recipe, forward.value_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What the forward pass leaves for the backward pass of a piece."""

    rows: LpRows
    #: [H, R, K] P of the backward pass, and the soft-cap of the scores without their values; None to compute again.
    p: torch.Tensor | None
    cap: LpScores | None


def _pieces(record: AttentionRecord, recipe: Recipe) -> Iterator[_Piece]:
    """The blocks that see a key: chunks of heads, then the recipe's query tiles in ascending order."""
    (heads, num_queries, head_size), num_keys = record.q.shape, record.k.shape[1]
    height = query_tile(recipe, record.geometry, head_size, num_queries, num_keys)
    size = max(1, ELEMENTS_PER_BLOCK // (height * max(num_keys, height)))
    if heads_differ(recipe, record.geometry) or not shares_factors(recipe):
        size = 1
    for first in range(0, heads, size):
        some = _some_heads(record, recipe, slice(first, min(first + size, heads)))
        for start in range(0, num_queries, height):
            rows = (start, min(start + height, num_queries))
            keys = seen_keys(recipe, some.geometry, head_size, rows, num_queries, num_keys)
            if keys[0] < keys[1]:
                block = Block(rows=rows, keys=keys, num_queries=num_queries, num_keys=num_keys)
                plan = plan_tiles(recipe, some.geometry, block, head_size)
                yield _Piece(heads=some, block=block, plan=plan)


def _some_heads(record: AttentionRecord, recipe: Recipe, span: slice) -> _Heads:
    forward = forward_operands(record, recipe, span)
    q, k, v = forward.q, forward.k, forward.v
    if not shares_factors(recipe):
        own = torch.arange(span.start, span.stop, device=q.device) // (record.num_heads // record.num_kv_heads)
        q, k, v = record.q[span], record.k[own], record.v[own]
    return _Heads(span=span, forward=forward, q=q, k=k, v=v, geometry=record.geometry.for_heads(span))


def _record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> AttentionRecord:
    """The operands in FP32, as the functions of this room take them."""
    return AttentionRecord(
        layer=0, sequence=0, step=None, storage="bf16", q=q.float(), k=k.float(), v=v.float(), do=None, x=None,
        geometry=geometry,
    )  # fmt: skip


class _RecipeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry, recipe: Recipe
    ) -> torch.Tensor:
        wanted = any(ctx.needs_input_grad)
        planes = 1 if geometry.softcap is None else 2
        keep = wanted and planes * q.shape[0] * q.shape[1] * k.shape[1] <= KEPT_ELEMENTS
        kept: list[_Kept] = []
        # Emulated autocast is off in there too: every cast of a recipe is written out.
        with strict_fp32():
            o = torch.zeros(*q.shape[:2], v.shape[-1], device=q.device)
            for piece in _pieces(_record(q, k, v, geometry), recipe):
                scores = piece.scores(recipe)
                rows = piece.forward_rows(scores, recipe)
                o[piece.heads.span, piece.rows] = rows.o
                if keep:
                    p = backward_probabilities(scores, rows, recipe)
                    kept.append(_Kept(rows=rows, p=p, cap=replace(scores, values=rows.lse.new_zeros(0))))
                elif wanted:
                    kept.append(_Kept(rows=rows, p=None, cap=None))
            rounded = o.bfloat16()
        ctx.save_for_backward(q, k, v)
        ctx.geometry, ctx.recipe, ctx.kept = geometry, recipe, kept
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        with torch.no_grad(), strict_fp32():
            record = _record(q, k, v, ctx.geometry)
            do = gradients[0].float().contiguous()
            dq = torch.zeros_like(record.q)
            # By query head: with several of them a key/value head, each one's part rounds before they are added.
            dk = torch.zeros(q.shape[0], *k.shape[1:], device=q.device)
            dv = torch.zeros(q.shape[0], *v.shape[1:], device=q.device)
            for piece, kept in zip(_pieces(record, recipe), ctx.kept, strict=True):
                own = piece.heads.span
                _add_gradients(piece, kept, do[own, piece.rows], (dq[own], dk[own], dv[own]), recipe)
            dq, dk, dv = round_to(dq, recipe.dq), round_to(dk, recipe.dkv), round_to(dv, recipe.dkv)
            group = q.shape[0] // k.shape[0]
            if group > 1:
                dk, dv = (round_to(part.unflatten(0, (-1, group)).sum(1), recipe.dkv) for part in (dk, dv))
            return dq.bfloat16(), dk.bfloat16(), dv.bfloat16(), None, None


def _add_gradients(
    piece: _Piece,
    kept: _Kept,
    do: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    recipe: Recipe,
) -> None:
    """Adds a piece's parts to the buffers of dQ [H, N, D], dK [H, M, D] and dV [H, M, E]; `do` is [H, R, E]."""
    heads = piece.heads
    p, scores = kept.p, kept.cap
    if p is None or scores is None:
        scores = piece.scores(recipe)
        p = backward_probabilities(scores, kept.rows, recipe)
    add_gradients(
        BackwardBlock(
            q=heads.q[:, piece.rows],
            k=heads.k,
            v=heads.v,
            do=do,
            o=kept.rows.o,
            p=p,
            scores=scores,
            block=piece.block,
            plan=piece.plan,
            scale=heads.geometry.scale,
        ),
        buffers,
        recipe,
    )
