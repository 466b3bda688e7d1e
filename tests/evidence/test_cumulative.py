"""One feature along the keys under every accumulator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.attention.walk import walk_row
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.cumulative import check_accumulator, cumulative, walk_recipe_of
from bf16forensics.evidence.trace.event import event_at
from bf16forensics.evidence.trace.results import CumulativeTrace
from bf16forensics.floats import scalar
from bf16forensics.floats.accumulate import dot_add
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import BF16, format_named
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.presets import PRESETS

Make = Callable[..., AttentionRecord]
ONE_TILE = ("fp32-prefix", "bf16-each-add")
ALL = (*ONE_TILE, "tile:3", "sm80", "sm90", "sm100", "exact")
P03_D = (-2.40625, -2.296875, -2.3125, -1.0)
#: The residue of the published event as one product of two BF16 numbers: 121 * 30 = 3630 units of 2^-22.
RESIDUE = (121 * 2.0**-18, -1.875)


def hand_walk(
    p: Sequence[float] | np.ndarray,
    v: Sequence[float] | np.ndarray,
    *,
    sizes: Sequence[int] | None = None,
    alphas: Sequence[float] | None = None,
    **changes: Any,
) -> RowWalk:
    """A walk of one feature (or of [K, E] values); one tile unless `sizes` says otherwise."""
    p_bar = np.asarray(p, np.float32)
    values = np.asarray(v, np.float32).reshape(len(p_bar), -1)
    sizes = [len(p_bar)] if sizes is None else sizes
    fields: dict[str, Any] = {
        "recipe": "hand",
        "keys": np.arange(len(p_bar)),
        "visible": np.ones(len(p_bar), np.bool_),
        "p_bar": p_bar,
        "p_operand": p_bar,
        "is_one": p_bar == 1,
        "tile": np.repeat(np.arange(len(sizes)), sizes),
        "tile_alpha": np.asarray([1.0] * len(sizes) if alphas is None else alphas, np.float32),
        "v": values,
        "p_format": "bf16",
        "row_sum": float(p_bar.sum()),
        "division": "divide",
        "o_bar_format": "fp32",
        "o_bar_at": "end",
        "o_format": "bf16",
        "o": np.zeros(values.shape[1], np.float32),
        "lse": 0.0,
    }
    return RowWalk(**(fields | changes))


def ones_walk(v: Sequence[float], **changes: Any) -> RowWalk:
    return hand_walk([1.0] * len(v), v, **changes)


def trace(walk: RowWalk, accumulator: str, feature: int = 0, **options: Any) -> CumulativeTrace:
    return cumulative(walk, feature, accumulator, o_hp=0.0, **options)


def drawn_walk(seed: int, keys: int = 75, sharpness: float = 3.0, **changes: Any) -> RowWalk:
    """P-bar between e^-12 and 1, a few of them 1; V as in a head whose values share a sign."""
    generator = np.random.default_rng(seed)
    p = round_to(np.exp(-sharpness * generator.uniform(0, 4, keys)).astype(np.float32), BF16)
    p[generator.integers(0, keys, 5)] = 1.0
    v = round_to(generator.normal(2.0, 1.0, (keys, 3)).astype(np.float32), BF16)
    return hand_walk(p, v, **changes)


# -- P03 D and the published event ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 2.0**5])
@pytest.mark.parametrize(
    ("values", "running", "errors"),
    [
        (P03_D, (-2.40625, -4.6875, -7.0, -8.0), (0.0, 0.015625, 0.015625, 0.015625)),
        (P03_D[::-1], (-1.0, -3.3125, -5.625, -8.0), (0.0, 0.0, -0.015625, 0.015625)),
        # A neighbour: one unit more in the second value makes the first sum a value of the format.
        ((-2.40625, -2.28125, -2.3125), (-2.40625, -4.6875, -7.0), (0.0, 0.0, 0.0)),
    ],
)
def test_values_stored_after_each_addition(values, running, errors, scale, sign) -> None:
    found = trace(ones_walk([sign * scale * v for v in values]), "bf16-each-add")
    assert found.running_lp.tolist() == [sign * scale * value for value in running]
    assert found.error.tolist() == [sign * scale * error for error in errors]
    assert found.half_ulp is None
    assert found.exists.all()


def test_keys_that_add_nothing_change_no_error() -> None:
    v = [x for value in P03_D for x in (value, 100.0)]
    found = trace(hand_walk([1.0, 0.0] * 4, v), "bf16-each-add")
    assert found.error[1::2].tolist() == found.error[::2].tolist() == [0.0, 0.015625, 0.015625, 0.015625]


@pytest.mark.parametrize("accumulator", ["fp32-prefix", "exact"])
def test_the_published_event(accumulator: str) -> None:
    walk = hand_walk([RESIDUE[0], 1.0, 1.0], [RESIDUE[1], -2.40625, -2.296875])
    event = event_at(walk, 0, accumulator, 2)
    assert (event.before, event.addends, event.after) == (-2.4071154594421387, (-2.296875,), -4.71875)
    assert event.stored == "bf16"
    found = trace(walk, accumulator)
    assert found.error[2] == -0.014759540557861328
    # The direction is the residue's doing: without it the sum is a tie and goes the other way.
    bare = trace(hand_walk([0.0, 1.0, 1.0], walk.v[:, 0]), accumulator)
    assert (bare.running_lp[2], bare.error[2]) == (-4.6875, 0.015625)


# -- the accumulators against slow oracles ----------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0.1, 8.0), st.sampled_from(["fp32-prefix", "exact"]))
def test_single_roundings_stay_within_half_an_ulp(seed: int, sharpness: float, accumulator: str) -> None:
    found = trace(drawn_walk(seed, keys=40, sharpness=sharpness), accumulator)
    assert found.bound_exceeded == 0
    assert found.half_ulp is not None
    # Attained somewhere near: a bound that is never approached would be the wrong one.
    assert (np.abs(found.error) / found.half_ulp).max() > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_prefix_is_the_fraction_rounded_once(seed: int) -> None:
    walk = drawn_walk(seed)
    sums = list(
        accumulate(Fraction(float(p)) * Fraction(float(v)) for p, v in zip(walk.p_bar, walk.v[:, 1], strict=True))
    )
    found = trace(walk, "exact", 1)
    assert found.running_hp.tolist() == [float(total) for total in sums]
    assert found.running_lp.tolist() == [scalar.round_to(total, BF16) for total in sums]


@pytest.mark.parametrize("seed", range(3))
def test_the_fp32_prefix_is_a_loop_of_fp32_additions(seed: int) -> None:
    walk = drawn_walk(seed)
    total, prefixes = np.float32(0), []
    for p, v in zip(walk.p_bar, walk.v[:, 2], strict=True):
        total = np.float32(total + np.float32(p * v))
        prefixes.append(float(total))
    found = trace(walk, "fp32-prefix", 2)
    assert found.running_hp.tolist() == prefixes
    assert found.running_lp.tolist() == [scalar.round_to(value, BF16) for value in prefixes]


@pytest.mark.parametrize("model", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("sizes", [[75], [32, 32, 11], [16, 59]])
def test_a_chain_without_rescaling_is_one_dot_product_of_the_row(model: str, sizes: list[int]) -> None:
    # Tiles of whole blocks: the chain does not see their borders.
    walk = drawn_walk(7, sizes=sizes)
    found = trace(walk, model)
    v = np.ascontiguousarray(walk.v[:, 0])
    for index in range(75):
        so_far = np.where(np.arange(75) <= index, walk.p_bar, np.float32(0))
        assert found.running_lp[index] == dot_add(np.float32(0), so_far, v, model)
    size = 8 if model == "sm80" else 16
    assert np.flatnonzero(found.exists).tolist() == [*range(size - 1, 75, size), 74]


def test_a_chain_is_rescaled_in_fp32_before_a_tile_and_blocks_start_with_it() -> None:
    alpha = np.float32(0.3)
    walk = drawn_walk(8, keys=40, sizes=[20, 20], alphas=[0.0, alpha])
    v = np.ascontiguousarray(walk.v[:, 0])
    first = dot_add(np.float32(0), walk.p_bar[:20], v[:20], "sm90")
    whole = dot_add(np.float32(first * alpha), walk.p_bar[20:], v[20:], "sm90")
    found = trace(walk, "sm90")
    assert (found.running_lp[19], found.running_lp[39]) == (first, whole)
    assert np.flatnonzero(found.exists).tolist() == [15, 19, 35, 39]
    event = event_at(walk, 0, "sm90", 22)
    assert event.before == np.float32(first * alpha)
    assert event.keys == tuple(range(20, 36))
    assert event.addends[2] == float(walk.p_bar[22]) * float(v[22])
    assert event.after == found.running_lp[35]
    # The reference knows no rounding: truncation toward zero only ever takes away from it.
    assert 0 > found.error[-1] > -1e-5


def by_tile_oracle(walk: RowWalk, feature: int) -> list[float]:
    """numerics of the authors' code, key by key: what would be stored if the row ended there."""
    stored, found = np.float32(0), []
    for tile, alpha in enumerate(walk.tile_alpha):
        if tile:
            stored = np.float32(scalar.round_to(float(np.float32(stored * alpha)), BF16))
        partial, value = np.float32(0), stored
        for index in np.flatnonzero(walk.tile == tile):
            partial = np.float32(partial + np.float32(walk.p_operand[index] * walk.v[index, feature]))
            product = np.float32(scalar.round_to(float(partial), BF16))
            value = np.float32(scalar.round_to(float(np.float32(stored + product)), BF16))
            found.append(float(value))
        stored = value
    return found


@pytest.mark.parametrize("seed", range(3))
def test_tiles_round_product_rescaling_and_sum(seed: int) -> None:
    walk = drawn_walk(seed, keys=40, sizes=[7, 1, 12, 20], alphas=[0.0, 1.0, 0.7, 0.01])
    found = trace(walk, "tile:12")
    assert found.running_lp.tolist() == by_tile_oracle(walk, 0)
    assert np.flatnonzero(found.exists).tolist() == [6, 7, 19, 39]
    event = event_at(walk, 0, "tile:12", 9)
    assert event.before == scalar.round_to(float(np.float32(found.running_lp[7] * np.float32(0.7))), BF16)
    assert event.keys == tuple(range(8, 20))
    assert event.after == scalar.round_to(event.before + event.addends[0], BF16) == found.running_lp[19]


def test_an_exact_sum_is_rescaled_before_the_first_key_of_a_tile() -> None:
    walk = drawn_walk(2, keys=12, sizes=[5, 7], alphas=[0.0, 0.25])
    found = trace(walk, "exact")
    before = [event_at(walk, 0, "exact", key).before for key in range(12)]
    # A factor of a power of two is exact.
    assert before == [0.0, *found.running_hp[:4].tolist(), found.running_hp[4] / 4, *found.running_hp[5:-1].tolist()]


# -- the end against the recipe's own O -------------------------------------------------------------------------------


@pytest.mark.parametrize("tile_k", [4, 16, 512])
def test_tiles_of_the_papers_size_end_in_the_papers_own_o(make_record: Make, tile_k: int) -> None:
    recipe = resolve(f"paper+tile_k={tile_k}")
    record = make_record(heads=1, kv_heads=1, tokens=40, sharpness=3.0)
    o_lp = dual_pass(record, recipe).o_lp[0]
    for token in (0, 17, 39):
        assert walk_recipe_of(f"tile:{tile_k}", recipe) == recipe
        walk = walk_row(record, recipe, token)
        ends = [trace(walk, f"tile:{tile_k}", feature).o_accumulator for feature in range(8)]
        # The recipe's product may add in another order, which a rounding to BF16 of this fixed record never shows.
        assert ends == o_lp[token].tolist()


@pytest.mark.parametrize("name", [*(p.name for p in PRESETS if p.name != "paper"), "fa2+o_bar=bf16", "fa2+tile_k=8"])
@pytest.mark.parametrize("accumulator", ["exact", "sm90"])
def test_the_end_is_the_recipes_o_within_one_rounding(make_record: Make, name: str, accumulator: str) -> None:
    recipe = resolve(name)
    if accumulator == "sm90" and recipe.p_bar not in ("bf16", "fp16"):
        pytest.skip("not a 16-bit product")
    record = make_record(seed=3, heads=1, kv_heads=1, tokens=40, sharpness=2.0)
    walk = walk_row(record, recipe, 33)
    same = 0
    for feature in range(8):
        found = trace(walk, accumulator, feature)
        # FP32 sums of 40 terms in two orders differ by far less than an ulp of BF16: a border lies between at most.
        step = 2.0 ** (math.floor(math.log2(abs(found.o_lp))) - format_named(recipe.o).fraction_bits)
        assert abs(found.o_accumulator - found.o_lp) <= step
        same += found.o_accumulator == found.o_lp
    assert same >= 7


# -- what must not matter ---------------------------------------------------------------------------------------------


def walk_for(accumulator: str, **changes: Any) -> RowWalk:
    split = {} if accumulator in ONE_TILE else {"sizes": [20, 20], "alphas": [0.0, 0.5]}
    return drawn_walk(11, keys=40, **split, **changes)


@pytest.mark.parametrize("accumulator", ALL)
def test_flipping_the_signs_of_v_flips_the_errors(accumulator: str) -> None:
    walk = walk_for(accumulator)
    found, flipped = trace(walk, accumulator), trace(replace(walk, v=-walk.v), accumulator)
    assert flipped.error.tolist() == (-found.error).tolist()
    assert flipped.o_accumulator == -found.o_accumulator
    assert [(jump.key, jump.size) for jump in flipped.jumps] == [(jump.key, -jump.size) for jump in found.jumps]


@pytest.mark.parametrize("accumulator", ALL)
def test_features_do_not_meet(accumulator: str) -> None:
    walk = walk_for(accumulator)
    found, moved = trace(walk, accumulator, 0), trace(replace(walk, v=walk.v[:, [2, 0, 1]]), accumulator, 1)
    assert moved.error.tolist() == found.error.tolist()


@pytest.mark.parametrize("accumulator", ALL)
def test_invisible_keys_are_left_out_but_counted_in_blocks(accumulator: str) -> None:
    walk = walk_for(accumulator)
    hidden = np.isin(walk.keys, (0, 1, 5, 19, 38, 39))
    p = np.where(hidden, np.float32(0), walk.p_bar)
    walk = replace(walk, p_bar=p, p_operand=p, visible=~hidden, is_one=p == 1)
    everything = trace(replace(walk, visible=np.ones_like(hidden)), accumulator)
    found = trace(walk, accumulator)
    assert found.keys.tolist() == walk.keys[~hidden].tolist()
    assert found.running_lp.tolist() == everything.running_lp[~hidden].tolist()
    # The end of a tile or block moves to the last key that the row sees.
    assert found.keys[found.tile_end].tolist() == ([37] if accumulator in ONE_TILE else [18, 37])
    assert found.exists[-1]
    assert found.o_accumulator == everything.o_accumulator


# -- jumps, borders, words --------------------------------------------------------------------------------------------


def test_jumps_of_a_row_of_ones_and_residues_sit_at_the_ones() -> None:
    generator = np.random.default_rng(5)
    p = round_to(np.exp(-generator.uniform(8, 14, 200)).astype(np.float32), BF16)
    ones = np.sort(generator.choice(200, 24, replace=False))
    p[ones] = 1.0
    v = round_to((-generator.uniform(2, 4, 200)).astype(np.float32), BF16)
    found = trace(hand_walk(p, v), "fp32-prefix")
    assert found.is_one.sum() == 24
    # Not all ten need to: a residue can carry a large prefix over a border too.
    assert found.top_jumps == 10
    assert found.top_jumps_at_ones >= 8
    sizes = [abs(jump.size) for jump in found.jumps]
    assert sizes == sorted(sizes, reverse=True)
    assert math.fsum(jump.size for jump in found.jumps) == pytest.approx(found.error[-1], abs=1e-12)
    largest = found.jumps[0]
    assert largest.size == found.error[largest.position] - found.error[largest.position - 1]
    assert (largest.p_bar, largest.v) == (1.0, float(v[largest.key]))


def test_jumps_of_equal_size_come_in_the_order_of_visits_and_zeros_are_none() -> None:
    found = trace(ones_walk(P03_D), "bf16-each-add")
    assert [(jump.position, jump.size) for jump in found.jumps] == [(1, 0.015625)]
    assert (found.top_jumps_at_ones, found.top_jumps) == (1, 1)
    both = trace(ones_walk([*P03_D[:2], 4.6875, *P03_D[:2]]), "fp32-prefix")
    assert [jump.position for jump in both.jumps] == sorted(jump.position for jump in both.jumps)
    assert len({abs(jump.size) for jump in both.jumps}) == 1
    assert len(both.jumps) > 1


@pytest.mark.parametrize(("order", "exists"), [("ascending", [3, 7, 9]), ("descending", [9])])
def test_one_tile_marks_the_borders_of_the_runs_own_tiles(make_record: Make, order: str, exists: list[int]) -> None:
    recipe = resolve(f"fa2+tile_k=4,tile_order={order}")
    record = make_record(heads=1, kv_heads=1, tokens=10)
    run = walk_row(record, recipe, 9)
    walk = walk_row(record, walk_recipe_of("fp32-prefix", recipe, 10), 9)
    found = trace(walk, "fp32-prefix", run=run)
    assert found.keys.tolist() == list(range(10))
    assert np.flatnonzero(found.tile_end).tolist() == [3, 7, 9]
    assert np.flatnonzero(found.exists).tolist() == exists
    assert found.o_lp == run.o[0]


@pytest.mark.parametrize("name", [preset.name for preset in PRESETS])
@pytest.mark.parametrize("accumulator", ONE_TILE)
def test_one_tile_walks_upwards_from_the_final_maximum(make_record: Make, name: str, accumulator: str) -> None:
    recipe = resolve(name)
    record = make_record(heads=1, kv_heads=1, tokens=40, sharpness=3.0)
    walk = walk_row(record, walk_recipe_of(accumulator, recipe, 40), 35)
    found = trace(walk, accumulator, run=walk_row(record, recipe, 35))
    assert found.keys.tolist() == list(range(36))
    assert found.is_one.any()
    assert resolve(found.walk_recipe).tile_order == "ascending"


@pytest.mark.parametrize(
    ("text", "expected"), [("FP32-prefix ", "fp32-prefix"), ("Tile:0064", "tile:64"), ("sm90", "sm90")]
)
def test_names_have_one_spelling(text: str, expected: str) -> None:
    assert check_accumulator(text) == expected


@pytest.mark.parametrize("text", ["", "sm70", "tile", "tile:", "tile:0", "tile:-1", "tile:1.5", "tile:N", "fp64"])
def test_other_names_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        check_accumulator(text)
    assert "\n" not in str(caught.value)
    assert "tile:" in str(caught.value)


def test_what_cannot_be_traced_is_refused() -> None:
    walk = ones_walk(P03_D)
    with pytest.raises(InputError, match=r"feature 1 is out of range; V has features 0 to 0"):
        trace(walk, "exact", 1)
    with pytest.raises(InputError, match=r"follows a walk of one tile"):
        trace(ones_walk(P03_D, sizes=[2, 2]), "fp32-prefix")
    with pytest.raises(InputError, match=r"recipe hand has fp32 P"):
        trace(replace(walk, p_format="fp32"), "sm90")
    with pytest.raises(InputError, match=r"V of feature 0 holds values that are not bf16"):
        trace(ones_walk([1.0 + 2.0**-20, 1.0]), "sm80")
    with pytest.raises(InputError, match=r"P-bar of key 1, feature 0 is not finite"):
        trace(hand_walk([1.0, math.nan], [1.0, 1.0]), "exact")
    with pytest.raises(InputError, match=r"V of key 0, feature 0 is not finite"):
        trace(ones_walk([math.inf, 1.0]), "fp32-prefix")
    with pytest.raises(InputError, match=r"sees no key"):
        trace(replace(walk, visible=np.zeros(4, np.bool_)), "exact")
    with pytest.raises(InputError, match=r"the row does not see key 9; it sees 4 keys between 0 and 3"):
        event_at(walk, 0, "exact", 9)
    with pytest.raises(InputError, match=r"divides P-bar before its product"):
        walk_recipe_of("tile:64", resolve("eager"))


@pytest.mark.parametrize("accumulator", ["fp32-prefix", "bf16-each-add", "tile:4", "exact"])
def test_an_overflow_is_named(accumulator: str) -> None:
    walk = ones_walk([40000.0, 20000.0, 10000.0, -60000.0], o_format="fp16")
    with pytest.raises(InputError, match=r"feature 0 overflows fp16 at key 2"):
        trace(walk, accumulator)


@pytest.mark.parametrize("accumulator", ALL)
def test_the_meaning_names_the_stored_format(accumulator: str) -> None:
    walk = walk_for(accumulator, o_format="fp16")
    words = trace(walk, accumulator).meaning
    assert ("fp16" in words) == (not accumulator.startswith("sm"))
    assert words.endswith(".")


def test_an_fp32_output_has_no_rounding_to_show() -> None:
    found = trace(drawn_walk(1, o_format="fp32"), "fp32-prefix")
    assert not found.error.any()
    assert (found.jumps, found.top_jumps, found.bound_exceeded) == ((), 0, 0)


def test_torch_is_not_needed(run_python: Callable[..., Any]) -> None:
    code = (
        "import sys, bf16forensics.evidence.trace.cumulative, bf16forensics.evidence.trace.event, "
        "bf16forensics.evidence.trace.contributions; sys.exit('torch' in sys.modules)"
    )
    assert run_python(["-c", code]).exit_code == 0


def test_the_row_walk_of_fp8_operands_has_its_factor_in_o(make_record: Make) -> None:
    record = make_record(heads=1, kv_heads=1, tokens=20)
    walk = walk_row(replace(record, v=record.v * torch.tensor(0.25)), resolve("fa3-fp8"), 19)
    assert walk.value_scale != 1.0
    found = trace(walk, "exact")
    assert found.o_accumulator == pytest.approx(found.o_lp, rel=2.0**-8)
