"""The fused forward pass: a recipe and high precision from one or two sweeps over the keys, N x N never stored.

Recipes with FP32 scores and key tiles of 16, 32, 64 or 128 keys take one sweep, in the recipe's order of tiles and by
its running maximum (`forward_rows`). Every other recipe has a kernel of its own (`forward_lp`), and `forward_rows` then
does the high-precision half.

Shapes: H query heads, G key/value heads, N queries, M keys, D and E head sizes.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
from bf16forensics.kernels import forward_parts as plane
from bf16forensics.kernels.forward_carrier import carrier_kernel
from bf16forensics.kernels.forward_lp import lp_forward_kernel
from bf16forensics.kernels.forward_rows import forward_kernel
from bf16forensics.kernels.fused_types import FusedForward, FusedInputs, FusedRecipe, FusedWishes
from bf16forensics.kernels.row_blocks import padded_size

#: Key tiles of a recipe that are a block of the one sweep; the second is the largest with IEEE FP32 products.
_SMALLEST_TILE, _LARGEST_TILE, _LARGEST_TILE_IEEE = 16, 128, 64
#: Keys up to which the matrix unit's accumulator holds the sum of a tile before it is rounded to BF16: there the unit
#: loses 6e-7 of it, 1/3000 of half an ulp.
_CHAINED_KEYS = 512
#: Elements of one head's q, k or v, head size padded, with room for a block more.
_MOST_ELEMENTS = 2**31 - 2**17
#: Planes of the rows' results.
_NUM_PLANES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a kernel is cut and compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


#: By the larger of the padded head sizes, up to which a line holds; as measured on an H200.
_FORWARD = {
    64: Blocks(rows=64, keys=64, warps=4, stages=3),
    128: Blocks(rows=64, keys=64, warps=4, stages=3),
    256: Blocks(rows=64, keys=64, warps=8, stages=2),
}
#: The same for key tiles of more than 64 keys.
_FORWARD_LARGE = {
    64: Blocks(rows=64, keys=128, warps=4, stages=3),
    128: Blocks(rows=64, keys=128, warps=4, stages=1),
    256: Blocks(rows=64, keys=128, warps=8, stages=1),
}
_LP = {
    64: Blocks(rows=64, keys=64, warps=4, stages=3),
    128: Blocks(rows=64, keys=64, warps=4, stages=2),
    256: Blocks(rows=64, keys=64, warps=8, stages=2),
}
_CARRIER = {
    64: Blocks(rows=64, keys=64, warps=4, stages=3),
    128: Blocks(rows=64, keys=64, warps=4, stages=2),
    256: Blocks(rows=64, keys=64, warps=8, stages=2),
}
#: Every kernel with IEEE FP32 products, which no matrix unit computes.
_IEEE = {
    64: Blocks(rows=32, keys=32, warps=4, stages=1),
    128: Blocks(rows=32, keys=32, warps=4, stages=1),
    256: Blocks(rows=16, keys=32, warps=4, stages=1),
}
#: Largest padded head size at which the forward kernel has registers for P K.
_FUSED_CARRIER = 64


def dual_forward(inputs: FusedInputs, recipe: FusedRecipe, wishes: FusedWishes) -> FusedForward:
    """A recipe's forward pass and the high-precision one beside it, with delta where there is a dO.

    High precision is FP32 quality: P-bar in two BF16 terms (or one of FP32, for `ieee`), products summed up in FP32
    registers after every block of keys.

    Args:
        inputs: of the call; finite.
        recipe: its constants.
        wishes: what is computed beyond the outputs. Without dO there are no feature sums.

    Returns:
        Bitwise reproducible on one device. Rows that see no key are 0 with -inf maxima and log-sum-exp.

    Raises:
        ValueError: shapes do not fit together, a tensor is not contiguous or of another dtype than the mode has, or a
            recipe that scales its operands is to be multiplied in BF16.

    Reference: `forward_rows`, `reference_rows` and `query_gradients` of the package's reference; arXiv 2510.04212.
    """
    _check(inputs, recipe)
    heads, num_queries, head_size = inputs.q.shape
    device = inputs.q.device
    # The interpreter does not take BF16.
    o_dtype = torch.bfloat16 if recipe.o and inputs.q.is_cuda else torch.float32
    o_lp = torch.empty((heads, num_queries, inputs.v.shape[-1]), dtype=o_dtype, device=device)
    o_hp = torch.empty(o_lp.shape, dtype=torch.float32, device=device)
    rows = torch.empty((_NUM_PLANES, heads, num_queries), dtype=torch.float32, device=device)
    candidates = torch.empty((heads, num_queries), dtype=torch.int32, device=device)
    carrier = feature_parts = None
    if wishes.carrier:
        carrier = torch.empty((heads, num_queries, head_size), dtype=torch.float32, device=device)
    one_sweep = _is_one_sweep(inputs, recipe, wishes)
    blocks = _forward_blocks(inputs, recipe, one_sweep)
    if wishes.feature_sums and inputs.do is not None:
        shape = (heads, triton.cdiv(num_queries, blocks.rows), inputs.v.shape[-1])
        feature_parts = torch.empty(shape, dtype=torch.float32, device=device)
    if heads and num_queries:
        if not one_sweep:
            _launch_lp(inputs, recipe, wishes, o_lp, rows, candidates)
        fuses_carrier = _padded(inputs) <= _FUSED_CARRIER
        _launch_forward(
            inputs, recipe, blocks, o_lp, o_hp, rows, candidates, carrier if fuses_carrier else None, feature_parts,
            one_sweep=one_sweep, with_lowest=wishes.lowest,
        )  # fmt: skip
        if carrier is not None and not fuses_carrier:
            _launch_carrier(inputs, rows, carrier)
    deltas = [plane.DELTA_LP, plane.DELTA_HP, plane.DELTA_ERR, plane.DELTA_CONSISTENT, plane.MAGNITUDE]
    of_delta = [None if inputs.do is None else rows[index.value] for index in deltas]
    return FusedForward(
        o_lp=o_lp.bfloat16() if recipe.o else o_lp,
        o_hp=o_hp,
        lse_lp=rows[plane.LSE_LP.value],
        lse_hp=rows[plane.LSE_HP.value],
        row_max_lp=rows[plane.MAX_LP.value],
        row_max_raw=rows[plane.MAX_RAW.value],
        row_sum_hp=rows[plane.ROW_SUM_HP.value],
        candidates=candidates,
        lowest_raw=rows[plane.LOWEST.value] if wishes.lowest else None,
        delta_lp=of_delta[0],
        delta_hp=of_delta[1],
        delta_err=of_delta[2],
        delta_consistent=of_delta[3],
        magnitude=of_delta[4],
        p_row_sum=rows[plane.P_ROW_SUM.value],
        carrier=carrier,
        feature_sums=None if feature_parts is None else feature_parts.sum(1),
    )


def _is_one_sweep(inputs: FusedInputs, recipe: FusedRecipe, wishes: FusedWishes) -> bool:
    """Whether the recipe's product with V is the first term of the high-precision one."""
    if recipe.scores or recipe.shifted or recipe.o_bar_by_tile or wishes.own_chain:
        return False
    return not _rounds_by_tile(recipe) or _is_block(inputs, recipe.tile_k)


def _rounds_by_tile(recipe: FusedRecipe) -> bool:
    """Whether anything rounds that depends on the running maximum, so that the recipe's tiles matter."""
    return recipe.p_bar or recipe.row_sum_input or recipe.row_sum


def _is_block(inputs: FusedInputs, tile: int) -> bool:
    largest = _LARGEST_TILE_IEEE if inputs.ieee else _LARGEST_TILE
    return _SMALLEST_TILE <= tile <= largest and tile & (tile - 1) == 0


def _forward_blocks(inputs: FusedInputs, recipe: FusedRecipe, one_sweep: bool) -> Blocks:
    if not (one_sweep and _rounds_by_tile(recipe)):
        return _blocks(inputs, _FORWARD)
    blocks = _blocks(inputs, _FORWARD_LARGE if recipe.tile_k > _FORWARD[64].keys else _FORWARD)
    return replace(blocks, keys=recipe.tile_k)


def _padded(inputs: FusedInputs) -> int:
    return max(padded_size(inputs.q.shape[-1]), padded_size(inputs.v.shape[-1]))


def _blocks(inputs: FusedInputs, table: dict[int, Blocks]) -> Blocks:
    table = _IEEE if inputs.ieee and inputs.q.is_cuda else table
    size = _padded(inputs)
    return next((blocks for most, blocks in table.items() if size <= most), table[256])


def _launch_forward(
    inputs: FusedInputs,
    recipe: FusedRecipe,
    blocks: Blocks,
    o_lp: torch.Tensor,
    o_hp: torch.Tensor,
    rows: torch.Tensor,
    candidates: torch.Tensor,
    carrier: torch.Tensor | None,
    feature_parts: torch.Tensor | None,
    *,
    one_sweep: bool,
    with_lowest: bool,
) -> None:
    forward_kernel[_grid(inputs, blocks)](
        **_operands(inputs),
        p_v=inputs.v,
        p_do=_or_any(inputs.do, inputs),
        p_o_lp=o_lp,
        p_o_hp=o_hp,
        p_rows=rows,
        p_candidates=candidates,
        p_carrier=_or_any(carrier, inputs),
        p_features=_or_any(feature_parts, inputs),
        root=math.sqrt(inputs.scale),
        **_constants(inputs, blocks),
        HEAD_V=inputs.v.shape[-1],
        SIZE_V=padded_size(inputs.v.shape[-1]),
        LP=one_sweep,
        # Without a recipe the products are those of the stored operands.
        SCALE_IN=recipe.scale_in if one_sweep else "exponent",
        EXP2=recipe.exp2,
        P_BAR=recipe.p_bar,
        ROW_SUM_INPUT=one_sweep and recipe.row_sum_input,
        ROW_SUM=one_sweep and recipe.row_sum,
        O_BAR=recipe.o_bar,
        O=recipe.o,
        RECIPROCAL=recipe.reciprocal,
        LSE=recipe.lse,
        DESCENDING=one_sweep and recipe.descending,
        DELTA_FROM_DP=recipe.delta_from_dp,
        DELTA_PRODUCTS=recipe.delta_products,
        DELTA=recipe.delta,
        P_SAVED=recipe.p_saved,
        SAME_P=recipe.same_p,
        WITH_DO=inputs.do is not None,
        WITH_CARRIER=carrier is not None,
        WITH_LOWEST=with_lowest,
        WITH_FEATURES=feature_parts is not None,
    )


def _launch_lp(
    inputs: FusedInputs,
    recipe: FusedRecipe,
    wishes: FusedWishes,
    o_lp: torch.Tensor,
    rows: torch.Tensor,
    candidates: torch.Tensor,
) -> None:
    blocks = _blocks(inputs, _LP)
    is_short = recipe.o_bar_by_tile and 0 < recipe.tile_k <= _CHAINED_KEYS
    num_keys = inputs.k.shape[1]
    lp_forward_kernel[_grid(inputs, blocks)](
        **_operands(inputs),
        p_v=inputs.v,
        p_do=_or_any(inputs.do, inputs),
        p_o_lp=o_lp,
        p_rows=rows,
        p_candidates=candidates,
        root=math.sqrt(inputs.scale),
        tile=max(min(recipe.tile_k, num_keys) if recipe.tile_k else num_keys, 1),
        **_constants(inputs, blocks),
        HEAD_V=inputs.v.shape[-1],
        SIZE_V=padded_size(inputs.v.shape[-1]),
        SCALE_IN=recipe.scale_in,
        EXP2=recipe.exp2,
        SCORES=recipe.scores,
        SHIFTED=recipe.shifted,
        P_BAR=recipe.p_bar,
        ROW_SUM_INPUT=recipe.row_sum_input,
        ROW_SUM=recipe.row_sum,
        O_BAR=recipe.o_bar,
        BY_TILE=recipe.o_bar_by_tile,
        O=recipe.o,
        RECIPROCAL=recipe.reciprocal,
        LSE=recipe.lse,
        DESCENDING=recipe.descending,
        P_SAVED=recipe.p_saved,
        CHAIN=recipe.p_bar and (wishes.own_chain or is_short),
        WITH_CONSISTENT=inputs.do is not None and not recipe.same_p,
    )


def _launch_carrier(inputs: FusedInputs, rows: torch.Tensor, carrier: torch.Tensor) -> None:
    blocks = _blocks(inputs, _CARRIER)
    carrier_kernel[_grid(inputs, blocks)](
        **_operands(inputs), p_lse=rows[plane.LSE_HP.value], p_carrier=carrier, **_constants(inputs, blocks)
    )


def _grid(inputs: FusedInputs, blocks: Blocks) -> tuple[int]:
    heads, num_queries, _ = inputs.q.shape
    return (heads * triton.cdiv(num_queries, blocks.rows),)


def _or_any(tensor: torch.Tensor | None, inputs: FusedInputs) -> torch.Tensor:
    """A tensor to point at; a pointer that is not there is neither read nor written."""
    return inputs.q if tensor is None else tensor


def _operands(inputs: FusedInputs) -> dict[str, object]:
    """What every kernel takes."""
    heads, num_queries, _ = inputs.q.shape
    groups, num_keys, _ = inputs.k.shape
    keep = inputs.keep
    return {
        "p_q": inputs.q,
        "p_k": inputs.k,
        "p_q_group": _or_any(inputs.q_group, inputs),
        "p_k_group": _or_any(inputs.k_group, inputs),
        "p_keep": _or_any(keep, inputs),
        "keep_stride": 0 if keep is None or keep.shape[0] == 1 else num_queries * num_keys,
        "num_heads": heads,
        "heads_per_group": heads // groups,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "window": inputs.window,
        "scale": inputs.scale,
    }


def _constants(inputs: FusedInputs, blocks: Blocks) -> dict[str, object]:
    """What every kernel is compiled for."""
    return {
        "CAUSAL": inputs.causal,
        "WINDOW": inputs.window > 0,
        "GROUPS": inputs.q_group is not None,
        "KEEP": inputs.keep is not None,
        "IEEE": inputs.ieee,
        "NATIVE": inputs.q.is_cuda,
        "HEAD": inputs.q.shape[-1],
        "SIZE": padded_size(inputs.q.shape[-1]),
        "ROWS": blocks.rows,
        "KEYS": blocks.keys,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "enable_fp_fusion": False,
    }


def _check(inputs: FusedInputs, recipe: FusedRecipe) -> None:
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    tensors = [t for t in (q, k, v, do) if t is not None]
    is_fp32 = inputs.ieee or not q.is_cuda
    if any(t.dtype != (torch.float32 if is_fp32 else torch.bfloat16) for t in tensors):
        raise ValueError(f"expected operands in {'FP32' if is_fp32 else 'BF16'}, got {[t.dtype for t in tensors]}")
    masks = [t for t in (inputs.q_group, inputs.k_group, inputs.keep) if t is not None]
    if not all(t.is_contiguous() for t in (*tensors, *masks)):
        raise ValueError("expected contiguous tensors")
    fits = all(t.ndim == 3 for t in tensors) and q.shape[-1] == k.shape[-1] and k.shape[:2] == v.shape[:2]
    if not fits or not len(k) or len(q) % len(k) or (do is not None and do.shape != (*q.shape[:2], v.shape[-1])):
        raise ValueError(
            f"expected [H, N, D], [G, M, D], [G, M, E], [H, N, E], got {[tuple(t.shape) for t in tensors]}"
        )
    largest = max(t.shape[1] * padded_size(t.shape[2]) for t in tensors)
    if largest >= _MOST_ELEMENTS:
        raise ValueError(f"a head of {largest} elements is too long; the kernels count up to {_MOST_ELEMENTS} in one")
    if recipe.scale_in == "operands" and q.is_cuda and not inputs.ieee:
        raise ValueError("a recipe that scales its operands needs IEEE FP32 products")
