"""The nanoGPT checkpoint: configuration, weights converted to FP32 one layer at a time, and what was not used.

Shapes: C width (n_embd), V vocabulary, P positions (block_size). Weights are [out, in].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bf16forensics.errors import InputError
from bf16forensics.load import nanogpt_tensors as model
from bf16forensics.load.files import file_facts
from bf16forensics.load.nanogpt_contents import DeclaredSizes, read_contents


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTConfig:
    """The sizes of the model."""

    n_layer: int
    n_head: int
    #: Width C; a multiple of n_head.
    n_embd: int
    #: Rows of the position table: the longest sequence.
    block_size: int
    vocab_size: int
    #: True when the linear layers have biases.
    bias: bool
    #: Dropout of the training run. The analysis never applies it.
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTLayer:
    """The weights of one layer, FP32."""

    #: [C].
    ln_1_weight: torch.Tensor
    #: [C] or None.
    ln_1_bias: torch.Tensor | None
    #: [3C, C]: rows of Q, then K, then V; head h of each block is its rows [h C/H, (h+1) C/H).
    c_attn_weight: torch.Tensor
    #: [3C] or None.
    c_attn_bias: torch.Tensor | None
    #: [C, C].
    attn_proj_weight: torch.Tensor
    #: [C] or None.
    attn_proj_bias: torch.Tensor | None
    #: [C].
    ln_2_weight: torch.Tensor
    #: [C] or None.
    ln_2_bias: torch.Tensor | None
    #: [4C, C].
    fc_weight: torch.Tensor
    #: [4C] or None.
    fc_bias: torch.Tensor | None
    #: [C, 4C].
    mlp_proj_weight: torch.Tensor
    #: [C] or None.
    mlp_proj_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTCheckpoint:
    """A checkpoint whose tensors stay mapped; each accessor converts what it returns to FP32."""

    config: NanoGPTConfig
    #: Optimiser steps done when the file was written; None when the file does not say.
    iter_num: int | None
    #: Formats of the weights as stored, sorted and joined: "fp32", "bf16", "bf16+fp32".
    weight_dtype: str
    #: True when the output head and the token embedding are one matrix.
    tied: bool
    #: Things done to the input that a reader must know.
    notes: tuple[str, ...]
    #: Tensors of the state dict that the model does not apply, in file order.
    unused_tensors: tuple[str, ...]
    #: Path as given.
    path: str
    size_bytes: int
    #: SHA-256 of the file's bytes, lower-case hex.
    sha256: str
    #: The applied tensors by nanoGPT name, as stored.
    tensors: Mapping[str, torch.Tensor]

    def layer(self, index: int) -> NanoGPTLayer:
        """The weights of layer `index` (0-based) in FP32.

        A tensor stored in FP32 is returned as the mapping itself (nothing is copied); the others are converted anew on
        every call, so that the caller decides how many layers live at once.

        Raises:
            InputError: no such layer.
        """
        if not 0 <= index < self.config.n_layer:
            raise InputError(f"{self.path}: no layer {index}; layers are 0 to {self.config.n_layer - 1}")
        prefix = f"transformer.h.{index}."
        return NanoGPTLayer(
            ln_1_weight=self._fp32(prefix + "ln_1.weight"),
            ln_1_bias=self._fp32_or_none(prefix + "ln_1.bias"),
            c_attn_weight=self._fp32(prefix + "attn.c_attn.weight"),
            c_attn_bias=self._fp32_or_none(prefix + "attn.c_attn.bias"),
            attn_proj_weight=self._fp32(prefix + "attn.c_proj.weight"),
            attn_proj_bias=self._fp32_or_none(prefix + "attn.c_proj.bias"),
            ln_2_weight=self._fp32(prefix + "ln_2.weight"),
            ln_2_bias=self._fp32_or_none(prefix + "ln_2.bias"),
            fc_weight=self._fp32(prefix + "mlp.c_fc.weight"),
            fc_bias=self._fp32_or_none(prefix + "mlp.c_fc.bias"),
            mlp_proj_weight=self._fp32(prefix + "mlp.c_proj.weight"),
            mlp_proj_bias=self._fp32_or_none(prefix + "mlp.c_proj.bias"),
        )

    @property
    def wte(self) -> torch.Tensor:
        """[V, C] token embedding, FP32."""
        return self._fp32("transformer.wte.weight")

    @property
    def wpe(self) -> torch.Tensor:
        """[P, C] position embedding, FP32."""
        return self._fp32("transformer.wpe.weight")

    @property
    def ln_f_weight(self) -> torch.Tensor:
        """[C] weight of the last LayerNorm, FP32."""
        return self._fp32("transformer.ln_f.weight")

    @property
    def ln_f_bias(self) -> torch.Tensor | None:
        """[C] bias of the last LayerNorm, FP32, or None."""
        return self._fp32_or_none("transformer.ln_f.bias")

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, C] output head, FP32; the token embedding when `tied`."""
        return self._fp32("lm_head.weight")

    def _fp32(self, name: str) -> torch.Tensor:
        return self.tensors[name].to(torch.float32)

    def _fp32_or_none(self, name: str) -> torch.Tensor | None:
        return self._fp32(name) if name in self.tensors else None


def load_nanogpt(path: str | Path, *, n_head: int | None = None) -> NanoGPTCheckpoint:
    """Reads a nanoGPT checkpoint or a state dict with nanoGPT names.

    Accepts `{"model": state dict, "model_args": {...}, "iter_num": n, ...}` and bare state dicts, as a torch file or
    as safetensors, behind any nesting of `_orig_mod.` and `module.`. Sizes that the file does not state are read off
    the shapes; the number of heads cannot be. Non-finite weights are kept: they are findings, not input errors.

    Args:
        path: the checkpoint file.
        n_head: number of heads, for files that do not state it.

    Returns:
        The checkpoint; its tensors are mapped from the file where the container allows it.

    Raises:
        InputError: the file cannot be read, its names are not nanoGPT's, a tensor is missing, has another shape or an
            integer or quantised dtype, or the number of heads is unknown, contradictory, or does not divide n_embd.
    """
    shown = str(path)
    contents = read_contents(path)
    notes = list(contents.notes)
    declared = DeclaredSizes.read(contents, shown, n_head, notes)
    tensors, buffers = model.split_buffers(contents.tensors)
    tied = model.settle_head(tensors, declared.tie_weights, shown, notes)
    sizes = model.settle_sizes(tensors, declared, shown)
    used = model.check_tensors(tensors, model.expected_shapes(sizes), shown)
    if declared.bias is False and sizes.linear_bias:
        notes.append("model_args says bias False but the file holds biases: they are applied")
    if declared.dropout > 0:
        notes.append(f"dropout {declared.dropout:g} forced to 0")
    weight_dtype = model.dtype_names(used)
    if "fp64" in weight_dtype:
        notes.append("FP64 weights are rounded to FP32")
    facts = file_facts("checkpoint", path)
    return NanoGPTCheckpoint(
        config=NanoGPTConfig(
            n_layer=sizes.n_layer,
            n_head=sizes.n_head,
            n_embd=sizes.n_embd,
            block_size=sizes.block_size,
            vocab_size=sizes.vocab_size,
            bias=sizes.linear_bias,
            dropout=declared.dropout,
        ),
        iter_num=contents.iter_num,
        weight_dtype=weight_dtype,
        tied=tied,
        notes=tuple(notes),
        unused_tensors=tuple(name for name in contents.tensors if name not in used and name not in buffers),
        path=shown,
        size_bytes=facts.size_bytes,
        sha256=facts.sha256,
        tensors=used,
    )
