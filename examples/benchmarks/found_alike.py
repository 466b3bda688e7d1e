"""Whether two runs of localize over the same records found the same, for the benchmarks that compare backends.

What must agree: the heads that are flagged and their order, every count up to the keys that lie so close to its
threshold that the order of FP32 sums decides, and the sign of every error that is clear. What may differ are roundings
that flipped: one step of O in few elements, with no preferred sign.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bf16forensics.attention.backend import ChosenBackend
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, RecordSource, SourceShape
from bf16forensics.commands._localize_run import Analysed, LocalizeRun
from bf16forensics.commands._source import Opened
from bf16forensics.emulate.rounding import round_to
from bf16forensics.emulate.strict import single_thread, strict_fp32
from bf16forensics.evidence.results import HeadEvidence, SignedStatistics
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.investigate.inputs import InputOptions
from bf16forensics.recipe.model import Recipe
from bf16forensics.verdict.findings import CANNOT_JUDGE, NOISE_AT_CHANCE
from bf16forensics.verdict.words import head_name

#: Nats by which the scores of two backends may differ.
SCORE_ERROR = 4e-5
#: Nats below the maximum at which a key starts to count: P-bar rounds to 1 in FP32, in BF16; near the maximum.
THRESHOLDS = {"fp32": math.log1p(-(2.0**-25)), "rounded": math.log1p(-(2.0**-9)), "near": -1e-3}
#: |t| by sequence from which a sign is clear, and standard errors by which two means may differ at most: flipped
#: roundings of 1 % of the elements of O are an eighth of the power of its rounding errors, a third of its noise.
CLEAR_T, MOST_ERRORS = 4.0, 1.0
#: Relative difference of rho below which the order of two flagged heads says nothing.
SAME_RHO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSource:
    """Records that were captured before, as a `RecordSource`."""

    shape: SourceShape
    #: By sequence, in the order of the capture.
    held: tuple[tuple[AttentionRecord, ...], ...]
    projections: tuple[LayerWeights, ...]
    losses: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer."""
        return self.projections[layer]

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """The records of a sequence."""
        if self.losses:
            on_loss(self.losses[sequence])
        yield from self.held[sequence]

    def on(self, device: torch.device) -> "HeldSource":
        """The same with its records on a device."""
        held = tuple(tuple(record.to(device) for record in records) for records in self.held)
        return HeldSource(shape=self.shape, held=held, projections=self.projections, losses=self.losses)


def hold(source: RecordSource, sequences: int | None = None, threads: int = 1) -> HeldSource:
    """Captures the first sequences of a source, all without a number; several at once on a CPU."""
    shape = source.shape
    count = shape.num_sequences if sequences is None else min(sequences, shape.num_sequences)

    def one(sequence: int) -> tuple[tuple[AttentionRecord, ...], list[float]]:
        losses = list[float]()
        with strict_fp32(), single_thread():
            return tuple(source.records(sequence, losses.append)), losses

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(one, range(count)))
    held, losses = [records for records, _ in done], [loss for _, losses in done for loss in losses]
    return HeldSource(
        shape=SourceShape(
            num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size, width=shape.width, num_queries=shape.num_queries, steps=shape.steps[:count],
            groups=shape.groups[:count], step_sequences=shape.step_sequences,
        ),
        held=tuple(held),
        projections=tuple(source.weights(layer) for layer in range(shape.num_layers)),
        losses=tuple(losses),
    )  # fmt: skip


def save(source: HeldSource, path: Path) -> None:
    """Writes records without masks and ignored labels, q, k, v and dO in BF16."""
    tensors, texts = {}, {"losses": " ".join(map(repr, source.losses))}
    for number, records in enumerate(source.held):
        for record in records:
            if record.geometry.key_padding is not None or record.labelled is not None:
                raise ValueError("records with padding or ignored labels are not written here")
            for name in ("q", "k", "v", "do", "x"):
                tensor = getattr(record, name).cpu()
                tensors[f"{number}.{record.layer}.{name}"] = tensor if name == "x" else tensor.bfloat16()
            texts["scale"] = repr(record.geometry.scale)
    save_file(tensors, path, metadata=texts)


def load(path: Path, source: RecordSource) -> HeldSource:
    """Reads what `save` wrote; shapes and weights come from the source of the records."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        texts = file.metadata()
    tensors, shape = load_file(path), source.shape
    losses = tuple(float(text) for text in texts["losses"].split())

    def record(number: int, layer: int) -> AttentionRecord:
        parts = {name: tensors[f"{number}.{layer}.{name}"].float() for name in ("q", "k", "v", "do", "x")}
        geometry = Geometry(scale=float(texts["scale"]))
        return AttentionRecord(
            layer=layer, sequence=number, step=shape.steps[number], storage="bf16", geometry=geometry, **parts
        )

    order = range(shape.num_layers - 1, -1, -1)
    return HeldSource(
        shape=shape,
        held=tuple(tuple(record(number, layer) for layer in order) for number in range(shape.num_sequences)),
        projections=tuple(source.weights(layer) for layer in range(shape.num_layers)),
        losses=losses,
    )


def analyse(source: RecordSource, recipe: Recipe, backend: ChosenBackend, threads: int | None = None) -> Analysed:
    """localize over a source, judged."""
    shape = source.shape
    opened = Opened(
        source=source, kind="nanogpt", shape="held records", activations="amp-bf16", scale=shape.head_size**-0.5,
        causal=True, layer_windows=(None,) * shape.num_layers, softcap=None, no_gradient=None, no_output_head=False,
        files=(), unused_tensors=(), options=InputOptions(),
    )  # fmt: skip
    run = LocalizeRun(
        opened=opened, recipe=recipe, reference="fp32", backend=backend, step_sequences=None, threads=threads,
        until_decided=False, observe=False, load_s=0.0, command=("benchmark",),
    )  # fmt: skip
    return run.analyse()


def compare(source: HeldSource, one: Analysed, other: Analysed) -> tuple[list[str], list[str]]:
    """What two runs over the same records have in common, in words, and what should not differ but does."""
    said: list[str] = []
    wrong = _flagged(one, other, said)
    wrong += _counts(source, one, other, said)
    wrong += _signs(one, other, said)
    return said, wrong


def _flagged(one: Analysed, other: Analysed, said: list[str]) -> list[str]:
    orders = []
    for done in (one, other):
        verdicts = {(head.layer, head.head): head.verdict for head in done.judgement.heads}
        quiet = (CANNOT_JUDGE, NOISE_AT_CHANCE)
        orders.append([place for place in done.judgement.ranking if verdicts[place] not in quiet])
    names = [" ".join(head_name(*place) for place in order) or "none" for order in orders]
    said.append(f"flagged heads: {names[0]}")
    if set(orders[0]) != set(orders[1]):
        return [f"flagged heads differ: {names[0]} against {names[1]}"]
    rho = {(head.layer, head.head): 0.0 if head.dw_q is None else head.dw_q.defect.rho for head in one.result.heads}
    rank = {place: index for index, place in enumerate(orders[1])}
    return [
        f"the order of {head_name(*first)} and {head_name(*second)} differs"
        for index, first in enumerate(orders[0])
        for second in orders[0][index + 1 :]
        if rank[first] > rank[second] and rho[first] - rho[second] > SAME_RHO * abs(rho[first])
    ]


def _counts(source: HeldSource, one: Analysed, other: Analysed, said: list[str]) -> list[str]:
    wrong, excused = [], 0
    budgets: dict[int, dict[str, torch.Tensor]] = {}
    for a, b in zip(one.result.heads, other.result.heads, strict=True):
        for what, threshold, first, second in _counted(a, b):
            if first == second:
                continue
            if threshold is not None and a.layer not in budgets:
                budgets[a.layer] = close_keys(source, a.layer, one.result.recipe)
            budget = 0 if threshold is None else int(budgets[a.layer][threshold][a.head])
            if abs(first - second) > budget:
                wrong.append(f"{head_name(a.layer, a.head)}: {what} {first:,} against {second:,}, {budget} keys close")
            else:
                excused += abs(first - second)
    said.append(f"counts equal but for {excused} keys within {SCORE_ERROR:g} nats of their threshold")
    return wrong


def _counted(a: HeadEvidence, b: HeadEvidence) -> Iterator[tuple[str, str | None, int, int]]:
    """Name, threshold and both counts; no threshold where nothing is close."""
    for name in ("rows", "rows_fully_masked", "rows_padding"):
        yield name, None, getattr(a.counts, name), getattr(b.counts, name)
    yield "pairs", None, a.pairs, b.pairs
    yield "rows_near_max", "near", a.counts.rows_near_max, b.counts.rows_near_max
    if a.ones is not None and b.ones is not None:
        yield "ones in FP32", "fp32", a.ones.fp32_exact, b.ones.fp32_exact
        yield "ones after rounding", "rounded", a.ones.rounded, b.ones.rounded
        yield "keys sharing the maximum", "fp32", a.ones.shared_maximum, b.ones.shared_maximum
        yield "rows_repeated_max", "rounded", a.counts.rows_repeated_max or 0, b.counts.rows_repeated_max or 0


def close_keys(source: HeldSource, layer: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """int [H] by threshold: keys of all sequences whose score decides within `SCORE_ERROR` whether they count."""
    found = {name: torch.zeros(source.shape.num_heads, dtype=torch.int64) for name in THRESHOLDS}
    for records in source.held:
        record = next(record for record in records if record.layer == layer)
        for head in range(record.num_heads):
            raw = record.q[head].double() @ record.k[head * record.num_kv_heads // record.num_heads].double().mT
            close = _close_gaps if recipe.scores == "fp32" else _close_steps
            for name, keys in close(raw, record.geometry, recipe).items():
                found[name][head] += keys
    return found


def _close_gaps(raw: torch.Tensor, geometry: Geometry, recipe: Recipe) -> dict[str, int]:
    """Keys whose distance to the row's maximum lies within `SCORE_ERROR` of a threshold."""
    scores = _hidden(raw * geometry.scale, geometry)
    gap = scores - scores.amax(-1, keepdim=True)
    close = {name: int(((gap - threshold).abs() <= SCORE_ERROR).sum()) for name, threshold in THRESHOLDS.items()}
    # Every row's own maximum is 0 nats below itself.
    own = {name: len(raw) if abs(threshold) <= SCORE_ERROR else 0 for name, threshold in THRESHOLDS.items()}
    return {name: close[name] - own[name] for name in THRESHOLDS}


def _close_steps(raw: torch.Tensor, geometry: Geometry, recipe: Recipe) -> dict[str, int]:
    """The same where scores are stored in BF16: products that near a halfway point move by a whole step.

    Counted are keys that count with the larger scores against the smallest maximum, and do not with the smaller scores
    against the largest one.
    """
    error = SCORE_ERROR / geometry.scale
    low, high = (_hidden(_stored(raw + sign * error, geometry.scale, recipe), geometry) for sign in (-1.0, 1.0))
    best = high - low.amax(-1, keepdim=True)
    worst = low - high.amax(-1, keepdim=True)
    return {name: int(((best >= limit) & (worst < limit)).sum()) for name, limit in THRESHOLDS.items()}


def _stored(raw: torch.Tensor, scale: float, recipe: Recipe) -> torch.Tensor:
    return round_to(round_to(raw, recipe.scores) * scale, recipe.scores)


def _hidden(scores: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    geometry.hide(scores[None], (0, len(scores)), len(scores), 0, scores.shape[-1])
    return scores


def _signs(one: Analysed, other: Analysed, said: list[str]) -> list[str]:
    wrong, clear, farthest = [], 0, (0.0, "")
    for a, b in zip(one.result.heads, other.result.heads, strict=True):
        for what, first, second in (
            ("delta error", a.delta_err, b.delta_err),
            ("delta defect", a.delta_defect, b.delta_defect),
        ):
            if first is None or second is None:
                continue
            name = f"{head_name(a.layer, a.head)}, {what}"
            apart = abs(first.mean - second.mean) / max(first.standard_error, second.standard_error, 1e-300)
            farthest = max(farthest, (apart, name))
            if apart > MOST_ERRORS:
                wrong.append(f"{name}: the means are {apart:.2f} standard errors apart")
            if _is_clear(first) or _is_clear(second):
                clear += 1
                if (first.mean > 0) != (second.mean > 0):
                    wrong.append(f"{name}: the sign differs, t {first.clustered.t:.1f} and {second.clustered.t:.1f}")
    said.append(
        f"{clear} clear signs, all equal; means at most {farthest[0]:.2f} standard errors apart ({farthest[1]})"
    )
    return wrong


def _is_clear(statistics: SignedStatistics) -> bool:
    return abs(statistics.clustered.t) >= CLEAR_T
