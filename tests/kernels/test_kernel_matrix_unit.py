"""The kernels that ask the matrix unit: which element goes where, on small integers that every arithmetic adds exactly.

How the unit adds is tested in tests/attention/test_matrix_unit_gpu.py: the interpreter has another arithmetic.
"""

import numpy as np
import pytest
import torch

OPERANDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
INSTRUCTIONS = ("mma.sync", "wgmma")


@pytest.fixture
def unit():
    pytest.importorskip("triton")
    from bf16forensics.kernels import matrix_unit

    return matrix_unit


@pytest.fixture
def chain():
    pytest.importorskip("triton")
    from bf16forensics.kernels import pv_chain

    return pv_chain


def integers(shape, largest, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator)


def bits_equal(found, expected):
    found = found.cpu().numpy()
    assert found.dtype == expected.dtype == np.float32
    differs = found.view(np.uint32) != expected.view(np.uint32)
    assert not differs.any(), f"{np.count_nonzero(differs)} differ, first at {np.argwhere(differs)[0]}"


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 16), (16, 17), (63, 32), (64, 33), (65, 15), (130, 100)], ids=str)
def test_each_problem_has_its_own_operands(unit, device, n, k, operands, instruction):
    """T0: sums of integers below 2**11 are exact with the 13 bits that the narrowest unit keeps."""
    # The smallest term is 1 and the largest 16, so that no sum of 100 products and c reaches 2**11.
    a, b, c = integers((n, k), 4, seed=n), integers((n, k), 4, seed=k), integers((n,), 200, seed=n + k)
    dtype = OPERANDS[operands]
    found = unit.dot_add(a.float().to(device, dtype), b.float().to(device, dtype), c.float().to(device), instruction)
    bits_equal(found, (c + (a * b).sum(-1)).float().numpy())


# The interpreter computes with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_a_nan_stays_in_its_problem(unit, device, instruction):
    a = torch.ones(70, 20, dtype=torch.bfloat16, device=device)
    b, c = a.clone(), torch.zeros(70, device=device)
    a[3, 19], b[66, 0], c[40] = torch.nan, torch.inf, -torch.inf
    expected = torch.full((70,), 20.0)
    expected[3], expected[66], expected[40] = torch.nan, torch.inf, -torch.inf
    torch.testing.assert_close(unit.dot_add(a, b, c, instruction).cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_without_products_the_addend_stays(unit, device, instruction):
    codes = torch.tensor([0, -(2**31), 1, 0x7F800000, 0x7F800001, 0x3F800001], dtype=torch.int64).to(torch.int32)
    c = codes.view(torch.float32).to(device)
    empty = torch.empty(6, 0, dtype=torch.float16, device=device)
    found = unit.dot_add(empty, empty, c, instruction)
    assert found.cpu().view(torch.int32).tolist() == codes.tolist()


def test_no_problems(unit, device):
    empty = torch.empty(0, 16, dtype=torch.float16, device=device)
    assert unit.dot_add(empty, empty, torch.empty(0, device=device), "wgmma").shape == (0,)


def test_operands_need_not_be_contiguous(unit, device):
    a, b, c = integers((33, 40), 9, seed=1), integers((40, 33), 9, seed=2), integers((66,), 9, seed=3)
    found = unit.dot_add(
        a.bfloat16().to(device)[:, ::2], b.bfloat16().to(device)[::2].T, c.float().to(device)[::2], "mma.sync"
    )
    bits_equal(found, (c[::2] + (a[:, ::2] * b[::2].T).sum(-1)).float().numpy())


def test_other_tensors_are_refused(unit):
    ones, c = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2)
    for a, b, addend in [(ones.float(), ones.float(), c), (ones, ones.half(), c), (ones, ones, c.double())]:
        with pytest.raises(ValueError, match="expected two operands of one type"):
            unit.dot_add(a, b, addend, "wgmma")
    for a, b, addend in [(ones, ones[:1], c), (ones, ones.T, c), (ones[0], ones[0], c), (ones, ones, c[:1])]:
        with pytest.raises(ValueError, match=r"expected \[n, K\], \[n, K\] and \[n\]"):
            unit.dot_add(a, b, addend, "wgmma")


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
@pytest.mark.parametrize(
    ("rows", "keys", "features", "tile"),
    [(1, 1, 1, 16), (17, 40, 65, 16), (66, 128, 64, 64), (20, 70, 130, 32)],
    ids=str,
)
def test_chain_over_tiles(chain, device, rows, keys, features, tile, instruction):
    """T0: small integers and factors that are powers of two, so that every step is exact in FP32."""
    p, v = integers((rows, keys), 8, seed=1).abs(), integers((keys, features), 16, seed=2)
    num_tiles = -(-keys // tile)
    alpha = 2.0 ** integers((rows, num_tiles), 1, seed=3)
    row_sum = 2.0 ** integers((rows,), 3, seed=4)
    o_bar = torch.zeros(rows, features, dtype=torch.float64)
    for visit, start in enumerate(reversed(range(0, keys, tile))):
        some = slice(start, start + tile)
        o_bar = o_bar * alpha[:, visit, None] + p[:, some].double() @ v[some].double()
    found, o = chain.pv_chain(
        p.bfloat16().to(device), v.bfloat16().to(device), alpha.to(device), row_sum.to(device), tile, instruction
    )
    bits_equal(found, o_bar.float().numpy())
    bits_equal(o, (o_bar / row_sum[:, None]).float().bfloat16().float().numpy())


def test_chain_rounds_o_once_to_nearest(chain, device):
    """-4.703990459442139 goes to -4.71875; truncation, and the tie without the small term, would give -4.6875."""
    p = torch.tensor([[1.0, 1.0, 2.0**-10]], dtype=torch.bfloat16, device=device)
    v = torch.tensor([[-2.40625], [-2.296875], [-0.88671875]], dtype=torch.bfloat16, device=device)
    one = torch.ones(1, 1, device=device)
    o_bar, o = chain.pv_chain(p, v, one, one[0], 16, "mma.sync")
    assert o_bar.item() == -4.703125 - 0.88671875 * 2.0**-10
    assert o.item() == -4.71875


def test_chain_of_no_keys_is_zero(chain, device):
    p = torch.empty(3, 0, dtype=torch.bfloat16, device=device)
    v = torch.empty(0, 5, dtype=torch.bfloat16, device=device)
    one = torch.ones(3, device=device)
    for found in chain.pv_chain(p, v, one[:, None][:, :0], one, 16, "wgmma"):
        assert (found.shape, found.abs().max().item()) == ((3, 5), 0.0)


def test_chain_refuses_other_tensors(chain):
    p, v = torch.ones(2, 20, dtype=torch.bfloat16), torch.ones(20, 4, dtype=torch.bfloat16)
    alpha, row_sum = torch.ones(2, 2), torch.ones(2)
    with pytest.raises(ValueError, match="expected P and V in BF16"):
        chain.pv_chain(p.float(), v, alpha, row_sum, 16, "mma.sync")
    for wrong in [(p, v.T, alpha, row_sum), (p, v, alpha[:, :1], row_sum), (p, v, alpha, row_sum[:1])]:
        with pytest.raises(ValueError, match=r"expected \[R, M\], \[M, E\], \[R, ceil\(M / 16\)\] and \[R\]"):
            chain.pv_chain(*wrong, 16, "mma.sync")
