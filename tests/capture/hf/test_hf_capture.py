"""Threads, memory, loss and labels, models without an output head, mixed precision, and what is refused."""

import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.capture.activations import AmpActivations, Fp32Activations
from bf16forensics.capture.hf import capture as capture_module
from bf16forensics.capture.hf import head as head_module
from bf16forensics.capture.hf import sequence_run as run_module
from bf16forensics.capture.hf import skeleton as skeleton_module
from bf16forensics.capture.hf.source import HFSource
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.emulate.rounding import round_to, ulp_of
from bf16forensics.errors import ForensicsError, InputError
from bf16forensics.load.batch import RecordedBatch
from bf16forensics.recipe.presets import FA2


@pytest.fixture(scope="module")
def saved(hf: ModuleType, tmp_path_factory: Any) -> dict[str, Path]:
    """Directories of three families."""
    paths = {}
    for family in ("llama", "gemma3", "deepseek"):
        name, settings, _ = hf.FAMILIES[family]
        paths[family] = tmp_path_factory.mktemp(family)
        hf.save(hf.build(name, settings), paths[family])
    return paths


def stacked(record: Any) -> list[torch.Tensor]:
    path = record.query_path
    return [record.q, record.k, record.v, record.do, record.x, path.raw.detach(), path.query.detach()]


@pytest.mark.parametrize("activations", ["fp32", "amp-bf16"])
def test_two_threads_give_the_bits_of_one(hf: ModuleType, saved: dict[str, Path], activations: str) -> None:
    made = Fp32Activations() if activations == "fp32" else AmpActivations(by_recipe=RecipeAttention(FA2))
    capture = hf.open_capture(saved["gemma3"], made)
    drawn = [hf.draw(seed=seed) for seed in range(6)]
    alone = [hf.run(capture, *one) for one in drawn]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda one: hf.run(capture, *one), drawn))
    for (records, loss), (expected, expected_loss) in zip(together, alone, strict=True):
        assert loss == expected_loss
        for record, wanted in zip(records, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(stacked(record), stacked(wanted), strict=True))


def test_sequences_may_be_interleaved_in_one_thread(hf: ModuleType, saved: dict[str, Path]) -> None:
    capture = hf.open_capture(saved["llama"])
    drawn = [hf.draw(seed=seed) for seed in range(2)]
    expected = [hf.run(capture, *one)[0] for one in drawn]
    runs = [
        capture.sequence_records(SequenceInput(index=0, step=None, ids=ids, labels=labels), lambda loss: None)
        for ids, labels in drawn
    ]
    for pair in zip(*runs, strict=True):
        for record, wanted in zip(pair, expected, strict=True):
            assert torch.equal(record.do, wanted[record.layer].do)
            assert torch.equal(record.query_path.query, wanted[record.layer].query_path.query)


def held(module: Any) -> set[str]:
    """Parameters and persistent buffers that take memory."""
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    kept = {name for name, value in every if not value.is_meta and value.untyped_storage().nbytes() > 4}
    return {name for name in kept if "inv_freq" not in name}


@pytest.mark.parametrize("activations", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek"])
def test_keeping_graphs_changes_no_bit(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, activations: str
) -> None:
    """With no room, with room for the first layer only, and with room for all: layers are run again or not."""
    chosen = Fp32Activations() if activations == "fp32" else AmpActivations(by_recipe=RecipeAttention(FA2))
    ids, labels = hf.draw()
    found, ran, again = [], [], []
    original = skeleton_module.Skeleton.run_layer

    def counted(self: Any, index: int, *more: Any) -> Any:
        ran.append(index)
        return original(self, index, *more)

    monkeypatch.setattr(skeleton_module.Skeleton, "run_layer", counted)
    for room in (0, 1, 2**30):
        monkeypatch.setattr(capture_module, "GRAPH_BUDGET_BYTES", room)
        capture = hf.open_capture(saved[family], chosen)
        hf.run(capture, *hf.draw(seed=5))
        ran.clear()
        losses: list[float] = []
        sequence = SequenceInput(index=0, step=None, ids=ids, labels=labels)
        found.append((losses, list(capture.sequence_records(sequence, losses.append))))
        again.append(list(ran))
    layers = len(found[0][1])
    # Room of one byte is spent by the first layer, which does not fit into it.
    assert again == [[*range(layers - 1, -1, -1)]] * 2 + [[]]
    for losses, records in found[1:]:
        assert losses == found[0][0]
        for record, other in zip(records, found[0][1], strict=True):
            for name in ("q", "k", "v", "do", "x"):
                assert torch.equal(getattr(record, name), getattr(other, name))


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_graphs_are_kept_within_the_budget(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """As many of the first layers as fit: the first one alone when the room is that of one layer."""
    ids, labels = hf.draw()
    kept: list[list[int]] = []
    original = run_module.SequenceRun.forward

    def forward(self: Any, *more: Any) -> Any:
        result = original(self, *more)
        kept.append(sorted(self._graphs))
        rooms.append(self._room)
        return result

    monkeypatch.setattr(run_module.SequenceRun, "forward", forward)
    rooms: list[int] = []
    for room in (2**30, 0):
        monkeypatch.setattr(capture_module, "GRAPH_BUDGET_BYTES", room or (2**30 - rooms[1]) * 2 // 3)
        capture = hf.open_capture(saved[family], Fp32Activations())
        hf.run(capture, ids, labels)
        sequence = SequenceInput(index=0, step=None, ids=ids, labels=labels)
        next(iter(capture.sequence_records(sequence, lambda loss: None)))
    # The first sequence of a capture keeps none.
    assert kept == [[], [0, 1], [], [0]]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek"])
def test_weights_stand_in_memory_only_while_their_module_runs(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    capture = hf.open_capture(saved[family], Fp32Activations())
    ids, labels = hf.draw()
    most: list[set[str]] = []
    original = run_module.SequenceRun._geometry

    def watched(self: Any, made: Any) -> Any:
        most.append(held(capture.skeleton().module))
        return original(self, made)

    monkeypatch.setattr(run_module.SequenceRun, "_geometry", watched)
    sequence = SequenceInput(index=0, step=None, ids=ids, labels=labels)
    for _ in capture.sequence_records(sequence, lambda loss: None):
        assert held(capture.skeleton().module) == set()
    # Once a layer in the forward pass and once when it is run again: only its own weights are there.
    assert len(most) == 4
    for names in most:
        assert len({name.split("layers.")[1].split(".")[0] for name in names}) == 1
        assert any("q_" in name for name in names)
        assert not any("embed" in name or "lm_head" in name for name in names)


def test_an_error_in_the_middle_leaves_nothing_behind(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = hf.open_capture(saved["llama"])
    ids, labels = hf.draw()
    expected, _ = hf.run(capture, ids, labels)
    with monkeypatch.context() as patch:
        patch.setattr(run_module.SequenceRun, "_geometry", lambda self, made: (_ for _ in ()).throw(KeyError("broken")))
        with pytest.raises(KeyError, match="broken"):
            hf.run(capture, ids, labels)
    assert held(capture.skeleton().module) == set()
    again, _ = hf.run(capture, ids, labels)
    assert all(torch.equal(a.do, b.do) for a, b in zip(again, expected, strict=True))


def test_records_keep_no_weight_of_a_layer_alive(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    original = skeleton_module._Slot.put

    def noted(self: Any, values: torch.Tensor) -> None:
        original(self, values)
        if values is not self.empty:
            put.append((self.name, weakref.ref(getattr(self.owner, self.attribute))))

    monkeypatch.setattr(skeleton_module._Slot, "put", noted)
    records, _ = hf.run(hf.open_capture(saved["gemma3"], Fp32Activations()), *hf.draw())
    gc.collect()
    assert len(records) == 2
    assert len({name for name, _ in put}) > 20
    # The norm between projection and q is part of the records' paths.
    assert {name.rsplit(".", 2)[-2] for name, held in put if held() is not None} <= {"q_norm"}


def test_no_label_at_all_gives_a_nan_loss_and_zero_gradients(hf: ModuleType, saved: dict[str, Path]) -> None:
    ids, labels = hf.draw()
    records, loss = hf.run(hf.open_capture(saved["llama"]), ids, torch.full_like(labels, -100))
    assert math.isnan(loss)
    for record in records:
        assert not record.do.any()
        assert not record.labelled.any()


def test_a_broken_model_does_not_pass_for_one_without_labels(hf: ModuleType, tmp_path: Path) -> None:
    def broken(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight[3, 2] = math.nan

    hf.save(hf.build("Llama", hf.COMMON, change=broken), tmp_path)
    records, loss = hf.run(hf.open_capture(tmp_path), *hf.draw())
    assert math.isnan(loss)
    assert torch.isnan(records[0].do).any()
    assert not torch.isnan(records[1].q).any()


def test_without_an_output_head_there_is_the_forward_pass_only(
    hf: ModuleType, plain: ModuleType, tmp_path: Path
) -> None:
    twins = hf.make_twins(plain, "llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, {"format": "pt"})
    ids, labels = hf.draw()
    expected, _ = hf.run(twins.capture, ids, labels)
    capture = hf.open_capture(tmp_path)
    assert not capture.model.has_output_head
    losses: list[float] = []
    sequence = SequenceInput(index=0, step=None, ids=ids, labels=labels)
    records = list(capture.sequence_records(sequence, losses.append))
    assert losses == []
    assert [record.layer for record in records] == [1, 0]
    for record in records:
        wanted = expected[record.layer]
        assert record.do is None
        for name in ("q", "k", "v", "x"):
            assert torch.equal(getattr(record, name), getattr(wanted, name))
        assert torch.equal(record.query_path.query, wanted.query_path.query)


@pytest.mark.parametrize("storage", ["bf16", "fp16"])
def test_fp32_activations_round_at_the_attention_call_only(
    hf: ModuleType, plain: ModuleType, tmp_path: Path, storage: str
) -> None:
    dtype = torch.bfloat16 if storage == "bf16" else torch.float16
    twins = hf.make_twins(plain, "qwen3", tmp_path, rounded_to=dtype)
    capture = hf.open_capture(tmp_path, Fp32Activations(storage=storage))
    ids, labels = hf.draw()
    records, _ = hf.run(capture, ids, labels)
    twins.twin.loss(ids, labels, torch.arange(12), twins.visible_of).backward()
    for record, seen in zip(records, twins.twin.seen, strict=True):
        assert record.storage == storage
        for name in ("q", "k", "v"):
            found, expected = getattr(record, name), getattr(seen, name).detach()
            assert torch.equal(found, round_to(found, storage))
            # FP32 noise of 1e-6 meets a tie of BF16 in 1e-6 * 2^8 of the elements, of FP16 in eight times as many.
            apart = (found.double() - expected).abs()
            assert float((apart > 1e-9).float().mean()) < 0.01
            assert bool((apart <= ulp_of(found, storage).double() * 1.001).all())
        expected = round_to(seen.o.grad.float(), storage)
        assert torch.equal(record.do, round_to(record.do, storage))
        assert float((record.do - expected).abs().max()) <= 2.0**-7 * float(expected.abs().max())
        assert float(record.x.double().sub(seen.x.detach()).abs().max()) < 1e-3


def test_mixed_precision_records_what_the_bf16_product_read(hf: ModuleType, tmp_path: Path) -> None:
    name, settings, _ = hf.FAMILIES["qwen3"]
    hf.save(hf.build(name, {**settings, "attention_bias": True}), tmp_path)
    capture = hf.open_capture(tmp_path, AmpActivations(by_recipe=RecipeAttention(FA2)))
    exact = hf.open_capture(tmp_path)
    ids, labels = hf.draw()
    records, loss = hf.run(capture, ids, labels)
    wanted, expected = hf.run(exact, ids, labels)
    assert loss == pytest.approx(expected, abs=0.02)
    assert loss != expected
    for record, unrounded in zip(records, wanted, strict=True):
        assert record.storage == "bf16"
        for tensor in (record.q, record.k, record.v, record.do, record.x, record.query_path.raw.detach()):
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, round_to(tensor, "bf16"))
        # W_Q x as BF16 operands give it, in float64: all but ties of the one rounding at the end are the same.
        weight = round_to(capture.model.weights[f"model.layers.{record.layer}.self_attn.q_proj.weight"], "bf16")
        bias = round_to(capture.model.weights[f"model.layers.{record.layer}.self_attn.q_proj.bias"], "bf16")
        product = record.x.double() @ weight.double().T + bias.double()
        same = round_to(product, "bf16").double() == record.query_path.raw.detach().double()
        assert float(same.double().mean()) > 0.99
        # From there q is FP32 until attention casts it; nothing of the path is emulated.
        assert not torch.equal(record.query_path.query.detach(), round_to(record.query_path.query.detach(), "bf16"))
        # The model's norm hands its result on in BF16: q is one such rounding away, and one of its own.
        away = (record.query_path.query.detach() - record.q).abs()
        assert float(away.max()) <= 2.0**-7 * float(record.q.abs().max())
        assert float((record.q - unrounded.q).abs().max()) < 0.05 * float(unrounded.q.abs().max())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("GptOss", {"head_dim": 16, "num_local_experts": 4}, "passes 's_aux' to attention"),
        ("DiffLlama", {}, r"exactly once in each layer; layers 0, 1 made 2, 2 calls"),
        ("Doge", {}, "computes its attention mask from hidden states"),
        (
            "Gemma3n",
            {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "activation_sparsity_pattern": [0.0] * 4,
                "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
            },
            "takes its keys from another layer",
        ),
    ],
)
def test_models_that_cannot_be_followed_are_refused_by_name(
    hf: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    hf.save(hf.build(name, {**hf.COMMON, **settings}), tmp_path)
    with pytest.raises(InputError, match=message):
        hf.run(hf.open_capture(tmp_path), *hf.draw())


def test_attention_without_a_capture_is_refused(hf: ModuleType, saved: dict[str, Path]) -> None:
    module = hf.open_capture(saved["llama"]).skeleton().module
    with pytest.raises(ForensicsError, match="only while a capture is running"):
        module(input_ids=hf.draw()[0][None], use_cache=False)


def test_a_weight_used_by_a_module_that_does_not_own_it_is_named(hf: ModuleType, saved: dict[str, Path]) -> None:
    capture = hf.open_capture(saved["llama"])
    module = capture.skeleton().module
    module.model.norm.forward = lambda hidden: hidden * module.lm_head.weight[0]
    with pytest.raises(InputError, match="LlamaForCausalLM uses a weight outside the module that owns it"):
        hf.run(capture, *hf.draw())


def test_hidden_states_changed_between_layers_are_noticed(hf: ModuleType, saved: dict[str, Path]) -> None:
    capture = hf.open_capture(saved["llama"])
    first = capture.skeleton().module.model.layers[0]
    original = first.forward
    first.forward = lambda *args, **kwargs: original(*args, **kwargs) * 1.0
    with pytest.raises(InputError, match="llama changes hidden states between layers 0 and 1"):
        hf.run(capture, *hf.draw())


def test_a_family_without_linear_projections_goes_without_w_q(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = hf.run(hf.open_capture(saved["llama"]), *hf.draw())
    monkeypatch.setattr("bf16forensics.capture.hf.probe.find_projection", lambda *_: None)
    capture = hf.open_capture(saved["llama"])
    assert capture.structure.width is None
    records, _ = hf.run(capture, *hf.draw())
    for record, wanted in zip(records, expected, strict=True):
        assert record.x is None
        assert record.query_path is None
        assert torch.equal(record.do, wanted.do)
        weights = capture.weights(record.layer)
        assert (weights.w_q, weights.w_k) == (None, None)
    notes = " ".join(capture.notes)
    assert "W_Q is not known, so nothing is coupled to it" in notes
    assert "in layers 0, 1" in notes


def batch(hf: ModuleType, count: int = 3) -> RecordedBatch:
    drawn = [hf.draw(seed=seed) for seed in range(count)]
    mask = torch.ones(count, 12, dtype=torch.bool)
    mask[1, 9:] = False
    labels = torch.stack([labels for _, labels in drawn])
    labels[~mask] = -100
    return RecordedBatch(
        ids=torch.stack([ids for ids, _ in drawn]),
        labels=labels,
        attention_mask=mask,
        position_ids=torch.arange(12).expand(count, -1),
        steps=(5, 5, 6),
        line_of_sequence=(None,) * count,
        step_sequences=16,
        notes=("of the batch",),
        files=(),
    )


def test_source_describes_model_and_batch(hf: ModuleType, saved: dict[str, Path]) -> None:
    source = HFSource(capture=hf.open_capture(saved["gemma3"]), batch=batch(hf))
    shape = source.shape
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (2, 4, 2)
    assert (shape.head_size, shape.width, shape.num_queries) == (16, 32, 12)
    assert (shape.steps, shape.groups, shape.step_sequences) == ((5, 5, 6), (5, 5, 6), 16)
    assert source.shape_words == "gemma3_text, 2 layers, 4 heads (2 kv), head size 16, width 32, weights fp32"
    assert source.layer_windows == (5, None)
    assert source.layer_scales == (20**-0.5,) * 2
    assert source.softcap == 2.0
    assert source.causal
    assert "of the batch" in source.notes
    records = list(source.records(1, lambda loss: None))
    assert [(record.layer, record.sequence, record.step) for record in records] == [(1, 1, 5), (0, 1, 5)]
    assert int(records[0].geometry.key_padding.sum()) == 9
    assert source.weights(1).layer == 1


def test_source_of_compressed_attention_names_both_sizes(hf: ModuleType, saved: dict[str, Path]) -> None:
    source = HFSource(capture=hf.open_capture(saved["deepseek"]), batch=replace(batch(hf), line_of_sequence=(3, 4, 4)))
    assert source.shape_words == "deepseek_v3, 2 layers, 4 heads, head size 10 (v 5), width 32, weights fp32"
    # W_Q's input is the compressed query.
    assert source.shape.width == 12
    assert source.shape.groups == (3, 4, 4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("activations", ["fp32", "amp-bf16"])
def test_large_logits_come_in_pieces_and_change_nothing(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, activations: str
) -> None:
    made = Fp32Activations() if activations == "fp32" else AmpActivations(by_recipe=RecipeAttention(FA2))
    capture = hf.open_capture(saved[family], made)
    ids, labels = hf.draw()
    labels[2:4] = -100
    none = torch.full_like(labels, -100)
    expected, expected_loss = hf.run(capture, ids, labels)
    rows: list[int] = []
    original = head_module.functional.cross_entropy

    def counted(logits: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        rows.append(len(logits))
        return original(logits, *args, **more)

    monkeypatch.setattr(head_module, "_ELEMENTS", 4 * 64)
    monkeypatch.setattr(head_module.functional, "cross_entropy", counted)
    records, loss = hf.run(capture, ids, labels)
    # A function mode calls a function of torch twice: itself, and under the mode.
    assert rows == [count for count in (4, 4, 2) for _ in range(1 if activations == "fp32" else 2)]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    # The same numbers in products of other sizes: FP32 noise, which meets a tie of BF16 now and then.
    for record, wanted in zip(records, expected, strict=True):
        assert float((record.do - wanted.do).abs().max()) <= 2.0**-8 * float(wanted.do.abs().max())
        assert torch.equal(record.q, wanted.q)
    records, loss = hf.run(capture, ids, none)
    assert math.isnan(loss)
    assert not any(record.do.any() for record in records)


def test_a_head_that_cannot_be_split_is_run_whole(
    hf: ModuleType, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = hf.open_capture(saved["llama"])
    ids, labels = hf.draw()
    expected, expected_loss = hf.run(capture, ids, labels)
    monkeypatch.setattr(head_module, "_ELEMENTS", 64)
    # The model does not ask its body for the hidden states.
    monkeypatch.setattr(head_module, "_answering", lambda body, output: nullcontext([]))
    records, loss = hf.run(capture, ids, labels)
    assert loss == expected_loss
    assert all(torch.equal(record.do, wanted.do) for record, wanted in zip(records, expected, strict=True))
