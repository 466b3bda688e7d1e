"""What a config.json and the tensors beside it may not be: quantised, an encoder, another task, impossible numbers."""

import math
import re
from collections.abc import Mapping

import torch

from bf16forensics.errors import InputError
from bf16forensics.load.hf_json import shown

#: Families whose numbers are tested against `from_pretrained`, by model_type.
TESTED_FAMILIES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "olmo2", "deepseek_v3",
)  # fmt: skip
#: Key of the attention soft-cap: scores become cap * tanh(scores / cap).
SOFTCAP_KEY = "attn_logit_softcapping"
#: Keys of the softmax scale, with the scale as a function of their value.
SCALE_KEYS = {"query_pre_attn_scalar": lambda value: value**-0.5, "attention_multiplier": lambda value: value}
#: Counts that must be positive where they are given.
_COUNTS = ("max_position_embeddings", "n_positions", "sliding_window")
#: Limits of state-space layers, which may be infinite.
_MAY_BE_INFINITE = "time_step"
_CAUSAL = ("ForCausalLM", "LMHeadModel", "Model", "ForConditionalGeneration")
_QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")
#: Last components of the tensors that accompany quantised weights.
_COMPANIONS = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format|"
    r"weight_packed|weight_shape|weight_scale|weight_zero_point|input_scale|output_scale|weight_scale_inv|"
    r"[a-z_]*_scale_inv|[a-z_]*_blocks|[a-z_]*proj_scales)$|\.quant_state\."
)
_QUANTISED = frozenset({torch.int8, torch.uint8, torch.qint8, torch.quint8, torch.qint32})
#: Buffers of old checkpoints that hold a causal mask (bytes, in GPT-2's) or its fill value.
MASK_BUFFER = re.compile(r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias|causal_mask|mask|tril)$")


def check_config(config: Mapping[str, object], where: str) -> None:
    """Refuses what config.json says by itself, without knowing the class of the model. Wrapped text models included.

    Args:
        config: config.json.
        where: its path.

    Raises:
        InputError: quantised weights, an encoder-decoder, an architecture that is no causal language model, a
            soft-cap or softmax scale that is not a positive finite number, or NaN or an infinity anywhere.
    """
    for label, part in _parts(config):
        for key in _QUANTISATION_KEYS:
            method = part.get(key)
            if method is not None and method != {} and method is not False:
                raise InputError(f"{where}: {_method(method)} weights ({label}{key}) are quantised; give the directory "
                                 "of the BF16, FP16 or FP32 weights")  # fmt: skip
        if part.get("is_causal") is False or part.get("use_bidirectional_attention") in (True, "all"):
            raise InputError(f"{where}: {label}is_causal or use_bidirectional_attention says that tokens attend in "
                             "both directions; give a causal language model")  # fmt: skip
        if part.get("is_encoder_decoder") is True:
            raise InputError(f"{where}: {label}is_encoder_decoder is true; give a decoder-only language model")
        _positive(part, SOFTCAP_KEY, label, where, "null means none")
        for key in SCALE_KEYS:
            _positive(part, key, label, where, "leave it out for the default scale")
        for key in _COUNTS:
            count = part.get(key)
            if isinstance(count, int) and not isinstance(count, bool) and count < 1:
                raise InputError(f"{where}: {label}{key} must be a positive integer; got {count}")
        if part.get("per_layer_config"):
            raise InputError(f"{where}: {label}per_layer_config makes layers differ; such models are not supported")
    _refuse_non_finite(config, "", where)
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if names and not any(name.endswith(_CAUSAL) for name in names):
        raise InputError(f"{where}: architectures says {names[0]}, not a causal language model; "
                         "give one (…ForCausalLM or …LMHeadModel)")  # fmt: skip


def check_tensors(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuses quantised tensors and the tensors that accompany them, by name. Causal-mask buffers may hold bytes.

    Args:
        tensors: by checkpoint name.
        where: the directory.

    Raises:
        InputError: the first such tensor.
    """
    for name, tensor in tensors.items():
        if _COMPANIONS.search(name):
            raise InputError(f"{where}: '{name}' accompanies quantised weights; give the BF16, FP16 or FP32 weights")
        low = tensor.dtype in _QUANTISED or (tensor.is_floating_point() and tensor.element_size() < 2)
        if low and not MASK_BUFFER.search(name):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{where}: '{name}' has dtype {kind}; weights must be BF16, FP16 or FP32: "
                             "dequantise first")  # fmt: skip


def custom_code(config: Mapping[str, object]) -> bool:
    """True when config.json asks for Python files of its own (auto_map), which are never executed."""
    return any(part.get("auto_map") for _, part in _parts(config))


def _parts(config: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    """config.json itself and the configuration of each model inside it, with the label to put before a key."""
    inner = [(f"{key}.", value) for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
    return [("", config), *((label, part) for label, part in inner if label[:-1] not in _QUANTISATION_KEYS)]


def _refuse_non_finite(value: object, name: str, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value) and _MAY_BE_INFINITE not in name:
        raise InputError(f"{where}: {name} must be a finite number; got {shown(value)}")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_non_finite(item, f"{name}.{key}" if name else str(key), where)


def _method(value: object) -> str:
    if isinstance(value, dict):
        for key in ("quant_method", "quant_type", "format"):
            if isinstance(value.get(key), str):
                return str(value[key])[:40]
        if value.get("load_in_4bit") or value.get("load_in_8bit"):
            return "bitsandbytes"
    return "quantised"


def _positive(part: Mapping[str, object], key: str, label: str, where: str, otherwise: str) -> None:
    value = part.get(key)
    if value is None:
        return
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number <= 0:
        raise InputError(f"{where}: {label}{key} must be a positive finite number; got {shown(value)} ({otherwise})")
