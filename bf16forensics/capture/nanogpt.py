"""Capture of a nanoGPT model: forward once, then backward layer by layer, one record a layer.

On the CPU only the inputs of the layers are kept from the forward pass; each layer is recomputed when its gradient
arrives, so memory holds one layer's tensors plus one [T, C] tensor a layer. On a GPU the layers' graphs are kept where
they fit, which changes no number. Weights need no gradients here: the evidence computes dW_Q itself, head by head.

What the model computes in is up to `activations`: its code is written once.

Shapes: T tokens, C width, H heads, D head size, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from bf16forensics.capture.activations import Activations, Fp32Activations
from bf16forensics.capture.device import CPU, device_words, room_on, turn_on
from bf16forensics.capture.nanogpt_weights import NanoGPTWeights
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.sequence import Labels, SequenceInput
from bf16forensics.capture.source import LossSink
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.batch import IGNORED_LABEL
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTLayer

#: Most bytes that the graph of a layer holds for one element of [T, C], and for one of the attention's [H, T, T], of
#: which no more than so many are kept by any attention.
_LAYER_BYTES, _PAIR_BYTES, _PAIRS = 160, 8, 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTCapture:
    """Runs sequences through a checkpoint and yields their attention records."""

    checkpoint: NanoGPTCheckpoint
    activations: Activations = field(default_factory=Fp32Activations)
    #: Where the model runs and the records lie.
    device: torch.device = CPU
    #: Bytes that the graphs of one sequence may take; None for a share of what is free on a GPU, 0 on the CPU.
    graph_bytes: int | None = None
    _placed: NanoGPTWeights = field(init=False, repr=False)

    def __post_init__(self) -> None:
        placed = NanoGPTWeights(self.checkpoint, self.device, self.activations.product_weight)
        object.__setattr__(self, "_placed", placed)
        # Asked for once: what is free changes from sequence to sequence, and asking takes time.
        if self.graph_bytes is None:
            object.__setattr__(self, "graph_bytes", room_on(self.device))

    @property
    def notes(self) -> tuple[str, ...]:
        """Where and how the model ran, unless on the CPU; more once sequences have been run."""
        if self.device.type == "cpu":
            return ()
        return (f"the model ran on {device_words(self.device)}", *self.activations.notes)

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
        labels = Labels.of(sequence.labels)
        keeps = self._keeps_graphs(len(sequence.ids))
        steps = self._steps(sequence.to(self.device), labels, on_loss, keeps)
        if keeps:
            # Where all graphs fit, so do all records: a GPU is then kept busy from the first layer to the last.
            with turn_on(self.device), strict_fp32():
                records = list(steps)[::-1]
            while records:
                yield records.pop()
        while True:
            with turn_on(self.device), strict_fp32():
                record = next(steps, None)
            if record is None:
                return
            yield record

    def _steps(
        self, sequence: SequenceInput, labels: Labels, on_loss: LossSink, keeps: bool
    ) -> Iterator[AttentionRecord]:
        """Computes one record after the other, each between two yields."""
        geometry = self._geometry(sequence)
        layers = self._forward(sequence, geometry, keeps)
        last = len(layers) - 1
        upstream = torch.zeros(0)
        for index in range(last, -1, -1):
            hidden, half = layers.pop()
            layer = self._placed.layer(index)
            if half is None:
                hidden, half = self._with_graph(layer, hidden, geometry)
            if index == last:
                upstream = self._loss_gradient(self._output(layer, half), sequence, labels, on_loss)
            # The last product of the layer is linear: its gradient needs no output, so that is not computed again. In
            # mixed precision the same casts stand on its way back. The input of layer 0 needs no gradient.
            wanted = (half.o, hidden) if index > 0 else (half.o,)
            with self.activations.arithmetic():
                arriving = (upstream, upstream @ layer.mlp_proj_weight)
            gradients = torch.autograd.grad((half.middle, half.activated), wanted, arriving)
            upstream = gradients[-1]
            record = self._record(index, sequence, labels, geometry, half, gradients[0])
            del hidden, half, gradients
            yield record

    def _loss_gradient(
        self, hidden: torch.Tensor, sequence: SequenceInput, labels: Labels, on_loss: LossSink
    ) -> torch.Tensor:
        """Gradient of the mean loss by the last layer's output; 0 when no token has a label (the loss is nan then)."""
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            loss = self._loss(hidden, sequence)
        on_loss(float(loss.detach()))
        if not labels.any:
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

    def _forward(
        self, sequence: SequenceInput, geometry: Geometry, keeps: bool
    ) -> list[tuple[torch.Tensor, "_HalfLayer | None"]]:
        """Each layer's input, with its graph where graphs are kept; the last layer is not run yet."""
        config, positions = self.checkpoint.config, sequence.position_ids
        if positions is None:
            positions = torch.arange(len(sequence.ids), device=self.device)
        with torch.no_grad():
            hidden = self._placed.embedded(sequence.ids, positions)
            layers: list[tuple[torch.Tensor, _HalfLayer | None]] = []
            for index in range(config.n_layer - 1):
                layer = self._placed.layer(index)
                if keeps:
                    leaf, half = self._with_graph(layer, hidden, geometry)
                    layers.append((leaf, half))
                else:
                    half = self._half_layer(layer, hidden, geometry)
                    layers.append((hidden, None))
                hidden = self._output(layer, half)
        return [*layers, (hidden, None)]

    def _keeps_graphs(self, tokens: int) -> bool:
        config = self.checkpoint.config
        pairs = min(config.n_head * tokens**2, _PAIRS)
        per_layer = _LAYER_BYTES * tokens * config.n_embd + _PAIR_BYTES * pairs
        return per_layer * config.n_layer <= (self.graph_bytes or 0)

    def _with_graph(
        self, layer: NanoGPTLayer, hidden: torch.Tensor, geometry: Geometry
    ) -> tuple[torch.Tensor, "_HalfLayer"]:
        """A leaf in the place of a layer's input, and the layer from there."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            return leaf, self._half_layer(layer, leaf, geometry)

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
        head, width = self._placed.head(), self.checkpoint.config.n_embd
        with self.activations.arithmetic():
            hidden = functional.layer_norm(hidden, (width,), head.norm_weight, head.norm_bias, 1e-5)
            logits = functional.linear(hidden, head.lm_head)
            return functional.cross_entropy(logits, sequence.labels, ignore_index=IGNORED_LABEL)

    def _output(self, layer: NanoGPTLayer, half: "_HalfLayer") -> torch.Tensor:
        """[T, C] the layer's output, outside the graph."""
        with torch.no_grad(), self.activations.arithmetic():
            return half.middle + functional.linear(half.activated, layer.mlp_proj_weight, layer.mlp_proj_bias)

    def _record(
        self,
        layer: int,
        sequence: SequenceInput,
        labels: Labels,
        geometry: Geometry,
        call: "_HalfLayer",
        do: torch.Tensor,
    ) -> AttentionRecord:
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
            labelled=None if labels.all else sequence.labels != IGNORED_LABEL,
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
