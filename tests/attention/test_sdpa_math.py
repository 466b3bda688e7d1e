"""The preset sdpa-math against PyTorch's MATH backend on BF16 tensors, forward and backward."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bf16forensics.attention.dual import dual_pass
from bf16forensics.recipe.derive import resolve

MATH = resolve("sdpa-math")

#: Arguments of `draw`; up to 128 rows the reference computes whole matrices of the backend's own shape.
SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"queries": 60, "size": 64},
    "not-causal": {"queries": 60, "size": 64, "causal": False},
    "one-block": {"queries": 128, "size": 64, "heads": 3},
    "odd-head-size": {"queries": 33, "size": 72},
    "one-row": {"queries": 1, "keys": 50, "causal": False},
    "scale": {"queries": 40, "scale": 0.3, "causal": False},
    "peaked": {"queries": 64, "size": 64, "spread": 10.0},
    "grouped": {"queries": 40, "heads": 4, "kv_heads": 2, "size": 32},
}


def backend(record: Any, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """O and dQ of the MATH backend, BF16."""
    group = record.num_heads // record.num_kv_heads
    q = record.q.bfloat16()[None].requires_grad_()
    k, v = (t.bfloat16().repeat_interleave(group, 0)[None] for t in (record.k, record.v))
    with sdpa_kernel(SDPBackend.MATH):
        o = scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale)
    o.backward(record.do.bfloat16()[None])
    assert q.grad is not None
    return o.detach()[0], q.grad[0]


@pytest.mark.parametrize("name", SHAPES)
def test_output_is_the_backends_bit_for_bit(oracle: ModuleType, record_of: Any, name: str) -> None:
    """T0."""
    call = oracle.draw(80 + len(name), **SHAPES[name])
    record = record_of(call)
    o, _ = backend(record, call)
    found = dual_pass(record, MATH).o_lp
    assert torch.equal(found.bfloat16().view(torch.int16), o.view(torch.int16))
    assert torch.equal(found, o.double())


@pytest.mark.parametrize("name", SHAPES)
def test_query_gradient_is_the_backends(oracle: ModuleType, record_of: Any, name: str) -> None:
    """T2: the same FP32 formula in another order, then one cast: within one BF16 step, nearly always equal.

    Where one key has nearly all the probability, dP - delta cancels to the FP32 noise of the order: not counted.
    """
    call = oracle.draw(80 + len(name), **SHAPES[name])
    record = record_of(call)
    _, dq = backend(record, call)
    found = dual_pass(record, MATH).dq.lp
    dense = oracle.dense(call)
    error = (found - dq.double()).abs()
    assert (error <= found.abs() * 2.0**-7 + oracle.budget(call, dense, 2.0**-24).dq).all()
    spread_out = torch.from_numpy(dense.p.max(-1) < 0.999)
    assert spread_out.double().mean() > 0.5
    assert (error > 0)[spread_out].double().mean() <= 0.01


@pytest.mark.parametrize("queries", [200, 300])
def test_longer_rows_differ_by_the_order_of_fp32_sums_only(oracle: ModuleType, record_of: Any, queries: int) -> None:
    """T2: blocks of 128 rows multiply matrices of other shapes, whose sums a BLAS may order differently."""
    call = oracle.draw(90, queries=queries, size=64)
    record = record_of(call)
    o, _ = backend(record, call)
    found = dual_pass(record, MATH).o_lp
    dense = oracle.dense(call)
    noise = oracle.budget(call, dense, 2.0**-24).o
    assert ((found - o.double()).abs() <= o.double().abs() * 2.0**-7 + noise).all()
    assert (found != o.double()).double().mean() <= 0.002


def test_other_recipes_are_not_the_backend(oracle: ModuleType, record_of: Any) -> None:
    """The comparison can fail: a cast of P-bar, or of S, moves many outputs."""
    call = oracle.draw(91, queries=60, size=64)
    record = record_of(call)
    o, _ = backend(record, call)
    for name in ("fa2", "sdpa-math+p_bar=bf16", "sdpa-math+scores=bf16", "paper"):
        assert (dual_pass(record, resolve(name)).o_lp != o.double()).double().mean() > 0.02, name


def test_bf16_reductions_are_another_recipe(oracle: ModuleType, record_of: Any) -> None:
    """The backend's optional BF16 arithmetic is not what the preset promises."""
    call = oracle.draw(92, queries=60, size=64)
    record = record_of(call)
    was = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        o, _ = backend(record, call)
        found = dual_pass(record, MATH).o_lp
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(was)
    assert (found != o.double()).double().mean() > 0.2
    assert torch.equal(found, backend(record, call)[0].double())
