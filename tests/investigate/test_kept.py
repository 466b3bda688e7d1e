"""What a case keeps of a head is that head's call, masks included."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bf16forensics.capture.path import QueryPath
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.investigate.kept import kept_records
from bf16forensics.recipe.presets import FA2

Make = Callable[..., Any]


def kept(source: Any, heads: list[tuple[int, int]], sequences: int = 2) -> Any:
    probes = [record for records in source.sequences[:sequences] for record in reversed(records)]
    return kept_records(source, probes, heads, FA2)


def test_tensors_are_those_of_the_head_and_its_keys(make_source: Make) -> None:
    source = make_source(kv_heads=2)
    first, second = kept(source, [(1, 3), (0, 0)])
    assert (first.name, second.name) == ("L1.H3", "L0.H0")
    assert (first.layer, first.head, first.recipe, first.storage) == (1, 3, "fa2", "bf16")
    assert (first.sequences, first.steps) == ((0, 1), (100, 100))
    for index in range(2):
        record = source.sequences[index][1]
        assert torch.equal(first.q[index], record.q[3])
        assert torch.equal(first.k[index], record.k[1])
        assert torch.equal(first.v[index], record.v[1])
        assert torch.equal(first.do[index], record.do[3])
        assert torch.equal(first.x[index], record.x)
    assert torch.equal(first.w_q, source.layer_weights[1].w_q[3])
    assert torch.equal(first.w_k, source.layer_weights[1].w_k[1])
    assert (first.mask, first.key_padding, first.document_ids) == (None, None, None)
    assert (first.causal, first.window, first.softcap) == (True, None, None)


def test_x_is_left_out_where_it_does_not_lead_to_w_q_by_itself(make_source: Make) -> None:
    source = make_source()
    for sequence in range(4):
        raw = torch.zeros(20, 16, requires_grad=True)
        path = QueryPath(
            raw=raw, query=raw.unflatten(-1, (2, 8)).transpose(0, 1) * 2, columns=torch.arange(16).view(2, 8)
        )
        source.change(0, sequence, query_path=path)
    rotated, plain = kept(source, [(0, 1), (1, 1)])
    assert rotated.x is None
    assert plain.x is not None


def test_a_mask_of_some_sequences_hides_nothing_in_the_others(make_source: Make) -> None:
    source = make_source()
    real = torch.arange(20) >= 3
    source.change(0, 1, geometry=Geometry(scale=0.5, key_padding=real, document_ids=torch.arange(20) // 5))
    source.change(0, 0, geometry=Geometry(scale=0.5, keep=torch.zeros(1, 20, 20, dtype=torch.bool)))
    (found,) = kept(source, [(0, 1)])
    assert torch.equal(found.key_padding, torch.stack([torch.ones_like(real), real]))
    assert torch.equal(found.document_ids, torch.stack([torch.zeros(20, dtype=torch.int64), torch.arange(20) // 5]))
    assert not found.mask[0].any()
    assert found.mask[1].all()


def test_unknown_tensors_stay_unknown(make_source: Make) -> None:
    source = make_source()
    for sequence in range(4):
        source.change(0, sequence, do=None, x=None)
    source.layer_weights[0] = replace(source.layer_weights[0], w_q=None, w_k=None)
    (found,) = kept(source, [(0, 1)])
    assert (found.do, found.x, found.w_q, found.w_k) == (None, None, None, None)


@pytest.mark.parametrize("by_head", [False, True])
def test_masks_are_those_of_the_head(make_source: Make, by_head: bool) -> None:
    source = make_source()
    generator = torch.Generator().manual_seed(1)
    shape = (4 if by_head else 1, 20, 20)
    for sequence in range(4):
        keep = torch.rand(shape, generator=generator) > 0.3
        bias = torch.randn(shape, generator=generator)
        source.change(0, sequence, geometry=Geometry(scale=0.5, keep=keep, window=9, softcap=4.0))
        source.change(1, sequence, geometry=Geometry(scale=0.5, keep=keep, bias=bias, causal=False))
    only_keep, both = kept(source, [(0, 2), (1, 2)])
    assert (only_keep.window, only_keep.softcap, only_keep.scale) == (9, 4.0, 0.5)
    assert not both.causal
    for sequence in range(2):
        geometry = source.sequences[sequence][1].geometry
        at = 2 if by_head else 0
        assert torch.equal(only_keep.mask[sequence], geometry.keep[at])
        assert torch.equal(both.mask[sequence], geometry.bias[at].masked_fill(~geometry.keep[at], -torch.inf))


def test_padding_and_documents_are_kept_by_sequence(make_source: Make) -> None:
    source = make_source()
    for sequence in range(4):
        padding, documents = torch.arange(20) > sequence, torch.arange(20) // (5 + sequence)
        geometry = Geometry(scale=0.5, key_padding=padding, query_padding=padding, document_ids=documents)
        source.change(0, sequence, geometry=geometry)
    (found,) = kept(source, [(0, 0)])
    for sequence in range(2):
        assert torch.equal(found.key_padding[sequence], torch.arange(20) > sequence)
        assert torch.equal(found.document_ids[sequence], torch.arange(20) // (5 + sequence))


def test_nothing_held_keeps_nothing(make_source: Make) -> None:
    assert kept(make_source(), [(0, 0)], sequences=0) == ()
    assert kept(make_source(), []) == ()
