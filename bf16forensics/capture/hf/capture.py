"""Capture of a Hugging Face causal language model: one record a layer for each sequence, in any number of threads.

Weights need no gradients here: the evidence computes dW_Q itself, head by head.

Shapes: H query heads, G key/value heads.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bf16forensics.capture.activations import Activations
from bf16forensics.capture.device import CPU, device_words, room_on, turn_on
from bf16forensics.capture.hf.attention import register_attention
from bf16forensics.capture.hf.held import storages
from bf16forensics.capture.hf.masks import SequenceMasks
from bf16forensics.capture.hf.model import HFModel
from bf16forensics.capture.hf.placed import PlacedWeights
from bf16forensics.capture.hf.sequence_run import SequenceRun
from bf16forensics.capture.hf.skeleton import Skeleton
from bf16forensics.capture.hf.structure import Structure, layer_words, read_structure
from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.capture.source import LossSink
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError

#: Bytes of the graphs of layers that a sequence keeps from its forward pass; the other layers are run again.
GRAPH_BUDGET_BYTES = 256 * 2**20


class _Found:
    """What running sequences told about a model; written by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept_layers: set[int] = set()
        self._has_documents = False
        #: A whole sequence went through with every layer run by itself.
        self.is_followed = False

    def add(self, masks: SequenceMasks) -> None:
        """Adds what one sequence told."""
        with self._lock:
            self._kept_layers |= masks.kept_layers
            self._has_documents |= masks.has_documents

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each thing found, whatever the order of the sequences."""
        with self._lock:
            lines = []
            if self._has_documents:
                lines.append("a new document starts wherever a position is not the one before it plus 1")
            if self._kept_layers:
                where = layer_words(sorted(self._kept_layers))
                lines.append(f"visibility is the model's own mask in {where}: neither causal nor a window describes it")
            return tuple(lines)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HFCapture:
    """Runs sequences through a Hugging Face model and yields their attention records. Made by `hf_capture`."""

    model: HFModel
    activations: Activations
    structure: Structure
    #: The model's weights on the device where it runs; the records lie there too.
    placed: PlacedWeights
    _threads: threading.local = field(default_factory=threading.local, repr=False)
    _found: _Found = field(default_factory=_Found, repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of how the model is run; more once sequences have been run."""
        where = tuple[str, ...]()
        if self.placed.device.type != "cpu":
            where = (f"the model ran on {device_words(self.placed.device)}", *self.activations.notes)
        return (*self.structure.notes, *self._found.notes, *where)

    def weights(self, layer: int) -> LayerWeights:
        """W_Q and W_K of a layer by head, FP32; fields None where no linear layer projects to the heads one by one."""
        place = self.structure.layers[layer]
        w_q, w_k = (
            None if projection is None else projection.weight_by_head(self.model.weights)
            for projection in (place.query, place.key)
        )
        return LayerWeights(layer=layer, w_q=w_q, w_k=w_k)

    def sequence_records(self, sequence: SequenceInput, on_loss: LossSink) -> Iterator[AttentionRecord]:
        """Yields the records of one sequence, last layer first.

        The loss is the mean over the sequence's own labelled tokens, so that sequences are exchangeable.

        Args:
            sequence: token ids and targets.
            on_loss: called with the mean loss before the first record; nan when no token has a label; never called
                where the model has no output head.

        Yields:
            One record a layer; `do` is zero everywhere when no token has a label, and None without an output head.

        Raises:
            InputError: the model cannot take the sequence, or does something that a capture cannot follow.
        """
        device = self.placed.device
        room = max(GRAPH_BUDGET_BYTES, room_on(device)) if self._found.is_followed else 0
        apart = storages((*self.model.directory.tensors.values(), *self.placed.kept()))
        run = SequenceRun(
            self.model, self.structure, self.activations, sequence.to(device), graph_bytes=room, apart=apart
        )
        with turn_on(device), strict_fp32(), _weights_in_place(self.model):
            upstream = run.forward(self.skeleton(), on_loss)
        self._found.add(run.masks)
        for _ in self.structure.layers:
            with turn_on(device), strict_fp32():
                record, upstream = run.layer(self.skeleton(), upstream)
            yield record
        self._found.is_followed = True

    def skeleton(self) -> Skeleton:
        """The model of the calling thread, made on its first use."""
        found: Skeleton | None = getattr(self._threads, "skeleton", None)
        if found is None:
            found = Skeleton(self.model, [layer.layer for layer in self.structure.layers], self.placed)
            self._threads.skeleton = found
        return found


@contextmanager
def _weights_in_place(model: HFModel) -> Iterator[None]:
    """Names what torch says of a weight that a model reads outside the module that owns it."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise InputError(
            f"{model.directory.path}: {type(model.template).__name__} uses a weight outside the module that owns it; "
            "it cannot be run with weights read where they are needed"
        ) from error


def hf_capture(model: HFModel, activations: Activations, device: torch.device = CPU) -> HFCapture:
    """Finds out how a model's attention is built and makes its capture.

    Args:
        model: the checked model.
        activations: what it computes in.
        device: where it runs; its attention is looked at on the CPU.

    Raises:
        InputError: the model cannot be captured layer by layer.
    """
    register_attention()
    placed = PlacedWeights(model.weights, device)
    return HFCapture(model=model, activations=activations, structure=read_structure(model), placed=placed)
