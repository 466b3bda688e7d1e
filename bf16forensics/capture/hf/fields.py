"""Every key of config.json accounted for: read by the class, derived from, applied here, harmless, listed, refused."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bf16forensics.capture.hf import field_table as table
from bf16forensics.capture.hf.build import LanguageModel, configured
from bf16forensics.capture.hf.class_facts import ClassFacts
from bf16forensics.capture.hf.rope import ROPE_DICTS, ROPE_VALUES, check_rope_key
from bf16forensics.errors import InputError
from bf16forensics.load.hf_config import SCALE_KEYS, SOFTCAP_KEY
from bf16forensics.load.hf_json import shown

_LISTED = 20
#: Relative difference up to which two softmax scales are one: a few units in the last place of FP32.
_SAME_SCALE = 1e-6
_WINDOW_OUTPUTS = frozenset({"layer_types", "sliding_window", "attention_chunk_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What config.json says that the class does not do by itself."""

    #: Soft-cap and softmax scale to apply in its place; None for the class's own.
    softcap: float | None
    scale: float | None
    notes: tuple[str, ...]


def account_for(model: LanguageModel, facts: ClassFacts, parameters: Iterable[str], where: str) -> Fields:
    """Sorts every key; applies the attention soft-cap and the softmax scale where the class ignores them.

    Args:
        model: the language model.
        facts: what its class reads and tells its attention.
        parameters: names of the model's parameters.
        where: config.json, for errors.

    Raises:
        InputError: a key that touches the numbers of attention, is not neutral, and that the class does not read;
            attention that is not causal; keys that contradict each other.
    """
    raw, config = model.raw, model.config
    if not all(call.is_causal for call in facts.calls):
        raise InputError(f"{where}: {config.model_type} attends in both directions (an encoder, or is_decoder false); "
                         "give a causal language model")  # fmt: skip
    _refuse_aliases(config, raw, where)
    notes: list[str] = []
    softcap = _softcap(config, facts, where, notes)
    scale = _scale(config, facts, where, notes)
    shape = _shape(config, raw, facts, parameters)
    unknown = _unknown_keys(model, facts, shape, where)
    if model.wrapper is not None:
        unknown += _unknown_wrapper_keys(model, shape, where)
    dropouts = [
        f"{key} {shown(value)}"
        for key, value in raw.items()
        if table.DROPOUT.search(key) and not table.is_harmless(key) and value
    ]
    if dropouts:
        notes.append(f"dropout forced to 0 (config.json: {', '.join(dropouts)})")
    if raw.get("reorder_and_upcast_attn") is True:
        notes.append("reorder_and_upcast_attn is true (attention in FP32): here the recipe decides what is rounded")
    if unknown:
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        notes.append(f"keys of config.json that nothing here applies: {', '.join(unknown[:_LISTED])}{more}")
    return Fields(softcap=softcap, scale=scale, notes=tuple(notes))


def _unknown_keys(model: LanguageModel, facts: ClassFacts, shape: table.Shape, where: str) -> list[str]:
    """Keys, with their values, that nothing applies and no table knows; what touches attention is refused."""
    config = model.config
    unknown = []
    for key, value in model.raw.items():
        if key == SOFTCAP_KEY or key in SCALE_KEYS or table.is_harmless(key) or table.DROPOUT.search(key):
            continue
        mapped = config.attribute_map.get(key, key)
        if key in ROPE_DICTS or key in ROPE_VALUES:
            check_rope_key(config, key, value, facts, where)
        elif not (
            {key, mapped} & facts.reads
            or table.is_neutral(key, value, shape)
            or (key in facts.config_words and _derived(model, key, value, facts))
        ):
            _refuse_numerics(key, value, config.model_type, where)
            if getattr(type(config), mapped, None) != value:
                unknown.append(f"{key} {shown(value)}")
    return unknown


def _derived(model: LanguageModel, key: str, value: object, facts: ClassFacts) -> bool:
    """True when the configuration class turns a key into others that the model reads, or would set it so itself."""
    if table.numerics(key) is None:
        return True
    if table.WINDOW.search(key):
        # The list itself derives nothing: who does not read it ignores it.
        return not isinstance(value, list) and bool(_WINDOW_OUTPUTS & facts.reads)
    if table.ROPE.search(key):
        return "rope_parameters" in facts.reads
    rest = {name: item for name, item in model.raw.items() if name != key}
    without = configured(type(model.config), rest, f"config.json without {key}")
    return bool(getattr(without, key, None) == value)


def _unknown_wrapper_keys(model: LanguageModel, shape: table.Shape, where: str) -> list[str]:
    """The same for the keys of a wrapper around the text model, of which the text model reads none."""
    unknown = []
    for key, value in model.outer.items():
        if table.is_harmless(key) or table.OTHER_PARTS.search(key) or table.is_neutral(key, value, shape):
            continue
        _refuse_numerics(key, value, model.wrapper.model_type, where)
        if getattr(type(model.wrapper), key, None) != value:
            unknown.append(f"{key} {shown(value)}")
    return unknown


def _refuse_numerics(key: str, value: object, family: str, where: str) -> None:
    what = table.numerics(key)
    if what is not None:
        raise InputError(f"{where}: {key} {shown(value)} changes {what}, which the {family} class of transformers does "
                         "not apply; remove it if the model was trained without")  # fmt: skip


def _softcap(config: Any, facts: ClassFacts, where: str, notes: list[str]) -> float | None:
    value = getattr(config, SOFTCAP_KEY, None)
    told = {call.softcap for call in facts.calls}
    if value is None or told == {value}:
        return None
    if told != {None}:
        raise InputError(f"{where}: {SOFTCAP_KEY} is {value:g} but the {config.model_type} class of transformers "
                         f"applies {', '.join(map(str, told))}; correct it")  # fmt: skip
    notes.append(f"{SOFTCAP_KEY} {value:g}: the {config.model_type} class of transformers does not apply it; it is "
                 "applied here")  # fmt: skip
    return float(value)


def _scale(config: Any, facts: ClassFacts, where: str, notes: list[str]) -> float | None:
    stated = {key: rule(getattr(config, key)) for key, rule in SCALE_KEYS.items() if getattr(config, key, None)}
    own = {call.scale for call in facts.calls}
    ignored = [key for key in stated if key not in facts.reads and not all(_same(one, stated[key]) for one in own)]
    if not ignored:
        return None
    scale = stated[ignored[0]]
    said = f"{ignored[0]} {shown(getattr(config, ignored[0]))}"
    if not all(_same(other, scale) for other in stated.values()):
        raise InputError(f"{where}: {' and '.join(stated)} state different softmax scales; remove one")
    if len(own) > 1:
        raise InputError(f"{where}: {said} states one softmax scale but the {config.model_type} class of transformers "
                         "has one for each layer; remove it")  # fmt: skip
    notes.append(f"{said}: the {config.model_type} class of transformers does not apply it; the softmax scale "
                 f"{scale:g} is applied here")  # fmt: skip
    return float(scale)


def _same(one: float | None, other: float) -> bool:
    return one is not None and math.isclose(one, other, rel_tol=_SAME_SCALE)


def _refuse_aliases(config: Any, raw: Mapping[str, object], where: str) -> None:
    pairs = [*config.attribute_map.items(), ROPE_DICTS, ("torch_dtype", "dtype")]
    for one, other in pairs:
        if raw.get(one) is not None and raw.get(other) is not None and raw[one] != raw[other]:
            raise InputError(f"{where}: {one} {shown(raw[one])} and {other} {shown(raw[other])} are the same setting "
                             "with different values; remove one")  # fmt: skip


def _shape(config: Any, raw: Mapping[str, object], facts: ClassFacts, parameters: Iterable[str]) -> table.Shape:
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    return table.Shape(
        num_heads=heads,
        head_size=width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None,
        max_positions=getattr(config, "max_position_embeddings", None),
        rotates="rope_parameters" in facts.reads,
        norms_qk=any(table.QK_NORM.search(name) for name in parameters),
        windows_off=table.windows_off(raw),
    )
