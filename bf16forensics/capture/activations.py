"""What the captured model computes in, as one object that a capture asks at the attention call.

"fp32": the model in FP32. q, k and v are rounded to the storage format at the attention call, the model's own attention
runs in FP32 on the rounded values, its output is not rounded; the record's dO is rounded, while the gradient that
travels on is not.

"amp-bf16": BF16 mixed precision as CUDA autocast does it. Linear layers and matrix products take and give BF16, norms,
softmax and loss are FP32, and attention runs forward and backward by a recipe, on BF16 operands. On a GPU it is CUDA
autocast itself, on the CPU its emulation.

Shapes: H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bf16forensics.capture.exact_attention import exact_attention
from bf16forensics.emulate.autocast import CudaAutocast
from bf16forensics.emulate.rounding import round_to
from bf16forensics.geometry.geometry import Geometry

#: Names a user may give; the first is the default.
ACTIVATIONS = ("amp-bf16", "fp32")


class Attend(Protocol):
    """Differentiable attention of one sequence."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry, /) -> torch.Tensor:
        """[H, N, D], [G, M, D], [G, M, E] to [H, N, E], in the dtype of q."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of how it was computed; may grow with every call."""


class Activations(Protocol):
    """How a captured model computes."""

    @property
    def name(self) -> str:
        """One of `ACTIVATIONS`."""

    @property
    def storage(self) -> str:
        """Format of q, k, v and dO at the attention call."""

    def arithmetic(self) -> AbstractContextManager[Any]:
        """The context that the model's operations run in, forward and graph building."""

    def operands(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as attention gets them: values of the storage format, differentiable."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Attention of the captured model on `operands`."""

    def projection_input(self, x: torch.Tensor) -> torch.Tensor:
        """X as the query projection multiplies it, FP32, outside the graph."""

    def output_gradient(self, do: torch.Tensor) -> torch.Tensor:
        """dO of the record from the gradient that arrived at the output of `attend`: FP32, values of the storage."""

    def product_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as its products may hold it from the start: another format that changes no result, or the same."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of how the model computed; may grow while it runs."""


class StraightThroughRound(torch.autograd.Function):
    """Rounds in the forward pass and hands the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, storage: str) -> torch.Tensor:
        """Rounded values; a clone where the format changes nothing."""
        rounded = round_to(values, storage)
        return values.clone() if rounded is values else rounded

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it came."""
        return gradients[0], None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Activations:
    """The model in FP32."""

    storage: str = "bf16"

    @property
    def name(self) -> str:
        """fp32."""
        return "fp32"

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Nothing special: the operations as they are."""
        return nullcontext()

    def operands(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rounded, with the gradient passing unchanged."""
        return (
            StraightThroughRound.apply(q, self.storage),
            StraightThroughRound.apply(k, self.storage),
            StraightThroughRound.apply(v, self.storage),
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Exact attention in FP32; its output is not rounded."""
        return exact_attention(q, k, v, geometry)

    def projection_input(self, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return x.detach().float()

    def output_gradient(self, do: torch.Tensor) -> torch.Tensor:
        """Rounded to the storage format."""
        return round_to(do.float(), self.storage)

    def product_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return weight

    @property
    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpActivations:
    """BF16 mixed precision: the model under CUDA autocast, emulated where there is no GPU, attention by a recipe."""

    #: Attention by the recipe, forward and backward, BF16 in and out.
    by_recipe: Attend
    #: Whether the model runs on a GPU, under autocast itself.
    on_gpu: bool = False

    @property
    def name(self) -> str:
        """amp-bf16."""
        return "amp-bf16"

    @property
    def storage(self) -> str:
        """bf16."""
        return "bf16"

    def arithmetic(self) -> AbstractContextManager[Any]:
        """CUDA autocast to BF16, or its emulation."""
        # Without its cache: no weight asks for a gradient, and only casts of such weights would be kept.
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.on_gpu else CudaAutocast()

    def operands(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cast to BF16, as autocast casts the operands of attention."""
        return q.to(torch.bfloat16), k.to(torch.bfloat16), v.to(torch.bfloat16)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The recipe, forward and backward."""
        return self.by_recipe(q, k, v, geometry)

    def projection_input(self, x: torch.Tensor) -> torch.Tensor:
        """Cast to BF16, as autocast casts the operands of a linear layer."""
        return round_to(x.detach().float(), "bf16")

    def output_gradient(self, do: torch.Tensor) -> torch.Tensor:
        """BF16 already."""
        return do.float()

    def product_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """BF16 where autocast would cast it anew at every product; as it is for the emulation, which does so itself."""
        return weight.bfloat16() if self.on_gpu else weight

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the attention."""
        return self.by_recipe.notes
