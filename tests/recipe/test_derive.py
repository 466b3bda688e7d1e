"""From text to a recipe: names, points, flips, and every way to get one wrong."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.errors import RecipeError
from bf16forensics.recipe.derive import flip, resolve, rounding_points
from bf16forensics.recipe.model import Recipe, TileRule
from bf16forensics.recipe.names import with_points
from bf16forensics.recipe.points import POINTS
from bf16forensics.recipe.presets import FA2, PAPER, PRESETS, SDPA_MATH

SETTABLE = {point.name: point.values for point in POINTS}


@st.composite
def derived_names(draw: st.DrawFn) -> str:
    """A preset with any points set to any allowed values, in any order."""
    preset = draw(st.sampled_from(PRESETS)).name
    points = draw(st.lists(st.sampled_from(sorted(SETTABLE)), unique=True, max_size=6))
    parts = [f"{point}={draw(st.sampled_from(SETTABLE[point]))}" for point in points]
    tile = draw(st.none() | st.integers(1, 4096))
    if tile is not None:
        parts.append(f"tile_k={tile}")
    return preset + ("+" + ",".join(parts) if parts else "")


def test_every_field_is_settable_or_descriptive() -> None:
    names = {field.name for field in fields(Recipe)}
    assert names == set(SETTABLE) | {"name", "version", "source", "summary", "tiles"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_hold_only_listed_values(preset: Recipe) -> None:
    for name, values in SETTABLE.items():
        assert getattr(preset, name) in values, name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
@pytest.mark.parametrize("spelling", ["{}", " {} ", "{}+o=bf16"])
def test_a_preset_resolves_to_itself(preset: Recipe, spelling: str) -> None:
    assert resolve(spelling.format(preset.name)) == preset
    assert resolve(preset.name.upper()) == preset


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fa2+o_bar=bf16", "fa2+o_bar=bf16"),
        ("fa2+o_bar=bf16,row_sum=bf16", "fa2+o_bar=bf16,row_sum=bf16"),
        ("fa2+row_sum=bf16,o_bar=bf16", "fa2+row_sum=bf16,o_bar=bf16"),
        ("fa2+o_bar=bf16+row_sum=bf16", "fa2+o_bar=bf16,row_sum=bf16"),
        ("FA2 + O-Bar = BFloat16 , scores=half", "fa2+o_bar=bf16,scores=fp16"),
        ("fa2+o=float32", "fa2+o=fp32"),
        ("fa2+o=float,lse=float16", "fa2+o=fp32,lse=fp16"),
        ("fa2+o_bar=fp32", "fa2"),
        ("fa2+o=bf16,o_bar=bf16", "fa2+o_bar=bf16"),
        ("fa2+o_bar=bf16,o_bar=bf16", "fa2+o_bar=bf16"),
        ("fa2+exponential=exp,tile_order=ascending", "fa2+exponential=exp,tile_order=ascending"),
        ("fa2+arithmetic=exact", "fa2+arithmetic=exact"),
        ("fa2+tile_k=0064", "fa2+tile_k=64"),
        ("fa2+p_bar=float8_e4m3fn,o=E5M2", "fa2+p_bar=e4m3,o=e5m2"),
        ("fa2+p-scale=256,rescale-threshold=8", "fa2+p_scale=256,rescale_threshold=8"),
        ("fa3-fp8+operands=stored,passes=both", "fa3-fp8+operands=stored,passes=both"),
        ("flex+tile_order=masked-first", "flex"),
        ("eager+ds_scale=gradients", "eager+ds_scale=gradients"),
        ("paper+tile_q=512,tile_k=512", "paper"),
        ("sdpa-math+tile_k=64,tile_q=32", "sdpa-math+tile_k=64,tile_q=32"),
    ],
)
def test_the_name_has_one_spelling(text: str, name: str) -> None:
    recipe = resolve(text)
    assert recipe.name == name
    assert resolve(recipe.name) == recipe


def test_only_the_named_points_change() -> None:
    changed = resolve("fa2+o_bar=bf16,row_sum=fp16")
    assert replace(changed, name="fa2", o_bar="fp32", row_sum="fp32") == FA2
    assert (changed.o_bar, changed.row_sum) == ("bf16", "fp16")


def test_a_tile_size_replaces_the_rule_of_every_head_size() -> None:
    recipe = resolve("fa2+tile_k=48")
    for head_size in (1, 64, 65, 128, 160, 256, 257, 4096):
        assert recipe.tile(head_size, 1000) == (FA2.tile(head_size, 1000)[0], 48)
    both = resolve("fa2+tile_q=16,tile_k=48")
    assert both.tiles == (TileRule(head_size_max=None, tile_q=16, tile_k=48),)
    assert resolve("fa2+tile_k=48,tile_q=16").tiles == both.tiles


def test_tile_sizes_of_causal_calls() -> None:
    fa3 = resolve("fa3")
    assert [fa3.tile(64, 1000, causal=causal) for causal in (True, False)] == [(192, 128), (192, 192)]
    assert [fa3.tile(80, 1000, causal=causal) for causal in (True, False)] == [(192, 144), (192, 144)]
    assert [fa3.tile(128, 1000, causal=causal) for causal in (True, False)] == [(128, 128), (128, 176)]
    assert fa3.tile(64, 1000) == fa3.tile(64, 1000, causal=True)
    # One size for all: what is left of the rule is the query rows.
    keys = resolve("fa3+tile_k=64")
    assert keys.tiles == (
        TileRule(head_size_max=96, tile_q=192, tile_k=64),
        TileRule(head_size_max=256, tile_q=128, tile_k=64),
        TileRule(head_size_max=None, tile_q=64, tile_k=64),
    )
    queries = resolve("fa3+tile_q=128")
    for size in (64, 80, 128, 192, 256, 300):
        for causal in (True, False):
            assert keys.tile(size, 9, causal=causal) == (fa3.tile(size, 9, causal=causal)[0], 64)
            assert queries.tile(size, 9, causal=causal) == (128, fa3.tile(size, 9, causal=causal)[1])


def test_rules_of_one_kind_of_calls_are_joined_when_they_become_equal() -> None:
    rules = (
        TileRule(head_size_max=64, tile_q=8, tile_k=1, causal=True),
        TileRule(head_size_max=None, tile_q=16, tile_k=2),
    )
    recipe = with_points(replace(FA2, name="mine", tiles=rules), {"tile_q": "8"})
    assert recipe.tiles == (
        TileRule(head_size_max=64, tile_q=8, tile_k=1, causal=True),
        TileRule(head_size_max=64, tile_q=8, tile_k=2, causal=False),
        TileRule(head_size_max=None, tile_q=8, tile_k=2),
    )
    for size in (64, 65):
        for causal in (True, False):
            expected = 1 if size == 64 and causal else 2
            assert recipe.tile(size, 9, causal=causal) == (8, expected)


def test_every_preset_says_whether_its_ones_are_maxima() -> None:
    assert [preset.name for preset in PRESETS if not preset.anchored_at_maximum] == ["fa4"]
    assert [preset.name for preset in PRESETS if preset.passes == "forward"] == ["fa3-fp8"]


def test_the_first_preset_is_the_default() -> None:
    assert PRESETS[0] == FA2


def test_key_tiles_of_a_recipe_without_tiles_keep_its_query_blocks() -> None:
    recipe = resolve("sdpa-math+tile_k=64")
    assert recipe.tile(80, 1000) == (SDPA_MATH.tile(80, 1000)[0], 64)


@given(derived_names())
def test_resolving_a_resolved_name_changes_nothing(text: str) -> None:
    recipe = resolve(text)
    assert resolve(recipe.name) == recipe


@given(derived_names(), st.sampled_from([point.name for point in POINTS if point.is_rounding_point]))
def test_a_flip_sets_one_point_to_fp32_and_nothing_else(text: str, point: str) -> None:
    recipe = resolve(text)
    flipped = flip(recipe, point)
    assert getattr(flipped, point) == "fp32"
    assert replace(flipped, name=recipe.name, **{point: getattr(recipe, point)}) == recipe
    assert resolve(flipped.name) == flipped
    assert flip(flipped, point) == flipped


def test_flips_undo_derivations_in_the_name() -> None:
    assert flip(resolve("fa2+o_bar=bf16"), "o_bar") == FA2
    assert flip(PAPER, "o_bar").name == "paper+o_bar=fp32"
    assert flip(flip(PAPER, "o_bar"), "row_sum").name == "paper+o_bar=fp32,row_sum=fp32"
    assert flip(FA2, "row_sum") is FA2 or flip(FA2, "row_sum") == FA2


def test_rounding_points_in_the_order_of_the_computation() -> None:
    assert rounding_points(FA2) == ("p_bar", "o", "p_backward", "ds", "dq", "dkv")
    assert rounding_points(resolve("fa2+o_bar=bf16")) == ("p_bar", "o_bar", "o", "p_backward", "ds", "dq", "dkv")
    everything = "+".join(f"{name}=fp32" for name in rounding_points(FA2))
    assert rounding_points(resolve(f"fa2+{everything}")) == ()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["empty", "fa2"]),
        ("   ", ["empty"]),
        ("fa9", ["unknown recipe 'fa9'", "did you mean 'fa2'", "fa2, paper, sdpa-math", ".toml"]),
        ("fa3fp8", ["did you mean 'fa3-fp8'"]),
        ("flexattention", ["unknown recipe 'flexattention'"]),
        ("fa2+p_scale=8", ["p_scale cannot be '8'", "1, 256"]),
        ("fa2+rescale_threshold=bf16", ["rescale_threshold cannot be 'bf16'", "0, 8"]),
        ("sdpa_math", ["did you mean 'sdpa-math'"]),
        ("+o=bf16", ["unknown recipe ''"]),
        ("fa2+obar=bf16", ["unknown point 'obar'", "did you mean 'o_bar'", "scores", "dkv", "tile_k"]),
        ("fa2+o_bar=int8", ["o_bar cannot be 'int8'", "bf16, fp16, fp32"]),
        ("fa2+exponential=exp3", ["exponential cannot be 'exp3'", "exp2, exp"]),
        ("fa2+exponential=bf16", ["exponential cannot be 'bf16'"]),
        ("fa2+tile_k=0", ["tile_k must be a positive whole number", "'0'"]),
        ("fa2+tile_k=-3", ["'-3'"]),
        ("fa2+tile_k=1.5", ["'1.5'"]),
        ("fa2+tile_q=\u0663", ["tile_q must be a positive whole number"]),
        ("fa2+tile_q=9999999999999", ["tile_q must be"]),
        ("fa2+name=x", ["unknown point 'name'"]),
        ("fa2+tiles=8", ["unknown point 'tiles'"]),
        ("fa2+", ["cannot read ''", "NAME+POINT=VALUE"]),
        ("fa2+o_bar", ["cannot read 'o_bar'"]),
        ("fa2+o_bar=", ["cannot read 'o_bar='"]),
        ("fa2+=bf16", ["cannot read '=bf16'"]),
        ("fa2+o_bar=bf16,", ["cannot read ''"]),
        ("fa2+o_bar=bf16,o_bar=fp16", ["sets o_bar to both bf16 and fp16"]),
        ("fa2+o_bar=bf16+O-BAR=fp32", ["sets o_bar to both bf16 and fp32"]),
        ("sdpa-math+tile_q=64", ["no tiles", "set tile_k"]),
        ("no/such/file.toml", ["no/such/file.toml", "no such recipe file"]),
    ],
)
def test_errors_say_what_is_wrong_and_what_is_allowed(text: str, parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("point", ["exponential", "tile_k"])
def test_a_structural_choice_cannot_be_flipped(point: str) -> None:
    with pytest.raises(RecipeError, match=f"{point} is not a rounding point.*o_bar"):
        flip(FA2, point)


def test_a_flip_of_an_unknown_point_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"unknown point 'o_baz'.*did you mean 'o_bar'"):
        flip(FA2, "o_baz")
