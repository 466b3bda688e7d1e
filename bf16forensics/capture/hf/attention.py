"""The attention function that transformers' models call while they are captured, and the mask function beside it.

A model reaches them by name, through the registries of transformers, with no edit of the model. The call is handed to
the handler of its thread. What the function does not know it refuses: an argument that changes numerics and is ignored
would make every number wrong without a sign.

Shapes: B sequences (1 here), H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bf16forensics.capture.hf.library import ATTENTION_NAME, library
from bf16forensics.errors import ForensicsError, InputError

#: Arguments that change no number of a forward pass without a cache: bookkeeping, and what has been used before.
_HARMLESS = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
#: Arguments that `read_call` itself uses.
_UNDERSTOOD = frozenset({"scaling", "softcap", "sliding_window", "is_causal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call as the model made it, for the one sequence of its batch."""

    #: The attention module that called.
    module: torch.nn.Module
    #: [H, N, D], [G, M, D], [G, M, E]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    #: [1 or H, N, M]: bool, True where visible, or floating and added to the scores; None where the model gives none.
    mask: torch.Tensor | None
    #: Softmax scale; 1 / sqrt(D) where the model says nothing.
    scale: float
    softcap: float | None
    #: Visible keys of a sliding window as the model names it, the query's own included.
    window: int | None
    causal: bool

    @property
    def layer(self) -> int | None:
        """The layer that the module believes to be in."""
        index = getattr(self.module, "layer_idx", None)
        return index if isinstance(index, int) else None


class Handler(Protocol):
    """Takes the calls of a thread while it is active."""

    def __call__(self, call: AttentionCall, /) -> torch.Tensor:
        """[H, N, E] attention output."""


class _Thread(threading.local):
    handler: Handler | None = None


_thread = _Thread()
_register_lock = threading.Lock()


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Sends the attention calls of this thread to a handler inside the block. Nests; the outer one comes back."""
    outer, _thread.handler = _thread.handler, handler
    try:
        yield
    finally:
        _thread.handler = outer


def register_attention() -> None:
    """Makes the two functions known to transformers under `ATTENTION_NAME`; doing it again changes nothing.

    Raises:
        InputError: transformers is missing or too old.
    """
    with _register_lock:
        library("modeling_utils").AttentionInterface.register(ATTENTION_NAME, _attention)
        library("masking_utils").AttentionMaskInterface.register(ATTENTION_NAME, _mask)


def read_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, Any],
) -> AttentionCall:
    """Checks a call and puts it into our words.

    Args:
        module: the attention module.
        query: [1, H, N, D].
        key: [1, G, M, D].
        value: [1, G, M, E].
        attention_mask: [1, 1 or H, N, M] or None.
        arguments: every other argument.

    Raises:
        InputError: an argument that may change numbers and is not understood, or shapes that do not fit together.
    """
    where = _where(module)
    for name, argument in arguments.items():
        if argument is None or name in _UNDERSTOOD or name in _HARMLESS or (name == "dropout" and argument == 0):
            continue
        raise InputError(
            f"{where} passes {name!r} to attention, which is not understood here and may change its result; "
            "this model cannot be analysed"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if query.shape[0] != 1 or value.shape[:3] != key.shape[:3] or query.shape[-1] != key.shape[-1] or heads % kv_heads:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise InputError(f"{where} calls attention with q, k, v of shapes {shapes}, which do not fit together")
    if attention_mask is not None:
        expected = (heads, query.shape[2], key.shape[2])
        fits = attention_mask.ndim == 4 and attention_mask.shape[0] == 1 and attention_mask.shape[1] in (1, heads)
        if not fits or tuple(attention_mask.shape[2:]) != expected[1:]:
            raise InputError(
                f"{where} calls attention with a mask of shape {list(attention_mask.shape)} for {list(expected)} scores"
            )
    scale, causal, softcap = (arguments.get(name) for name in ("scaling", "is_causal", "softcap"))
    window = arguments.get("sliding_window")
    return AttentionCall(
        module=module,
        q=query[0],
        k=key[0],
        v=value[0],
        mask=None if attention_mask is None else attention_mask[0],
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        window=None if window is None else int(window),
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
    )


def _where(module: torch.nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Signature of transformers' attention functions: [1, N, H, E], and no weights."""
    handler = _thread.handler
    if handler is None:
        raise ForensicsError(f"the attention {ATTENTION_NAME!r} computes only while a capture is running")
    output = handler(read_call(module, query, key, value, attention_mask, arguments))
    return output.transpose(0, 1).unsqueeze(0), None


def _mask(*args: Any, **arguments: Any) -> torch.Tensor:
    """The model's own mask, always in full: bool [B, 1, N, M], True where the pair is visible."""
    arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask: torch.Tensor = library("masking_utils").sdpa_mask(*args, **arguments)
    return mask
