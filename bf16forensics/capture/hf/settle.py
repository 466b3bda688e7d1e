"""Is every weight there, of the right shape and format? Ties, the output head, and what to say where one is not."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bf16forensics.capture.hf.field_table import OTHER_PARTS
from bf16forensics.capture.hf.names import Matched
from bf16forensics.capture.hf.weights import ModelWeights
from bf16forensics.errors import InputError
from bf16forensics.load.names import same_bits, three_of

_FLOATING = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
#: Sizes of config.json that a tensor's shape comes from, by its name; the first match.
_SIZES = (
    (re.compile(r"(^|\.)(q_proj|wq|query|q_norm)\."), ("num_attention_heads", "head_dim")),
    (re.compile(r"(^|\.)([kv]_proj|w[kv]|key|value|k_norm)\."), ("num_key_value_heads", "head_dim")),
    (re.compile(r"o_proj\."), ("hidden_size", "num_attention_heads", "head_dim")),
    (re.compile(r"experts\."), ("n_routed_experts", "num_experts", "num_local_experts", "moe_intermediate_size")),
    (re.compile(r"(wpe|position)"), ("max_position_embeddings", "hidden_size")),
    (re.compile(r"(embed|wte|lm_head)"), ("vocab_size", "hidden_size")),
    (re.compile(r"(mlp|ffn|feed_forward)\."), ("hidden_size", "intermediate_size")),
    (re.compile(r""), ("hidden_size",)),
)
#: A layer of the language model, whatever stands in front.
_LAYER = re.compile(r"(?:_orig_mod\.|module\.|language_model\.|model\.|transformer\.)*(?:layers|h)\.(\d+)\.")
_ATTENTION = re.compile(r"(^|\.)(self_)?att(entio)?n\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The weights of a model, complete."""

    weights: ModelWeights
    has_output_head: bool
    #: True when config.json ties the output head to the embedding and the files hold two different matrices.
    untied: bool
    notes: tuple[str, ...]


def settle(matched: Matched, model: Any, where: str) -> Settled:
    """Completes tied weights and checks that every parameter and persistent buffer is there with its shape.

    Two different matrices where config.json says tied are both used, as transformers does. An output head that is
    neither in the files nor tied is reported, and everything else works without it.

    Args:
        matched: the tensors by the model's names; completed in place.
        model: the model, on meta.
        where: the directory, for errors.

    Raises:
        InputError: a weight is missing, has another shape, or is not BF16, FP16, FP32 or FP64; or the files hold more
            layers than config.json says.
    """
    notes: list[str] = []
    _refuse_more_layers(matched.unused, model.config, where)
    untied = _tie(matched, model.all_tied_weights_keys, notes)
    places: Mapping[str, torch.Tensor] = model.state_dict()
    missing = [name for name in places if name not in matched.direct and name not in matched.merged]
    head = _output_head(model)
    if missing and set(missing) - head:
        names = [name for name in missing if name not in head]
        found = f"; found instead {three_of(matched.unused)}" if matched.unused else ""
        raise InputError(f"{where}: {len(names)} of the weights missing: {three_of(names)}{found} "
                         "(incomplete download, or another model?)")  # fmt: skip
    if missing:
        notes.append(f"no output head: config.json says untied and {three_of(missing)} is not in the files; without a "
                     "loss there is no gradient, so forward evidence only")  # fmt: skip
    for name, place in places.items():
        if name not in missing:
            _check(name, place, matched, model.config, where)
    attention = [name for name in matched.unused if _ATTENTION.search(name) and not OTHER_PARTS.search(name)]
    if attention:
        notes.append(f"{len(attention)} attention tensors of the files are not applied: {three_of(attention)}")
    return Settled(
        weights=ModelWeights(matched.direct, matched.merged),
        has_output_head=not missing,
        untied=untied,
        notes=tuple(notes),
    )


def stored_tensors(matched: Matched) -> dict[str, torch.Tensor]:
    """The floating tensors that the model applies, as stored: those that are merged stand for themselves."""
    stored = dict(matched.direct)
    for merge in matched.merged.values():
        stored.update((name, tensor) for _, name, tensor in merge.sources)
    return {name: tensor for name, tensor in stored.items() if tensor.dtype in _FLOATING}


def _refuse_more_layers(unused: Iterable[str], config: Any, where: str) -> None:
    """Layers behind the last are an error, except those that predict further tokens, which no class runs."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    allowed = layers + (getattr(config, "num_nextn_predict_layers", None) or 0)
    for name in unused:
        match = _LAYER.match(name)
        if match is not None and int(match.group(1)) >= allowed:
            key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
            raise InputError(f"{where}: {key} is {layers} but the files hold layer {match.group(1)} ({name}); correct "
                             "config.json")  # fmt: skip


def _tie(matched: Matched, ties: Mapping[str, str], notes: list[str]) -> bool:
    direct = matched.direct
    untied = False
    for target, source in ties.items():
        if target in direct and source in direct:
            if not same_bits(direct[target], direct[source]):
                notes.append(f"config.json says tied (tie_word_embeddings) but {target} and {source} differ: each is "
                             "used as stored, as transformers does")  # fmt: skip
                untied = True
        elif source in direct:
            direct[target] = direct[source]
        elif target in direct:
            notes.append(f"{source} is not in the files: the tied {target} is used")
            direct[source] = direct[target]
    return untied


def _output_head(model: Any) -> set[str]:
    head = model.get_output_embeddings()
    prefix = next((name for name, module in model.named_modules() if module is head), None)
    return set() if head is None or prefix is None else {f"{prefix}.{name}" for name, _ in head.named_parameters()}


def _check(name: str, place: torch.Tensor, matched: Matched, config: Any, where: str) -> None:
    if name in matched.merged:
        shape = matched.merged_shapes[name]
        sources: Iterable[tuple[str, torch.Tensor]] = ((n, t) for _, n, t in matched.merged[name].sources)
    else:
        shape = tuple(matched.direct[name].shape)
        sources = ((name, matched.direct[name]),)
    for source, tensor in sources:
        if place.is_floating_point() and tensor.dtype not in _FLOATING:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"{where}: {source} has dtype {kind}; weights must be BF16, FP16 or FP32: dequantise first"
            )
    wanted = tuple(place.shape)
    if shape != wanted:
        hint = " (transposed?)" if shape == wanted[::-1] else ""
        raise InputError(f"{where}: {name} has shape {list(shape)}{hint}; config.json ({_sizes(name, config)}) needs "
                         f"{list(wanted)}")  # fmt: skip


def _sizes(name: str, config: Any) -> str:
    """The values of config.json that decide a shape, under the names that the family gives them."""
    keys = next(keys for pattern, keys in _SIZES if pattern.search(name))
    said = []
    for key in keys:
        value = getattr(config, key, None)
        if key == "head_dim" and value is None and isinstance(getattr(config, "num_attention_heads", None), int):
            value = config.hidden_size // config.num_attention_heads
        if value is not None:
            said.append(f"{config.attribute_map.get(key, key)} {value}")
    return ", ".join(said)
