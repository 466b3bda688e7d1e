"""What localize costs on a GPU, against the model's own BF16 forward and backward on the same batch.

    python examples/benchmarks/localize_gpu.py [--json FILE]
    python examples/benchmarks/localize_gpu.py --agreement CKPT BATCH INDICES [--lines A:B] [--records FILE]
    python examples/benchmarks/localize_gpu.py --device cpu --backend reference --layers 2 --heads 2 --width 32 \
        --tokens 64 --vocabulary 97 --sequences 2 --repeats 1

The first form writes a nanoGPT checkpoint of GPT-2 small's shape with random weights, and times in one process: the
model's own forward and backward in eager PyTorch under torch.autocast("cuda", bfloat16), SDPA's flash attention, all
sequences in one batch, gradients of all weights; and localize from the loaded checkpoint to the evidence of every head
(capture, dual pass, gradients, statistics), one sequence at a time. Times are medians. The phases come from one more
run, in one thread, that waits for the GPU after each, so that together they take longer than the run does.

Nothing is printed but what is wrong, and the exit code is 1, unless
- the capture is the model: losses and |dW_Q| of every head agree with the model's own batch,
- on the same captured records, the reference on the CPU finds what the timed backend finds (found_alike.py says how).

The second form compares the backends on a real checkpoint: its records are captured once, on the CPU, saved to or read
from FILE, and analysed by both.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from found_alike import HeldSource, analyse, compare, hold, load, save
from training_step import Model, write_batch, write_checkpoint

from bf16forensics.attention.backend import REFERENCE, ChosenBackend, choose_backend
from bf16forensics.attention.gpu_attention import GpuAttention
from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.capture.activations import AmpActivations
from bf16forensics.capture.device import CPU, capture_device
from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.nanogpt_source import NanoGPTSource
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, SourceShape
from bf16forensics.commands._given import parse_lines
from bf16forensics.investigate import collect, sequence
from bf16forensics.investigate.cores import usable_cores
from bf16forensics.investigate.localize import HeadsFound, find_heads
from bf16forensics.investigate.sequence import LocalizeOptions
from bf16forensics.load.batch import RecordedBatch, load_token_batch
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, load_nanogpt
from bf16forensics.load.tensor_batch import load_tensor_batch
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.model import Recipe

#: Relative differences between the capture and the model's own batch that rounding explains: BF16 products in other
#: shapes add in another order, and flipped roundings move a loss by some 1e-4 and a gradient by under one percent.
MOST_LOSS, MOST_GRADIENT = 2e-3, 3e-2


class Watch:
    """Seconds by phase, waiting for the GPU before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a phase."""
        wait(self.device)
        started = time.perf_counter()
        try:
            yield
        finally:
            wait(self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls count as a phase."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return timed


class WatchedSource:
    """A source whose steps count as the capture."""

    def __init__(self, source: NanoGPTSource, watch: Watch) -> None:
        self.source, self.watch, self.notes = source, watch, ()

    @property
    def shape(self) -> SourceShape:
        """That of the source."""
        return self.source.shape

    def weights(self, layer: int) -> LayerWeights:
        """Those of the source."""
        return self.source.weights(layer)

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Those of the source."""
        records = self.source.records(sequence, on_loss)
        while True:
            with self.watch.phase("capture"):
                record = next(records, None)
            if record is None:
                return
            yield record


#: Phases by the function of the run that is one: module, name.
_PHASES = {
    "dual pass": (sequence, "run_dual_pass"),
    "gradients": (sequence, "gradient_parts"),
    "statistics of rows": (sequence, "summarise"),
}


def phases(source: NanoGPTSource, options: LocalizeOptions, device: torch.device) -> dict[str, float]:
    """Seconds of each part of one run."""
    watch = Watch(device)
    places = {name: place for name, place in _PHASES.items() if hasattr(*place)}
    kept = {name: getattr(*place) for name, place in places.items()}
    heads = collect.Collector.heads
    for name, (module, function) in places.items():
        setattr(module, function, watch.around(name, kept[name]))
    collect.Collector.heads = watch.around("statistics of heads", heads)  # type: ignore[method-assign]
    try:
        with watch.phase("all"):
            find_heads(WatchedSource(source, watch), replace(options, workers=1))
    finally:
        collect.Collector.heads = heads  # type: ignore[method-assign]
        for name, (module, function) in places.items():
            setattr(module, function, kept[name])
    whole = watch.seconds.pop("all")
    return {**watch.seconds, "rest": whole - sum(watch.seconds.values())}


def wait(device: torch.device) -> None:
    """Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call; one call before that does not count."""
    function()
    times = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        function()
        wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def source_of(
    checkpoint: NanoGPTCheckpoint, batch: RecordedBatch, recipe: Recipe, device: torch.device
) -> NanoGPTSource:
    """The capture that localize makes."""
    on_gpu = device.type == "cuda"
    by_recipe = GpuAttention(recipe) if on_gpu else RecipeAttention(recipe)
    capture = NanoGPTCapture(
        checkpoint=checkpoint, activations=AmpActivations(by_recipe=by_recipe, on_gpu=on_gpu), device=device
    )
    return NanoGPTSource(capture=capture, batch=batch)


def far_from_model(found: HeadsFound, model: Model) -> list[str]:
    """How the capture differs from the model's own step, beyond rounding."""
    wrong = []
    loss = float(model.step())
    if not math.isclose(found.loss, loss, rel_tol=MOST_LOSS):
        wrong.append(f"the loss is {found.loss:.6f} in the capture and {loss:.6f} in the model's own batch")
    norms = [math.nan if head.dw_q is None else head.dw_q.norm for head in found.heads]
    for index, (mine, own) in enumerate(zip(norms, model.gradient_norms(), strict=True)):
        if not math.isclose(mine, own, rel_tol=MOST_GRADIENT):
            layer, head = divmod(index, model.config.n_head)
            wrong.append(
                f"|dW_Q| of L{layer}.H{head} is {mine:.4e} in the capture and {own:.4e} in the model's own batch"
            )
    return wrong


def alike(
    held: HeldSource, recipe: Recipe, backend: ChosenBackend, device: torch.device
) -> tuple[list[str], list[str]]:
    """What the reference on the CPU and a backend found on the same records: in words, and what is wrong."""
    mine = analyse(held.on(device), recipe, backend)
    return compare(held.on(device), analyse(held.on(CPU), recipe, REFERENCE), mine)


def time_localize(given: argparse.Namespace) -> int:
    """The first form."""
    recipe = resolve(given.recipe)
    backend = choose_backend(given.backend, recipe, "fp32")
    device = capture_device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "ckpt.pt", given)
        write_batch(Path(folder) / "batch.pt", given)
        checkpoint = load_nanogpt(Path(folder) / "ckpt.pt")
        batch = load_tensor_batch(Path(folder) / "batch.pt", block_size=given.tokens, vocab_size=given.vocabulary)
        return _timed(given, recipe, backend, device, checkpoint, batch)


def _timed(
    given: argparse.Namespace, recipe: Recipe, backend: ChosenBackend, device: torch.device,
    checkpoint: NanoGPTCheckpoint, batch: RecordedBatch,
) -> int:  # fmt: skip
    source = source_of(checkpoint, batch, recipe, device)
    options = LocalizeOptions(recipe=recipe, reference="fp32", workers=given.threads, backend=backend)
    found = find_heads(source, options)
    model = Model(checkpoint, device, batch)
    said, wrong = alike(hold(source, given.gate_sequences), recipe, backend, device)
    if wrong := [*far_from_model(found, model), *wrong]:
        return refused(wrong)
    own = median_seconds(model.step, device, given.repeats)
    for weight in model.weights.values():
        weight.grad = None
    whole = median_seconds(lambda: find_heads(source, options), device, given.repeats)
    parts = phases(source, options, device)
    captured = median_seconds(lambda: hold(source), device, given.repeats)
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "backend": backend.name, "recipe": recipe.name, "torch": torch.__version__, "layers": given.layers,
        "heads": given.heads, "width": given.width, "tokens": given.tokens, "sequences": given.sequences,
        "model_s": own, "localize_s": whole, "ratio": whole / own, "capture_alone_s": captured, "phases_s": parts,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None, "agreement": said,
    }  # fmt: skip
    print(f"{given.layers} layers, {given.heads} heads, width {given.width}; {given.sequences} sequences of "
          f"{given.tokens} tokens; {result['device']}, torch {torch.__version__}")  # fmt: skip
    print("; ".join([f"backend {backend.name} on {backend.device}", f"recipe {recipe.name}", *source.capture.notes]))
    print(f"same records on the CPU, {given.gate_sequences} sequences: {'; '.join(said)}")
    print(f"model's own BF16 forward and backward, one batch: 1 ({1e3 * own:.1f} ms, median of {given.repeats})")
    print(
        f"localize, capture to evidence: {whole / own:.2f}x ({1e3 * whole:.1f} ms); capture alone {captured / own:.2f}x"
    )
    print("one run that waits after each phase: "
          + ", ".join(f"{name} {seconds / own:.2f}x" for name, seconds in parts.items()))  # fmt: skip
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def show_agreement(given: argparse.Namespace) -> int:
    """The second form."""
    recipe = resolve(given.recipe)
    backend = choose_backend(given.backend, recipe, "fp32")
    path, tokens, indices = (Path(text) for text in given.agreement)
    checkpoint = load_nanogpt(path)
    config = checkpoint.config
    batch = load_token_batch(
        tokens, indices, lines=parse_lines(given.lines), sequences=None, block_size=config.block_size,
        vocab_size=config.vocab_size, iter_num=checkpoint.iter_num,
    )  # fmt: skip
    source = source_of(checkpoint, batch, recipe, CPU)
    if given.records is not None and given.records.exists():
        held = load(given.records, source)
    else:
        held = hold(source, threads=given.threads or usable_cores())
        if given.records is not None:
            save(held, given.records)
    if given.capture_only:
        print(f"{held.shape.num_sequences} sequences of {held.shape.num_layers} layers captured")
        return 0
    said, wrong = alike(held, recipe, backend, torch.device("cuda") if backend.on_gpu else CPU)
    if wrong:
        return refused(wrong)
    print(f"{held.shape.num_sequences} sequences of {held.shape.num_queries} tokens, {held.shape.num_layers} layers of "
          f"{held.shape.num_heads} heads; reference on the CPU against {backend.name} on {backend.device}")  # fmt: skip
    print("\n".join(said))
    return 0


def refused(wrong: list[str]) -> int:
    """Says what is wrong instead of a time."""
    print(f"wrong result, nothing is reported ({len(wrong)} differences):", file=sys.stderr)
    for line in wrong[:20]:
        print(f"  {line}", file=sys.stderr)
    return 1


def main() -> int:
    """Either form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agreement", nargs=3, metavar=("CKPT", "BATCH", "INDICES"))
    parser.add_argument("--lines", help="lines A:B of the index file")
    parser.add_argument("--records", type=Path, help="safetensors file of captured records: read, or written")
    parser.add_argument("--capture-only", action="store_true", help="write the records and stop")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the model runs")
    parser.add_argument("--backend", choices=("auto", "triton", "reference"), default="triton")
    parser.add_argument("--recipe", default="fa2")
    for name, default in (("layers", 12), ("heads", 12), ("width", 768), ("tokens", 1024), ("vocabulary", 50304),
                          ("sequences", 8), ("gate-sequences", 2), ("repeats", 5), ("seed", 1)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    return show_agreement(given) if given.agreement else time_localize(given)


if __name__ == "__main__":
    sys.exit(main())
