"""Capture of a nanoGPT model: forward once, then backward layer by layer, one record a layer.

Only the inputs of the layers are kept from the forward pass; each layer is recomputed when its gradient arrives, so
memory holds one layer's tensors plus one [T, C] tensor a layer. Weights need no gradients here: the evidence computes
dW_Q itself, head by head.

What the model computes in is up to `activations`: its code is written once.

Shapes: T tokens, C width, H heads, D head size, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from bf16forensics.capture.activations import Activations, Fp32Activations
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.capture.source import LossSink
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.batch import IGNORED_LABEL
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTCapture:
    """Runs sequences through a checkpoint and yields their attention records."""

    checkpoint: NanoGPTCheckpoint
    activations: Activations = field(default_factory=Fp32Activations)

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
        upstream = torch.zeros(0)
        for index in range(last, -1, -1):
            with strict_fp32():
                if index == last:
                    inputs = self._forward(sequence, geometry)
                layer = model.layer(index)
                with torch.enable_grad():
                    hidden = inputs[index].detach().requires_grad_()
                    half = self._half_layer(layer, hidden, geometry)
                if index == last:
                    upstream = self._loss_gradient(self._output(layer, half), sequence, on_loss)
                # The last product of the layer is linear: its gradient needs no output, so that is not computed again.
                # In mixed precision the same casts stand on its way back. The input of layer 0 needs no gradient.
                wanted = (half.o, hidden) if index > 0 else (half.o,)
                with self.activations.arithmetic():
                    arriving = (upstream, upstream @ layer.mlp_proj_weight)
                gradients = torch.autograd.grad((half.middle, half.activated), wanted, arriving)
                upstream = gradients[-1]
                record = self._record(index, sequence, geometry, half, gradients[0])
            yield record

    def _loss_gradient(self, hidden: torch.Tensor, sequence: SequenceInput, on_loss: LossSink) -> torch.Tensor:
        """Gradient of the mean loss by the last layer's output; 0 when no token has a label (the loss is nan then)."""
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            loss = self._loss(hidden, sequence)
        on_loss(float(loss.detach()))
        if bool((sequence.labels == IGNORED_LABEL).all()):
            return torch.zeros_like(hidden)
        return torch.autograd.grad(loss, hidden)[0]

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
                layer = model.layer(index)
                hidden = self._output(layer, self._half_layer(layer, hidden, geometry))
                inputs.append(hidden)
        return inputs

    def _half_layer(self, layer: NanoGPTLayer, hidden: torch.Tensor, geometry: Geometry) -> "_HalfLayer":
        """A layer without its last product."""
        width, heads = self.checkpoint.config.n_embd, self.checkpoint.config.n_head
        tokens = hidden.shape[0]
        with self.activations.arithmetic():
            x = functional.layer_norm(hidden, (width,), layer.ln_1_weight, layer.ln_1_bias, 1e-5)
            qkv = functional.linear(x, layer.c_attn_weight, layer.c_attn_bias)
            parts = (part.view(tokens, heads, width // heads).transpose(0, 1) for part in qkv.split(width, dim=1))
            q, k, v = self.activations.operands(*parts)
            o = self.activations.attend(q, k, v, geometry)
            joined = o.transpose(0, 1).reshape(tokens, width)
            middle = hidden + functional.linear(joined, layer.attn_proj_weight, layer.attn_proj_bias)
            mlp = functional.layer_norm(middle, (width,), layer.ln_2_weight, layer.ln_2_bias, 1e-5)
            activated = functional.gelu(functional.linear(mlp, layer.fc_weight, layer.fc_bias))
        return _HalfLayer(x=x, q=q, k=k, v=v, o=o, middle=middle, activated=activated)

    def _loss(self, hidden: torch.Tensor, sequence: SequenceInput) -> torch.Tensor:
        model = self.checkpoint
        bias = model.ln_f_bias
        with self.activations.arithmetic():
            hidden = functional.layer_norm(hidden, (model.config.n_embd,), model.ln_f_weight, bias, 1e-5)
            logits = functional.linear(hidden, model.lm_head)
            return functional.cross_entropy(logits, sequence.labels, ignore_index=IGNORED_LABEL)

    def _output(self, layer: NanoGPTLayer, half: "_HalfLayer") -> torch.Tensor:
        """[T, C] the layer's output, outside the graph."""
        with torch.no_grad(), self.activations.arithmetic():
            return half.middle + functional.linear(half.activated, layer.mlp_proj_weight, layer.mlp_proj_bias)

    def _record(
        self, layer: int, sequence: SequenceInput, geometry: Geometry, call: "_HalfLayer", do: torch.Tensor
    ) -> AttentionRecord:
        labelled = sequence.labels != IGNORED_LABEL
        return AttentionRecord(
            layer=layer,
            sequence=sequence.index,
            step=sequence.step,
            storage=self.activations.storage,
            q=call.q.detach().float().contiguous(),
            k=call.k.detach().float().contiguous(),
            v=call.v.detach().float().contiguous(),
            do=self.activations.output_gradient(do).contiguous(),
            x=self.activations.projection_input(call.x),
            geometry=geometry,
            labelled=None if bool(labelled.all()) else labelled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HalfLayer:
    """A layer up to its last product, still part of the graph."""

    #: [T, C]
    x: torch.Tensor
    #: [H, T, D] each
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    #: [T, C] after the attention, [T, 4C] after the activation of the MLP.
    middle: torch.Tensor
    activated: torch.Tensor
