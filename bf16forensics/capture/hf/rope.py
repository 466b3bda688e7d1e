"""The rotary parameters of a config.json: known types only, and every value inside them read by the class."""

from collections.abc import Iterator
from typing import Any

from bf16forensics.capture.hf.class_facts import ClassFacts
from bf16forensics.capture.hf.library import library
from bf16forensics.errors import InputError
from bf16forensics.load.hf_json import shown

#: Rotary parameters under a key of their own, with the value at which each changes nothing.
ROPE_VALUES = {"rope_theta": None, "partial_rotary_factor": 1.0}
#: Keys that hold all of them: before and since transformers 5.
ROPE_DICTS = ("rope_scaling", "rope_parameters")
_TYPE_KEYS = ("rope_type", "type")
#: Says how the model was trained, not what it computes.
_HARMLESS = frozenset({"finetuned"})
#: Types whose frequencies do not depend on the length the model was first trained at.
_LENGTH_FREE = frozenset({"default", "linear"})


def refuse_rope_types(config: Any, where: str) -> None:
    """Refuses rotary types that transformers does not know.

    Args:
        config: configuration object of the model.
        where: config.json, for errors.

    Raises:
        InputError: the first such type.
    """
    known = {"default", *library("modeling_rope_utils").ROPE_INIT_FUNCTIONS}
    for part in _leaves(getattr(config, "rope_parameters", None)):
        kind = part.get("rope_type", part.get("type", "default"))
        if kind not in known:
            raise InputError(f"{where}: RoPE type {shown(kind)} is not known to transformers "
                             f"({', '.join(sorted(known))}); such models are not supported")  # fmt: skip


def check_rope_key(config: Any, key: str, value: object, facts: ClassFacts, where: str) -> None:
    """Refuses rotary parameters that the class does not read.

    Args:
        config: configuration object of the model.
        key: a key of `ROPE_VALUES` or `ROPE_DICTS`.
        value: its value in config.json.
        facts: what the class reads.
        where: config.json, for errors.

    Raises:
        InputError: the class does not rotate, or ignores a value that is not neutral.
    """
    if value is None or value == {}:
        return
    if key in ROPE_VALUES:
        if value != ROPE_VALUES[key] and key not in facts.rope_reads and key not in facts.reads:
            raise _ignored(key, value, config, where)
        return
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key} must be an object or null; got {shown(value)}")
    if "rope_parameters" not in facts.reads:
        raise _ignored(key, value, config, where)
    _check_dict(config, key, value, facts, where)


def _check_dict(config: Any, path: str, part: dict[str, object], facts: ClassFacts, where: str) -> None:
    kinds = [part[key] for key in _TYPE_KEYS if part.get(key) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise InputError(f"{where}: {path}.rope_type {shown(kinds[0])} and {path}.type {shown(kinds[1])} contradict "
                         "each other; remove one")  # fmt: skip
    for key, value in part.items():
        if isinstance(value, dict):
            if key in facts.rope_reads:
                _check_dict(config, f"{path}.{key}", value, facts, where)
                continue
            # Parameters of a kind of layer that this model has none of.
            if key not in (getattr(config, "layer_types", None) or ()) and key.endswith("attention"):
                continue
        length_free = key == "original_max_position_embeddings" and set(kinds) <= _LENGTH_FREE
        neutral = value is None or value is False or value == 1 or length_free
        if key not in facts.rope_reads and key not in _TYPE_KEYS and key not in _HARMLESS and not neutral:
            raise _ignored(f"{path}.{key}", value, config, where)


def _leaves(parameters: object) -> Iterator[dict[str, Any]]:
    """The rotary parameters of each kind of layer, or those of all."""
    if not isinstance(parameters, dict):
        return
    inner = [value for value in parameters.values() if isinstance(value, dict)]
    yield from inner or [parameters]


def _ignored(key: str, value: object, config: Any, where: str) -> InputError:
    return InputError(f"{where}: {key} {shown(value)} changes position embeddings, which the {config.model_type} class "
                      "of transformers does not apply; remove it if the model was trained without")  # fmt: skip
