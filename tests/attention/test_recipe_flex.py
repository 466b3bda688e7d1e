"""The preset flex: blocks with a hidden pair come first, as torch's own block mask sorts them."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.scores import Block
from bf16forensics.attention.tiles import plan_tiles
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

FLEX = resolve("flex")
#: FP32 hardly shows the order of tiles in a BF16 output; an O-bar that rounds at every tile does.
VISIBLE_ORDER = "flex+arithmetic=exact,o_bar=bf16,o_bar_at=tile"


def padding(size: int, left: int) -> torch.Tensor:
    real = torch.ones(size, dtype=torch.bool)
    real[:left] = False
    return real


def random_keep(seed: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Whole blocks hidden, others full, others partly hidden; different by head."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.ones(heads, queries, keys, dtype=torch.bool)
    for head in range(heads):
        for row in range(0, queries, 128):
            for column in range(0, keys, 128):
                kind = int(torch.randint(3, (), generator=generator))
                block = keep[head, row : row + 128, column : column + 128]
                if kind == 0:
                    block[:] = False
                elif kind == 1:
                    block[int(torch.randint(len(block), (), generator=generator)), -1] = False
    return keep


#: Queries, keys, and what hides pairs.
GEOMETRIES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "causal": (512, 512, {}),
    "causal-ragged": (450, 450, {}),
    "causal-more-keys": (256, 640, {}),
    "causal-more-keys-ragged": (200, 611, {}),
    "window": (640, 640, {"window": 200}),
    "band": (640, 640, {"window": 200, "causal": False}),
    "documents": (512, 512, {"document_ids": torch.arange(512) // 200}),
    "documents-not-causal": (512, 512, {"causal": False, "document_ids": torch.arange(512) // 200}),
    "padding": (300, 512, {"causal": False, "key_padding": padding(512, 150)}),
    "query-padding": (384, 384, {"causal": False, "query_padding": padding(384, 10)}),
    "by-pair": (384, 640, {"causal": False, "keep": random_keep(1, 1, 384, 640)}),
}


def seen(geometry: Geometry, queries: int, keys: int) -> torch.Tensor:
    """bool [N, M]."""
    visible = geometry.visible((0, queries), (0, keys), queries, keys)
    assert visible is not None
    return visible[0].expand(queries, keys)


def visits_of_torch(
    visible: torch.Tensor, tile_q: int, tile_k: int, size_q: int, size_k: int
) -> Callable[[int], list[tuple[int, int]]]:
    """Key tiles of a query by torch's own BlockMask: its partial list, then its full list."""
    queries, keys = visible.shape

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return visible[q, k]

    mask = create_block_mask(mask_mod, 1, 1, queries, keys, device="cpu", BLOCK_SIZE=(size_q, size_k))
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None

    def visits(query: int) -> list[tuple[int, int]]:
        row = query // size_q
        found = []
        for count, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
            for index in indices[0, 0, row, : int(count[0, 0, row])].tolist():
                found += [
                    (start, min(start + tile_k, keys))
                    for start in range(index * size_k, min((index + 1) * size_k, keys), tile_k)
                ]
        return found

    assert size_q % tile_q == 0
    return visits


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize(
    ("recipe", "size", "tile", "block"),
    [
        ("flex", 64, (128, 128), (128, 128)),
        ("flex", 128, (128, 64), (128, 128)),
        ("flex", 80, (64, 64), (128, 128)),
        ("flex+tile_q=192,tile_k=32", 64, (192, 32), (192, 128)),
    ],
)
def test_the_order_is_that_of_torchs_block_mask(
    name: str, recipe: str, size: int, tile: tuple[int, int], block: tuple[int, int]
) -> None:
    """T0: every tile of torch's lists in its place; tiles that hide every pair may come anywhere and change nothing."""
    queries, keys, what = GEOMETRIES[name]
    geometry = Geometry(scale=1.0, **what)
    visible = seen(geometry, queries, keys)
    visits = visits_of_torch(visible, *tile, *block)
    assert resolve(recipe).tile(size, keys) == tile
    for start in range(0, queries, tile[0]):
        rows = (start, min(start + tile[0], queries))
        span = geometry.key_range(*rows, queries, keys)
        plan = plan_tiles(
            resolve(recipe), geometry, Block(rows=rows, keys=span, num_queries=queries, num_keys=keys), size
        )
        absolute = [(first + span[0], last + span[0]) for first, last in plan.tiles]
        assert sum(last - first for first, last in absolute) == span[1] - span[0]
        expected = [
            (max(first, span[0]), min(last, span[1]))
            for first, last in visits(start)
            if max(first, span[0]) < min(last, span[1])
        ]
        shown = [(first, last) for first, last in absolute if visible[slice(*rows), first:last].any()]
        # Torch lists whole blocks: tiles of them that hide every pair are in its list too.
        assert shown == [(first, last) for first, last in expected if visible[slice(*rows), first:last].any()], (
            name,
            start,
        )


def test_causal_is_diagonal_first_then_ascending() -> None:
    geometry = Geometry(scale=1.0)
    block = Block(rows=(256, 384), keys=(0, 384), num_queries=512, num_keys=512)
    assert plan_tiles(FLEX, geometry, block, 64).tiles == ((256, 384), (0, 128), (128, 256))
    # The queries beyond the end count as hidden, so that in the last block every tile is partly masked.
    ragged = Block(rows=(256, 380), keys=(0, 380), num_queries=380, num_keys=380)
    assert plan_tiles(FLEX, geometry, ragged, 64).tiles == ((0, 128), (128, 256), (256, 380))


def test_a_call_that_hides_nothing_has_no_block_mask() -> None:
    geometry = Geometry(scale=1.0, causal=False)
    block = Block(rows=(0, 100), keys=(0, 300), num_queries=100, num_keys=300)
    assert plan_tiles(FLEX, geometry, block, 64).tiles == ((0, 128), (128, 256), (256, 300))


def looped(
    oracle: ModuleType, call: Any, head: int, visits: Callable[[int], list[tuple[int, int]]], tile_q: int
) -> np.ndarray:
    """flex_attention's loop in NumPy: scale in FP32, then log2(e); O-bar rounds to BF16 at every tile."""
    f32 = np.float32
    q, k, v = call.q[head], call.k[call.kv_head(head)], call.v[call.kv_head(head)]
    seen = call.visible(head)
    out = np.zeros((q.shape[0], v.shape[1]), f32)
    for first_row in range(0, q.shape[0], tile_q):
        rows = slice(first_row, min(first_row + tile_q, q.shape[0]))
        row_max = np.full(rows.stop - rows.start, -np.inf, f32)
        row_sum = np.zeros(rows.stop - rows.start, f32)
        o_bar = np.zeros((rows.stop - rows.start, v.shape[1]), f32)
        for first, last in visits(first_row):
            s = (oracle.exact_product(q[rows], k[first:last].T) * f32(call.scale)).astype(f32)
            s = (np.where(seen[rows, first:last], s, -np.inf) * f32(math.log2(math.e))).astype(f32)
            new = np.maximum(row_max, s.max(1))
            safe = np.where(np.isfinite(new), new, f32(0))
            alpha = np.exp2((row_max - safe).astype(np.float64)).astype(f32)
            p = np.exp2((s - safe[:, None]).astype(np.float64)).astype(f32)
            row_sum = (row_sum * alpha).astype(f32) + p.astype(np.float64).sum(1).astype(f32)
            o_bar = oracle.bf16((o_bar * alpha[:, None]).astype(f32))
            o_bar = oracle.bf16(o_bar + oracle.bf16(oracle.exact_product(oracle.bf16(p), v[first:last])))
            row_max = new
        out[rows] = oracle.bf16(o_bar / np.where(row_sum == 0, f32(1), row_sum)[:, None])
    return out


@pytest.mark.parametrize("tile_q", [64, 128, 192])
@pytest.mark.parametrize("name", ["causal", "causal-ragged", "causal-more-keys", "documents-not-causal"])
def test_output_by_blocks_in_that_order(oracle: ModuleType, record_of: Any, name: str, tile_q: int) -> None:
    """T2: an exp2 that is off by one FP32 step flips a BF16 rounding now and then; another order moves far more."""
    queries, keys, what = GEOMETRIES[name]
    arrays = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in what.items()}
    call = oracle.draw(800 + tile_q, heads=1, queries=queries, keys=keys, size=8, spread=2.0, **arrays)
    record = record_of(call)
    size_q = 192 if tile_q == 192 else 128
    visits = visits_of_torch(seen(record.geometry, queries, keys), tile_q, 64, size_q, 128)
    expected = looped(oracle, call, 0, visits, tile_q)
    recipe = f"{VISIBLE_ORDER},tile_q={tile_q},tile_k=64"
    found = dual_pass(record, resolve(recipe)).o_lp[0].numpy()
    assert (found != expected).mean() <= 0.002
    assert np.array_equal(recipe_gradients(record, resolve(recipe)).o[0].numpy(), found.astype(np.float32))
    for order in ("ascending", "descending"):
        other = dual_pass(record, resolve(recipe.replace("flex+", f"flex+tile_order={order},"))).o_lp[0].numpy()
        assert (other != expected).mean() > 0.02, order


def test_heads_with_masks_of_their_own_have_orders_of_their_own(oracle: ModuleType, record_of: Any) -> None:
    """T2, head by head; in company and alone the bytes are the same."""
    from dataclasses import replace

    keep = random_keep(5, 3, 256, 512)
    call = oracle.draw(820, heads=3, queries=256, keys=512, size=8, causal=False, keep=keep.numpy())
    record = record_of(call)
    recipe = resolve(f"{VISIBLE_ORDER},tile_q=128,tile_k=64")
    together = dual_pass(record, recipe).o_lp
    for head in range(3):
        visits = visits_of_torch(keep[head], 128, 64, 128, 128)
        expected = looped(oracle, call, head, visits, 128)
        assert (together[head].numpy() != expected).mean() <= 0.002
        one = {name: getattr(record, name)[head : head + 1] for name in ("q", "k", "v", "do")}
        geometry = replace(record.geometry, keep=keep[head : head + 1])
        assert torch.equal(dual_pass(replace(record, geometry=geometry, **one), recipe).o_lp[0], together[head])


@pytest.mark.parametrize("tile_q", [64, 192])
def test_the_gradients_of_both_passes_agree(oracle: ModuleType, record_of: Any, tile_q: int) -> None:
    """T2: dQ of the dual pass, in blocks of 128 rows, and of `recipe_gradients`, in tiles of its own."""
    record = record_of(oracle.draw(830, heads=2, queries=300, size=16))
    recipe = resolve(f"flex+tile_q={tile_q},tile_k=64,gradients_at=tile")
    dual, found = dual_pass(record, recipe, "fp32"), recipe_gradients(record, recipe)
    assert dual.dq is not None
    size = dual.dq.lp.abs().max()
    assert torch.equal(found.o.double(), dual.o_lp)
    assert ((found.dq.double() - dual.dq.lp).abs() <= 2.0**-6 * dual.dq.lp.abs() + 2.0**-7 * size).all()
    assert (found.dq.double() != dual.dq.lp).double().mean() < 0.03
