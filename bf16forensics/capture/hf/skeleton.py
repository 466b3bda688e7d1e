"""A model whose parameters stand in memory only while the module that owns them runs.

One skeleton serves one thread. A decoder layer is filled just before it runs and emptied when it returns, every other
module likewise with its own parameters; a token embedding only ever holds the rows that occur. What a running graph
has saved lives as long as the graph.

Shapes: N tokens, C width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from bf16forensics.capture.hf.model import HFModel
from bf16forensics.capture.hf.placed import PlacedWeights
from bf16forensics.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What a decoder layer was called with."""

    #: [1, N, C] hidden states.
    hidden: torch.Tensor
    #: Name of the keyword the hidden states came by; None for the first positional argument.
    keyword: str | None
    #: The other arguments.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, layer: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Calls a layer with other hidden states and everything else the same."""
        if self.keyword is None:
            return layer(hidden, *self.args, **self.kwargs)
        return layer(*self.args, **{self.keyword: hidden}, **self.kwargs)


class Observer(Protocol):
    """Sees the layers of a forward pass."""

    def __call__(self, index: int, given: LayerInput, run: "RunLayer", /) -> torch.Tensor:
        """Runs a layer, on the hidden states given or on others; the [1, N, C] tensor that it returns goes on."""


#: A layer as a function of [1, N, C] hidden states, everything else as it was called.
RunLayer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Slot:
    """One parameter or persistent buffer of a module."""

    owner: torch.nn.Module
    attribute: str
    name: str
    empty: torch.Tensor

    def put(self, values: torch.Tensor) -> None:
        if isinstance(self.empty, torch.nn.Parameter):
            parameter = values if values is self.empty else torch.nn.Parameter(values, requires_grad=False)
            self.owner._parameters[self.attribute] = parameter
        else:
            self.owner._buffers[self.attribute] = values

    def clear(self) -> None:
        self.put(self.empty)


class Skeleton:
    """A model of one thread."""

    def __init__(self, model: HFModel, layers: Sequence[str], weights: PlacedWeights) -> None:
        """Starts empty.

        Args:
            model: the model.
            layers: names of its decoder layers in order.
            weights: its weights on the device where it runs; put in where they are needed.
        """
        self.module: Any = model.skeleton()
        _move_tables(self.module, weights.device)
        self._weights = weights
        self._where = model.directory.path
        self._observer: Observer | None = None
        self._parts: dict[str, Any] = dict(self.module.named_modules())
        self._layers = [self._parts[name] for name in layers]
        inside = tuple(f"{name}." for name in layers)
        tokens = self.module.get_input_embeddings()  # type: ignore[operator]
        for index, name in enumerate(layers):
            self._wrap(self._parts[name], self.slots(name), partial(self._run_layer, index))
        for name, part in self._parts.items():
            slots = self._own_slots(name)
            if name in layers or name.startswith(inside) or not slots:
                continue
            if isinstance(part, torch.nn.Embedding) and (part is tokens or type(part) is torch.nn.Embedding):
                # Models ask the table for its device: a table of NaN that takes no memory, where meta would not do.
                nothing = torch.full((), torch.nan, device=weights.device)
                table = torch.nn.Parameter(nothing.expand(part.weight.shape), requires_grad=False)
                slot = replace(slots[0], empty=table)
                slot.clear()
                part.forward = partial(self._look_up, part, part.forward, slot)  # type: ignore[method-assign]
            else:
                self._wrap(part, slots, _run)

    def part(self, name: str) -> Any:
        """A module by its name."""
        return self._parts[name]

    def inside(self, name: str) -> dict[str, Any]:
        """The modules below a module, by their names in the model."""
        return {key: part for key, part in self._parts.items() if key.startswith(f"{name}.")}

    def run_layer(self, index: int, given: LayerInput, hidden: torch.Tensor) -> torch.Tensor:
        """[1, N, C] output of a decoder layer on given hidden states."""
        output = given.call(self._layers[index], hidden)
        return output if isinstance(output, torch.Tensor) else output[0]

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Shows every layer that runs inside the block to an observer."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def slots(self, name: str) -> list[_Slot]:
        """The slots of a module and of everything below it."""
        return [slot for key in (name, *self.inside(name)) for slot in self._own_slots(key)]

    @contextmanager
    def filled(self, slots: Sequence[_Slot]) -> Iterator[None]:
        """Puts weights in, FP32 where they are floating, and takes them out again."""
        try:
            for slot in slots:
                slot.put(self._read(slot))
            yield
        finally:
            for slot in slots:
                slot.clear()

    def _own_slots(self, name: str) -> list[_Slot]:
        part, prefix = self._parts[name], f"{name}." if name else ""
        own = [(key, value) for key, value in part._parameters.items() if value is not None]
        own += [(key, value) for key, value in part._buffers.items() if value is not None and value.is_meta]
        return [_Slot(part, key, prefix + key, value) for key, value in own]

    def _read(self, slot: _Slot) -> torch.Tensor:
        values = self._weights.get(slot.name)
        if values is None:
            raise InputError(f"{self._where}: holds no tensor for {slot.name}, which the forward pass uses")
        # A module may write into its buffers, never into its parameters.
        return values if isinstance(slot.empty, torch.nn.Parameter) else values.clone()

    def _wrap(self, part: Any, slots: list[_Slot], run: Callable[..., Any]) -> None:
        original = part.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.filled(slots):
                return run(original, *args, **kwargs)

        part.forward = forward

    def _run_layer(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._observer is None:
            return original(*args, **kwargs)
        given = _layer_input(args, kwargs)
        if given is None:
            raise InputError(f"{self._where}: layer {index} gets no hidden states by a name that is known here")
        beside: list[tuple[Any, ...]] = []

        def run(hidden: torch.Tensor) -> torch.Tensor:
            output = given.call(original, hidden)
            if isinstance(output, torch.Tensor):
                return output
            if any(part is not None for part in output[1:]):
                raise InputError(f"{self._where}: layer {index} returns several things; it cannot be run alone")
            beside[:] = [tuple(output[1:])]
            return output[0]

        output = self._observer(index, given, run)
        return (output, *beside[0]) if beside else output

    def _look_up(
        self, part: torch.nn.Embedding, original: Callable[..., Any], slot: _Slot, ids: torch.Tensor, *more: Any
    ) -> Any:
        stored = self._weights.table(slot.name)
        if stored is None:
            raise InputError(f"{self._where}: holds no tensor for {slot.name}, which the forward pass uses")
        rows, places = torch.unique(ids, return_inverse=True)
        if int(rows[0]) < 0 or int(rows[-1]) >= len(stored):
            out = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
            raise InputError(f"{self._where}: {slot.name} has {len(stored)} rows; the batch asks for row {out}")
        padding, part.padding_idx = part.padding_idx, None
        slot.put(stored[rows.to(stored.device)].to(ids.device).float())
        try:
            return original(places, *more)
        finally:
            slot.clear()
            part.padding_idx = padding


def _move_tables(module: Any, device: torch.device) -> None:
    """Moves the tensors of a model that are not read from files: tables that its constructor computed."""
    if device.type == "cpu":
        return
    for part in module.modules():
        # Some models keep a second name for a table, outside the buffers.
        for place in (part._buffers, part.__dict__):
            for name, value in place.items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    place[name] = value.to(device)


def _run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerInput | None:
    if args and isinstance(args[0], torch.Tensor):
        return LayerInput(hidden=args[0], keyword=None, args=args[1:], kwargs=dict(kwargs))
    if not args and isinstance(kwargs.get("hidden_states"), torch.Tensor):
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return LayerInput(hidden=kwargs["hidden_states"], keyword="hidden_states", args=(), kwargs=rest)
    return None
