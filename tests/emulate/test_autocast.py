"""Emulated CUDA autocast: which format an operation has, where it rounds, what it refuses, and what switches it off.

Products are compared with exact integer arithmetic: operands are small integers, so that every FP32 sum is exact and
only the rounding to BF16 is left, whatever the order of additions. 257 is the first integer that BF16 cannot hold.
"""

import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from bf16forensics.emulate import autocast_lists
from bf16forensics.emulate.autocast import CudaAutocast
from bf16forensics.emulate.rounding import round_to
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def drawn(*shape, seed=0, high=9, dtype=FP32):
    """Small integers."""
    return torch.randint(-high, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(exact):
    """One rounding of an exact result to BF16."""
    return round_to(exact, "bf16").to(BF16)


def under_autocast(function, *operands):
    """Result and gradients of FP32 or BF16 leaves, the gradient of the result being small integers."""
    leaves = [t.clone().requires_grad_() for t in operands]
    with CudaAutocast():
        result = function(*leaves)
    result.backward(drawn(*result.shape, seed=99).to(result.dtype))
    return result.detach(), [t.grad for t in leaves]


# -- the lists ---------------------------------------------------------------------------------------------------------


def header_list(name):
    """Operations of one macro of the installed torch's own header."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = path.read_text(encoding="utf-8")
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)+.*\n)", text)
    assert body is not None
    return set(re.findall(r"_\((?:ADD_NS\()?(\w+)", body.group(1)))


@pytest.mark.parametrize(("macros", "ours"), [
    (("AT_FORALL_LOWER_PRECISION_FP",), autocast_lists.LOWER_PRECISION),
    (("AT_FORALL_FP32",), autocast_lists.FP32),
    (("AT_FORALL_FP32_SET_OPT_DTYPE", "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE"), autocast_lists.FP32_UNLESS_DTYPE),
    (("AT_FORALL_PROMOTE",), autocast_lists.PROMOTE),
])  # fmt: skip
def test_the_lists_are_those_of_the_installed_torch(macros, ours):
    found = set().union(*(header_list(macro) for macro in macros))
    assert len(found) > 8
    assert found == set(ours)


A, B = drawn(5, 8), drawn(5, 8, dtype=BF16)
IDS = torch.tensor([0, 3, 2, 1, 4])

FORMATS = {
    # Lower precision.
    "x @ w": (lambda: A @ A.T, BF16),
    "x.__rmatmul__(w)": (lambda: A.__rmatmul__(A.T), BF16),
    "linear": (lambda: functional.linear(A, A, A[:, 0]), BF16),
    "nn.Linear": (lambda: nn.Linear(8, 3)(A), BF16),
    "linear of fp16": (lambda: functional.linear(A.half(), A), BF16),
    "einsum": (lambda: torch.einsum("ij,kj->ik", A, B), BF16),
    "baddbmm": (lambda: torch.baddbmm(A[None, :, :5], A[None], A.T[None]), BF16),
    # FP32.
    "exp": (lambda: torch.exp(B), FP32),
    "x ** 2": (lambda: B**2, FP32),
    "2 ** x": (lambda: 2.0**B, FP32),
    "1 / x": (lambda: 1.0 / B, FP32),
    "square": (lambda: B.square(), FP32),
    "rsqrt": (lambda: B.rsqrt(), FP32),
    "sum": (lambda: B.sum(-1), FP32),
    "cumsum": (lambda: B.cumsum(-1), FP32),
    "norm": (lambda: B.norm(), FP32),
    "linalg.norm": (lambda: torch.linalg.norm(B), FP32),
    "softmax": (lambda: functional.softmax(B, -1), FP32),
    "x.softmax": (lambda: B.softmax(-1), FP32),
    "log_softmax": (lambda: functional.log_softmax(B, -1), FP32),
    "layer_norm": (lambda: functional.layer_norm(B, (8,)), FP32),
    "nn.LayerNorm": (lambda: nn.LayerNorm(8)(B), FP32),
    "rms_norm": (lambda: functional.rms_norm(B, (8,)), FP32),
    "cross_entropy": (lambda: functional.cross_entropy(B, IDS), FP32),
    "mse_loss": (lambda: functional.mse_loss(B, B), FP32),
    "softplus": (lambda: functional.softplus(B), FP32),
    # A named dtype is respected, integers are none of autocast's business, FP64 stays.
    "softmax with dtype": (lambda: functional.softmax(B, -1, dtype=FP64), FP64),
    "sum of integers": (lambda: IDS.sum(), torch.int64),
    "x @ w in fp64": (lambda: A.double() @ A.double().T, FP64),
    "exp of fp64": (lambda: A.double().exp(), FP64),
    # Promotion.
    "x + y": (lambda: B + A, FP32),
    "addcmul": (lambda: torch.addcmul(B, B, A), FP32),
    "addcmul of bf16": (lambda: torch.addcmul(B, B, B), BF16),
    "dot": (lambda: torch.dot(A[0], B[0]), FP32),
    "x * 2": (lambda: B * 2.0, BF16),
    "x + 1": (lambda: B + 1.0, BF16),
    "1 - x": (lambda: 1.0 - B, BF16),
    "x / 3": (lambda: B / 3.0, BF16),
    "mean": (lambda: B.mean(-1), BF16),
    "gelu": (lambda: functional.gelu(B), BF16),
    "silu": (lambda: functional.silu(B), BF16),
    "embedding": (lambda: functional.embedding(IDS, A), FP32),
    "in place": (lambda: B.clone().exp_(), BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_results(name):
    function, dtype = FORMATS[name]
    with CudaAutocast():
        assert function().dtype == dtype


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 6, 3), (1, 6, 3), (4, 1, 3), (4, 6, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "leading", [((), ()), ((3,), ()), ((), (3,)), ((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3))], ids=str
)
def test_matmul_rounds_an_exact_sum_once(leading, sizes):
    n, k, m = sizes
    a, b = drawn(*leading[0], n, k, high=99), drawn(*leading[1], k, m, high=99, seed=1)
    result, (of_a, of_b) = under_autocast(torch.matmul, a, b)
    exact = [t.double().requires_grad_() for t in (a, b)]
    product = exact[0] @ exact[1]
    assert torch.equal(result, rounded(product.detach()))
    product.backward(drawn(*product.shape, seed=99, dtype=FP64))
    # Where an operand was broadcast, rounded parts are added instead; sums this small are exact after that.
    if leading[0] == leading[1] or not all(leading):
        assert torch.equal(of_a, rounded(exact[0].grad).float())
        assert torch.equal(of_b, rounded(exact[1].grad).float())


def test_the_gradient_of_a_broadcast_operand_is_a_sum_of_rounded_products():
    a, b = torch.ones(2, 1, 1, 1).requires_grad_(), torch.full((1, 3, 1, 1), 129.0)
    with CudaAutocast():
        product = a @ b
    product.backward(torch.full_like(product, 3.0))
    # Each of three parts is 387, rounded to 388; 1164 rounds to 1168, while 3 * 387 = 1161 would round to 1160.
    assert a.grad.flatten().tolist() == [1168.0, 1168.0]


PRODUCTS = {
    "mm": (torch.mm, lambda a, b: a @ b, ((4, 6), (6, 3))),
    "bmm": (torch.bmm, lambda a, b: a @ b, ((2, 4, 6), (2, 6, 3))),
    "mv": (torch.mv, lambda a, b: a @ b, ((4, 6), (6,))),
    "vector @ matrix": (torch.matmul, lambda a, b: a @ b, ((6,), (6, 3))),
    "vector @ vector": (torch.matmul, lambda a, b: a @ b, ((6,), (6,))),
    "linear": (functional.linear, lambda a, b: a @ b.T, ((2, 4, 6), (3, 6))),
    "linear with bias": (functional.linear, lambda a, b, c: a @ b.T + c, ((4, 6), (3, 6), (3,))),
    "linear of 3 dimensions": (functional.linear, lambda a, b, c: a @ b.T + c, ((2, 4, 6), (3, 6), (3,))),
    "addmm": (torch.addmm, lambda c, a, b: a @ b + c, ((3,), (4, 6), (6, 3))),
    "addmv": (torch.addmv, lambda c, a, b: a @ b + c, ((4,), (4, 6), (6,))),
    "beta": (
        lambda c, a, b: torch.addmm(c, a, b, beta=3), lambda c, a, b: a @ b + 3 * c, ((3,), (4, 6), (6, 3))
    ),
    "x.addmm": (lambda c, a, b: c.addmm(mat1=a, mat2=b), lambda c, a, b: a @ b + c, ((3,), (4, 6), (6, 3))),
    "einsum": (
        lambda a, b: torch.einsum("bhid, bhjd -> bhij", a, b),
        lambda a, b: a @ b.mT, ((2, 3, 4, 6), (2, 3, 5, 6)),
    ),
    "einsum, implicit": (lambda a, b: torch.einsum("ij,kj", a, b), lambda a, b: a @ b.T, ((4, 6), (3, 6))),
    "einsum, ellipsis": (
        lambda a, b: torch.einsum("...ij,...jk->...ki", a, b), lambda a, b: (a @ b).mT, ((2, 4, 6), (2, 6, 3))
    ),
    "einsum, a list": (lambda a, b: torch.einsum("ij,kj->ik", [a, b]), lambda a, b: a @ b.T, ((4, 6), (3, 6))),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_is_one_exact_sum_rounded_once(name):
    function, exactly, shapes = PRODUCTS[name]
    operands = [drawn(*shape, seed=i, high=60) for i, shape in enumerate(shapes)]
    # Values above 256 in results make the rounding visible.
    result, gradients = under_autocast(function, *operands)
    exact = [t.double().requires_grad_() for t in operands]
    wide = exactly(*exact)
    assert torch.equal(result, rounded(wide.detach()))
    assert not torch.equal(result.double(), wide.detach())
    wide.backward(drawn(*wide.shape, seed=99, dtype=FP64))
    for found, truth in zip(gradients, exact, strict=True):
        assert found.dtype == FP32
        assert torch.equal(found, rounded(truth.grad).float())


def test_operands_are_rounded_before_they_are_multiplied():
    with CudaAutocast():
        assert (torch.tensor([[257.0]]) @ torch.tensor([[1.0]])).item() == 256.0
        assert (torch.tensor([[259.0]]) @ torch.tensor([[1.0]])).item() == 260.0


def test_a_bias_is_added_before_the_rounding_but_after_it_where_torch_adds_it_apart():
    # 257 rounds to 256 and 256 + 1 to 256, while 257 + 1 is 258.
    x, w, bias = torch.ones(1, 2, 257), torch.ones(1, 257), torch.ones(1)
    with CudaAutocast():
        assert functional.linear(x, w, bias).unique().tolist() == [258.0]
        assert functional.linear(x[0], w, bias).unique().tolist() == [258.0]
        apart = torch.ones(257, 2, 2).permute(1, 2, 0)
        assert functional.linear(apart, w, bias).unique().tolist() == [256.0]


def test_an_einsum_that_sums_nothing_is_an_elementwise_product():
    a, b = torch.ones(2).requires_grad_(), torch.full((3,), 129.0)
    with CudaAutocast():
        product = torch.einsum("i,j->ji", a, b)
    assert product.shape == (3, 2)
    product.backward(torch.full_like(product, 3.0))
    # As above: the parts of the gradient round before they are added.
    assert a.grad.tolist() == [1168.0, 1168.0]


@pytest.mark.parametrize("batched", [False, True])
def test_a_product_rounds_before_it_is_added_to_a_whole_matrix(batched):
    # 257 rounds to 256, and 256 + 1 to 256, while 257 + 1 is 258.
    c, a, b = torch.ones(2, 3), torch.ones(2, 257), torch.ones(257, 3)
    with CudaAutocast():
        found = torch.baddbmm(c[None], a[None], b[None])[0] if batched else torch.addmm(c, a, b)
        assert found.unique().tolist() == [256.0]
        # A row that broadcasts is the bias of a linear layer.
        assert torch.addmm(c[0], a, b).unique().tolist() == [258.0]


def test_whole_matrices_take_part_in_the_gradient():
    c, a, b = drawn(2, 4, 3), drawn(2, 4, 6, seed=1), drawn(2, 6, 3, seed=2)
    _, gradients = under_autocast(torch.baddbmm, c, a, b)
    upstream = drawn(2, 4, 3, seed=99, dtype=FP64)
    expected = (upstream, upstream @ b.double().mT, a.double().mT @ upstream)
    for found, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(found, rounded(wanted).float())


def test_cross_entropy_of_bf16_logits_rounds_the_log_probabilities():
    logits, labels = drawn(6, 50, high=40).div(8).bfloat16(), torch.tensor([1, 7, -100, 3, 49, 0])
    leaf = logits.clone().requires_grad_()
    with CudaAutocast():
        loss = functional.cross_entropy(leaf, labels)
    assert loss.dtype == FP32
    wide = rounded(torch.log_softmax(logits.double(), -1))
    used = labels >= 0
    assert loss.item() == pytest.approx(-float(wide[used, labels[used]].double().mean()), rel=1e-6)
    loss.backward()
    # The probabilities of the backward pass are those of the rounded values; 1/5 is rounded before they are used.
    arriving = torch.zeros(6, 50, dtype=FP64)
    arriving[used, labels[used]] = -float(rounded(torch.tensor(0.2, dtype=FP64)))
    expected = arriving - wide.double().exp() * arriving.sum(-1, keepdim=True)
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=2.0**-8, atol=1e-12)
    plain = logits.clone().float().requires_grad_()
    functional.cross_entropy(plain, labels).backward()
    assert not torch.equal(leaf.grad.float(), rounded(plain.grad.double()).float())


def test_cross_entropy_of_fp32_logits_is_as_it_is_and_what_is_not_emulated_is_refused():
    logits, labels = drawn(6, 50, high=40).float() / 7, torch.tensor([1, 7, -100, 3, 49, 0])
    with CudaAutocast():
        assert torch.equal(functional.cross_entropy(logits, labels), functional.cross_entropy(logits, labels))
        assert functional.cross_entropy(logits, labels).item() == pytest.approx(
            float(functional.cross_entropy(logits.double(), labels)), rel=1e-6
        )
        with pytest.raises(InputError, match="label smoothing"):
            functional.cross_entropy(logits.bfloat16(), labels, label_smoothing=0.1)


def test_addbmm_rounds_after_every_product():
    c, a, b = torch.zeros(1, 1), torch.full((3, 1, 1), 1.0), torch.tensor([256.0, 1.0, 1.0]).view(3, 1, 1)
    with CudaAutocast():
        assert torch.addbmm(c, a, b).item() == 256.0
        assert torch.addbmm(c, a, b.flip(0)).item() == 258.0


def test_a_factor_of_a_product_scales_its_gradients_after_they_rounded():
    def scaled(c, a, b):
        return torch.addmm(c, a, b, alpha=3.0)

    c, a, b = torch.zeros(1, 1), torch.full((1, 1), 5.0), torch.full((1, 2), 43.0)
    leaves = [t.clone().requires_grad_() for t in (c.expand(1, 2), a, b)]
    with CudaAutocast():
        result = scaled(*leaves)
    assert result.tolist() == [[644.0, 644.0]]  # 645 is between 644 and 648.
    result.backward(torch.tensor([[1.0, 5.0]], dtype=BF16))
    # 43 + 215 = 258, rounded to 258; times 3 is 774, rounded to 776.
    assert leaves[1].grad.item() == 776.0
    assert leaves[2].grad.tolist() == [[15.0, 75.0]]
    assert leaves[0].grad.tolist() == [[1.0, 5.0]]


def test_beta_of_zero_ignores_what_is_added():
    with CudaAutocast():
        assert torch.addmm(torch.tensor([torch.nan]), A[:1, :1], A[:1, :1], beta=0).isfinite().all()


def test_gradients_round_where_they_pass_a_cast():
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    w = torch.tensor([[1.0, 1.0]])
    with CudaAutocast():
        y = x + functional.linear(x, w) * torch.tensor([1.0 + 2.0**-12])
    assert y.dtype == FP32
    y.backward(torch.tensor([[1.0, 1.0]]))
    # Through the residual the gradient stays 1; through the product it is 2 + 2^-11, which BF16 rounds to 2.
    assert x.grad.tolist() == [[3.0, 3.0]]


def test_a_product_can_be_differentiated_twice():
    x = drawn(4, 6).requires_grad_()
    w = drawn(3, 6, seed=1)
    with CudaAutocast():
        y = functional.linear(x, w)
    v = torch.zeros_like(y).requires_grad_()
    (pulled,) = torch.autograd.grad(y, x, v, create_graph=True)
    move = drawn(4, 6, seed=2)
    (pushed,) = torch.autograd.grad(pulled, v, move)
    assert torch.equal(pushed.double(), rounded(move.double() @ w.double().T).double())


@pytest.mark.parametrize("name", ["gelu", "tanh", "sigmoid", "erf"])
def test_an_activation_can_be_differentiated_twice(name):
    function = getattr(torch, name, None) or getattr(functional, name)
    x = torch.linspace(-2, 2, 21).bfloat16().requires_grad_()
    with CudaAutocast():
        y = function(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    exact = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(function(exact).sum(), exact, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), exact)
    # A handful of BF16 roundings of numbers near 1.
    torch.testing.assert_close(second.double(), wanted, rtol=0, atol=4 * 2.0**-8)


def test_gradients_taken_inside_the_block_are_the_same():
    x, w = drawn(4, 6, high=99).requires_grad_(), drawn(3, 6, seed=1, high=99)
    found = []
    for taken_inside in (True, False):
        with CudaAutocast():
            y = functional.linear(x, w).sum()
            if taken_inside:
                found += torch.autograd.grad(y, x)
        if not taken_inside:
            found += torch.autograd.grad(y, x)
    assert torch.equal(*found)


# -- elementwise -------------------------------------------------------------------------------------------------------

CODES = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
NUMBERS = CODES[CODES.isfinite()]


def bits(values):
    """Codes, one for all NaN."""
    return values.masked_fill(values.isnan(), torch.nan).view(torch.int16)


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype == BF16
    assert torch.equal(bits(found), bits(expected))


def reference_gelu(x):
    return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


UNARY = {
    "gelu": (functional.gelu, reference_gelu),
    "gelu, tanh": ((lambda x: functional.gelu(x, approximate="tanh")),) * 2,
    "silu": (functional.silu, functional.silu),
    "relu": (functional.relu, functional.relu),
    "leaky relu": ((lambda x: functional.leaky_relu(x, 0.1)),) * 2,
    "x * 0.1": ((lambda x: x * 0.1),) * 2,
    "x + 0.1": ((lambda x: x + 0.1),) * 2,
    "0.1 - x": ((lambda x: 0.1 - x),) * 2,
    "x - 0.1": ((lambda x: x - 0.1),) * 2,
    "x / 3": (lambda x: x / 3.0, lambda x: x * (1 / torch.tensor(3.0)).item()),
    "x + 0.1 x": ((lambda x: torch.add(x, x, alpha=0.1)),) * 2,
    "x + x": ((lambda x: x + x),) * 2,
    "neg": (torch.neg, torch.neg),
    "clamp": ((lambda x: x.clamp(-0.25, 0.5)),) * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_elementwise_operations_round_an_fp32_result_once_forward_and_backward(name):
    function, in_fp32 = UNARY[name]
    gradient = torch.full_like(NUMBERS, 1.2344)
    narrow, wide = NUMBERS.clone().requires_grad_(), NUMBERS.float().requires_grad_()
    with CudaAutocast():
        result = function(narrow)
    result.backward(gradient)
    expected = in_fp32(wide)
    expected.backward(gradient.float())
    assert_same_bits(result.detach(), expected.detach().bfloat16())
    if name == "gelu":
        # The derivative is written with another order of FP32 operations here: its last bits decide few roundings.
        usual = NUMBERS.float().abs() < 100
        apart = bits(narrow.grad)[usual] != bits(wide.grad.bfloat16())[usual]
        assert apart.float().mean() < 1e-3
    else:
        assert_same_bits(narrow.grad, wide.grad.bfloat16())


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, torch.erf, torch.sqrt, torch.exp2, torch.cos],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_results_of_other_functions_round_once(function):
    # FP32 subnormals are left out: vector libraries may flush them.
    numbers = NUMBERS[NUMBERS.float().abs() > 2.0**-100]
    with CudaAutocast():
        result = function(numbers)
    assert_same_bits(result, function(numbers.float()).bfloat16())


@pytest.mark.parametrize(("function", "steps"), [
    (torch.tanh, lambda g, y: (("mul", y, y), ("rsub", None, None), ("mul", g, None))),
    (torch.sigmoid, lambda g, y: (("rsub", y, None), ("mul", g, None), ("mul", y, None))),
], ids=["tanh", "sigmoid"])  # fmt: skip
def test_gradients_of_tanh_and_sigmoid_round_at_every_step(function, steps):
    x = NUMBERS.clone().requires_grad_()
    gradient = torch.full_like(NUMBERS, 1.2344)
    with CudaAutocast():
        result = function(x)
    result.backward(gradient)
    value = None
    for operation, first, second in steps(gradient.double(), result.detach().double()):
        if operation == "rsub":
            value = 1.0 - (value if first is None else first)
        else:
            value = first * (value if second is None else second)
        # A product of two BF16 numbers and 1 - y are exact in float64 as far as BF16 can tell.
        value = round_to(value, "bf16")
    assert torch.equal(x.grad.double(), value)
    with torch.no_grad():
        assert not torch.equal(x.grad, torch.autograd.functional.vjp(function, NUMBERS, gradient)[1])


@pytest.mark.parametrize("operation", [torch.add, torch.sub, torch.mul, torch.div, torch.maximum],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_operations_of_two_tensors_round_once(operation):
    a, b = (torch.randn(4096, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    with CudaAutocast():
        assert torch.equal(operation(a, b), operation(a.float(), b.float()).bfloat16())


def test_numbers_take_part_in_place():
    for method, plain in (("add_", 1.0 + 0.1), ("sub_", 1.0 - 0.1), ("div_", 1.0 / 3.0)):
        x = torch.ones(2, dtype=BF16)
        with CudaAutocast():
            assert getattr(x, method)(3.0 if method == "div_" else 0.1) is x
        assert x.tolist() == [rounded(torch.tensor(plain, dtype=FP64)).item()] * 2


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "conv1d": lambda: functional.conv1d(A[None], A[:, :5, None]),
    "prelu": lambda: functional.prelu(B, A[0, :1]),
    "addr": lambda: torch.addr(A[:, :5], A[:, 0], A[:, 0]),
    "multi_dot": lambda: torch.linalg.multi_dot([A, A.T, A]),
    "chain_matmul": lambda: torch.chain_matmul(A, A.T),
    "scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(A[None], A[None], A[None]),
    "gru_cell": lambda: nn.GRUCell(8, 3)(A),
    # Listed nowhere, made of listed operations.
    "inner": lambda: torch.inner(A, A),
    "normalize": lambda: functional.normalize(B),
    "multi_head_attention_forward": lambda: nn.MultiheadAttention(8, 2)(A, A, A),
    "lstm": lambda: nn.LSTM(8, 3)(A),
    "addmm_": lambda: torch.zeros(5, 5, dtype=BF16).addmm_(B, B.T),
    "dot": lambda: torch.dot(B[0], B[0]),
    "mm": lambda: torch.mm(A, A.T, out=torch.empty(5, 5)),
    "binary_cross_entropy": lambda: functional.binary_cross_entropy(B.sigmoid(), A.sigmoid()),
    "einsum": lambda: torch.einsum("ij,kj,lj->ikl", A, A, A),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
def test_what_is_not_emulated_is_refused_by_name(name):
    with CudaAutocast(), pytest.raises(InputError, match=name) as refusal:
        REFUSED[name]()
    assert "\n" not in str(refusal.value)
    with CudaAutocast():
        assert (A @ A.T).dtype == BF16


@pytest.mark.parametrize("equation", ["ii,ij->j", "ij,jk->k", "ij,jk->", "ij,kl->il", "ij->ji"])
def test_equations_of_several_steps_are_refused(equation):
    square = drawn(4, 4)
    operands = [square] * (equation.count(",") + 1)
    with CudaAutocast(), pytest.raises(InputError, match="several steps"):
        torch.einsum(equation, *operands)


def test_a_broadcast_einsum_is_refused():
    with CudaAutocast(), pytest.raises(InputError, match="several steps"):
        torch.einsum("bij,bjk->bik", drawn(1, 2, 3), drawn(4, 3, 2))


@pytest.mark.parametrize("operands", [(A.double(), A.T), (A.long(), A.T)], ids=["fp64", "integers"])
def test_mixtures_that_torch_refuses_stay_refused(operands):
    with CudaAutocast(), pytest.raises(RuntimeError, match="dtype"):
        torch.matmul(*operands)


# -- on and off --------------------------------------------------------------------------------------------------------


def flags():
    return [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]


def test_the_state_returns_even_after_errors_and_nests():
    before = flags()
    with CudaAutocast():
        assert flags() == [(True, BF16)] * 2
        with CudaAutocast(), pytest.raises(RuntimeError):
            torch.matmul(A, A)
        assert (A @ A.T).dtype == BF16
    assert flags() == before
    with pytest.raises(RuntimeError), CudaAutocast():
        torch.matmul(A, A)
    assert flags() == before
    assert (A @ A.T).dtype == FP32


def test_one_object_may_be_entered_again():
    before, mode = flags(), CudaAutocast()
    with mode, mode:
        assert (A @ A.T).dtype == BF16
    with mode:
        assert (A @ A.T).dtype == BF16
    assert flags() == before


def test_models_may_switch_it_off_around_what_must_be_fp32():
    exact = torch.tensor([[257.0]])
    with CudaAutocast():
        with torch.autocast("cpu", enabled=False):
            assert (exact @ exact).item() == 257.0**2
        with strict_fp32():
            assert (exact @ exact).item() == 257.0**2
        assert (exact @ exact).item() == 256.0**2


def test_autocast_to_another_format_is_refused():
    with CudaAutocast(), torch.autocast("cpu", dtype=torch.float16), pytest.raises(InputError, match="another format"):
        torch.matmul(A, A.T)


def test_other_threads_are_left_alone():
    seen = []

    def multiply():
        seen.append((A @ A.T).dtype)

    with CudaAutocast():
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    assert seen == [FP32]


def test_watching_does_not_import_the_compiler(run_python):
    code = (
        "import sys, torch\n"
        "from bf16forensics.emulate.autocast import CudaAutocast\n"
        "with CudaAutocast():\n"
        "    torch.ones(2).bfloat16().relu()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert run_python(["-c", code]).stdout == "False\n"
