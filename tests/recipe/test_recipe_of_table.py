"""A recipe from the fields of a JSON document, as a case holds them."""

import json
from pathlib import Path

import pytest

from bf16forensics.errors import RecipeError
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.files import read_recipe, recipe_of_table, to_toml
from bf16forensics.recipe.presets import PRESETS
from bf16forensics.report.jsonio import dumps, plain

WHERE = Path("case.json")
DERIVED = ("fa2+o_bar=bf16,tile_k=64", "paper+o_bar=fp32", "sdpa-math+o=fp32")


def stored(recipe):
    return json.loads(dumps({"recipe": plain(recipe)}))["recipe"]


@pytest.mark.parametrize("name", [*(preset.name for preset in PRESETS), *DERIVED])
def test_a_stored_recipe_is_the_recipe(name):
    recipe = resolve(name)
    assert recipe_of_table(stored(recipe), WHERE) == recipe


def test_the_recipe_of_a_file_keeps_its_name(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "fa2"\no_bar = "fp16"\ntile_k = 32\n')
    for text in (f"{tmp_path}/mine.toml", f"{tmp_path}/mine.toml+o=fp32"):
        recipe = resolve(text)
        assert recipe_of_table(stored(recipe), WHERE) == recipe
        assert recipe.name.startswith("mine")
    (tmp_path / "whole.toml").write_text(to_toml(recipe))
    assert read_recipe(tmp_path / "whole.toml") == recipe


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("o", "int8"),
        ("o", 3),
        ("version", 0),
        ("tiles", [{"tile_q": 1}]),
        ("tiles", 5),
        ("colour", "red"),
        ("o", "fp32"),
    ],
)
def test_what_no_recipe_holds_is_refused(field, value):
    with pytest.raises(RecipeError, match=r"case\.json"):
        recipe_of_table(stored(resolve("fa2")) | {field: value}, WHERE)
