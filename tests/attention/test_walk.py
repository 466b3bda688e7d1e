"""The walk of one row: it is the computation of the dual pass, and its parts are what they are called."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.attention.walk import walk_row
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import round_to as torch_round_to
from bf16forensics.errors import InputError
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import format_named
from bf16forensics.floats.ulp import ulp_array
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

RECIPES = (
    "fa2",
    "paper",
    "sdpa-math",
    "sdpa-cpu",
    "eager",
    "fa3",
    "fa3-fp8",
    "fa4",
    "flex",
    "fa2+o_bar=bf16",
    "paper+tile_k=48",
    "fa2+arithmetic=exact,tile_k=32",
    "fa2+tile_k=7",
    "paper+o_bar_at=end",
    "fa2+p_bar_cast=after",
    "eager+o_bar=bf16,o_bar_at=tile",
    "fa2+p_scale=256,p_bar=fp16",
    "fa3-fp8+o_bar=bf16",
)


def record_of(
    seed: int, heads: int, kv_heads: int, queries: int, keys: int, size: int, value_size: int, **geometry: Any
) -> AttentionRecord:
    """Sharp scores, and every fourth key twice, so that there are rows with several maxima."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch_round_to(torch.randn(shape, generator=generator), "bf16")

    k = draw(kv_heads, keys, size)
    k[:, keys // 2 : keys // 2 + keys // 4] = k[:, : keys // 4]
    return AttentionRecord(
        layer=3,
        sequence=0,
        step=None,
        storage="bf16",
        q=torch_round_to(draw(heads, queries, size) * 5, "bf16"),
        k=k,
        v=draw(kv_heads, keys, value_size),
        do=None,
        x=None,
        geometry=Geometry(scale=size**-0.5, **geometry),
    )


def one_head(record: AttentionRecord, head: int) -> AttentionRecord:
    span = slice(head, head + 1)
    kv = head // (record.num_heads // record.num_kv_heads)
    own = {name: getattr(record, name)[kv : kv + 1] for name in ("k", "v")}
    return replace(record, q=record.q[span], geometry=record.geometry.for_heads(span), **own)


def some_pairs(seed: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    keep = torch.rand(heads, queries, keys, generator=torch.Generator().manual_seed(seed)) > 0.4
    keep[:, 5] = False
    return keep


#: Each holds rows of several blocks; head 3 of 4 reads key/value head 1 of 2.
RECORDS = {
    "causal": record_of(0, 4, 2, 200, 200, 32, 32),
    "window": record_of(1, 4, 2, 140, 210, 64, 16, window=40),
    "all": record_of(2, 4, 2, 150, 300, 80, 80, causal=False),
    "masks": record_of(
        3,
        4,
        2,
        150,
        150,
        16,
        16,
        softcap=5.0,
        query_padding=torch.arange(150) > 4,
        key_padding=torch.arange(150) < 140,
        keep=some_pairs(1, 4, 150, 150),
    ),
}


def walks(record: AttentionRecord, recipe: str, every: int) -> Iterator[tuple[int, RowWalk]]:
    for token in range(0, record.q.shape[1], every):
        try:
            yield token, walk_row(record, resolve(recipe), token)
        except InputError as error:
            assert "sees no key" in str(error)
            assert "\n" not in str(error)
            visible = record.geometry.visible((token, token + 1), (0, record.k.shape[1]), *record_sizes(record))
            assert visible is not None
            assert not visible.any()


def record_sizes(record: AttentionRecord) -> tuple[int, int]:
    return record.q.shape[1], record.k.shape[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", RECORDS)
def test_o_is_the_dual_pass(name: str, recipe: str) -> None:
    """T0: O, log-sum-exp, visible keys and ones of the row."""
    record = one_head(RECORDS[name], 3)
    dual = dual_pass(record, resolve(recipe))
    found = 0
    for token, walk in walks(record, recipe, 17):
        found += 1
        assert walk.recipe == recipe
        np.testing.assert_array_equal(walk.o.astype(np.float64), dual.o_lp[0, token].numpy())
        assert walk.lse == float(dual.lse_lp[0, token])
        assert walk.visible.sum() == dual.maxima.visible[0, token]
        expected = int(dual.maxima.ones_rounded[0, token]) if resolve(recipe).anchored_at_maximum else 0
        assert walk.is_one.sum() == expected
        assert not (walk.is_one & ~walk.visible).any()
    assert found >= 5


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-cpu"])
def test_a_head_of_a_larger_record_walks_like_the_head_alone(recipe: str) -> None:
    """T0: products of several heads at once and of one may not differ, or the walk would be another computation."""
    record = RECORDS["causal"]
    dual = dual_pass(record, resolve(recipe))
    for head in range(4):
        walk = walk_row(one_head(record, head), resolve(recipe), 150)
        np.testing.assert_array_equal(walk.o.astype(np.float64), dual.o_lp[head, 150].numpy())


def replay(walk: RowWalk) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """O in float64 from the walk alone, rounded where the recipe rounds O-bar; and sum |P-bar V| / l."""

    def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
        if walk.o_bar_format == "fp32":
            return values
        return np.asarray(round_to(values, format_named(walk.o_bar_format)))

    o_bar, size = np.zeros(walk.v.shape[1]), np.zeros(walk.v.shape[1])
    for index, alpha in enumerate(walk.tile_alpha.astype(np.float64)):
        own = walk.tile == index
        p, v = walk.p_operand[own].astype(np.float64), walk.v[own].astype(np.float64)
        added, factor = p @ v, alpha if index else 0.0
        size = size * factor + p @ np.abs(v)
        if walk.o_bar_at == "tile":
            o_bar = rounded(rounded(o_bar * factor) + rounded(added))
        else:
            o_bar = o_bar * factor + added
    if walk.o_bar_at == "end":
        o_bar = rounded(o_bar)
    divisor = (1.0 if walk.division == "none" else walk.row_sum) / walk.value_scale
    return o_bar / divisor, size / divisor


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", RECORDS)
def test_the_walk_alone_gives_o(name: str, recipe: str) -> None:
    """T2: float64 sums of the walk against the recipe without its rounding of O.

    Every FP32 operation errs by 2^-24 of a value below sum |P-bar V|: a product and an addition a key, three
    operations a tile, three at the end. Where O-bar rounds, an FP32 error may tip a rounding: one ulp a rounding, few
    features.
    """
    record = one_head(RECORDS[name], 3)
    tipped = features = 0
    for _, walk in walks(record, recipe, 29):
        exact, size = replay(walk)
        budget = (2 * len(walk.keys) + 3 * len(walk.tile_alpha) + 3) * 2.0**-24 * size
        o_format = format_named(walk.o_format)
        # Half an ulp of O by its own rounding, and the budget of everything before.
        error = np.abs(walk.o - exact) - 0.5 * ulp_array(exact, o_format) * (1 + 2.0**-6)
        if walk.o_bar_format == "fp32":
            assert (error <= budget).all()
            continue
        step = ulp_array(size, format_named(walk.o_bar_format))
        roundings = 3 * len(walk.tile_alpha) if walk.o_bar_at == "tile" else 1
        assert (error <= budget + roundings * step).all()
        tipped += int((error > budget).sum())
        features += len(error)
    assert tipped <= 0.02 * features


def anchors(scores: NDArray[np.float64], walk: RowWalk) -> NDArray[np.float64]:
    """float64 [T]: the maximum of all keys of a row visited up to the end of each tile."""
    largest = [scores[walk.tile == index].max() for index in range(len(walk.tile_alpha))]
    return np.maximum.accumulate(largest)


@pytest.mark.parametrize("recipe", ["fa2", "fa2+tile_k=16", "flex", "paper+tile_k=32,scores=fp32,shifted=fp32", "fa3"])
@pytest.mark.parametrize("name", ["causal", "window", "all"])
def test_p_bar_is_the_exponential_of_the_exact_scores(name: str, recipe: str) -> None:
    """T2: against float64 scores of the record, anchored tile by tile; FP32 scores below 64 err by under 1e-5."""
    record = one_head(RECORDS[name], 2)
    scale = record.geometry.scale
    for token, walk in walks(record, recipe, 41):
        exact = (record.k[0].double() @ record.q[0, token].double() * scale).numpy()[walk.keys]
        exact[~walk.visible] = -np.inf
        anchor = anchors(exact, walk)
        with np.errstate(invalid="ignore"):
            expected = np.nan_to_num(np.exp(exact - anchor[walk.tile]), nan=0.0)
            alpha = np.exp(anchor[:-1] - anchor[1:])
        np.testing.assert_allclose(walk.p_bar, expected, rtol=3e-5, atol=1e-30)
        np.testing.assert_allclose(walk.tile_alpha[1:], np.nan_to_num(alpha, nan=0.0), rtol=3e-5, atol=1e-30)
        total = np.exp(exact[walk.visible] - anchor[-1]).sum()
        # The paper's row sum rounds to BF16 after every tile.
        near = len(walk.tile_alpha) * 2.0**-9 + 3e-5 if recipe.startswith("paper") else 3e-5
        assert walk.row_sum == pytest.approx(total, rel=near)
        assert walk.lse == pytest.approx(anchor[-1] + math.log(total), abs=near)
        np.testing.assert_array_equal(walk.p_operand, round_to(walk.p_bar, format_named("bf16")))
        # A one lies within 2^-9 of the final maximum: exp(-x) rounds to 1 up to x = 0.001955, give or take 1e-5.
        np.testing.assert_array_equal(walk.is_one[exact < anchor[-1] - 0.00197], False)
        np.testing.assert_array_equal(walk.is_one[exact > anchor[-1] - 0.00194], True)


def expected_tiles(recipe: str, keys: range, size: int) -> list[tuple[int, int]]:
    """[first, last] key of each tile of a plain recipe, in the order of visits."""
    tiles = sorted({key // size for key in keys}, reverse=recipe.startswith("fa"))
    return [(tile * size, min(tile * size + size - 1, keys[-1])) for tile in tiles]


@pytest.mark.parametrize(
    ("recipe", "size"), [("fa2+tile_k=48", 48), ("paper+tile_k=48", 48), ("fa2", 128), ("fa3", 128), ("eager", 210)]
)
@pytest.mark.parametrize("token", [0, 7, 127, 128, 139])
def test_tiles_begin_at_their_borders(recipe: str, size: int, token: int) -> None:
    """The window record has 70 keys before the first query; a block of rows sees a window of 40 keys each."""
    record = one_head(RECORDS["window"], 0)
    first_row = token // 128 * 128
    seen = range(max(first_row + 70 - 39, 0), min(first_row + 128, 140) + 70)
    walk = walk_row(record, resolve(recipe), token)
    starts = np.flatnonzero(np.diff(walk.tile, prepend=-1))
    ends = np.flatnonzero(walk.tile_ends)
    tiles = list(zip(walk.keys[starts].tolist(), walk.keys[ends].tolist(), strict=True))
    assert tiles == expected_tiles(recipe, seen, size)
    assert len(walk.tile_alpha) == len(tiles)
    assert (np.diff(walk.tile) >= 0).all()
    for start, end in zip(starts, ends, strict=True):
        np.testing.assert_array_equal(np.diff(walk.keys[start : end + 1]), 1)
    np.testing.assert_array_equal(walk.visible, (walk.keys <= token + 70) & (walk.keys > token + 30))
    np.testing.assert_array_equal(walk.p_bar[~walk.visible], 0.0)
    np.testing.assert_array_equal(walk.p_operand[~walk.visible], 0.0)
    np.testing.assert_array_equal(walk.v, record.v[0].numpy()[walk.keys])


def test_flex_visits_masked_blocks_first() -> None:
    """Queries 256 to 383 see two whole blocks and, on the diagonal, part of a third."""
    record = one_head(record_of(5, 1, 1, 384, 384, 64, 8), 0)
    walk = walk_row(record, resolve("flex"), 280)
    assert walk.keys[walk.tile_ends].tolist() == [383, 127, 255]


@pytest.mark.parametrize("recipe", ["sdpa-math", "eager", "fa2+p_bar_cast=after"])
def test_p_stands_in_the_place_of_p_bar_when_it_is_cast_after_the_division(recipe: str) -> None:
    record = one_head(RECORDS["causal"], 1)
    walk = walk_row(record, resolve(recipe), 120)
    assert walk.division == "none"
    assert walk.o_bar_at == "end"
    # 200 probabilities in FP32.
    assert walk.p_bar.astype(np.float64).sum() == pytest.approx(1.0, abs=200 * 2.0**-24)
    np.testing.assert_array_equal(walk.p_operand, round_to(walk.p_bar, format_named(walk.p_format)))


def test_quantised_operands_are_walked_as_they_are_multiplied() -> None:
    record = one_head(RECORDS["causal"], 0)
    walk = walk_row(record, resolve("fa3-fp8"), 199)
    assert (walk.v_format, walk.p_format) == ("e4m3", "e4m3")
    largest = float(record.v.abs().max())
    assert walk.value_scale == pytest.approx(largest / 448, rel=2.0**-23)
    np.testing.assert_array_equal(walk.v, round_to(walk.v, format_named("e4m3")))
    # E4M3 keeps four significant bits; below 2^-6 of its own range steps are 2^-9.
    stored = record.v[0].numpy()[walk.keys]
    near = np.abs(walk.v * walk.value_scale - stored)
    assert (near <= np.maximum(np.abs(stored) * 2.0**-4, walk.value_scale * 2.0**-10) * 1.001).all()
    # P-bar carries 2^8, so that it fills the range of E4M3.
    assert walk.p_bar.max() == 256.0


def test_a_lagging_anchor_marks_nothing() -> None:
    record = one_head(record_of(6, 1, 1, 260, 260, 16, 8), 0)
    walk = walk_row(record, resolve("fa4"), 259)
    assert not walk.is_one.any()
    assert walk.p_bar.max() > 1.0
    assert walk.p_bar.max() <= 256.0 * (1 + 1e-4)


@pytest.mark.parametrize("token", [-1, 200, 10**9])
def test_a_token_that_does_not_exist(token: int) -> None:
    with pytest.raises(InputError, match=f"^token {token} does not exist: layer 3 has tokens 0 to 199$"):
        walk_row(one_head(RECORDS["causal"], 0), resolve("fa2"), token)


@pytest.mark.parametrize("token", [0, 4, 5])
def test_a_row_that_sees_no_key(token: int) -> None:
    """Rows 0 to 4 are padding, row 5 has every pair hidden."""
    with pytest.raises(InputError, match=f"^token {token} of layer 3 sees no key"):
        walk_row(one_head(RECORDS["masks"], 0), resolve("fa2"), token)


def test_several_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="one head; got 4"):
        walk_row(RECORDS["causal"], resolve("fa2"), 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_passes_through(bad: float) -> None:
    record = one_head(RECORDS["causal"], 0)
    v = record.v.clone()
    v[0, 3, 2] = bad
    walk = walk_row(replace(record, v=v), resolve("fa2"), 60)
    assert not np.isfinite(walk.o[2])
    assert np.isfinite(np.delete(walk.o, 2)).all()
    assert not np.isfinite(walk.v[walk.keys == 3, 2]).any()
