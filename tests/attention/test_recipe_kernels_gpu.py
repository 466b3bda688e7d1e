"""The recipes `flex` and `eager` against what they describe, on the GPU that runs it.

As for `fa2`, a recipe promises where a kernel rounds and not its bits: tensor cores add in an order of their own and
exponentials are approximate, so roundings flip where a value lies within a few FP32 steps of a halfway point. What must
hold: few elements differ, and recipes that round elsewhere differ in several times as many.
"""

from types import SimpleNamespace

import pytest
import torch

from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

# Compiling says what it deprecates.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

MOST_DIFFERING = 0.02
SEPARATION = 4.0
HEADS = 4


def record_of(tokens, size, causal, seed):
    """Random BF16 tensors with scores of a few nats, on the CPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(HEADS, tokens, size, generator=generator).bfloat16().float() for _ in range(4))
    return AttentionRecord(
        layer=0, sequence=0, step=None, storage="bf16", q=q, k=k, v=v, do=do, x=None,
        geometry=Geometry(scale=size**-0.5, causal=causal),
    )  # fmt: skip


def run(record, attend):
    """O, dQ, dK and dV of a function of BF16 tensors [1, H, N, D] on the GPU, as float64 on the CPU."""
    q, k, v = (t[None].to("cuda", torch.bfloat16).requires_grad_() for t in (record.q, record.k, record.v))
    o = attend(q, k, v)
    o.backward(record.do[None].to("cuda", torch.bfloat16))
    return tuple(t.detach()[0].double().cpu() for t in (o, q.grad, k.grad, v.grad))


def share(mine, other):
    return (mine.double() != other).double().mean().item()


@pytest.mark.parametrize(("size", "tokens", "causal"), [(64, 512, True), (128, 1024, True), (64, 700, False)])
def test_flex_describes_the_compiled_kernel(size, tokens, causal):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    record = record_of(tokens, size, causal, seed=size + tokens)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    o, dq, dk, dv = run(record, lambda q, k, v: compiled(q, k, v, block_mask=mask, scale=record.geometry.scale))
    found = recipe_gradients(record, resolve("flex"))
    differing = share(found.o, o)
    wrong = ("flex+o_bar=bf16", "flex+scores=bf16", "flex+p_bar=fp32", "flex+row_sum_input=bf16", "eager", "paper")
    others = {name: share(dual_pass(record, resolve(name), "fp32").o_lp, o) for name in wrong}
    print(f"\nD {size} N {tokens}: O differs in {differing:.2e}", {k: f"{x:.2e}" for k, x in others.items()})
    # Recipes that differ in the backward pass only.
    variants = {"": found}
    for change in ("delta=bf16", "delta_products=bf16", "ds=fp32", "p_backward=fp32"):
        variants[change] = recipe_gradients(record, resolve(f"flex+{change}"))
    gaps = {
        change: [f"{share(getattr(g, n), k):.2e}" for n, k in (("dq", dq), ("dk", dk), ("dv", dv))]
        for change, g in variants.items()
    }
    print("   dQ, dK, dV differ:", gaps)
    assert differing <= MOST_DIFFERING
    assert all(x >= SEPARATION * differing for x in others.values()), others
    for name, kernel in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert share(getattr(found, name), kernel) <= 0.1
    assert share(variants["ds=fp32"].dq, dq) >= SEPARATION * share(found.dq, dq)
    assert share(variants["p_backward=fp32"].dv, dv) >= SEPARATION * share(found.dv, dv)
    # delta rounds to BF16 between its two FP32 ends where the sum is a kernel of its own, and not where it is fused.
    assert share(found.dq, dq) * SEPARATION <= share(variants["delta=bf16"].dq, dq)


def eager(module, q, k, v, mask, scaling):
    """transformers 5.24.0 eager_attention_forward for as many key heads as query heads."""
    weights = torch.matmul(q, k.transpose(2, 3)) * scaling
    if mask is not None:
        weights = weights + mask
    weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


@pytest.mark.parametrize(("size", "tokens", "causal"), [(64, 512, True), (128, 1024, True), (80, 300, False)])
def test_eager_describes_the_library(size, tokens, causal):
    record = record_of(tokens, size, causal, seed=size + tokens)
    mask = None
    if causal:
        mask = torch.full((tokens, tokens), torch.finfo(torch.bfloat16).min).triu(1).to("cuda", torch.bfloat16)
    o, dq, dk, dv = run(record, lambda q, k, v: eager(SimpleNamespace(), q, k, v, mask, record.geometry.scale))
    found = recipe_gradients(record, resolve("eager"))
    shares = {n: share(getattr(found, n), t) for n, t in (("o", o), ("dq", dq), ("dk", dk), ("dv", dv))}
    wrong = ("eager+scores=fp32", "eager+p_bar=fp32", "eager+p_bar_cast=before", "fa2", "paper")
    others = {name: share(dual_pass(record, resolve(name), "fp32").o_lp, o) for name in wrong}
    unscaled = recipe_gradients(record, resolve("eager+ds_scale=gradients"))
    print(f"\nD {size} N {tokens}: differs in", {k: f"{x:.2e}" for k, x in shares.items()})
    print("   O of others:", {k: f"{x:.2e}" for k, x in others.items()}, "ds_scale:", f"{share(unscaled.dq, dq):.2e}")
    assert max(shares.values()) <= 0.02
    assert all(x >= SEPARATION * shares["o"] for x in others.values()), others
    if size != 64:
        assert share(unscaled.dq, dq) >= SEPARATION * shares["dq"]
