"""A nanoGPT model of a given shape with random weights, and its own training step, for benchmarks."""

import argparse
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bf16forensics.emulate.autocast import CudaAutocast
from bf16forensics.load.batch import RecordedBatch
from bf16forensics.load.nanogpt import NanoGPTCheckpoint


def write_checkpoint(path: Path, given: argparse.Namespace) -> None:
    """A model as nanoGPT initialises it."""
    generator = torch.Generator().manual_seed(given.seed)
    width, layers = given.width, given.layers

    def draw(*shape: int, spread: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    state = {
        "transformer.wte.weight": draw(given.vocabulary, width),
        "transformer.wpe.weight": draw(given.tokens, width),
    }
    for layer in range(layers):
        prefix = f"transformer.h.{layer}."
        for name, out, inside in (
            ("attn.c_attn", 3, 1),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 4, 1),
            ("mlp.c_proj", 1, 4),
        ):
            spread = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj") else 0.02
            state[f"{prefix}{name}.weight"] = draw(out * width, inside * width, spread=spread)
            state[f"{prefix}{name}.bias"] = torch.zeros(out * width)
        for name in ("ln_1", "ln_2"):
            state[f"{prefix}{name}.weight"], state[f"{prefix}{name}.bias"] = torch.ones(width), torch.zeros(width)
    state["transformer.ln_f.weight"], state["transformer.ln_f.bias"] = torch.ones(width), torch.zeros(width)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    sizes = {"n_layer": layers, "n_head": given.heads, "n_embd": width, "block_size": given.tokens,
             "vocab_size": given.vocabulary, "bias": True, "dropout": 0.0}  # fmt: skip
    torch.save({"model": state, "model_args": sizes, "iter_num": 0}, path)


def write_batch(path: Path, given: argparse.Namespace) -> None:
    """Token ids, one more a sequence than the model takes: their labels are the ids shifted."""
    generator = torch.Generator().manual_seed(given.seed + 1)
    torch.save({"ids": torch.randint(0, given.vocabulary, (given.sequences, given.tokens), generator=generator)}, path)


class Model:
    """The model's own training step, as eager PyTorch runs it."""

    def __init__(self, checkpoint: NanoGPTCheckpoint, device: torch.device, batch: RecordedBatch) -> None:
        self.config, self.on_gpu = checkpoint.config, device.type == "cuda"
        self.weights = {
            name: torch.nn.Parameter(tensor.float().to(device)) for name, tensor in checkpoint.tensors.items()
        }
        if checkpoint.tied:
            self.weights["lm_head.weight"] = self.weights["transformer.wte.weight"]
        self.ids, self.labels = batch.ids.to(device), batch.labels.to(device)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """CUDA autocast, or its emulation."""
        return torch.autocast("cuda", torch.bfloat16) if self.on_gpu else CudaAutocast()

    def step(self) -> torch.Tensor:
        """The mean loss over the batch; gradients of all weights are left in them."""
        for weight in self.weights.values():
            weight.grad = None
        with self.arithmetic():
            hidden = functional.embedding(self.ids, self.weights["transformer.wte.weight"])
            hidden = hidden + self.weights["transformer.wpe.weight"][: self.ids.shape[1]]
            for layer in range(self.config.n_layer):
                hidden = self.layer(f"transformer.h.{layer}.", hidden)
            logits = functional.linear(self.norm("transformer.ln_f", hidden), self.weights["lm_head.weight"])
            loss = functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), ignore_index=-100)
        loss.backward()
        return loss.detach()

    def layer(self, prefix: str, hidden: torch.Tensor) -> torch.Tensor:
        """One layer."""
        parts = self.linear(f"{prefix}attn.c_attn", self.norm(f"{prefix}ln_1", hidden)).split(self.config.n_embd, -1)
        q, k, v = (part.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2) for part in parts)
        o = self.attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = hidden + self.linear(f"{prefix}attn.c_proj", o)
        inside = functional.gelu(self.linear(f"{prefix}mlp.c_fc", self.norm(f"{prefix}ln_2", hidden)))
        return hidden + self.linear(f"{prefix}mlp.c_proj", inside)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """SDPA; on the CPU its exact form, which the emulation of autocast can run."""
        if self.on_gpu:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).float().masked_fill(hidden, -torch.inf)
        return (torch.softmax(scores, -1) @ v.float()).bfloat16()

    def norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """A LayerNorm."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return functional.layer_norm(hidden, (self.config.n_embd,), weight, bias, 1e-5)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A linear layer."""
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def gradient_norms(self) -> list[float]:
        """|dW_Q| by layer and head."""
        norms: list[float] = []
        for layer in range(self.config.n_layer):
            gradient = self.weights[f"transformer.h.{layer}.attn.c_attn.weight"].grad
            if gradient is None:
                raise ValueError("the step leaves gradients behind; run it first")
            by_head = gradient[: self.config.n_embd].double().view(self.config.n_head, -1)
            norms += by_head.norm(dim=1).tolist()
        return norms
