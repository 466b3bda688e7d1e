"""Known answers for windows, soft-caps, rotary angles, head sizes, scales and transposed weights in directories."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.evidence.spectrum import layer_spectra
from bf16forensics.recipe.presets import FA2


def record_of(hf: ModuleType, path: Path, tokens: int = 6, **more: Any) -> tuple[Any, list[AttentionRecord]]:
    capture = hf.open_capture(path)
    ids, labels = hf.draw(tokens)
    return capture, hf.run(capture, ids, labels, **more)[0]


def zero_queries_and_keys(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
        layer.self_attn.k_proj.weight.zero_()


@pytest.mark.parametrize(
    ("name", "settings", "visible", "output"),
    [
        ("Mistral", {"sliding_window": 3}, [1, 2, 3, 3, 3, 3], 4.0),
        ("Mistral", {"sliding_window": 2}, [1, 2, 2, 2, 2, 2], 4.5),
        ("Mistral", {"sliding_window": 6}, [1, 2, 3, 4, 5, 6], 2.5),
        ("Mistral", {"sliding_window": None}, [1, 2, 3, 4, 5, 6], 2.5),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"] * 2},
         [1, 2, 3, 3, 3, 3], 4.0),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention"] * 2},
         [1, 2, 3, 4, 5, 6], 2.5),
    ],
    ids=["3", "2", "as long as the sequence", "null", "layers with", "layers without"],
)  # fmt: skip
def test_window_counts_the_querys_own_key(
    hf: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any], visible: list[int], output: float
) -> None:
    hf.save(hf.build(name, {**hf.COMMON, **settings}, change=zero_queries_and_keys), tmp_path)
    capture, records = record_of(hf, tmp_path)
    for record in records:
        seen = record.geometry.visible((0, 6), (0, 6), 6, 6)
        assert seen.expand(1, 6, 6).sum(-1).tolist() == [visible]
        v = torch.arange(6.0)[None, :, None].expand(record.v.shape).contiguous()
        dual = dual_pass(replace(record, v=v), FA2, "fp64")
        assert dual.o_hp[:, 5].tolist() == [[pytest.approx(output, rel=1e-12)] * record.v.shape[-1]] * 4
    told = 3 if sum(visible) == 15 else settings["sliding_window"]
    told = None if settings.get("layer_types") == ["full_attention"] * 2 else told
    assert [layer.window for layer in capture.structure.layers] == [told, told]


def scored(record: AttentionRecord, scores: list[float], values: list[float]) -> AttentionRecord:
    """One query over keys with the given scores before any soft-cap, by the record's own scale."""
    geometry = replace(record.geometry, causal=False, window=None)
    size = record.q.shape[-1]
    q, k = torch.zeros(1, 1, size), torch.zeros(1, len(scores), size)
    q[..., 0] = 1.0
    k[0, :, 0] = torch.tensor(scores) / geometry.scale
    v = torch.tensor(values)[None, :, None]
    return replace(
        record, q=q, k=k, v=v, do=torch.ones(1, 1, 1), x=None, geometry=geometry, query_path=None, labelled=None
    )


def test_soft_cap_of_gemma_3_is_applied_though_the_class_ignores_it(hf: ModuleType, tmp_path: Path) -> None:
    settings = {**hf.FAMILIES["gemma3"][1], "attn_logit_softcapping": 50.0}
    hf.save(hf.build("Gemma3", settings), tmp_path)
    capture, records = record_of(hf, tmp_path)
    assert [layer.softcap for layer in capture.structure.layers] == [50.0, 50.0]
    for record in records:
        assert record.geometry.softcap == 50.0
        dual = dual_pass(scored(record, [100.0, 90.0], [1.0, 0.0]), FA2, "fp64")
        # 50 tanh(2) = 48.201379 and 50 tanh(1.8) = 47.340301; keys in FP32 move the scores by 1e-6.
        assert float(dual.o_hp) == pytest.approx(0.702886, abs=1e-6)
        ignored = scored(replace(record, geometry=replace(record.geometry, softcap=None)), [100.0, 90.0], [1.0, 0.0])
        assert float(dual_pass(ignored, FA2, "fp64").o_hp) == pytest.approx(0.999955, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotary_angles_are_fp32_whatever_the_weights(hf: ModuleType, tmp_path: Path, dtype: torch.dtype) -> None:
    settings = {**hf.COMMON, "head_dim": 2, "max_position_embeddings": 16384, "attention_bias": True}

    def constant_queries(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
            layer.self_attn.q_proj.bias.copy_(torch.tensor([1.0, 0.0] * 4))

    hf.save(hf.build("Llama", settings, change=constant_queries), tmp_path, dtype)
    positions = torch.tensor([256, 257, 15962])
    capture, records = record_of(hf, tmp_path, 3, position_ids=positions)
    assert capture.model.weight_dtype == ("bf16" if dtype == torch.bfloat16 else "fp32")
    for record in records:
        for head in record.q:
            assert head[0].tolist() == pytest.approx([-0.039791, -0.999208], abs=1e-6)
            assert head[1].tolist() == pytest.approx([0.819306, -0.573357], abs=1e-6)
            assert float(head[2, 0]) == pytest.approx(-0.908016, abs=1e-6)
            # FP32 holds these positions exactly, and its cosine is right to the last digit or two.
            assert head[2, 1] == pytest.approx(math.sin(15962), abs=2e-7)
    assert "rotary angles are computed in FP32, whatever the format of the weights" in capture.notes


def test_head_size_comes_from_the_configuration(hf: ModuleType, tmp_path: Path) -> None:
    settings = {**hf.COMMON, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}

    def marked(model: Any) -> None:
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight
            assert weight.shape == (16, 8)
            weight.zero_()
            for row, column, value in ((0, 0, 3.0), (5, 1, 4.0), (8, 2, 7.0), (12, 3, 24.0)):
                weight[row, column] = value

    hf.save(hf.build("Llama", settings, change=marked), tmp_path)
    capture, records = record_of(hf, tmp_path)
    assert (capture.structure.num_heads, capture.structure.num_kv_heads, capture.structure.head_size) == (2, 1, 8)
    for record in records:
        assert record.geometry.scale == pytest.approx(1 / math.sqrt(8), rel=1e-15)
        norms = [spectrum.w_q_spectral_norm for spectrum in layer_spectra(capture.weights(record.layer), 2)]
        assert norms == pytest.approx([4.0, 24.0], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Gemma3", {"head_dim": 64, "query_pre_attn_scalar": 144}),
        ("Gemma2", {"head_dim": 64, "query_pre_attn_scalar": 144, "attn_logit_softcapping": None}),
        ("Granite", {"attention_multiplier": 1 / 12}),
    ],
)
def test_scale_comes_from_the_configuration(
    hf: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    hf.save(hf.build(name, {**hf.COMMON, **settings}), tmp_path)
    for record in record_of(hf, tmp_path)[1]:
        assert record.geometry.scale == pytest.approx(1 / 12, rel=1e-15)
        raw = scored(record, [24 * record.geometry.scale, 0.0], [1.0, 0.0])
        assert float(dual_pass(raw, FA2, "fp64").o_hp) == pytest.approx(0.880797, abs=1e-6)


def test_gpt_2_stores_weights_transposed(hf: ModuleType, tmp_path: Path) -> None:
    settings = {**hf.FAMILIES["gpt2"][1], "n_embd": 4, "n_head": 2}
    block = torch.tensor([[0.0, 0, 0, 3], [1, 0, 0, 0], [0, 5, 0, 0], [0, 0, 2, 0]])

    def marked(model: Any) -> None:
        for layer in model.transformer.h:
            layer.attn.c_attn.weight.zero_()
            layer.attn.c_attn.weight[:, :4] = block.T

    hf.save(hf.build("GPT2", settings, change=marked), tmp_path)
    capture = hf.open_capture(tmp_path)
    for layer in range(2):
        weights = capture.weights(layer)
        assert torch.equal(weights.w_q, block.view(2, 2, 4))
        norms = [spectrum.w_q_spectral_norm for spectrum in layer_spectra(weights, 2)]
        assert norms == pytest.approx([3.0, 5.0], rel=1e-12)


def test_shared_keys_go_to_neighbouring_heads(hf: ModuleType, tmp_path: Path) -> None:
    hf.save(hf.build("Llama", hf.COMMON, change=zero_queries_and_keys), tmp_path)
    for record in record_of(hf, tmp_path)[1]:
        v = torch.tensor([1.0, 2.0])[:, None, None].expand(record.v.shape).contiguous()
        dual = dual_pass(replace(record, v=v), FA2, "fp64")
        assert dual.o_hp[:, -1, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_sequences_of_any_length(hf: ModuleType, plain: ModuleType, tmp_path: Path, tokens: int) -> None:
    twins = hf.make_twins(plain, "gemma3", tmp_path)
    ids, labels = hf.draw(tokens)
    records, loss = hf.run(twins.capture, ids, labels)
    window: Callable[[int], Any] = twins.twin.plan.window_of
    with strict_fp32():
        expected = twins.twin.loss(
            ids, labels, torch.arange(tokens), lambda layer: plain.visibility(tokens, window(layer))
        )
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert all(record.q.shape == (4, tokens, 16) for record in records)
