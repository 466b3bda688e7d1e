"""One sequence on its way through a Hugging Face model: forward once, then backward layer by layer.

The model's own forward runs once. The graphs of its first layers are kept as far as a budget reaches; of the others
only the inputs are, and each is run again when its gradient arrives. So memory holds the budget, one layer's tensors
and weights, and one [T, C] tensor a layer.

Shapes: T tokens, C width, H query heads, D and E head sizes of q/k and v.
"""

import inspect
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bf16forensics.capture.activations import Activations
from bf16forensics.capture.hf.attention import AttentionCall, handling
from bf16forensics.capture.hf.head import LossHead
from bf16forensics.capture.hf.held import counting
from bf16forensics.capture.hf.masks import SequenceMasks
from bf16forensics.capture.hf.model import HFModel
from bf16forensics.capture.hf.skeleton import LayerInput, Observer, RunLayer, Skeleton
from bf16forensics.capture.hf.structure import LayerStructure, Structure
from bf16forensics.capture.hf.trace import Watched, query_path, watching
from bf16forensics.capture.path import QueryPath
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.capture.source import LossSink
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.batch import IGNORED_LABEL


@dataclass(slots=True)
class _Call:
    """The attention call of one layer, still part of the graph; None until it was made."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    o: torch.Tensor | None = None
    geometry: Geometry | None = None


@dataclass(slots=True)
class _Layer:
    """A layer that has run with its graph."""

    #: The leaf it started from, and what it gave.
    hidden: torch.Tensor
    output: torch.Tensor
    call: _Call
    watched: Watched


class _Enough(Exception):
    """Without a loss, nothing after the attention call is wanted."""


class SequenceRun:
    """The run of one sequence. The skeleton is given anew to each step: steps may run in different threads."""

    def __init__(
        self,
        model: HFModel,
        structure: Structure,
        activations: Activations,
        sequence: SequenceInput,
        *,
        graph_bytes: int = 0,
        apart: frozenset[int] = frozenset(),
    ) -> None:
        """Starts before the forward pass.

        Args:
            model: the model.
            structure: how its attention is built.
            activations: what it computes in.
            sequence: token ids and targets, on the device of the skeletons.
            graph_bytes: room for the graphs of layers. Without any, a layer that takes tensors from another one shows
                itself when it is run again.
            apart: addresses of storages that do not count as part of a graph, those of the weights.
        """
        self._model = model
        self._structure = structure
        self._activations = activations
        self._sequence = sequence
        real = sequence.real
        # Padding that pads nothing is left out, as fused kernels leave it out: the model then tells documents apart.
        self._real = None if real is None or bool(real.all()) else real
        self._inputs: list[LayerInput] = []
        self._graphs: dict[int, _Layer] = {}
        self._room = graph_bytes
        self._apart = apart
        labelled = sequence.labels != IGNORED_LABEL
        self._labelled = None if bool(labelled.all()) else labelled
        #: The geometries of the sequence's attention calls.
        self.masks = SequenceMasks(self._real, sequence.position_ids)

    def forward(self, skeleton: Skeleton, on_loss: LossSink) -> torch.Tensor | None:
        """Keeps the layers' inputs; gradient of the mean loss by the last layer's output, None without a loss."""
        model, arithmetic = skeleton.module, self._activations.arithmetic
        leaf: list[torch.Tensor] = []
        observed = partial(skeleton.observed, self._observer(skeleton, leaf))
        # Nothing that a layer hands on requires a gradient, so no graph reaches over several layers.
        with torch.enable_grad(), handling(self._attend):
            if not self._model.has_output_head:
                with observed(), arithmetic():
                    model.base_model(**self._arguments(model.base_model))
                return None
            head = LossHead(model, self._arguments(model), self._sequence.labels)
            found = head.pieces(leaf, observed, arithmetic) if head.in_pieces else None
            if found is None:
                self._inputs.clear()
                self._graphs.clear()
                leaf.clear()
                found = head.whole(leaf, observed, arithmetic)
        loss, gradient = found
        on_loss(loss)
        return gradient

    def layer(self, skeleton: Skeleton, upstream: torch.Tensor | None) -> tuple[AttentionRecord, torch.Tensor | None]:
        """The next layer's record, last layer first, and the gradient by its input.

        Args:
            skeleton: the model of this thread.
            upstream: [1, T, C] gradient by the layer's output; None without a loss.
        """
        given = self._inputs.pop()
        index = len(self._inputs)
        place = self._structure.layers[index]
        ran = self._graphs.pop(index, None)
        if ran is None:
            with torch.enable_grad(), self._activations.arithmetic():
                ran = self._run(skeleton, index, given.hidden, partial(skeleton.run_layer, index, given))
        call, watched = ran.call, ran.watched
        path = query_path(skeleton, place, watched)
        do, further = None, None
        if upstream is not None and call.o is not None:
            # The input of layer 0 needs no gradient.
            wanted = (call.o, ran.hidden) if index > 0 else (call.o,)
            gradients = torch.autograd.grad(ran.output, wanted, upstream)
            do, further = self._activations.output_gradient(gradients[0]).contiguous(), gradients[-1]
        return self._record(index, call, do, self._projected(place, watched), path), further

    def _run(self, skeleton: Skeleton, index: int, hidden: torch.Tensor, run: RunLayer) -> _Layer:
        """Runs a layer with its graph, from a leaf of its own."""
        hidden = hidden.detach().requires_grad_()
        call, output = _Call(), hidden
        with (
            handling(lambda made: self._keep(made, call, index)),
            watching(skeleton, self._structure.layers[index].attention) as watched,
            suppress(_Enough),
        ):
            output = run(hidden)
        return _Layer(hidden=hidden, output=output, call=call, watched=watched)

    def _forward_layer(self, skeleton: Skeleton, index: int, given: LayerInput, run: RunLayer) -> torch.Tensor:
        """A layer's output in the forward pass; with its graph while there is room for more of them."""
        if self._room <= 0 or not self._model.has_output_head:
            return run(given.hidden)
        with counting(self._apart) as held:
            ran = self._run(skeleton, index, given.hidden, run)
        held.add(*ran.watched.inputs.values(), *ran.watched.outputs.values())
        self._room -= held.bytes
        if self._room >= 0:
            self._graphs[index] = ran
        return ran.output.detach()

    def _observer(self, skeleton: Skeleton, leaf: list[torch.Tensor]) -> Observer:
        """Runs the layers, keeps their inputs, and puts a leaf in the place of the last layer's output."""
        last = len(self._structure.layers) - 1
        before: list[torch.Tensor] = []

        def observe(index: int, given: LayerInput, run: RunLayer) -> torch.Tensor:
            if index != len(self._inputs) or (index > 0 and given.hidden is not before[0]):
                raise InputError(
                    f"{self._model.family} changes hidden states between layers {index - 1} and {index}; "
                    "it cannot be analysed layer by layer"
                )
            output = self._forward_layer(skeleton, index, given, run)
            self._inputs.append(given)
            if index == last:
                leaf.append(output.detach().requires_grad_(self._model.has_output_head))
                return leaf[0]
            before[:] = [output]
            return output

        return observe

    def _arguments(self, runner: Any) -> dict[str, Any]:
        sequence = self._sequence
        arguments: dict[str, Any] = {"input_ids": sequence.ids[None], "use_cache": False}
        if self._real is not None:
            arguments["attention_mask"] = self._real[None].long()
        if sequence.position_ids is not None:
            arguments["position_ids"] = sequence.position_ids[None]
        taken = inspect.signature(type(runner).forward).parameters
        for name in arguments:
            if name not in taken and name != "use_cache":
                raise InputError(f"{type(runner).__name__} takes no {name}; leave it out of the batch")
        return arguments

    def _geometry(self, made: AttentionCall) -> Geometry:
        return self.masks.geometry(made, scale=self._model.scale, softcap=self._model.softcap)

    def _attend(self, made: AttentionCall) -> torch.Tensor:
        # The model's operations are emulated, those of its attention are given.
        with strict_fp32():
            operands = self._activations.operands(made.q, made.k, made.v)
            return self._activations.attend(*operands, self._geometry(made))

    def _keep(self, made: AttentionCall, call: _Call, index: int) -> torch.Tensor:
        """Attention of the layer that is run again; what it saw and gave goes into `call`."""
        name = type(made.module).__name__
        if call.q is not None or made.layer not in (None, index):
            raise InputError(f"{name} of layer {made.layer} calls attention again while layer {index} runs")
        for what, values in (("queries", made.q), ("keys", made.k), ("values", made.v)):
            # A gradient that leaves by another way than the hidden states would be lost.
            if not values.requires_grad:
                raise InputError(f"{name} of layer {index} takes its {what} from another layer; it cannot be run alone")
        with strict_fp32():
            call.geometry = self._geometry(made)
            call.q, call.k, call.v = self._activations.operands(made.q, made.k, made.v)
            if not self._model.has_output_head:
                raise _Enough
            call.o = self._activations.attend(call.q, call.k, call.v, call.geometry)
        return call.o

    def _projected(self, place: LayerStructure, watched: Watched) -> torch.Tensor | None:
        """[T, C] input of the query projection as the product read it; None where W_Q is not known."""
        if place.query is None:
            return None
        given = watched.inputs[place.query.module].reshape(-1, place.query.width)
        return self._activations.projection_input(given)

    def _record(
        self,
        index: int,
        call: _Call,
        do: torch.Tensor | None,
        x: torch.Tensor | None,
        path: QueryPath | None,
    ) -> AttentionRecord:
        if call.q is None or call.k is None or call.v is None or call.geometry is None:
            raise InputError(f"layer {index} of {self._model.family} made no attention call when it was run again")
        return AttentionRecord(
            layer=index,
            sequence=self._sequence.index,
            step=self._sequence.step,
            storage=self._activations.storage,
            q=call.q.detach().float().contiguous(),
            k=call.k.detach().float().contiguous(),
            v=call.v.detach().float().contiguous(),
            do=do,
            x=x,
            geometry=call.geometry,
            labelled=self._labelled,
            query_path=path,
        )
