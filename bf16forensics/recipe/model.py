"""The recipe: where an attention implementation rounds, as data.

A recipe knows nothing of tensors. `attention/` executes it; every report prints its name and its points. The rounding
points hold the name of a storage format of `bf16forensics.floats` ("bf16", "fp16", "fp32", "e4m3", "e5m2"); "fp32"
means "not rounded further", because every intermediate value lives in FP32 in the implementations that the presets
describe.
"""

from dataclasses import dataclass

#: The formats a rounding point may name.
POINT_FORMATS = ("bf16", "fp16", "fp32", "e4m3", "e5m2")
#: (most queries of a call, most query rows a tile) of the `query_tiles` "by-length".
_SHORT_CALLS = ((191, 32), (767, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRule:
    """Tile sizes for head sizes up to `head_size_max`, in all calls or in those with or without a causal edge."""

    #: Largest head size (elements) the rule covers; None covers every larger one.
    head_size_max: int | None
    #: Query rows a tile.
    tile_q: int
    #: Keys a tile.
    tile_k: int
    #: True: the rule holds for calls with a causal mask or a window only; False: for the others only; None: for both.
    causal: bool | None = None

    def covers(self, head_size: int, causal: bool) -> bool:
        """Whether the rule speaks of a head size in a call with (or without) a causal mask or a window."""
        return self.causal in (None, causal) and (self.head_size_max is None or head_size <= self.head_size_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Every place where one attention implementation rounds, and the order in which it adds.

    Notation: S scores, m running row maximum, P-bar = exp(S - m), l row sum of P-bar, O-bar = P-bar V,
    O = O-bar / l, delta = rowsum(dO * O), dP = dO V^T, dS = P * (dP - delta).
    """

    #: Name as given on the command line, with its flips ("fa2+o_bar=bf16").
    name: str
    #: Version of the preset's definition; grows when a preset changes.
    version: int
    #: Where the rounding points were read: file and commit, or paper section.
    source: str
    #: One sentence for `recipe list`.
    summary: str

    # -- forward: scores ------------------------------------------------------------------------------------------
    #: "stored": q, k and v as they are; "e4m3": the forward pass takes them as E4M3 times a descale factor of
    #: max |x| / 448, one for each key/value head of a sequence (its query heads share the one of q); q's and k's are
    #: folded into the softmax scale, v's into the final factor.
    operands: str = "stored"
    #: "exponent": scale folded into the exponential and never stored, as long as scores are FP32 and have neither
    #: soft-cap nor bias; "scores": S * scale is a stored value; "operands": q and k are each multiplied by
    #: sqrt(scale) before the product.
    scale_placement: str
    #: Format of S each time it is stored: after the product, after the scale, after each step of the soft-cap (the
    #: quotient, its tanh, the product) and after the bias.
    scores: str
    #: Format of S - m.
    shifted: str
    #: "exp2": exp2(S c - m c), c = scale log2(e) in FP32, multiplied separately; "exp": exp(S - m); "exp2-cubic": as
    #: "exp2" with one fused multiply-add, and a cubic polynomial for some keys of the forward pass; "fexp_u20": as
    #: "exp", and PyTorch's vectorised cubic for the keys that fill whole vectors (for all if `row_sum_order` is "any").
    exponential: str

    # -- forward: P-bar, row sum, O -------------------------------------------------------------------------------
    #: "256": P-bar and the row sum carry a factor of 2^8, which O and the log-sum-exp divide out; "1": they do not.
    p_scale: str = "1"
    #: "8": an anchor m that a tile exceeds by at most 8 (in log2 units of P-bar) is kept, so that P-bar may reach 2^8
    #: and nothing is rescaled; "0": m follows the maximum.
    rescale_threshold: str = "0"
    #: Format of the P-bar (or P) operand of the product with V.
    p_bar: str
    #: "before": P-bar is cast and multiplied unnormalised; "after": P-bar is divided by l, then cast and multiplied.
    p_bar_cast: str
    #: Format of the P-bar that the row sum adds up: "fp32" the unrounded one.
    row_sum_input: str
    #: Order in which the keys of a tile are added up: "any", or the lanes of PyTorch's CPU kernel, 8 for "avx2" and 16
    #: for "avx512", and then l = fma(alpha, l, sum).
    row_sum_order: str = "any"
    #: Format in which the running row sum l is stored after each tile.
    row_sum: str
    #: Format of the unnormalised O-bar.
    o_bar: str
    #: "end": O-bar rounds once, before the division; "tile": each tile's product, each rescaling and each
    #: accumulation round.
    o_bar_at: str
    #: Format of the output O.
    o: str
    #: "reciprocal": O-bar * (1 / l); "divide": O-bar / l.
    division: str
    #: Format of the log-sum-exp handed to the backward pass.
    lse: str

    # -- tiles ----------------------------------------------------------------------------------------------------
    #: Tile sizes by head size, smallest first; an empty tuple means one tile over the whole row.
    tiles: tuple[TileRule, ...]
    #: "fixed": every call has the query rows a tile of `tiles`; "by-length": at most 32 in calls of up to 191 queries
    #: and at most 64 in calls of up to 767.
    query_tiles: str = "fixed"
    #: Order in which key tiles are visited: "ascending", "descending", or "masked-first": blocks with a hidden pair,
    #: then blocks without one, each ascending.
    tile_order: str

    # -- backward -------------------------------------------------------------------------------------------------
    #: "both"; or "forward": the implementation has no backward pass.
    passes: str = "both"
    #: "lse": P is recomputed as exp(S - lse); "saved": P is the forward pass's own exp(S - m) / l, in FP32.
    p_source: str
    #: "o": delta = rowsum(dO * O) from the stored O; "dp": delta = rowsum(dP * P), as autograd of a softmax does.
    delta_source: str
    #: Format of the products dO * O before they are added.
    delta_products: str
    #: Format of delta.
    delta: str
    #: Format of dP = dO V^T.
    dp: str
    #: Format of the P operand of dV = P^T dO.
    p_backward: str
    #: Format of the dS operand of the products with K and Q.
    ds: str
    #: "gradients": the softmax scale multiplies the FP32 sums of dQ and dK; "ds": it multiplies dS, which then rounds
    #: again (and so does every step of the soft-cap's derivative).
    ds_scale: str = "gradients"
    #: Format of dQ.
    dq: str
    #: Format of dK and dV.
    dkv: str
    #: "end": gradients are accumulated in FP32 and round once; "tile": the product of each tile rounds, and so does the
    #: buffer it is added to; "buffer": the product stays in FP32 until the buffer it was added to rounds.
    gradients_at: str

    # -- products -------------------------------------------------------------------------------------------------
    #: Arithmetic model of the products: "fp32" FP32 accumulation; "exact" exact sums rounded once to FP32;
    #: "torch-blocks" FP32 products of exactly one query tile with one whole key tile, added to what is there by the
    #: product itself, so that the library splits the sums as it does in a kernel that calls it for these tiles.
    arithmetic: str

    @property
    def anchored_at_maximum(self) -> bool:
        """Whether the row maximum has P-bar = 1 (times `p_scale`), so that counting ones counts maxima."""
        return self.rescale_threshold == "0"

    def tile(
        self, head_size: int, num_keys: int, causal: bool = True, num_queries: int | None = None
    ) -> tuple[int, int]:
        """Tile sizes (query rows, keys) for a head size; the whole row where the recipe has no tiles.

        Args:
            head_size: elements of one query vector.
            num_keys: keys of the row, for recipes without tiles.
            causal: whether the call has a causal mask or a window, which some implementations give other tiles.
            num_queries: queries of the call, for recipes that give short calls smaller tiles; None for a long call.

        Returns:
            (tile_q, tile_k), both at least 1.
        """
        for rule in self.tiles:
            if rule.covers(head_size, causal):
                return self._query_tile(rule.tile_q, num_queries), rule.tile_k
        return 128, max(num_keys, 1)

    def _query_tile(self, tile_q: int, num_queries: int | None) -> int:
        if self.query_tiles == "fixed" or num_queries is None:
            return tile_q
        return next((min(tile_q, size) for limit, size in _SHORT_CALLS if num_queries <= limit), tile_q)
