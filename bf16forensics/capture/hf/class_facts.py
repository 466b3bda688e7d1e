"""What a class does with its configuration, seen by running it on meta: attributes read, and what attention is told.

A run on meta computes nothing and allocates nothing, whatever the size of the model.
"""

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from bf16forensics.capture.hf.build import empty_model, first_line
from bf16forensics.capture.hf.library import library, quiet
from bf16forensics.errors import InputError

_OWN_NAME = "bf16forensics-facts"
_TOKENS = 4
_ROPE_ATTRIBUTES = ("rope_parameters", "rope_scaling")
_REGISTRY = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one layer's attention was told; None where it was told nothing."""

    scale: float | None
    softcap: float | None
    is_causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """What a class does with its configuration."""

    #: Keys of the configuration that the model's code read while it was built and run.
    reads: frozenset[str]
    #: Keys of the rotary parameters that the model's code read.
    rope_reads: frozenset[str]
    #: Names and keys that the code of the configuration class mentions where it derives values.
    config_words: frozenset[str]
    #: One entry for each call of the attention interface, in order.
    calls: tuple[Told, ...]


def class_facts(model_class: Any, config: Any, where: str) -> ClassFacts:
    """Builds and runs the class on meta with a configuration that notes what is read.

    Args:
        model_class: a causal language model class of transformers.
        config: its configuration; not changed.
        where: config.json, for errors.

    Raises:
        InputError: the class cannot be built, or its attention does not go through transformers' attention interface,
            where it could be observed.
    """
    reads: set[str] = set()
    rope_reads: set[str] = set()
    model = empty_model(model_class, _watched(config, reads, rope_reads), where)
    calls: list[Told] = []
    failure = _run_on_meta(model, calls)
    if not calls:
        because = f" ({first_line(failure)})" if failure is not None else ""
        raise InputError(f"{where}: the attention of {model_class.__name__} does not go through the attention "
                         f"interface of transformers, so it cannot be observed{because}")  # fmt: skip
    return ClassFacts(
        reads=frozenset(reads),
        rope_reads=frozenset(rope_reads),
        config_words=_config_words(type(config)),
        calls=tuple(calls),
    )


def _run_on_meta(model: Any, calls: list[Told]) -> Exception | None:
    """Runs the model as far as meta tensors go; what needs a value ends it, behind the attention of its layer."""

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **told: Any
                  ) -> tuple[torch.Tensor, None]:  # fmt: skip
        causal = told.get("is_causal")
        calls.append(
            Told(
                scale=told.get("scaling"),
                softcap=told.get("softcap"),
                is_causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            )
        )
        return value.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None

    model = model.to("meta")
    for module in model.modules():
        _fix_rotation(module)
    model.config._attn_implementation = _OWN_NAME
    model.config._experts_implementation = _OWN_NAME
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    try:
        with quiet(), torch.no_grad(), _REGISTRY:
            library("modeling_utils").AttentionInterface.register(_OWN_NAME, attention)
            # Masks are asked for, and not needed: the code that builds them reads the windows.
            library("masking_utils").AttentionMaskInterface.register(_OWN_NAME, lambda *_, **__: None)
            # Which expert a token goes to is a value; what comes out has the shape of what goes in.
            library("integrations.moe").ExpertsInterface.register(_OWN_NAME, lambda _, hidden, *__: hidden.clone())
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    # Anything that needs a value fails on meta in its own way; what was seen before that counts.
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _fix_rotation(module: Any) -> None:
    """Keeps frequencies that depend on the length of the sequence from asking for it: on meta it has no value."""
    kind = vars(module).get("rope_type")
    if isinstance(kind, str) and "dynamic" in kind:
        module.rope_type = "default"
    elif isinstance(kind, dict):
        module.rope_type = {key: "default" if "dynamic" in str(one) else one for key, one in kind.items()}


def _watched(config: Any, reads: set[str], rope_reads: set[str]) -> Any:
    """A copy of the configuration that notes which of its keys the code of a model reads."""
    cls: Any = type(config)

    def read(self: Any, key: str) -> Any:
        if not key.startswith("__") and _is_model_code(sys._getframe(1)):
            reads.add(key)
            reads.add(cls.attribute_map.get(key, key))
        return cls.__getattribute__(self, key)

    watched = copy.deepcopy(config)
    for name in _ROPE_ATTRIBUTES:
        if isinstance(vars(watched).get(name), dict):
            vars(watched)[name] = _WatchedDict(vars(watched)[name], rope_reads)
    object.__setattr__(watched, "__class__", type(cls.__name__, (cls,), {"__getattribute__": read}))
    return watched


class _WatchedDict(dict[str, Any]):
    """A dict that notes which of its keys the code of a model reads, nested dicts included."""

    def __init__(self, items: Mapping[str, Any], reads: set[str]) -> None:
        super().__init__(
            {key: _WatchedDict(item, reads) if isinstance(item, dict) else item for key, item in items.items()}
        )
        self._reads = reads

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As dict.get."""
        self._note(key)
        return super().get(key, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_WatchedDict":
        return _WatchedDict(copy.deepcopy(dict(self), memo), self._reads)

    def _note(self, key: str) -> None:
        if _is_model_code(sys._getframe(2)):
            self._reads.add(key)


def _is_model_code(frame: FrameType) -> bool:
    """True for code that computes; False for configuration, generation, saving and printing, which read everything."""
    module = str(frame.f_globals.get("__name__", ""))
    if module == "transformers.modeling_rope_utils":
        return not frame.f_code.co_qualname.startswith("RotaryEmbeddingConfigMixin.")
    if not module.startswith("transformers.") or module == "transformers.modeling_utils":
        return False
    return module.rsplit(".", 1)[-1].startswith(("modeling_", "masking_utils", "moe"))


def _config_words(cls: type) -> frozenset[str]:
    """Names and text constants in the functions by which a configuration class derives its values."""
    words: set[str] = set()
    for base in cls.__mro__:
        if base.__module__ == "transformers.configuration_utils":
            break
        source = getattr(sys.modules.get(base.__module__), "__file__", None)
        for name, member in vars(base).items():
            # Generated constructors mention every field, checks and printing derive nothing.
            written = isinstance(member, FunctionType) and member.__code__.co_filename == source
            if written and not name.startswith(("validate", "to_", "_validate")):
                _add_words(member.__code__, words)
    return frozenset(words)


def _add_words(code: CodeType, words: set[str]) -> None:
    words.update(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            words.add(constant)
        elif isinstance(constant, CodeType):
            _add_words(constant, words)
