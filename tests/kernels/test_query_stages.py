"""dQ in stages and the carriers against the float64 reference, each within a budget of its own."""

import importlib.util
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch


def _cases():
    spec = importlib.util.spec_from_file_location(
        "bf16forensics_fused_cases", Path(__file__).with_name("fused_cases.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = _cases()

DOCUMENTS = torch.tensor([0] * 9 + [7] * 14 + [3] * 4)
PADDED = torch.arange(27) < 20
KEPT = torch.rand(1, 27, 27, generator=torch.Generator().manual_seed(5)) < 0.3
#: Calls of 27 queries (and 27 keys unless said otherwise).
CALLS = {
    "full": {"causal": False},
    "grouped": {"heads": 4, "groups": 2, "queries": 9},
    "more-keys": {"keys": 75},
    "more-queries": {"keys": 9},
    "window": {"window": 5, "queries": 9, "keys": 75},
    # The last row of the first block sees the first key of the second one.
    "two-sided": {"causal": False, "window": 2, "queries": 70, "keys": 70},
    "documents": {"document_ids": DOCUMENTS},
    "padding": {"causal": False, "key_padding": PADDED, "query_padding": PADDED},
    "keep": {"causal": False, "keep": KEPT},
    "odd-sizes": {"size": 5, "value_size": 9},
    "wide-sizes": {"size": 80, "value_size": 24},
}


def stages_of(case):
    from bf16forensics.kernels.flagged_rows import count_and_anchor
    from bf16forensics.kernels.query_stages import query_stages

    counts = count_and_anchor(case.inputs, case.constants, case.forward, o_err=None, with_keys=False)
    return query_stages(case.inputs, case.constants, case.forward, counts)


def check_stages(case, found):
    """Every stage within the sum of what its parts lose."""
    record, dual = case.record, case.dual
    scale = record.geometry.scale
    k, v = cases.keys_of_heads(record, record.k), cases.keys_of_heads(record, record.v)
    do = record.do.double()
    seen = case.raw > -torch.inf
    p = torch.where(seen, torch.exp(case.raw * scale - dual.lse_hp.nan_to_num(neginf=0.0)[..., None]), 0.0)
    p_lp = p
    if not case.constants.same_p:
        p_lp = p_of_recipe(case)
    dp = torch.matmul(do, v.transpose(1, 2))
    dp_terms = torch.matmul(do.abs(), v.abs().transpose(1, 2))
    products = torch.matmul(record.q.double().abs(), k.abs().transpose(1, 2))
    size_k = k.abs()
    # Relative errors of P: the last bits of q.k, 2^-23 of its terms on a matrix unit, and of the exponent. Of dP too.
    noise_p = (2.0**-21 + 2.0**-22 * (products * seen).amax(-1) * scale)[..., None]
    delta_terms = dual.delta.magnitude + dual.delta.delta_hp.abs()
    noise_dp = 2.0**-22 * (dp_terms + delta_terms[..., None])
    lost_p = lp_noise(case)

    def weighed(per_key):
        return scale * torch.matmul(per_key, size_k)

    def stage_budget(weight, delta, moved=0.0):
        ds = weight * (dp - delta[..., None]).abs()
        # Two BF16 terms leave 2^-17 of dS.
        return weighed(ds * (2.0**-17 + noise_p + moved) + weight * noise_dp)

    consistent = dual.delta.delta_lp - dual.delta.defect
    budgets = {
        "hp": stage_budget(p, dual.delta.delta_hp),
        "consistent": stage_budget(p_lp, consistent, lost_p)
        + scale
        * (p_lp * lost_p * (dp.abs() + consistent.abs()[..., None])).sum(-1)[..., None]
        * size_k.amax((1, 2)).amax(),
        "cast_ds": stage_budget(p_lp, dual.delta.delta_lp, lost_p),
        # One BF16 term: half a step of each weight.
        "carrier_hp": weighed(p * ((0.0 if case.inputs.ieee else 2.0**-8) + noise_p)),
        "carrier_lp": weighed(p_lp * ((0.0 if case.inputs.ieee else 2.0**-8) + noise_p + lost_p)),
    }
    shares = {}
    for name, budget in budgets.items():
        values, expected = getattr(found, name).cpu().double(), getattr(dual.dq, name)
        assert values.isfinite().all(), name
        error = (values - expected).abs()
        if name == "cast_ds" and case.constants.ds:
            # A dS near a halfway point may round the other way: one step of 2^-8, of one or two keys of a row.
            ds = p_lp * (dp - dual.delta.delta_lp[..., None]).abs()
            step = scale * 2.0**-7 * (ds[..., None] * size_k[:, None]).amax(-2)
            assert (error <= budget + step).all(), name
            # So many turn as the noise of P is of a step: with huge scores many do.
            turned = 0.05 + (noise_p / 2.0**-8).mean().item()
            assert (error > budget + 2.0**-20 * expected.abs()).double().mean() < turned, name
        else:
            assert (error <= budget).all(), (name, (error / budget).nan_to_num().max().item())
        shares[name] = (error / budget).nan_to_num().max().item()
    check_rounding(case, found)
    return shares


def p_of_recipe(case):
    """float64 P of the recipe's backward pass by its own scores."""
    from bf16forensics.attention.lp import backward_probabilities, forward_rows
    from bf16forensics.attention.scores import Block
    from bf16forensics.attention.tiles import plan_tiles

    queries, keys = case.raw.shape[1:]
    whole = Block(rows=(0, queries), keys=(0, keys), num_queries=queries, num_keys=keys)
    plan = plan_tiles(case.recipe, case.record.geometry, whole, case.record.q.shape[-1])
    v = cases.keys_of_heads(case.record, case.record.v).float()
    rows = forward_rows(case.scores, v, plan, case.recipe)
    return backward_probabilities(case.scores, rows, case.recipe).double()


def lp_noise(case):
    """[H, N, M] relative change of P_lp where a score, or S - m, is so near a halfway point that it may move."""
    recipe = case.recipe
    if case.constants.same_p:
        return torch.zeros(())
    noise = 2.0**-22 * torch.matmul(
        case.record.q.double().abs(), cases.keys_of_heads(case.record, case.record.k).abs().transpose(1, 2)
    )
    low, high = (stored_scores(case, case.raw + sign * noise) for sign in (-1, 1))
    moved = torch.where(case.raw > -torch.inf, (high - low).double() * case.scores.unit, 0.0)
    if recipe.shifted == "bf16" and recipe.p_source == "saved":
        top = case.scores.values.amax(-1, keepdim=True)
        ends = [cases.bf16(torch.where(case.raw > -torch.inf, s - top, 0.0)) for s in (low, high)]
        moved = moved + (ends[1] - ends[0]).double() * case.scores.unit
    return torch.expm1(moved)


def stored_scores(case, raw):
    if case.recipe.scores != "bf16":
        return raw.float()
    return cases.bf16(cases.bf16(raw.float()) * case.record.geometry.scale)


def check_rounding(case, found):
    """dQ is the stage before it, rounded; by tile it is the buffer of the reference but for a few last bits."""
    before, lp = found.cast_ds.cpu(), found.lp.cpu()
    if not case.constants.dq:
        assert torch.equal(before, lp)
    elif not case.constants.dq_by_tile:
        assert torch.equal(cases.bf16(before), lp)
    else:
        assert torch.equal(cases.bf16(lp), lp)
        expected = case.dual.dq.lp
        assert (lp.double() != expected).double().mean() < 0.05
        assert ((lp.double() - expected).abs() <= 2.0**-7 * case.dual.dq.cast_ds.abs().amax()).all()


RECIPES = [
    "fa2",
    "paper",
    "sdpa-math",
    "fa2+ds=fp32",
    "fa2+scores=bf16",
    "fa2+delta=bf16",
    # The rows of P_lp do not add up to 1.
    "fa2+row_sum=bf16",
    "sdpa-math+scores=bf16",
    "paper+p_source=saved,ds=bf16,dq=bf16",
    "fa2+shifted=bf16,p_source=saved",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_stages_are_those_of_the_reference(device, recipe):
    # Two blocks of keys, and for one recipe of rows too.
    case = cases.case_of(cases.drawn(1, heads=1, queries=70 if recipe == "fa2" else 30, keys=70), recipe, device)
    found = stages_of(case)
    shares = check_stages(case, found)
    # The budgets are not so wide that anything fits: one BF16 term in the place of two is over 100 times as much.
    assert case.inputs.ieee or shares["hp"] > 0.02
    assert shares["carrier_hp"] > 0.02


@pytest.mark.parametrize(
    ("recipe", "name"),
    [*(("fa2", name) for name in CALLS), ("paper", "documents"), ("paper", "keep"), ("paper", "window")],
)
def test_masks_and_shapes(device, recipe, name):
    case = cases.case_of(cases.drawn(2, **{"queries": 27, "heads": 1, **CALLS[name]}), recipe, device)
    found = stages_of(case)
    check_stages(case, found)


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math", "paper+p_source=saved"])
def test_saturated_heads(device, recipe):
    """Scores of +-100: dS at the top key is P (delta - dP), which an FP32 dP - delta has lost."""
    case = cases.case_of(cases.drawn(11, heads=1, queries=60, keys=70, value_size=48, sharpness=24.0), recipe, device)
    found = stages_of(case)
    check_stages(case, found)
    below = (case.raw - case.raw.amax(-1, keepdim=True)) * case.record.geometry.scale
    anchored = torch.exp(below).sum(-1) < 1 / (1 - 2.0**-8)
    assert 0.2 < anchored.double().mean() < 1.0
    # Far below the last bits of dP: the stage itself keeps its digits.
    expected = case.dual.dq.hp
    tiny = anchored & (expected.abs().amax(-1) < 1e-5) & (expected.abs().amax(-1) > 0)
    assert tiny.any()
    error = (found.hp.cpu().double() - expected)[tiny].abs().amax(-1)
    assert (error <= 1e-3 * expected[tiny].abs().amax(-1)).all()


def test_the_carrier_of_a_saturated_row_is_its_top_key_exactly(device):
    record = cases.drawn(12, heads=1, queries=5, causal=False)
    record.q[:] = 0.0
    record.q[..., 0] = 128.0
    record.k[..., 0] = 0.0
    record.k[0, 3, 0] = 128.0
    case = cases.case_of(record, "fa2", device)
    found = stages_of(case)
    # P of the others is 0 in FP32, and the scale 1/4 loses nothing.
    assert torch.equal(found.carrier_hp.cpu(), (0.25 * record.k[:, 3:4]).expand(1, 5, 16))
    assert not found.hp.any()
    assert not found.consistent.any()


@pytest.mark.parametrize("recipe", ["fa2+gradients_at=tile", "paper+gradients_at=tile,dq=bf16"])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_a_buffer_that_rounds_after_every_tile(device, recipe, order):
    """Tiles of 128 (fa2) and 512 keys, cut here to 24 and 40: neither is a multiple of a block."""
    recipe = cases.resolve(f"{recipe},tile_order={order}")
    size = 24 if recipe.name.startswith("fa2") else 40
    recipe = replace(recipe, tiles=tuple(replace(rule, tile_k=size) for rule in recipe.tiles))
    record = cases.drawn(13, heads=1, queries=20, keys=75)
    case = cases.case_of(record, recipe, device)
    found = stages_of(case)
    check_stages(case, found)
    # Many roundings are not one.
    assert not torch.equal(found.lp, cases.bf16(found.cast_ds.cpu()).to(device))


def test_tiles_of_small_integers_are_exact(device):
    """Uniform P over 16 keys and small integers: every sum is exact, so the buffer is the reference's bit by bit."""
    generator = torch.Generator().manual_seed(3)
    k = torch.randint(-4, 5, (1, 96, 16), generator=generator).float()
    v, do = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((1, 96, 16), (1, 8, 16)))
    keep = torch.zeros(1, 8, 96, dtype=torch.bool)
    for row in range(8):
        keep[0, row, torch.randperm(96, generator=generator)[:16]] = True
    record = cases.record_of(torch.zeros(1, 8, 16), k, v, do, causal=False, keep=keep, scale=0.25)
    recipe = cases.resolve("fa2+gradients_at=tile")
    recipe = replace(recipe, tiles=tuple(replace(rule, tile_k=24) for rule in recipe.tiles))
    case = cases.case_of(record, recipe, device)
    found = stages_of(case)
    for field in fields(found):
        assert torch.equal(getattr(found, field.name).cpu().double(), getattr(case.dual.dq, field.name)), field.name
    assert not torch.equal(found.lp, cases.bf16(found.cast_ds.cpu()).to(device))


@pytest.mark.parametrize("recipe", ["fa2", "paper"])
def test_ieee_products(device, recipe):
    record = replace(cases.drawn(14, heads=1, queries=40), storage="fp32")
    case = cases.case_of(record, recipe, device, ieee=True)
    assert case.inputs.ieee
    found = stages_of(case)
    check_stages(case, found)
    # Nothing was split: the error is that of FP32.
    size = case.dual.dq.hp.abs().amax()
    assert (found.hp.cpu().double() - case.dual.dq.hp).abs().amax() <= 2.0**-20 * size


def test_ties_and_huge_scores(device):
    record = cases.drawn(15, heads=1, queries=40, causal=False)
    record.q[..., 0], record.k[..., 0] = 128.0, cases.bf16(torch.tensor(22000.0 / 128.0))
    record.k[:, 20:] = record.k[:, :20]
    case = cases.case_of(record, "fa2", device)
    found = stages_of(case)
    check_stages(case, found)


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math"])
@pytest.mark.parametrize("sharpness", [1.0, 24.0], ids=["plain", "saturated"])
def test_after_the_fused_forward_pass(device, recipe, sharpness):
    """What the forward kernel leaves takes the place of what float64 does."""
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.fused_types import FusedWishes

    record = cases.drawn(19, heads=2, queries=20, keys=70, value_size=24, sharpness=sharpness)
    case = cases.case_of(record, recipe, device)
    case = replace(case, forward=dual_forward(case.inputs, case.constants, FusedWishes()))
    check_stages(case, stages_of(case))


def test_rows_that_see_nothing_are_zero(device):
    keep = torch.ones(1, 20, 20, dtype=torch.bool).tril()
    keep[0, 7], keep[0, 19] = False, False
    for recipe in ("fa2", "paper"):
        case = cases.case_of(cases.drawn(16, heads=1, queries=20, causal=False, keep=keep), recipe, device)
        found = stages_of(case)
        check_stages(case, found)
        for field in fields(found):
            assert not getattr(found, field.name)[:, [7, 19]].any()
            assert getattr(found, field.name)[:, 8].any()


def test_repeated_runs_are_equal_bit_by_bit(device):
    case = cases.case_of(cases.drawn(17, heads=1, queries=30, keys=70, sharpness=4.0), "paper", device)
    first, second = stages_of(case), stages_of(case)
    for field in fields(first):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name))


def test_without_do_there_is_nothing_to_stage(device):
    case = cases.case_of(replace(cases.drawn(18, queries=5), do=None), "fa2", device)
    with pytest.raises(ValueError, match="dO"):
        stages_of(case)
