"""Spectral norms: traps of power iteration and of BF16, orientation, gauge."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.record import LayerWeights
from bf16forensics.evidence.spectrum import layer_spectra, query_key_norm, spectral_norm
from bf16forensics.load.nanogpt import NanoGPTCheckpoint, NanoGPTConfig


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_start_vector_of_ones_would_be_the_wrong_singular_vector(dtype: torch.dtype) -> None:
    norm, rank = spectral_norm(torch.tensor([[2.0, -2.0], [1.0, 1.0]], dtype=dtype))
    assert norm == pytest.approx(math.sqrt(8), rel=1e-12)
    assert rank == pytest.approx(10 / 8, rel=1e-12)


def test_close_singular_values_do_not_stall() -> None:
    norm, _ = spectral_norm(torch.diag(torch.tensor([0.5, 0.998, 1.0, 0.999])))
    assert norm == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("shape", [(2, 3), (4, 4), (0, 3), (3, 0)])
def test_a_zero_or_empty_matrix_has_norm_0(shape: tuple[int, int]) -> None:
    assert spectral_norm(torch.zeros(shape)) == (0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_entries_give_nan(value: float) -> None:
    matrix = torch.ones(3, 3)
    matrix[1, 2] = value
    assert all(math.isnan(number) for number in spectral_norm(matrix))
    assert math.isnan(query_key_norm(matrix, torch.ones(3, 3)))
    assert math.isnan(query_key_norm(torch.ones(3, 3), matrix))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_sizes_neither_overflow_nor_vanish(scale: float) -> None:
    norm, rank = spectral_norm(torch.full((2, 2), scale))
    assert norm == pytest.approx(2 * scale, rel=1e-6)
    assert rank == pytest.approx(1.0, rel=1e-12)


def test_one_bad_head_of_four_leaves_the_others_alone() -> None:
    weights = LayerWeights(layer=0, w_q=draw(1, 4, 3, 8).float(), w_k=draw(2, 4, 3, 8).float())
    clean = layer_spectra(weights, 4)
    assert weights.w_q is not None
    weights.w_q[1, 0, 5] = math.nan
    found = layer_spectra(weights, 4)
    assert [found[head] for head in (0, 2, 3)] == [clean[head] for head in (0, 2, 3)]
    bad = found[1]
    assert bad is not None
    assert clean[1] is not None
    assert math.isnan(bad.w_q_spectral_norm)
    assert math.isnan(bad.qk_spectral_norm)
    assert not bad.w_q_all_zero
    assert bad.w_k_spectral_norm == clean[1].w_k_spectral_norm


def test_a_fused_projection_is_read_out_by_in() -> None:
    # The transposed reading gives [5, 3].
    fused = torch.zeros(12, 4)
    fused[:4] = torch.tensor([[0.0, 0, 0, 3], [1, 0, 0, 0], [0, 5, 0, 0], [0, 0, 2, 0]])
    other = {name: torch.zeros(4) for name in ("ln_1.weight", "ln_2.weight")} | {
        "attn.c_proj.weight": torch.zeros(4, 4),
        "mlp.c_fc.weight": torch.zeros(16, 4),
        "mlp.c_proj.weight": torch.zeros(4, 16),
    }
    checkpoint = NanoGPTCheckpoint(
        config=NanoGPTConfig(n_layer=1, n_head=2, n_embd=4, block_size=8, vocab_size=5, bias=False, dropout=0.0),
        iter_num=None,
        weight_dtype="fp32",
        tied=True,
        notes=(),
        unused_tensors=(),
        path="",
        size_bytes=0,
        sha256="",
        tensors={f"transformer.h.0.{name}": value for name, value in {**other, "attn.c_attn.weight": fused}.items()},
    )
    spectra = layer_spectra(NanoGPTCapture(checkpoint=checkpoint).weights(0), 2)
    assert [spectrum.w_q_spectral_norm for spectrum in spectra if spectrum is not None] == pytest.approx([3.0, 5.0])
    assert [spectrum.w_k_spectral_norm for spectrum in spectra if spectrum is not None] == [0.0, 0.0]
    assert [spectrum.qk_spectral_norm for spectrum in spectra if spectrum is not None] == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(3, 8), (8, 8), (8, 3), (1, 5), (5, 1)])
def test_query_key_norm_is_the_dense_one(shape: tuple[int, int]) -> None:
    w_q, w_k = draw(3, *shape), draw(4, *shape)
    expected = float(torch.linalg.svdvals(w_q.T @ w_k)[0]) / math.sqrt(shape[0])
    assert query_key_norm(w_q, w_k) == pytest.approx(expected, rel=1e-12)


@given(exponent=st.integers(-60, 60), seed=st.integers(0, 10))
def test_query_key_norm_does_not_see_the_gauge(exponent: int, seed: int) -> None:
    w_q, w_k = draw(seed, 4, 9).float(), draw(seed + 100, 4, 9).float()
    moved = query_key_norm(w_q * 2.0**exponent, w_k * 2.0**-exponent)
    assert moved == pytest.approx(query_key_norm(w_q, w_k), rel=1e-12)
    # The single norms do.
    assert spectral_norm(w_q * 2.0**exponent)[0] == pytest.approx(2.0**exponent * spectral_norm(w_q)[0], rel=1e-12)


def test_query_key_norm_does_not_see_a_rotation_of_both() -> None:
    w_q, w_k = draw(5, 4, 9), draw(6, 4, 9)
    rotation = torch.linalg.qr(draw(7, 4, 4))[0]
    assert query_key_norm(rotation @ w_q, rotation @ w_k) == pytest.approx(query_key_norm(w_q, w_k), rel=1e-12)


def test_shared_keys_are_those_of_the_group() -> None:
    w_q, w_k = draw(8, 4, 3, 7), draw(9, 2, 3, 7)
    spectra = layer_spectra(LayerWeights(layer=0, w_q=w_q, w_k=w_k), 4)
    for head, spectrum in enumerate(spectra):
        assert spectrum is not None
        assert spectrum.w_k_spectral_norm == spectral_norm(w_k[head // 2])[0]
        assert spectrum.qk_spectral_norm == query_key_norm(w_q[head], w_k[head // 2])


def test_unknown_projections_are_none_or_nan() -> None:
    assert layer_spectra(LayerWeights(layer=0, w_q=None, w_k=None), 3) == (None, None, None)
    only_q = layer_spectra(LayerWeights(layer=0, w_q=draw(1, 2, 3, 4), w_k=None), 2)[0]
    assert only_q is not None
    assert only_q.w_q_spectral_norm > 0
    assert math.isnan(only_q.w_k_spectral_norm)
    assert math.isnan(only_q.qk_spectral_norm)
    only_k = layer_spectra(LayerWeights(layer=0, w_q=None, w_k=draw(1, 1, 3, 4)), 2)[1]
    assert only_k is not None
    assert math.isnan(only_k.w_q_spectral_norm)
    assert only_k.w_k_spectral_norm > 0
    assert not only_k.w_q_all_zero


def test_an_all_zero_query_projection_is_said() -> None:
    weights = LayerWeights(layer=0, w_q=torch.zeros(1, 3, 4), w_k=draw(2, 1, 3, 4))
    spectrum = layer_spectra(weights, 1)[0]
    assert spectrum is not None
    assert spectrum.w_q_all_zero
    assert (spectrum.w_q_spectral_norm, spectrum.qk_spectral_norm) == (0.0, 0.0)
