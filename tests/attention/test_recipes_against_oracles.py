"""The lp side against exact rational arithmetic (bit for bit) and against NumPy FP32 with ml_dtypes roundings (T2)."""

import math
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.recipe.derive import resolve

#: With this scale a score of n is P-bar = 2^n exactly, in exp2 arithmetic.
LN2 = math.log(2.0)

#: Recipe, and the same in the oracle's words; tiles of 8 keys where the order matters.
RATIONAL: dict[str, dict[str, Any]] = {
    "fa2": {},
    "fa2+o_bar=bf16": {"o_bar": True},
    "fa2+row_sum_input=bf16": {"row_sum_input": True},
    "fa2+row_sum=bf16": {"row_sum": True},
    "fa2+p_bar=fp32": {"p_bar": False},
    "fa2+division=divide": {"divides": True},
    "fa2+tile_k=8": {"tile_k": 8},
    "fa2+tile_k=8,tile_order=ascending": {"tile_k": 8, "descending": False},
    "fa2+tile_k=8,o_bar=bf16,o_bar_at=tile": {"tile_k": 8, "o_bar_each_tile": True},
    "fa2+tile_k=8,tile_order=ascending,o_bar=bf16,o_bar_at=tile,row_sum=bf16": {
        "tile_k": 8,
        "descending": False,
        "o_bar_each_tile": True,
        "row_sum": True,
    },
    "fa2+tile_k=5,row_sum=bf16,row_sum_input=bf16,o_bar=bf16": {
        "tile_k": 5,
        "row_sum": True,
        "row_sum_input": True,
        "o_bar": True,
    },
}


def powers_of_two_call(oracle: ModuleType, seed: int, mask: str) -> Any:
    """Integer scores in [-12, 0] and one-signed values; one head, 12 queries, 29 keys."""
    rng = np.random.default_rng(seed)
    queries, keys = 12, 29
    q = np.ones((1, queries, 1), np.float32)
    k = -rng.integers(0, 13, (1, keys, 1)).astype(np.float32)
    v = oracle.bf16(-(1 + rng.random((1, keys, 3))).astype(np.float32))
    keep = rng.random((1, queries, keys)) < 0.7 if mask == "keep" else None
    if keep is not None:
        keep[0, 4] = False
        keep[0, 5, 8:] = False
        keep[0, 6, :24] = False
    return oracle.Call(
        q=q, k=k, v=v, do=np.ones((1, queries, 3), np.float32), scale=LN2, causal=mask == "causal", keep=keep
    )


def rational(oracle: ModuleType, call: Any, how: Any) -> torch.Tensor:
    values = [[Fraction(float(x)) for x in row] for row in call.v[0]]
    rows = []
    for i in range(call.q.shape[1]):
        exponents = [int(call.k[0, j, 0]) if call.sees(0, i, j) else None for j in range(call.k.shape[1])]
        rows.append([float(x) for x in oracle.rational_row(exponents, values, how)])
    return torch.tensor([rows], dtype=torch.float64)


@pytest.mark.parametrize("mask", ["all", "causal", "keep"])
@pytest.mark.parametrize("name", RATIONAL)
def test_output_is_the_exact_one_bit_for_bit(oracle: ModuleType, record_of: Any, name: str, mask: str) -> None:
    """T0: sums of P-bar = 2^n times BF16 fit FP32 here, so every rounding left is one that the recipe names."""
    assert LN2 * math.log2(math.e) == 1.0
    call = powers_of_two_call(oracle, 11, mask)
    found = dual_pass(record_of(call), resolve(name)).o_lp
    assert torch.equal(found, rational(oracle, call, oracle.Rounding(**RATIONAL[name])))


def test_the_rational_recipes_differ(oracle: ModuleType) -> None:
    """The comparison above can fail: each of these points moves the exact output of some element."""
    call = powers_of_two_call(oracle, 11, "causal")
    plain = rational(oracle, call, oracle.Rounding())
    for name in ("fa2+o_bar=bf16", "fa2+row_sum=bf16", "fa2+tile_k=8,o_bar=bf16,o_bar_at=tile"):
        assert not torch.equal(plain, rational(oracle, call, oracle.Rounding(**RATIONAL[name]))), name


#: Recipe with exact products, and the oracle's keywords.
ONE_TILE: dict[str, dict[str, bool]] = {
    "fa2+arithmetic=exact": {},
    "fa2+o_bar=bf16,arithmetic=exact": {"o_bar_bf16": True},
    "fa2+scores=bf16,arithmetic=exact": {"scores_bf16": True},
    "fa2+row_sum_input=bf16,arithmetic=exact": {"row_sum_input_bf16": True},
}

CALLS: dict[str, dict[str, Any]] = {
    "causal": {"queries": 60, "size": 64},
    "window": {"queries": 60, "size": 64, "window": 9},
    "grouped": {"queries": 40, "heads": 4, "kv_heads": 2, "size": 32, "causal": False},
    "peaked": {"queries": 60, "size": 64, "spread": 10.0},
    "odd-head-size": {"queries": 30, "size": 63},
    "fewer-queries": {"queries": 20, "keys": 50, "size": 16},
}


def compare(found: torch.Tensor, rows: Any, largest_value: float, oracle: ModuleType) -> int:
    """Checks O by class T2 and returns how many elements differ from the oracle's.

    Before the last cast the two sides may differ by FP32 rounding, so O may sit on the other side of a rounding
    boundary: |O - unrounded| <= half a BF16 step plus that. A P-bar on a rounding boundary may move one term by 2^-8
    of itself; such elements are rare and counted by the caller.
    """
    unrounded = rows.o_unrounded.astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(unrounded), 2.0**-100))) - 7)
    noise = 64 * 2.0**-24 * largest_value
    outside = np.abs(found.numpy() - unrounded) > step / 2 + noise
    assert (np.abs(found.numpy() - unrounded) <= step + 2.0**-8 * largest_value)[outside].all()
    return int(outside.sum())


@pytest.mark.parametrize("shape", CALLS)
@pytest.mark.parametrize("name", ONE_TILE)
def test_one_tile_recipes(oracle: ModuleType, record_of: Any, name: str, shape: str) -> None:
    call = oracle.draw(len(shape) + 40, **CALLS[shape])
    dual = dual_pass(record_of(call), resolve(name))
    outside = 0
    for head in range(call.q.shape[0]):
        rows = oracle.fa2_rows(call, head, **ONE_TILE[name])
        outside += compare(dual.o_lp[head], rows, float(np.abs(call.v).max()), oracle)
        assert dual.maxima.ones_rounded[head].tolist() == rows.ones.tolist()
        # FP32 row sums of a few dozen terms, and exponents up to 2^6 in units of 2^-24.
        np.testing.assert_allclose(dual.lse_lp[head].numpy(), rows.lse, rtol=2.0**-22, atol=2.0**-19)
    assert outside <= 0.002 * dual.o_lp.numel()


@pytest.mark.parametrize(
    ("queries", "size", "spread"), [(40, 64, 1.0), (40, 80, 1.0), (33, 64, 8.0), (600, 8, 2.0), (1030, 4, 1.0)]
)
def test_the_authors_recipe(oracle: ModuleType, record_of: Any, queries: int, size: int, spread: float) -> None:
    """Thirteen steps with 512-key tiles; 600 and 1,030 keys need two and three of them."""
    call = oracle.draw(queries + size, heads=1, queries=queries, size=size, spread=spread)
    dual = dual_pass(record_of(call), resolve("paper+arithmetic=exact"))
    rows = oracle.authors_rows(call, 0)
    assert dual.maxima.ones_rounded[0].tolist() == rows.ones.tolist()
    # BF16 decides almost every bit: what FP32 noise flips upstream is rare.
    different = (dual.o_lp[0].numpy() != rows.o).mean()
    assert different <= 0.002, different
    # The stored row sum is BF16: a flip of it moves the log-sum-exp by one BF16 step, 2^-8 relative.
    error = np.abs(dual.lse_lp[0].numpy() - rows.lse)
    assert (error <= 2.0**-20 * np.maximum(1, np.abs(rows.lse))).mean() >= 0.998
    assert error.max() <= 2.0**-7


def test_the_authors_tiles_matter(oracle: ModuleType, record_of: Any) -> None:
    """The comparison above can tell 512-key tiles from one tile, and ascending from descending order."""
    call = oracle.draw(608, heads=1, queries=600, size=8, spread=2.0)
    record, rows = record_of(call), oracle.authors_rows(call, 0)
    for other in ("paper+arithmetic=exact,tile_k=4096", "paper+arithmetic=exact,tile_order=descending"):
        found = dual_pass(record, resolve(other)).o_lp[0].numpy()
        assert (found != rows.o).mean() > 0.01, other


def looped_fa2(call: Any, tile_k: int, descending: bool) -> torch.Tensor:
    """FlashAttention-2's loop over key tiles in torch FP32, on whole matrices: [N, E]."""
    q, k, v = (torch.from_numpy(a[0]) for a in (call.q, call.k, call.v))
    factor = call.scale * math.log2(math.e)
    n, m = q.shape[0], k.shape[0]
    row_max = torch.full((n,), -torch.inf)
    row_sum, o_bar = torch.zeros(n), torch.zeros(n, v.shape[1])
    starts = list(range(0, m, tile_k))
    for start in reversed(starts) if descending else starts:
        end = min(start + tile_k, m)
        s = (q.double() @ k[start:end].double().T).float()
        hidden = torch.arange(start, end)[None] > torch.arange(n)[:, None] + m - n
        s = s.masked_fill(hidden, -torch.inf)
        new_max = torch.maximum(row_max, s.amax(1))
        anchor = torch.where(new_max.isinf(), 0.0, new_max)[:, None]
        p = torch.exp2(s * factor - anchor * factor)
        alpha = torch.exp2(row_max[:, None] * factor - anchor * factor)[:, 0]
        row_sum = alpha * row_sum + p.sum(1)
        tile_o = (p.to(torch.bfloat16).double() @ v[start:end].double()).float()
        o_bar = o_bar * alpha[:, None] + tile_o
        row_max = new_max
    return (o_bar * (1.0 / row_sum)[:, None]).to(torch.bfloat16).double()


@pytest.mark.parametrize("tile_k", [16, 32, 128])
def test_tiles_are_visited_in_the_recipes_order(oracle: ModuleType, record_of: Any, tile_k: int) -> None:
    """Same FP32 operations: T0 but for the order inside one sum of P-bar (at most 0.1 % of O may round elsewhere)."""
    call = oracle.draw(70, heads=1, queries=200, size=64, spread=2.0)
    record = record_of(call)
    order = {}
    for name in ("descending", "ascending"):
        found = dual_pass(record, resolve(f"fa2+tile_k={tile_k},tile_order={name},arithmetic=exact")).o_lp[0]
        expected = looped_fa2(call, tile_k, name == "descending")
        assert (found != expected).double().mean() <= 0.001
        order[name] = found
    # In FP32 the order of tiles hardly reaches BF16; with a BF16 O-bar it does, and then the two must differ.
    rounded = [
        dual_pass(record, resolve(f"fa2+tile_k=16,tile_order={name},o_bar=bf16,o_bar_at=tile")).o_lp
        for name in ("descending", "ascending")
    ]
    assert not torch.equal(*rounded)


def test_delta_of_a_recipe(oracle: ModuleType, record_of: Any) -> None:
    """delta from O, from dP, and rounded; magnitude is the sum of the products' sizes."""
    call = oracle.draw(71, queries=24)
    record = record_of(call)
    do = record.do.double()
    for name in ("fa2", "fa2+delta=bf16", "fa2+delta_products=bf16", "paper"):
        dual = dual_pass(record, resolve(name))
        products = (do * dual.o_lp).numpy()
        if "products" in name:
            products = oracle.bf16(products.astype(np.float32)).astype(np.float64)
        # BF16 products are exact in float64 and so are their sums here; one cast follows.
        expected = products.sum(-1).astype(np.float32)
        expected = oracle.bf16(expected) if "delta=bf16" in name else expected
        assert np.array_equal(dual.delta.delta_lp.numpy(), expected.astype(np.float64)), name
        size = np.abs((do * dual.o_lp).numpy()).sum(-1)
        np.testing.assert_allclose(dual.delta.magnitude.numpy(), size, rtol=2.0**-48)
    # From dP: what a softmax's own backward pass subtracts; P is FP32, so it is hp's delta up to FP32 rounding.
    dual = dual_pass(record, resolve("sdpa-math"))
    dense = oracle.dense(call)
    limit = oracle.budget(call, dense, 2.0**-24)
    assert np.abs(dual.delta.delta_lp.numpy() - dense.delta).max() <= limit.delta
    assert (dual.delta.defect.abs().max()) <= limit.delta


@pytest.mark.parametrize("name", ["fa2", "paper", "sdpa-math", "fa2+scores=bf16", "fa2+dp=bf16,ds=bf16", "fa2+dq=fp32"])
def test_lp_query_gradient_from_its_own_pieces(oracle: ModuleType, record_of: Any, name: str) -> None:
    """dQ = round(round(P * (dP - delta)) K * scale), P = exp(S - lse), recomputed in NumPy from lse and delta."""
    recipe = resolve(name)
    call = oracle.draw(72, queries=40, size=32)
    dual = dual_pass(record_of(call), recipe)
    for head in range(2):
        q, k, v, do = (a[head] for a in (call.q, call.k, call.v, call.do))
        s = oracle.exact_product(q, k.T)
        if recipe.scores == "bf16":
            s = oracle.bf16(oracle.bf16(s) * np.float32(call.scale))
        nats = s.astype(np.float64) * (1.0 if recipe.scores == "bf16" else call.scale)
        seen = call.visible(head)
        lse = dual.lse_lp[head].numpy()[:, None]
        p = np.where(seen, np.exp(np.where(seen, nats - lse, 0.0)), 0.0)
        np.testing.assert_allclose(p.sum(1), dual.delta.p_row_sum[head].numpy(), rtol=2.0**-18)
        dp = oracle.exact_product(do, v.T)
        if recipe.dp == "bf16":
            dp = oracle.bf16(dp)
        pd = (p * dp.astype(np.float64)).sum(1)
        delta = dual.delta.delta_lp[head].numpy()
        defect = delta - pd / p.sum(1)
        spread = np.abs(do).sum(1) * np.abs(v).max()
        assert (np.abs(defect - dual.delta.defect[head].numpy()) <= 2.0**-17 * spread).all()
        ds = (p * (dp - delta[:, None])).astype(np.float32)
        ds = oracle.bf16(ds) if recipe.ds == "bf16" else ds
        dq = (ds.astype(np.float64) @ k.astype(np.float64) * call.scale).astype(np.float32)
        found = {"cast_ds": dq, "lp": oracle.bf16(dq) if recipe.dq == "bf16" else dq}
        for stage, want in found.items():
            error = np.abs(getattr(dual.dq, stage)[head].numpy() - want)
            # FP32 noise of dS (2^-18 of its scale) may flip a BF16 rounding of dS or of dQ: 2^-8 of one term.
            scale_of = call.scale * spread[:, None] * np.abs(k).max()
            assert (error <= 2.0**-8 * scale_of).all()
            assert (error <= 2.0**-16 * scale_of).mean() >= 0.99
        consistent = call.scale * ((p * (dp - (pd / p.sum(1))[:, None])) @ k)
        assert np.abs(dual.dq.consistent[head].numpy() - consistent).max() <= 2.0**-16 * scale_of.max()


def test_gradients_rounded_at_every_tile(oracle: ModuleType, record_of: Any) -> None:
    """A BF16 buffer that is added to tile by tile errs more than one rounded at the end, and "before" stays FP32."""
    call = oracle.draw(73, queries=200, size=32)
    record = record_of(call)
    at_end = dual_pass(record, resolve("fa2+tile_k=16")).dq
    at_tile = dual_pass(record, resolve("fa2+tile_k=16,gradients_at=tile")).dq
    torch.testing.assert_close(at_end.cast_ds, at_tile.cast_ds, rtol=2.0**-18, atol=2.0**-18)
    end_error, tile_error = ((dq.lp - dq.cast_ds).square().mean() for dq in (at_end, at_tile))
    assert tile_error > 2 * end_error
    assert (at_tile.lp.bfloat16().double() == at_tile.lp).all()
