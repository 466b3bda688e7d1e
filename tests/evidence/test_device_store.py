"""Gradients and spectra kept on a device against the same on the CPU. A CPU tensor is a device like any other here."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from bf16forensics.capture.record import LayerWeights
from bf16forensics.evidence import device_store
from bf16forensics.evidence.device_spectrum import device_spectra, largest_eigenvalue
from bf16forensics.evidence.device_store import DeviceGradientStore
from bf16forensics.evidence.gradient import SummedParts
from bf16forensics.evidence.gradient_products import HeadGrams, HeadProducts, StepSpan, head_grams, head_products
from bf16forensics.evidence.spectrum import layer_spectra
from bf16forensics.evidence.store import GradientStore

HERE = torch.device("cpu")
LAYERS, H, D, C = 2, 3, 4, 6
STEPS = (StepSpan(step=1, sequences=(0, 2)), StepSpan(step=2, sequences=(1,)), StepSpan(step=3, sequences=(3, 4)))


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape).astype(np.float32)


def summed(seed: int) -> SummedParts:
    matrices = {name: draw(seed + i, H, D, C) for i, name in enumerate(("full", "scores", "cast_ds", "cast_dq"))}
    sums = np.abs(draw(seed + 5, 2, H)).astype(np.float64)
    return SummedParts(**matrices, direction=draw(seed + 4, H, D, C), weight_sum=sums[0], weight_square_sum=sums[1])


def both_stores(sequences: int) -> tuple[GradientStore, DeviceGradientStore]:
    stores = (
        GradientStore(LAYERS * H, sequences + 1, D * C),
        DeviceGradientStore(LAYERS * H, sequences + 1, D * C, HERE),
    )
    for layer in range(LAYERS):
        for sequence in range(sequences):
            parts = [draw(1000 + 100 * layer + 10 * sequence + kind, H, D, C) + 0.3 for kind in range(3)]
            for store in stores:
                store.put(slice(layer * H, layer * H + H), sequence, *parts)
    return stores


@pytest.mark.parametrize("at_once", [2**29, 1], ids=["whole", "head-by-head"])
@pytest.mark.parametrize(("sequences", "steps"), [(5, STEPS), (1, ()), (2, (StepSpan(step=None, sequences=(0, 1)),))])
def test_products_are_those_of_the_cpu(
    sequences: int, steps: tuple[StepSpan, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_store, "_BYTES_AT_ONCE", at_once)
    plain, there = both_stores(sequences)
    sums, keys = summed(1), draw(2, H, D).astype(np.float64)
    tensors = SummedParts(**{f.name: torch.from_numpy(getattr(sums, f.name)) for f in fields(sums)})
    grams, products = there.products(slice(H, 2 * H), sequences, tensors, keys, steps)
    assert len(grams) == len(products) == H
    for head in range(H):
        expected = head_grams(plain, H + head, sequences)
        for field in fields(HeadGrams):
            # Sums of 24 products in float64, in another order.
            np.testing.assert_allclose(getattr(grams[head], field.name), getattr(expected, field.name), rtol=1e-12)
        figures = head_products(plain, H + head, sequences, sums, head, keys[head], steps)
        for field in fields(HeadProducts):
            own, other = getattr(products[head], field.name), getattr(figures, field.name)
            # The parts that are not stored are FP32 numbers, which the CPU also divides and squares as such.
            if isinstance(other, dict):
                assert own == pytest.approx(other, rel=1e-6, abs=1e-6), field.name
            elif field.name == "steps":
                np.testing.assert_allclose(np.array(own), np.array(other), rtol=1e-12)
            else:
                assert own == pytest.approx(other, rel=1e-6), field.name


def test_means_are_those_of_the_cpu() -> None:
    plain, there = both_stores(4)
    found = there.means(("defect", "hp"), slice(H, 2 * H), 3)
    assert found.dtype == torch.float64
    for kind, means in zip(("defect", "hp"), found, strict=True):
        for head, mean in enumerate(means):
            np.testing.assert_allclose(mean.numpy(), plain.vectors(kind, H + head, 3).mean(0), rtol=1e-14)


def test_what_overflowed_is_told() -> None:
    there = DeviceGradientStore(1, 2, D * C, HERE)
    huge = np.full((1, D, C), np.inf, np.float32)
    there.put(slice(0, 1), 0, huge, huge, huge)
    there.put(slice(0, 1), 1, huge, huge, huge)
    sums = SummedParts(**{f.name: torch.from_numpy(getattr(summed(1), f.name)) for f in fields(SummedParts)})
    grams, _ = there.products(slice(0, 1), 2, sums, draw(2, 1, D).astype(np.float64), ())
    assert not grams[0].finite


def test_each_store_takes_what_the_other_side_computed() -> None:
    plain, there = GradientStore(H, 2, D * C), DeviceGradientStore(H, 2, D * C, HERE)
    values = draw(3, H, D, C)
    plain.put(slice(0, H), 0, torch.from_numpy(values), values, torch.from_numpy(values))
    there.put(slice(0, H), 0, values, torch.from_numpy(values), values)
    for head in range(H):
        for index, kind in enumerate(GradientStore.KINDS):
            expected = values[head].reshape(-1)
            assert np.array_equal(plain.vectors(kind, head, 1)[0], expected)
            assert np.array_equal(there.means((kind,), slice(0, H), 1)[0, head].numpy(), expected), index


@pytest.mark.parametrize("budget", [3 * 4 * 10 * 5 * 7, 3 * 4 * 10 * 5 * 7 - 1])
def test_a_budget_decides_where_gradients_are_kept(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_store, "MEMORY_BUDGET_BYTES", budget)
    assert DeviceGradientStore.fits(10, 5, 7, HERE) == (budget == 3 * 4 * 10 * 5 * 7)


def matrix(seed: int, size: int, spread: float) -> torch.Tensor:
    """A A^T with known eigenvalues, spread apart by powers of ten."""
    q = torch.linalg.qr(torch.from_numpy(draw(seed, size, size)).double())[0]
    values = torch.logspace(0, -spread, size, dtype=torch.float64)
    return (q * values) @ q.T


@pytest.mark.parametrize("scale", [1.0, 2.0**-200, 2.0**200])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_the_largest_eigenvalue_is_found_whatever_follows_it(size: int, scale: float) -> None:
    spread = [matrix(i, size, 10.0**i / 100) * scale for i in range(4)]
    degenerate = [torch.eye(size, dtype=torch.float64) * 3 * scale]
    found = largest_eigenvalue(torch.stack(spread + degenerate))
    expected = torch.tensor([1.0] * 4 + [3.0], dtype=torch.float64) * scale
    # A product of float64 matrices in each squaring; later ones count for half of the one before.
    torch.testing.assert_close(found, expected, rtol=64 * 2.0**-50, atol=0.0)


def test_a_zero_and_a_broken_matrix_keep_to_themselves() -> None:
    broken = torch.eye(3, dtype=torch.float64)
    broken[0, 1] = math.nan
    found = largest_eigenvalue(torch.stack([torch.zeros(3, 3).double(), broken, torch.eye(3).double()]))
    assert found[0] == 0.0
    assert found[1].isnan()
    assert found[2] == pytest.approx(1.0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("size", "width"), [(8, 12), (16, 9)])
def test_spectra_of_all_layers_are_those_of_each(kv_heads: int, size: int, width: int) -> None:
    weights = [
        LayerWeights(
            layer=layer,
            w_q=torch.from_numpy(draw(layer, 4, size, width)),
            w_k=torch.from_numpy(draw(10 + layer, kv_heads, size, width)),
        )
        for layer in range(3)
    ]
    assert weights[0].w_q is not None
    assert weights[1].w_q is not None
    weights[0].w_q[1] = 0.0
    weights[1].w_q[2, 0, 0] = math.inf
    # One direction a billion times as long as the others: the norm of both together is all that is left of it.
    weights[1].w_q[3] *= torch.logspace(0, -9, width)
    found = device_spectra(weights, 4, HERE)
    for layer, own in enumerate(weights):
        for head, expected in enumerate(layer_spectra(own, 4)):
            spectrum = found[layer][head]
            assert spectrum is not None
            assert expected is not None
            for field in fields(expected):
                value = getattr(expected, field.name)
                assert getattr(spectrum, field.name) == pytest.approx(value, rel=1e-10, nan_ok=True), field.name


def test_unknown_projections_are_unknown() -> None:
    w = torch.from_numpy(draw(1, 2, 3, 4))
    assert device_spectra([LayerWeights(layer=0, w_q=None, w_k=None)], 2, HERE) == [(None, None)]
    only_q = device_spectra([LayerWeights(layer=0, w_q=w, w_k=None)], 2, HERE)[0][1]
    assert only_q is not None
    assert only_q.w_q_spectral_norm > 0
    assert math.isnan(only_q.w_k_spectral_norm)
    assert math.isnan(only_q.qk_spectral_norm)
    only_k = device_spectra([LayerWeights(layer=0, w_q=None, w_k=w[:1])], 2, HERE)[0][1]
    assert only_k is not None
    assert only_k.w_k_spectral_norm > 0
    assert not only_k.w_q_all_zero
    other_width = LayerWeights(layer=0, w_q=w, w_k=torch.from_numpy(draw(2, 2, 3, 5)))
    both = device_spectra([other_width], 2, HERE)[0][0]
    assert both is not None
    assert math.isnan(both.qk_spectral_norm)
