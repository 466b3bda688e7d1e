"""What the fused dual pass is timed against: forward passes of other libraries, a step of training, naive ways.

Shapes: H heads, N queries and keys, D elements of a head; causal.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from bf16forensics.kernels.fused_types import FusedInputs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

#: Elements of one matrix of scores that exist at once, of the eager pair (whole heads) and of float64, and rows of the
#: latter, which sees no keys beyond them.
_EAGER_ELEMENTS, _FP64_ELEMENTS, _FP64_ROWS = 2**28, 2**26, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Something to be timed."""

    #: From the inputs to its arguments; not timed.
    prepare: Callable[[FusedInputs], Any]
    call: Callable[[Any], Any]
    #: From what the call returns to O, [H, N, D]; None where there is none.
    output: Callable[[Any], torch.Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Attention in float64, rows of some heads."""

    #: [H, N, D], and log-sum-exp in nats [H, N].
    o: torch.Tensor
    lse: torch.Tensor
    #: [H, N, D] P K without the scale.
    carrier: torch.Tensor
    #: [H, N] rowsum(dO * O).
    delta: torch.Tensor
    #: [H, N, D] P|V| and P|K|: what errors are relative to. None unless asked for.
    o_weight: torch.Tensor | None
    carrier_weight: torch.Tensor | None


def flash_forward() -> Rival:
    """SDPA by its flash backend: FlashAttention-2 on a GPU."""
    return _sdpa(SDPBackend.FLASH_ATTENTION)


def other_forwards(inputs: FusedInputs) -> tuple[dict[str, Rival], list[str]]:
    """The other forward passes of this machine by name, and one clause for each that is not there."""
    found, missing = {}, []
    for name, make in (("cuDNN (SDPA)", lambda: _sdpa(SDPBackend.CUDNN_ATTENTION)), *_packages()):
        try:
            rival = make()
            with warnings.catch_warnings():
                # Why a backend cannot run is a warning each; that it cannot is an error.
                warnings.simplefilter("ignore")
                rival.call(rival.prepare(inputs))
        except (ImportError, RuntimeError) as error:
            missing.append(f"{name}: {'not installed' if isinstance(error, ImportError) else 'cannot run here'}")
            continue
        found[name] = rival
    return found, missing


def flash_forward_backward() -> Rival:
    """Forward and backward pass of SDPA's flash backend."""

    def prepare(inputs: FusedInputs) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        q, k, v, do = _operands(inputs)
        return [t[None].detach().clone().requires_grad_() for t in (q, k, v)], do[None], inputs.scale

    def call(given: tuple[list[torch.Tensor], torch.Tensor, float]) -> tuple[torch.Tensor, ...]:
        (q, k, v), do, scale = given
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return torch.autograd.grad(o, (q, k, v), do)

    return Rival(prepare=prepare, call=call, output=None)


def eager_pair() -> Rival:
    """Eager attention in BF16 and in FP32 with all scores of some heads in memory, and the error of delta."""
    return Rival(prepare=lambda inputs: inputs, call=_eager_pair, output=lambda found: found[0])


def chunked_fp64() -> Rival:
    """Attention, delta and P K in float64, some rows at a time."""
    return Rival(prepare=lambda inputs: inputs, call=exact, output=lambda found: found.o)


def exact(inputs: FusedInputs, heads: int | None = None, *, weights: bool = False) -> Exact:
    """Attention of the first heads in float64.

    Args:
        inputs: causal, without other masks, as many keys as queries and key/value heads as query heads.
        heads: how many; None for all.
        weights: whether the sums of magnitudes are computed too.
    """
    q, k, v = (t[:heads] for t in (inputs.q, inputs.k, inputs.v))
    if inputs.do is None:
        raise ValueError("expected inputs with dO")
    do = inputs.do[:heads]
    o, carrier = (torch.empty(t.shape, dtype=torch.float64, device=t.device) for t in (v, q))
    lse, delta = (torch.empty(q.shape[:2], dtype=torch.float64, device=q.device) for _ in range(2))
    o_weight, carrier_weight = (torch.empty_like(o), torch.empty_like(carrier)) if weights else (None, None)
    for own, rows in _chunks(*q.shape[:2]):
        # Rows see no key beyond the last of them.
        keys = slice(0, rows.stop)
        k_own, v_own = k[own, keys].double(), v[own, keys].double()
        s = (q[own, rows].double() * inputs.scale) @ k_own.transpose(1, 2)
        hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(rows.start + 1)
        s.masked_fill_(hidden, -math.inf)
        lse[own, rows] = torch.logsumexp(s, -1)
        p = s.sub_(lse[own, rows][..., None]).exp_()
        o[own, rows], carrier[own, rows] = p @ v_own, p @ k_own
        delta[own, rows] = (do[own, rows].double() * o[own, rows]).sum(-1)
        if o_weight is not None and carrier_weight is not None:
            o_weight[own, rows], carrier_weight[own, rows] = p @ v_own.abs(), p @ k_own.abs()
    return Exact(o=o, lse=lse, carrier=carrier, delta=delta, o_weight=o_weight, carrier_weight=carrier_weight)


def _chunks(num_heads: int, num_queries: int) -> Iterator[tuple[slice, slice]]:
    rows = min(num_queries, _FP64_ROWS)
    heads = max(1, _FP64_ELEMENTS // (rows * num_queries))
    for head in range(0, num_heads, heads):
        for row in range(0, num_queries, rows):
            yield slice(head, min(head + heads, num_heads)), slice(row, min(row + rows, num_queries))


def _operands(inputs: FusedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and dO in BF16: the interpreter has them in FP32."""
    if inputs.do is None:
        raise ValueError("expected inputs with dO")
    return inputs.q.bfloat16(), inputs.k.bfloat16(), inputs.v.bfloat16(), inputs.do.bfloat16()


def _sdpa(backend: SDPBackend) -> Rival:
    def call(given: tuple[list[torch.Tensor], float]) -> torch.Tensor:
        (q, k, v), scale = given
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    return Rival(
        prepare=lambda inputs: ([t[None] for t in _operands(inputs)[:3]], inputs.scale),
        call=call,
        output=lambda found: found[0],
    )


def _packages() -> list[tuple[str, Callable[[], Rival]]]:
    def rival(module: str) -> Rival:
        function = import_module(module).flash_attn_func

        def output(found: Any) -> torch.Tensor:
            o = found[0] if isinstance(found, tuple) else found
            return o[0].transpose(0, 1)

        return Rival(
            # Tokens come before heads there.
            prepare=lambda inputs: (
                [t.transpose(0, 1)[None].contiguous() for t in _operands(inputs)[:3]], inputs.scale,
            ),
            call=lambda given: function(*given[0], softmax_scale=given[1], causal=True),
            output=output,
        )  # fmt: skip

    return [
        ("FlashAttention-3", lambda: rival("flash_attn_interface")),
        ("FlashAttention-2", lambda: rival("flash_attn")),
    ]


def _eager_pair(inputs: FusedInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """O in FP32, and the error of delta."""
    q, k, v, do = _operands(inputs)
    num_queries = q.shape[1]
    hidden = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).triu(1)
    o_hp = torch.empty(v.shape, dtype=torch.float32, device=q.device)
    delta_err = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for some in torch.arange(len(q)).split(max(1, _EAGER_ELEMENTS // num_queries**2)):
        own = slice(int(some[0]), int(some[-1]) + 1)
        s = (q[own] @ k[own].transpose(1, 2) * inputs.scale).masked_fill_(hidden, -math.inf)
        o_lp = torch.softmax(s, -1, dtype=torch.float32).bfloat16() @ v[own]
        s = (q[own].float() @ k[own].float().transpose(1, 2) * inputs.scale).masked_fill_(hidden, -math.inf)
        o_hp[own] = torch.softmax(s, -1) @ v[own].float()
        delta_err[own] = (do[own].float() * (o_lp.float() - o_hp[own])).sum(-1)
    return o_hp, delta_err
