"""Gradients of W_Q by split terms against float64 sums."""

import math

import pytest
import torch

from bf16forensics.attention.token_products import token_products

SHAPES = [(3, 24, 8, 12), (2, 130, 40, 20), (1, 65, 80, 131), (2, 1, 16, 16), (1, 64, 64, 128)]


def draw(seed, *shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).float().to(device)


def kernel(stages, x):
    from bf16forensics.kernels.weight_gradient import weight_gradients

    return weight_gradients(stages, x)


def exact(stages, x):
    """The sums in float64, and the sums of the magnitudes of their terms."""
    wide, other = stages.double().cpu(), x.double().cpu()
    return torch.einsum("snd,nc->sdc", wide, other), torch.einsum("snd,nc->sdc", wide.abs(), other.abs())


def budget(tokens):
    """Largest error relative to the sum of magnitudes.

    Three terms leave 2^-24 of a stage, and six pairs as much of X again; the matrix unit truncates each of the 4 steps
    of 3 (or 6) products of a block, 2^-23 each at most, before FP32 adds the blocks up.
    """
    return 2.0**-23 + 18 * 2.0**-23 + math.ceil(tokens / 64) * 2.0**-24


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=["bf16-x", "fp32-x"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_products_are_those_of_float64(device, shape, x_dtype):
    stages, tokens, size, width = shape
    # Sizes far apart, as gradients of many tokens have.
    s = draw(1, stages, tokens, size) * torch.exp(4 * draw(2, stages, tokens, 1))
    x = draw(3, tokens, width, dtype=x_dtype)
    found = kernel(s.to(device), x.to(device))
    assert found.dtype == torch.float32
    assert found.device.type == device
    expected, magnitude = exact(s, x)
    error = ((found.cpu().double() - expected).abs() / magnitude).max().item()
    assert error <= budget(tokens)
    # Errors of single BF16 terms are a thousand times larger: the budget tells them apart.
    rounded = exact(s.bfloat16().float(), x)[0]
    assert ((rounded - expected).abs() / magnitude).max().item() > 100 * budget(tokens)


def test_x_in_bf16_is_x_in_fp32_with_the_same_values(device):
    s, x = draw(4, 2, 70, 16).to(device), draw(5, 70, 24, dtype=torch.bfloat16).to(device)
    assert torch.equal(kernel(s, x), kernel(s, x.bfloat16()))


def test_what_is_a_power_of_two_is_exact(device):
    # Every term and every sum is representable, so no order and no split may lose a bit.
    s = torch.full((1, 100, 16), 2.0**-30, device=device)
    x = torch.full((100, 16), 1.0 + 2.0**-20, device=device)
    assert torch.equal(kernel(s, x), torch.full((1, 16, 16), 100 * 2.0**-30 * (1.0 + 2.0**-20), device=device))


def test_repeated_runs_are_equal_bit_by_bit(device):
    s, x = draw(6, 3, 200, 24).to(device), draw(7, 200, 40).to(device)
    assert torch.equal(kernel(s, x).view(torch.int32), kernel(s, x).view(torch.int32))


def test_nan_touches_its_row_and_column_only(device):
    s, x = draw(8, 2, 20, 16), draw(9, 20, 16, dtype=torch.bfloat16)
    s[1, 3, 5] = math.nan
    found = kernel(s.to(device), x.to(device)).cpu()
    assert found[1, 5].isnan().all()
    found[1, 5] = 0.0
    assert not found.isnan().any()


@pytest.mark.parametrize("shape", [(0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 4, 0)])
def test_nothing_to_add_is_zero(device, shape):
    stages, tokens, size, width = shape
    found = kernel(torch.zeros(stages, tokens, size, device=device), torch.zeros(tokens, width, device=device))
    assert found.shape == (stages, size, width)
    assert not found.any()


@pytest.mark.parametrize(
    ("stages", "x", "message"),
    [
        (torch.zeros(2, 3, 4, dtype=torch.float64), torch.zeros(3, 5), "FP32"),
        (torch.zeros(2, 3, 4), torch.zeros(4, 5), r"\[S, N, D\]"),
        (torch.zeros(2, 4, 3).transpose(1, 2), torch.zeros(3, 5), "contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(device, stages, x, message):
    with pytest.raises(ValueError, match=message):
        kernel(stages.to(device), x.to(device))


def test_the_gateway_gives_the_same_within_the_budget(device):
    s, x = draw(10, 4, 90, 16), draw(11, 90, 24)
    expected, magnitude = exact(s, x)
    found = token_products(s.to(device), x.to(device)).cpu().double()
    assert ((found - expected).abs() / magnitude).max().item() <= budget(90)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_matrix_unit_adds_one_block_and_no_more():
    """With one chain over all tokens its truncation would pull a sum of one sign down."""
    s, x = torch.rand(1, 65536, 64, device="cuda"), torch.rand(65536, 64, device="cuda").bfloat16().float()
    expected, magnitude = exact(s, x)
    assert ((kernel(s, x).cpu().double() - expected) / magnitude).mean().abs().item() <= 1e-6
