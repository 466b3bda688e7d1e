"""P10: causal with N other than M. P11: grouped heads. P12: odd head sizes. P13: odd lengths. P14: sliding windows."""

from typing import Any

import numpy as np
import pytest
import torch


def zeros(heads: int, length: int, size: int = 2) -> np.ndarray:
    return np.zeros((1, heads, length, size), np.float32)


def column(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)[None, None, :, None]


def level(queries: int, keys: int, v: Any) -> dict[str, np.ndarray]:
    """All scores 0: O is the mean of the visible values."""
    return {"q": zeros(1, queries), "k": zeros(1, keys), "v": column(v), "do": np.ones((1, 1, queries, 1), np.float32)}


def test_p10_fewer_queries_than_keys(localize: Any, passes: Any) -> None:
    tensors = level(2, 5, range(1, 6))
    head = localize(tensors).head
    assert (head["pairs"], head["ones"]["rounded"], head["rows_fully_masked"]) == (9, 9, 0)
    (dual,) = passes(tensors)
    assert dual.o_hp.flatten().tolist() == [2.5, 3.0]
    assert dual.o_lp.flatten().tolist() == [2.5, 3.0]


def test_p10_more_queries_than_keys(localize: Any, passes: Any) -> None:
    tensors = level(5, 2, [1, 2])
    head = localize(tensors).head
    assert (head["pairs"], head["rows"], head["rows_fully_masked"]) == (3, 2, 3)
    (dual,) = passes(tensors)
    assert dual.maxima.visible.flatten().tolist() == [0, 0, 0, 1, 2]
    assert dual.o_hp.flatten().tolist() == [0.0, 0.0, 0.0, 1.0, 1.5]


@pytest.mark.parametrize(("queries", "keys"), [(1, 6), (3, 7), (7, 3), (4, 4)])
def test_p10_neighbours(localize: Any, queries: int, keys: int) -> None:
    visible = [max(0, i + keys - queries + 1) for i in range(queries)]
    document = localize(level(queries, keys, range(keys))).document
    assert document["heads"][0]["pairs"] == sum(visible)
    assert document["heads"][0]["rows_fully_masked"] == visible.count(0)
    assert document["inputs"]["causal"] is True
    assert localize(level(queries, keys, range(keys)), "--no-causal").head["pairs"] == queries * keys


def grouped(heads: int, groups: int, values: Any) -> dict[str, np.ndarray]:
    v = np.broadcast_to(np.asarray(values, np.float32)[None, :, None, None], (1, groups, 2, 2)).copy()
    return {"q": zeros(heads, 2), "k": zeros(groups, 2), "v": v, "do": np.ones((1, heads, 2, 2), np.float32)}


@pytest.mark.parametrize(
    ("heads", "groups", "expected"),
    [
        (4, 2, [1, 1, 2, 2]),
        (4, 1, [1, 1, 1, 1]),
        (4, 4, [1, 2, 3, 4]),
        (6, 3, [1, 1, 2, 2, 3, 3]),
        (6, 2, [1, 1, 1, 2, 2, 2]),
    ],
)
def test_p11_grouped_heads(localize: Any, passes: Any, heads: int, groups: int, expected: list[int]) -> None:
    tensors = grouped(heads, groups, range(1, groups + 1))
    (dual,) = passes(tensors)
    assert dual.o_hp[:, 1, 0].tolist() == expected
    assert dual.o_lp[:, 1, 0].tolist() == expected
    found = localize(tensors)
    assert [head["kv_head"] for head in found.heads] == [value - 1 for value in expected]
    inputs = found.document["inputs"]
    assert (inputs["num_heads"], inputs["num_kv_heads"]) == (heads, groups)


def test_p11_norms_under_their_own_counts(localize: Any) -> None:
    """Four W_Q and two W_K: each query head shows the W_K that it reads."""
    w_q, w_k = np.zeros((8, 3), np.float32), np.zeros((4, 3), np.float32)
    for head in range(4):
        w_q[2 * head, 0] = head + 1
    w_k[1, 2], w_k[2, 1] = 10.0, 20.0
    tensors = grouped(4, 2, [1, 2]) | {"w_q": w_q, "w_k": w_k, "x": np.ones((1, 2, 3), np.float32)}
    found = localize(tensors)
    assert [head["w_q_spectral_norm"] for head in found.heads] == pytest.approx([1, 2, 3, 4])
    assert [head["w_k_spectral_norm"] for head in found.heads] == pytest.approx([10, 10, 20, 20])


@pytest.mark.parametrize(("heads", "groups"), [(6, 4), (4, 3), (2, 4)])
def test_p11_heads_that_do_not_divide(localize: Any, heads: int, groups: int) -> None:
    line = localize(grouped(heads, groups, range(groups))).refusal()
    assert f"{heads} query heads" in line
    assert f"{groups} key/value heads" in line


#: Head size, O_hp, O_lp.
SIZES = [(80, 2.561783, 2.5625), (96, 2.555968, 2.546875), (72, 2.565429, 2.5625), (63, 2.570378, 2.578125)]


def last_dimension(size: int) -> dict[str, np.ndarray]:
    q, k = zeros(1, 1, size), zeros(1, 4, size)
    q[..., -1] = 2.0
    k[0, 0, 2, -1] = 2.0
    return {"q": q, "k": k, "v": column([1, 2, 3, 4]), "do": np.ones((1, 1, 1, 1), np.float32)}


@pytest.mark.parametrize("reference", ["fp32", "fp64"])
@pytest.mark.parametrize(("size", "o_hp", "o_lp"), SIZES)
def test_p12_head_sizes(localize: Any, passes: Any, size: int, o_hp: float, o_lp: float, reference: str) -> None:
    tensors = last_dimension(size)
    (dual,) = passes(tensors, "fa2", reference)
    assert dual.o_hp.item() == pytest.approx(o_hp, abs=1e-6)
    assert dual.o_lp.item() == o_lp
    found = localize(tensors, "--reference", reference)
    assert found.head["output_err"]["max_abs"] == pytest.approx(abs(o_lp - o_hp), abs=1e-6)
    assert found.head["score_abs_max"] == pytest.approx(4 / size**0.5, rel=1e-6)
    assert found.document["inputs"]["head_size"] == size
    assert f"D {size}" in found.document["inputs"]["shape"]


def test_p12_the_authors_recipe(passes: Any) -> None:
    assert passes(last_dimension(96), "paper")[0].o_lp.item() == 2.546875


def ones_record(length: int) -> dict[str, np.ndarray]:
    tensors = level(length, length, np.ones(length))
    return tensors


LENGTHS = [(1, 1), (127, 8128), (128, 8256), (129, 8385), (137, 9453), (192, 18528)]


@pytest.mark.parametrize(("length", "ones"), LENGTHS)
def test_p13_lengths(localize: Any, passes: Any, length: int, ones: int) -> None:
    tensors = ones_record(length)
    (dual,) = passes(tensors)
    assert (dual.o_hp == 1).all()
    assert (dual.o_lp == 1).all()
    head = localize(tensors).head
    assert (head["ones"]["rounded"], head["pairs"], head["rows"]) == (ones, ones, length)
    assert (head["delta_err"]["sum"], head["delta_err"]["zero"], head["output_err"]["max_abs"]) == (0.0, length, 0.0)


@pytest.mark.parametrize("recipe", ["fa2+tile_k=16", "fa2+tile_k=100,tile_order=ascending", "fa2+tile_k=1024"])
@pytest.mark.parametrize("length", [1, 129, 137])
def test_p13_any_tile_size(localize: Any, length: int, recipe: str) -> None:
    usual = localize(ones_record(length)).head
    assert localize(ones_record(length), "--recipe", recipe).head == usual


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math", "fa2+o_bar=bf16"])
def test_p13_one_token(localize: Any, passes: Any, recipe: str) -> None:
    v = torch.tensor([0.7, -1.3]).bfloat16().float().numpy()[None, None, None]
    tensors = {"q": zeros(1, 1), "k": zeros(1, 1), "v": v, "do": np.ones((1, 1, 1, 2), np.float32)}
    (dual,) = passes(tensors, recipe)
    assert torch.equal(dual.o_lp, torch.from_numpy(v[0]).double())
    assert torch.equal(dual.o_hp, dual.o_lp)
    head = localize(tensors, "--recipe", recipe).head
    assert (head["ones"]["rounded"], head["delta_err"]["zero"]) == (1, 1)


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0)])
def test_p13_no_token(localize: Any, queries: int, keys: int) -> None:
    line = localize(level(queries, keys, np.zeros(keys))).refusal()
    assert "empty" in line


def windowed(length: int = 6) -> dict[str, np.ndarray]:
    return level(length, length, np.arange(length))


def test_p14_window_of_three(localize: Any, passes: Any) -> None:
    found = localize(windowed(), "--window", 3)
    assert (found.head["pairs"], found.head["ones"]["rounded"]) == (15, 15)
    assert found.document["inputs"]["window"] == 3
    (dual,) = passes(windowed(), window=3)
    assert dual.maxima.visible.flatten().tolist() == [1, 2, 3, 3, 3, 3]
    assert dual.o_hp[0, 5, 0].item() == 4.0


@pytest.mark.parametrize(("window", "pairs"), [(1, 6), (2, 11), (4, 18), (5, 20), (6, 21), (7, 21), (1000, 21)])
def test_p14_other_windows(localize: Any, window: int, pairs: int) -> None:
    assert localize(windowed(), "--window", window).head["pairs"] == pairs


def test_p14_no_window(localize: Any) -> None:
    found = localize(windowed())
    assert (found.document["inputs"]["window"], found.head["pairs"]) == (None, 21)


def test_p14_both_sides_without_a_causal_mask(localize: Any) -> None:
    """Window 3 leaves the two neighbours on either side: 3 + 4 + 5 + 5 + 4 + 3."""
    assert localize(windowed(), "--no-causal", "--window", 3).head["pairs"] == 24


@pytest.mark.parametrize("window", [0, -1])
def test_p14_no_such_window(localize: Any, window: int) -> None:
    assert "window" in localize(windowed(), "--window", window).refusal()
