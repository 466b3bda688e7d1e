"""Records from raw tensors: shapes, scale, masks, padding, documents, weights, refusals."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.capture.raw import RawGeometry, RawSource, raw_source
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.errors import InputError
from bf16forensics.load.records import RawRecord, load_record

Make = Callable[..., RawRecord]
B, H, G, N, M, D, E, C = 3, 4, 2, 5, 7, 8, 6, 16


def draw(seed: int, *shape: int) -> np.ndarray:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().float().numpy()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a record and loads it; `square` gives as many keys as queries."""

    def load(*, square: bool = False, **extra: Any) -> RawRecord:
        keys = N if square else M
        arrays = {"q": draw(1, B, H, N, D), "k": draw(2, B, G, keys, D), "v": draw(3, B, G, keys, E)}
        arrays["do"] = draw(4, B, H, N, E)
        arrays |= extra
        path = tmp_path / "record.npz"
        np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
        return load_record(path, layout="bhtd")

    return load


def records(source: RawSource) -> list[AttentionRecord]:
    losses: list[float] = []
    found = [record for i in range(source.shape.num_sequences) for record in source.records(i, losses.append)]
    assert losses == []
    return found


def test_shape_and_records(make: Make) -> None:
    raw = make()
    source = raw_source(raw, RawGeometry())
    shape = source.shape
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_size) == (1, H, G, D)
    assert (shape.num_queries, shape.width, shape.num_sequences, shape.step_sequences) == (N, None, B, B)
    assert shape.steps == (None,) * B
    assert shape.groups == (0,) * B
    for index, record in enumerate(records(source)):
        assert (record.layer, record.sequence, record.step, record.storage) == (0, index, None, "bf16")
        for name in ("q", "k", "v", "do"):
            value = getattr(record, name)
            assert torch.equal(value, getattr(raw, name)[index]), name
            assert value.is_contiguous()
        assert record.x is None
        assert record.labelled is None
        assert record.geometry.causal
        assert record.geometry.keep is None
        assert record.geometry.bias is None


def test_records_can_be_asked_for_in_any_order_and_again(make: Make) -> None:
    source = raw_source(make(), RawGeometry())
    for index in (2, 0, 2):
        (record,) = source.records(index, lambda loss: None)
        assert record.sequence == index
        assert torch.equal(record.q, source.raw.q[index])


def test_scale_comes_from_the_option_then_the_file_then_the_head_size(make: Make) -> None:
    assert raw_source(make(), RawGeometry()).scale == pytest.approx(1 / math.sqrt(D), rel=1e-15)
    stored = make(scale=np.float64(0.25))
    assert raw_source(stored, RawGeometry()).scale == 0.25
    assert raw_source(stored, RawGeometry(scale=0.5)).scale == 0.5
    assert records(raw_source(stored, RawGeometry(scale=0.5)))[1].geometry.scale == 0.5


def test_options_reach_the_geometry(make: Make) -> None:
    options = RawGeometry(causal=False, window=3, softcap=20.0)
    geometry = records(raw_source(make(), options))[0].geometry
    assert (geometry.causal, geometry.window, geometry.softcap) == (False, 3, 20.0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": math.inf}, "softcap"),
    ],
)
def test_impossible_options_are_refused_before_anything_runs(make: Make, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        raw_source(make(), RawGeometry(**options))


def test_boolean_mask_by_sequence_and_head(make: Make) -> None:
    mask = np.random.default_rng(1).random((B, H, N, M)) < 0.5
    for index, record in enumerate(records(raw_source(make(mask=mask), RawGeometry(causal=False)))):
        assert record.geometry.keep is not None
        assert torch.equal(record.geometry.keep, torch.from_numpy(mask[index]))
        assert record.geometry.bias is None


@pytest.mark.parametrize("shape", [(N, M), (1, 1, N, M), (1, H, N, M), (B, 1, N, M)])
def test_masks_shared_by_sequences_or_heads(make: Make, shape: tuple[int, ...]) -> None:
    mask = np.random.default_rng(2).random(shape) < 0.5
    whole = np.broadcast_to(mask if mask.ndim == 4 else mask[None, None], (B, H, N, M))
    for index, record in enumerate(records(raw_source(make(mask=mask), RawGeometry()))):
        keep = record.geometry.keep
        assert keep is not None
        assert torch.equal(keep.expand(H, N, M), torch.from_numpy(whole[index].copy()))


def test_additive_mask_is_split_into_visibility_and_bias(make: Make) -> None:
    mask = np.random.default_rng(3).standard_normal((B, H, N, M)).astype(np.float32)
    mask[1, 2, 3, 4] = -np.inf
    mask[0, 0, 0, 0] = np.finfo(np.float32).min
    found = records(raw_source(make(mask=mask), RawGeometry()))
    keep = torch.stack([record.geometry.keep for record in found])  # type: ignore[misc]
    bias = torch.stack([record.geometry.bias for record in found])  # type: ignore[misc]
    assert (~keep).nonzero().tolist() == [[0, 0, 0, 0], [1, 2, 3, 4]]
    assert torch.equal(bias[keep], torch.from_numpy(mask)[keep])
    assert (bias[~keep] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_impossible_additive_mask_names_the_file(make: Make, value: float) -> None:
    mask = np.zeros((N, M), np.float32)
    mask[0, 0] = value
    with pytest.raises(InputError, match=r"record\.npz: additive mask") as caught:
        raw_source(make(mask=mask), RawGeometry())
    assert "\n" not in str(caught.value)


def test_padding_holds_for_keys_and_for_the_queries_at_their_positions(make: Make) -> None:
    real = np.ones((B, M), bool)
    real[0, :3] = False
    real[1, -2:] = False
    for index, record in enumerate(records(raw_source(make(key_padding=real), RawGeometry()))):
        assert record.geometry.key_padding is not None
        assert record.geometry.query_padding is not None
        assert record.geometry.key_padding.tolist() == real[index].tolist()
        # Queries are the last five of the seven positions.
        assert record.geometry.query_padding.tolist() == real[index, 2:].tolist()


def test_padding_with_more_queries_than_keys_says_nothing_about_queries(make: Make) -> None:
    raw = make(k=draw(2, B, G, 3, D), v=draw(3, B, G, 3, E), key_padding=np.array([[True, True, False]] * B))
    geometry = records(raw_source(raw, RawGeometry()))[0].geometry
    assert geometry.query_padding is None
    assert geometry.key_padding is not None


def test_documents(make: Make) -> None:
    ids = np.array([[0, 0, 1, 1, 1], [0, 1, 2, 3, 4], [5, 5, 5, 5, 5]])
    for index, record in enumerate(records(raw_source(make(square=True, document_ids=ids), RawGeometry()))):
        assert record.geometry.document_ids is not None
        assert record.geometry.document_ids.tolist() == ids[index].tolist()
    with pytest.raises(InputError, match="as many queries as keys; got 5 and 7"):
        raw_source(make(document_ids=np.zeros((B, M), np.int64)), RawGeometry())


def test_first_sequences_only(make: Make) -> None:
    mask = np.random.default_rng(4).random((B, 1, N, M)) < 0.5
    real = np.random.default_rng(5).random((B, M)) < 0.8
    raw = make(mask=mask, key_padding=real, x=draw(6, B, N, C), w_q=draw(7, H * D, C))
    source = raw_source(raw, RawGeometry(), sequences=2)
    assert source.shape.num_sequences == 2
    assert source.shape.step_sequences == 2
    whole = records(raw_source(raw, RawGeometry()))
    for first, second in zip(records(source), whole[:2], strict=True):
        assert torch.equal(first.q, second.q)
        assert first.x is not None
        assert second.x is not None
        assert torch.equal(first.x, second.x)
        for name in ("keep", "key_padding", "query_padding"):
            assert torch.equal(getattr(first.geometry, name), getattr(second.geometry, name)), name


def test_first_sequences_keep_a_shared_mask(make: Make) -> None:
    mask = np.random.default_rng(6).random((1, H, N, M)) < 0.5
    found = records(raw_source(make(mask=mask), RawGeometry(), sequences=1))
    assert len(found) == 1
    assert found[0].geometry.keep is not None
    assert torch.equal(found[0].geometry.keep, torch.from_numpy(mask[0]))


@pytest.mark.parametrize("number", [0, -1, B + 1])
def test_more_sequences_than_there_are(make: Make, number: int) -> None:
    with pytest.raises(InputError, match=f"holds {B} sequences; --sequences must be 1 to {B}, got {number}"):
        raw_source(make(), RawGeometry(), sequences=number)


def test_weights_by_head(make: Make) -> None:
    w_q, w_k = draw(8, H * D, C), draw(9, G * D, C)
    source = raw_source(make(x=draw(6, B, N, C), w_q=w_q, w_k=w_k), RawGeometry())
    weights = source.weights(0)
    assert source.shape.width == C
    assert weights.w_q is not None
    assert weights.w_k is not None
    assert torch.equal(weights.w_q, torch.from_numpy(w_q).view(H, D, C))
    assert torch.equal(weights.w_k, torch.from_numpy(w_k).view(G, D, C))
    assert torch.equal(weights.w_q[2], torch.from_numpy(w_q[2 * D : 3 * D]))


def test_x_without_w_q_is_not_carried(make: Make) -> None:
    """Without W_Q there is no gradient to speak of; without either, the fields are None."""
    assert records(raw_source(make(x=draw(6, B, N, C)), RawGeometry()))[0].x is None
    weights = raw_source(make(), RawGeometry()).weights(0)
    assert weights.w_q is None
    assert weights.w_k is None


def test_no_output_gradient(make: Make) -> None:
    assert records(raw_source(make(do=None), RawGeometry()))[0].do is None
