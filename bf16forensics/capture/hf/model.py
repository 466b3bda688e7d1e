"""A checked Hugging Face model: configuration, mapped weights by the model's own names, and a weightless skeleton."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bf16forensics.capture.hf.build import empty_model, language_model, refuse_too_many_layers
from bf16forensics.capture.hf.class_facts import class_facts
from bf16forensics.capture.hf.fields import account_for
from bf16forensics.capture.hf.library import ATTENTION_NAME, library
from bf16forensics.capture.hf.names import check_rotary, match_names
from bf16forensics.capture.hf.rope import refuse_rope_types
from bf16forensics.capture.hf.settle import settle, stored_tensors
from bf16forensics.load.hf_config import check_config, check_tensors
from bf16forensics.load.hf_directory import CONFIG, HFDirectory, read_hf_directory
from bf16forensics.load.nanogpt_tensors import dtype_names


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModel:
    """A causal language model of transformers whose weights stay in their files."""

    directory: HFDirectory
    #: Model type of the language model, "llama"; of the text model where the directory holds a wrapper around it.
    family: str
    #: Configuration of the language model as transformers has it; its attention implementation is `ATTENTION_NAME`.
    config: Any
    #: By the model's own parameter and persistent buffer names, mapped as stored, tied names included. Weights that
    #: transformers merges from several tensors of the files are merged anew at every access and not kept.
    weights: Mapping[str, torch.Tensor]
    #: False: neither file nor tie gives an output head, so there is no loss and forward evidence only.
    has_output_head: bool
    #: Soft-cap of the attention scores that config.json states and the class does not apply; None for none.
    softcap: float | None
    #: Softmax scale that config.json states and the class does not apply; None for the class's own.
    scale: float | None
    #: Tensors of the checkpoint that the model does not apply, by their names in the files.
    unused_tensors: tuple[str, ...]
    #: Formats of the weights as stored, sorted and joined: "bf16", "bf16+fp32".
    weight_dtype: str
    #: What a reader must know of how the directory was read.
    notes: tuple[str, ...]
    #: The model that `skeleton` copies; nobody changes it.
    template: torch.nn.Module = field(repr=False)

    def skeleton(self) -> torch.nn.Module:
        """A fresh model in evaluation mode: parameters and persistent buffers on meta, other buffers real and FP32.

        Nothing requires a gradient. Copies share nothing that can be written to, so each thread takes its own.
        """
        return copy.deepcopy(self.template)


def load_hf_model(path: str | Path, *, allow_bin: bool = False) -> HFModel:
    """Reads a Hugging Face directory and checks it against the class of transformers that it names.

    No weight is copied and no code of the directory runs. Every key of config.json is accounted for: what the class
    ignores is applied here (attention soft-cap, softmax scale), harmless, listed in a note, or refused. Every weight
    must be there with its shape; what is left over is listed. Non-finite weights are kept: they are findings.

    Args:
        path: the directory.
        allow_bin: whether torch files may be read (by the restricted reader).

    Returns:
        The model. `localize` needs its output head for a loss; see `has_output_head`.

    Raises:
        InputError: transformers is missing, the directory or config.json cannot be used, the weights are quantised,
            incomplete or of another shape, or config.json asks for numerics that the class does not have.
    """
    library()
    directory = read_hf_directory(path, allow_bin=allow_bin)
    shown, where = str(path), str(Path(path) / CONFIG)
    check_config(directory.config, where)
    check_tensors(directory.tensors, shown)
    model = language_model(directory.config, where)
    refuse_too_many_layers(model.config, len(directory.tensors), where)
    refuse_rope_types(model.config, where)
    facts = class_facts(model.model_class, model.config, where)
    template = empty_model(model.model_class, model.config, where)
    fields = account_for(model, facts, [name for name, _ in template.named_parameters()], where)
    matched = match_names(directory.tensors, template, is_part=model.wrapper is not None, where=shown)
    settled = settle(matched, template, shown)
    if settled.untied:
        model.config.tie_word_embeddings = False
        template = empty_model(model.model_class, model.config, where)
    # Set behind the constructor, which would ask for a registered function.
    template.config._attn_implementation = ATTENTION_NAME
    weight_dtype = dtype_names(stored_tensors(matched))
    notes = [*directory.notes, *model.notes, *fields.notes, *matched.notes, *settled.notes]
    notes += check_rotary(matched.rotary, template)
    if "fp64" in weight_dtype:
        notes.append("FP64 weights are rounded to FP32")
    return HFModel(
        directory=directory,
        family=str(model.config.model_type),
        config=template.config,
        weights=settled.weights,
        has_output_head=settled.has_output_head,
        softcap=fields.softcap,
        scale=fields.scale,
        unused_tensors=tuple(matched.unused),
        weight_dtype=weight_dtype,
        notes=tuple(notes),
        template=template,
    )
