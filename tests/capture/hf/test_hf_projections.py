"""Finding W_Q on the graph: layouts that are not per head, norms over heads, mixed positions, moved columns."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.capture.hf.projections import find_projection, is_direct, is_linear, linear_shape, owners
from bf16forensics.capture.hf.structure import layer_words

TOKENS, HEADS, SIZE = 8, 6, 4
WIDTH = HEADS * SIZE


def output(width: int = WIDTH) -> torch.Tensor:
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(7)).requires_grad_()


def split(values: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    return values.view(TOKENS, heads, -1).transpose(0, 1)


def normed(values: torch.Tensor) -> torch.Tensor:
    return values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(values: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(1.0, TOKENS + 1)[:, None]
    first, second = values.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


BLOCKS = torch.arange(WIDTH).view(HEADS, SIZE)


@pytest.mark.parametrize(
    ("layout", "width", "columns"),
    [
        (split, WIDTH, BLOCKS),
        (lambda r: turned(normed(split(r))), WIDTH, BLOCKS),
        (lambda r: split(r.clamp(-1.0, 1.0)), WIDTH, BLOCKS),
        # q, k and v one after the other; of each head in turn; a gate beside each head.
        (lambda r: turned(split(r.chunk(3, -1)[0])), 3 * WIDTH, BLOCKS),
        (lambda r: turned(r.view(TOKENS, HEADS, 3, SIZE)[:, :, 0].transpose(0, 1)), 3 * WIDTH,
         BLOCKS + 2 * SIZE * torch.arange(HEADS)[:, None]),
        (lambda r: r.view(TOKENS, HEADS, 2 * SIZE)[..., :SIZE].transpose(0, 1), 2 * WIDTH,
         BLOCKS + SIZE * torch.arange(HEADS)[:, None]),
        # Heads by the last axis.
        (lambda r: r.view(TOKENS, SIZE, HEADS).permute(2, 0, 1), WIDTH, torch.arange(WIDTH).view(SIZE, HEADS).T),
        # Heads in reverse order.
        (lambda r: split(r).flip(0), WIDTH, BLOCKS.flip(0)),
    ],
    ids=["plain", "norm and rotation", "clipped", "fused", "interleaved", "gated", "head last", "reversed"],
)  # fmt: skip
def test_columns_of_each_head_are_found(layout: Callable[..., Any], width: int, columns: torch.Tensor) -> None:
    raw = output(width)
    linear = torch.nn.Linear(3, width)
    found = find_projection(layout(raw), {"a.q": raw, "a.v": output()}, {"a.q": linear, "a.v": linear})
    assert found is not None
    assert (found.module, found.width, found.transposed) == ("a.q", 3, False)
    assert torch.equal(found.columns, columns)
    weight = torch.arange(width * 3.0).view(width, 3)
    assert torch.equal(found.weight_by_head({"a.q.weight": weight}), weight[columns])


@pytest.mark.parametrize("heads", [1, 2, 16, 17, 40, 300])
def test_any_number_of_heads_is_told_apart(heads: int) -> None:
    raw = output(heads * 2)
    found = owners(split(raw, heads) * 3.0, raw)
    assert found is not None
    assert found.tolist() == [head for head in range(heads) for _ in range(2)]


@pytest.mark.parametrize(
    "layout",
    [
        lambda r: split(normed(r)),
        lambda r: split(r) + split(r).mean(0),
        lambda r: split(r).cumsum(1),
        lambda r: split(r)[:3].repeat_interleave(2, 0),
        lambda r: torch.zeros_like(split(r)),
        lambda r: split(r) + split(r).roll(1, 1),
    ],
    ids=["norm over heads", "mean of heads", "sum over positions", "shared by heads", "unused", "convolved"],
)
def test_what_is_not_per_head_is_not_taken_for_it(layout: Callable[..., Any]) -> None:
    raw = output()
    linear = torch.nn.Linear(3, WIDTH)
    assert owners(layout(raw) + 0.0 * raw.sum(), raw) is None
    assert find_projection(layout(raw) + 0.0 * raw.sum(), {"q": raw}, {"q": linear}) is None


def test_two_projections_are_one_too_many_and_none_is_none() -> None:
    first, second = output(), output()
    modules = {name: torch.nn.Linear(3, WIDTH) for name in "ab"}
    assert find_projection(split(first) + split(second), {"a": first, "b": second}, modules) is None
    assert find_projection(split(first), {}, {}) is None


def test_a_part_of_a_head_is_enough_for_keys() -> None:
    nope, shared = output(), output(2)
    keys = torch.cat([split(nope), shared[None].expand(HEADS, -1, -1)], -1)
    found = find_projection(keys, {"up": nope, "down": shared}, {n: torch.nn.Linear(3, WIDTH) for n in ("up", "down")})
    assert found is not None
    assert found.module == "up"
    assert torch.equal(found.columns, BLOCKS)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (split, True),
        (lambda r: split(r.clone().split(WIDTH, -1)[0]), True),
        (lambda r: split(r).contiguous(), True),
        (lambda r: split(r) * 1.0, False),
        (lambda r: turned(split(r)), False),
        (lambda r: split(r)[..., torch.arange(SIZE - 1, -1, -1)], False),
        (lambda r: split(r).flip(0), False),
    ],
    ids=["reshaped", "split", "copied", "scaled", "rotated", "reordered", "heads reversed"],
)
def test_q_itself_is_told_from_what_was_computed(layout: Callable[..., Any], expected: bool) -> None:
    raw = output()
    assert is_direct(layout(raw), raw, BLOCKS) is expected


def test_linear_layers_of_both_orientations(hf: ModuleType) -> None:
    from transformers.pytorch_utils import Conv1D

    class Other(torch.nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values) * 2.0

    assert (is_linear(torch.nn.Linear(3, 5)), linear_shape(torch.nn.Linear(3, 5))) == (True, (5, 3))
    assert (is_linear(Conv1D(5, 3)), linear_shape(Conv1D(5, 3))) == (True, (5, 3))
    assert not is_linear(Other(3, 5))
    assert not is_linear(torch.nn.LayerNorm(3))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True))
def test_layer_words_name_every_layer_once(layers: list[int]) -> None:
    layers.sort()
    words = layer_words(layers)
    said: list[int] = []
    for part in words.removeprefix("layers ").removeprefix("layer ").split(", "):
        first, _, last = part.partition(" to ")
        said += range(int(first), int(last or first) + 1)
    assert said == layers
