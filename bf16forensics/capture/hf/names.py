"""From checkpoint names to the model's own: wrappers stripped, transformers' renamings and merges, nothing lost."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bf16forensics.capture.hf.library import library
from bf16forensics.capture.hf.weights import Merge
from bf16forensics.errors import InputError
from bf16forensics.load.hf_config import MASK_BUFFER
from bf16forensics.load.names import normalise_names, same_bits

#: Where a wrapper keeps its text model, with the places of the same tensors in the text model alone.
_TEXT_PARTS = (
    (re.compile(r"^model\.language_model\.model\."), ("model.",)),
    (re.compile(r"^model\.language_model\."), ("model.", "")),
    (re.compile(r"^language_model\."), ("", "model.")),
    (re.compile(r"^(model\.)?text_model\."), ("model.", "")),
)
_ROTARY_BUFFER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_POSITION_BUFFER = re.compile(r"(^|\.)position_ids$")


@dataclass(slots=True, kw_only=True)
class Matched:
    """The tensors of a checkpoint, sorted by what the model does with them."""

    #: By the model's names, as stored.
    direct: dict[str, torch.Tensor] = field(default_factory=dict)
    #: By the model's names, what makes them, and the shapes that come out.
    merged: dict[str, Merge] = field(default_factory=dict)
    merged_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: Stored rotary frequencies by checkpoint name: the model computes its own.
    rotary: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Checkpoint names of tensors that the model does not apply.
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match_names(tensors: Mapping[str, torch.Tensor], model: Any, *, is_part: bool, where: str) -> Matched:
    """Gives every tensor its place in the model, by the rules with which transformers itself loads the class.

    Args:
        tensors: by checkpoint name.
        model: the model, on meta.
        is_part: True when the model is the text part of a wrapper.
        where: the directory, for errors.

    Raises:
        InputError: two different tensors for one place.
    """
    loading = library("core_model_loading")
    rules = library("conversion_mapping").get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    places = model.state_dict()
    clean, notes = normalise_names(tensors, where)
    matched = Matched(notes=list(notes))
    origin: dict[str, str] = {}
    sources: dict[str, list[tuple[str, str, torch.Tensor]]] = {}

    def place(name: str) -> tuple[str, str | None]:
        found = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if found[0] not in places and name in places:
            return name, None
        return found[0], found[1]

    # The order in which transformers sorts them: expert 10 behind expert 9.
    for name in sorted(clean, key=loading.dot_natural_key):
        target, pattern = next((p for n in _candidates(name, is_part) if (p := place(n))[0] in places), ("", None))
        if not target:
            _set_aside(name, clean[name], matched)
        elif pattern is not None:
            sources.setdefault(target, []).append((pattern, name, clean[name]))
        elif target not in matched.direct:
            matched.direct[target] = clean[name]
            origin[target] = name
        elif same_bits(matched.direct[target], clean[name]):
            matched.notes.append(f"'{origin[target]}' and '{name}' hold the same values: one is used")
        else:
            raise InputError(f"{where}: '{origin[target]}' and '{name}' are both {target}, with different values; "
                             "remove one of them")  # fmt: skip
    for target, items in sources.items():
        _refuse_gaps(target, items, where)
        merge = Merge(converter=by_pattern[items[0][0]], first_name=target, sources=tuple(items), config=model.config,
                      where=where)  # fmt: skip
        for made, outcome in merge.run(on_meta=True).items():
            if made in matched.direct or made in matched.merged:
                raise InputError(f"{where}: {made} is there and can also be made from '{items[0][1]}'; remove one")
            if made in places:
                matched.merged[made] = merge
                matched.merged_shapes[made] = tuple(outcome.shape)
    return matched


def check_rotary(stored: Mapping[str, torch.Tensor], model: torch.nn.Module) -> list[str]:
    """Notes on stored rotary frequencies that are not those of the model, whose own are used.

    Frequencies that are equal but for the rounding of a 16-bit format are silent.
    """
    computed = [buffer.float() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    odd = [
        name
        for name, one in stored.items()
        if name.endswith("inv_freq")
        and not any(
            one.shape == own.shape and torch.allclose(one.float(), own, rtol=2**-7, atol=1e-7) for own in computed
        )
    ]
    if not odd:
        return []
    return [f"stored rotary frequencies ({odd[0]}) differ from those of config.json, which are used"]


def _candidates(name: str, is_part: bool) -> list[str]:
    """The names under which a tensor may be known to the model, most likely first."""
    if not is_part:
        return [name]
    inner = [put + name[match.end() :] for rule, puts in _TEXT_PARTS if (match := rule.match(name)) for put in puts]
    return inner or [name]


def _set_aside(name: str, tensor: torch.Tensor, matched: Matched) -> None:
    """Buffers that the class computes itself are no news; anything else is listed."""
    if _ROTARY_BUFFER.search(name):
        matched.rotary[name] = tensor
    elif _POSITION_BUFFER.search(name) or (MASK_BUFFER.search(name) and _is_causal_mask(tensor)):
        return
    else:
        matched.unused.append(name)


def _is_causal_mask(tensor: torch.Tensor) -> bool:
    """True for a lower triangle of ones and for a single fill value: by content, since a bias may have such a name."""
    if tensor.numel() == 1:
        return True
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.numel() != tensor.shape[-1] ** 2:
        return False
    plane = tensor.reshape(tensor.shape[-2:])
    return bool(torch.equal(plane, torch.ones_like(plane).tril()))


def _refuse_gaps(target: str, items: list[tuple[str, str, torch.Tensor]], where: str) -> None:
    """Refuses a numbered series (the experts of a layer) that lacks a member: merging would shift the others."""
    numbers: dict[str, list[int]] = {}
    for pattern, name, _ in items:
        series = re.compile(".*".join(re.escape(part) for part in pattern.split("*")).replace(".*", r"(\d+)", 1))
        if "*" in pattern and (match := series.search(name)):
            numbers.setdefault(pattern, []).append(int(match.group(1)))
    for pattern, seen in numbers.items():
        absent = sorted(set(range(max(seen) + 1)) - set(seen))
        if absent or len(seen) != max(len(one) for one in numbers.values()):
            number = absent[0] if absent else len(seen)
            prefix = items[0][1].split(pattern.split("*")[0])[0]
            raise InputError(f"{where}: missing {prefix}{pattern.replace('*', str(number))}, a part of {target}; "
                             "incomplete download?")  # fmt: skip
