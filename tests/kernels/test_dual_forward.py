"""The fused forward pass against the float64 reference, and its own promises: bits, odd shapes, huge numbers.

Tolerances (T2) come from `_budget`: what FP32 sums in another order can do to a score, and what that does to P.
"""

import math
from dataclasses import fields, replace

import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.fused_inputs import fused_inputs
from bf16forensics.attention.fused_recipe import fused_recipe
from bf16forensics.attention.tiles import has_edge
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

#: Unit roundoffs.
FP32 = 2.0**-24
BF16 = 2.0**-8
#: Flips of presets, each of which takes another way through the kernels or another rounding in them.
RECIPES = [
    "fa2",
    "fa3",
    "paper",
    "paper+tile_k=4096",
    "sdpa-math",
    "fa2+p_bar=fp32",
    "fa2+o=fp32",
    "fa2+row_sum=bf16",
    "fa2+row_sum_input=bf16",
    "fa2+lse=bf16,division=divide",
    "fa2+scale_placement=scores,exponential=exp",
    "fa2+p_source=saved",
    "fa2+delta_source=dp,delta=bf16",
    "fa2+delta_products=bf16",
    "fa2+o_bar=bf16",
    "fa2+tile_k=32,tile_order=ascending",
    "fa2+o_bar=bf16,o_bar_at=tile,tile_k=32",
    "fa2+shifted=bf16,tile_k=32",
    "fa2+scores=bf16,tile_k=32,delta_source=dp",
    "paper+scores=fp32",
    "paper+shifted=fp32",
    "paper+p_bar=fp32",
    "paper+row_sum=fp32",
    "paper+o_bar=fp32",
    "paper+o=fp32",
    "paper+p_source=saved,tile_k=48",
]


def make_record(
    heads=1, groups=1, queries=40, keys=None, size=64, value_size=None, gain=1.0, seed=0, draw=None, **geometry
):
    generator = torch.Generator().manual_seed(seed)
    keys, value_size = keys or queries, value_size or size

    def normal(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().float()

    draw = draw or normal
    return AttentionRecord(
        layer=0,
        sequence=0,
        step=None,
        storage="bf16",
        q=(draw(heads, queries, size) * gain).bfloat16().float(),
        k=draw(groups, keys, size),
        v=draw(groups, keys, value_size),
        do=draw(heads, queries, value_size),
        x=None,
        geometry=Geometry(**{"scale": size**-0.5, **geometry}),
    )


def run_forward(record, name, device, *, ieee=False, **wishes):
    """The kernels' result on the CPU. Every wish is granted unless said otherwise."""
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.fused_types import FusedWishes

    recipe = resolve(name)
    constants = fused_recipe(recipe, record.q.shape[-1], record.k.shape[1], has_edge(record.geometry))
    inputs = fused_inputs(record.to(device), recipe, ieee=ieee)
    everything = {"carrier": True, "lowest": True, "feature_sums": True}
    found = dual_forward(inputs, constants, FusedWishes(**{**everything, **wishes}))
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return replace(found, **{name: value.cpu() for name, value in values.items() if value is not None})


def _pairs(record):
    """Raw products, |products| and visibility of every pair, float64 [H, N, M]; v of every query head."""
    group = record.num_heads // record.num_kv_heads
    k = record.k.repeat_interleave(group, 0).double()
    v = record.v.repeat_interleave(group, 0).double()
    q = record.q.double()
    raw, sizes = q @ k.transpose(1, 2), q.abs() @ k.abs().transpose(1, 2)
    num_queries, num_keys = raw.shape[1:]
    visible = record.geometry.visible((0, num_queries), (0, num_keys), num_queries, num_keys)
    if visible is None:
        visible = torch.ones(1, num_queries, num_keys, dtype=torch.bool)
    return raw, sizes, visible.expand_as(raw), v


def _budget(record):
    """What FP32 can do to a row: relative error of any P [H, N, 1], sum P |V| [H, N, E], and pairs whose score may
    round to another BF16 number [H, N, M].

    A sum of D products errs by at most D u of the sum of their sizes, and by no more than that in any order; the
    exponent's products and differences by 4 u of the score, the exponential and the row sum by (4 + M / 64) u.
    """
    raw, sizes, visible, v = _pairs(record)
    scale, size = record.geometry.scale, record.q.shape[-1]
    noise = (size * FP32 * sizes).masked_fill(~visible, 0.0)
    scores = (raw * scale).masked_fill(~visible, -torch.inf)
    largest = scores.abs().masked_fill(~visible, 0.0).amax(-1, keepdim=True)
    relative = 2 * scale * noise.amax(-1, keepdim=True) + (8 * largest + 4 + raw.shape[-1] / 64) * FP32
    p = torch.softmax(scores.masked_fill(~visible.any(-1, keepdim=True), 0.0), -1) * visible
    flips = visible & (p > FP32)
    steps = []
    for low, high in ((raw - noise, raw + noise), (scale * (raw - noise), scale * (raw + noise))):
        steps.append(low.float().bfloat16() != high.float().bfloat16())
    return relative, p @ v.abs(), flips & (steps[0] | steps[1]), largest[..., 0], p


def _close(found, expected, tolerance):
    error = (found.double() - expected).abs()
    assert not error.isnan().any()
    assert (error <= tolerance).all(), f"{(error - tolerance).max():.2e} over the budget, {error.max():.2e}"


def assert_matches(found, record, name, *, ieee=False):
    """Everything a forward pass gives, within the budget of FP32 (and of two BF16 terms of P-bar)."""
    recipe = resolve(name)
    dual = dual_pass(record, recipe)
    raw, _, visible, v = _pairs(record)
    relative, weight, flips, largest, p = _budget(record)
    seen = visible.any(-1)
    scale, do = record.geometry.scale, record.do.double()
    # P-bar in two terms leaves 2^-17 of it.
    split = 0.0 if ieee or recipe.scale_placement == "operands" else 2.0**-17
    o_tolerance = weight * (relative + split) + 1e-30
    _close(found.o_hp, dual.o_hp, o_tolerance)
    _close(found.lse_hp[seen], dual.lse_hp[seen], relative[seen][..., 0])
    assert torch.equal(found.lse_hp.isneginf(), ~seen)
    assert torch.equal(found.lse_lp.isneginf(), ~seen)
    assert torch.equal(found.row_max_lp.isneginf(), ~seen)
    top = raw.masked_fill(~visible, -torch.inf).amax(-1)
    bottom = raw.masked_fill(~visible, torch.inf).amin(-1)
    noise = relative[..., 0] / scale
    for one, other in ((found.row_max_raw, top), (found.lowest_raw, bottom)):
        assert torch.equal(one.isinf(), ~seen)
        _close(one[seen], other[seen], noise[seen])
    _close(
        found.row_sum_hp[seen], torch.exp(dual.lse_hp - top * scale)[seen], 2 * relative[seen][..., 0] * raw.shape[-1]
    )
    one_term = 0.0 if split == 0.0 else BF16
    keys = record.k.repeat_interleave(record.num_heads // record.num_kv_heads, 0).double()
    _close(found.carrier, dual.dq.carrier_hp / scale, (p @ keys.abs()) * (relative + one_term) + 1e-30)

    # Of the kernel's own outputs, in the order of an FP32 sum.
    o_lp, o_hp = found.o_lp.double(), found.o_hp.double()
    sum_noise = (do.shape[-1] + 2) * FP32
    _close(found.magnitude, (do * o_lp).abs().sum(-1), sum_noise * (do * o_lp).abs().sum(-1))
    _close(found.delta_hp, (do * o_hp).sum(-1), sum_noise * (do * o_hp).abs().sum(-1))
    _close(found.delta_err, (do * (o_lp - o_hp)).sum(-1), sum_noise * (do * (o_lp - o_hp)).abs().sum(-1) + 1e-30)
    features = (do * (o_lp - o_hp)).sum(1)
    _close(found.feature_sums, features, 4 * sum_noise * (do * (o_lp - o_hp)).abs().sum(1) + 1e-30)

    # The recipe. A score next to a boundary may round to the other side: P of its key then moves by half an ulp of S.
    rounds_scores = "bf16" in (recipe.scores, recipe.shifted)
    half = BF16 * largest if rounds_scores else torch.zeros_like(largest)
    top_flips = (flips & (raw >= top[..., None] - 2 * noise[..., None])).any(-1)
    moved = torch.where(top_flips, half, half * (flips * p).sum(-1)) * 2 + relative[..., 0]
    if recipe.shifted == "bf16":
        moved = moved + BF16 * half
    assert not found.o_lp.isnan().any()
    # P-bar may round to its other neighbour too, and so may O (and O-bar, and the row sum, where they do).
    worst = weight * (moved[..., None] + 6 * BF16) + 1e-30
    _close(found.o_lp, dual.o_lp, worst)
    differs = (o_lp - dual.o_lp).abs() > o_tolerance
    assert differs.double().mean() <= 0.04, differs.double().mean()
    lse_step = BF16 * dual.lse_lp[seen].abs() if recipe.lse == "bf16" else 0.0
    sum_step = BF16 if "bf16" in (recipe.row_sum, recipe.row_sum_input) else 0.0
    _close(found.lse_lp[seen], dual.lse_lp[seen], moved[seen] + sum_step + lse_step)
    steady = (found.lse_lp[seen] - dual.lse_lp[seen]).abs() <= moved[seen]
    assert steady.sum() >= 0.9 * seen.sum()
    delta = dual.delta
    same_lse = torch.where(seen, (found.lse_lp.double() - dual.lse_lp).abs(), 0.0).nan_to_num() <= moved
    _close(found.p_row_sum[same_lse], delta.p_row_sum[same_lse], 3 * moved[same_lse] + 4 * FP32)
    consistent = delta.delta_lp - delta.defect
    dp = torch.einsum("hne,hme->hnm", do, v)
    reach = ((dp.abs() * p).sum(-1) + (do * o_hp).sum(-1).abs()) * (moved + split) * 2 + sum_noise * dp.abs().amax(-1)
    _close(found.delta_consistent, consistent * seen, reach)
    if recipe.delta_source == "o":
        products = (do * o_lp).float()
        if recipe.delta_products == "bf16":
            products = products.bfloat16()
        expected = products.double().sum(-1)
    else:
        expected = found.delta_consistent.double() * found.p_row_sum.double()
    delta_step = BF16 * expected.abs() if recipe.delta == "bf16" else 0.0
    _close(found.delta_lp, expected, sum_noise * found.magnitude.double() + 2 * FP32 * expected.abs() + delta_step)

    # Never fewer than there are; 1 is what most rows of such data have.
    maxima = dual.maxima
    for count in (maxima.ones_fp32, maxima.ones_rounded, maxima.near, maxima.shared):
        assert (found.candidates >= count).all()
    assert torch.equal(found.candidates == 0, ~seen)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_matches_the_reference(device, name):
    record = make_record(queries=30, keys=70, seed=len(name))
    assert_matches(run_forward(record, name, device), record, name)


MASKS = {
    "grouped": {"heads": 2, "groups": 1, "queries": 33},
    "not causal": {"queries": 20, "keys": 37, "causal": False},
    "fewer keys than queries": {"queries": 40, "keys": 9},
    "one query": {"queries": 1, "keys": 100},
    "one key": {"queries": 5, "keys": 1, "causal": False},
    "window": {"queries": 70, "window": 20},
    "two-sided window": {"queries": 70, "window": 9, "causal": False},
    "padding": {
        "queries": 40,
        "key_padding": torch.arange(40) > 6,
        "query_padding": torch.arange(40) < 33,
        "causal": False,
    },
    "documents": {"queries": 48, "document_ids": torch.arange(48) // 10},
    "kept pairs": {"queries": 24, "causal": False, "keep": torch.rand(1, 24, 24) > 0.7},
    "no pair": {"queries": 24, "causal": False, "keep": torch.zeros(1, 24, 24, dtype=torch.bool)},
    "narrow": {"queries": 20, "size": 16},
    "odd sizes": {"queries": 20, "size": 40, "value_size": 80},
}


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, "fa2") for case in MASKS]
    + [(case, "paper+tile_k=48") for case in ("grouped", "fewer keys than queries", "two-sided window", "no pair")],
)
def test_masks_and_shapes(device, case, name):
    record = make_record(**MASKS[case])
    assert_matches(run_forward(record, name, device), record, name)


LARGE = [
    ({"heads": 4, "groups": 2, "queries": 300}, ["fa2", "paper"]),
    ({"heads": 2, "groups": 1, "queries": 63, "keys": 111}, ["fa2", "paper+tile_k=4096"]),
    ({"heads": 2, "groups": 2, "queries": 130, "keys": 100, "size": 80}, ["fa2", "fa3"]),
    ({"queries": 257, "size": 96}, ["fa3", "paper"]),
    ({"queries": 513, "size": 128, "causal": False}, ["fa2", "fa3", "paper"]),
    ({"queries": 200, "size": 128, "window": 70}, ["fa2", "fa3"]),
    ({"queries": 150, "size": 160}, ["fa2", "fa2+scores=bf16"]),
    ({"queries": 150, "size": 256}, ["fa2", "fa3", "paper"]),
    ({"queries": 100, "size": 192, "value_size": 128}, ["fa3"]),
    ({"queries": 300, "document_ids": torch.arange(300) // 77}, ["fa2", "paper"]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "name"),
    [(shape, name) for shape, names in LARGE for name in names],
    ids=lambda part: part if isinstance(part, str) else "-".join(str(v) for v in part.values() if isinstance(v, int)),
)
def test_larger_shapes_on_the_gpu(device, shape, name):
    if device == "cpu":
        pytest.skip("minutes under the interpreter")
    record = make_record(**shape)
    assert_matches(run_forward(record, name, device), record, name)


@pytest.mark.parametrize("name", ["fa2", "paper"])
def test_ieee_products_leave_fp32_noise_only(device, name):
    record = make_record(queries=20, keys=33)
    assert_matches(run_forward(record, name, device, ieee=True), record, name, ieee=True)


@pytest.mark.parametrize("name", ["fa2", "fa2+o_bar=bf16"])
def test_a_chain_of_its_own_is_within_the_same_budget(device, name):
    record = make_record(queries=24, keys=140)
    found = run_forward(record, name, device, own_chain=True)
    assert_matches(found, record, name)


def _integers(*shape, generator=None):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(math.prod(shape))).float()


@pytest.mark.parametrize("name", ["fa2", "paper", "fa3", "fa2+row_sum=bf16", "paper+tile_k=16"])
def test_lp_is_the_reference_bit_for_bit_where_the_arithmetic_is_exact(device, name):
    # Equal keys have equal scores: every P-bar is 1, and sums of small integers are exact in any order.
    record = make_record(queries=20, keys=70, draw=_integers)
    record = replace(record, k=record.k[:, :1].expand(-1, 70, -1).contiguous())
    found, dual = run_forward(record, name, device), dual_pass(record, resolve(name))
    assert torch.equal(found.o_lp.double(), dual.o_lp)
    assert torch.equal(found.candidates.long(), dual.maxima.visible)
    assert torch.equal(found.row_sum_hp.double(), dual.maxima.visible.double())
    assert torch.equal(found.row_max_raw.double(), (record.q.double() * record.k[:, :1]).sum(-1))


@pytest.mark.parametrize("name", ["fa2", "paper"])
def test_scores_of_22000_nats(device, name):
    # One key far above the others in each row: P is 1 and 0, and nothing overflows.
    record = make_record(queries=16, keys=40, causal=False)
    signs = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    q = (signs * 52.0 * 8).expand(1, 16, 64).contiguous()
    k = (signs * torch.linspace(-52.0, 52.0, 40).bfloat16().float()[:, None]).expand(1, 40, 64).contiguous()
    record = replace(record, q=q, k=k, geometry=Geometry(scale=1 / 8 / 8, causal=False))
    found = run_forward(record, name, device)
    assert found.row_max_raw.max() * record.geometry.scale > 21_000
    assert torch.equal(found.o_lp.float(), record.v[:, -1:].expand(1, 16, 64))
    _close(found.o_hp, record.v[:, -1:].double(), 1e-6)
    assert (found.candidates == 1).all()
    _close(found.p_row_sum, torch.ones(1, 16).double(), 22_000 * 4 * FP32)


def test_repeated_runs_are_bitwise_equal(device):
    record = make_record(heads=2, groups=1, queries=70, size=32)
    first, second = (run_forward(record, "fa2", device) for _ in range(2))
    for field in fields(first):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name)), field.name


def test_wishes_that_nobody_has_are_none_and_change_nothing(device):
    record = make_record(queries=20)
    full = run_forward(record, "fa2", device)
    bare = run_forward(replace(record, do=None), "fa2", device, carrier=False, lowest=False)
    for name in ("carrier", "lowest_raw", "feature_sums", "delta_lp", "delta_hp", "delta_err", "magnitude"):
        assert getattr(bare, name) is None, name
    for name in ("o_lp", "o_hp", "lse_lp", "lse_hp", "candidates", "p_row_sum"):
        assert torch.equal(getattr(bare, name), getattr(full, name)), name


def test_no_query_and_no_head(device):
    record = make_record(queries=8)
    assert run_forward(replace(record, q=record.q[:, :0], do=record.do[:, :0]), "fa2", device).o_lp.shape == (1, 0, 64)
    assert run_forward(replace(record, q=record.q[:0], do=record.do[:0]), "paper", device).o_hp.shape == (0, 8, 64)


@pytest.mark.gpu
def test_tensors_of_more_than_2_to_the_31_elements(device):
    if device == "cpu":
        pytest.skip("4 GB a tensor")
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.fused_types import FusedWishes

    few = fused_inputs(make_record(heads=8, groups=8, queries=64).to(device), resolve("fa2"), ieee=False)
    heads = 2**31 // (64 * 64) + 8
    large = {}
    for name in ("q", "k", "v", "do"):
        large[name] = torch.zeros(heads, 64, 64, dtype=torch.bfloat16, device=device)
        large[name][-8:] = getattr(few, name)
    constants, wishes = fused_recipe(resolve("fa2"), 64, 64, True), FusedWishes(carrier=True, feature_sums=True)
    found = dual_forward(replace(few, **large), constants, wishes)
    expected = dual_forward(few, constants, wishes)
    for name in ("o_lp", "o_hp", "carrier", "lse_hp", "delta_err", "candidates", "feature_sums"):
        assert torch.equal(getattr(found, name)[-8:], getattr(expected, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("keys", [512, 8192])
@pytest.mark.parametrize("one_sided", [False, True])
def test_high_precision_has_an_rms_error_of_1e_6_and_no_bias(device, size, keys, one_sided):
    if device == "cpu":
        pytest.skip("minutes under the interpreter")
    # T3: 8 x 256 x 64 elements and more; the last 256 queries see (nearly) all keys. V of one sign is what a truncating
    # sum is biased on.
    record = make_record(heads=8, groups=8, queries=256, keys=keys, size=size)
    if one_sided:
        record = replace(record, v=record.v.abs())
    for name in ("fa2", "fa3", "paper"):
        found = run_forward(record, name, device, carrier=False)
        raw, _, visible, v = (t.cuda() for t in _pairs(record))
        p = torch.softmax((raw * record.geometry.scale).masked_fill(~visible, -torch.inf), -1)
        error = (found.o_hp.cuda().double() - p @ v) / (p @ v.abs())
        assert error.square().mean().sqrt() <= 1e-6
        assert error.mean().abs() <= 5e-7


def _endless(keys):
    """One head with 2^31 elements, of which no memory is taken."""
    return torch.empty(len(keys), 2**25, keys.shape[-1], dtype=keys.dtype, device="meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: replace(x, q=x.q.half()), "operands in"),
        (lambda x: replace(x, k=x.k.transpose(0, 1).contiguous().transpose(0, 1)), "contiguous"),
        (lambda x: replace(x, v=x.v[:, :-1].contiguous()), r"\[G, M, E\]"),
        (lambda x: replace(x, do=x.do[..., :-1].contiguous()), r"\[H, N, E\]"),
        (lambda x: replace(x, q=x.q[:1], do=x.do[:1]), r"\[H, N, D\]"),
        (lambda x: replace(x, k=_endless(x.k), v=_endless(x.v)), "too long"),
    ],
)
def test_wrong_inputs_are_refused(device, change, message):
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.fused_types import FusedWishes

    record = make_record(heads=4, groups=2, queries=8)
    recipe = resolve("fa2")
    inputs = change(fused_inputs(record.to(device), recipe, ieee=False))
    with pytest.raises(ValueError, match=message):
        dual_forward(inputs, fused_recipe(recipe, 64, 8, True), FusedWishes())
