"""The preset eager against Hugging Face's own sequence of operations on BF16 tensors, and its autograd.

The sequence is copied below and, where transformers is installed, taken from it. BF16 products are the one thing that
is replaced: BF16 matrices multiplied in FP32 and rounded once, because a CPU's own BF16 product adds in an order (and
sometimes a precision) of its own. `test_the_cpus_own_products` says how much that matters.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bf16forensics.attention.backward import recipe_gradients
from bf16forensics.attention.dual import dual_pass
from bf16forensics.recipe.derive import resolve

EAGER = resolve("eager")
LOWEST = torch.finfo(torch.bfloat16).min


def padding(size: int, left: int) -> Any:
    import numpy as np

    real = np.ones(size, bool)
    real[:left] = False
    return real


def slopes(heads: int, queries: int) -> Any:
    """A BF16 bias by head that grows with the distance."""
    import numpy as np

    distance = -np.abs(np.arange(queries)[:, None] - np.arange(queries)[None]).astype(np.float32)
    return (
        torch.from_numpy(distance[None] * (2.0 ** -np.arange(1, heads + 1))[:, None, None]).bfloat16().float().numpy()
    )


#: Arguments of `draw`: the scale of 1/sqrt(80) and 1/sqrt(128) is no power of two, so that ds_scale matters.
CALLS: dict[str, dict[str, Any]] = {
    "d64-causal": {"queries": 96, "size": 64},
    "d80-causal": {"queries": 100, "size": 80},
    "d128-causal": {"queries": 128, "size": 128},
    "d128-not-causal": {"queries": 64, "keys": 90, "size": 128, "causal": False},
    "grouped": {"queries": 60, "size": 80, "heads": 6, "kv_heads": 2},
    "one-group": {"queries": 60, "size": 128, "heads": 4, "kv_heads": 1},
    "padded": {"queries": 70, "size": 80, "key_padding": padding(70, 9)},
    "softcap": {"queries": 70, "size": 80, "softcap": 20.0, "spread": 4.0},
    "softcap-grouped-padded": {
        "queries": 50, "size": 64, "heads": 4, "kv_heads": 2, "softcap": 50.0, "spread": 6.0,
        "key_padding": padding(50, 4),
    },
    "bias": {"queries": 64, "size": 80, "heads": 2, "bias": slopes(2, 64)},
    "peaked": {"queries": 96, "size": 128, "spread": 8.0},
    "one-row": {"queries": 1, "keys": 40, "size": 64},
}  # fmt: skip


class RoundedProduct(torch.autograd.Function):
    """A product of BF16 matrices with FP32 (or exact) sums and one rounding, in both passes."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.wide = wide
        return multiplied(a, b, wide)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, b = ctx.saved_tensors
        return multiplied(gradients[0], b.mT, ctx.wide), multiplied(a.mT, gradients[0], ctx.wide), None


def multiplied(a: torch.Tensor, b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return torch.matmul(a.to(wide), b.to(wide)).float().bfloat16()


class Products(TorchFunctionMode):
    """Replaces every torch.matmul by `RoundedProduct`."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self.wide = wide
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and args[0].dtype == torch.bfloat16:
            self.seen += 1
            return RoundedProduct.apply(*args, self.wide)
        return func(*args, **(kwargs or {}))


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers 5.24.0, models/gemma2/modeling_gemma2.py (without dropout); models/llama has no soft-cap."""
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)
    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if softcap is not None:
        attn_weights = attn_weights / softcap
        attn_weights = torch.tanh(attn_weights)
        attn_weights = attn_weights * softcap
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = torch.nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_output = torch.matmul(attn_weights, value_states)
    return attn_output.transpose(1, 2).contiguous(), attn_weights


def additive_mask(record: Any) -> torch.Tensor:
    """[1, 1 or H, N, M] BF16: the lowest number where the pair is hidden, the bias elsewhere."""
    n, m = record.q.shape[1], record.k.shape[1]
    mask = torch.zeros(1, 1, n, m) if record.geometry.bias is None else record.geometry.bias[None].clone()
    visible = record.geometry.visible((0, n), (0, m), n, m)
    return mask.bfloat16() if visible is None else mask.masked_fill(~visible, LOWEST).bfloat16()


def seen_rows(record: Any) -> torch.Tensor:
    """bool [N]: rows that see a key. Where a row sees none, Hugging Face averages all values and a recipe gives 0."""
    n, m = record.q.shape[1], record.k.shape[1]
    visible = record.geometry.visible((0, n), (0, m), n, m)
    return torch.ones(n, dtype=torch.bool) if visible is None else visible[0].any(-1)


def hugging_face(record: Any, function: Any, mode: Any) -> tuple[torch.Tensor, ...]:
    """O, dQ, dK, dV in BF16, [heads, rows, features]."""
    q, k, v = (t.bfloat16()[None].requires_grad_() for t in (record.q, record.k, record.v))
    module = SimpleNamespace(num_key_value_groups=record.num_heads // record.num_kv_heads, training=False)
    cap = {} if record.geometry.softcap is None else {"softcap": record.geometry.softcap}
    with mode:
        o, _ = function(module, q, k, v, additive_mask(record), scaling=record.geometry.scale, **cap)
    o = o.transpose(1, 2)
    o.backward(record.do.bfloat16()[None])
    return tuple(t.detach()[0] for t in (o, q.grad, k.grad, v.grad))


def drawn(oracle: ModuleType, record_of: Any, name: str) -> Any:
    """A record whose rows that see nothing get no gradient."""
    record = record_of(oracle.draw(len(name) + 500, **CALLS[name]))
    record.do[:, ~seen_rows(record)] = 0.0
    return record


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    different = found.bfloat16().view(torch.int16) != expected.view(torch.int16)
    # A sum that is 0 may carry either sign.
    different &= (found != 0) | (expected.float() != 0)
    assert not different.any(), f"{what}: {different.double().mean():.2e} of the elements differ"


@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward_bit_for_bit(oracle: ModuleType, record_of: Any, name: str) -> None:
    """T0: O, dQ, dK and dV."""
    record = drawn(oracle, record_of, name)
    mode = Products(torch.float32)
    o, dq, dk, dv = hugging_face(record, eager_attention_forward, mode)
    assert mode.seen == 2
    rows = seen_rows(record)
    found = recipe_gradients(record, EAGER)
    assert_same_bits(found.o[:, rows], o[:, rows], "O")
    for what, mine, expected in (("dQ", found.dq, dq), ("dK", found.dk, dk), ("dV", found.dv, dv)):
        assert_same_bits(mine, expected, what)
    dual = dual_pass(record, EAGER, "fp32")
    assert_same_bits(dual.o_lp.float()[:, rows], o[:, rows], "O of the dual pass")
    assert dual.dq is not None
    assert_same_bits(dual.dq.lp.float(), dq, "dQ of the dual pass")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d80-causal", "grouped", "softcap", "padded"])
def test_against_the_installed_library(oracle: ModuleType, record_of: Any, name: str) -> None:
    """T0, with the library's own function instead of the copy."""
    family = "gemma2" if "softcap" in name else "llama"
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    record = drawn(oracle, record_of, name)
    rows = seen_rows(record)
    o, dq, dk, dv = hugging_face(record, modeling.eager_attention_forward, Products(torch.float32))
    found = recipe_gradients(record, EAGER)
    assert_same_bits(found.o[:, rows], o[:, rows], "O")
    for what, mine, expected in (("dQ", found.dq, dq), ("dK", found.dk, dk), ("dV", found.dv, dv)):
        assert_same_bits(mine, expected, what)


@pytest.mark.parametrize("size", [64, 80])
def test_longer_rows(oracle: ModuleType, record_of: Any, size: int) -> None:
    """T2: blocks of rows add a softmax's row in another order, so that a rounding of P flips now and then."""
    record = record_of(oracle.draw(520, queries=300, size=size))
    exact = resolve("eager+arithmetic=exact")
    expected = hugging_face(record, eager_attention_forward, Products(torch.float64))
    found = recipe_gradients(record, exact)
    for mine, other in zip((found.o, found.dq, found.dk, found.dv), expected, strict=True):
        assert (mine.bfloat16() != other).double().mean() <= 1e-3


@pytest.mark.parametrize("size", [64, 80])
def test_the_cpus_own_products(oracle: ModuleType, record_of: Any, size: int) -> None:
    """With torch's own BF16 matmul, at least 99 % of every tensor is equal and nothing is off by more than noise.

    Products differ in the order of their FP32 sums, so a BF16 rounding of S, P, dP or dS may flip: each moves a result
    by less than 2^-7 of its largest term.
    """
    from contextlib import nullcontext

    record = record_of(oracle.draw(530, queries=40, size=size))
    expected = hugging_face(record, eager_attention_forward, nullcontext())
    found = recipe_gradients(record, EAGER)
    for mine, other in zip((found.o, found.dq, found.dk, found.dv), expected, strict=True):
        assert (mine.bfloat16() == other).double().mean() >= 0.99
        assert (mine - other.float()).abs().max() <= 2.0**-7 * mine.abs().max()


def test_every_point_is_needed(oracle: ModuleType, record_of: Any) -> None:
    """The comparison can fail: another value of any point that the preset sets moves some tensor."""
    record = drawn(oracle, record_of, "d80-causal")
    expected = hugging_face(record, eager_attention_forward, Products(torch.float32))
    changes = (
        "scores=fp32", "p_bar=fp32", "p_bar_cast=before", "shifted=bf16", "row_sum=bf16", "o=fp32", "dp=fp32",
        "ds=fp32", "ds_scale=gradients", "dq=fp32", "dkv=fp32", "p_backward=fp32", "delta_source=o", "delta=bf16",
    )  # fmt: skip
    for change in changes:
        found = recipe_gradients(record, resolve(f"eager+{change}"))
        pairs = zip((found.o, found.dq, found.dk, found.dv), expected, strict=True)
        assert any(not torch.equal(mine, other.float()) for mine, other in pairs), change


def test_the_scale_rounds_ds_again(oracle: ModuleType, record_of: Any) -> None:
    """At D 64 the scale is a power of two and rounding dS a second time changes nothing; at D 80 it does."""
    for size, same in ((64, True), (80, False)):
        record = record_of(oracle.draw(540, queries=60, size=size))
        found = [recipe_gradients(record, resolve(name)) for name in ("eager", "eager+ds_scale=gradients")]
        assert torch.equal(found[0].dq, found[1].dq) == same
        assert torch.equal(found[0].dk, found[1].dk) == same
        assert torch.equal(found[0].dv, found[1].dv)
