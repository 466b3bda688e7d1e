"""Recipes explained: every point, the tile rule of every head size, changed points marked."""

import json

import pytest

from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.describe import base_preset, describe, describe_tiles
from bf16forensics.recipe.model import Recipe, TileRule
from bf16forensics.recipe.points import POINTS
from bf16forensics.recipe.presets import FA2, PAPER, PRESETS, SDPA_MATH
from bf16forensics.recipe.render import as_object, list_text, show_text


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_point_is_described_with_its_value(preset: Recipe) -> None:
    points = describe(preset)
    assert [point.name for point in points] == [point.name for point in POINTS]
    for point in points:
        assert point.value == point.preset_value == getattr(preset, point.name)
        assert point.meaning
        assert not point.is_changed


def test_changed_points_name_the_presets_value() -> None:
    changed = {point.name: point for point in describe(resolve("fa2+o_bar=bf16,division=divide")) if point.is_changed}
    assert {name: (point.value, point.preset_value) for name, point in changed.items()} == {
        "o_bar": ("bf16", "fp32"),
        "division": ("divide", "reciprocal"),
    }


def test_the_recipe_of_a_file_has_no_preset() -> None:
    from dataclasses import replace

    recipe = replace(FA2, name="mine")
    assert base_preset(recipe) is None
    assert {point.preset_value for point in describe(recipe)} == {None}
    assert "*" not in show_text(recipe, 80).replace("dO * O", "").replace("dP * P", "")


@pytest.mark.parametrize(
    ("recipe", "ranges"),
    [
        (FA2, ["up to 64", "65 to 128", "129 to 160", "161 to 256", "above 256"]),
        (PAPER, ["any"]),
        (SDPA_MATH, ["any"]),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else None,
)
def test_tile_rules_cover_every_head_size(recipe: Recipe, ranges: list[str]) -> None:
    assert [tile.head_sizes for tile in describe_tiles(recipe)] == ranges


@pytest.mark.parametrize("text", [*(preset.name for preset in PRESETS), "fa2+o_bar=bf16,tile_k=32"])
@pytest.mark.parametrize("width", [80, 100])
def test_the_page_holds_everything_within_the_width(text: str, width: int) -> None:
    recipe = resolve(text)
    page = show_text(recipe, width)
    assert max(map(len, page.splitlines())) <= width
    assert page.isascii()
    joined = " ".join(page.split())
    for part in (recipe.name, recipe.source, *(point.name for point in POINTS)):
        assert part in joined
    for point in describe(recipe):
        assert point.meaning in joined
    for tile in describe_tiles(recipe):
        assert f"head size {tile.head_sizes}" in joined


def test_flips_are_marked() -> None:
    lines = show_text(resolve("fa2+o_bar=bf16"), 100).splitlines()
    marked = [line for line in lines if line.startswith("*")]
    assert len(marked) == 2
    assert marked[0].split()[:3] == ["*", "o_bar", "bf16"]
    assert "(fa2: fp32)" in marked[0]
    assert marked[1] == "* differs from preset fa2"


def test_tiles_of_causal_calls_are_told_apart() -> None:
    page = show_text(resolve("fa3"), 100)
    assert "  head size up to 64     192 queries x 128 keys, causal or window\n" in page
    assert "  head size up to 64     192 queries x 192 keys, neither causal nor window\n" in page
    assert "  head size 65 to 96     192 queries x 144 keys\n" in page
    tiles = json.loads(json.dumps(as_object(resolve("fa3"))))["tiles"]
    assert tiles[:3] == [
        {"head_size_max": 64, "tile_q": 192, "tile_k": 128, "causal": True},
        {"head_size_max": 64, "tile_q": 192, "tile_k": 192, "causal": False},
        {"head_size_max": 96, "tile_q": 192, "tile_k": 144, "causal": None},
    ]


def test_one_rule_after_unequal_ones_is_two_entries() -> None:
    """The head sizes that it covers differ in the two kinds of calls."""
    from dataclasses import replace

    rules = (
        TileRule(head_size_max=64, tile_q=1, tile_k=2, causal=True),
        TileRule(head_size_max=None, tile_q=3, tile_k=4),
    )
    found = [(tile.head_sizes, tile.causal, tile.tile_k) for tile in describe_tiles(replace(FA2, tiles=rules))]
    assert found == [("up to 64", True, 2), ("above 64", True, 4), ("any", False, 4)]


def test_changed_tiles_are_marked() -> None:
    page = show_text(resolve("paper+tile_k=64"), 100)
    assert "* head size any          512 queries x 64 keys" in page
    assert "* differs from preset paper" in page


def test_the_list_names_every_preset_its_source_and_the_default() -> None:
    page = list_text(PRESETS, 80)
    assert max(map(len, page.splitlines())) <= 80
    joined = " ".join(page.split())
    for preset in PRESETS:
        assert f"{preset.name} (version {preset.version}" in joined
        assert preset.source in joined
        assert preset.summary in joined
    assert joined.count(", default)") == 1
    assert joined.startswith("fa2 (version 1, default)")


def test_a_recipe_that_rounds_nothing_says_so() -> None:
    recipe = resolve("sdpa-math+o=fp32,dq=fp32,dkv=fp32")
    assert "rounds: nothing" in list_text([recipe], 80)


def test_the_json_object_carries_points_and_tiles() -> None:
    built = json.loads(json.dumps(as_object(resolve("fa2+o_bar=bf16")), allow_nan=False))
    points = {point["name"]: point for point in built["points"]}
    assert built["preset"] == "fa2"
    assert (points["o_bar"]["value"], points["o_bar"]["preset_value"]) == ("bf16", "fp32")
    assert points["o_bar"]["allowed"] == ["bf16", "fp16", "fp32", "e4m3", "e5m2"]
    assert built["tiles"][0] == {"head_size_max": 64, "tile_q": 128, "tile_k": 128, "causal": None}
    assert built["tiles"][-1]["head_size_max"] is None
    assert "o_bar" in built["rounding_points"]
