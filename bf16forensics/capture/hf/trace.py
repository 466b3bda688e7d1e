"""The way from the query projection's output to q, as the model's own operations in FP32.

While a layer runs, the outputs of the linear layers of its attention module are noted. The module's forward is then
run once more with these outputs handed out instead of products, up to the attention call: norms, rotations and
reshapes are computed, nothing else. Outside any emulation of a lower precision, so the derivative is that of the model
and not that of its rounding.

Shapes: N tokens, C inputs and F outputs of the query projection, H query heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bf16forensics.capture.hf.attention import AttentionCall, handling
from bf16forensics.capture.hf.projections import is_linear
from bf16forensics.capture.hf.skeleton import Skeleton
from bf16forensics.capture.hf.structure import LayerStructure
from bf16forensics.capture.path import QueryPath
from bf16forensics.errors import ForensicsError


@dataclass(slots=True)
class Watched:
    """What went through an attention module up to and including its last linear layer."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: First input and output of every linear layer that ran, by name; outside any graph.
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


class _Reached(Exception):
    """The attention call was reached; nothing after it is wanted."""

    def __init__(self, q: torch.Tensor) -> None:
        super().__init__()
        self.q = q


@contextmanager
def watching(skeleton: Skeleton, attention: str) -> Iterator[Watched]:
    """Notes what goes through an attention module inside the block."""
    watched = Watched()

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watched.args = tuple(_detached(value) for value in args)
        watched.kwargs = {name: _detached(value) for name, value in kwargs.items()}

    def leave(name: str, given: torch.Tensor, output: torch.Tensor) -> None:
        watched.inputs[name] = given.detach()
        # A copy: some models clip what a projection gave them in place.
        watched.outputs[name] = output.detach().clone()

    handles = [skeleton.part(attention).register_forward_pre_hook(enter, with_kwargs=True)]
    for name, part in skeleton.inside(attention).items():
        if is_linear(part):
            handles.append(
                part.register_forward_hook(lambda _, given, output, name=name: leave(name, given[0], output))
            )
    try:
        yield watched
    finally:
        for handle in handles:
            handle.remove()


def query_path(skeleton: Skeleton, layer: LayerStructure, watched: Watched) -> QueryPath | None:
    """The path of one call.

    Args:
        skeleton: the model of this thread.
        layer: where the projection is.
        watched: what went through the attention module in this call.

    Returns:
        None where W_Q is not known, and where q is W_Q x itself.
    """
    if layer.query is None or layer.is_direct:
        return None
    answers = {name: output.float() for name, output in watched.outputs.items()}
    output = answers[layer.query.module]
    raw = output.reshape(-1, output.shape[-1]).clone().requires_grad_()
    with torch.enable_grad():
        # A copy, so that a model which writes into the projection's output does not write into the leaf.
        answers[layer.query.module] = raw.clone().view(output.shape)
    inside = skeleton.inside(layer.attention)
    silent = {name for name, part in inside.items() if is_linear(part)}
    slots = [slot for slot in skeleton.slots(layer.attention) if slot.name.rpartition(".")[0] not in silent]
    with torch.enable_grad(), handling(_reach), _answering(inside, silent, answers), skeleton.filled(slots):
        try:
            skeleton.part(layer.attention)(*watched.args, **watched.kwargs)
        except _Reached as reached:
            query = reached.q
        else:
            raise ForensicsError(f"{layer.attention} did not call attention when it was run again")
    return QueryPath(raw=raw, query=query.float(), columns=layer.query.columns.to(raw.device))


def _reach(call: AttentionCall) -> torch.Tensor:
    raise _Reached(call.q)


@contextmanager
def _answering(inside: dict[str, Any], silent: set[str], answers: dict[str, torch.Tensor]) -> Iterator[None]:
    """Makes linear layers hand out what they gave before."""
    parts = {name: inside[name] for name in silent & answers.keys()}
    for name, part in parts.items():
        part.forward = lambda *_, answer=answers[name], **__: answer
    try:
        yield
    finally:
        for part in parts.values():
            del part.forward


def _detached(value: Any) -> Any:
    """The same outside any graph, tensors inside tuples too."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple):
        return tuple(_detached(part) for part in value)
    return value
