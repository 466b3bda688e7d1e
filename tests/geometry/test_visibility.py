"""Visibility of pairs against its definition, pair by pair, and the range of keys a block must look at."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16forensics.geometry.geometry import Geometry


def sees(geometry: Geometry, head: int, i: int, j: int, num_queries: int, num_keys: int) -> bool:
    """The definition: query i stands at position i + M - N."""
    distance = i + num_keys - num_queries - j
    rules = [
        not geometry.causal or distance >= 0,
        geometry.window is None or -geometry.window < distance < geometry.window,
        geometry.key_padding is None or bool(geometry.key_padding[j]),
        geometry.query_padding is None or bool(geometry.query_padding[i]),
        geometry.document_ids is None or bool(geometry.document_ids[i] == geometry.document_ids[j]),
        geometry.keep is None or bool(geometry.keep[head if geometry.keep.shape[0] > 1 else 0, i, j]),
    ]
    return all(rules)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, int, int]:
    num_queries, num_keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))

    def flags(*shape: int) -> torch.Tensor:
        total = int(torch.tensor(shape).prod())
        return torch.tensor(draw(st.lists(st.booleans(), min_size=total, max_size=total))).view(shape)

    documents = None
    if num_queries == num_keys and draw(st.booleans()):
        documents = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=num_keys, max_size=num_keys)))
    geometry = Geometry(
        scale=1.0,
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 10)),
        key_padding=flags(num_keys) if draw(st.booleans()) else None,
        query_padding=flags(num_queries) if draw(st.booleans()) else None,
        document_ids=documents,
        keep=flags(draw(st.sampled_from([1, 2])), num_queries, num_keys) if draw(st.booleans()) else None,
    )
    return geometry, num_queries, num_keys


@settings(max_examples=150)
@given(given_geometry=geometries(), data=st.data())
def test_visible_is_the_definition_on_any_block(given_geometry: tuple[Geometry, int, int], data: st.DataObject) -> None:
    geometry, num_queries, num_keys = given_geometry
    rows = sorted(data.draw(st.tuples(st.integers(0, num_queries), st.integers(0, num_queries))))
    keys = sorted(data.draw(st.tuples(st.integers(0, num_keys), st.integers(0, num_keys))))
    if rows[0] == rows[1] or keys[0] == keys[1]:
        return
    found = geometry.visible((rows[0], rows[1]), (keys[0], keys[1]), num_queries, num_keys)
    shape = (2, rows[1] - rows[0], keys[1] - keys[0])
    # Counting keys by row needs every column to be there.
    assert found is None or found.shape[1:] == shape[1:]
    whole = torch.ones(shape, dtype=torch.bool) if found is None else found.expand(shape)
    for head in range(2):
        for i in range(*rows):
            for j in range(*keys):
                expected = sees(geometry, head, i, j, num_queries, num_keys)
                assert whole[head, i - rows[0], j - keys[0]].item() == expected


@settings(max_examples=150)
@given(given_geometry=geometries(), data=st.data())
def test_key_range_misses_nothing(given_geometry: tuple[Geometry, int, int], data: st.DataObject) -> None:
    geometry, num_queries, num_keys = given_geometry
    start = data.draw(st.integers(0, num_queries - 1))
    end = data.draw(st.integers(start + 1, num_queries))
    first, last = geometry.key_range(start, end, num_queries, num_keys)
    assert 0 <= first <= last <= num_keys
    for i in range(start, end):
        for j in range(num_keys):
            if not first <= j < last:
                assert not sees(geometry, 0, i, j, num_queries, num_keys)


@settings(max_examples=100)
@given(
    num_queries=st.integers(1, 9),
    num_keys=st.integers(1, 9),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 10),
    data=st.data(),
)
def test_key_range_is_the_smallest(
    num_queries: int, num_keys: int, causal: bool, window: int | None, data: st.DataObject
) -> None:
    """With a causal mask and a window only, both ends of a non-empty range are visible to some row."""
    geometry = Geometry(scale=1.0, causal=causal, window=window)
    start = data.draw(st.integers(0, num_queries - 1))
    end = data.draw(st.integers(start + 1, num_queries))
    seen = [
        j for j in range(num_keys) if any(sees(geometry, 0, i, j, num_queries, num_keys) for i in range(start, end))
    ]
    first, last = geometry.key_range(start, end, num_queries, num_keys)
    assert (first, last) == (seen[0], seen[-1] + 1) if seen else first == last


def test_nothing_hidden_is_none() -> None:
    """A block wholly below the diagonal needs no mask."""
    geometry = Geometry(scale=1.0)
    assert geometry.visible((4, 8), (0, 5), 8, 8) is None
    assert geometry.visible((4, 8), (0, 6), 8, 8) is not None
    assert Geometry(scale=1.0, causal=False).visible((0, 8), (0, 8), 8, 8) is None


def test_causal_is_bottom_right() -> None:
    seen = Geometry(scale=1.0).visible((0, 2), (0, 5), 2, 5)
    assert seen is not None
    assert seen[0].sum(-1).tolist() == [4, 5]
    more = Geometry(scale=1.0).visible((0, 5), (0, 2), 5, 2)
    assert more is not None
    assert more[0].sum(-1).tolist() == [0, 0, 0, 1, 2]


def test_a_window_counts_the_querys_own_position() -> None:
    seen = Geometry(scale=1.0, window=3).visible((0, 6), (0, 6), 6, 6)
    assert seen is not None
    assert seen[0].sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    only = Geometry(scale=1.0, window=1).visible((0, 4), (0, 4), 4, 4)
    assert only is not None
    assert torch.equal(only[0], torch.eye(4, dtype=torch.bool))


def test_heads_take_their_own_masks() -> None:
    keep = torch.rand(6, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    bias = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2))
    geometry = Geometry(scale=2.0, causal=False, keep=keep, bias=bias, window=9)
    part = geometry.for_heads(slice(2, 5))
    assert part.keep is not None
    assert part.bias is not None
    assert torch.equal(part.keep, keep[2:5])
    assert torch.equal(part.bias, bias[2:5])
    assert (part.scale, part.causal, part.window) == (2.0, False, 9)
    common = Geometry(scale=1.0, keep=keep[:1], bias=bias[:1])
    assert common.for_heads(slice(2, 5)) is common
    mixed = Geometry(scale=1.0, keep=keep[:1], bias=bias).for_heads(slice(1, 2))
    assert mixed.keep is not None
    assert mixed.keep.shape[0] == 1
    assert mixed.bias is not None
    assert torch.equal(mixed.bias, bias[1:2])


def test_bias_block() -> None:
    bias = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(3))
    block = Geometry(scale=1.0, bias=bias).bias_block((1, 4), (2, 6))
    assert block is not None
    assert torch.equal(block, bias[:, 1:4, 2:6])
    assert Geometry(scale=1.0).bias_block((0, 1), (0, 1)) is None
