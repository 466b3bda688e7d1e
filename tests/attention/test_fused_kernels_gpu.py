"""The recipe `fa2` against the fused kernel it describes, on the GPU that runs it.

With few heads the library splits the keys of a row over several blocks and takes other tiles (64 x 256 at head size
64), which is another recipe; enough heads keep it on the kernel that `fa2` describes.

A recipe does not promise a kernel's bits: FP32 sums are ordered otherwise and exponentials are approximate, so a BF16
rounding flips where the exact value lies within a few FP32 steps of a halfway point. P-bar flips in about 1e-4 of the
elements, O in a share that grows with the keys of a row. What must hold: every difference is one BF16 step (O away
from zero), few elements differ, and every recipe with a rounding point in another place differs in several times as
many.
"""

from dataclasses import replace

import pytest
import torch

from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

pytestmark = pytest.mark.gpu

#: Share of O that may differ from the kernel (T2: flips of P-bar and of O itself, several times the expectation).
MOST_DIFFERING = 0.02
#: How many times as much every wrong recipe must differ.
SEPARATION = 4.0
#: Neither O nor a gradient rounds, nor any operand.
UNROUNDED = "fa2+p_bar=fp32,o=fp32,p_backward=fp32,ds=fp32,dq=fp32,dkv=fp32"
#: Heads on the GPU, so that rows alone fill it, and heads compared.
HEADS, COMPARED = 132, 4
WRONG = ("fa2+o_bar=bf16", "fa2+scores=bf16", "fa2+p_bar=fp32", "fa2+row_sum_input=bf16", "paper", "sdpa-math")


def record_of(heads, tokens, size, causal, seed):
    """Random BF16 tensors with scores of a few nats, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(heads, tokens, size, generator=generator).bfloat16().float() for _ in range(4))
    return AttentionRecord(
        layer=0, sequence=0, step=None, storage="bf16", q=q, k=k, v=v, do=do, x=None,
        geometry=Geometry(scale=size**-0.5, causal=causal),
    )  # fmt: skip


def largest_probability(record):
    """float64 [H, N]: the largest entry of each row of P."""
    scores = record.q.double() @ record.k.double().transpose(1, 2) * record.geometry.scale
    if record.geometry.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1).amax(-1)


def flash(record):
    """O, log-sum-exp, dQ, dK and dV of PyTorch's flash backend for a record."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, k, v = (t[None].to("cuda", torch.bfloat16).requires_grad_() for t in (record.q, record.k, record.v))
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, record.geometry.causal, False)
    out[0].backward(record.do[None].to("cuda", torch.bfloat16))
    found = (out[0].detach(), out[1].detach(), q.grad, k.grad, v.grad)
    return tuple(t[0].double().cpu() for t in found)


@pytest.mark.parametrize(("size", "tokens", "causal"), [
    (64, 512, True), (64, 700, False), (96, 384, True), (128, 1024, True), (192, 384, False),
])  # fmt: skip
def test_fa2_describes_the_fused_kernel(size, tokens, causal):
    everything = record_of(HEADS, tokens, size, causal, seed=size + tokens)
    o, lse, dq, dk, dv = (t[:COMPARED] for t in flash(everything))
    parts = {name: getattr(everything, name)[:COMPARED] for name in ("q", "k", "v", "do")}
    record = replace(everything, **parts)
    dual = dual_pass(record, resolve("fa2"), "fp64")
    assert dual.dq is not None

    differing = (dual.o_lp != o).double().mean().item()
    others = {name: (dual_pass(record, resolve(name), "fp32").o_lp != o).double().mean().item() for name in WRONG}
    dq_error, dq_size = (dual.dq.lp - dq).norm().item(), dq.norm().item()
    rounding = (dual.dq.lp - dual.dq.hp).norm().item()
    print(f"D {size} N {tokens}: O differs in {differing:.2e}", {k: f"{x:.2e}" for k, x in others.items()})
    print(f"   dQ: recipe - kernel {dq_error / dq_size:.2e}, recipe - hp {rounding / dq_size:.2e}")
    assert differing <= MOST_DIFFERING
    assert all(share >= SEPARATION * differing for share in others.values()), others

    # O rounds by one BF16 step, at most 2^-7 of it; each P-bar that flips moves O by 2^-7 of its own share of O, and
    # two flips in one row that both hit the largest share are already rare.
    flip = 2.0**-7 * largest_probability(record)[..., None] * record.v.abs().amax((1, 2))[:, None, None]
    assert ((dual.o_lp - o).abs() <= 2.0**-7 * o.abs() + 2 * flip).all()
    torch.testing.assert_close(dual.lse_lp, lse, rtol=0, atol=2e-5)
    # The kernel and its recipe share their roundings: they lie closer to each other than either lies to hp.
    assert dq_error <= 0.5 * rounding

    gradients, hp = recipe_gradients(record, resolve("fa2")), recipe_gradients(record, resolve(UNROUNDED))
    for name, kernel in (("dk", dk), ("dv", dv)):
        mine, exact = getattr(gradients, name).double(), getattr(hp, name).double()
        gap, rounding = (mine - kernel).norm().item(), (mine - exact).norm().item()
        print(
            f"   {name}: recipe - kernel {gap / kernel.norm():.2e}, recipe - unrounded {rounding / kernel.norm():.2e}"
        )
        assert gap <= 0.5 * rounding
