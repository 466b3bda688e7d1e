"""P04: a linear position bias, in FP32 or stored in BF16; built over keys it makes two keys tie."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

T = 261


def alibi_record(record: Any, bias: np.ndarray) -> Any:
    """The last row alone: Tq = 1, Tk = 261; value 1 at key 259."""
    v = np.zeros((T, 1))
    v[259] = 1.0
    return record(np.zeros((1, 2)), np.zeros((T, 2)), v, mask=bias[None].astype(np.float32))


def bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


RELATIVE = 0.25 * (np.arange(T) - 260.0)
BY_KEY = 0.25 * np.arange(T)


@pytest.mark.parametrize("bias", [RELATIVE, BY_KEY], ids=["by-distance", "by-key"])
def test_an_fp32_bias(localize: Any, passes: Any, record: Any, bias: np.ndarray) -> None:
    tensors = alibi_record(record, bias)
    (dual,) = passes(tensors)
    assert dual.o_hp.item() == pytest.approx(0.172270, abs=5e-7)
    # O = P-bar / l of key 259, so P-bar = O over the top key's share.
    assert dual.o_hp.item() * np.exp(bias - bias.max()).sum() == pytest.approx(0.778801, abs=5e-7)
    head = localize(tensors).head
    assert head["ones"]["rounded"] == 1
    assert head["pairs"] == T
    assert head["score_abs_max"] == pytest.approx(np.abs(bias).max())


def test_a_bf16_bias_over_keys_makes_a_tie(localize: Any, passes: Any, record: Any) -> None:
    stored = bf16(BY_KEY)
    assert stored[259] == stored[260] == 65.0
    tensors = alibi_record(record, stored)
    head = localize(tensors).head
    assert head["ones"] == {"fp32_exact": 2, "rounded": 2, "shared_maximum": 2}
    assert head["rows_repeated_max"] == 1
    assert passes(tensors)[0].o_hp.item() == pytest.approx(0.2156, abs=5e-5)


def test_a_bf16_bias_over_distances_makes_none(localize: Any, record: Any) -> None:
    assert bf16(np.array([-0.25 * 257]))[0] == -64.0
    assert bf16(np.array([257.0]))[0] == 256.0
    assert localize(alibi_record(record, bf16(RELATIVE))).head["ones"]["rounded"] == 1


def test_scores_stored_in_bf16_tie_although_the_bias_is_fp32(localize: Any, record: Any) -> None:
    """The recipe says how lp stores the sum; hp keeps the bias as given."""
    head = localize(alibi_record(record, BY_KEY), "--recipe", "fa2+scores=bf16").head
    assert head["ones"] == {"fp32_exact": 2, "rounded": 2, "shared_maximum": 1}


def test_the_bias_is_not_dropped(passes: Any, record: Any) -> None:
    assert passes(alibi_record(record, np.zeros(T)))[0].o_hp.item() == pytest.approx(1 / T)


def test_every_row_of_the_causal_call(localize: Any, passes: Any, record: Any) -> None:
    """The case as reported: all 261 rows, the bias as an additive [T, T] mask."""
    distance = np.arange(T)[None] - np.arange(T)[:, None]
    v = np.zeros((T, 1))
    v[259] = 1.0
    tensors = record(np.zeros((T, 2)), np.zeros((T, 2)), v, mask=(0.25 * distance).astype(np.float32))
    (dual,) = passes(tensors)
    assert dual.o_hp[0, 260, 0].item() == pytest.approx(0.172270, abs=5e-7)
    assert dual.maxima.ones_rounded[0].tolist() == [1] * T
    assert localize(tensors).head["ones"]["rounded"] == T
