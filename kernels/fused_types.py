"""What the fused kernels take and give. No kernel in here: importing it needs torch only.

Shapes: H query heads (of any number of sequences, one after the other), G key/value heads (H a multiple of G),
N queries, M keys, D and E head sizes of q/k and v.
"""

from dataclasses import dataclass

import torch

#: Most keys of a row that are listed by position.
MOST_ONES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRecipe:
    """Rounding points of a recipe as compile-time constants. A bool without a comment: rounds to BF16, else FP32."""

    #: "exponent": scores are the raw products and the scale is folded into the exponential; "scores": the scaled
    #: scores are stored values; "operands": q and k are each multiplied by sqrt(scale) in FP32 before the product.
    scale_in: str
    #: exp2(S c - m c) with two separate roundings, c = scale log2(e); else exp(S - m).
    exp2: bool
    #: S each time it is stored.
    scores: bool
    #: S - m, in the forward pass only.
    shifted: bool
    p_bar: bool
    #: The P-bar that the row sum adds up.
    row_sum_input: bool
    #: The running row sum, after each tile.
    row_sum: bool
    o_bar: bool
    #: O-bar rounds at every tile (rescaled, the tile's product, their sum), not once at the end.
    o_bar_by_tile: bool
    o: bool
    #: O-bar * (1 / l), else O-bar / l.
    reciprocal: bool
    lse: bool
    #: Keys of a tile, borders at its multiples; 0: one tile over the whole row.
    tile_k: int
    #: Tiles are visited from last to first.
    descending: bool
    #: delta = rowsum(dP * P), else rowsum(dO * O).
    delta_from_dp: bool
    #: The products dO * O before they are added, and delta.
    delta_products: bool
    delta: bool
    #: P of the backward pass is the forward pass's own P before its cast, else exp(S - lse).
    p_saved: bool
    #: dS as operand, and dQ.
    ds: bool
    dq: bool
    #: dQ is a buffer that rounds after every tile that is added, and so does the tile; else once at the end.
    dq_by_tile: bool

    @property
    def same_p(self) -> bool:
        """Whether P_lp of the backward pass is P_hp times a factor of its row, up to FP32 noise."""
        return not self.scores and not (self.p_saved and self.shifted)

    @property
    def backward_shape(self) -> bool:
        """Whether P_lp of the backward pass is the forward pass's P-bar before its cast, times a factor of its row."""
        return self.p_saved or not self.shifted


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedInputs:
    """One call of attention. All tensors contiguous and on one device."""

    #: [H, N, D], [G, M, D], [G, M, E]: BF16 on a GPU; FP32 for `ieee` and under the interpreter.
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    #: [H, N, E], dtype as q; None for no delta and no gradients.
    do: torch.Tensor | None
    scale: float
    #: Aligned bottom-right: query i sees keys up to i + M - N.
    causal: bool
    #: Visible keys of a sliding window, the query's own position included; 0 for none. Without `causal` it reaches to
    #: both sides.
    window: int = 0
    #: int32 [N] and [M]: a pair is visible only if its numbers are equal. Both or none.
    q_group: torch.Tensor | None = None
    k_group: torch.Tensor | None = None
    #: uint8 [1 or H, N, M]: a pair is visible only if its entry is not 0.
    keep: torch.Tensor | None = None
    #: Every product in IEEE FP32 on FP32 operands, P-bar unsplit; else BF16 operands on the matrix unit.
    ieee: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedWishes:
    """What the forward pass computes beyond the outputs."""

    #: The normalised P_hp K.
    carrier: bool = False
    #: Smallest visible score of each row, for the largest |score|.
    lowest: bool = False
    #: Sums over rows of dO * (O_lp - O_hp) by feature.
    feature_sums: bool = False
    #: O-bar of lp in an accumulator chain of its own over all keys, as the hardware's kernel has it.
    own_chain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedForward:
    """The fused forward pass. FP32 unless said otherwise; rows that see no key are 0 with -inf maxima and lse."""

    #: [H, N, E] by the recipe: BF16 where O rounds, else FP32.
    o_lp: torch.Tensor
    #: [H, N, E] high precision.
    o_hp: torch.Tensor
    #: [H, N] log-sum-exp in nats.
    lse_lp: torch.Tensor
    lse_hp: torch.Tensor
    #: [H, N] row maximum of the recipe's scores in their own units (raw products where `scale_in` is "exponent",
    #: products of scaled operands where it is "operands", else scaled scores), and of the raw products q.k.
    row_max_lp: torch.Tensor
    row_max_raw: torch.Tensor
    #: [H, N] row sum of exp(S - max) in high precision; its inverse is the probability of the top key.
    row_sum_hp: torch.Tensor
    #: int32 [H, N]: no fewer than the keys that may count as 1 in any of the counts; where it is 1, all counts are 1.
    candidates: torch.Tensor
    #: [H, N] smallest visible raw product, +inf in rows that see no key; None unless wished.
    lowest_raw: torch.Tensor | None
    #: [H, N], None without dO: delta by the recipe, in high precision, the difference dO . (O_lp - O_hp), the delta
    #: that is consistent with the recipe's own backward P, sum |dO * O_lp|.
    delta_lp: torch.Tensor | None
    delta_hp: torch.Tensor | None
    delta_err: torch.Tensor | None
    delta_consistent: torch.Tensor | None
    magnitude: torch.Tensor | None
    #: [H, N] rowsum(P_lp) of the backward pass.
    p_row_sum: torch.Tensor
    #: [H, N, D] P_hp K, without the scale; None unless wished.
    carrier: torch.Tensor | None
    #: [H, E]; None unless wished (needs dO).
    feature_sums: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Exact counts at the maximum, and rows anchored at their top key. [H, N]."""

    #: int32: P-bar = 1 in FP32 and after rounding to BF16, within 1e-3 nats, all by the recipe's scores; raw products
    #: equal to the largest one. 1 in rows without a second candidate, 0 in rows that see no key.
    ones_fp32: torch.Tensor
    ones_rounded: torch.Tensor
    near: torch.Tensor
    shared: torch.Tensor
    #: int32: position of the top key in rows that were computed as a difference from it; -1 in the others.
    top: torch.Tensor
    #: FP32, 0 where `top` is -1. dO . v_top; dO . (O_hp - v_top); the same for the O of the recipe's backward P.
    dp_top: torch.Tensor
    hp_offset: torch.Tensor
    consistent_offset: torch.Tensor
    #: bool: O_lp equals v_top in over 90 % of the features (rows with `top` only).
    swamped: torch.Tensor
    #: int32 [H, N, MOST_ONES] positions, ascending, of the keys that `ones_rounded` counts where it is 2 to MOST_ONES,
    #: filled up with -1; None unless wished.
    ones_keys: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStages:
    """dQ in stages and the carriers of a delta error, FP32 [H, N, D] with the scale applied.

    The stages are those of `QueryGradients` of the reference.
    """

    hp: torch.Tensor
    consistent: torch.Tensor
    cast_ds: torch.Tensor
    lp: torch.Tensor
    carrier_hp: torch.Tensor
    carrier_lp: torch.Tensor
