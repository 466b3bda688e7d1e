"""Counts at the maximum and rows anchored at their top key, against the float64 reference."""

import importlib.util
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bf16forensics.attention.exponential import exponential
from bf16forensics.attention.scores import lp_scores
from bf16forensics.attention.steps import finite_anchor
from bf16forensics.geometry.geometry import Geometry


def _cases():
    spec = importlib.util.spec_from_file_location(
        "bf16forensics_fused_cases", Path(__file__).with_name("fused_cases.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = _cases()

COUNTS = ("ones_fp32", "ones_rounded", "near", "shared")
#: Nats by which a score may differ from the reference's; two of them move a gap by 4e-5.
SCORE_NOISE = 2e-5
RECIPES = ["fa2", "paper", "sdpa-math", "fa2+scores=bf16", "paper+p_source=saved", "fa2+shifted=bf16,p_source=saved"]
DOCUMENTS = torch.tensor([0] * 13 + [7] * 20 + [3] * 4)
PADDED = torch.arange(37) < 30
KEPT = torch.rand(1, 37, 37, generator=torch.Generator().manual_seed(5)) < 0.3
#: Calls of 37 queries (and 37 keys unless said otherwise).
CALLS = {
    "causal": {},
    "full": {"causal": False},
    "grouped": {"heads": 4, "groups": 2, "queries": 11},
    "more-keys": {"keys": 75},
    "more-queries": {"keys": 9},
    "window": {"window": 5, "queries": 9, "keys": 75},
    "two-sided": {"causal": False, "window": 4},
    "documents": {"document_ids": DOCUMENTS},
    "padding": {"causal": False, "key_padding": PADDED, "query_padding": PADDED},
    "keep": {"causal": False, "keep": KEPT},
    "odd-sizes": {"size": 5, "value_size": 9},
}


def count(case, *, with_keys=False, o_err=None):
    from bf16forensics.kernels.flagged_rows import count_and_anchor

    return count_and_anchor(case.inputs, case.constants, case.forward, o_err=o_err, with_keys=with_keys)


def hp_error(case):
    return case.forward.o_lp.float() - case.forward.o_hp


def count_bounds(case):
    """Smallest and largest counts that scores off by `SCORE_NOISE` nats may give, {name: (low, high)} each [H, N].

    All steps from a product to P-bar keep the order, so their ends bound everything between.
    """
    record, recipe = case.record, case.recipe
    seen = (case.raw.amax(-1) > -torch.inf).long()
    noise = SCORE_NOISE / record.geometry.scale
    bounds = {"shared": _bounds(seen, case.raw >= case.raw.amax(-1, keepdim=True) - 2 * noise, case.raw)}
    low, high = (_scores(case, case.raw + sign * noise) for sign in (-1, 1))
    low_max, high_max = (finite_anchor(scores.amax(-1)) for scores in (low, high))
    unit = case.scores.unit
    p_low, p_high = exponential(low, high_max, unit, recipe), exponential(high, low_max, unit, recipe)
    for name, limit in (("ones_fp32", 1.0), ("ones_rounded", 1 - 2.0**-9)):
        bounds[name] = _between(seen, p_low >= limit, p_high >= limit)
    gap_low, gap_high = (low_max[..., None] - high) * unit, (high_max[..., None] - low) * unit
    bounds["near"] = _between(seen, gap_high <= 1e-3, gap_low <= 1e-3)
    return bounds


def _bounds(seen, possible, raw):
    return _between(seen, torch.zeros_like(possible), possible & (raw > -torch.inf))


def _between(seen, certain, possible):
    return torch.maximum(certain.sum(-1), seen), possible.sum(-1)


def _scores(case, raw):
    """The recipe's scores from raw products."""
    # A query that picks one key's product: everything after the product is the recipe's own code.
    heads, queries, keys = raw.shape
    recipe, scale = case.recipe, case.record.geometry.scale
    if recipe.scale_placement == "operands":
        recipe, raw = replace(recipe, scale_placement="scores"), raw
    geometry = Geometry(scale=scale, causal=False)
    block = cases.Block(rows=(0, 1), keys=(0, keys), num_queries=1, num_keys=keys)
    flat = raw.float().reshape(-1, 1, 1).nan_to_num(neginf=0.0)
    scores = lp_scores(torch.ones(1, 1, 1), flat.reshape(1, -1, 1), geometry, recipe, block, None).values
    return scores.reshape(heads, queries, keys).masked_fill(raw == -torch.inf, -torch.inf)


def check_counts(case, found):
    """Every count lies within what the noise allows; returns the share of counts that noise could not move."""
    certain = []
    for name, (low, high) in count_bounds(case).items():
        values, expected = getattr(found, name).cpu().long(), getattr(case.dual.maxima, name)
        assert ((low <= expected) & (expected <= high)).all(), f"the bounds of {name} do not hold the reference"
        off = ((values < low) | (values > high)).nonzero()
        assert not len(off), f"{name} at {off[:5].tolist()}"
        assert torch.equal(values[low == high], expected[low == high])
        certain.append((low == high).double().mean().item())
    return min(certain)


@pytest.mark.parametrize(
    ("recipe", "sharpness"), [*((recipe, 0.05) for recipe in RECIPES), ("fa2", 1.0), ("paper", 1.0)]
)
def test_counts_are_those_of_the_reference(device, recipe, sharpness):
    # Two blocks of keys, and for one recipe of rows too.
    queries = 90 if recipe == "fa2" else 60
    case = cases.case_of(cases.drawn(1, heads=1, queries=queries, keys=90, sharpness=sharpness), recipe, device)
    found = count(case)
    # Flat rows have near-maxima everywhere.
    assert (case.forward.candidates > 1).float().mean() > (0.1 if sharpness < 1 else 0.0)
    assert check_counts(case, found) > 0.9


@pytest.mark.parametrize(
    ("recipe", "name"),
    [*(("fa2", name) for name in CALLS), ("paper", "documents"), ("paper", "keep"), ("paper", "window")],
)
def test_masks_and_shapes(device, recipe, name):
    call = {"queries": 37, **CALLS[name]}
    case = cases.case_of(cases.drawn(2, sharpness=0.1, **call), recipe, device)
    o_err = hp_error(case)
    found = count(case, with_keys=True, o_err=o_err)
    assert check_counts(case, found) > 0.9
    check_keys(case, found)
    check_anchored(case, found, o_err)


#: Row 63 is the last one of a block of rows, and sees one or two keys of the second block of keys.
BORDERS = {
    "causal": {"keys": 71},
    "window": {"keys": 71, "window": 2},
    "two-sided": {"keys": 70, "causal": False, "window": 2},
    "full": {"keys": 65, "causal": False},
}


@pytest.mark.parametrize("call", BORDERS.values(), ids=BORDERS.keys())
def test_where_all_keys_are_equal_the_visible_ones_are_counted(device, call):
    """Every row is looked at, and a key more or less at the border of a block is seen."""
    record = cases.drawn(18, heads=1, queries=70, **call)
    # Small integers: their products are exact, whatever a library does at the end of a matrix.
    record.q.round_()
    record.k[:] = record.k[:, :1].round()
    case = cases.case_of(record, "fa2", device)
    found = count(case)
    for name in COUNTS:
        assert torch.equal(getattr(found, name).cpu().long(), case.dual.maxima.visible), name


def ones_of(case):
    """bool [H, N, M]: P-bar that rounds to 1 in the reference."""
    anchor = finite_anchor(case.scores.values.amax(-1))
    return exponential(case.scores.values, anchor, case.scores.unit, case.recipe) >= 1 - 2.0**-9


def check_keys(case, found):
    low, high = count_bounds(case)["ones_rounded"]
    ones, listed = ones_of(case), found.ones_keys.cpu()
    for head, row in (low == high).nonzero().tolist():
        keys = ones[head, row].nonzero()[:, 0].tolist()
        expected = keys if 2 <= len(keys) <= 64 else []
        assert listed[head, row].tolist() == expected + [-1] * (64 - len(expected))


TIES = [1, 2, 3, 63, 64, 65, 130]


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math"])
def test_equal_keys_are_counted_and_listed_exactly(device, recipe):
    """Products of small integers are exact in FP32, and so are their scores: nothing may differ at all."""
    generator = torch.Generator().manual_seed(3)
    # Query i has its maximum at the keys of group i, as many as it is to have ones.
    group = torch.repeat_interleave(torch.arange(len(TIES)), torch.tensor(TIES))
    group = group[torch.randperm(len(group), generator=generator)]
    k = 16 * torch.nn.functional.one_hot(group, 16).float()[None]
    q = torch.randint(-2, 3, (1, len(TIES), 16), generator=generator).float()
    q[0, :, : len(TIES)] = q[0, :, : len(TIES)].fill_diagonal_(8.0)
    record = cases.record_of(q, k, cases.draw(4, 1, len(group), 16), None, causal=False, scale=0.25)
    case = cases.case_of(record, recipe, device)
    found = count(case, with_keys=True)
    for name in COUNTS:
        assert torch.equal(getattr(found, name).cpu().long(), getattr(case.dual.maxima, name)), name
        assert getattr(found, name).tolist() == [TIES]
    listed = found.ones_keys.cpu()
    for row, number in enumerate(TIES):
        keys = (group == row).nonzero()[:, 0].tolist() if 2 <= number <= 64 else []
        assert listed[0, row].tolist() == keys + [-1] * (64 - len(keys))
    # Two equal maxima share the probability, so there is no top key to be anchored at.
    assert found.top.tolist() == [[(group == 0).nonzero().item()] + [-1] * (len(TIES) - 1)]


def gaps_record(gaps, scale):
    """One query whose raw product with key j is 128 - gaps[j]; the gaps are integers up to 127."""
    k = torch.zeros(1, len(gaps), 16)
    k[0, :, 0] = 128.0 - torch.tensor(gaps)
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0] = 1.0
    return cases.record_of(q, k, cases.draw(6, 1, len(gaps), 16), None, causal=False, scale=scale)


@pytest.mark.parametrize("ulps", range(-2, 3))
def test_keys_within_two_ulp_of_the_near_gap(device, ulps):
    # The gap of 8 steps is 1e-3 nats but for some last bits of FP32, in which it is compared.
    scale = np.float32(1e-3) / np.float32(8)
    for _ in range(abs(ulps)):
        scale = np.nextafter(scale, np.float32(np.sign(ulps)), dtype=np.float32)
    gaps = [0, 7, 8, 8, 9, 40]
    found = count(cases.case_of(gaps_record(gaps, float(scale)), "fa2", device))
    expected = sum(np.float32(gap) * scale <= np.float32(1e-3) for gap in gaps)
    assert expected == (4 if ulps <= 0 else 2)
    assert found.near.tolist() == [[expected]]
    assert found.shared.tolist() == [[1]]


@pytest.mark.parametrize("recipe", ["fa2", "fa2+exponential=exp"])
def test_keys_within_a_few_ulp_of_rounding_to_one(device, recipe):
    """P-bar = 1 - 2^-9 rounds to 1; the exponential of a GPU may err by 2^-22."""
    threshold = -np.log1p(-(2.0**-9))
    # S c and m c are below 128 scale log2(e) = 0.03: their last bits are 2^-30, far less than an ulp of P-bar.
    for ulps in (-12, -6, 6, 12):
        scale = (threshold - ulps * 2.0**-24) / 16
        found = count(cases.case_of(gaps_record([0, 15, 16, 16, 17], scale), recipe, device))
        assert found.ones_rounded.tolist() == [[4 if ulps > 0 else 2]], ulps
        assert found.ones_fp32.tolist() == [[1]]


@pytest.mark.parametrize("recipe", ["paper", "fa2+scores=bf16"])
def test_bf16_scores_have_hundreds_of_ones(device, recipe):
    generator = torch.Generator().manual_seed(7)
    q = cases.bf16(0.05 * torch.randn(1, 20, 16, generator=generator))
    k = cases.bf16(0.05 * torch.randn(1, 400, 16, generator=generator))
    # All scores lie near 40, where BF16 has steps of 1/4.
    q[..., 0], k[..., 0] = 16.0, 10.0
    record = cases.record_of(q, k, cases.draw(8, 1, 400, 16), cases.draw(9, 1, 20, 16), causal=False, scale=0.25)
    case = cases.case_of(record, recipe, device)
    found = count(case, with_keys=True)
    assert case.dual.maxima.ones_rounded.min() > 100
    assert check_counts(case, found) > 0.5
    assert (found.ones_keys == -1).all()


@pytest.mark.parametrize(("recipe", "size"), [("fa2", 22000.0), ("paper", -22000.0), ("sdpa-math", -22000.0)])
def test_huge_scores(device, recipe, size):
    """Raw products of +-22,000: what they lose in FP32 is 2^-24 of them, times the scale."""
    record = cases.drawn(10, queries=40, causal=False)
    record.q[..., 0], record.k[..., 0] = 128.0, cases.bf16(torch.tensor(size / 128.0))
    case = cases.case_of(record, recipe, device)
    o_err = hp_error(case)
    found = count(case, o_err=o_err)
    for name, (low, high) in count_bounds(case).items():
        values = getattr(found, name).cpu().long()
        # 22,000 * 2^-24 / 4 in nats is 3e-4: two keys that close are nobody's to tell apart.
        assert (values >= 1).all()
        assert (values <= high + 2).all()
        assert (values >= low - 2).all()
    check_anchored(case, found, o_err)


# -- anchored rows -----------------------------------------------------------------------------------------------------


def others(case):
    """float64 [H, N]: l', the weight of all keys but the top one, relative to it."""
    largest, top = case.raw.max(-1, keepdim=True)
    weight = torch.exp((case.raw - largest.nan_to_num(neginf=0.0)) * case.record.geometry.scale)
    return weight.scatter(-1, top, 0.0).sum(-1)


def check_anchored(case, found, o_err):
    """Every field of the anchored rows within a budget of its own, and the other rows as they were."""
    dual, record, forward = case.dual, case.record, case.forward
    top = found.top.cpu().long()
    rest = others(case)
    p_top = 1 / (1 + rest)
    anchored = top >= 0
    clear = (p_top - (1 - 2.0**-8)).abs() > 1e-6
    seen = case.raw.amax(-1) > -torch.inf
    assert torch.equal((anchored & clear), (p_top > 1 - 2.0**-8) & seen & clear)
    assert torch.equal(top[anchored], case.raw.argmax(-1)[anchored])
    heads = torch.arange(record.num_heads)[:, None].expand_as(top)
    v = cases.keys_of_heads(record, record.v)
    v_top = v[heads, top.clamp(min=0)] * anchored[..., None]
    largest = v.abs().amax()
    # Two BF16 terms leave 2^-17 of p; exp of an FP32 product q.k errs by the product's last bits, 2^-23 of its terms
    # here, and a block's sum on the matrix unit by 2^-20.
    products = (record.q.double().abs()[:, :, None] * cases.keys_of_heads(record, record.k).abs()[:, None]).sum(-1)
    noise = 2.0**-16 + 2.0**-22 * products.amax(-1) * record.geometry.scale
    budget = (2 * largest * rest * noise)[..., None] * anchored[..., None]
    step = 2.0**-23
    o_hp, o_error = forward.o_hp.cpu().double(), o_err.cpu().double()
    assert ((o_hp - dual.o_hp).abs()[anchored] <= (budget + step * dual.o_hp.abs())[anchored]).all()
    assert ((o_error - dual.o_err).abs()[anchored] <= (budget + step * dual.o_err.abs())[anchored]).all()
    assert torch.equal(found.swamped.cpu(), dual.maxima.swamped & anchored)
    if dual.delta is None:
        return
    do = record.do.double()
    features = do.shape[-1]
    fp32_sum = features * 2.0**-24
    # The last term is what float64 leaves of the expected values.
    delta_budget = (do.abs() * (budget + 2.0**-50 * largest)).sum(-1)
    size_top = (do * v_top).abs().sum(-1)
    dp_top = (do * v_top).sum(-1)
    delta, columns = dual.delta, {name: getattr(found, name).cpu().double() for name in OFFSETS}
    assert ((columns["dp_top"] - dp_top).abs() <= fp32_sum * size_top).all()
    # Not O_hp - v_top: even float64 has lost digits of it.
    o_minus_top = (dual.o_lp - v_top) - dual.o_err
    size_hp = (do * o_minus_top).abs().sum(-1)
    hp_offset = (do * o_minus_top).sum(-1) * anchored
    assert ((columns["hp_offset"] - hp_offset).abs() <= (delta_budget + fp32_sum * size_hp) * anchored).all()
    # P of a recipe with BF16 scores is one of its own: its other keys may weigh more.
    own = delta.delta_lp - delta.defect - dp_top
    own_budget = 2 * delta_budget + (2.0**-20 + noise) * (own.abs() + size_hp) + own_noise(case, anchored)
    assert ((columns["consistent_offset"] - own * anchored).abs() <= own_budget * anchored).all()
    size_error = (do * (dual.o_lp - v_top)).abs().sum(-1) + size_hp
    # An FP32 delta and its terms round in the reference, which is not part of the kernel's difference.
    lost = 2.0**-24 * (delta.delta_lp.abs() + delta.magnitude)
    if not is_plain(case.recipe):
        lost = fp32_sum * (size_top + delta.magnitude)
    error_budget = delta_budget + fp32_sum * size_error + lost
    error = forward.delta_err.cpu().double()
    assert ((error - delta.delta_err).abs() <= error_budget)[anchored].all()
    delta_hp = forward.delta_hp.cpu().double()
    assert ((delta_hp - delta.delta_hp).abs() <= delta_budget + fp32_sum * (size_top + size_hp))[anchored].all()
    consistent = forward.delta_consistent.cpu().double()
    limit = own_budget + fp32_sum * (size_top + own.abs())
    assert ((consistent - (delta.delta_lp - delta.defect)).abs() <= limit)[anchored].all()


OFFSETS = ("dp_top", "hp_offset", "consistent_offset")


def is_plain(recipe):
    return (recipe.delta_source, recipe.delta_products, recipe.delta) == ("o", "fp32", "fp32")


def own_noise(case, anchored):
    """What one BF16 step of a score does to rowsum(P dP): a score near a halfway point may round either way."""
    if case.recipe.scores == "fp32":
        return torch.zeros(anchored.shape, dtype=torch.float64)
    record = case.record
    low, high = (_scores(case, case.raw + sign * SCORE_NOISE / record.geometry.scale) for sign in (-1, 1))
    moved = torch.where(case.raw > -torch.inf, high - low, 0.0).double() * case.scores.unit
    p = torch.exp(case.scores.values.double() * case.scores.unit - case.dual.lse_lp.nan_to_num(neginf=0.0)[..., None])
    dp = torch.matmul(record.do.double(), cases.keys_of_heads(record, record.v).transpose(1, 2)).abs()
    return (p * (torch.exp(moved) - 1) * (dp + dp.amax(-1, keepdim=True))).sum(-1)


@pytest.mark.parametrize(
    "recipe",
    [*RECIPES, "fa2+delta=bf16", "fa2+delta_products=bf16", "fa2+delta_source=dp", "fa2+o=fp32", "fa2+row_sum=bf16"],
)
def test_saturated_heads(device, recipe):
    """Scores of +-100: O is the top key's value but for digits that an FP32 sum of O does not have."""
    record = cases.drawn(11, heads=1, queries=60, keys=70, sharpness=24.0)
    case = cases.case_of(record, recipe, device)
    before = cases.copied(case.forward)
    o_err = hp_error(case)
    naive = o_err.clone()
    found = count(case, o_err=o_err)
    anchored = (found.top >= 0).cpu()
    assert 0.2 < anchored.double().mean() < 1.0
    assert case.dual.maxima.swamped[anchored].any() or case.recipe.o == "fp32"
    check_anchored(case, found, o_err)
    for field in fields(before):
        old, new = getattr(before, field.name), getattr(case.forward, field.name)
        if old is not None:
            assert torch.equal(old[~anchored], new[~anchored]), field.name
    # A difference of two FP32 outputs has lost what is asked for: the anchored one has not.
    saturated = anchored & (others(case) < 1e-5) & (others(case) > 0)
    assert saturated.any()
    lost, kept = ((e.cpu().double() - case.dual.o_err)[saturated].abs() for e in (naive, o_err))
    assert kept.mean() < 0.02 * lost.mean()


def test_the_first_of_the_keys_at_the_top_is_anchored_at(device):
    record = cases.drawn(12, heads=1, queries=5, causal=False)
    record.q[:], record.k[:] = 0.0, 0.0
    record.q[..., 0] = 8.0
    record.k[0, 3, 0] = 16.0
    case = cases.case_of(record, "fa2", device)
    o_err = hp_error(case)
    found = count(case, o_err=o_err)
    assert found.top.tolist() == [[3] * 5]
    check_anchored(case, found, o_err)


@pytest.mark.parametrize(
    ("features", "others", "swamped"), [(10, 0, True), (10, 1, False), (20, 1, True), (20, 2, False)]
)
def test_over_nine_tenths_of_the_features_are_swamped(device, features, others, swamped):
    case = cases.case_of(cases.drawn(19, heads=1, queries=3, value_size=features, window=1), "fa2", device)
    o_lp = case.inputs.v.to(case.forward.o_lp.dtype).clone()
    o_lp[..., :others] += 1.0
    assert count(replace(case, forward=replace(case.forward, o_lp=o_lp))).swamped.tolist() == [[swamped] * 3]


def test_rows_that_see_nothing_count_nothing(device):
    keep = torch.ones(1, 20, 20, dtype=torch.bool).tril()
    keep[0, 7], keep[0, 19] = False, False
    case = cases.case_of(cases.drawn(13, queries=20, causal=False, keep=keep, sharpness=0.05), "fa2", device)
    before = cases.copied(case.forward)
    found = count(case, with_keys=True)
    for row in (7, 19):
        assert all(not getattr(found, name)[:, row].any() for name in (*COUNTS, *OFFSETS, "swamped"))
        assert (found.top[:, row] == -1).all()
        assert (found.ones_keys[:, row] == -1).all()
        assert torch.equal(before.o_hp[:, row], case.forward.o_hp[:, row])
    assert all((getattr(found, name)[:, 8] >= 1).all() for name in COUNTS)


def test_without_do_and_without_an_error_of_o(device):
    record = replace(cases.drawn(14, queries=30, sharpness=12.0), do=None)
    case = cases.case_of(record, "paper", device)
    found = count(case)
    assert (found.top >= 0).any()
    assert not found.dp_top.any()
    assert found.ones_keys is None
    check_anchored(case, found, case.forward.o_lp.float() * 0 + case.dual.o_err.float().to(device))


def test_rows_without_candidates_are_not_looked_at(device):
    """Where no row is flagged, nothing but the launch remains: wrong operands then go unnoticed."""
    case = cases.case_of(cases.drawn(15, heads=1, queries=20), "fa2", device)
    forward = replace(
        case.forward,
        candidates=torch.ones_like(case.forward.candidates),
        row_sum_hp=torch.full_like(case.forward.row_sum_hp, 2.0),
    )
    broken = replace(case, forward=forward, inputs=replace(case.inputs, q=torch.full_like(case.inputs.q, torch.nan)))
    found = count(broken, with_keys=True)
    assert all((getattr(found, name) == 1).all() for name in COUNTS)
    assert (found.top == -1).all()


def test_repeated_runs_are_equal_bit_by_bit(device):
    runs = []
    for _ in range(2):
        case = cases.case_of(cases.drawn(16, heads=1, queries=30, keys=70, sharpness=4.0), "paper", device)
        o_err = hp_error(case)
        found = count(case, with_keys=True, o_err=o_err)
        runs.append([*(getattr(found, field.name) for field in fields(found)), case.forward.o_hp, o_err])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_calls(device, shape):
    heads, queries, keys = shape
    full = cases.case_of(cases.drawn(17, heads=2, queries=4), "fa2", device)
    inputs = replace(
        full.inputs,
        q=full.inputs.q[:heads, :queries].contiguous(),
        do=full.inputs.do[:heads, :queries].contiguous(),
        k=full.inputs.k[:heads, :keys].contiguous(),
        v=full.inputs.v[:heads, :keys].contiguous(),
    )
    rows = {
        field.name: None if (values := getattr(full.forward, field.name)) is None else values[:heads, :queries] * 0
        for field in fields(full.forward)
    }
    case = replace(full, inputs=inputs, forward=replace(full.forward, **rows))
    found = count(case, with_keys=True)
    assert found.ones_fp32.shape == (heads, queries)
    assert not found.ones_fp32.any()
