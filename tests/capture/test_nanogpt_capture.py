"""Capture of a nanoGPT against an independent model, and the traps of labels, padding and long sequences."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture import exact_attention as blocks
from bf16forensics.capture.activations import Fp32Activations
from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.nanogpt_source import NanoGPTSource
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.emulate.rounding import round_to, ulp_of
from bf16forensics.evidence.gradient import weight_gradient
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.batch import RecordedBatch
from bf16forensics.load.nanogpt import NanoGPTCheckpoint
from bf16forensics.recipe.presets import FA2

LAYERS, HEADS, WIDTH, TOKENS, VOCABULARY = 3, 4, 32, 20, 19
#: FP32 noise of a few roundings (1e-6) meets a BF16 tie (steps of 2^-8) in some 1e-6 * 2^8 = 3e-4 of the elements;
#: where one did, every gradient that it reaches moves a little and meets ties too (8 % on real models).
FLIPPED_SHARE = 0.15
#: One such element upstream moves later tensors by a fraction of a BF16 step of their largest element.
UPSTREAM = 2.0**-9

Make = Callable[..., NanoGPTCheckpoint]


def draw_ids(count: int, seed: int = 1, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randint(0, VOCABULARY, (count, tokens + 1), generator=torch.Generator().manual_seed(seed))
    return both[:, :-1].clone(), both[:, 1:].clone()


def run(
    checkpoint: NanoGPTCheckpoint, ids: torch.Tensor, labels: torch.Tensor, storage: str = "bf16", **more: Any
) -> tuple[list[AttentionRecord], float]:
    losses: list[float] = []
    capture = NanoGPTCapture(checkpoint=checkpoint, activations=Fp32Activations(storage=storage))
    sequence = SequenceInput(index=0, step=7, ids=ids, labels=labels, **more)
    records = list(capture.sequence_records(sequence, losses.append))
    assert len(losses) == 1
    return records[::-1], losses[0]


def assert_same_but_ties(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Both hold BF16 values; a few may be neighbours."""
    apart = (found - expected).abs()
    step = ulp_of(torch.maximum(found.abs(), expected.abs()), "bf16")
    worst = float((apart - step).max() / expected.abs().max())
    assert worst <= UPSTREAM
    assert float((apart != 0).float().mean()) <= FLIPPED_SHARE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_records_are_those_of_an_independent_model(
    make_checkpoint: Make, independent: Callable[..., Any], bias: bool, dtype: torch.dtype
) -> None:
    checkpoint = make_checkpoint(bias=bias, dtype=dtype)
    ids, labels = draw_ids(2)
    labels[1, 4:9] = -100
    model = independent(checkpoint.tensors, bias, torch.bfloat16)
    losses = model(ids, labels)
    losses.sum().backward()
    for sequence in range(2):
        records, loss = run(checkpoint, ids[sequence], labels[sequence])
        assert loss == pytest.approx(float(losses[sequence].detach()), rel=1e-4)
        for record, block in zip(records, model.blocks, strict=True):
            assert record.x is not None
            assert float((record.x - block.seen["x"][sequence].detach()).abs().max()) <= UPSTREAM * 4
            for name in ("q", "k", "v"):
                found = getattr(record, name)
                assert torch.equal(found, round_to(found, "bf16"))
                assert_same_but_ties(found, block.seen[name][sequence].detach())
            assert record.do is not None
            assert float(record.do.abs().max()) > 0
            assert_same_but_ties(record.do, round_to(block.seen["o"].grad[sequence], "bf16"))


@pytest.mark.parametrize("bias", [False, True])
def test_unrounded_records_and_their_weight_gradient_are_autograds(
    make_checkpoint: Make, independent: Callable[..., Any], bias: bool
) -> None:
    checkpoint = make_checkpoint(bias=bias)
    ids, labels = draw_ids(2, seed=2)
    labels[0, :3] = -100
    model = independent(checkpoint.tensors, bias, None)
    losses = model(ids, labels)
    losses.sum().backward()
    found = torch.zeros(LAYERS, WIDTH, WIDTH, dtype=torch.float64)
    for sequence in range(2):
        records, loss = run(checkpoint, ids[sequence], labels[sequence], storage="fp32")
        assert loss == pytest.approx(float(losses[sequence].detach()), rel=1e-6)
        for record in records:
            seen = model.blocks[record.layer].seen
            for name in ("x", "q", "k", "v"):
                torch.testing.assert_close(getattr(record, name), seen[name][sequence].detach(), rtol=1e-4, atol=1e-5)
            upstream = seen["o"].grad[sequence]
            # FP32 on both sides: some 30 roundings deep, each 6e-8 of the largest element.
            torch.testing.assert_close(record.do, upstream, rtol=0.0, atol=1e-5 * float(upstream.abs().max()))
            dual = dual_pass(record, FA2, "fp64")
            assert dual.dq is not None
            assert record.x is not None
            found[record.layer] += weight_gradient(dual.dq.hp, record.x.double()).reshape(WIDTH, WIDTH)
    for layer, block in enumerate(model.blocks):
        expected = block.c_attn.weight.grad[:WIDTH].double()
        assert float((found[layer] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("storage", ["bf16", "fp16", "fp32"])
def test_storage_format_is_that_of_q_k_v_and_do(make_checkpoint: Make, storage: str) -> None:
    ids, labels = draw_ids(1)
    for record in run(make_checkpoint(), ids[0], labels[0], storage=storage)[0]:
        assert record.storage == storage
        for tensor in (record.q, record.k, record.v, record.do):
            assert tensor is not None
            assert tensor.dtype == torch.float32
            assert not tensor.requires_grad
            assert torch.equal(tensor, round_to(tensor, storage))


def test_records_come_last_layer_first_and_one_at_a_time(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, labels = draw_ids(1)
    computed: list[int] = []
    original = NanoGPTCapture._half_layer

    def counted(self: NanoGPTCapture, layer: Any, hidden: torch.Tensor, geometry: Geometry) -> Any:
        if torch.is_grad_enabled():
            computed.append(1)
        return original(self, layer, hidden, geometry)

    monkeypatch.setattr(NanoGPTCapture, "_half_layer", counted)
    losses: list[float] = []
    sequence = SequenceInput(index=3, step=None, ids=ids[0], labels=labels[0])
    layers = []
    for record in NanoGPTCapture(checkpoint=make_checkpoint()).sequence_records(sequence, losses.append):
        layers.append(record.layer)
        assert record.sequence == 3
        assert record.step is None
        assert len(losses) == 1
        assert len(computed) == len(layers)
    assert layers == [2, 1, 0]


def test_the_generator_leaves_gradient_mode_alone_between_records(make_checkpoint: Make) -> None:
    ids, labels = draw_ids(1)
    sequence = SequenceInput(index=0, step=None, ids=ids[0], labels=labels[0])
    with torch.no_grad():
        for record in NanoGPTCapture(checkpoint=make_checkpoint()).sequence_records(sequence, lambda loss: None):
            assert not torch.is_grad_enabled()
            assert record.do is not None


def test_ignored_labels_are_named_and_do_not_pull(make_checkpoint: Make) -> None:
    ids, labels = draw_ids(1)
    labels[0, 12:] = -100
    records, loss = run(make_checkpoint(), ids[0], labels[0])
    short, short_loss = run(make_checkpoint(), ids[0, :12], labels[0, :12])
    # Causal: what comes after the last label changes neither the loss nor any gradient before it.
    assert loss == pytest.approx(short_loss, rel=1e-5)
    for record, expected in zip(records, short, strict=True):
        assert record.labelled is not None
        assert record.labelled.tolist() == [True] * 12 + [False] * 8
        assert expected.labelled is None
        assert record.do is not None
        assert expected.do is not None
        assert not record.do[:, 12:].any()
        assert_same_but_ties(record.do[:, :12], expected.do)


def test_no_label_at_all_gives_a_nan_loss_and_zero_gradients(make_checkpoint: Make) -> None:
    ids, _ = draw_ids(1)
    records, loss = run(make_checkpoint(), ids[0], torch.full((TOKENS,), -100))
    assert math.isnan(loss)
    assert len(records) == LAYERS
    for record in records:
        assert record.do is not None
        assert not record.do.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_model_does_not_pass_for_one_without_labels(make_checkpoint: Make, value: float) -> None:
    checkpoint = make_checkpoint(bias=True)
    state = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    state["transformer.h.2.mlp.c_proj.bias"][3] = value
    ids, labels = draw_ids(1)
    records, loss = run(make_checkpoint(bias=True, state=state), ids[0], labels[0])
    assert math.isnan(loss)
    for record in records:
        assert record.do is not None
        assert not torch.isfinite(record.do).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_real_tokens(make_checkpoint: Make, side: str) -> None:
    ids, labels = draw_ids(1, tokens=14)
    plain, plain_loss = run(make_checkpoint(), ids[0], labels[0])
    before, after = (6, 0) if side == "left" else (0, 6)
    real = torch.tensor([False] * before + [True] * 14 + [False] * after)
    padded = torch.full((20,), 4).masked_scatter(real, ids[0])
    targets = torch.full((20,), -100).masked_scatter(real, labels[0])
    positions = torch.zeros(20, dtype=torch.int64).masked_scatter(real, torch.arange(14))
    records, loss = run(make_checkpoint(), padded, targets, position_ids=positions, real=real)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    for record, expected in zip(records, plain, strict=True):
        assert record.geometry.key_padding is real
        assert record.geometry.query_padding is real
        for name in ("q", "k", "v", "do"):
            found, wanted = getattr(record, name), getattr(expected, name)
            assert torch.isfinite(found).all()
            assert_same_but_ties(found[:, real], wanted)
        assert record.do is not None
        assert not record.do[:, ~real].any()


def test_position_ids_choose_rows_of_the_position_table(make_checkpoint: Make) -> None:
    ids, labels = draw_ids(1)
    plain, _ = run(make_checkpoint(), ids[0], labels[0])
    same, _ = run(make_checkpoint(), ids[0], labels[0], position_ids=torch.arange(TOKENS))
    moved, _ = run(make_checkpoint(), ids[0], labels[0], position_ids=torch.arange(TOKENS) + 3)
    assert torch.equal(plain[0].q, same[0].q)
    assert not torch.equal(plain[0].q, moved[0].q)


@pytest.mark.parametrize("kept_elements", [2**24, 0], ids=["kept", "computed again"])
def test_long_sequences_are_the_same_block_by_block(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch, kept_elements: int
) -> None:
    ids, labels = draw_ids(1)
    real = torch.arange(TOKENS) >= 3
    labels[0, :3] = -100
    for more in ({}, {"real": real}):
        whole, whole_loss = run(make_checkpoint(), ids[0], labels[0], **more)
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "_ROWS", 7)
            patch.setattr(blocks, "_KEPT_ELEMENTS", kept_elements)
            sliced, sliced_loss = run(make_checkpoint(), ids[0], labels[0], **more)
        assert sliced_loss == pytest.approx(whole_loss, rel=1e-5)
        for found, expected in zip(sliced, whole, strict=True):
            for name in ("q", "k", "v", "do"):
                assert_same_but_ties(getattr(found, name), getattr(expected, name))


def test_projections_by_head_keep_the_orientation_out_by_in(make_checkpoint: Make) -> None:
    checkpoint = make_checkpoint()
    fused = checkpoint.tensors["transformer.h.1.attn.c_attn.weight"]
    weights = NanoGPTCapture(checkpoint=checkpoint).weights(1)
    size = WIDTH // HEADS
    assert weights.w_q is not None
    assert weights.w_k is not None
    assert torch.equal(weights.w_q[2], fused[2 * size : 3 * size])
    assert torch.equal(weights.w_k[3], fused[WIDTH + 3 * size : WIDTH + 4 * size])


def test_the_models_own_settings_do_not_leak_in(make_checkpoint: Make) -> None:
    ids, labels = draw_ids(1)
    plain, _ = run(make_checkpoint(), ids[0], labels[0])
    with torch.autocast("cpu", torch.bfloat16):
        under, _ = run(make_checkpoint(), ids[0], labels[0])
    for found, expected in zip(under, plain, strict=True):
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.do, expected.do)


def batch(steps: tuple[int | None, ...], lines: tuple[int | None, ...], **more: Any) -> RecordedBatch:
    ids, labels = draw_ids(len(steps))
    return RecordedBatch(
        ids=ids,
        labels=labels,
        attention_mask=more.get("attention_mask"),
        position_ids=more.get("position_ids"),
        steps=steps,
        line_of_sequence=lines,
        step_sequences=16,
        notes=(),
        files=(),
    )


def test_source_describes_the_batch_and_runs_its_sequences(make_checkpoint: Make) -> None:
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[1, 15:] = False
    source = NanoGPTSource(
        capture=NanoGPTCapture(checkpoint=make_checkpoint()),
        batch=batch((5, 5, 6), (0, 0, 1), attention_mask=mask, position_ids=torch.arange(TOKENS).expand(3, -1)),
    )
    shape = source.shape
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (LAYERS, HEADS, HEADS)
    assert (shape.head_size, shape.width, shape.num_queries) == (8, WIDTH, TOKENS)
    assert (shape.num_sequences, shape.steps, shape.groups, shape.step_sequences) == (3, (5, 5, 6), (0, 0, 1), 16)
    records = list(source.records(1, lambda loss: None))
    assert [record.layer for record in records] == [2, 1, 0]
    assert {(record.sequence, record.step) for record in records} == {(1, 5)}
    assert records[0].geometry.key_padding is not None
    assert int(records[0].geometry.key_padding.sum()) == 15
    assert records[0].geometry.scale == 1 / math.sqrt(8)
    assert source.weights(2).layer == 2


@pytest.mark.parametrize(
    ("steps", "lines", "groups"),
    [((9, 9, 12), (None,) * 3, (9, 9, 12)), ((None,) * 3, (None,) * 3, (0, 0, 0)), ((None,) * 3, (4, 4, 5), (4, 4, 5))],
)
def test_sequences_belong_to_their_line_or_step(
    make_checkpoint: Make, steps: tuple[Any, ...], lines: tuple[Any, ...], groups: tuple[int, ...]
) -> None:
    source = NanoGPTSource(capture=NanoGPTCapture(checkpoint=make_checkpoint()), batch=batch(steps, lines))
    assert source.shape.groups == groups
