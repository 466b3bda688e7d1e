"""What localize costs beside the model's own FP32 forward and backward on the same batch, in one process.

    python examples/benchmarks/localize_cost.py CKPT --batch FILE --indices FILE [--lines A:B] [--sequences N]

The yardstick is an ordinary nanoGPT training pass written out in torch: batched, with all weight gradients, on as many
threads as torch takes by itself, with torch's fastest exact FP32 attention of this machine (the better of plain
softmax and scaled_dot_product_attention). Both sides are run alternately; loading and imports are outside. Nothing is
printed unless both sides agree on the loss and on dW_Q of every head.
"""

import argparse
import sys
import time
from dataclasses import fields, replace

import torch
from torch.nn import functional

from bf16forensics.capture.activations import Fp32Activations
from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.nanogpt_source import NanoGPTSource
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.commands._source import parse_lines
from bf16forensics.investigate.localize import find_heads
from bf16forensics.investigate.sequence import LocalizeOptions
from bf16forensics.load.batch import RecordedBatch, load_token_batch
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTLayer, load_nanogpt
from bf16forensics.recipe.derive import resolve


class Model:
    """nanoGPT in FP32 over a whole batch, weights with gradients."""

    def __init__(self, checkpoint: NanoGPTCheckpoint, *, fused: bool) -> None:
        self.config, self.fused = checkpoint.config, fused
        # Clones: the checkpoint's own tensors are shared with the capture and must not collect gradients.
        self.layers = [_cloned(checkpoint.layer(i)) for i in range(checkpoint.config.n_layer)]
        self.wte, self.wpe, self.head = checkpoint.wte.clone(), checkpoint.wpe.clone(), checkpoint.lm_head.clone()
        self.ln_f = checkpoint.ln_f_weight.clone()
        self.ln_f_bias = None if checkpoint.ln_f_bias is None else checkpoint.ln_f_bias.clone()
        self.parameters = [self.wte, self.wpe, self.ln_f, self.head]
        for layer in self.layers:
            self.parameters += [getattr(layer, name) for name in layer.__slots__]
        self.parameters = [p.requires_grad_() for p in self.parameters if p is not None]

    def step(self, batch: RecordedBatch) -> float:
        """Forward and backward; leaves gradients in the parameters and returns the mean loss."""
        for parameter in self.parameters:
            parameter.grad = None
        width, heads = self.config.n_embd, self.config.n_head
        count, tokens = batch.ids.shape
        hidden = self.wte[batch.ids] + self.wpe[:tokens]
        for layer in self.layers:
            x = functional.layer_norm(hidden, (width,), layer.ln_1_weight, layer.ln_1_bias)
            qkv = functional.linear(x, layer.c_attn_weight, layer.c_attn_bias)
            q, k, v = (p.view(count, tokens, heads, -1).transpose(1, 2) for p in qkv.split(width, -1))
            if self.fused:
                o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(-1, -2) * (width // heads) ** -0.5
                hidden_pairs = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
                o = torch.softmax(scores.masked_fill(hidden_pairs, -torch.inf), -1) @ v
            joined = o.transpose(1, 2).reshape(count, tokens, width)
            hidden = hidden + functional.linear(joined, layer.attn_proj_weight, layer.attn_proj_bias)
            mlp = functional.layer_norm(hidden, (width,), layer.ln_2_weight, layer.ln_2_bias)
            mlp = functional.gelu(functional.linear(mlp, layer.fc_weight, layer.fc_bias))
            hidden = hidden + functional.linear(mlp, layer.mlp_proj_weight, layer.mlp_proj_bias)
        hidden = functional.layer_norm(hidden, (width,), self.ln_f, self.ln_f_bias)
        logits = functional.linear(hidden, self.head)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        return float(loss.detach())


def _cloned(layer: NanoGPTLayer) -> NanoGPTLayer:
    tensors = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return replace(layer, **{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()})


def capture_errors(source: NanoGPTSource, model: Model, loss: float) -> tuple[float, float]:
    """Runs the capture with storage FP32, where nothing is rounded, against the model after one step.

    Returns:
        Relative difference of dW_Q over all layers together (FP32 autograd against float64 from the records, so
        1e-3 is what saturated heads may leave), and of the mean loss.
    """
    capture = NanoGPTCapture(checkpoint=source.capture.checkpoint, activations=Fp32Activations(storage="fp32"))
    exact = NanoGPTSource(capture=capture, batch=source.batch)
    count, width = source.batch.num_sequences, model.config.n_embd
    sums = [torch.zeros(width, width, dtype=torch.float64) for _ in model.layers]
    losses: list[float] = []
    for index in range(count):
        for record in exact.records(index, losses.append):
            sums[record.layer] += _dense_dw_q(record).flatten(0, 1) / count
    own = [layer.c_attn_weight.grad[:width].double() for layer in model.layers if layer.c_attn_weight.grad is not None]
    gap = torch.stack([a - b for a, b in zip(sums, own, strict=True)]).norm() / torch.stack(own).norm()
    return float(gap), abs(sum(losses) / count / loss - 1)


def _dense_dw_q(record: AttentionRecord) -> torch.Tensor:
    q, k, v, do, x = (t.double() for t in (record.q, record.k, record.v, record.do, record.x) if t is not None)
    hidden_pairs = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    p = torch.softmax((q @ k.transpose(-1, -2) * record.geometry.scale).masked_fill(hidden_pairs, -torch.inf), -1)
    dp = do @ v.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    return (ds @ k * record.geometry.scale).transpose(-1, -2) @ x


def main() -> int:
    """Times both sides and prints their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--batch", required=True)
    parser.add_argument("--indices", required=True)
    parser.add_argument("--lines", default="0:1")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--recipe", default="fa2")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()

    checkpoint = load_nanogpt(given.checkpoint)
    config = checkpoint.config
    batch = load_token_batch(
        given.batch, given.indices, lines=parse_lines(given.lines), sequences=given.sequences,
        block_size=config.block_size, vocab_size=config.vocab_size, iter_num=checkpoint.iter_num,
    )  # fmt: skip
    source = NanoGPTSource(capture=NanoGPTCapture(checkpoint=checkpoint), batch=batch)
    models = {"softmax": Model(checkpoint, fused=False), "fused": Model(checkpoint, fused=True)}
    losses = {name: model.step(batch) for name, model in models.items()}
    error, gap = capture_errors(source, models["softmax"], losses["softmax"])
    gap = max(gap, abs(losses["fused"] / losses["softmax"] - 1))
    recipe = resolve(given.recipe)
    if not (error <= 1e-3 and gap <= 1e-5):
        print(f"wrong result, nothing timed: dW_Q differs by {error:.1e}, the loss by {gap:.1e}", file=sys.stderr)
        return 1

    own: list[float] = []
    runs: dict[str, list[tuple[float, float]]] = {"fp32": [], "fp64": []}
    for _ in range(given.repeats):
        own.append(min(_seconds(model, batch) for model in models.values()))
        for reference, times in runs.items():
            found = find_heads(source, LocalizeOptions(recipe=recipe, reference=reference))
            work = found.capture_work_s + found.evidence_work_s
            times.append((found.analysis_s, found.analysis_s * found.evidence_work_s / work))
    yardstick = sorted(own)[len(own) // 2]
    print(f"{batch.num_sequences} sequences of {batch.num_tokens} tokens, recipe {recipe.name}, "
          f"{torch.get_num_threads()} threads; dW_Q agrees to {error:.1e}, the loss to {gap:.1e}")  # fmt: skip
    print(f"model's own FP32 forward and backward: 1 (median of {given.repeats}: {yardstick:.2f} s)")
    for reference, times in runs.items():
        total, evidence = (sorted(t[i] for t in times)[len(times) // 2] / yardstick for i in (0, 1))
        print(f"reference {reference}: evidence {evidence:.2f}x, capture and evidence together {total:.2f}x")
    return 0


def _seconds(model: Model, batch: RecordedBatch) -> float:
    started = time.perf_counter()
    model.step(batch)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
