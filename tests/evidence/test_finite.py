"""Non-finite inputs are named with their position and touch only what they should."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.evidence.finite import make_finite, nonfinite_weights

Make = Callable[..., AttentionRecord]


def spoilt(record: AttentionRecord, name: str, at: tuple[int, ...], value: float) -> AttentionRecord:
    tensor = getattr(record, name).clone()
    tensor[at] = value
    return replace(record, **{name: tensor})


def test_a_finite_record_is_handed_through(make_record: Make) -> None:
    record = make_record(1)
    found = make_finite(record)
    assert found.record is record
    assert found.nonfinite == ((), ())


def test_finite_numbers_whose_sum_overflows_are_finite(make_record: Make) -> None:
    record = make_record(1)
    record = replace(record, k=torch.full_like(record.k, 3e38))
    found = make_finite(record)
    assert found.nonfinite == ((), ())
    assert torch.equal(found.record.k, record.k)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_position_is_sequence_head_token_feature(make_record: Make, name: str, value: float) -> None:
    record = spoilt(make_record(1, sequence=3), name, (1, 17, 5), value)
    record = spoilt(record, name, (1, 20, 0), value)
    found = make_finite(record)
    assert found.nonfinite == ((), (f"{name}[3, 1, 17, 5]",))
    cleaned = getattr(found.record, name)
    assert torch.equal(cleaned[0], getattr(record, name)[0])
    assert not cleaned[1].any()
    # The caller's tensor stays as it is.
    assert not torch.isfinite(getattr(record, name)).all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_shared_key_counts_against_every_reader(make_record: Make, name: str) -> None:
    record = spoilt(make_record(1, heads=4, kv_heads=2), name, (1, 2, 3), math.nan)
    place = f"{name}[0, 1, 2, 3]"
    assert make_finite(record).nonfinite == ((), (), (place,), (place,))


def test_two_tensors_are_both_named(make_record: Make) -> None:
    record = spoilt(spoilt(make_record(1), "q", (0, 1, 2), math.nan), "do", (0, 4, 5), math.inf)
    assert make_finite(record).nonfinite == (("q[0, 0, 1, 2]", "do[0, 0, 4, 5]"), ())


def test_x_counts_against_every_head(make_record: Make) -> None:
    record = spoilt(make_record(1), "x", (6, 7), math.nan)
    found = make_finite(record)
    assert found.nonfinite == (("x[0, 6, 7]",), ("x[0, 6, 7]",))
    assert found.record.x is not None
    assert torch.isfinite(found.record.x).all()


def test_a_record_without_do_and_x_is_looked_at_too(make_record: Make) -> None:
    record = replace(make_record(1), do=None, x=None)
    assert make_finite(record).nonfinite == ((), ())
    assert make_finite(spoilt(record, "v", (0, 0, 0), math.nan)).nonfinite == (("v[0, 0, 0, 0]",), ())


def test_weights_are_named_by_head_row_and_column() -> None:
    w_q, w_k = torch.zeros(4, 3, 5), torch.zeros(2, 3, 5)
    weights = LayerWeights(layer=0, w_q=w_q, w_k=w_k)
    assert nonfinite_weights(weights, 4) == ((), (), (), ())
    w_q[1, 2, 4] = math.nan
    w_k[1, 0, 3] = math.inf
    assert nonfinite_weights(weights, 4) == ((), ("w_q[1, 2, 4]",), ("w_k[1, 0, 3]",), ("w_k[1, 0, 3]",))
    assert nonfinite_weights(LayerWeights(layer=0, w_q=None, w_k=None), 2) == ((), ())
