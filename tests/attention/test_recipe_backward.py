"""`recipe_gradients` against autograd in float64, against torch's MATH backend, and against the dual pass's dQ."""

from dataclasses import replace

import pytest
import torch

from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.errors import InputError
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

#: Unit roundoff of BF16.
BF16_ROUNDOFF = 2.0**-8


def record_of(heads=4, groups=4, queries=150, keys=150, size=32, seed=0, **geometry):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().float()

    return AttentionRecord(
        layer=0, sequence=0, step=None, storage="bf16", q=draw(heads, queries, size), k=draw(groups, keys, size),
        v=draw(groups, keys, size), do=draw(heads, queries, size), x=None,
        geometry=Geometry(scale=size**-0.5, **geometry),
    )  # fmt: skip


def autograd(record):
    """Gradients in float64 by automatic differentiation of a dense softmax."""
    group = record.num_heads // record.num_kv_heads
    q, k, v = (t.double().requires_grad_() for t in (record.q, record.k, record.v))
    scores = q @ k.repeat_interleave(group, 0).mT * record.geometry.scale
    n, m = record.q.shape[1], record.k.shape[1]
    visible = record.geometry.visible((0, n), (0, m), n, m)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    o = scores.softmax(-1) @ v.repeat_interleave(group, 0)
    o.backward(record.do.double())
    return o.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize(("shape", "geometry"), [
    ({}, {}),
    ({"groups": 2}, {}),
    ({"groups": 1, "queries": 70}, {}),
    ({}, {"causal": False}),
    ({}, {"window": 9}),
])  # fmt: skip
def test_without_rounding_it_is_the_gradient(shape, geometry):
    record = record_of(**shape, **geometry)
    unrounded = resolve("sdpa-math+o=fp32,dq=fp32,dkv=fp32")
    found = recipe_gradients(record, unrounded)
    # T2: FP32 sums of at most 150 terms of size 1.
    for mine, exact in zip((found.o, found.dq, found.dk, found.dv), autograd(record), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=150 * 2.0**-24 * exact.abs().max().item())


@pytest.mark.parametrize("name", ["fa2", "paper", "sdpa-math", "paper+dp=bf16,ds=bf16,dq=bf16,gradients_at=tile"])
def test_dq_is_that_of_the_dual_pass(name):
    record = record_of(queries=300, keys=300)
    dual = dual_pass(record, resolve(name), "fp32")
    found = recipe_gradients(record, resolve(name))
    assert dual.dq is not None
    assert torch.equal(found.o.double(), dual.o_lp)
    # T2: the same casts over FP32 sums in another order; a BF16 rounding flips now and then.
    size = dual.dq.lp.abs().max()
    assert ((found.dq.double() - dual.dq.lp).abs() <= 2 * BF16_ROUNDOFF * dual.dq.lp.abs() + 1e-5 * size).all()
    assert (found.dq.bfloat16() != dual.dq.lp.bfloat16()).double().mean() < 0.02


def test_every_cast_of_the_backward_pass_changes_its_gradient():
    record = record_of()
    plain = recipe_gradients(record, resolve("fa2+p_backward=fp32,ds=fp32,dq=fp32,dkv=fp32"))
    changed = {
        "p_backward": ("dv",), "ds": ("dq", "dk"), "dq": ("dq",), "dkv": ("dk", "dv"),
    }  # fmt: skip
    for point, gradients in changed.items():
        others = [p for p in changed if p != point]
        rounded = recipe_gradients(record, resolve("fa2+" + ",".join(f"{p}=fp32" for p in others)))
        for name in ("dq", "dk", "dv"):
            same = torch.equal(getattr(rounded, name), getattr(plain, name))
            assert same == (name not in gradients), (point, name)


def test_gradients_carry_the_formats_of_the_recipe():
    found = recipe_gradients(record_of(groups=2), resolve("fa2"))
    for tensor in (found.o, found.dq, found.dk, found.dv):
        assert torch.equal(tensor, tensor.bfloat16().float())


def test_a_buffer_that_rounds_at_every_tile_is_further_off():
    record = record_of(heads=2, groups=2, queries=600, keys=600)
    end = recipe_gradients(record, resolve("fa2+tile_q=32,tile_k=32"))
    tile = recipe_gradients(record, resolve("fa2+tile_q=32,tile_k=32,gradients_at=tile"))
    exact = autograd(record)
    for name, truth in zip(("dq", "dk", "dv"), exact[1:], strict=True):
        off = [(getattr(g, name).double() - truth).norm() for g in (end, tile)]
        assert off[1] > 1.5 * off[0], name


def test_refusals_name_the_reason():
    record = record_of(queries=4, keys=4)
    with pytest.raises(InputError, match="no do"):
        recipe_gradients(replace(record, do=None), resolve("fa2"))
