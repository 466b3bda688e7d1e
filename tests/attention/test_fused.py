"""The fused dual pass through its gateway against the reference in float64: on the interpreter here, natively on a GPU.

T2 budgets, from what the kernels promise: P-bar and dS in two BF16 terms leave 2^-17 of each term, carriers in one
leave 2^-9; FP32 scores are off by 2^-22 of the largest one (sums of up to 64 products); everything else by 2^-21 of
the sum of magnitudes (sums of up to 64 FP32 terms, twice). In rows anchored at their top key the magnitudes are those
of the other keys. Where a rounding to BF16 follows, a value that close to a halfway point may come out one step off:
such rows are counted, and the rest is compared.
"""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.fused_inputs import fused_inputs, seen_keys, visible_pairs
from bf16forensics.attention.kernel_rounding import INTERPRET_VARIABLE
from bf16forensics.attention.result import on_device
from bf16forensics.attention.scores import Block, lp_scores
from bf16forensics.emulate.rounding import ulp_of
from bf16forensics.errors import InputError
from bf16forensics.recipe.derive import flip, resolve, rounding_points

pytest.importorskip("triton")

#: Two BF16 terms; FP32 sums; FP32 scores, relative to the largest.
TERMS, SUMS, SCORES = 2.0**-17, 2.0**-21, 2.0**-22
#: One BF16 term, and a BF16 step of dS.
ONE_TERM = 2.0**-8
#: Gaps in nats at which a count changes: P-bar = 1 in FP32, near, P-bar = 1 in BF16; and how close is too close.
THRESHOLDS, TOO_CLOSE = (2.0**-25, 1e-3, 0.0019550), 4e-5
#: Rows whose O, as stored, may differ by a step because of a value next to a halfway point.
ROWS_OFF = 0.05


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the record lies; the other way of running the kernels is skipped by name."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("no CUDA device" if request.param == "cuda" else "kernels run natively here")
    return "cuda" if request.param == "cuda" else "cpu"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Magnitudes of one call in float64, and the relative error of its probabilities."""

    #: [H, N] 1 - P of the top key, and whether the row is anchored there.
    rest: torch.Tensor
    anchored: torch.Tensor
    relative: torch.Tensor
    #: [H, N, E] sum P |V|, and over the other keys sum P (|V| + |V_top|).
    o: torch.Tensor
    others: torch.Tensor
    #: [H, N, D] scale sum P |K|, and scale sum |dS| |K| with what FP32 leaves of dP.
    carrier: torch.Tensor
    dq: torch.Tensor
    dq_noise: torch.Tensor


def sizes(record):
    group = record.num_heads // record.num_kv_heads
    of_head = torch.arange(record.num_heads) // group
    q, k, v, do = (t.double() for t in (record.q, record.k[of_head], record.v[of_head], record.do))
    num_queries, num_keys, scale = q.shape[1], k.shape[1], record.geometry.scale
    scores = q @ k.transpose(-1, -2) * scale
    visible = record.geometry.visible((0, num_queries), (0, num_keys), num_queries, num_keys)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num(nan=0.0)
    top = p.argmax(-1, keepdim=True)
    rest = 1.0 - p.amax(-1)
    others = p.scatter(-1, top, 0.0)
    v_top = torch.gather(v, 1, top.expand(-1, -1, v.shape[-1])).abs()
    dp = do @ v.transpose(-1, -2)
    largest = scores.masked_fill(scores == -torch.inf, 0.0).abs().amax(-1)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)).abs()
    noise = p * (do.abs() @ v.abs().transpose(-1, -2) + (do.abs() * (p @ v.abs())).sum(-1, keepdim=True))
    return Sizes(
        rest=rest,
        anchored=(rest < 2.0**-8) & (p.sum(-1) > 0),
        relative=TERMS + SUMS + SCORES * largest,
        o=p @ v.abs(),
        others=others @ v.abs() + others.sum(-1, keepdim=True) * v_top,
        carrier=scale * (p @ k.abs()),
        dq=scale * (ds @ k.abs()),
        dq_noise=scale * (noise @ k.abs()),
    )


def counted_safely(record, recipe):
    """bool [H, N]: rows none of whose keys lies too close to where a count changes."""
    of_head = torch.arange(record.num_heads) // (record.num_heads // record.num_kv_heads)
    rows, keys = (0, record.q.shape[1]), (0, record.k.shape[1])
    block = Block(rows=rows, keys=keys, num_queries=rows[1], num_keys=keys[1])
    scores = lp_scores(record.q, record.k[of_head], record.geometry, recipe, block, None)
    gap = (scores.values.amax(-1, keepdim=True) - scores.values).double() * scores.unit
    close = torch.zeros_like(gap, dtype=torch.bool)
    for threshold in THRESHOLDS:
        close |= ((gap - threshold).abs() < TOO_CLOSE) & (gap != 0)
    return ~close.any(-1)


def within(found, expected, bound, name, rows=None):
    """|found - expected| <= bound, element by element, with equal infinities; `rows` bool [H, N] says where."""
    off = torch.where(found == expected, 0.0, (found - expected).abs())
    excess = off - bound - 1e-30
    if rows is not None:
        excess = excess[rows]
    beyond = ~(excess <= 0)
    worst = f"worst by {excess.max():.3g}, largest {off.max():.3g}" if beyond.any() else ""
    assert not beyond.any(), f"{name}: {beyond.double().mean():.2%} beyond, {worst}"


def check(record, recipe, found, *, ieee=False):
    """Every field of a fused dual pass against the reference."""
    expected, size = dual_pass(record, recipe, "fp64"), sizes(record)
    seen = expected.maxima.visible > 0
    anchored, relative = size.anchored & seen, size.relative[..., None]
    row = anchored[..., None]
    # High precision.
    o_bound = torch.where(row, relative * size.others, relative * size.o)
    within(found.o_hp, expected.o_hp, relative * size.o, "o_hp")
    log_bound = size.relative + SUMS * expected.lse_hp.nan_to_num(neginf=0.0).abs()
    within(found.lse_hp, expected.lse_hp, log_bound, "lse_hp")
    # The recipe: most rows are the same, the others a step or two off.
    within(found.o_lp, expected.o_lp, relative * size.o + 2 * ulp_of(size.o, "bf16"), "o_lp")
    same = ((found.o_lp - expected.o_lp).abs() <= (0.0 if recipe.o == "bf16" else relative * size.o)).all(-1)
    assert (~same).double().mean() <= ROWS_OFF
    within(found.o_err, expected.o_err, o_bound, "o_err", same)
    lse_step = ulp_of(expected.lse_lp.nan_to_num(neginf=0.0), "bf16") if recipe.lse == "bf16" else 0.0
    within(found.lse_lp, expected.lse_lp, log_bound + lse_step, "lse_lp", same)
    # Counts.
    safe = counted_safely(record, recipe)
    assert safe.double().mean() > 0.8
    for name in ("ones_fp32", "ones_rounded", "near"):
        assert torch.equal(getattr(found.maxima, name)[safe], getattr(expected.maxima, name)[safe]), name
    assert torch.equal(found.maxima.shared, expected.maxima.shared)
    assert torch.equal(found.maxima.visible, expected.maxima.visible)
    assert torch.equal(found.maxima.swamped[anchored & same], expected.maxima.swamped[anchored & same])
    assert not found.maxima.swamped[~anchored].any()
    within(found.maxima.sink, expected.maxima.sink, 2 * size.relative * expected.maxima.sink, "sink")
    within(
        found.maxima.score_abs_max, expected.maxima.score_abs_max, SUMS * expected.maxima.score_abs_max, "score_abs_max"
    )
    if expected.delta is None:
        assert found.delta is None
        assert found.dq is None
        return
    # delta: the same bounds, summed over the features.
    do = record.do.double().abs()
    sum_bound = SUMS * expected.delta.magnitude
    delta_step = ulp_of(expected.delta.delta_lp, "bf16") if "bf16" in (recipe.delta, recipe.delta_products) else 0.0
    plain = (do * relative * size.o).sum(-1) + sum_bound
    close = (do * o_bound).sum(-1) + torch.where(anchored, SUMS * expected.delta.delta_err.abs(), sum_bound)
    # The reference rounds delta_lp to FP32 before it takes the difference.
    close += 2.0**-24 * expected.delta.delta_lp.abs() + 2.0**-45 * expected.delta.magnitude
    if recipe.delta_source == "dp" or recipe.delta == "bf16" or recipe.delta_products == "bf16":
        close = plain + delta_step
    within(found.delta.delta_hp, expected.delta.delta_hp, plain, "delta_hp")
    within(found.delta.delta_lp, expected.delta.delta_lp, plain + delta_step, "delta_lp", same)
    within(found.delta.delta_err, expected.delta.delta_err, close, "delta_err", same)
    within(found.delta.defect, expected.delta.defect, 2 * close, "defect", same)
    within(found.delta.magnitude, expected.delta.magnitude, sum_bound, "magnitude", same)
    within(found.delta.p_row_sum, expected.delta.p_row_sum, 2 * size.relative, "p_row_sum", same)
    # dQ in stages.
    one_term = TERMS if ieee else ONE_TERM
    wide = 2 * (relative * size.dq + SUMS * size.dq_noise)
    of_defect = expected.delta.defect.abs()[..., None] * size.carrier
    cast = wide + one_term * of_defect + (ONE_TERM * size.dq if recipe.ds == "bf16" else 0.0)
    dq_step = ulp_of(expected.dq.lp, "bf16") if recipe.dq == "bf16" else 0.0
    within(found.dq.hp, expected.dq.hp, wide, "dq.hp")
    within(found.dq.consistent, expected.dq.consistent, wide, "dq.consistent", same)
    within(found.dq.cast_ds, expected.dq.cast_ds, cast, "dq.cast_ds", same)
    within(found.dq.lp, expected.dq.lp, cast + dq_step, "dq.lp", same)
    within(found.dq.carrier_hp, expected.dq.carrier_hp, (one_term + relative) * size.carrier, "carrier_hp")
    within(found.dq.carrier_lp, expected.dq.carrier_lp, (one_term + 2 * relative) * size.carrier, "carrier_lp", same)


def all_tensors(result, prefix=""):
    """(name, tensor or None) of every field, at any depth."""
    for field in fields(result):
        value = getattr(result, field.name)
        if value is None or isinstance(value, torch.Tensor):
            yield prefix + field.name, value
        else:
            yield from all_tensors(value, f"{prefix}{field.name}.")


def fused(record, recipe, device, **options):
    """The fused pass of a record on a device, its result on the CPU in float64."""
    from bf16forensics.attention.fused import fused_dual_pass

    found = fused_dual_pass(record if device == "cpu" else record.to(torch.device(device)), recipe, **options)
    assert all(tensor is None or tensor.device.type == device for _, tensor in all_tensors(found))
    return on_device(found, torch.device("cpu"))


QUERIES, KEYS = 21, 30
DOCUMENTS = torch.tensor([2**40] * 9 + [-7] * 5 + [3] * 7)
GENERATOR = torch.Generator().manual_seed(3)
KEEP = torch.rand(2, QUERIES, KEYS, generator=GENERATOR) > 0.4
KEEP[:, 5] = False

#: Geometry, and keys where there are as many as queries.
CALLS = {
    "causal": {},
    "square": {"keys": QUERIES},
    "more queries than keys": {"keys": 13},
    "not causal": {"causal": False},
    "window": {"window": 6},
    "window both ways": {"window": 4, "causal": False},
    "key padding": {"key_padding": torch.arange(KEYS) > 11},
    "query padding": {"query_padding": torch.arange(QUERIES) < 15, "causal": False},
    "documents": {"keys": QUERIES, "document_ids": DOCUMENTS},
    "documents and padding": {
        "keys": QUERIES,
        "document_ids": DOCUMENTS,
        "key_padding": torch.arange(QUERIES) != 3,
        "query_padding": torch.arange(QUERIES) != 17,
    },
    "keep by head": {"keep": KEEP, "causal": False},
    "keep for all": {"keep": KEEP[:1], "window": 20},
    "one key": {"keys": 1, "queries": 1},
}


def draw(oracle, record_of, seed=1, *, keys=KEYS, queries=QUERIES, **geometry):
    masks = {name: value.numpy() for name, value in geometry.items() if isinstance(value, torch.Tensor)}
    sizes_of = {"heads": 2, "kv_heads": 1, "queries": queries, "keys": keys, "size": 16, "value_size": 24}
    return record_of(oracle.draw(seed, spread=2.0, **sizes_of, **{**geometry, **masks}))


#: Those that take another way through the gateway than the ones before them.
DISTINCT = ("causal", "more queries than keys", "window both ways", "documents and padding", "keep by head", "one key")


@pytest.mark.parametrize(
    "name", [*DISTINCT, *(pytest.param(name, marks=pytest.mark.slow) for name in CALLS if name not in DISTINCT)]
)
def test_every_geometry(oracle, record_of, device, name):
    record = draw(oracle, record_of, **CALLS[name])
    check(record, resolve("fa2"), fused(record, resolve("fa2"), device))


#: Recipes in which the gateway does something of its own; the others are for the tests of the kernels, and slow here.
RECIPES = (
    "paper+tile_k=16",
    "paper+o_bar=fp32",
    "sdpa-math",
    "fa2+o=fp32",
    "fa2+o_bar=bf16",
    "fa2+delta_products=bf16,delta=bf16",
    "fa2+delta_source=dp",
    "fa2+scores=bf16,p_source=saved",
)


def more_recipes():
    for name in ("fa2", "paper", "sdpa-math"):
        yield from (flip(resolve(name), point).name for point in rounding_points(resolve(name)))
    yield from ("paper", "fa3", "fa2+lse=bf16", "fa2+gradients_at=tile,tile_k=16", "fa2+p_bar_cast=after,p_bar=fp32")
    yield from ("fa2+o_bar=bf16,o_bar_at=tile", "paper+p_source=saved", "sdpa-math+delta_source=o")


@pytest.mark.parametrize(
    "name",
    [
        *RECIPES,
        *(pytest.param(name, marks=pytest.mark.slow) for name in dict.fromkeys(more_recipes()) if name not in RECIPES),
    ],
)
def test_every_recipe(oracle, record_of, device, name):
    record = draw(oracle, record_of, 2)
    check(record, resolve(name), fused(record, resolve(name), device), ieee=name.startswith("sdpa-math"))


@pytest.mark.parametrize("options", [{"hp_products": "ieee"}, {"lp_products": "own"}], ids=str)
def test_the_choices_of_the_fused_pass(oracle, record_of, device, options):
    record = draw(oracle, record_of, 3)
    ieee = "hp_products" in options
    check(record, resolve("fa2"), fused(record, resolve("fa2"), device, **options), ieee=ieee)


@pytest.mark.parametrize("storage", ["fp16", "fp32"])
def test_what_is_not_stored_in_bf16_is_multiplied_in_fp32(oracle, record_of, device, storage):
    plain = draw(oracle, record_of, 4)
    generator = torch.Generator().manual_seed(9)

    def finer(values):
        moved = values * (1.0 + 2.0**-10 * torch.randn(values.shape, generator=generator))
        return moved.half().float() if storage == "fp16" else moved

    tensors = {name: finer(getattr(plain, name)) for name in ("q", "k", "v", "do")}
    record = replace(plain, storage=storage, **tensors)
    inputs = fused_inputs(record, resolve("fa2"), ieee=False)
    assert inputs.ieee
    assert torch.equal(inputs.q.cpu(), record.q)
    check(record, resolve("fa2"), fused(record, resolve("fa2"), device), ieee=True)


@pytest.mark.parametrize(
    ("recipe", "spread", "repeats"), [("fa2", 60.0, False), ("fa2", 8.0, True), ("paper", 8.0, True)], ids=str
)
def test_saturated_rows_and_ties(oracle, record_of, device, recipe, spread, repeats):
    plain = draw(oracle, record_of, 5)
    k = plain.k.clone()
    if repeats:
        k[:, 1::2] = k[:, ::2]
        k[:, 20:26] = k[:, 20:21]
    record = replace(plain, q=(plain.q * spread).bfloat16().float(), k=k)
    found, expected = fused(record, resolve(recipe), device), dual_pass(record, resolve(recipe), "fp64")
    check(record, resolve(recipe), found)
    ties, known = found.ties, expected.ties
    assert (known.ones > 1).any() == repeats
    for name in ("ones", "label", "elements"):
        assert torch.equal(getattr(ties, name), getattr(known, name)), name
    # What the other keys add to a main sum may differ in its last bits, and with it the last digits of residues. Where
    # that takes the sum across a halfway point its rounding turns: the error moves by one ulp, in one element of a few
    # thousand (2^-24 of a sum against the distance 2^-12 of the nearest halfway point).
    for name in ("error", "law", "residue", "residue_size"):
        turned = 1.0 if name == "error" else 0.0
        within(getattr(ties, name), getattr(known, name), 1e-3 * known.elements.double() + turned, f"ties.{name}")
    turned = ((ties.error - known.error).abs() > 0.5).sum()
    assert turned <= 1 + 1e-3 * known.elements.sum()
    assert torch.equal(ties.dropped, known.dropped)


def test_without_dO_and_by_a_forward_pass(oracle, record_of, device):
    record = draw(oracle, record_of, 6)
    whole = fused(record, resolve("fa2"), device)
    for less, recipe in ((replace(record, do=None), "fa2"), (record, "fa2+passes=forward")):
        found = fused(less, resolve(recipe), device)
        assert found.delta is None
        assert found.dq is None
        assert torch.equal(found.o_lp, whole.o_lp)
        assert torch.equal(found.o_hp, whole.o_hp)


def test_a_recipe_without_ties_has_none(oracle, record_of, device):
    record = draw(oracle, record_of, 6)
    assert fused(record, resolve("fa2+o=fp32"), device).ties is None
    assert fused(record, resolve("fa2"), device).ties is not None


def test_the_same_call_gives_the_same_bits(oracle, record_of, device):
    record = draw(oracle, record_of, 7)
    first, second = (dict(all_tensors(fused(record, resolve("paper"), device))) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_strided_tensors_are_the_same_call(oracle, record_of, device):
    record = draw(oracle, record_of, 8)
    views = {name: getattr(record, name).transpose(0, 1).contiguous().transpose(0, 1) for name in ("q", "k", "v", "do")}
    first, second = (fused(some, resolve("fa2"), device) for some in (record, replace(record, **views)))
    assert torch.equal(first.dq.lp, second.dq.lp)


@pytest.mark.gpu
def test_a_record_on_the_cpu_comes_back(oracle, record_of):
    """Copied to the GPU and back: the bits are those of the record that lies there, in float64."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from bf16forensics.attention.fused import fused_dual_pass

    record = draw(oracle, record_of, 9)
    here, there = fused_dual_pass(record, resolve("fa2")), fused(record, resolve("fa2"), "cuda")
    for (name, tensor), (_, other) in zip(all_tensors(here), all_tensors(there), strict=True):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, other), name
    on_gpu = fused_dual_pass(record.to(torch.device("cuda")), resolve("fa2"))
    assert (on_gpu.o_err.dtype, on_gpu.lse_hp.dtype) == (torch.float32, torch.float64)


def test_a_kernel_that_does_not_fit_is_one_line(monkeypatch, oracle, record_of, device):
    from triton.runtime.errors import OutOfResources

    from bf16forensics.attention import fused as module

    def refuse(*args):
        raise OutOfResources(262144, 101376, "shared memory")

    monkeypatch.setattr(module, "_run", refuse)
    with pytest.raises(InputError, match=r"^layer 0: [^\n]*head size 16 \([^\n]*shared memory[^\n]*use --backend ref"):
        fused(draw(oracle, record_of), resolve("fa2"), device)


@pytest.mark.parametrize("size", [3, 20])
def test_odd_head_sizes(oracle, record_of, device, size):
    record = record_of(oracle.draw(11, heads=2, queries=9, size=size, value_size=size + 2))
    check(record, resolve("fa2"), fused(record, resolve("fa2"), device))


# -- what needs no kernel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_visible_keys_are_those_of_the_geometry(monkeypatch, oracle, record_of, name):
    monkeypatch.setenv(INTERPRET_VARIABLE, "1")
    record = draw(oracle, record_of, **CALLS[name])
    heads, num_queries, num_keys = record.num_heads, record.q.shape[1], record.k.shape[1]
    known = record.geometry.visible((0, num_queries), (0, num_keys), num_queries, num_keys)
    known = torch.ones(1, num_queries, num_keys, dtype=torch.bool) if known is None else known
    known = known.expand(heads, -1, -1)
    inputs = fused_inputs(record, resolve("fa2"), ieee=False)
    rows = torch.arange(num_queries)
    assert torch.equal(visible_pairs(inputs, rows).expand(heads, -1, -1), known)
    count, first = seen_keys(inputs)
    assert torch.equal(count.expand(heads, -1), known.sum(-1))
    assert torch.equal(first.expand(heads, -1), known.to(torch.uint8).argmax(-1))
    some = torch.tensor([[0, num_queries - 1], [num_queries // 2, 0]])
    two = torch.tensor([heads - 1, 1])
    assert torch.equal(visible_pairs(inputs, some, two), known[two[:, None], some])


def test_many_masked_rows_are_looked_at_in_parts(monkeypatch, oracle, record_of):
    from bf16forensics.attention import fused_inputs as module

    monkeypatch.setenv(INTERPRET_VARIABLE, "1")
    inputs = fused_inputs(draw(oracle, record_of, **CALLS["keep by head"]), resolve("fa2"), ieee=False)
    whole = seen_keys(inputs)
    monkeypatch.setattr(module, "_PAIRS", 4 * KEYS * 2)
    for part, all_at_once in zip(seen_keys(inputs), whole, strict=True):
        assert torch.equal(part, all_at_once)
