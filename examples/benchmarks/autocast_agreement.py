"""How closely emulated mixed precision on a CPU follows CUDA autocast on a GPU, layer by layer.

    python examples/benchmarks/autocast_agreement.py [CKPT] [--tokens FILE] [--device cpu]

A nanoGPT model runs forward and backward on a GPU under torch.autocast("cuda", bfloat16) with the flash attention of
scaled_dot_product_attention. Its first sequence is captured on the CPU with amp-bf16 and the recipe fa2. Both see
the same tokens and the same FP32 weights: GPT-2's sizes and initialisation (biases drawn too) unless a checkpoint is
given.

Three comparisons of the BF16 numbers q, k, v and dO:

- free running: each side from the tokens on. A rounding that flipped in one layer moves everything after it.
- one layer: q, k and v from the GPU's own X; O from the GPU's q, k and v; dO from the GPU's O, residual stream and
  gradient of the layer's output. What differs here was made here.
- the distance of the amp-bf16 capture and of the fp32 capture from the GPU, relative to the GPU's own norm.

The batch is larger than the one sequence that is compared because with few heads the attention kernel splits its keys,
which is another recipe. Its gradients are those of the batch's mean loss, which a power of two scales exactly.

With --device cpu the emulation takes the GPU's place, to try the script out: use small sizes.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.capture.activations import Activations, AmpActivations, Fp32Activations
from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.emulate.autocast import CudaAutocast
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTConfig, load_nanogpt
from bf16forensics.recipe.derive import resolve

#: [B, H, T, D] three times to [B, H, T, D], causal.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def made_checkpoint(given: argparse.Namespace) -> NanoGPTCheckpoint:
    """A model as nanoGPT initialises it; biases, which start at 0 there, are drawn so that they take part."""
    generator = torch.Generator().manual_seed(given.seed)

    def draw(*shape: int, spread: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    width, layers = given.width, given.layers
    state = {
        "transformer.wte.weight": draw(given.vocabulary, width),
        "transformer.wpe.weight": draw(given.context, width),
    }
    for layer in range(layers):
        prefix = f"transformer.h.{layer}."
        for name, out, inside in (("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width),
                                  ("mlp.c_fc", 4 * width, width), ("mlp.c_proj", width, 4 * width)):  # fmt: skip
            spread = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj") else 0.02
            state[f"{prefix}{name}.weight"] = draw(out, inside, spread=spread)
            state[f"{prefix}{name}.bias"] = draw(out)
        for name in ("ln_1", "ln_2"):
            state[f"{prefix}{name}.weight"], state[f"{prefix}{name}.bias"] = 1.0 + draw(width), draw(width)
    state["transformer.ln_f.weight"], state["transformer.ln_f.bias"] = 1.0 + draw(width), draw(width)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return NanoGPTCheckpoint(
        config=NanoGPTConfig(
            n_layer=layers, n_head=given.heads, n_embd=width, block_size=given.context, vocab_size=given.vocabulary,
            bias=True, dropout=0.0,
        ),
        iter_num=None, weight_dtype="fp32", tied=True, notes=(), unused_tensors=(), path="made", size_bytes=0,
        sha256="", tensors=state,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one side saw: lists by layer, first sequence of the batch, on the CPU."""

    loss: float = math.nan
    #: [T, C] FP32 input of each layer and gradient of each layer's output.
    hidden: list[torch.Tensor] = field(default_factory=list)
    upstream: list[torch.Tensor] = field(default_factory=list)
    #: [T, C] FP32 input of the projection to q, k and v.
    x: list[torch.Tensor] = field(default_factory=list)
    #: [H, T, D] BF16 each.
    q: list[torch.Tensor] = field(default_factory=list)
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    o: list[torch.Tensor] = field(default_factory=list)
    do: list[torch.Tensor] = field(default_factory=list)


class Model:
    """nanoGPT in torch operations, as its own model.py has them; the casts are up to the context it runs in."""

    def __init__(self, checkpoint: NanoGPTCheckpoint, device: str, attention: Attention) -> None:
        self.config, self.attention = checkpoint.config, attention
        self.tensors = {name: t.float().to(device) for name, t in checkpoint.tensors.items()}

    def weight(self, layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a module."""
        prefix = f"transformer.h.{layer}.{name}." if layer >= 0 else f"transformer.{name}."
        return self.tensors[prefix + "weight"], self.tensors.get(prefix + "bias")

    def norm(self, hidden: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        """A LayerNorm of the model."""
        return functional.layer_norm(hidden, (self.config.n_embd,), *self.weight(layer, name), 1e-5)

    def heads(self, x: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
        """q, k and v of X."""
        parts = functional.linear(x, *self.weight(layer, "attn.c_attn")).split(self.config.n_embd, -1)
        return tuple(p.view(*p.shape[:-1], self.config.n_head, -1).transpose(1, 2) for p in parts)

    def after_attention(self, hidden: torch.Tensor, o: torch.Tensor, layer: int) -> torch.Tensor:
        """The layer's output from its input and O."""
        joined = o.transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + functional.linear(joined, *self.weight(layer, "attn.c_proj"))
        inside = functional.linear(self.norm(hidden, layer, "ln_2"), *self.weight(layer, "mlp.c_fc"))
        return hidden + functional.linear(functional.gelu(inside), *self.weight(layer, "mlp.c_proj"))

    def trace(self, ids: torch.Tensor, labels: torch.Tensor, arithmetic: AbstractContextManager[object]) -> Trace:
        """Forward and backward of a batch [B, T]; gradients are those of the sequences' own mean losses."""
        count, kept = ids.shape[0], []
        with arithmetic:
            hidden = functional.embedding(ids, self.tensors["transformer.wte.weight"])
            hidden = (hidden + self.tensors["transformer.wpe.weight"][: ids.shape[1]]).requires_grad_()
            for layer in range(self.config.n_layer):
                x = self.norm(hidden, layer, "ln_1")
                q, k, v = self.heads(x, layer)
                o = self.attention(q, k, v)
                out = self.after_attention(hidden, o, layer)
                for tensor in (o, out):
                    tensor.retain_grad()
                kept.append((hidden, x, q, k, v, o, out))
                hidden = out
            logits = functional.linear(self.norm(hidden, -1, "ln_f"), self.tensors["lm_head.weight"])
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean")
        loss.backward()
        first = [[t.detach()[0].cpu() for t in layer[:-1]] for layer in kept]
        # The graph holds the gradient of the batch's mean: one sequence's is B times that, exactly.
        gradients = [[(t.grad[0] * count).cpu() for t in layer[-2:] if t.grad is not None] for layer in kept]
        with arithmetic, torch.no_grad():
            own = functional.cross_entropy(logits[0], labels[0])
        hidden, x, q, k, v, o = (list(parts) for parts in zip(*first, strict=True))
        do, upstream = (list(parts) for parts in zip(*gradients, strict=True))
        return Trace(loss=float(own), hidden=hidden, upstream=upstream, x=x, q=q, k=k, v=v, o=o, do=do)

    def layer_by_layer(self, seen: Trace) -> Trace:
        """Every step of every layer from what the other side saw just before it."""
        found = Trace()
        for layer in range(self.config.n_layer):
            with strict_fp32(), CudaAutocast():
                with torch.no_grad():
                    parts = [t[0] for t in self.heads(seen.x[layer][None], layer)]
                    o = self.attention(*(t[layer][None] for t in (seen.q, seen.k, seen.v)))[0]
                leaf = seen.o[layer][None].requires_grad_()
                out = self.after_attention(seen.hidden[layer][None], leaf, layer)
            with strict_fp32():
                (do,) = torch.autograd.grad(out, leaf, seen.upstream[layer][None])
            for name, tensor in zip(("q", "k", "v", "o", "do"), (*parts, o, do[0]), strict=True):
                getattr(found, name).append(tensor)
        return found


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's FlashAttention kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_recipe(recipe: str) -> Attention:
    """The recipe, sequence by sequence."""
    attend = RecipeAttention(recipe=resolve(recipe))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        geometry = Geometry(scale=1.0 / math.sqrt(q.shape[-1]))
        return torch.stack([attend(*one, geometry) for one in zip(q, k, v, strict=True)])

    return attention


def captured(
    checkpoint: NanoGPTCheckpoint, activations: Activations, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[list[AttentionRecord], float]:
    """The tool's own capture of one sequence, first layer first."""
    losses: list[float] = []
    sequence = SequenceInput(index=0, step=None, ids=ids, labels=labels)
    records = list(
        NanoGPTCapture(checkpoint=checkpoint, activations=activations).sequence_records(sequence, losses.append)
    )
    return records[::-1], losses[0]


def equal_share(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of equal elements, in percent."""
    return 100.0 * (a.bfloat16() == b.bfloat16()).double().mean().item()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference by the norm of b."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def print_tables(seen: Trace, amp: list[AttentionRecord], fp32: list[AttentionRecord], single: Trace) -> None:
    """Equal shares by layer and distances by layer, 80 columns."""
    free, alone = ("q", "k", "v", "do"), ("q", "k", "v", "o", "do")
    print(f"\n{'equal, %':>8} {'free running':>31}  {'one layer':>39}")
    print(f"{'layer':>8}{_heading(free)} {_heading(alone)}")
    for layer, record in enumerate(amp):
        shares = [equal_share(getattr(record, name), getattr(seen, name)[layer]) for name in free]
        own = [equal_share(getattr(single, name)[layer], getattr(seen, name)[layer]) for name in alone]
        print(f"{layer:>8}" + "".join(f"{s:8.2f}" for s in shares) + " " + "".join(f"{s:8.2f}" for s in own))
    print(f"\n{'distance':>8} {'of the amp-bf16 capture':>31}  {'of the fp32 capture':>31}")
    print(f"{'layer':>8}{_heading(free)} {_heading(free)}")
    for layer, records in enumerate(zip(amp, fp32, strict=True)):
        apart = [[distance(getattr(r, name), getattr(seen, name)[layer]) for name in free] for r in records]
        print(f"{layer:>8}" + " ".join("".join(f"{value:8.1e}" for value in part) for part in apart))


def _heading(names: tuple[str, ...]) -> str:
    return "".join(f"{ {'o': 'O', 'do': 'dO'}.get(name, name):>8}" for name in names)


def main() -> int:
    """Runs both sides and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--tokens", help="nanoGPT token file (uint16); random tokens otherwise")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--recipe", default="fa2")
    parser.add_argument("--batch", type=int, default=16, help="sequences on the GPU, a power of two")
    for name, default in (("layers", 12), ("heads", 12), ("width", 768), ("context", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.batch < 1 or given.batch & (given.batch - 1):
        parser.error("--batch must be a power of two")

    checkpoint = made_checkpoint(given) if given.checkpoint is None else load_nanogpt(given.checkpoint)
    config, generator = checkpoint.config, torch.Generator().manual_seed(given.seed)
    context = min(given.context, config.block_size)
    if given.tokens is None:
        both = torch.randint(0, config.vocab_size, (given.batch, context + 1), generator=generator)
    else:
        data = np.fromfile(given.tokens, dtype=np.uint16, count=given.batch * (context + 1))
        both = torch.from_numpy(data.astype(np.int64)).view(given.batch, context + 1)
    ids, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()

    started = time.perf_counter()
    if given.device == "cuda":
        real = Model(checkpoint, "cuda", flash)
        seen = real.trace(ids.cuda(), labels.cuda(), torch.autocast("cuda", torch.bfloat16))
        where = torch.cuda.get_device_name()
    else:
        with strict_fp32():
            seen = Model(checkpoint, "cpu", by_recipe(given.recipe)).trace(ids, labels, CudaAutocast())
        where = "the emulation itself"
    on_device = time.perf_counter() - started
    amp, loss = captured(
        checkpoint, AmpActivations(by_recipe=RecipeAttention(recipe=resolve(given.recipe))), ids[0], labels[0]
    )
    amp_s = time.perf_counter() - started - on_device
    fp32, fp32_loss = captured(checkpoint, Fp32Activations(), ids[0], labels[0])
    single = Model(checkpoint, "cpu", by_recipe(given.recipe)).layer_by_layer(seen)
    sizes = f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, {context} tokens"
    print(f"{sizes}, batch {given.batch}; recipe {given.recipe}")
    print(f"compared with {where}, torch {torch.__version__}")
    print(f"loss: {seen.loss:.7f} there, {loss:.7f} amp-bf16, {fp32_loss:.7f} fp32")
    print_tables(seen, amp, fp32, single)
    total = time.perf_counter() - started
    print(f"\n{total:.0f} s: {on_device:.0f} s there, {amp_s:.0f} s for the amp-bf16 capture")
    return 0


if __name__ == "__main__":
    sys.exit(main())
