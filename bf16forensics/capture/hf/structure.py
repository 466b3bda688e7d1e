"""What a Hugging Face model's attention looks like, layer by layer.

Shapes: H query heads, G key/value heads, D and E head sizes of q/k and v, C width.
"""

from dataclasses import dataclass

from torch import nn

from bf16forensics.capture.hf.model import HFModel
from bf16forensics.capture.hf.probe import Probed, probe
from bf16forensics.capture.hf.projections import Projection
from bf16forensics.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStructure:
    """One decoder layer."""

    #: Names of the layer and of its attention module.
    layer: str
    attention: str
    #: Where W_Q and W_K are; None where no linear layer projects to the heads one by one.
    query: Projection | None
    key: Projection | None
    #: Whether q is the query projection's output itself, without norm, rotation or reordering.
    is_direct: bool
    #: Whether a norm over all heads together lies between the projection and q.
    is_jointly_normed: bool
    scale: float
    softcap: float | None
    #: Window that the call names; None for none.
    window: int | None
    causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A whole model."""

    layers: tuple[LayerStructure, ...]
    #: H, G, D and E of every layer.
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    #: Whether positions enter by rotation tables.
    has_rotation: bool

    @property
    def width(self) -> int | None:
        """C of the query projections; None where some layer's is not known, or where they differ."""
        widths = {None if layer.query is None else layer.query.width for layer in self.layers}
        return widths.pop() if len(widths) == 1 else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know, one line each."""
        lines = []
        if self.has_rotation:
            lines.append("rotary angles are computed in FP32, whatever the format of the weights")
        for what, missing in (
            ("W_Q is not known, so nothing is coupled to it", [layer.query is None for layer in self.layers]),
            ("W_K is not known, so its norms are missing", [layer.key is None for layer in self.layers]),
        ):
            if any(missing):
                where = layer_words(_where(missing))
                lines.append(f"{what}: no linear layer projects to the heads one by one in {where}")
        joint = _where([layer.is_jointly_normed for layer in self.layers])
        if joint:
            lines.append(
                f"queries are normed over all heads together in {layer_words(joint)}: the gradient of one head's W_Q "
                "holds a part that comes from the other heads' dQ"
            )
        return tuple(lines)


def read_structure(model: HFModel) -> Structure:
    """Probes a model and checks that a capture can follow it layer by layer.

    Args:
        model: the model; its weights are not read.

    Raises:
        InputError: the model does not call the attention function exactly once in each layer of one list, passes to it
            what is not understood, has layers of different sizes, or cannot be run.
    """
    probed = probe(model)
    template = model.template
    layers = _layer_names(template, probed)
    sizes = {call.sizes for call in probed}
    if len(sizes) > 1:
        raise _refusal(template, f"has layers of different sizes: {sorted(sizes)} (heads, kv heads, D, V)")
    heads, kv_heads, size, value_size = sizes.pop()
    # A norm over all heads hides whose column is whose: where none was found, look again with such norms taken out.
    unknown = [call for call in probed if call.query is None or call.key is None]
    norms = frozenset().union(*(call.wide_norms for call in unknown))
    again = probe(model, norms) if norms else probed
    return Structure(
        layers=tuple(
            LayerStructure(
                layer=layer,
                attention=call.attention,
                query=call.query or bare.query,
                key=call.key or bare.key,
                is_direct=call.is_direct,
                is_jointly_normed=call.query is None and bare.query is not None,
                scale=call.scale if model.scale is None else model.scale,
                softcap=model.softcap if call.softcap is None else call.softcap,
                window=call.window,
                causal=call.causal,
            )
            for layer, call, bare in zip(layers, probed, again, strict=True)
        ),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        value_size=value_size,
        has_rotation=any(name.rsplit(".", 1)[-1].endswith("inv_freq") for name, _ in template.named_buffers()),
    )


def layer_words(layers: list[int]) -> str:
    """Ascending layer numbers as text: "layer 3", "layers 0 to 5, 7"."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    words = ", ".join(
        f"{first} to {last}" if last > first + 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in spans
    )
    return f"layer {words}" if len(layers) == 1 else f"layers {words}"


def _layer_names(module: nn.Module, probed: tuple[Probed, ...]) -> list[str]:
    """The names of the decoder layers: the entries of the one list in which each entry made one call, in order."""
    if not probed:
        raise _refusal(module, "never calls the attention function of transformers' attention interface")
    parts = dict(module.named_modules())
    for name, part in parts.items():
        if not isinstance(part, nn.ModuleList):
            continue
        calls = [call.attention for call in probed if call.attention.startswith(f"{name}.")]
        if len(calls) != len(probed):
            continue
        layers = [f"{name}.{index}" for index in range(len(part))]
        of_layer = [sum(call.startswith(f"{layer}.") for call in calls) for layer in layers]
        wrong = [index for index, count in enumerate(of_layer) if count != 1]
        if wrong:
            counts = ", ".join(str(of_layer[index]) for index in wrong[:4])
            raise _refusal(
                module,
                f"must call attention exactly once in each layer; {layer_words(wrong)} made {counts} calls",
            )
        if [call.layer for call in probed] not in ([None] * len(layers), list(range(len(layers)))):
            raise _refusal(module, f"runs its layers out of order: {[call.layer for call in probed][:8]}")
        if any(not call.startswith(f"{layer}.") for layer, call in zip(layers, calls, strict=True)):
            raise _refusal(module, "runs its layers out of order")
        return layers
    raise _refusal(module, "has no list of layers that holds every attention call")


def _refusal(module: nn.Module, what: str) -> InputError:
    return InputError(f"{type(module).__name__} {what}; it cannot be analysed layer by layer")


def _where(flags: list[bool]) -> list[int]:
    return [index for index, flag in enumerate(flags) if flag]
