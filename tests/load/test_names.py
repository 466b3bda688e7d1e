"""Wrapper prefixes in front of parameter names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.load.names import normalise_names, same_bits, strip_wrappers, three_of

WRAPPERS = st.lists(st.sampled_from(["_orig_mod.", "module."]), max_size=5).map("".join)


@given(
    WRAPPERS, st.sampled_from(["transformer.wte.weight", "w", "transformer.module.weight", "modules.w", "_orig_mode.w"])
)
def test_any_nesting_is_stripped_and_nothing_else(prefix, name):
    assert strip_wrappers(prefix + name) == name


@pytest.mark.parametrize("name", ["module", "_orig_mod", "module_list.0.weight", "a._orig_mod.b", "mymodule.w", ""])
def test_clean_names_stay(name):
    assert strip_wrappers(name) == name


def test_conflict_names_both_keys(refusal):
    line = refusal(normalise_names, {"x": torch.ones(2), "_orig_mod.x": torch.zeros(2)}, "ckpt.pt")
    assert "'x'" in line
    assert "'_orig_mod.x'" in line
    assert "ckpt.pt" in line


def test_equal_duplicate_is_kept_once_with_a_note():
    value = torch.tensor([1.0, float("nan"), -0.0])
    tensors, notes = normalise_names({"module.x": value, "x": value.clone(), "y": value}, "ckpt.pt")
    assert list(tensors) == ["x", "y"]
    assert len(notes) == 1
    assert "'module.x'" in notes[0]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (torch.tensor([1.0, 0.0]), True),
        (torch.tensor([1.0, -0.0]), False),
        (torch.tensor([1.0, 0.0], dtype=torch.float64), False),
        (torch.tensor([[1.0, 0.0]]), False),
        ("text", False),
    ],
)
def test_same_bits(other, same):
    assert same_bits(torch.tensor([1.0, 0.0]), other) is same


def test_same_bits_of_strided_tensors():
    base = torch.arange(6.0).reshape(2, 3)
    assert same_bits(base.t(), base.t().contiguous())
    assert not same_bits(base.t(), base.reshape(3, 2))


def test_three_of():
    assert three_of([]) == "none"
    assert three_of(["a", "b"]) == "a, b"
    assert three_of("abcde") == "a, b, c and 2 more"
