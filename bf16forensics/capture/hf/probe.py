"""Finding out how a model's attention is built, without its weights: one forward pass over a few made-up tokens.

Linear layers and embeddings answer with random numbers, so no weight is read and no product computed; everything
between them (norms, rotations, reshapes, masks, the calls themselves) is the model's own. What arrives at the attention
function tells heads, sizes, scale, window and soft-cap of each layer, and its graph tells where W_Q is.

Shapes: N tokens, F outputs of a linear layer, H query heads, E head size of v.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bf16forensics.capture.hf.attention import AttentionCall, handling, register_attention
from bf16forensics.capture.hf.library import quiet
from bf16forensics.capture.hf.model import HFModel
from bf16forensics.capture.hf.projections import Projection, find_projection, is_direct, is_linear, linear_shape
from bf16forensics.errors import ForensicsError, InputError

_TOKENS = 8
#: Spread of the made-up outputs: small, so that no clipping of q cuts them off.
_SPREAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """One attention call of the probe."""

    #: Name of the attention module, and the layer it believes to be in.
    attention: str
    layer: int | None
    #: H, G, D, E.
    sizes: tuple[int, int, int, int]
    scale: float
    softcap: float | None
    window: int | None
    causal: bool
    query: Projection | None
    key: Projection | None
    #: Whether q is the query projection's output, merely reshaped.
    is_direct: bool
    #: Norms of the module that are as wide as the whole output of one of its linear layers.
    wide_norms: frozenset[str]


def probe(model: HFModel, without: frozenset[str] = frozenset()) -> tuple[Probed, ...]:
    """The attention calls of a forward pass over made-up tokens, in order.

    Args:
        model: the model; its weights are not touched.
        without: names of modules that hand their input on unchanged.

    Raises:
        InputError: the model passes to attention what is not understood, or cannot be run on made-up numbers.
    """
    register_attention()
    module: Any = model.skeleton()
    run = _Run(module)
    run.prepare(without)
    runner = module if model.has_output_head else module.base_model
    tokens = torch.zeros((1, _TOKENS), dtype=torch.int64)
    try:
        with torch.enable_grad(), quiet(), handling(run.attend):
            runner(input_ids=tokens, use_cache=False)
    except ForensicsError:
        raise
    # Made-up numbers may make a model of some family fail in any way.
    except Exception as error:
        said = " ".join(str(error).split())[:160]
        raise InputError(
            f"{model.directory.path}: the forward pass of {type(module).__name__} cannot be followed "
            f"({type(error).__name__}: {said})"
        ) from error
    return tuple(run.calls)


class _Run:
    def __init__(self, module: torch.nn.Module) -> None:
        self._modules: dict[str, Any] = dict(module.named_modules())
        self._names = {id(part): name for name, part in self._modules.items()}
        self._generator = torch.Generator().manual_seed(0)
        self._outputs: dict[str, torch.Tensor] = {}
        self.calls: list[Probed] = []

    def prepare(self, without: frozenset[str]) -> None:
        """Replaces the forward of every module that has weights, or gives it made-up ones."""
        for name, module in self._modules.items():
            weights = dict(module.named_parameters(recurse=False))
            if name in without:
                module.forward = _first_argument
            elif is_linear(module):
                module.forward = partial(self._linear, name, linear_shape(module)[0])
            elif isinstance(module, torch.nn.Embedding):
                module.forward = partial(self._embed, module.embedding_dim)  # type: ignore[method-assign]
            elif any(weight.ndim > 2 for weight in weights.values()) and not any(map(is_linear, module.modules())):
                # Stacked experts: far more numbers than anything else, and nothing that attention depends on.
                module.forward = _zeros_like_first
            else:
                _make_up(module, weights, self._generator)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Notes a call; the output is 0."""
        name = self._names[id(call.module)]
        inside = {key: module for key, module in self._modules.items() if key.startswith(f"{name}.")}
        outputs = {key: self._outputs[key] for key in inside if key in self._outputs}
        query, key = (find_projection(values, outputs, inside) for values in (call.q, call.k))
        self.calls.append(
            Probed(
                attention=name,
                layer=call.layer,
                sizes=(call.q.shape[0], call.k.shape[0], call.q.shape[2], call.v.shape[2]),
                scale=call.scale,
                softcap=call.softcap,
                window=call.window,
                causal=call.causal,
                query=query,
                key=key,
                is_direct=query is not None and is_direct(call.q, outputs[query.module], query.columns),
                wide_norms=_wide_norms(inside, {output.shape[-1] for output in outputs.values()}),
            )
        )
        return call.q.new_zeros((*call.q.shape[:2], call.v.shape[2]))

    def _linear(self, name: str, width: int, values: torch.Tensor) -> torch.Tensor:
        output = self._draw(values[..., 0].numel(), width)
        if len(output) == _TOKENS:
            self._outputs[name] = output.requires_grad_()
        # A copy: a model may write into what a linear layer gave it, but not into a leaf.
        return output.clone().view(*values.shape[:-1], width)

    def _embed(self, width: int, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self._draw(*ids.shape, width)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * _SPREAD


def _make_up(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    """Gives a module's own parameters and persistent buffers values; large ones are one number seen everywhere."""
    for name, weight in weights.items():
        if weight.ndim > 1:
            values = torch.full((), _SPREAD).expand(weight.shape)
        else:
            values = 1.0 + _SPREAD * torch.randn(weight.shape, generator=generator)
        module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)


def _wide_norms(inside: Mapping[str, torch.nn.Module], widths: set[int]) -> frozenset[str]:
    found = set()
    for name, module in inside.items():
        weights = list(module.parameters(recurse=False))
        if weights and not is_linear(module) and all(weight.ndim == 1 and len(weight) in widths for weight in weights):
            found.add(name)
    return frozenset(found)


def _first_argument(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return values


def _zeros_like_first(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(values)
