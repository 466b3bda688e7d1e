"""P07: a query that may attend to nothing. P08: padding. P09: an additive mask that overflows itself."""

from typing import Any

import numpy as np
import pytest
import torch

KEEP = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 1]], bool)
LOWEST = np.finfo(np.float32).min


def masked(record: Any, mask: Any) -> Any:
    zeros = np.zeros((3, 2))
    return record(zeros, zeros, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], mask=mask)


SPELLINGS: dict[str, Any] = {
    "boolean": KEEP,
    "integers": KEEP.astype(np.uint8),
    "minus-infinity": np.where(KEEP, 0.0, -np.inf).astype(np.float32),
    "lowest-fp32": np.where(KEEP, 0.0, LOWEST).astype(np.float32),
    "lowest-fp64": np.where(KEEP, 0.0, np.finfo(np.float64).min),
    "lowest-fp16": np.where(KEEP, 0.0, np.finfo(np.float16).min).astype(np.float16),
}


@pytest.mark.parametrize("recipe", ["fa2", "fa2+o_bar=bf16", "paper", "sdpa-math", "fa2+scores=bf16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_p07_fully_masked_row(localize: Any, passes: Any, record: Any, spelling: str, recipe: str) -> None:
    tensors = masked(record, SPELLINGS[spelling])
    (dual,) = passes(tensors, recipe, causal=False)
    for o in (dual.o_hp, dual.o_lp):
        assert torch.allclose(o[0], torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]).double(), rtol=1e-15, atol=0)
    assert dual.delta.delta_lp[0, 1] == dual.delta.delta_hp[0, 1] == 0
    assert dual.maxima.ones_rounded.tolist() == [[1, 0, 3]]
    found = localize(tensors, "--no-causal", "--recipe", recipe)
    assert found.exit_code == 0
    head = found.head
    assert (head["rows"], head["rows_fully_masked"], head["rows_repeated_max"]) == (2, 1, 1)
    assert (head["pairs"], head["ones"]) == (4, {"fp32_exact": 4, "rounded": 4, "shared_maximum": 4})
    assert abs(head["delta_err"]["sum"]) < 1e-14
    assert head["nonfinite"] == []


def test_p07_the_spellings_give_one_document(localize: Any, record: Any) -> None:
    heads = [localize(masked(record, mask), "--no-causal").head for mask in SPELLINGS.values()]
    assert all(head == heads[0] for head in heads)


def test_p07_the_mask_and_the_causal_plane_combine(localize: Any, record: Any) -> None:
    head = localize(masked(record, SPELLINGS["boolean"][:, ::-1].copy()), "--causal").head
    # Row 0 keeps only key 2, which lies ahead of it.
    assert (head["rows_fully_masked"], head["pairs"]) == (2, 3)


def test_p07_everything_masked_is_no_comparison(localize: Any, record: Any) -> None:
    found = localize(masked(record, np.zeros((3, 3), bool)), "--no-causal")
    assert found.document["verdict"] == "cannot judge"
    assert (found.head["rows"], found.head["rows_fully_masked"], found.head["pairs"]) == (0, 3, 0)
    assert "BF904" in found.codes()
    assert found.head["delta_err"]["mean"] == "nan"


def padded(side: str) -> dict[str, np.ndarray]:
    """Sequence A: two pads of value 1000 and 1, 2, 3, 4; sequence B: six real tokens."""
    first = [1000.0, 1000.0, 1.0, 2.0, 3.0, 4.0] if side == "left" else [1.0, 2.0, 3.0, 4.0, 1000.0, 1000.0]
    v = np.array([first, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], np.float32)[:, None, :, None]
    real = np.ones((2, 6), bool)
    real[0, :2] = side != "left"
    real[0, 4:] = side == "left"
    zeros = np.zeros((2, 1, 6, 2), np.float32)
    return {"q": zeros, "k": zeros, "v": v, "do": np.ones((2, 1, 6, 1), np.float32), "key_padding": real}


@pytest.mark.parametrize("recipe", ["fa2", "paper", "sdpa-math"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_p08_padding_leaks_into_nothing(localize: Any, passes: Any, side: str, recipe: str) -> None:
    tensors = padded(side)
    head = localize(tensors, "--recipe", recipe).head
    assert head["ones"]["rounded"] == 31
    assert (head["rows"], head["rows_padding"], head["rows_fully_masked"]) == (10, 2, 0)
    assert head["pairs"] == 31
    assert head["output_err"]["max_abs"] < 0.05
    alone = localize(tensors, "--sequences", 1, "--recipe", recipe).head
    assert (alone["ones"]["rounded"], alone["rows"]) == (10, 4)
    first, second = passes(tensors, recipe)
    real = torch.from_numpy(tensors["key_padding"][0])
    assert first.o_hp[0, real, 0].tolist() == [1.0, 1.5, 2.0, 2.5]
    assert first.o_lp[0, real, 0].tolist() == [1.0, 1.5, 2.0, 2.5]
    assert (first.o_hp[0, ~real] == 0).all()
    assert second.o_hp[0, :, 0].tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


@pytest.mark.parametrize("side", ["left", "right"])
def test_p08_padded_and_unpadded_evidence_agree(localize: Any, side: str) -> None:
    tensors = padded(side)
    keep = tensors["key_padding"][0]
    unpadded = {name: tensors[name][:1, :, keep] for name in ("q", "k", "v", "do")}
    first, second = localize(tensors, "--sequences", 1).head, localize(unpadded).head
    for name in ("delta_err", "delta_defect", "ones", "rows", "pairs", "rows_repeated_max", "score_abs_max"):
        assert first[name] == second[name], name


def test_p08_non_finite_padding_is_named(localize: Any) -> None:
    """A NaN in a pad is a non-finite input: reported, never averaged."""
    tensors = padded("left")
    tensors["v"][0, 0, 0, 0] = np.nan
    found = localize(tensors)
    assert found.exit_code == 2
    assert found.head["nonfinite"] == ["v[0, 0, 0, 0]"]


def planes(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal plane and padding plane of the lowest number."""
    lowest = torch.finfo(dtype).min
    causal = torch.full((3, 3), lowest, dtype=dtype).triu(1)
    padding = torch.zeros(3, 3, dtype=dtype)
    padding[:, 0] = lowest
    return causal, padding


def overflow_masks() -> dict[str, torch.Tensor]:
    causal16, padding16 = planes(torch.bfloat16)
    causal32, padding32 = planes(torch.float32)
    keep = (causal32 == 0) & (padding32 == 0)
    return {
        "boolean": keep,
        "planes-summed": causal16 + padding16,
        # A second padding plane (of the tokeniser and of the packing, say) overflows where both hide.
        "three-planes-summed": causal16 + padding16 + padding16,
        "fp32-cast-to-bf16": torch.maximum(causal32 + padding32, torch.tensor(LOWEST)).bfloat16(),
        "fp32-planes-summed": causal32 + padding32,
        "fp16-planes-summed": sum(planes(torch.float16), torch.zeros(3, 3, dtype=torch.float16)),
    }


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("spelling", overflow_masks())
@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
def test_p09_masks_that_overflow(
    localize: Any, passes: Any, record: Any, spelling: str, kind: str, causal: str
) -> None:
    mask = overflow_masks()[spelling]
    if spelling in ("three-planes-summed", "fp32-cast-to-bf16"):
        assert mask.isinf().any()
    tensors = record(np.zeros((3, 2)), np.zeros((3, 2)), [[1.0], [2.0], [4.0]], mask=mask)
    found = localize(tensors, causal, kind=kind)
    assert (found.head["rows"], found.head["rows_fully_masked"], found.head["pairs"]) == (2, 1, 3)
    (dual,) = passes(tensors, kind=kind, causal=causal == "--causal")
    assert dual.o_hp.flatten().tolist() == [0.0, 2.0, 3.0]
    assert dual.o_lp.flatten().tolist() == [0.0, 2.0, 3.0]


def test_p09_a_finite_bias_stays_a_bias(localize: Any, record: Any) -> None:
    """-1e4 in FP32 is a number that a model may mean: the pair stays visible."""
    mask = np.array([[0.0, -1e4]], np.float32)
    tensors = record([[0.0, 0.0]], np.zeros((2, 2)), [[1.0], [2.0]], mask=mask)
    assert localize(tensors).head["pairs"] == 2
