"""Capture of a nanoGPT model: forward once, then backward layer by layer, one record a layer.

Only the inputs of the layers are kept from the forward pass; each layer is recomputed when its gradient arrives, so
memory holds one layer's tensors plus one [T, C] tensor a layer. Weights need no gradients here: the evidence computes
dW_Q itself, head by head.

`activations` says what the model computes in. "fp32": the model in FP32; at the attention call q, k and v are rounded
to the storage format, the model's own attention runs in FP32 on the rounded values, its output is not rounded; the
record's dO is rounded to the storage format, while the gradient that travels on is not.

Shapes: T tokens, C width, H heads, D head size, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from bf16forensics.capture.exact_attention import exact_attention
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, SourceShape
from bf16forensics.emulate.rounding import round_to
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.batch import IGNORED_LABEL, RecordedBatch
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTLayer

#: Values of `activations`; the first is the default.
ACTIVATIONS = ("fp32",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """One sequence of a recorded batch."""

    #: Position among all sequences analysed, 0-based.
    index: int
    #: Training step; None when unknown.
    step: int | None
    #: [T] int64 token ids.
    ids: torch.Tensor
    #: [T] int64 targets aligned with `ids`; -100 is ignored.
    labels: torch.Tensor
    #: [T] int64 positions; None for 0, 1, 2, ...
    position_ids: torch.Tensor | None = None
    #: [T] bool, True where the token is real; None when nothing is padded.
    real: torch.Tensor | None = None


class _StraightThroughRound(torch.autograd.Function):
    """Rounds in the forward pass and hands the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, storage: str) -> torch.Tensor:
        rounded = round_to(values, storage)
        return values.clone() if rounded is values else rounded

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTCapture:
    """Runs sequences through a checkpoint and yields their attention records."""

    checkpoint: NanoGPTCheckpoint
    #: Storage format of q, k, v and dO at the attention call.
    storage: str = "bf16"
    activations: str = "fp32"

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer by head, FP32."""
        config, loaded = self.checkpoint.config, self.checkpoint.layer(layer)
        width, heads = config.n_embd, config.n_head
        w_q, w_k, _ = loaded.c_attn_weight.split(width, dim=0)
        shape = (heads, width // heads, width)
        return LayerWeights(layer=layer, w_q=w_q.reshape(shape), w_k=w_k.reshape(shape))

    def sequence_records(self, sequence: SequenceInput, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Yields the records of one sequence, last layer first.

        The loss is the mean over the sequence's own labelled tokens, so that sequences are exchangeable.

        Args:
            sequence: token ids and targets.
            on_loss: called with the mean loss before the first record; nan when no token has a label.

        Yields:
            One record a layer; `do` is zero everywhere when no token has a label.
        """
        model = self.checkpoint
        geometry = self._geometry(sequence)
        last = model.config.n_layer - 1
        for index in range(last, -1, -1):
            with strict_fp32():
                if index == last:
                    inputs = self._forward(sequence, geometry)
                with torch.enable_grad():
                    hidden = inputs[index].detach().requires_grad_()
                    layer_output, call = self._layer(model.layer(index), hidden, geometry)
                    if index == last:
                        loss = self._loss(layer_output, sequence)
                        on_loss(float(loss.detach()))
                        upstream = self._loss_gradient(loss, layer_output, sequence)
                # The input of layer 0 needs no gradient; nothing above the attention call of layer 0 is wasted on it.
                wanted = (call.o, hidden) if index > 0 else (call.o,)
                gradients = torch.autograd.grad(layer_output, wanted, upstream)
                upstream = gradients[-1]
                record = self._record(index, sequence, geometry, call, gradients[0])
            yield record

    @staticmethod
    def _loss_gradient(loss: torch.Tensor, hidden: torch.Tensor, sequence: SequenceInput) -> torch.Tensor:
        """Gradient of the loss by the last layer's output; 0 when no token has a label (the loss is nan then)."""
        if bool((sequence.labels == IGNORED_LABEL).all()):
            return torch.zeros_like(hidden)
        return torch.autograd.grad(loss, hidden, retain_graph=True)[0]

    def _geometry(self, sequence: SequenceInput) -> Geometry:
        head_size = self.checkpoint.config.n_embd // self.checkpoint.config.n_head
        return Geometry(
            scale=1.0 / math.sqrt(head_size),
            causal=True,
            key_padding=sequence.real,
            query_padding=sequence.real,
        )

    def _forward(self, sequence: SequenceInput, geometry: Geometry) -> list[torch.Tensor]:
        model = self.checkpoint
        positions = sequence.position_ids
        if positions is None:
            positions = torch.arange(len(sequence.ids))
        with torch.no_grad():
            hidden = model.wte[sequence.ids].float() + model.wpe[positions].float()
            inputs = [hidden]
            for index in range(model.config.n_layer - 1):
                hidden, _ = self._layer(model.layer(index), hidden, geometry)
                inputs.append(hidden)
        return inputs

    def _layer(self, layer: NanoGPTLayer, hidden: torch.Tensor, geometry: Geometry) -> tuple[torch.Tensor, "_Call"]:
        width, heads = self.checkpoint.config.n_embd, self.checkpoint.config.n_head
        tokens = hidden.shape[0]
        x = functional.layer_norm(hidden, (width,), layer.ln_1_weight, layer.ln_1_bias, 1e-5)
        qkv = functional.linear(x, layer.c_attn_weight, layer.c_attn_bias)
        q, k, v = (
            _StraightThroughRound.apply(part.view(tokens, heads, width // heads).transpose(0, 1), self.storage)
            for part in qkv.split(width, dim=1)
        )
        o = exact_attention(q, k, v, geometry)
        joined = o.transpose(0, 1).reshape(tokens, width)
        hidden = hidden + functional.linear(joined, layer.attn_proj_weight, layer.attn_proj_bias)
        mlp = functional.layer_norm(hidden, (width,), layer.ln_2_weight, layer.ln_2_bias, 1e-5)
        mlp = functional.gelu(functional.linear(mlp, layer.fc_weight, layer.fc_bias))
        hidden = hidden + functional.linear(mlp, layer.mlp_proj_weight, layer.mlp_proj_bias)
        return hidden, _Call(x=x, q=q, k=k, v=v, o=o)

    def _loss(self, hidden: torch.Tensor, sequence: SequenceInput) -> torch.Tensor:
        model = self.checkpoint
        bias = model.ln_f_bias
        hidden = functional.layer_norm(hidden, (model.config.n_embd,), model.ln_f_weight, bias, 1e-5)
        logits = functional.linear(hidden, model.lm_head)
        return functional.cross_entropy(logits, sequence.labels, ignore_index=IGNORED_LABEL)

    def _record(
        self, layer: int, sequence: SequenceInput, geometry: Geometry, call: "_Call", do: torch.Tensor
    ) -> AttentionRecord:
        labelled = sequence.labels != IGNORED_LABEL
        return AttentionRecord(
            layer=layer,
            sequence=sequence.index,
            step=sequence.step,
            storage=self.storage,
            q=call.q.detach().contiguous(),
            k=call.k.detach().contiguous(),
            v=call.v.detach().contiguous(),
            do=round_to(do, self.storage).contiguous(),
            x=call.x.detach(),
            geometry=geometry,
            labelled=None if bool(labelled.all()) else labelled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Tensors of one attention call, still part of the graph."""

    #: [T, C]
    x: torch.Tensor
    #: [H, T, D] each
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTSource:
    """A nanoGPT checkpoint over a recorded batch, as a `RecordSource`."""

    capture: NanoGPTCapture
    batch: RecordedBatch

    @property
    def shape(self) -> SourceShape:
        """Geometry of the model and of the batch."""
        config = self.capture.checkpoint.config
        lines = self.batch.line_of_sequence
        groups = tuple(_group(lines[i], self.batch.steps[i]) for i in range(self.batch.num_sequences))
        return SourceShape(
            num_layers=config.n_layer,
            num_heads=config.n_head,
            num_kv_heads=config.n_head,
            head_size=config.n_embd // config.n_head,
            width=config.n_embd,
            num_queries=self.batch.num_tokens,
            steps=self.batch.steps,
            groups=groups,
            step_sequences=self.batch.step_sequences,
        )

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer by head."""
        return self.capture.weights(layer)

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Runs one sequence of the batch."""
        batch = self.batch
        return self.capture.sequence_records(
            SequenceInput(
                index=sequence,
                step=batch.steps[sequence],
                ids=batch.ids[sequence],
                labels=batch.labels[sequence],
                position_ids=None if batch.position_ids is None else batch.position_ids[sequence],
                real=None if batch.attention_mask is None else batch.attention_mask[sequence],
            ),
            on_loss,
        )


def _group(line: int | None, step: int | None) -> int:
    """Sequences of one line, or of one step where there are no lines, belong together."""
    if line is not None:
        return line
    return 0 if step is None else step
