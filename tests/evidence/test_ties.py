"""Tie statistics through the dual pass: the table of ties, residues and signs, and rows taken apart one by one."""

import math
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention import ties as attention_ties
from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.result import MOST_ONES, TieRows
from bf16forensics.attention.walk import walk_row
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import round_to
from bf16forensics.evidence.summary import summarise
from bf16forensics.evidence.tie_results import TieClass, TieStatistics
from bf16forensics.evidence.ties import CLASSES, TiePoint, TieSums, add_ties, row_ties, tie_point, tie_statistics
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.model import Recipe

#: Rows that add up values of their own, features of each, and small terms of a row.
ROWS, FEATURES, SMALL = 12 * 20, 64, 16


def synthetic(
    k: int, gaps: tuple[float, float] | None, *, sign: float = -1.0, mixed: bool = False, ratio: float = 1.0
) -> AttentionRecord:
    """Heads of 20 rows; each row has k keys at its maximum and 16 keys `gaps` nats below (None: far below) of its own.

    A key of another row lies 40 nats below and adds less than 2^-46 of the sum. |V| is normal, 2.2 +- 0.35; that of the
    small terms times `ratio`. The same draw for either sign.
    """
    heads, rows, own = 12, 20, k + SMALL
    generator = torch.Generator().manual_seed(1000 + k)
    keys = torch.zeros(heads, rows * own, rows)
    values = 2.2 + 0.35 * torch.randn(heads, rows * own, FEATURES, generator=generator)
    flips = torch.where(torch.rand(values.shape, generator=generator) < 0.5, -1.0, 1.0)
    low, high = gaps or (40.0, 40.0)
    for row in range(rows):
        first = row * own
        keys[:, first : first + k, row] = 40.0
        small = slice(first + k, first + own)
        keys[:, small, row] = 40.0 - low - (high - low) * torch.rand(heads, SMALL, generator=generator)
        values[:, small] *= ratio
    values = values.abs() * (flips if mixed else sign)
    return AttentionRecord(
        layer=0,
        sequence=0,
        step=None,
        storage="bf16",
        q=torch.eye(rows).expand(heads, rows, rows).contiguous(),
        k=round_to(keys, "bf16"),
        v=round_to(values, "bf16"),
        do=None,
        x=None,
        geometry=Geometry(scale=1.0, causal=False),
    )


def all_heads(sums: TieSums) -> TieSums:
    """The heads of a record as one."""
    return TieSums(**{field.name: getattr(sums, field.name).sum(0, keepdims=True) for field in fields(TieSums)})


def statistics_of(record: AttentionRecord, recipe: Recipe) -> TieStatistics:
    sums = summarise(record, dual_pass(record, recipe), recipe.o).ties
    assert sums is not None
    point = tie_point(recipe)
    assert point is not None
    found = tie_statistics(all_heads(sums), 0, point)
    assert found is not None
    return found


@cache
def measured(recipe: str, k: int, gaps: tuple[float, float] | None, **options: Any) -> TieClass:
    found = statistics_of(synthetic(k, gaps, **options), resolve(recipe))
    assert len(found.classes) == 1
    return found.classes[0]


POINT = TiePoint(point="o", format="bf16")
NEAR, FAR = (12.0, 16.0), (8.0, 14.0)


#: Mean error of one rounding of a sum as in `synthetic`, by NumPy and ml_dtypes alone over 400,000 draws (s.e. 0.0005):
#: by k and by the ratio of small to large values, of O-bar and of O. (For |V| uniform in one binade and hardly any
#: residue O-bar has 0.25, 0.146 and 0.0625.)
O_BAR = {(2, 1.0): 0.2121, (3, 1.0): 0.1676, (8, 1.0): 0.0346}
O = {(2, 1.0): -0.0102, (3, 1.0): 0.0058, (8, 1.0): 0.0002, (2, 0.25): -0.2137, (2, 4.0): 0.2079, (3, 4.0): 0.0352}


@pytest.mark.parametrize("recipe", ["fa2+o_bar=bf16", "paper"])
@pytest.mark.parametrize(("k", "expected"), [(k, expected) for (k, _), expected in O_BAR.items()])
def test_rounding_o_bar_takes_halves_away_from_zero(recipe: str, k: int, expected: float) -> None:
    """T3, n = 15,360 elements in 240 rows: standard error about 0.002, so 4 of them are 0.01."""
    found = measured(recipe, k, NEAR)
    assert (found.rows, found.groups, found.elements) == (ROWS, ROWS, ROWS * FEATURES)
    assert 0.001 < found.standard_error < 0.004
    assert abs(found.error_ulp_mean - expected) < 4 * found.standard_error + 0.002
    assert abs(found.z) < 4
    assert found.z_zero > 10
    assert found.same_sign_share == 1.0


@pytest.mark.parametrize("k", [2, 3, 8])
def test_the_sign_of_v_does_not_matter(k: int) -> None:
    """T0: every operation is symmetric, and "away from zero" is too."""
    assert measured("fa2+o_bar=bf16", k, NEAR, sign=1.0) == measured("fa2+o_bar=bf16", k, NEAR)


@pytest.mark.parametrize("recipe", ["fa2+o_bar=bf16", "paper", "fa2"])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_nothing_is_left_without_a_residue(recipe: str, k: int) -> None:
    found = measured(recipe, k, None)
    assert abs(found.z_zero) < 4
    assert found.law_ulp_mean == 0.0
    assert abs(found.error_ulp_mean) < 0.012


@pytest.mark.parametrize("k", [2, 3, 8])
def test_mixed_signs_cancel(k: int) -> None:
    found = measured("fa2+o_bar=bf16", k, NEAR, mixed=True)
    assert found.same_sign_share == pytest.approx(0.5, abs=0.05)
    assert abs(found.error_ulp_mean) < 0.012
    assert abs(found.z) < 4


@pytest.mark.parametrize("recipe", ["fa2+o_bar=bf16", "fa2", "eager"])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("gaps", [NEAR, FAR])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_law_says_what_is_measured(recipe: str, k: int, gaps: tuple[float, float], mixed: bool) -> None:
    """T3: within 4 standard errors of the difference, which are below 0.004 ulp."""
    found = measured(recipe, k, gaps, mixed=mixed)
    assert found.difference_standard_error < 0.004
    assert abs(found.z) < 4


@pytest.mark.parametrize(("k", "ratio", "expected"), [(*key, expected) for key, expected in O.items()])
def test_rounding_o_follows_the_ratio_of_small_to_large_values(k: int, ratio: float, expected: float) -> None:
    """T3, fa2: small terms add to the sum and to l alike. Equal values leave residues of either sign, little error."""
    found = measured("fa2", k, NEAR, ratio=ratio)
    assert abs(found.error_ulp_mean - expected) < 4 * found.standard_error + 0.002
    assert abs(found.z) < 4
    if ratio == 1.0:
        assert 0.25 < found.same_sign_share < 0.75
        assert abs(found.error_ulp_mean) < 0.02
    else:
        assert found.same_sign_share == pytest.approx(0.0 if ratio < 1 else 1.0, abs=0.01)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 9, MOST_ONES, MOST_ONES + 1, 80])
def test_rows_are_sorted_by_their_ones(k: int) -> None:
    record = synthetic(k, NEAR)
    sums = summarise(record, dual_pass(record, resolve("fa2")), "bf16").ties
    assert sums is not None
    expected = [ROWS if least <= k <= most else 0 for least, most in CLASSES]
    assert sums.rows.sum(0).tolist() == expected
    assert sums.beyond.sum() == (ROWS if k > MOST_ONES else 0)
    found = tie_statistics(sums, 0, POINT)
    assert (found is None) == (k == 1)
    if found is not None:
        assert found.rows_beyond == (20 if k > MOST_ONES else 0)
        assert len(found.classes) == (k <= MOST_ONES)


@pytest.mark.parametrize("recipe", ["fa4", "fa2+o=fp32", "sdpa-math+o=fp32"])
def test_recipes_without_tie_statistics(recipe: str) -> None:
    assert tie_point(resolve(recipe)) is None
    assert dual_pass(synthetic(2, NEAR), resolve(recipe)).ties is None


def crowded(seed: int = 0, **geometry: Any) -> AttentionRecord:
    """Two heads; keys come from a few directions, so that many rows have two ones and more, often the same ones."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(2, 20, 16, generator=generator)
    chosen = torch.randint(20, (2, 70), generator=generator)
    k = torch.gather(directions, 1, chosen[..., None].expand(-1, -1, 16))
    return AttentionRecord(
        layer=0,
        sequence=0,
        step=None,
        storage="bf16",
        q=round_to(torch.randn(2, 70, 16, generator=generator) * 6, "bf16"),
        k=round_to(k, "bf16"),
        v=round_to(torch.randn(2, 70, 24, generator=generator), "bf16"),
        do=None,
        x=None,
        geometry=Geometry(scale=0.25, **geometry),
    )


@pytest.mark.parametrize(
    "recipe",
    ["fa2", "fa2+o_bar=bf16", "paper", "eager", "sdpa-math", "fa3-fp8", "fa3-fp8+o_bar=bf16", "eager+o_bar=bf16"],
)
def test_every_row_is_what_its_walk_says(recipe: str) -> None:
    """T2: the walk's float64 sums against FP32 ones; where they round alike, all terms agree."""
    record, chosen = crowded(), resolve(recipe)
    ties = dual_pass(record, chosen).ties
    assert ties is not None
    compared = 0
    for head in range(2):
        one = replace(record, **{name: getattr(record, name)[head : head + 1] for name in ("q", "k", "v")})
        for token in np.flatnonzero(ties.ones[head].numpy())[::2]:
            found = row_ties(walk_row(one, chosen, int(token)))
            assert found is not None
            assert found.ones == ties.ones[head, token]
            # An FP32 sum may lie on the other side of a half, or of a power of two: such rows are left out.
            if abs(sum(found.error_ulp) - ties.error[head, token]) > 0.02:
                continue
            compared += 2
            bits = np.minimum(found.bits_dropped, 3)[np.isfinite(found.error_ulp)]
            np.testing.assert_array_equal(np.bincount(bits, minlength=4), ties.dropped[head, token].numpy())
            assert found.tie_share * len(bits) == pytest.approx(float(ties.halfway[head, token]))
            residue = np.clip(found.residue_ulp, -1, 1).sum()
            assert residue == pytest.approx(float(ties.residue[head, token]), abs=0.02)
    several = int((ties.ones > 0).sum())
    assert several > 40
    assert compared >= 0.9 * several


def test_rows_with_the_same_keys_are_one_group() -> None:
    record = crowded()
    dual = dual_pass(record, resolve("fa2"))
    sums = summarise(record, dual, "bf16").ties
    assert sums is not None
    for head in range(2):
        one = replace(record, **{name: getattr(record, name)[head : head + 1] for name in ("q", "k", "v")})
        sets: dict[int, list[tuple[int, ...]]] = {}
        for token in range(70):
            walk = walk_row(one, resolve("fa2"), token)
            keys = tuple(sorted(walk.keys[walk.is_one].tolist()))
            sets.setdefault(len(keys), []).append(keys)
        for number, (least, most) in enumerate(CLASSES):
            own = [keys for k, found in sets.items() if least <= k <= most for keys in found]
            assert sums.rows[head, number] == len(own)
            assert sums.groups[head, number] == len(set(own))


@pytest.mark.parametrize("recipe", ["fa2", "paper", "eager"])
@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_how_many_rows_are_taken_apart_at_once_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, recipe: str, rows_at_once: int
) -> None:
    """T0: one head with rows of all kinds; one where each row has one more, up to more than any class holds."""
    record = crowded()
    key = record.k.clone()
    key[1] = key[1, :1]
    record = replace(record, k=key)
    whole = dual_pass(record, resolve(recipe))
    monkeypatch.setattr(attention_ties, "_ELEMENTS", rows_at_once * record.v.shape[-1])
    parts = dual_pass(record, resolve(recipe))
    assert whole.ties is not None
    assert parts.ties is not None
    assert whole.ties.ones[0].unique().numel() > 4
    assert whole.maxima.ones_rounded[1].tolist() == list(range(1, 71))
    assert whole.ties.ones[1].tolist() == [0, *range(2, MOST_ONES + 1), *[0] * (70 - MOST_ONES)]
    for field in fields(TieRows):
        assert torch.equal(getattr(parts.ties, field.name), getattr(whole.ties, field.name))


def test_padding_takes_no_part() -> None:
    record = crowded(query_padding=torch.arange(70) < 50)
    whole = crowded()
    recipe = resolve("fa2")
    sums = summarise(record, dual_pass(record, recipe), "bf16").ties
    before = summarise(whole, dual_pass(whole, recipe), "bf16")
    assert sums is not None
    assert before.ties is not None
    ones = dual_pass(whole, recipe).maxima.ones_rounded[:, :50]
    assert sums.rows.sum() == int((ones > 1).sum())
    assert sums.rows.sum() < before.ties.rows.sum()


def test_sequences_add_up() -> None:
    """The sums of two sequences are those of their rows; a group belongs to one sequence."""
    recipe = resolve("fa2+o_bar=bf16")
    parts = []
    for seed in (0, 1):
        record = crowded(seed)
        found = summarise(record, dual_pass(record, recipe), "bf16").ties
        assert found is not None
        parts.append(found)
    both = add_ties(*parts)
    for field in fields(TieSums):
        one, other = (getattr(part, field.name) for part in parts)
        np.testing.assert_array_equal(getattr(both, field.name), one + other)
    found = tie_statistics(both, 0, TiePoint(point="o_bar", format="bf16"))
    assert found is not None
    assert (found.point, found.format) == ("o_bar", "bf16")
    rows = parts[0].rows[0, 0] + parts[1].rows[0, 0]
    assert found.classes[0].rows == rows


def test_standard_errors_are_those_of_group_means() -> None:
    """With one row a group and all elements defined: the scatter of row means over the root of their number."""
    record = synthetic(2, NEAR)
    recipe = resolve("fa2+o_bar=bf16")
    ties = dual_pass(record, recipe).ties
    assert ties is not None
    means = ties.error.numpy().ravel() / FEATURES
    differences = means - ties.law.numpy().ravel() / FEATURES
    found = measured("fa2+o_bar=bf16", 2, NEAR)
    assert found.standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(ROWS))
    assert found.difference_standard_error == pytest.approx(differences.std(ddof=1) / math.sqrt(ROWS))
    assert found.z == pytest.approx(differences.mean() / found.difference_standard_error)
    assert found.z_zero == pytest.approx(means.mean() / found.standard_error)


@pytest.mark.parametrize("rows", [1, 9, 10, 20])
def test_few_groups_have_no_standard_error(rows: int) -> None:
    record = synthetic(2, NEAR)
    first = replace(record, q=record.q[:1, :rows], k=record.k[:1], v=record.v[:1])
    found = statistics_of(first, resolve("fa2")).classes[0]
    assert (found.rows, found.groups) == (rows, rows)
    assert math.isfinite(found.error_ulp_mean)
    for value in (found.standard_error, found.difference_standard_error, found.z, found.z_zero):
        assert math.isfinite(value) == (rows >= 10)


def test_one_large_group_among_many_counts_as_few() -> None:
    """Twelve groups, one of 40 rows: 51 rows are worth (51)^2 / (40^2 + 11), less than two, of them."""
    record = synthetic(2, NEAR)
    q = torch.cat([record.q[:1, :1].expand(-1, 40, -1), record.q[:1, 1:12]], 1)
    found = statistics_of(replace(record, q=q, k=record.k[:1], v=record.v[:1]), resolve("fa2")).classes[0]
    assert (found.rows, found.groups) == (51, 12)
    assert math.isnan(found.standard_error)


def test_one_large_value_is_rounded_towards_zero() -> None:
    """k = 1: the residue is what is lost."""
    record = synthetic(1, FAR)
    one = replace(record, q=record.q[:1], k=record.k[:1], v=record.v[:1])
    found = [row_ties(walk_row(one, resolve("fa2+o_bar=bf16"), token)) for token in range(20)]
    for row in found:
        assert row is not None
        assert row.ones == 1
        assert set(row.bits_dropped) == {0}
        assert row.same_sign_share == 1.0
        small = [index for index, residue in enumerate(row.residue_ulp) if abs(residue) < 0.5]
        assert [row.error_ulp[index] for index in small] == pytest.approx([-row.residue_ulp[index] for index in small])
    assert sum(row.mean_error_ulp for row in found if row is not None) / 20 < -0.02


def test_a_walk_without_ones_has_no_ties() -> None:
    record = synthetic(2, NEAR)
    one = replace(record, q=record.q[:1], k=record.k[:1], v=record.v[:1])
    assert row_ties(walk_row(one, resolve("fa4"), 3)) is None
    assert row_ties(walk_row(one, resolve("fa2+o=fp32"), 3)) is None


def test_what_is_not_finite_leaves_the_other_features() -> None:
    record = synthetic(2, NEAR)
    one = replace(record, q=record.q[:1], k=record.k[:1], v=record.v[:1].clone())
    one.v[0, 0, 5] = math.inf
    found = row_ties(walk_row(one, resolve("fa2"), 0))
    assert found is not None
    assert [index for index, error in enumerate(found.error_ulp) if math.isnan(error)] == [5]
    assert math.isfinite(found.mean_error_ulp)
