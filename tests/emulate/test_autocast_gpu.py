"""Emulated autocast against CUDA autocast itself, operation by operation, on the same operands.

Formats must be equal. Values may differ where a GPU adds in another order or takes an approximate exponential: a BF16
rounding flips where the FP32 result lies within that error of a halfway point, and then by one step.

For sums of K products of random numbers the FP32 errors of both sides together are about sqrt(K) 2^-24 of the largest
partial sum, some 2^-20 of the result at K = 768; halfway points lie 2^-8 of the result apart, so that some 2^-11 of
all elements flip (0.05 %). Elements much smaller than the typical one have relatively larger errors; MOST_DIFFERING
leaves room for them.
"""

import pytest
import torch
from torch.nn import functional

from bf16forensics.emulate.autocast import CudaAutocast
from bf16forensics.emulate.strict import strict_fp32

pytestmark = [
    pytest.mark.gpu,
    # The first product of a process, where autograd runs it in a thread of its own.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

BF16, FP32 = torch.bfloat16, torch.float32
#: Share of the elements of a BF16 result that may be neighbours instead of equal.
MOST_DIFFERING = 0.01
#: Largest relative difference of FP32 results, by the largest element: a few hundred additions in another order.
FP32_TOLERANCE = 1e-5

CODES = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
#: All finite BF16 numbers but those whose results may be subnormal, which GPUs and CPUs may flush differently.
NUMBERS = CODES[CODES.isfinite() & (CODES.float().abs() > 2.0**-100) & (CODES.float().abs() < 2.0**100)]


def drawn(*shape, seed=0, spread=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def on(device, function, operands):
    """Result and gradients of a call under autocast, on the CPU; the result's gradient is random, of its format."""
    leaves = [
        t.to(device).requires_grad_() if t.is_floating_point() else t.to(device) for t in (t.clone() for t in operands)
    ]
    with strict_fp32(), CudaAutocast() if device == "cpu" else torch.autocast("cuda", BF16):
        result = function(*leaves)
    gradient = drawn(*result.shape, seed=99).to(result.dtype) if result.dim() else torch.ones((), dtype=result.dtype)
    with strict_fp32():
        result.backward(gradient.to(device))
    return result.detach().cpu(), [t.grad.cpu() for t in leaves if t.is_floating_point()]


def ordered(values):
    """BF16 codes as integers in the order of their values, so that neighbours differ by 1."""
    code = values.view(torch.int16).to(torch.int32)
    return torch.where(code < 0, -(code & 0x7FFF), code)


def compare_bf16(name, emulated, real, in_parts):
    """BF16 values: few differ, none by more than one step unless it is tiny beside the others.

    Where a result is a sum of parts that rounded before, a flipped part moves it by a step of that part.
    """
    assert torch.equal(emulated.isnan(), real.isnan())
    steps = (ordered(emulated) - ordered(real)).abs()
    differing = (steps > 0).double().mean().item()
    typical = real.float().square().mean().sqrt()
    # A sum that cancels to a thousandth of the typical result has an FP32 error of many of its own steps.
    usual = real.float().abs() >= 2.0**-10 * typical
    if in_parts:
        # Parts are four times the typical result at most, and their steps 2^-7 of that.
        usual &= (emulated.float() - real.float()).abs() > 2.0**-7 * 4 * typical
    worst = int(steps[usual].max()) if bool(usual.any()) else 0
    print(f"   {name}: {differing:.1e} differ, by up to {worst} steps")
    assert worst <= 1, name
    assert differing <= MOST_DIFFERING, name


def compare(name, emulated, real, rounded=False, in_parts=False):
    assert emulated.dtype == real.dtype, name
    assert emulated.shape == real.shape, name
    if real.dtype == BF16:
        compare_bf16(name, emulated, real, in_parts)
    elif rounded:
        # The gradient of an FP32 leaf that was cast: BF16 values.
        assert torch.equal(real, real.bfloat16().float()), name
        assert torch.equal(emulated, emulated.bfloat16().float()), name
        compare_bf16(name, emulated.bfloat16(), real.bfloat16(), in_parts)
    else:
        largest = (emulated - real).abs().max() / real.abs().max().clamp(min=1e-30)
        print(f"   {name}: largest difference {largest:.1e} of the largest element")
        assert largest <= FP32_TOLERANCE, name


def check(name, function, *operands, rounded=False):
    """Compares result and gradients of one operation; `rounded` where gradients of FP32 operands pass a cast."""
    in_parts = name in IN_PARTS
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    print(name)
    (found, gradients), (real, real_gradients) = (on(device, function, operands) for device in ("cpu", "cuda"))
    compare("result", found, real, in_parts=in_parts)
    for index, (mine, truth) in enumerate(zip(gradients, real_gradients, strict=True)):
        compare(f"gradient {index}", mine, truth, rounded, in_parts)


T, C = 512, 768
X, W, BIAS = drawn(T, C), drawn(C, C, seed=1, spread=0.02), drawn(C, seed=2, spread=0.5)

PRODUCTS = {
    "linear": (functional.linear, (X, W)),
    "linear with bias": (functional.linear, (X, W, BIAS)),
    "linear with bias, 3 dimensions": (functional.linear, (X.view(2, T // 2, C), W, BIAS)),
    "linear with bias, not contiguous": (
        lambda x, w, b: functional.linear(x.transpose(0, 1), w, b), (X.view(T // 4, 4, C), W, BIAS)
    ),
    "matmul": (lambda a, b: a @ b, (X, W)),
    "matmul, batches": (lambda a, b: a @ b, (drawn(6, 256, 64), drawn(6, 64, 256, seed=1))),
    "matmul, broadcast": (lambda a, b: a @ b, (drawn(2, 1, 128, 64), drawn(1, 3, 64, 128, seed=1))),
    "addmm": (torch.addmm, (BIAS, X, W)),
    "addmm, alpha": (lambda c, a, b: torch.addmm(c, a, b, alpha=0.37), (BIAS, X, W)),
    "addmm of a matrix": (torch.addmm, (drawn(T, C, seed=3), X, W)),
    "baddbmm": (torch.baddbmm, (drawn(6, 256, 256), drawn(6, 256, 64), drawn(6, 64, 256, seed=1))),
    "einsum": (
        lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), (drawn(2, 3, 128, 64), drawn(2, 3, 128, 64, seed=1))
    ),
    "linear of BF16": (functional.linear, (X.bfloat16(), W)),
}  # fmt: skip


#: Products that round before something is added to them or multiplies them.
IN_PARTS = ("linear with bias, not contiguous", "matmul, broadcast", "addmm, alpha", "baddbmm", "addmm of a matrix")


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    function, operands = PRODUCTS[name]
    check(name, function, *operands, rounded=True)


def test_a_bias_is_added_before_the_product_is_rounded():
    """257 ones and a bias of 1: 258 if the bias is part of the sum, 256 if the sum is rounded first."""
    ones = torch.ones(8, 257)
    check("258 or 256", functional.linear, ones, torch.ones(16, 257), torch.ones(16), rounded=True)


FP32_OPERATIONS = {
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (C,), w, b, 1e-5), (X, 1 + BIAS, BIAS)),
    "softmax": (lambda x: functional.softmax(x, -1), (X,)),
    "log_softmax": (lambda x: functional.log_softmax(x, -1), (X,)),
    "cross_entropy": (
        functional.cross_entropy, (drawn(T, 1000), torch.randint(0, 1000, (T,), generator=torch.Generator()))
    ),
    "sum": (lambda x: x.sum(-1), (X,)),
    "pow": (lambda x: x**2, (X,)),
    "mse_loss": (functional.mse_loss, (X, W[:T])),
}  # fmt: skip


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 operand", "bf16 operand"])
@pytest.mark.parametrize("name", FP32_OPERATIONS)
def test_fp32_operations(name, narrow):
    function, (first, *rest) = FP32_OPERATIONS[name]
    check(name, function, first.bfloat16() if narrow else first, *rest)


#: Results that a CPU and a GPU compute alike to the last FP32 bits: BF16 roundings flip in few of all BF16 numbers.
ELEMENTWISE = {
    "gelu": functional.gelu,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "x * 0.1": lambda x: x * 0.1,
    "x + 0.1": lambda x: x + 0.1,
    "0.1 - x": lambda x: 0.1 - x,
    "x / 3": lambda x: x / 3.0,
    "x + 0.3 x": lambda x: torch.add(x, x, alpha=0.3),
    "x * x": lambda x: x * x,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_on_every_number(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (found, (gradient,)), (real, (real_gradient,)) = (
        on(device, ELEMENTWISE[name], (NUMBERS,)) for device in ("cpu", "cuda")
    )
    for what, mine, truth in (("result", found, real), ("gradient", gradient, real_gradient)):
        assert mine.dtype == truth.dtype == BF16
        assert torch.equal(mine.isnan(), truth.isnan())
        steps = (ordered(mine) - ordered(truth)).abs()
        # The tails of gelu cancel to nothing in FP32, where each side keeps what its erf or tanh left. Numbers that all
        # functions treat alike (too small, too large) would dilute the share.
        usual = (truth.float().abs() >= 2.0**-16) & (NUMBERS.abs() >= 2.0**-12) & (NUMBERS.abs() < 16)
        differing = (steps > 0)[usual].double().mean().item()
        print(f"   {name}, {what}: {differing:.1e} differ, by up to {int(steps[usual].max())} steps")
        assert differing <= MOST_DIFFERING


def test_formats_of_unlisted_operations():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    operations = {
        "mean": lambda x: x.mean(-1),
        "1 / x": lambda x: 1 / x,
        "square": torch.square,
        "var": lambda x: x.var(-1),
        "cumsum": lambda x: x.cumsum(-1),
        "norm": lambda x: x.norm(),
        "addcmul": lambda x: torch.addcmul(x, x, x.float()),
        "cat": lambda x: torch.cat([x, x.float()]),
        "where": lambda x: torch.where(x > 0, x, 0.1),
    }
    x = X.bfloat16()
    for name, function in operations.items():
        with CudaAutocast():
            found = function(x)
        with torch.autocast("cuda", BF16):
            real = function(x.cuda())
        assert found.dtype == real.dtype, name
