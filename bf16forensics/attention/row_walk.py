"""One row of one head through a recipe's forward pass, key by key, as NumPy arrays.

Shapes: K keys of the row's tiles (visible or not), T tiles visited, E head size of V.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWalk:
    """What the product of P-bar and V of one row is made of, in the order in which the recipe visits the keys.

    Before tile t everything summed so far is multiplied by `tile_alpha[t]`; then the tile's products are added. A
    recipe that casts P after the division has one tile and P in place of P-bar.
    """

    #: Name of the recipe walked, which may be derived from the run's own ("fa2+tile_k=512").
    recipe: str
    #: int64 [K] position of each key in the sequence, in the order of visits.
    keys: NDArray[np.int64]
    #: bool [K]: the query may see the key. Invisible keys have P-bar 0 and stay, because blocks are counted with them.
    visible: NDArray[np.bool_]
    #: float32 [K] P-bar before its cast, relative to the anchor of its tile; with the recipe's factor, if it has one.
    p_bar: NDArray[np.float32]
    #: float32 [K] P-bar (or P) as the operand of the product with V: values of `p_format`.
    p_operand: NDArray[np.float32]
    #: bool [K]: exp(S - final row maximum) is 1 after rounding to BF16: a "one" as localize counts them. Never for
    #: invisible keys; all False where the recipe's anchor is not the row maximum.
    is_one: NDArray[np.bool_]
    #: int64 [K] index of each key's tile in the order of visits; never falls.
    tile: NDArray[np.int64]
    #: float32 [T] factor of everything summed before the tile; the first is irrelevant (nothing was summed).
    tile_alpha: NDArray[np.float32]
    #: float32 [K, E] values, rows in the order of `keys`, as the recipe multiplies them.
    v: NDArray[np.float32]
    #: Format of `p_operand`.
    p_format: str
    #: Final row sum as stored, FP32 value.
    row_sum: float
    #: "reciprocal" or "divide": how O comes from O-bar; "none" where P was divided before its cast.
    division: str
    #: Format that O-bar rounds to ("fp32": it does not), where ("end" or "tile"), and the format of O.
    o_bar_format: str
    o_bar_at: str
    o_format: str
    #: float32 [E] O by the recipe and its log-sum-exp in nats.
    o: NDArray[np.float32]
    lse: float
    #: Factor of O beside 1 / l: the descale factor of v where the recipe quantises it, an FP32 number.
    value_scale: float = 1.0
    #: Format that holds the values of `v`.
    v_format: str = "bf16"

    @property
    def tile_ends(self) -> NDArray[np.bool_]:
        """bool [K]: the last key of each tile, after which a sum exists in the computation."""
        ends = np.ones(len(self.tile), dtype=np.bool_)
        ends[:-1] = self.tile[1:] != self.tile[:-1]
        return ends
