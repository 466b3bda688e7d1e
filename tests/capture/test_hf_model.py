"""Hugging Face models: every family against `from_pretrained`, every key accounted for, every weight in its place."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bf16forensics.errors import InputError

transformers = pytest.importorskip("transformers")

from bf16forensics.capture.hf import library as library_module  # noqa: E402
from bf16forensics.capture.hf.library import ATTENTION_NAME  # noqa: E402
from bf16forensics.capture.hf.model import HFModel, load_hf_model  # noqa: E402

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3", "olmo2", "deepseek_v3")
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_key_value_heads": 4, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "first_k_dense_replace": 1,
}  # fmt: skip
DELETE = object()


def config_of(family: str) -> Any:
    if family == "gpt2":
        return transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=4, bos_token_id=0,
                                       eos_token_id=0)  # fmt: skip
    if family == "gemma3":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "image_size": 28, "patch_size": 14}  # fmt: skip
        return transformers.Gemma3Config(text_config={**SIZES, "head_dim": 8}, vision_config=vision)
    extra: dict[str, object] = EXPERTS if family == "deepseek_v3" else {}
    if family in ("qwen3", "gemma2", "gemma3_text"):
        extra = {"head_dim": 8}
    return transformers.AutoConfig.for_model(family, **{**SIZES, **extra})


def save(config: Any, folder: Path, dtype: torch.dtype, **options: object) -> None:
    torch.manual_seed(3)
    if isinstance(config, transformers.Gemma3Config):
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the initial weights: differences in the arithmetic must show.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory of a family, made once: BF16, in shards of 8 kB."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            save(config_of(family), folders[family], torch.bfloat16, max_shard_size="8KB")
        return folders[family]

    return folder


@pytest.fixture(scope="module")
def loaded(saved: Callable[[str], Path]) -> Callable[[str], HFModel]:
    """The model in a directory of `saved`, read once."""
    models: dict[str, HFModel] = {}

    def model(family: str) -> HFModel:
        if family not in models:
            models[family] = load_hf_model(saved(family))
        return models[family]

    return model


@pytest.fixture
def directory(saved: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a family's directory with changed keys in config.json (DELETE removes one)."""

    def make(family: str, **changes: object) -> Path:
        folder = tmp_path / family
        if not folder.exists():
            shutil.copytree(saved(family), folder)
        edit_config(folder, **changes)
        return folder

    return make


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not DELETE}
    (folder / "config.json").write_text(json.dumps(config))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def replace_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


@pytest.fixture
def refusal() -> Callable[..., str]:
    def check(folder: Path, **options: bool) -> str:
        with pytest.raises(InputError) as caught:
            load_hf_model(folder, **options)
        line = str(caught.value)
        assert "\n" not in line
        assert len(line) < 600
        return line

    return check


def run(model: HFModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the skeleton with the mapped weights in FP32, through transformers' own attention."""
    skeleton = model.skeleton()
    skeleton.load_state_dict({name: tensor.float() for name, tensor in model.weights.items()}, assign=True)
    skeleton.config._attn_implementation = "eager"
    with torch.no_grad():
        return skeleton(ids, use_cache=False).logits


def reference(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


IDS = torch.arange(10)[None] * 7 % 64


# --- every family as it is saved


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_of_from_pretrained(saved, loaded, family: str) -> None:
    model = loaded(family)
    assert torch.equal(run(model, IDS), reference(saved(family), IDS))
    assert model.family == ("gemma3_text" if family == "gemma3" else family)
    assert model.weight_dtype == "bf16"
    assert model.has_output_head
    assert (model.softcap, model.scale) == (None, None)
    assert [facts.role for facts in model.directory.files[:2]] == ["config", "index"]
    assert len(model.directory.files) > 3
    dropout = "dropout forced to 0 (config.json: attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1)"
    wrapper = "the text model (gemma3_text) of a gemma3 model is read; its other parts are not run"
    assert model.notes == {"gpt2": (dropout,), "gemma3": (wrapper,)}.get(family, ())
    parts = {name.split(".")[0] for name in model.unused_tensors}
    assert parts == ({"vision_tower", "multi_modal_projector"} if family == "gemma3" else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_holds_no_weights(loaded, family: str) -> None:
    model = loaded(family)
    skeleton = model.skeleton()
    assert {tensor.device.type for tensor in skeleton.state_dict().values()} == {"meta"}
    assert set(skeleton.state_dict()) == set(model.weights)
    assert not skeleton.training
    assert not any(parameter.requires_grad for parameter in skeleton.parameters())
    computed = {name: buffer for name, buffer in skeleton.named_buffers() if name not in skeleton.state_dict()}
    assert {(buffer.device.type, buffer.dtype) for buffer in computed.values()} <= {("cpu", torch.float32)}
    assert any("inv_freq" in name for name in computed) == (family != "gpt2")
    assert skeleton.config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation == ATTENTION_NAME


def test_rotary_frequencies_are_fp32(loaded) -> None:
    """1 / 10000^(2i/4) for a head of 4: 1 and 0.01."""
    buffers = dict(loaded("llama").skeleton().named_buffers())
    assert buffers["model.rotary_emb.inv_freq"].tolist() == torch.tensor([1.0, 0.01]).tolist()


def test_skeletons_share_nothing(loaded) -> None:
    model = loaded("llama")
    one, other = model.skeleton(), model.skeleton()
    next(one.buffers()).fill_(7.0)
    one.config.num_hidden_layers = 99
    assert not next(other.buffers()).eq(7.0).any()
    assert (other.config.num_hidden_layers, model.config.num_hidden_layers) == (2, 2)


def test_skeletons_of_many_threads(loaded) -> None:
    model = loaded("deepseek_v3")
    with ThreadPoolExecutor(8) as pool:
        skeletons = list(pool.map(lambda _: model.skeleton(), range(32)))
    assert len({id(skeleton.config) for skeleton in skeletons}) == 32
    assert {tuple(skeleton.state_dict()) for skeleton in skeletons} == {tuple(model.skeleton().state_dict())}


def test_tied_names_are_in_both(loaded) -> None:
    model = loaded("gpt2")
    skeleton = model.skeleton()
    assert model.weights["lm_head.weight"] is model.weights["transformer.wte.weight"]
    assert skeleton.lm_head.weight is skeleton.transformer.wte.weight


def test_weights_are_views_of_the_files(loaded) -> None:
    """Nothing is copied: the mapping hands out one and the same memory at every access."""
    model = loaded("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert model.weights[name].data_ptr() == model.directory.tensors[name].data_ptr()
    assert model.weights[name].dtype == torch.bfloat16


def test_merged_experts_are_not_kept(loaded) -> None:
    model = loaded("deepseek_v3")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    files = model.directory.tensors
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        pair = torch.cat([files[prefix + "gate_proj.weight"], files[prefix + "up_proj.weight"]])
        assert torch.equal(model.weights[name][expert], pair)
    assert len(model.weights) == len(list(model.weights))
    assert name in model.weights
    assert "model.layers.1.mlp.experts.0.up_proj.weight" not in model.weights


# --- geometry and scale (head sizes, Conv1D, scalars)


def test_head_size_is_not_width_over_heads(tmp_path: Path, refusal) -> None:
    """Two heads of 8 at width 8; rows 0, 5, 8 and 12 of q_proj tell the two heads apart: norms 4 and 24."""
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
                                         "head_dim": 8, "num_hidden_layers": 1})  # fmt: skip
    save(config, tmp_path, torch.float32)
    tensors = stored(tmp_path)
    q = torch.zeros(16, 8)
    for (row, column), value in {(0, 0): 3, (5, 1): 4, (8, 2): 7, (12, 3): 24}.items():
        q[row, column] = value
    replace_weights(tmp_path, {**tensors, "model.layers.0.self_attn.q_proj.weight": q})
    model = load_hf_model(tmp_path)
    heads = model.weights["model.layers.0.self_attn.q_proj.weight"].reshape(2, -1, 8)
    # FP32 singular values: a few units in the last place.
    assert torch.linalg.matrix_norm(heads, 2).tolist() == pytest.approx([4.0, 24.0], rel=1e-6)
    assert model.skeleton().model.layers[0].self_attn.scaling == 8**-0.5
    edit_config(tmp_path, head_dim=None)
    line = refusal(tmp_path)
    assert line.endswith(
        "model.layers.0.self_attn.q_proj.weight has shape [16, 8]; config.json (num_attention_heads 2, head_dim 4) "
        "needs [8, 8]"
    )


def test_conv1d_orientation(tmp_path: Path, refusal) -> None:
    """GPT-2 stores [in, out]: the columns of the Q block are the rows of W_Q; norms 3 and 5, not 5 and 3."""
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=2, bos_token_id=0,
                                     eos_token_id=0)  # fmt: skip
    save(config, tmp_path, torch.float32)
    w_q = torch.tensor([[0, 0, 0, 3], [1, 0, 0, 0], [0, 5, 0, 0], [0, 0, 2, 0]]).float()
    stacked = torch.cat([w_q, torch.zeros(8, 4)])
    name = "transformer.h.0.attn.c_attn.weight"
    tensors = stored(tmp_path)
    replace_weights(tmp_path, {**tensors, name: stacked.T})
    heads = load_hf_model(tmp_path).weights[name][:, :4].T.reshape(2, 2, 4)
    assert torch.linalg.matrix_norm(heads, 2).tolist() == pytest.approx([3.0, 5.0], rel=1e-6)
    replace_weights(tmp_path, {**tensors, name: stacked})
    line = refusal(tmp_path)
    assert "has shape [12, 4] (transposed?)" in line
    assert "(n_embd 4) needs [4, 12]" in line


@pytest.mark.parametrize(
    ("key", "value", "scale"),
    [
        ("query_pre_attn_scalar", 144, 1 / 12),
        ("query_pre_attn_scalar", 5.5, 5.5**-0.5),
        ("attention_multiplier", 0.0833333, 0.0833333),
    ],
)
def test_a_scale_that_the_class_ignores_is_applied(directory, key: str, value: float, scale: float) -> None:
    model = load_hf_model(directory("llama", **{key: value}))
    assert model.scale == pytest.approx(scale, rel=1e-15)
    assert f"{key} {value}" in model.notes[0]
    assert "applied here" in model.notes[0]


def test_a_scale_that_is_the_own_one_of_the_class_is_silent(directory) -> None:
    model = load_hf_model(directory("llama", query_pre_attn_scalar=4, attention_multiplier=0.5))
    assert (model.scale, model.notes) == (None, ())


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_scale_that_the_class_applies_is_its_own(directory, family: str) -> None:
    model = load_hf_model(directory(family, query_pre_attn_scalar=144.0))
    assert (model.scale, model.notes) == (None, ())
    assert model.skeleton().model.layers[0].self_attn.scaling == 1 / 12


def test_two_scales_that_disagree(directory, refusal) -> None:
    assert "query_pre_attn_scalar and attention_multiplier" in refusal(
        directory("llama", query_pre_attn_scalar=144, attention_multiplier=0.3)
    )
    assert "different softmax scales" in refusal(directory("gemma2", attention_multiplier=0.3))


def test_one_scale_for_layers_that_have_their_own(directory, refusal) -> None:
    folder = directory("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert load_hf_model(folder).scale is None
    edit_config(folder, query_pre_attn_scalar=9)
    assert "one for each layer" in refusal(folder)


# --- soft-caps


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("value", [30.0, 50])
def test_a_softcap_that_the_class_ignores_is_applied(directory, family: str, value: float) -> None:
    """Gemma-3's class reads the key and stores it, and does nothing with it."""
    model = load_hf_model(directory(family, attn_logit_softcapping=value))
    assert model.softcap == value
    assert any(f"attn_logit_softcapping {value:g}: the {family} class" in note for note in model.notes)


def test_a_softcap_in_the_text_part_of_a_wrapper(directory) -> None:
    folder = directory("gemma3")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    model = load_hf_model(directory("gemma3", text_config={**text, "attn_logit_softcapping": 40.0}))
    assert model.softcap == 40.0


@pytest.mark.parametrize("value", [50.0, 7.5, None, DELETE])
def test_a_softcap_that_the_class_applies_is_its_own(directory, value: object) -> None:
    model = load_hf_model(directory("gemma2", attn_logit_softcapping=value))
    assert (model.softcap, model.notes) == (None, ())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("value", [0.0, -50.0, math.inf, math.nan])
def test_impossible_softcaps(directory, refusal, family: str, value: float) -> None:
    assert "attn_logit_softcapping must be a positive finite number" in refusal(
        directory(family, attn_logit_softcapping=value)
    )


# --- keys


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "sliding_window", 16),
        ("llama", "layer_types", ["sliding_attention", "full_attention"]),
        ("llama", "attention_chunk_size", 8),
        ("llama", "clip_qkv", 8.0),
        ("llama", "alibi", True),
        ("llama", "use_qk_norm", True),
        ("llama", "residual_multiplier", 0.22),
        ("llama", "embedding_multiplier", 12.0),
        ("llama", "logits_scaling", 8.0),
        ("llama", "logit_scale", 0.0625),
        ("llama", "attention_sink_size", 4),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_interleaved", True),
        ("llama", "no_rope_layers", [0, 1]),
        ("llama", "use_parallel_residual", True),
        ("llama", "use_rope", False),
        ("llama", "pruned_heads", {"0": [1]}),
        ("gpt2", "rope_theta", 10000.0),
        ("gpt2", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("gpt2", "head_dim", 8),
        ("gpt2", "num_key_value_heads", 2),
        ("gpt2", "scale_attention", 0.5),
        ("mistral", "layer_types", ["sliding_attention", "full_attention"]),
        ("olmo2", "clip_qkv", 8.0),
        ("deepseek_v3", "sliding_window", 8),
    ],
)
def test_numerics_that_the_class_ignores_are_refused(directory, refusal, family: str, key: str, value: object) -> None:
    line = refusal(directory(family, **{key: value}))
    assert f"{key} " in line
    assert f"the {family} class of transformers does not apply" in line


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"final_logit_softcapping": None, "clip_qkv": None, "alibi": False, "use_qk_norm": False}),
        ("llama", {"residual_multiplier": 1.0, "embedding_multiplier": 1, "partial_rotary_factor": 1.0}),
        ("llama", {"sliding_window": 64, "attention_chunk_size": 100, "layer_types": ["full_attention"] * 2}),
        ("llama", {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 28}),
        ("llama", {"use_rope": True, "is_causal": True, "position_embedding_type": "rope", "pruned_heads": {}}),
        ("gpt2", {"head_dim": 4, "num_key_value_heads": 4, "num_attention_heads": 4, "rope_scaling": None}),
        ("qwen3", {"use_qk_norm": True}),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1, "layer_types": DELETE}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": DELETE}),
        ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": DELETE, "_sliding_window_pattern": DELETE}),
        ("gemma3_text", {"rope_parameters": DELETE, "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ("llama", {"rope_parameters": DELETE, "rope_theta": 500000.0, "rope_scaling": None}),
        ("llama", {"temperature": 0.6, "top_p": 0.9, "task_specific_params": {}, "torch_dtype": "bfloat16"}),
    ],
)
def test_neutral_values_and_derived_keys_are_silent(directory, family: str, changes: dict[str, object]) -> None:
    notes = load_hf_model(directory(family, **changes)).notes
    assert [note for note in notes if "dropout" not in note] == []


def test_derived_keys_are_in_force(directory) -> None:
    """What is silent because the configuration class turns it into something else must have been turned."""
    changes = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": DELETE}
    assert load_hf_model(directory("qwen2", **changes)).config.layer_types == ["full_attention", "sliding_attention"]
    changes = {"sliding_window_pattern": 2, "layer_types": DELETE, "_sliding_window_pattern": DELETE}
    assert load_hf_model(directory("gemma3_text", **changes)).config.layer_types == [
        "sliding_attention", "full_attention"]  # fmt: skip
    folder = directory("llama", rope_parameters=DELETE, rope_theta=100.0)
    frequencies = dict(load_hf_model(folder).skeleton().named_buffers())["model.rotary_emb.inv_freq"]
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))


def test_unknown_keys_are_listed_once(directory) -> None:
    notes = load_hf_model(directory("llama", made_up=3, other="x", nothing=None)).notes
    assert notes == ('keys of config.json that nothing here applies: made_up 3, other "x"',)


def test_unknown_keys_around_a_text_model(directory, refusal) -> None:
    folder = directory("gemma3", made_up=3, mm_tokens_per_image=16)
    assert load_hf_model(folder).notes[1] == "keys of config.json that nothing here applies: made_up 3"
    edit_config(folder, attention_sink_size=4)
    assert "attention_sink_size 4" in refusal(folder)


def test_one_setting_under_two_names(directory, refusal) -> None:
    assert "num_attention_heads 2 and n_head 4" in refusal(directory("gpt2", num_attention_heads=2))
    assert "torch_dtype" in refusal(directory("llama", torch_dtype="float16"))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "made_up", "factor": 2.0}, '"made_up" is not known'),
        ({"type": "mrope", "mrope_section": [1, 1]}, '"mrope" is not known'),
        ({"rope_type": "linear", "factor": 2.0, "secret": 3}, "rope_scaling.secret 3"),
        ({"rope_type": "default", "factor": 4.0}, "rope_scaling.factor 4.0"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "contradict"),
        ("linear", "refuses"),
        ({"rope_type": "linear"}, "factor"),
    ],
)
def test_rotary_parameters_that_nothing_applies(directory, refusal, scaling: object, expected: str) -> None:
    assert expected in refusal(directory("llama", rope_parameters=DELETE, rope_scaling=scaling))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0], "factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "default", "factor": 1.0},
    ],
)  # fmt: skip
def test_rotary_parameters_that_the_class_applies(directory, scaling: object) -> None:
    folder = directory("llama", rope_parameters=DELETE, rope_theta=10000.0, rope_scaling=scaling)
    model = load_hf_model(folder)
    assert model.notes == ()
    assert torch.equal(run(model, IDS), reference(folder, IDS))


def test_values_that_the_configuration_class_refuses(directory, refusal) -> None:
    assert "LlamaConfig refuses it" in refusal(directory("llama", hidden_size="big"))
    assert "config.json" in refusal(directory("llama", hidden_act="made_up"))


def test_flags_about_precision_are_noted(directory) -> None:
    notes = load_hf_model(directory("gpt2", reorder_and_upcast_attn=True)).notes
    assert any("reorder_and_upcast_attn" in note for note in notes)


# --- families and code


def test_unknown_families(directory, refusal) -> None:
    folder = directory("llama", model_type="made_up")
    line = refusal(folder)
    assert "'made_up' is not known to transformers" in line
    assert "gpt2, llama, mistral, qwen2, qwen3, gemma2, gemma3, gemma3_text, olmo2, deepseek_v3" in line
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    assert "never executed" in refusal(folder)


def test_custom_code_of_a_known_family_does_not_run(directory, tmp_path: Path) -> None:
    folder = directory("llama", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    model = load_hf_model(folder)
    assert "was not executed" in model.notes[0]
    assert not marker.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_named_in_config_are_not_fetched(directory, key: str) -> None:
    model = load_hf_model(directory("deepseek_v3", **{key: "someone/kernel"}))
    assert model.config._attn_implementation == ATTENTION_NAME
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("family", ["bert", "roberta", "vit", "whisper", "bloom"])
def test_families_that_cannot_be_read(directory, refusal, family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "n_head": 2}
    folder = directory("llama")
    (folder / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    line = refusal(folder)
    assert ("both directions" in line) == (family in ("bert", "roberta"))
    assert ("no causal language model" in line) == (family in ("vit", "whisper"))
    assert ("attention interface" in line) == (family == "bloom")


def test_an_untested_family_is_noted(tmp_path: Path) -> None:
    save(transformers.AutoConfig.for_model("starcoder2", **SIZES), tmp_path, torch.float32)
    model = load_hf_model(tmp_path)
    assert "family starcoder2 is not among the tested ones" in model.notes
    assert torch.equal(run(model, IDS), reference(tmp_path, IDS))


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(library_module.importlib, "import_module", missing)
    assert refusal(tmp_path) == "Hugging Face directories need transformers; install bf16forensics[hf]"


def test_with_an_old_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal) -> None:
    # Not the module imported above: transformers replaces itself in sys.modules while it loads lazily.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    assert "5.0 or newer" in refusal(tmp_path)


# --- names and shapes


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "deepseek_v3"])
def test_a_missing_weight_is_named(directory, refusal, family: str) -> None:
    folder = directory(family)
    tensors = stored(folder)
    gone = next(name for name in tensors if "layers.1" in name or "h.1." in name)
    del tensors[gone]
    replace_weights(folder, tensors)
    line = refusal(folder)
    assert gone.removeprefix("language_model.") in line
    assert "incomplete download" in line


def test_many_missing_weights_are_counted(directory, refusal) -> None:
    folder = directory("llama")
    replace_weights(folder, {n: t for n, t in stored(folder).items() if ".layers.1." not in n})
    assert "9 of the weights missing: model.layers.1." in refusal(folder)
    replace_weights(folder, {f"foreign.{n}": t for n, t in stored(folder).items()})
    line = refusal(folder)
    assert "found instead foreign." in line


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_training_wrappers_are_stripped(directory, loaded, wrapper: str) -> None:
    folder = directory("llama")
    clean = run(loaded("llama"), IDS)
    replace_weights(folder, {wrapper + name: tensor for name, tensor in stored(folder).items()})
    assert torch.equal(run(load_hf_model(folder), IDS), clean)


def test_one_weight_under_two_names(directory, refusal) -> None:
    folder = directory("llama")
    tensors = stored(folder)
    name = "model.norm.weight"
    replace_weights(folder, {**tensors, "_orig_mod." + name: tensors[name]})
    assert "hold the same values" in load_hf_model(folder).notes[0]
    replace_weights(folder, {**tensors, "norm.weight": tensors[name]})
    assert "hold the same values" in load_hf_model(folder).notes[0]
    replace_weights(folder, {**tensors, "norm.weight": tensors[name] + 1})
    line = refusal(folder)
    assert "'model.norm.weight' and 'norm.weight' are both model.norm.weight" in line


def test_gpt2_names_without_a_prefix_and_with_mask_buffers(directory, loaded) -> None:
    """The names of the first published GPT-2 files, their masks included (bytes, and a fill value)."""
    folder = directory("gpt2")
    clean = run(loaded("gpt2"), IDS)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored(folder).items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    replace_weights(folder, tensors)
    model = load_hf_model(folder)
    assert torch.equal(run(model, IDS), clean)
    assert model.unused_tensors == ()
    replace_weights(folder, {**tensors, "h.1.attn.bias": torch.ones(48)})
    model = load_hf_model(folder)
    assert model.unused_tensors == ("h.1.attn.bias",)
    assert any("1 attention tensors of the files are not applied: h.1.attn.bias" in note for note in model.notes)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.model.model."])
def test_names_of_a_wrapped_text_model(directory, loaded, prefix: str) -> None:
    """Today's layout, that of the first Gemma-3 files, and one that some versions of transformers wrote."""
    folder = directory("gemma3")
    clean = run(loaded("gemma3"), IDS)
    replace_weights(folder, {name.replace("language_model.model.", prefix): t for name, t in stored(folder).items()})
    assert torch.equal(run(load_hf_model(folder), IDS), clean)


def test_names_of_another_wrapper_are_not_guessed(directory, refusal) -> None:
    folder = directory("gemma3")
    replace_weights(folder, {name.replace("language_model.", "talker."): t for name, t in stored(folder).items()})
    assert "weights missing" in refusal(folder)


@pytest.mark.parametrize(("change", "noted"), [(1.0, False), (1.25, True)])
def test_stored_rotary_frequencies(directory, change: float, noted: bool) -> None:
    folder = directory("llama")
    tensors = stored(folder)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.tensor([1.0, 0.01]).half() * change
    replace_weights(folder, tensors)
    model = load_hf_model(folder)
    assert model.unused_tensors == ()
    assert bool(model.notes) == noted
    assert not noted or "stored rotary frequencies" in model.notes[0]


@pytest.mark.parametrize(
    ("family", "name", "shape", "expected"),
    [
        ("llama", "layers.1.self_attn.k_proj.weight", (16, 16), "(num_key_value_heads 2, head_dim 4) needs [8, 16]"),
        ("llama", "embed_tokens.weight", (60, 16), "(vocab_size 64, hidden_size 16) needs [64, 16]"),
        ("llama", "layers.0.mlp.up_proj.weight", (16, 32), "(hidden_size 16, intermediate_size 32) needs [32, 16]"),
        ("llama", "norm.weight", (1, 16), "(hidden_size 16) needs [16]"),
        ("gpt2", "wpe.weight", (16, 16), "(n_positions 32, n_embd 16) needs [32, 16]"),
        ("qwen3", "layers.0.self_attn.q_norm.weight", (4,), "(num_attention_heads 4, head_dim 8) needs [8]"),
    ],
)
def test_another_shape(directory, refusal, family: str, name: str, shape: tuple[int, ...], expected: str) -> None:
    folder = directory(family)
    name = ("transformer." if family == "gpt2" else "model.") + name
    replace_weights(folder, {**stored(folder), name: torch.zeros(shape)})
    line = refusal(folder)
    assert f"{name} has shape {list(shape)}" in line
    assert ("transposed?" in line) == (shape == (16, 32))
    assert line.endswith(expected)


@pytest.mark.parametrize(("family", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_more_or_fewer_layers_than_config_says(directory, refusal, family: str, key: str) -> None:
    line = refusal(directory(family, **{key: 1}))
    assert f"{key} is 1 but the files hold layer 1" in line
    assert "weights missing" in refusal(directory(family, **{key: 3}))
    for value in (10**9, 0):
        assert f"{key} is {value} but the files hold" in refusal(directory(family, **{key: value}))


def test_layers_that_predict_further_tokens_are_left_out(directory, loaded) -> None:
    """DeepSeek-V3 has one more layer in its files than in num_hidden_layers; its tensors are listed."""
    folder = directory("deepseek_v3", num_nextn_predict_layers=1)
    extra = {"model.layers.2.self_attn.o_proj.weight": torch.ones(2), "model.layers.2.eh_proj.weight": torch.ones(2)}
    replace_weights(folder, {**stored(folder), **extra})
    model = load_hf_model(folder)
    assert set(model.unused_tensors) == set(extra)
    assert "1 attention tensors of the files are not applied" in model.notes[0]
    assert torch.equal(run(model, IDS), run(loaded("deepseek_v3"), IDS))


def test_experts_that_do_not_fit(directory, refusal) -> None:
    folder = directory("deepseek_v3")
    tensors = stored(folder)
    prefix = "model.layers.1.mlp.experts."
    replace_weights(folder, {**tensors, prefix + "2.up_proj.weight": torch.zeros(7, 16)})
    assert "experts.gate_up_proj cannot be made" in refusal(folder)
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix + "3.")}
    replace_weights(folder, rest)
    line = refusal(folder)
    assert "has shape [3, " in line
    assert "n_routed_experts 4" in line
    # Four of them again, but not the first four.
    shifted = {name.replace("experts.1.", "experts.4."): tensor for name, tensor in tensors.items()}
    replace_weights(folder, shifted)
    assert "missing model.layers.1.mlp.experts.1." in refusal(folder)


def test_ten_and_more_experts_keep_their_order(tmp_path: Path) -> None:
    save(transformers.DeepseekV3Config(**{**SIZES, **EXPERTS, "n_routed_experts": 12}), tmp_path, torch.float32)
    model = load_hf_model(tmp_path)
    merged = model.weights["model.layers.1.mlp.experts.down_proj"]
    for expert in range(12):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        assert torch.equal(merged[expert], model.directory.tensors[name])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_real_numbers(directory, refusal, dtype: torch.dtype) -> None:
    folder = directory("llama")
    replace_weights(folder, {**stored(folder), "model.norm.weight": torch.ones(16, dtype=dtype)})
    assert f"model.norm.weight has dtype {str(dtype).removeprefix('torch.')}" in refusal(folder)


def test_quantised_directories(directory, refusal) -> None:
    folder = directory("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq weights" in refusal(folder)
    edit_config(folder, quantization_config=DELETE)
    name = "model.layers.0.self_attn.q_proj.qweight"
    replace_weights(folder, {**stored(folder), name: torch.zeros(2, 2, dtype=torch.int32)})
    assert f"'{name}'" in refusal(folder)


def test_formats_are_reported_as_stored(directory) -> None:
    folder = directory("llama")
    tensors = {name: t.float() if "norm" in name else t for name, t in stored(folder).items()}
    replace_weights(folder, tensors)
    assert load_hf_model(folder).weight_dtype == "bf16+fp32"
    replace_weights(folder, {**tensors, "model.norm.weight": torch.ones(16, dtype=torch.float64)})
    model = load_hf_model(folder)
    assert model.weight_dtype == "bf16+fp32+fp64"
    assert "FP64 weights are rounded to FP32" in model.notes


def test_non_finite_weights_are_kept(directory) -> None:
    folder = directory("llama")
    weight = torch.tensor([float("nan"), float("inf")] + [1.0] * 14)
    replace_weights(folder, {**stored(folder), "model.norm.weight": weight})
    kept = load_hf_model(folder).weights["model.norm.weight"]
    assert kept.isnan().sum() == 1
    assert kept.isinf().sum() == 1


def test_torch_files(directory, loaded, refusal) -> None:
    folder = directory("llama")
    clean = run(loaded("llama"), IDS)
    tensors = stored(folder)
    replace_weights(folder, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "--allow-bin" in refusal(folder)
    assert torch.equal(run(load_hf_model(folder, allow_bin=True), IDS), clean)


# --- tied weights and the output head


@pytest.mark.parametrize(
    ("family", "embedding"), [("gpt2", "transformer.wte.weight"), ("gemma2", "model.embed_tokens.weight")]
)
def test_tied(directory, loaded, family: str, embedding: str) -> None:
    head = "lm_head.weight"
    folder = directory(family)
    tensors = stored(folder)
    assert head not in tensors
    clean = run(loaded(family), IDS)
    replace_weights(folder, {**tensors, head: tensors[embedding]})
    both = load_hf_model(folder)
    assert torch.equal(run(both, IDS), clean)
    assert [note for note in both.notes if "dropout" not in note] == []
    other = tensors[embedding].flip(0)
    replace_weights(folder, {**tensors, head: other})
    model = load_hf_model(folder)
    assert sum("differ: each is used as stored" in note for note in model.notes) == 1
    assert model.has_output_head
    assert torch.equal(model.weights[head], other)
    assert torch.equal(model.weights[embedding], tensors[embedding])
    skeleton = model.skeleton()
    assert skeleton.get_output_embeddings().weight is not skeleton.get_input_embeddings().weight
    assert torch.equal(run(model, IDS), reference(folder, IDS))
    assert not torch.equal(run(model, IDS), clean)
    only_head = {name: tensor for name, tensor in tensors.items() if name != embedding}
    replace_weights(folder, {**only_head, head: tensors[embedding]})
    swapped = load_hf_model(folder)
    assert torch.equal(run(swapped, IDS), clean)
    assert any(f"{embedding} is not in the files: the tied {head} is used" in note for note in swapped.notes)


def test_untied_without_an_output_head(directory) -> None:
    folder = directory("llama", tie_word_embeddings=False)
    replace_weights(folder, {name: t for name, t in stored(folder).items() if name != "lm_head.weight"})
    model = load_hf_model(folder)
    assert not model.has_output_head
    assert "lm_head.weight" not in model.weights
    assert "no output head" in model.notes[0]
    edit_config(folder, tie_word_embeddings=True)
    tied = load_hf_model(folder)
    assert tied.has_output_head
    assert tied.notes == ()
    assert torch.equal(tied.weights["lm_head.weight"], tied.weights["model.embed_tokens.weight"])


def test_without_an_output_head_other_weights_are_still_needed(directory, refusal) -> None:
    folder = directory("llama")
    gone = {"lm_head.weight", "model.norm.weight"}
    replace_weights(folder, {name: t for name, t in stored(folder).items() if name not in gone})
    assert "1 of the weights missing: model.norm.weight" in refusal(folder)
