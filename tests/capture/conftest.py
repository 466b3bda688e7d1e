"""A tiny nanoGPT as the loader would hand it over, and an independent one in batch form to compare it with."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTConfig

LAYERS, HEADS, WIDTH, POSITIONS, VOCABULARY = 3, 4, 32, 24, 19


def draw_state(bias: bool, dtype: torch.dtype, seed: int, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, spread: float = 0.25) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * spread).to(dtype)

    state = {"transformer.wte.weight": draw(VOCABULARY, WIDTH), "transformer.wpe.weight": draw(POSITIONS, WIDTH)}
    for layer in range(layers):
        prefix = f"transformer.h.{layer}."
        for name, out, inside in (
            ("attn.c_attn", 3 * WIDTH, WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", 4 * WIDTH, WIDTH),
            ("mlp.c_proj", WIDTH, 4 * WIDTH),
        ):
            state[f"{prefix}{name}.weight"] = draw(out, inside)
            if bias:
                state[f"{prefix}{name}.bias"] = draw(out)
        for name in ("ln_1", "ln_2"):
            state[f"{prefix}{name}.weight"] = 1 + draw(WIDTH)
            if bias:
                state[f"{prefix}{name}.bias"] = draw(WIDTH)
    state["transformer.ln_f.weight"] = 1 + draw(WIDTH)
    if bias:
        state["transformer.ln_f.bias"] = draw(WIDTH)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


@pytest.fixture
def make_checkpoint() -> Callable[..., NanoGPTCheckpoint]:
    def make(
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 5,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> NanoGPTCheckpoint:
        return NanoGPTCheckpoint(
            config=NanoGPTConfig(
                n_layer=LAYERS,
                n_head=HEADS,
                n_embd=WIDTH,
                block_size=POSITIONS,
                vocab_size=VOCABULARY,
                bias=bias,
                dropout=0.0,
            ),
            iter_num=None,
            weight_dtype="fp32",
            tied=True,
            notes=(),
            unused_tensors=(),
            path="tiny.pt",
            size_bytes=0,
            sha256="",
            tensors=draw_state(bias, dtype, seed) if state is None else state,
        )

    return make


class IndependentBlock(nn.Module):
    def __init__(self, bias: bool, storage: torch.dtype | None) -> None:
        super().__init__()
        self.storage = storage
        self.ln_1 = nn.LayerNorm(WIDTH, bias=bias)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        )
        self.seen: dict[str, torch.Tensor] = {}

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        if self.storage is None:
            return values
        # The difference of two neighbours is exact, so the sum is the rounded value and its derivative is 1.
        return values + (values.to(self.storage).to(values.dtype) - values).detach()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        x = self.ln_1(hidden)
        q, k, v = (
            self.rounded(part.reshape(batch, tokens, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3))
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(WIDTH // HEADS)
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        p = torch.softmax(scores.masked_fill(~causal, -torch.inf), -1)
        o = torch.einsum("bhij,bhjd->bhid", p, v)
        o.retain_grad()
        self.seen = {"x": x, "q": q, "k": k, "v": v, "o": o}
        hidden = hidden + self.c_proj(o.permute(0, 2, 1, 3).flatten(2))
        return hidden + self.mlp(self.ln_2(hidden))


class IndependentGPT(nn.Module):
    """nanoGPT in batch form, written from its published model; the loss is a sum of the sequences' mean losses."""

    def __init__(self, bias: bool, storage: torch.dtype | None) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(IndependentBlock(bias, storage) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, bias=bias)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.ln_f(hidden) @ self.wte.weight.T
        each = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return each.sum(1) / (labels != -100).sum(1)


@pytest.fixture
def independent() -> Callable[..., IndependentGPT]:
    def build(state: Mapping[str, torch.Tensor], bias: bool, storage: torch.dtype | None) -> IndependentGPT:
        model = IndependentGPT(bias, storage)
        renamed = {}
        for name, value in state.items():
            if name == "lm_head.weight":
                continue
            name = name.removeprefix("transformer.").replace("h.", "blocks.", 1) if ".h." in name else name
            name = name.removeprefix("transformer.").replace("attn.c_", "c_")
            name = name.replace("mlp.c_fc", "mlp.0").replace("mlp.c_proj", "mlp.2")
            renamed[name] = value.float()
        model.load_state_dict(renamed)
        return model

    return build
