"""The loss and its gradient by the last layer's output, through the model's own head, in pieces where logits are large.

Shapes: T tokens, C width, V vocabulary.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import functional

from bf16forensics.load.batch import IGNORED_LABEL

#: Makes a context anew each time.
Context = Callable[[], AbstractContextManager[Any]]

#: Logits computed at once at most; a few tensors of this size live together.
_ELEMENTS = 2**26


class LossHead:
    """A causal language model from its input to the gradient by the output of its last layer."""

    def __init__(self, model: Any, arguments: dict[str, Any], labels: torch.Tensor) -> None:
        """Args: model, a causal language model; arguments of its forward; labels, [T] aligned with the tokens."""
        self._model = model
        self._arguments = arguments
        self._labels = labels
        self._labelled = torch.nonzero(labels != IGNORED_LABEL).flatten()
        vocabulary = int(model.config.vocab_size)
        self._rows = max(1, _ELEMENTS // vocabulary)
        takes_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self.in_pieces = takes_rows and len(labels) * vocabulary > _ELEMENTS

    def whole(self, leaf: list[torch.Tensor], observed: Context, arithmetic: Context) -> tuple[float, torch.Tensor]:
        """Mean loss and its gradient by the last layer's output, with all logits at once.

        Args:
            leaf: holds that output once a forward pass inside `observed` has put it there.
            observed: what the layers run in.
            arithmetic: what every operation of the model runs in.

        Returns:
            (loss, [1, T, C] gradient); (nan, 0) without a label.
        """
        with observed(), arithmetic():
            logits = self._model(**self._arguments).logits[0].float()
            loss = functional.cross_entropy(logits, self._labels, ignore_index=IGNORED_LABEL)
        if not len(self._labelled):
            return float(loss.detach()), torch.zeros_like(leaf[0])
        return float(loss.detach()), torch.autograd.grad(loss, leaf[0])[0]

    def pieces(
        self, leaf: list[torch.Tensor], observed: Context, arithmetic: Context
    ) -> tuple[float, torch.Tensor] | None:
        """The same for one piece of the labelled tokens after the other; None where the head does not allow it."""
        with observed(), arithmetic():
            body = self._model.base_model(**self._arguments)
        hidden = body.last_hidden_state
        gradient, loss = torch.zeros_like(hidden), 0.0
        if not len(self._labelled):
            return float("nan"), torch.zeros_like(leaf[0])
        for rows in self._labelled.split(self._rows):
            given = copy.copy(body)
            given.last_hidden_state = hidden.detach().requires_grad_()
            with arithmetic(), _answering(self._model.base_model, given) as asked:
                logits = self._model(**self._arguments, logits_to_keep=rows).logits[0].float()
                if not asked or len(logits) != len(rows):
                    return None
                part = functional.cross_entropy(logits, self._labels[rows], reduction="sum") / len(self._labelled)
            loss += float(part.detach())
            gradient += torch.autograd.grad(part, given.last_hidden_state)[0]
        return loss, torch.autograd.grad(hidden, leaf[0], gradient)[0]


@contextmanager
def _answering(body: Any, output: Any) -> Iterator[list[bool]]:
    """Makes a module hand out a finished output; the list is filled once it was asked."""
    asked: list[bool] = []
    original = body.__dict__.get("forward")

    def forward(*_: Any, **__: Any) -> Any:
        asked.append(True)
        return output

    body.forward = forward
    try:
        yield asked
    finally:
        if original is None:
            del body.forward
        else:
            body.forward = original
