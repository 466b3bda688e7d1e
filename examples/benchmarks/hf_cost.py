"""Cost of localize on a Hugging Face directory, as ratios to the model's own FP32 forward and backward.

    python examples/benchmarks/hf_cost.py MODEL --batch FILE.safetensors [--sequences N] [--repeats R]

The yardstick is the transformers model of the same directory in FP32, one step with gradients of all weights over
the whole batch, by the faster of its eager and its sdpa attention. Both sides may use all cores. Nothing is timed
unless the loss of a capture in which nothing is rounded equals the loss of the model to 1e-5.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.capture.activations import Activations, AmpActivations, Fp32Activations
from bf16forensics.capture.hf.capture import hf_capture
from bf16forensics.capture.hf.model import HFModel, load_hf_model
from bf16forensics.capture.hf.source import HFSource
from bf16forensics.investigate.localize import find_heads
from bf16forensics.investigate.sequence import LocalizeOptions
from bf16forensics.load.batch import IGNORED_LABEL, RecordedBatch
from bf16forensics.load.tensor_batch import load_tensor_batch
from bf16forensics.recipe.derive import resolve


def step(model: torch.nn.Module, batch: RecordedBatch) -> float:
    """One forward and backward over the batch; the mean loss over its labels."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=batch.ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL)
    loss.backward()
    return float(loss.detach())


def source_of(model: HFModel, batch: RecordedBatch, activations: Activations) -> HFSource:
    """The tool's own way through the same model."""
    return HFSource(capture=hf_capture(model, activations), batch=batch)


def main() -> int:
    """Times both sides and prints their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--recipe", default="fa2")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()

    checked = load_hf_model(given.model)
    config = checked.config
    batch = load_tensor_batch(
        given.batch, block_size=config.max_position_embeddings, vocab_size=config.vocab_size, sequences=None
    )
    keep = slice(0, given.sequences)
    batch = RecordedBatch(
        ids=batch.ids[keep], labels=batch.labels[keep], attention_mask=None, position_ids=None,
        steps=batch.steps[keep], line_of_sequence=batch.line_of_sequence[keep],
        step_sequences=batch.step_sequences, notes=(), files=batch.files,
    )  # fmt: skip
    own = {
        name: AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation=name).eval()
        for name in ("eager", "sdpa")
    }
    losses = [step(model, batch) for model in own.values()]
    exact: list[float] = []
    unrounded = source_of(checked, batch, Fp32Activations(storage="fp32"))
    for index in range(len(batch.ids)):
        next(iter(unrounded.records(index, exact.append)))
    gap = max(abs(sum(exact) / len(exact) / loss - 1) for loss in losses)
    if not gap <= 1e-5:
        print(f"wrong result, nothing timed: the loss differs by {gap:.1e}", file=sys.stderr)
        return 1

    recipe = resolve(given.recipe)
    sources = {
        "fp32": source_of(checked, batch, Fp32Activations()),
        "amp-bf16": source_of(checked, batch, AmpActivations(by_recipe=RecipeAttention(recipe))),
    }
    yardsticks: list[float] = []
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _ in range(given.repeats):
        times = []
        for model in own.values():
            started = time.perf_counter()
            step(model, batch)
            times.append(time.perf_counter() - started)
        yardsticks.append(min(times))
        for name, source in sources.items():
            found = find_heads(source, LocalizeOptions(recipe=recipe, reference="fp32"))
            share = found.evidence_work_s / (found.capture_work_s + found.evidence_work_s)
            runs[name].append((found.analysis_s, found.analysis_s * share))
    yardstick = sorted(yardsticks)[len(yardsticks) // 2]
    print(f"{len(batch.ids)} sequences of {batch.num_tokens} tokens, recipe {recipe.name}, reference fp32, "
          f"{torch.get_num_threads()} threads; the loss agrees to {gap:.1e}")  # fmt: skip
    print(f"model's own FP32 forward and backward: 1 (median of {given.repeats}: {yardstick:.2f} s)")
    for name, measured in runs.items():
        total, evidence = (sorted(t[i] for t in measured)[len(measured) // 2] / yardstick for i in (0, 1))
        print(f"activations {name}: evidence {evidence:.2f}x, capture and evidence together {total:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
