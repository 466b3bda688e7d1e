"""The recipe: where an attention implementation rounds, as data.

A recipe knows nothing of tensors. `attention/` executes it; every report prints its name and its points. The rounding
points hold the name of a storage format of `bf16forensics.floats` ("bf16", "fp16", "fp32"); "fp32" means "not rounded
further", because every intermediate value lives in FP32 in the implementations that the presets describe.
"""

from dataclasses import dataclass

#: The formats a rounding point may name.
POINT_FORMATS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRule:
    """Tile sizes for head sizes up to `head_size_max`."""

    #: Largest head size (elements) the rule covers; None covers every larger one.
    head_size_max: int | None
    #: Query rows a tile.
    tile_q: int
    #: Keys a tile.
    tile_k: int


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
    #: "exponent": scale folded into the exponential and never stored, as long as scores are FP32 and have neither
    #: soft-cap nor bias; "scores": S * scale is a stored value; "operands": q and k are each multiplied by
    #: sqrt(scale) before the product.
    scale_placement: str
    #: Format of S each time it is stored: after the product, after the scale, after soft-cap and bias.
    scores: str
    #: Format of S - m.
    shifted: str
    #: "exp2": exp2(S c - m c), c = scale log2(e) in FP32, multiplied separately; "exp": exp(S - m).
    exponential: str

    # -- forward: P-bar, row sum, O -------------------------------------------------------------------------------
    #: Format of the P-bar (or P) operand of the product with V.
    p_bar: str
    #: "before": P-bar is cast and multiplied unnormalised; "after": P-bar is divided by l, then cast and multiplied.
    p_bar_cast: str
    #: Format of the P-bar that the row sum adds up: "fp32" the unrounded one.
    row_sum_input: str
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
    #: Order in which key tiles are visited: "ascending" or "descending".
    tile_order: str

    # -- backward -------------------------------------------------------------------------------------------------
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
    #: Format of dQ.
    dq: str
    #: Format of dK and dV.
    dkv: str
    #: "end": gradients are accumulated in FP32 and round once; "tile": the buffer itself rounds after each key tile.
    gradients_at: str

    # -- products -------------------------------------------------------------------------------------------------
    #: Arithmetic model of the products: "fp32" FP32 accumulation; "exact" exact sums rounded once to FP32.
    arithmetic: str

    def tile(self, head_size: int, num_keys: int) -> tuple[int, int]:
        """Tile sizes (query rows, keys) for a head size; the whole row where the recipe has no tiles.

        Args:
            head_size: elements of one query vector.
            num_keys: keys of the row, for recipes without tiles.

        Returns:
            (tile_q, tile_k), both at least 1.
        """
        for rule in self.tiles:
            if rule.head_size_max is None or head_size <= rule.head_size_max:
                return rule.tile_q, rule.tile_k
        return 128, max(num_keys, 1)
