"""What a config.json may not say by itself, and tensors that are not weights."""

import math

import pytest
import torch

from bf16forensics.load.hf_config import check_config, check_tensors, custom_code

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq weights"),
        ({"quant_method": "awq"}, "awq weights"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8 weights"),
        ({"quant_method": "mxfp4"}, "mxfp4 weights"),
        ({"load_in_4bit": True}, "bitsandbytes weights"),
        ({"bits": 4}, "quantised weights"),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_quantised_weights_are_named(refusal, method: dict[str, object], expected: str, inner: bool) -> None:
    part = {"quantization_config": method}
    config = {**LLAMA, "text_config": part} if inner else {**LLAMA, **part}
    line = refusal(check_config, config, "config.json")
    assert expected in line
    assert ("text_config.quantization_config" if inner else "(quantization_config)") in line


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_quantisation(nothing: object) -> None:
    check_config({**LLAMA, "quantization_config": nothing}, "config.json")


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "LlamaForCausalLM", "LlamaModel", "Gemma3ForConditionalGeneration"],
)
def test_architectures_that_may_be_read(name: str) -> None:
    check_config({**LLAMA, "architectures": [name]}, "config.json")


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForSequenceClassification", "ViTForImageClassification"])
def test_architectures_for_other_tasks(refusal, name: str) -> None:
    assert name in refusal(check_config, {**LLAMA, "architectures": [name]}, "config.json")


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", {}])
def test_architectures_that_say_nothing(architectures: object) -> None:
    check_config({**LLAMA, "architectures": architectures}, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_encoder_decoder", True),
        ("is_causal", False),
        ("use_bidirectional_attention", True),
        ("use_bidirectional_attention", "all"),
        ("per_layer_config", {"0": {"head_dim": 8}}),
    ],
)
def test_models_of_another_kind(refusal, key: str, value: object) -> None:
    assert key in refusal(check_config, {**LLAMA, key: value}, "config.json")
    assert "text_config." in refusal(check_config, {**LLAMA, "text_config": {key: value}}, "config.json")


@pytest.mark.parametrize("key", ["is_encoder_decoder", "use_bidirectional_attention", "per_layer_config"])
@pytest.mark.parametrize("value", [False, None])
def test_models_of_this_kind(key: str, value: object) -> None:
    check_config({**LLAMA, key: value, "is_causal": True}, "config.json")


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"])
@pytest.mark.parametrize("value", [0.0, -0.0, 0, -50.0, math.inf, -math.inf, math.nan, True, False, "50", [50.0]])
def test_impossible_numbers(refusal, key: str, value: object) -> None:
    assert f"{key} must be a positive finite number" in refusal(check_config, {**LLAMA, key: value}, "config.json")


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"])
@pytest.mark.parametrize("value", [None, 50, 50.0, 5e-324, 1e308])
def test_possible_numbers(key: str, value: object) -> None:
    check_config({**LLAMA, key: value}, "config.json")


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]
)
def test_quantised_dtypes_are_refused(refusal, dtype: torch.dtype) -> None:
    line = refusal(check_tensors, {"a": torch.ones(2), "q.weight": torch.zeros(2, dtype=dtype)}, "folder")
    assert "'q.weight'" in line
    assert str(dtype).removeprefix("torch.") in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_other_dtypes_pass(dtype: torch.dtype) -> None:
    check_tensors({"q.weight": torch.zeros(2, dtype=dtype)}, "folder")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.0.self_attn.q_proj.qzeros",
        "model.layers.0.self_attn.q_proj.scales",
        "model.layers.0.self_attn.q_proj.g_idx",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.self_attn.q_proj.weight.absmax",
        "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4",
        "model.layers.0.self_attn.q_proj.weight_packed",
        "model.layers.0.self_attn.q_proj.SCB",
    ],
)
def test_companions_of_quantised_weights(refusal, name: str) -> None:
    assert f"'{name}'" in refusal(check_tensors, {"a": torch.ones(2), name: torch.ones(2)}, "folder")


@pytest.mark.parametrize(
    "name", ["h.0.attn.bias", "transformer.h.0.attn.masked_bias", "gpt_neox.layers.0.attention.bias"]
)
def test_mask_buffers_may_hold_bytes(refusal, name: str) -> None:
    check_tensors({name: torch.ones(1, 1, 4, 4, dtype=torch.uint8).tril()}, "folder")
    assert "'h.0.mlp.bias'" in refusal(check_tensors, {"h.0.mlp.bias": torch.ones(4, dtype=torch.uint8)}, "folder")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.upscales.weight", "a.scales.weight", "layer_scale"])
def test_ordinary_names_pass(name: str) -> None:
    check_tensors({name: torch.ones(2)}, "folder")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number; got NaN"),
        ({"rope_theta": math.inf}, "rope_theta must be"),
        ({"rope_scaling": {"factor": -math.inf}}, "rope_scaling.factor must be"),
        ({"rope_scaling": {"long_factor": [1.0, math.nan]}}, "rope_scaling.long_factor.1 must be"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"sliding_window": -1}, "sliding_window must be a positive integer"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"text_config": {"n_positions": -5}}, "text_config.n_positions must be"),
    ],
)
def test_numbers_that_make_no_model(refusal, config: dict[str, object], expected: str) -> None:
    assert expected in refusal(check_config, {**LLAMA, **config}, "config.json")


@pytest.mark.parametrize("config", [{"sliding_window": 1}, {"sliding_window": None}, {"sliding_window": False},
                                    {"time_step_limit": [0.0, math.inf]}])  # fmt: skip
def test_numbers_that_do(config: dict[str, object]) -> None:
    check_config({**LLAMA, **config}, "config.json")


def test_custom_code() -> None:
    assert not custom_code(LLAMA)
    assert not custom_code({**LLAMA, "auto_map": {}})
    assert custom_code({**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    assert custom_code({**LLAMA, "text_config": {"auto_map": {"AutoConfig": "x.X"}}})
