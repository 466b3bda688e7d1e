"""What must not change, or change exactly so, when the input is changed (class T4)."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bf16forensics.attention import dual as dual_module
from bf16forensics.attention.dual import dual_pass
from bf16forensics.recipe.derive import resolve

#: The session fixtures hold no state that an example could spoil.
quick = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
seeds = st.integers(0, 2**31 - 1)
recipes = st.sampled_from(["fa2", "paper", "sdpa-math", "fa2+o_bar=bf16", "fa2+scores=bf16"])


def all_tensors(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in value.__dataclass_fields__:
        item = getattr(value, name)
        if isinstance(item, torch.Tensor):
            found[prefix + name] = item
        elif item is not None:
            found |= all_tensors(item, f"{prefix}{name}.")
    return found


@quick
@given(seed=seeds, recipe=recipes, reference=st.sampled_from(["fp32", "fp64"]))
def test_permuting_keys(oracle: ModuleType, record_of: Any, seed: int, recipe: str, reference: str) -> None:
    """T2 for sums (another order), T0 for counts: without a causal mask a set of keys has no order."""
    call = oracle.draw(seed, queries=12, keys=30, size=8, causal=False)
    order = np.random.default_rng(seed).permutation(30)
    moved = replace(call, k=call.k[:, order], v=call.v[:, order])
    # With exact products the scores of a key do not depend on where it stands.
    chosen = resolve(f"{recipe}+arithmetic=exact")
    first, second = (dual_pass(record_of(c), chosen, reference) for c in (call, moved))
    eps = 2.0**-24 if reference == "fp32" else 2.0**-53
    limit = oracle.budget(call, oracle.dense(call), eps)
    assert (first.o_hp - second.o_hp).abs().max() <= 2 * limit.o
    assert (first.lse_hp - second.lse_hp).abs().max() <= 2 * limit.lse
    assert (first.dq.hp - second.dq.hp).abs().max() <= 2 * limit.dq
    assert (first.delta.delta_hp - second.delta.delta_hp).abs().max() <= 2 * limit.delta
    for name in ("ones_fp32", "ones_rounded", "visible", "near"):
        assert torch.equal(getattr(first.maxima, name), getattr(second.maxima, name)), name
    # A row sum in another order may round O elsewhere, rarely.
    assert (first.o_lp != second.o_lp).double().mean() <= 0.02


@quick
@given(seed=seeds, recipe=recipes, power=st.integers(-20, 20))
def test_scaling_values_by_a_power_of_two(
    oracle: ModuleType, record_of: Any, seed: int, recipe: str, power: int
) -> None:
    """T0: every rounding moves with the exponent; scores are untouched."""
    call = oracle.draw(seed, queries=20, size=8)
    factor = 2.0**power
    scaled = replace(call, v=call.v * np.float32(factor))
    first, second = (dual_pass(record_of(c), resolve(recipe)) for c in (call, scaled))
    for name in ("o_lp", "o_hp", "o_err"):
        assert torch.equal(getattr(first, name) * factor, getattr(second, name)), name
    for name in ("delta_lp", "delta_hp", "delta_err", "defect", "magnitude"):
        assert torch.equal(getattr(first.delta, name) * factor, getattr(second.delta, name)), name
    assert torch.equal(first.lse_lp, second.lse_lp)
    for name, value in all_tensors(first.maxima).items():
        assert torch.equal(value, getattr(second.maxima, name)), name
    for name, value in all_tensors(first.dq).items():
        assert torch.equal(value * (1.0 if name.startswith("carrier") else factor), getattr(second.dq, name)), name


@quick
@given(seed=seeds, recipe=recipes, power=st.integers(-20, 20))
def test_scaling_the_output_gradient_by_a_power_of_two(
    oracle: ModuleType, record_of: Any, seed: int, recipe: str, power: int
) -> None:
    """T0: deltas and gradients are linear in dO, and a power of two commutes with every rounding."""
    call = oracle.draw(seed, queries=20, size=8)
    factor = 2.0**power
    scaled = replace(call, do=call.do * np.float32(factor))
    first, second = (dual_pass(record_of(c), resolve(recipe)) for c in (call, scaled))
    assert torch.equal(first.o_lp, second.o_lp)
    for name, value in all_tensors(first.delta).items():
        assert torch.equal(value * (1.0 if name == "p_row_sum" else factor), getattr(second.delta, name)), name
    for name, value in all_tensors(first.dq).items():
        assert torch.equal(value * (1.0 if name.startswith("carrier") else factor), getattr(second.dq, name)), name


@quick
@given(seed=seeds, recipe=recipes)
def test_negating_values_flips_every_error(oracle: ModuleType, record_of: Any, seed: int, recipe: str) -> None:
    """T0: rounding to nearest has no preferred sign."""
    call = oracle.draw(seed, queries=20, size=8)
    first, second = (dual_pass(record_of(c), resolve(recipe)) for c in (call, replace(call, v=-call.v)))
    assert torch.equal(first.o_err, -second.o_err)
    assert torch.equal(first.delta.delta_err, -second.delta.delta_err)
    assert torch.equal(first.delta.defect, -second.delta.defect)


@quick
@given(seed=seeds, shift=st.sampled_from([-40.0, -1.0, 0.375, 7.0, 64.0]), causal=st.booleans())
def test_a_constant_added_to_all_scores(
    oracle: ModuleType, record_of: Any, seed: int, shift: float, causal: bool
) -> None:
    """T2: the softmax does not see it; lse moves by it, shared maxima stay."""
    call = oracle.draw(seed, queries=20, size=8, causal=causal)
    moved = replace(call, bias=np.full((1, 20, 20), shift, np.float32))
    first, second = (dual_pass(record_of(c), resolve("fa2"), "fp64") for c in (call, moved))
    limit = oracle.budget(moved, oracle.dense(moved), 2.0**-53)
    assert (first.o_hp - second.o_hp).abs().max() <= 2 * limit.o
    assert (first.lse_hp + shift - second.lse_hp).abs().max() <= 2 * limit.lse
    assert (first.delta.delta_hp - second.delta.delta_hp).abs().max() <= 2 * limit.delta
    assert (first.dq.hp - second.dq.hp).abs().max() <= 2 * limit.dq
    assert torch.equal(first.maxima.shared, second.maxima.shared)


@quick
@given(seed=seeds, tile_k=st.sampled_from([1, 3, 8, 16, 33]), order=st.sampled_from(["ascending", "descending"]))
def test_splitting_tiles(oracle: ModuleType, record_of: Any, seed: int, tile_k: int, order: str) -> None:
    """T0 for counts (they look at the final maximum), T2 for O: an FP32 chain in other pieces, then one cast."""
    call = oracle.draw(seed, queries=30, size=8, spread=3.0)
    record = record_of(call)
    whole = dual_pass(record, resolve("fa2"))
    split = dual_pass(record, resolve(f"fa2+tile_k={tile_k},tile_order={order}"))
    for name, value in all_tensors(whole.maxima).items():
        if name != "swamped":
            assert torch.equal(value, getattr(split.maxima, name)), name
    assert torch.equal(whole.o_hp, split.o_hp)
    assert torch.equal(whole.dq.hp, split.dq.hp)
    # Near ties of a cast of P-bar make 2^-8 of one term possible; one BF16 step of O and that is the bound.
    bound = whole.o_lp.abs() * 2.0**-7 + 2.0**-8 * float(np.abs(call.v).max())
    assert ((whole.o_lp - split.o_lp).abs() <= bound).all()
    assert (whole.lse_lp - split.lse_lp).abs().max() <= 2.0**-18


@quick
@given(seed=seeds, pads=st.integers(0, 9), right=st.booleans())
def test_padding_is_not_there(oracle: ModuleType, record_of: Any, seed: int, pads: int, right: bool) -> None:
    """T0 for counts and hp rows up to the order of float64 sums: a padded sequence equals the unpadded one."""
    real = 14
    call = oracle.draw(seed, queries=real, size=8)
    before, after = (0, pads) if right else (pads, 0)

    def pad(values: np.ndarray) -> np.ndarray:
        return np.pad(values, ((0, 0), (before, after), (0, 0)), constant_values=1000.0)

    seen = np.pad(np.ones(real, bool), (before, after))
    padded = replace(
        call,
        **{name: pad(getattr(call, name)) for name in ("q", "k", "v", "do")},
        key_padding=seen,
        query_padding=seen,
    )
    first, second = (dual_pass(record_of(c), resolve("fa2+arithmetic=exact")) for c in (call, padded))
    rows = torch.from_numpy(seen)
    limit = oracle.budget(call, oracle.dense(call), 2.0**-53)
    assert (first.o_hp - second.o_hp[:, rows]).abs().max() <= 2 * limit.o
    assert torch.equal(first.maxima.ones_rounded, second.maxima.ones_rounded[:, rows])
    assert (second.maxima.visible[:, ~rows] == 0).all()
    assert (second.o_lp[:, ~rows] == 0).all()
    assert (first.o_lp != second.o_lp[:, rows]).double().mean() <= 0.02


def test_grouped_heads_are_repeated_heads(oracle: ModuleType, record_of: Any) -> None:
    """T0: sharing a key/value head and holding copies of it give the same bytes."""
    call = oracle.draw(5, heads=6, kv_heads=2)
    copied = replace(call, k=np.repeat(call.k, 3, 0), v=np.repeat(call.v, 3, 0))
    first, second = (all_tensors(dual_pass(record_of(c), resolve("fa2"))) for c in (call, copied))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_boolean_and_padding_spellings_of_a_mask_agree(oracle: ModuleType, record_of: Any) -> None:
    """T0: a window, padding or documents given as a boolean mask."""
    for geometry in (
        {"window": 6},
        {"key_padding": np.arange(25) > 3},
        {"document_ids": np.arange(25) // 7},
        {"window": 4, "causal": False},
    ):
        call = oracle.draw(6, queries=25, **geometry)
        keep = np.stack([call.visible(head) for head in range(2)])
        spelled = replace(call, causal=False, window=None, key_padding=None, document_ids=None, keep=keep)
        first, second = (all_tensors(dual_pass(record_of(c), resolve("fa2"))) for c in (call, spelled))
        for name, value in first.items():
            assert torch.equal(value, second[name]), (geometry, name)


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math", "fa2+tile_k=16,gradients_at=tile"])
@pytest.mark.parametrize(("rows", "elements"), [(1, 2**21), (7, 2**21), (64, 1), (500, 2**30)])
def test_blocks_change_nothing(
    oracle: ModuleType,
    record_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    rows: int,
    elements: int,
) -> None:
    """How rows and heads are grouped: T0 for counts, T2 for sums, whose length ends at a block's last visible key.

    (A shorter block leaves out keys that its rows cannot see: exact zeros, but a BLAS or a vector sum groups the other
    terms differently.)
    """
    call = oracle.draw(7, heads=3, queries=150, size=16, window=70)
    record = record_of(call)
    usual = dual_pass(record, resolve(recipe))
    monkeypatch.setattr(dual_module, "ROWS_PER_BLOCK", rows)
    monkeypatch.setattr(dual_module, "ELEMENTS_PER_BLOCK", elements)
    other = dual_pass(record, resolve(recipe))
    limit = oracle.budget(call, oracle.dense(call), 2.0**-53)
    assert (usual.o_hp - other.o_hp).abs().max() <= 2 * limit.o
    assert (usual.dq.hp - other.dq.hp).abs().max() <= 2 * limit.dq
    for name, value in all_tensors(usual.maxima).items():
        if not value.is_floating_point() and recipe != "paper":
            assert torch.equal(value, getattr(other.maxima, name)), name
    assert (usual.o_lp != other.o_lp).double().mean() <= 0.005
    step = 2.0**-7 * usual.o_lp.abs() + 2.0**-8 * float(np.abs(call.v).max())
    assert ((usual.o_lp - other.o_lp).abs() <= step).all()


@pytest.mark.parametrize("elements", [1, 2**15, 2**30])
def test_heads_at_once_change_nothing_at_all(
    oracle: ModuleType, record_of: Any, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """T0: heads do not share a sum."""
    record = record_of(oracle.draw(8, heads=5, queries=140, size=64))
    usual = all_tensors(dual_pass(record, resolve("fa2")))
    monkeypatch.setattr(dual_module, "ELEMENTS_PER_BLOCK", elements)
    for name, value in all_tensors(dual_pass(record, resolve("fa2"))).items():
        assert torch.equal(value, usual[name]), name
