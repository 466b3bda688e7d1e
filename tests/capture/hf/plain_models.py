"""Small causal language models written out in plain float64 torch, from the families' published descriptions.

They read the same safetensors files as the capture, by the names in the files, and know nothing of transformers. One
sequence at a time, masks as explicit loops. Where q, k and v are rounded, the gradient passes straight through.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional

Tensor = torch.Tensor


@dataclass
class Seen:
    """One attention call: [T, C] x, [H, T, D] q, [G, T, D] k, [G, T, E] v, [H, T, E] o, all part of the graph."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    visible: Tensor


@dataclass
class Plan:
    """What a family does; sizes come from the configuration."""

    family: str
    heads: int
    kv_heads: int
    size: int
    scale: float
    theta: float = 10000.0
    eps: float = 1e-6
    window_of: Callable[[int], int | None] = lambda layer: None
    theta_of: Callable[[int], float] | None = None
    softcap: float | None = None
    final_softcap: float | None = None
    #: DeepSeek: sizes without and with rotation, of v, of the compressed keys; experts chosen, groups, factor.
    nope: int = 0
    rope: int = 0
    value: int = 0
    kv_rank: int = 0
    chosen: int = 0
    groups: int = 0
    kept_groups: int = 0
    factor: float = 1.0
    dense_layers: int = 0


@dataclass
class PlainModel:
    plan: Plan
    weights: dict[str, Tensor]
    layers: int
    rounded_to: torch.dtype | None = None
    seen: list[Seen] = field(default_factory=list)

    def w(self, name: str) -> Tensor:
        return self.weights[name]

    def logits(self, ids: Tensor, positions: Tensor, visible_of: Callable[[int], Tensor]) -> Tensor:
        """[T, V]; `visible_of` gives each layer's [T, T] visibility."""
        self.seen = []
        if self.plan.family == "gpt2":
            return self._gpt2(ids, positions, visible_of)
        hidden = self.w("model.embed_tokens.weight")[ids]
        if self.plan.family == "gemma3":
            hidden = hidden * math.sqrt(hidden.shape[-1])
        for layer in range(self.layers):
            hidden = self._layer(layer, hidden, positions, visible_of(layer))
        head = self.weights.get("lm_head.weight", self.w("model.embed_tokens.weight"))
        logits = self._norm(hidden, "model.norm") @ head.T
        cap = self.plan.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, ids: Tensor, labels: Tensor, positions: Tensor, visible_of: Callable[[int], Tensor]) -> Tensor:
        return functional.cross_entropy(self.logits(ids, positions, visible_of), labels, ignore_index=-100)

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """[T, H * E]; notes the call."""
        if self.rounded_to is not None:
            q, k, v = (t + (t.to(self.rounded_to).to(t.dtype) - t).detach() for t in (q, k, v))
        group = q.shape[0] // k.shape[0]
        rows = []
        for head in range(q.shape[0]):
            scores = self.plan.scale * (q[head] @ k[head // group].T)
            if self.plan.softcap is not None:
                scores = self.plan.softcap * torch.tanh(scores / self.plan.softcap)
            p = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1).nan_to_num(nan=0.0)
            rows.append(p @ v[head // group])
        o = torch.stack(rows)
        o.retain_grad()
        self.seen.append(Seen(x=x, q=q, k=k, v=v, o=o, visible=visible))
        return o.transpose(0, 1).flatten(1)

    def _gpt2(self, ids: Tensor, positions: Tensor, visible_of: Callable[[int], Tensor]) -> Tensor:
        hidden = self.w("transformer.wte.weight")[ids] + self.w("transformer.wpe.weight")[positions]
        for layer in range(self.layers):
            name = f"transformer.h.{layer}"
            x = self._layer_norm(hidden, f"{name}.ln_1")
            # GPT-2 stores [in, out].
            q, k, v = (self._split(part) for part in self._conv(x, f"{name}.attn.c_attn").chunk(3, -1))
            hidden = hidden + self._conv(self._attend(x, q, k, v, visible_of(layer)), f"{name}.attn.c_proj")
            inner = self._conv(self._layer_norm(hidden, f"{name}.ln_2"), f"{name}.mlp.c_fc")
            hidden = hidden + self._conv(functional.gelu(inner, approximate="tanh"), f"{name}.mlp.c_proj")
        head = self.weights.get("lm_head.weight", self.w("transformer.wte.weight"))
        return self._layer_norm(hidden, "transformer.ln_f") @ head.T

    def _layer(self, layer: int, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        name, family = f"model.layers.{layer}", self.plan.family
        attention = self._mla if family == "deepseek" else self._grouped
        if family == "olmo2":
            out = attention(layer, hidden, positions, visible)
            hidden = hidden + self._norm(out, f"{name}.post_attention_layernorm")
            return hidden + self._norm(self._mlp(hidden, f"{name}.mlp"), f"{name}.post_feedforward_layernorm")
        out = attention(layer, self._norm(hidden, f"{name}.input_layernorm"), positions, visible)
        if family == "gemma3":
            hidden = hidden + self._norm(out, f"{name}.post_attention_layernorm")
            out = self._mlp(self._norm(hidden, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
            return hidden + self._norm(out, f"{name}.post_feedforward_layernorm")
        hidden = hidden + out
        x = self._norm(hidden, f"{name}.post_attention_layernorm")
        if family == "deepseek" and layer >= self.plan.dense_layers:
            return hidden + self._experts(x, f"{name}.mlp")
        return hidden + self._mlp(x, f"{name}.mlp")

    def _grouped(self, layer: int, x: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        flat = [self._linear(x, f"{name}.{part}_proj") for part in "qkv"]
        if self.plan.family == "olmo2":
            flat[:2] = self._norm(flat[0], f"{name}.q_norm"), self._norm(flat[1], f"{name}.k_norm")
        q, k, v = (self._split(part) for part in flat)
        if self.plan.family in ("qwen3", "gemma3"):
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        theta = self.plan.theta if self.plan.theta_of is None else self.plan.theta_of(layer)
        q, k = rotated_halves(q, positions, theta), rotated_halves(k, positions, theta)
        return self._linear(self._attend(x, q, k, v, visible), f"{name}.o_proj")

    def _mla(self, layer: int, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        plan, name = self.plan, f"model.layers.{layer}.self_attn"
        if f"{name}.q_b_proj.weight" in self.weights:
            x = self._norm(self._linear(hidden, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
            q = self._linear(x, f"{name}.q_b_proj")
        else:
            x = hidden
            q = self._linear(x, f"{name}.q_proj")
        q = q.view(len(hidden), plan.heads, plan.nope + plan.rope).transpose(0, 1)
        compressed = self._linear(hidden, f"{name}.kv_a_proj_with_mqa")
        latent = self._norm(compressed[:, : plan.kv_rank], f"{name}.kv_a_layernorm")
        both = self._linear(latent, f"{name}.kv_b_proj").view(len(hidden), plan.heads, -1).transpose(0, 1)
        turned = rotated_pairs(compressed[None, :, plan.kv_rank :], positions, plan.theta)
        k = torch.cat([both[..., : plan.nope], turned.expand(plan.heads, -1, -1)], -1)
        q = torch.cat([q[..., : plan.nope], rotated_pairs(q[..., plan.nope :], positions, plan.theta)], -1)
        return self._linear(self._attend(x, q, k, both[..., plan.nope :], visible), f"{name}.o_proj")

    def _experts(self, x: Tensor, name: str) -> Tensor:
        plan = self.plan
        scores = torch.sigmoid(self._linear(x, f"{name}.gate"))
        biased = (scores + self.w(f"{name}.gate.e_score_correction_bias")).detach()
        out = self._mlp(x, f"{name}.shared_experts")
        rows = []
        for token in range(len(x)):
            by_group = biased[token].view(plan.groups, -1)
            best = by_group.topk(2, -1).values.sum(-1).topk(plan.kept_groups).indices
            allowed = torch.zeros_like(by_group, dtype=torch.bool)
            allowed[best] = True
            chosen = biased[token].masked_fill(~allowed.flatten(), -torch.inf).topk(plan.chosen).indices
            share = scores[token, chosen] / scores[token, chosen].sum() * plan.factor
            parts = [self._mlp(x[token], f"{name}.experts.{int(expert)}") for expert in chosen]
            rows.append(sum(weight * part for weight, part in zip(share, parts, strict=True)))
        return out + torch.stack(rows)  # type: ignore[arg-type]

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj")
        acted = functional.gelu(gate, approximate="tanh") if self.plan.family == "gemma3" else functional.silu(gate)
        return self._linear(acted * up, f"{name}.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w(f"{name}.weight")
        factor = 1 + weight if self.plan.family == "gemma3" else weight
        eps = 1e-6 if name.endswith("_a_layernorm") else self.plan.eps
        return factor * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.w(f"{name}.weight"), self.w(f"{name}.bias"), 1e-5)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.w(f"{name}.weight").T
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out

    def _conv(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w(f"{name}.weight") + self.w(f"{name}.bias")

    def _split(self, flat: Tensor) -> Tensor:
        """[T, heads * size] as [heads, T, size]."""
        return flat.view(len(flat), -1, self.plan.size).transpose(0, 1)


def rotated_halves(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Feature i and feature i + D / 2 turn by position * theta^(-2 i / D)."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] * theta ** (-2.0 * torch.arange(half).double() / x.shape[-1])
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotated_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Features 2 i and 2 i + 1 turn; the first ones of all pairs come first in the result."""
    return rotated_halves(torch.cat([x[..., 0::2], x[..., 1::2]], -1), positions, theta)


def visibility(
    tokens: int,
    window: int | None = None,
    real: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """[T, T] bool, pair by pair."""
    visible = torch.zeros(tokens, tokens, dtype=torch.bool)
    for query in range(tokens):
        for key in range(query + 1):
            inside = window is None or query - key < window
            together = documents is None or documents[query] == documents[key]
            both = real is None or bool(real[query] and real[key])
            visible[query, key] = inside and bool(together) and both
    return visible


def float64(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves that collect gradients."""
    return {name: value.double().requires_grad_() for name, value in weights.items()}
