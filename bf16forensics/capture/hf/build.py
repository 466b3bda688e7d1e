"""From config.json to a class of transformers and an instance of it without weights. No file of the directory runs."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bf16forensics.capture.hf.library import library, quiet
from bf16forensics.errors import InputError
from bf16forensics.load.hf_config import SOFTCAP_KEY, TESTED_FAMILIES, custom_code

#: Keys that choose code, kernels or storage and not arithmetic; the classes never see them.
_WITHHELD = frozenset(
    "auto_map attn_implementation _attn_implementation _attn_implementation_internal experts_implementation "
    "_experts_implementation _experts_implementation_internal dtype torch_dtype quantization_config "
    "compression_config transformers_weights configuration_files trust_remote_code".split()
)
_PATCH = Lock()
#: Elements from which uninitialised memory is not asked for: the system may refuse what a parameter never needs.
_LARGE = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """The causal language model that a config.json describes."""

    #: Its class in transformers.
    model_class: Any
    #: Its configuration object.
    config: Any
    #: The part of config.json that describes it: all of it, or the text part of a wrapper's.
    raw: Mapping[str, object]
    #: Configuration of a wrapper (vision and text) around it; None without one.
    wrapper: Any
    #: The rest of a wrapper's config.json; empty without one.
    outer: Mapping[str, object]
    notes: tuple[str, ...]


def language_model(config: Mapping[str, object], where: str) -> LanguageModel:
    """Finds the class and builds its configuration.

    Args:
        config: config.json, already checked by `check_config`.
        where: its path.

    Raises:
        InputError: a family that transformers does not know, one without a causal language model, or a value that
            the configuration class refuses.
    """
    family = str(config["model_type"])
    if family not in library("models.auto.configuration_auto").CONFIG_MAPPING_NAMES:
        code = "; the code that auto_map names is never executed" if custom_code(config) else ""
        raise InputError(f"{where}: model_type '{family[:60]}' is not known to transformers {library().__version__}"
                         f"{code}. Tested families: {', '.join(TESTED_FAMILIES)}")  # fmt: skip
    whole = configured(library("models.auto.configuration_auto").CONFIG_MAPPING[family], config, where)
    try:
        text = whole.get_text_config(decoder=True)
    except ValueError as error:
        raise InputError(
            f"{where}: {family} holds several text models ({first_line(error)}); give one alone"
        ) from error
    with quiet():
        found = library("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    model_class = found[0] if isinstance(found, tuple | list) else found
    if model_class is None or getattr(text, "is_encoder_decoder", False):
        part = "its text model" if text is not whole else f"'{family}'"
        raise InputError(f"{where}: {part} is no causal language model that transformers can run alone; "
                         f"tested families: {', '.join(TESTED_FAMILIES)}")  # fmt: skip
    notes = []
    raw, outer = config, dict[str, object]()
    if text is not whole:
        key = next((key for key in whole.sub_configs if getattr(whole, key, None) is text), "")
        inner = config.get(key)
        raw, outer = inner if isinstance(inner, dict) else {}, {name: config[name] for name in config if name != key}
        if isinstance(tied := getattr(whole, "tie_word_embeddings", None), bool):
            text.tie_word_embeddings = tied
        notes.append(f"the text model ({text.model_type}) of a {family} model is read; its other parts are not run")
    if custom_code(config):
        notes.append(f"the code that auto_map names was not executed: {text.model_type} is transformers' own class")
    if not {family, text.model_type} & set(TESTED_FAMILIES):
        notes.append(f"family {text.model_type} is not among the tested ones")
    return LanguageModel(
        model_class=model_class,
        config=text,
        raw=raw,
        wrapper=whole if text is not whole else None,
        outer=outer,
        notes=tuple(notes),
    )


def configured(config_class: Any, raw: Mapping[str, object], where: str) -> Any:
    """An object of a configuration class, from a copy: the classes change what they are given.

    Raises:
        InputError: a value that the class refuses.
    """
    try:
        with quiet():
            return config_class.from_dict(_allowed(raw))
    # Its validators raise whatever they like.
    except Exception as error:
        raise InputError(f"{where}: {config_class.__name__} refuses it ({first_line(error)})") from error


def refuse_too_many_layers(config: Any, num_tensors: int, where: str) -> None:
    """Refuses more layers than there are tensors: building them could take for ever.

    Raises:
        InputError: as said, or the number of layers is none.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and not 0 < layers <= num_tensors:
        name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise InputError(f"{where}: {name} is {layers} but the files hold {num_tensors} tensors; correct it")


def empty_model(model_class: Any, config: Any, where: str) -> Any:
    """An instance whose parameters and persistent buffers lie on meta; other buffers are real, FP32 where floating.

    The experts of a mixture run one after the other (transformers' "eager"), which any device can do in FP32.

    Args:
        model_class: a model class of transformers.
        config: its configuration; copied.
        where: config.json, for errors.

    Raises:
        InputError: the class refuses the configuration.
    """
    config = copy.deepcopy(config)
    try:
        with quiet(), _PATCH, _parameters_on_meta(), _LargeOnMeta():
            model = model_class._from_config(
                config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            )
    # Whatever a value that does not fit makes a class raise.
    except Exception as error:
        raise InputError(f"{where}: {model_class.__name__} cannot be built from it ({first_line(error)})") from error
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to("meta")
    return model.eval().requires_grad_(False)


def first_line(error: Exception) -> str:
    """The cause of a library's error as one short line."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:160]}" if said else type(error).__name__


def _allowed(config: Mapping[str, object]) -> dict[str, object]:
    allowed = {
        key: _allowed(value) if isinstance(value, dict) and key.endswith("_config") else copy.deepcopy(value)
        for key, value in config.items()
        if key not in _WITHHELD
    }
    # The classes are strict about 50 and 50.0; JSON writers are not.
    if isinstance(cap := allowed.get(SOFTCAP_KEY), int):
        allowed[SOFTCAP_KEY] = float(cap)
    if isinstance(scalar := allowed.get("query_pre_attn_scalar"), float) and scalar.is_integer():
        allowed["query_pre_attn_scalar"] = int(scalar)
    return allowed


class _LargeOnMeta(TorchFunctionMode):
    """Large uninitialised tensors, which only parameters are, lie on meta from the start."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            size = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args or kwargs.get("size", ())
            if math.prod(size) >= _LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves every parameter to meta as a module registers it, so that no model ever stands in memory.

    Not `torch.device("meta")`: under it the tables that a constructor computes (rotary frequencies) would be lost.
    """
    original = torch.nn.Module.register_parameter

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]
