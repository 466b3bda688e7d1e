"""Attention of a captured model on a GPU: PyTorch's FlashAttention kernel where it is the recipe, else the recipe.

The kernel is FlashAttention-2, which the preset `fa2` describes. It is called for sequences of given lengths (varlen),
of which there is one: called for a batch, it would split the keys of a small one over several blocks and combine what
they found, which is another recipe. Everything else goes through `RecipeAttention`, in torch operations on the GPU.

Shapes: H query heads, G key/value heads (H a multiple of G), N queries and keys, D head size.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.fused import FA2
from bf16forensics.recipe.model import Recipe

#: Head sizes that the kernel takes: multiples of this, up to that.
_SIZE_STEP, _SIZE_MOST = 8, 256

_deterministic_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """Differentiable attention of one sequence by a recipe on a GPU, an `Attend` on BF16 tensors.

    The same operands give the same bits in every run on one GPU, forward and backward, as long as no other thread
    starts work on a GPU meanwhile: to make the kernel's backward pass add in a fixed order takes a setting of the whole
    process, under which torch refuses other operations.
    """

    #: Rounding points, tiles and order of both passes.
    recipe: Recipe
    _by_steps: RecipeAttention = field(init=False, repr=False)
    #: What has computed so far: "flash", "recipe".
    _used: set[str] = field(init=False, repr=False, default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_steps", RecipeAttention(self.recipe))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry, /) -> torch.Tensor:
        """Runs the forward pass; the backward pass runs when the gradient of the output arrives.

        Args:
            q: [H, N, D] BF16, on a GPU.
            k: [G, M, D] BF16.
            v: [G, M, E] BF16.
            geometry: masks, scale and score modifiers, on the same device; a bias gets no gradient.

        Returns:
            [H, N, E] BF16, as `RecipeAttention`; by the kernel, rows with NaN operands are NaN too.

        Raises:
            ValueError: as `RecipeAttention`.
        """
        if not is_flash(self.recipe, q, k, v, geometry):
            self._used.add("recipe")
            return self._by_steps(q, k, v, geometry)
        self._used.add("flash")
        o: torch.Tensor = _Flash.apply(q, k, v, geometry.scale, geometry.causal)
        return o

    @property
    def notes(self) -> tuple[str, ...]:
        """What has computed the attention, in one line; empty before the first call."""
        ways = {
            "flash": "SDPA flash (FlashAttention-2, its keys not split)",
            "recipe": f"recipe {self.recipe.name} in torch operations on the GPU",
        }
        used = " and, for the calls that it lacks, ".join(words for name, words in ways.items() if name in self._used)
        return (f"attention of the captured model: {used}",) if used else ()


def is_flash(recipe: Recipe, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> bool:
    """Whether a call by a recipe is what PyTorch's FlashAttention kernel computes for it.

    The kernel is NVIDIA's `fa2`, with as many keys as queries, one head size, no mask but the causal one, and no score
    modifier. One query alone would be computed as several heads' queries against split keys.
    """
    others = (
        geometry.window,
        geometry.softcap,
        geometry.key_padding,
        geometry.query_padding,
        geometry.document_ids,
        geometry.keep,
        geometry.bias,
    )
    size = q.shape[-1]
    return (
        recipe == FA2
        and all(t.is_cuda and t.dtype == torch.bfloat16 for t in (q, k, v))
        and torch.version.cuda is not None
        and all(other is None for other in others)
        and q.shape[1] == k.shape[1] > 1
        and k.shape == v.shape
        and q.shape[0] % k.shape[0] == 0
        and size % _SIZE_STEP == 0
        and size <= _SIZE_MOST
    )


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        # [N, H, D] and [N, G, D], as the kernel has them.
        q, k, v = (_rows_last(t.transpose(0, 1)) for t in (q, k, v))
        tokens = q.shape[0]
        ends = _ends(tokens, q.device)
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, tokens, tokens, 0.0, causal, False, scale=scale
        )
        output, lse, random_state, unused = found[:4]
        ctx.save_for_backward(q, k, v, output, lse, ends, random_state, unused)
        ctx.scale, ctx.causal = scale, causal
        o: torch.Tensor = output.transpose(0, 1)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, output, lse, ends, random_state, unused = ctx.saved_tensors
        tokens = q.shape[0]
        do = gradients[0].transpose(0, 1).contiguous()
        with _in_fixed_order():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                do, q, k, v, output, lse, ends, ends, tokens, tokens, 0.0, ctx.causal, random_state, unused,
                scale=ctx.scale,
            )  # fmt: skip
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1), None, None


def _rows_last(t: torch.Tensor) -> torch.Tensor:
    """The same with its last axis in one piece, as the kernel reads it."""
    return t if t.stride(-1) == 1 else t.contiguous()


@functools.lru_cache(maxsize=8)
def _ends(tokens: int, device: torch.device) -> torch.Tensor:
    """int32 [2]: where the one sequence begins and ends. Kept, because to copy it over takes longer than a layer."""
    return torch.tensor([0, tokens], dtype=torch.int32, device=device)


@contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Makes the kernel add up dQ in a fixed order inside the block, where it takes the order of arrival otherwise.

    The setting is the process's, and in force for one call only: cuBLAS would ask for an environment variable under it.
    """
    with _deterministic_lock:
        wanted, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        # Uninitialised memory would be filled with NaN first, which is for finding mistakes.
        memory: Any = torch.utils.deterministic
        fills = memory.fill_uninitialized_memory
        memory.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(wanted, warn_only=warns)
            memory.fill_uninitialized_memory = fills
