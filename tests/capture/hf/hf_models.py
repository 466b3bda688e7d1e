"""Tiny random models of each family, saved as directories, with their captures and their plain twins."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from bf16forensics.capture.activations import Activations, Fp32Activations
from bf16forensics.capture.hf.capture import HFCapture, hf_capture
from bf16forensics.capture.hf.model import load_hf_model
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.sequence import SequenceInput

LAYERS, WIDTH, VOCABULARY, POSITIONS = 2, 32, 64, 64
TOKENS = 12

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}
_DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
}
#: (class, settings, what the plain twin does) of each family.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": POSITIONS},
        {"family": "gpt2", "heads": 4, "kv_heads": 4, "size": 8, "scale": 8**-0.5},
    ),
    "llama": ("Llama", COMMON, {"heads": 4, "kv_heads": 2, "size": 8, "scale": 8**-0.5}),
    "mistral": (
        "Mistral",
        {**COMMON, "sliding_window": 5},
        {"heads": 4, "kv_heads": 2, "size": 8, "scale": 8**-0.5, "window_of": lambda layer: 5},
    ),
    "qwen2": ("Qwen2", COMMON, {"heads": 4, "kv_heads": 2, "size": 8, "scale": 8**-0.5}),
    "qwen3": (
        "Qwen3",
        {**COMMON, "head_dim": 16},
        {"family": "qwen3", "heads": 4, "kv_heads": 2, "size": 16, "scale": 16**-0.5},
    ),
    "gemma3": (
        "Gemma3",
        {
            **COMMON,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        {
            "family": "gemma3",
            "heads": 4,
            "kv_heads": 2,
            "size": 16,
            "scale": 20**-0.5,
            "window_of": lambda layer: 5 if layer == 0 else None,
            "theta_of": lambda layer: 10_000.0 if layer == 0 else 1_000_000.0,
            "softcap": 2.0,
            "final_softcap": 3.0,
        },
    ),
    "olmo2": (
        "Olmo2",
        COMMON,
        {"family": "olmo2", "heads": 4, "kv_heads": 2, "size": 8, "scale": 8**-0.5, "theta": 10_000.0, "eps": 1e-5},
    ),
    "deepseek": (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": 12},
        {"family": "deepseek", "heads": 4, "kv_heads": 4, "size": 10, "scale": 10**-0.5},
    ),
    "deepseek-direct": (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": None},
        {"family": "deepseek", "heads": 4, "kv_heads": 4, "size": 10, "scale": 10**-0.5},
    ),
}
_DEEPSEEK_PLAN = {"nope": 6, "rope": 4, "value": 5, "kv_rank": 10, "chosen": 2, "groups": 2, "kept_groups": 1}


def build(name: str, settings: dict[str, Any], seed: int = 0, change: Callable[[Any], None] | None = None) -> Any:
    """An instance of a class of transformers with random weights, norms and biases included."""
    import transformers

    text = "TextConfig" if name in ("Gemma3", "Gemma3n") else "Config"
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + head)(getattr(transformers, name + text)(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in key or key.endswith("embed_scale"):
                continue
            noise = torch.randn(value.shape, generator=generator) * 0.2
            value.copy_(value + noise if value.ndim == 1 else noise)
        if change is not None:
            change(model)
    return model


def save(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Writes a directory in a format; the model then holds the values of that format in FP32."""
    model.to(dtype).save_pretrained(path)
    return model.float()


def open_capture(path: Path, activations: Activations | None = None) -> HFCapture:
    """The capture of a directory; unrounded unless told otherwise."""
    return hf_capture(load_hf_model(path), activations or Fp32Activations(storage="fp32"))


def draw(tokens: int = TOKENS, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the targets that follow them."""
    both = torch.randint(0, VOCABULARY, (tokens + 1,), generator=torch.Generator().manual_seed(seed))
    return both[:-1].clone(), both[1:].clone()


def run(
    capture: HFCapture, ids: torch.Tensor, labels: torch.Tensor, **more: Any
) -> tuple[list[AttentionRecord], float]:
    """The records of one sequence, first layer first, and its loss."""
    losses: list[float] = []
    sequence = SequenceInput(index=0, step=7, ids=ids, labels=labels, **more)
    records = list(capture.sequence_records(sequence, losses.append))
    assert len(losses) == 1
    return records[::-1], losses[0]


@dataclass
class Twins:
    """A saved model, its capture, and its plain twin."""

    capture: HFCapture
    #: transformers' own instance, FP32.
    model: Any
    #: The plain twin, float64, with gradients.
    twin: Any
    #: Visibility of each layer over all tokens of `draw`.
    visible_of: Callable[[int], torch.Tensor] = field(repr=False)


def make_twins(plain: ModuleType, family: str, path: Path, **more: Any) -> Twins:
    """Builds, saves and opens a model of a family."""
    name, settings, does = FAMILIES[family]
    model = save(build(name, settings), path)
    does = {"family": "llama", **does}
    if does["family"] == "deepseek":
        does = {**does, **_DEEPSEEK_PLAN, "factor": settings["routed_scaling_factor"], "dense_layers": 1}
    plan = plain.Plan(**does)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= load_file(file)
    return Twins(
        capture=open_capture(path),
        model=model,
        twin=plain.PlainModel(plan=plan, weights=plain.float64(weights), layers=LAYERS, **more),
        visible_of=lambda layer: plain.visibility(TOKENS, plan.window_of(layer)),
    )
