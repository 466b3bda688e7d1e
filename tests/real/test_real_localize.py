"""localize on two trained checkpoints: regression figures on two sequences, and one layer against a dense computation.

On two sequences a ratio says nothing about a head; the figures only pin the implementation down.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, RecordSource, SourceShape
from bf16forensics.commands._source import ModelInput, open_model
from bf16forensics.investigate.localize import HeadsFound, find_heads
from bf16forensics.investigate.sequence import LocalizeOptions
from bf16forensics.recipe.derive import resolve

pytestmark = pytest.mark.slow

#: One key tile and no casts in the backward pass: what the figures were first computed with.
ONE_TILE = "fa2+tile_k=512,ds=fp32,dq=fp32"
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
#: The model runs in FP32, whose last bits depend on the library: that moves up to 8 % of the roundings of dO by one
#: step, and a head's figure by a few parts in a thousand.
CAPTURE_NOISE = 0.01
#: One rounding that falls the other way moves a head that hangs on few rows by 15 %, and such a head can be the median.
MEDIAN_NOISE = 0.1


@dataclass(frozen=True)
class Replayed:
    """A model's records, captured once and handed out again for every recipe."""

    shape: SourceShape
    layer_weights: tuple[LayerWeights, ...]
    captured: tuple[tuple[float, tuple[AttentionRecord, ...]], ...]

    def weights(self, layer: int) -> LayerWeights:
        return self.layer_weights[layer]

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        loss, records = self.captured[sequence]
        on_loss(loss)
        yield from records


def model_input(name: str) -> ModelInput:
    folder = DATA / name
    if not folder.exists():
        pytest.skip(f"real data {name!r} is not present beside the repository")
    return ModelInput(
        checkpoint=folder / "ckpt.pt",
        batch=folder / "train.bin",
        indices=folder / "generated_indices_rank_0.txt",
        lines="0:1",
        sequences=2,
        first_step=None,
        n_head=None,
        activations="fp32",
        recipe=resolve("fa2"),
    )


def capture(name: str) -> Replayed:
    source: RecordSource = open_model(model_input(name)).source
    captured = []
    for sequence in range(2):
        losses: list[float] = []
        records = tuple(source.records(sequence, losses.append))
        captured.append((losses[0], records))
    weights = tuple(source.weights(layer) for layer in range(source.shape.num_layers))
    return Replayed(shape=source.shape, layer_weights=weights, captured=tuple(captured))


@pytest.fixture(scope="module")
def diverging() -> Replayed:
    return capture("diverging-gpt")


@pytest.fixture(scope="module")
def healthy() -> Replayed:
    return capture("healthy-gpt")


def run(source: Replayed, recipe: str) -> HeadsFound:
    return find_heads(source, LocalizeOptions(recipe=resolve(recipe), reference="fp64"))


@pytest.fixture(scope="module")
def diverging_one_tile(diverging: Replayed) -> HeadsFound:
    return run(diverging, ONE_TILE)


def figures(found: HeadsFound, name: str) -> dict[str, float]:
    values = {}
    for head in found.heads:
        assert head.dw_q is not None
        values[f"L{head.layer}.H{head.head}"] = getattr(head.dw_q, name)
    assert len(values) == 36
    return values


def assert_figures(found: dict[str, float], expected: dict[str, float], median: float) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=CAPTURE_NOISE), name
    assert statistics.median(found.values()) == pytest.approx(median, rel=MEDIAN_NOISE)


def test_one_tile_figures_of_the_diverging_run(diverging_one_tile: HeadsFound) -> None:
    expected = {"L4.H3": 1.789, "L3.H1": 1.348, "L5.H3": 0.637, "L5.H2": 0.183}
    for name in ("error_full_relative", "error_total_relative", "error_defect_relative"):
        assert_figures(figures(diverging_one_tile, name), expected, 0.0192)
    assert figures(diverging_one_tile, "norm")["L2.H1"] == pytest.approx(1.75e-8, rel=0.05)
    assert diverging_one_tile.loss == pytest.approx(1.82747, rel=1e-4)


def test_consistent_delta_leaves_nothing_under_fp32_scores(diverging_one_tile: HeadsFound) -> None:
    for head in diverging_one_tile.heads:
        assert head.dw_q is not None
        if head.dw_q.norm < 1e-6:
            continue
        # The log-sum-exp in FP32 is all that is left of the scores' part.
        assert head.dw_q.telescope.scores_relative < 0.02
        assert head.dw_q.telescope.share_defect == pytest.approx(1.0, abs=0.02)
        # dS is not cast; the order of its FP32 sums remains.
        assert head.dw_q.telescope.cast_ds_relative < 3e-3 * max(1.0, head.dw_q.error_defect_relative)
        assert head.dw_q.telescope.cast_dq_relative == 0.0


def test_paper_figures_of_the_diverging_run(diverging: Replayed) -> None:
    found = run(diverging, "paper")
    assert_figures(figures(found, "error_full_relative"), {"L4.H3": 21.117, "L2.H3": 39.485, "L5.H3": 22.102}, 1.35)
    assert_figures(figures(found, "error_total_relative"), {"L4.H3": 5.41, "L2.H3": 2.09, "L5.H3": 2.47}, 0.26)
    assert figures(found, "error_defect_relative")["L4.H3"] == pytest.approx(3.22, rel=CAPTURE_NOISE)
    rest = {f"L{h.layer}.H{h.head}": h.dw_q.telescope.scores_relative for h in found.heads if h.dw_q is not None}
    assert rest["L4.H3"] == pytest.approx(2.77, rel=CAPTURE_NOISE)
    assert statistics.median(rest.values()) == pytest.approx(0.21, rel=MEDIAN_NOISE)


def test_figures_of_the_healthy_run(healthy: Replayed) -> None:
    one_tile, paper = run(healthy, ONE_TILE), run(healthy, "paper")
    assert_figures(figures(one_tile, "error_full_relative"), {}, 0.022)
    assert_figures(figures(one_tile, "error_total_relative"), {}, 0.022)
    assert_figures(figures(paper, "error_full_relative"), {}, 0.77)
    assert_figures(figures(paper, "error_total_relative"), {}, 0.156)


def bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).to(torch.float32)


def dense_layer(checkpoint: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor, wanted: int) -> Any:
    """x, q, k, v, dO of one layer of one sequence: FP32, whole graph, straight from the tensors of the file."""
    heads, width = 6, checkpoint["transformer.wte.weight"].shape[1]
    causal = torch.ones(len(ids), len(ids)).tril().bool()
    hidden = checkpoint["transformer.wte.weight"][ids] + checkpoint["transformer.wpe.weight"][: len(ids)]
    kept: dict[str, torch.Tensor] = {}
    for layer in range(6):
        at = f"transformer.h.{layer}."

        def linear(values: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
            return functional.linear(values, checkpoint[f"{at}{name}.weight"], checkpoint.get(f"{at}{name}.bias"))

        def norm(values: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
            weight, bias = checkpoint[f"{at}{name}.weight"], checkpoint.get(f"{at}{name}.bias")
            return functional.layer_norm(values, (width,), weight, bias)

        x = norm(hidden, "ln_1")
        q, k, v = (
            part + (bf16(part.detach()) - part.detach())
            for part in (
                piece.view(-1, heads, width // heads).transpose(0, 1)
                for piece in linear(x, "attn.c_attn").split(width, dim=1)
            )
        )
        scores = (q @ k.transpose(1, 2) / math.sqrt(width // heads)).masked_fill(~causal, -math.inf)
        o = torch.softmax(scores, -1) @ v
        if layer == wanted:
            o = o.detach().requires_grad_()
            kept = {"x": x.detach(), "q": q.detach(), "k": k.detach(), "v": v.detach(), "o": o}
        hidden = hidden + linear(o.transpose(0, 1).reshape(-1, width), "attn.c_proj")
        hidden = hidden + linear(functional.gelu(linear(norm(hidden, "ln_2"), "mlp.c_fc")), "mlp.c_proj")
    final = functional.layer_norm(
        hidden, (width,), checkpoint["transformer.ln_f.weight"], checkpoint.get("transformer.ln_f.bias")
    )
    logits = functional.linear(final, checkpoint["lm_head.weight"])
    functional.cross_entropy(logits, targets).backward()
    grad = kept.pop("o").grad
    assert grad is not None
    return {**kept, "do": bf16(grad)}


def dense_errors(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Per-head dW_Q and its full, defect and whole errors under one-tile fa2, written densely in float64.

    FP32 where the recipe computes in FP32, then float64 for everything that is evidence.
    """
    q, k, v, do = (tensors[name] for name in ("q", "k", "v", "do"))
    x, scale = tensors["x"].double(), q.shape[-1] ** -0.5
    causal = torch.ones(q.shape[1], q.shape[1]).tril().bool()
    raw = (q @ k.transpose(1, 2)).masked_fill(~causal, -math.inf)
    # exp2(S c - m c) in FP32, P-bar cast to BF16 for the product, row sum of the unrounded P-bar, O-bar times 1 / l.
    top, c = raw.amax(-1, keepdim=True), scale * math.log2(math.e)
    p_bar = torch.exp2(raw * c - top * c)
    row_sum = p_bar.sum(-1, keepdim=True)
    o_lp = bf16((bf16(p_bar) @ v) * (1.0 / row_sum)).double()
    p_lp = torch.exp2(raw * c - (top * scale + torch.log(row_sum)) * math.log2(math.e)).double()
    wide = (q.double() @ k.double().transpose(1, 2) * scale).masked_fill(~causal, -math.inf)
    p_hp = torch.softmax(wide, -1)
    dp = do.double() @ v.double().transpose(1, 2)
    delta_lp, delta_hp = (do.double() * o_lp).sum(-1), (p_hp * dp).sum(-1)

    def carried(p: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hnd,nc->hdc", -scale * rows[..., None] * (p @ k.double()), x)

    def gradient(p: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hnd,nc->hdc", scale * (p * (dp - delta[..., None])) @ k.double(), x)

    hp = gradient(p_hp, delta_hp)
    full = carried(p_hp, delta_lp - delta_hp)
    defect = carried(p_lp, delta_lp - (p_lp * dp).sum(-1) / p_lp.sum(-1))
    return hp, full, defect, gradient(p_lp, delta_lp) - hp


def test_one_layer_agrees_with_a_dense_computation_from_the_file(
    diverging: Replayed, diverging_one_tile: HeadsFound
) -> None:
    import numpy as np

    folder = DATA / "diverging-gpt"
    loaded = torch.load(folder / "ckpt.pt", weights_only=True, map_location="cpu")["model"]
    checkpoint = {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in loaded.items()}
    tokens = np.fromfile(folder / "train.bin", "<u2")
    starts = [int(text) for text in (folder / "generated_indices_rank_0.txt").read_text().split("\n")[0].split(",")]
    layer, total = 5, [torch.zeros(6, 64, 384, dtype=torch.float64) for _ in range(4)]
    for sequence, start in enumerate(starts[:2]):
        window = torch.from_numpy(tokens[start : start + 513].astype(np.int64))
        dense = dense_layer(checkpoint, window[:-1], window[1:], layer)
        record = next(item for item in diverging.captured[sequence][1] if item.layer == layer)
        assert float((dense["x"] - record.x).abs().max()) < 1e-3 * float(dense["x"].abs().max())
        for name in ("q", "k", "v", "do"):
            apart = (dense[name] - getattr(record, name)).abs()
            # Roundings at a tie go either way; the rest of the network moves with them.
            assert float((apart != 0).float().mean()) < 0.1
            assert float(apart.max()) <= 2**-7 * float(dense[name].abs().max())
        # Evidence on the captured tensors themselves: two captures differ in their roundings, one cannot.
        same = {name: getattr(record, name) for name in ("x", "q", "k", "v", "do")}
        total = [old + new / 2 for old, new in zip(total, dense_errors(same), strict=True)]
    hp, *errors = (part.flatten(1).norm(dim=1) for part in total)
    for head in range(6):
        found = next(item for item in diverging_one_tile.heads if (item.layer, item.head) == (layer, head)).dw_q
        assert found is not None
        # FP32 products of 512 rows.
        assert found.norm == pytest.approx(float(hp[head]), rel=1e-4)
        names = ("error_full_relative", "error_defect_relative", "error_total_relative")
        for name, error in zip(names, errors, strict=True):
            # The order of FP32 sums of scores and of P-bar V decides some roundings of O: one in a few hundred.
            assert getattr(found, name) == pytest.approx(float(error[head] / hp[head]), rel=0.03), (head, name)


def test_the_command_cannot_judge_two_sequences(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    given = model_input("diverging-gpt")
    args = [given.checkpoint, "--batch", given.batch, "--indices", given.indices, "--lines", "0:1", "--sequences", "2"]
    result = run_cli(["localize", *args, "--activations", "fp32", "--reference", "fp64", "-o", tmp_path / "case"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) <= 60
    assert "cannot judge" in result.stdout
    document = json.loads((tmp_path / "case" / "case.json").read_text())
    assert document["verdict"] == "cannot judge"
    assert document["verdict_counts"]["cannot judge"] == 36
    assert {head["code"] for head in document["heads"]} == {"BF901"}
    heads = {head["name"]: head["dw_q"] for head in document["heads"]}
    # The preset's own tiles of 128 keys and its casts move the figures: L5.H3 is 0.637 with one tile.
    assert heads["L5.H3"]["error_full_relative"] == pytest.approx(0.482, rel=CAPTURE_NOISE)
    assert all(head["p_adjusted"] >= 0.4 for head in heads.values())
