"""Recipes in TOML files: round trips, names that must not lie, and strictness."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.errors import RecipeError
from bf16forensics.recipe.derive import flip, resolve
from bf16forensics.recipe.files import read_recipe, to_toml
from bf16forensics.recipe.model import Recipe, TileRule
from bf16forensics.recipe.points import POINTS
from bf16forensics.recipe.presets import FA2, PAPER, PRESETS, SDPA_MATH

#: Any text a TOML basic string can carry: no lone surrogates.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip())


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A recipe with any allowed content under a name that is no preset's."""
    limits = sorted(draw(st.sets(st.integers(1, 512), max_size=3)))
    sizes = st.integers(1, 1024)
    tiles = tuple(
        TileRule(head_size_max=limit, tile_q=draw(sizes), tile_k=draw(sizes), causal=causal)
        for limit in [*limits, None]
        for causal in draw(st.sampled_from([(None,), (True, False), (False, True)]))
    )
    return Recipe(
        name="mine-" + draw(st.text("abcXYZ019._-", max_size=8)),
        version=draw(st.integers(1, 99)),
        source=draw(TEXTS),
        summary=draw(TEXTS),
        tiles=draw(st.sampled_from([(), tiles])),
        **{point.name: draw(st.sampled_from(point.values)) for point in POINTS},
    )


def write(tmp_path: Path, text: str, name: str = "mine.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@given(recipe=recipes())
def test_a_written_recipe_reads_back_equal(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("recipe"), to_toml(recipe))
    assert read_recipe(path) == recipe
    assert path.read_bytes().isascii()


@pytest.mark.parametrize("text", [*(preset.name for preset in PRESETS), "fa2+o_bar=bf16,tile_k=32", "paper+o=fp32"])
def test_presets_and_derived_recipes_read_back_equal(tmp_path: Path, text: str) -> None:
    recipe = resolve(text)
    assert read_recipe(write(tmp_path, to_toml(recipe))) == recipe


def test_a_base_and_the_fields_that_differ(tmp_path: Path) -> None:
    path = write(tmp_path, 'base = "fa2"\no_bar = "bfloat16"\ntile_k = 32\n')
    recipe = resolve(str(path))
    assert recipe.name == "mine"
    assert "fa2" in recipe.source
    expected = resolve("fa2+o_bar=bf16,tile_k=32")
    assert replace(recipe, name=expected.name, source=expected.source) == expected


def test_tiles_in_a_file(tmp_path: Path) -> None:
    text = 'base = "fa2"\ntiles = [{head_size_max = 64, tile_q = 1, tile_k = 2}, {tile_q = 3, tile_k = 4}]\n'
    recipe = read_recipe(write(tmp_path, text))
    assert [recipe.tile(size, 9) for size in (64, 65)] == [(1, 2), (3, 4)]
    assert read_recipe(write(tmp_path, 'base = "fa2"\ntiles = []\n')).tile(64, 9) == SDPA_MATH.tile(64, 9)


def test_tiles_by_kind_of_call_in_a_file(tmp_path: Path) -> None:
    text = 'base = "fa2"\ntiles = [{tile_q = 1, tile_k = 2, causal = true}, {tile_q = 3, tile_k = 4, causal = false}]\n'
    recipe = read_recipe(write(tmp_path, text))
    assert [recipe.tile(64, 9, causal=causal) for causal in (True, False)] == [(1, 2), (3, 4)]


def test_a_file_from_before_a_point_existed_reads_as_it_did(tmp_path: Path) -> None:
    """Points that came later have a value that changes nothing."""
    later = ("operands", "p_scale", "rescale_threshold", "passes", "ds_scale", "row_sum_order")
    for preset in (FA2, PAPER, SDPA_MATH):
        assert read_recipe(write(tmp_path, without(preset, *later), f"{preset.name}.toml")) == preset


def test_points_set_on_top_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'base = "paper"\nname = "ours"\n', "with+plus.toml")
    recipe = resolve(f"{path}+o_bar=fp32")
    assert (recipe.name, recipe.o_bar) == ("ours+o_bar=fp32", "fp32")
    assert flip(recipe, "row_sum").name == "ours+o_bar=fp32,row_sum=fp32"
    again = write(tmp_path, to_toml(recipe), "again.toml")
    assert read_recipe(again) == recipe


def test_a_byte_order_mark_and_crlf_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "mine.TOML"
    path.write_bytes(b'\xef\xbb\xbfbase = "paper"\r\no = "fp32"\r\n')
    assert resolve(str(path)).o == "fp32"


def test_the_name_of_a_preset_is_kept_only_by_its_equal(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, 'base = "fa2"\n', "fa2.toml")).name == "fa2"
    for text in ('base = "fa2"\no = "fp32"\n', 'base = "paper"\n'):
        with pytest.raises(RecipeError, match="promises a preset that it does not equal"):
            read_recipe(write(tmp_path, text, "fa2.toml"))
    with pytest.raises(RecipeError, match="promises a preset"):
        read_recipe(write(tmp_path, 'base = "fa2"\nname = "fa2+o_bar=bf16"\n'))
    with pytest.raises(RecipeError, match="contradicts its fields"):
        read_recipe(write(tmp_path, 'base = "fa2"\nname = "ours+o_bar=bf16"\n'))


def without(recipe: Recipe, *keys: str) -> str:
    lines = to_toml(recipe).splitlines()
    return "\n".join(line for line in lines if line.split(" =")[0] not in keys)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('base = "fa2"\nobar = "bf16"\n', ["unknown key 'obar'", "did you mean 'o_bar'"]),
        ('base = "fa5"\n', ["unknown recipe 'fa5'", "fa2"]),
        ('base = "fa2+o=fp32"\n', ["unknown recipe"]),
        ("base = 2\n", ["base must be a non-empty string", "2"]),
        ('base = "fa2"\no = "int8"\n', ["o cannot be 'int8'", "bf16, fp16, fp32"]),
        ('base = "fa2"\no = 16\n', ["o must be a non-empty string", "16"]),
        ('base = "fa2"\nversion = 0\n', ["version must be a positive whole number"]),
        ('base = "fa2"\ntile_k = true\n', ["tile_k must be a positive whole number", "True"]),
        ('base = "fa2"\ntile_k = "8"\n', ["tile_k must be a positive whole number"]),
        ('base = "fa2"\ntile_k = 8\ntiles = []\n', ["both tiles and tile_k"]),
        ('base = "sdpa-math"\ntile_q = 8\n', ["no tiles"]),
        ('base = "fa2"\ntiles = 3\n', ["tiles must be an array"]),
        ('base = "fa2"\ntiles = [3]\n', ["tiles must be an array"]),
        ('base = "fa2"\ntiles = [{tile_q = 1}]\n', ["entry 1", "tile_k is missing"]),
        ('base = "fa2"\ntiles = [{tile_q = 1, tile_k = 1, x = 1}]\n', ["entry 1", "unknown key 'x'"]),
        (
            'base = "fa2"\ntiles = [{head_size_max = 9, tile_q = 1, tile_k = 1}]\n',
            ["last entry", "leave head_size_max"],
        ),
        (
            'base = "fa2"\ntiles = [{tile_q = 1, tile_k = 1}, {tile_q = 1, tile_k = 1}]\n',
            ["entry 1", "head_size_max is missing"],
        ),
        (
            'base = "fa2"\ntiles = [{head_size_max = 9, tile_q = 1, tile_k = 1}, '
            "{head_size_max = 9, tile_q = 1, tile_k = 1}, {tile_q = 1, tile_k = 1}]\n",
            ["entry 2", "does not grow"],
        ),
        (
            'base = "fa2"\ntiles = [{head_size_max = 9, tile_q = 1, tile_k = 1, causal = true}, '
            "{head_size_max = 8, tile_q = 1, tile_k = 1}, {tile_q = 1, tile_k = 1}]\n",
            ["entry 2", "does not grow"],
        ),
        (
            'base = "fa2"\ntiles = [{tile_q = 1, tile_k = 1, causal = true}]\n',
            ["every entry has the same causal"],
        ),
        (
            'base = "fa2"\ntiles = [{tile_q = 1, tile_k = 1, causal = true}, '
            "{head_size_max = 9, tile_q = 1, tile_k = 1, causal = false}]\n",
            ["entry 2", "leave head_size_max"],
        ),
        (
            'base = "fa2"\ntiles = [{tile_q = 1, tile_k = 1, causal = false}, {tile_q = 1, tile_k = 1}]\n',
            ["entry 1", "head_size_max is missing"],
        ),
        ('base = "fa2"\ntiles = [{tile_q = 1, tile_k = 1, causal = "yes"}]\n', ["entry 1", "causal must be true or"]),
        ('base = "fa2"\ntiles = [{tile_q = 1, tile_k = 1, causal = 1}]\n', ["entry 1", "causal must be true or"]),
        ('base = "fa2"\ntiles = [{head_size_max = "64", tile_q = 1, tile_k = 1}]\n', ["entry 1: head_size_max"]),
        ('base = "fa2"\nname = "a b"\n', ["'a b' cannot be a recipe's name"]),
        ('base = "fa2"\nname = "a+b"\n', ["cannot read 'b'", "another name"]),
        ("tile_k = 8\n", ["tile_k needs a base"]),
        ("", ["missing", "scores", "base"]),
        (without(PAPER, "name", "o_bar"), ["o_bar missing"]),
        ("base = ", ["not valid TOML"]),
        ('base = "fa2"\nbase = "fa2"\n', ["not valid TOML"]),
    ],
)
def test_a_file_is_read_strictly(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    for part in parts:
        assert part in message


def test_a_whole_file_needs_no_texts(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, without(FA2, "name", "version", "source", "summary")))
    assert replace(recipe, name=FA2.name, source=FA2.source, summary=FA2.summary) == FA2


def test_what_is_no_text_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        read_recipe(path)
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(RecipeError, match="cannot read the recipe file"):
        read_recipe(folder)
