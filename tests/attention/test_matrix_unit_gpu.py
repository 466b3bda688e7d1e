"""The model of Hopper's matrix unit against the unit: alone, in a chain like flash attention's, and in its kernel.

Everything here is T0: the model promises bits. What lies outside the model is taken from the device (the exponential
of base 2) or written out as the kernel has it (which thread sums what), and the recipe's own walk without either is
measured beside it.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bf16forensics.attention.matrix_unit import OPERAND_DTYPES, matrix_instructions, matrix_unit_dot, why_unavailable
from bf16forensics.attention.walk import walk_row
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.floats.accumulate import dot_add, matmul_add
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import BF16, format_named
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.derive import resolve

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
WRONG = ("sm80", "fp32-sequential", "exact")
UNITS = [("bf16", "mma.sync"), ("bf16", "wgmma"), ("fp16", "mma.sync"), ("fp16", "wgmma"), ("e4m3", "wgmma")]
#: Keys a tile of FlashAttention-2 at head size 64; queries too.
TILE = 128
#: Copies of a head, so that the library does not split its keys over several blocks.
HEADS = 132


@pytest.fixture(autouse=True)
def _hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no GPU of compute capability 9")


@pytest.fixture(scope="module")
def vectors():
    """examples/matrix_unit/vectors.py."""
    specification = importlib.util.spec_from_file_location(
        "matrix_unit_vectors", ROOT / "examples" / "matrix_unit" / "vectors.py"
    )
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def bits(x):
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def differing(found, expected):
    """Share of elements with other bits."""
    return np.mean(bits(found) != bits(expected))


@pytest.mark.parametrize(("operands", "instruction"), UNITS)
def test_the_compiler_uses_the_instruction(operands, instruction):
    (name,) = matrix_instructions(OPERAND_DTYPES[operands], instruction)
    assert name.startswith(instruction)
    assert ("k32" if operands == "e4m3" else "k16") in name
    assert name.endswith(
        {"bf16": "bf16.bf16", "fp16": "f16.f16", "e4m3": "e4m3.e4m3"}[operands] + (".f32" * (instruction == "mma.sync"))
    )


def test_fp8_is_refused_where_it_would_be_multiplied_as_fp16():
    assert "multiplies FP8 as FP16" in why_unavailable(torch.float8_e4m3fn, "mma.sync")


@pytest.mark.parametrize("num_instructions", [1, 5])
@pytest.mark.parametrize(("operands", "instruction"), UNITS)
def test_the_unit_is_as_modelled(operands, instruction, num_instructions, vectors):
    model, block = ("sm90-fp8", 32) if operands == "e4m3" else ("sm90", 16)
    *problems, names = vectors.problems(format_named(operands), 4000, block * num_instructions, seed=77)
    a, b, c = problems
    dtype = OPERAND_DTYPES[operands]
    tensors = [torch.from_numpy(t) for t in problems]
    d = matrix_unit_dot(tensors[0].to(dtype), tensors[1].to(dtype), tensors[2], instruction).numpy()
    wrong = np.array(names)[bits(d) != bits(dot_add(c, a, b, model, operands=operands))]
    assert len(wrong) == 0, dict(zip(*np.unique(wrong, return_counts=True), strict=True))


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "floats" / "data").glob("h200-*.npz")), ids=lambda p: p.stem)
def test_kept_vectors_are_what_this_unit_gives(path):
    """Also those that were measured through inline PTX."""
    file = np.load(path)
    instruction, dtype = str(file["instruction"]), OPERAND_DTYPES[str(file["operands"])]
    a, b, c = (torch.from_numpy(file[name].view(np.float32)) for name in "abc")
    # One block of 8 products and one of 16 whose other half is zero are the same.
    asked = "mma.sync" if instruction.startswith("m16n8") else instruction
    d = matrix_unit_dot(a.to(dtype), b.to(dtype), c, asked).numpy()
    assert np.array_equal(d.view(np.uint32), file["d"])


def saturated(tokens, size, seed):
    """q, k, v of one head in BF16 values: every seventh key is one that most queries prefer, scores of a few nats."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, size, generator=generator) for _ in range(3))
    k[5::7] = k[5]
    q += 0.25 * k[5]
    return tuple(t.bfloat16() for t in (q, k, v))


@pytest.mark.parametrize("instruction", ["mma.sync", "wgmma"])
@pytest.mark.parametrize(("tokens", "size"), [(384, 64), (200, 80)])
def test_a_chain_over_tiles_is_as_modelled(tokens, size, instruction):
    """O-bar and O of every row and feature, from one P-bar."""
    from bf16forensics.kernels.pv_chain import pv_chain

    q, k, v = saturated(tokens, size, seed=tokens)
    scores = (q.float() @ k.float().T * size**-0.5).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    # Anchored tile by tile, so that alpha is not 1 everywhere.
    starts = range((tokens - 1) // TILE * TILE, -1, -TILE)
    p, alpha = torch.zeros(tokens, tokens), torch.ones(tokens, len(starts))
    anchor = torch.full((tokens,), -torch.inf)
    for visit, start in enumerate(starts):
        tile = slice(start, start + TILE)
        new = torch.maximum(anchor, scores[:, tile].amax(1))
        seen = new > -torch.inf
        alpha[seen, visit] = (anchor - new)[seen].exp()
        p[:, tile] = (scores[:, tile] - new.masked_fill(~seen, 0.0)[:, None]).exp()
        anchor = new
    p = p.bfloat16()
    assert ((p == 1).sum(1) > 1).float().mean() > 0.2
    row_sum = p.float().sum(1)
    o_bar, o = pv_chain(*(t.cuda() for t in (p, v, alpha, row_sum)), TILE, instruction)

    def modelled(model):
        sums = np.zeros((tokens, size), np.float32)
        for visit, start in enumerate(starts):
            tile = slice(start, start + TILE)
            sums = sums * alpha[:, visit, None].numpy()
            sums = matmul_add(sums, p[:, tile].float().numpy(), v[tile].float().numpy(), model)
        return sums

    expected = modelled("sm90")
    assert differing(o_bar.cpu().numpy(), expected) == 0
    inverse = np.float32(1) / row_sum.numpy()[:, None]
    assert differing(o.cpu().numpy(), round_to(expected * inverse, BF16)) == 0
    others = {model: differing(o_bar.cpu().numpy(), modelled(model)) for model in WRONG}
    print(f"\n{instruction} {tokens} x {size}: O-bar of other models differs in", others)
    assert min(others.values()) > 0.05


def flash(q, k, v):
    """O [N, D] FP32 of PyTorch's flash backend."""
    q, k, v = (t.cuda().expand(1, HEADS, -1, -1).contiguous() for t in (q, k, v))
    o = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=q.shape[-1] ** -0.5)[0]
    assert (o == o[:, :1]).all()
    return o[0, 0].float().cpu().numpy()


def exp2_of_the_device(x):
    return torch.exp2(torch.from_numpy(x).cuda()).cpu().numpy()


def attention(q, k, v, model):
    """FlashAttention-2's forward pass in NumPy, every product by a model and the exponentials by the device.

    csrc/flash_attn/src/softmax.h: FP32 scores are multiplied by scale * log2(e) before the anchor is subtracted; each
    of the four threads of a row sums pairs of columns 8 apart, and at the end the sums of threads two apart meet first.
    The compiler fuses the rescaling of a thread's sum with the addition that follows it.
    """
    tokens, size = q.shape
    q, k, v = (t.float().numpy() for t in (q, k, v))
    scores = matmul_add(np.zeros((tokens, tokens), np.float32), q, np.ascontiguousarray(k.T), model)
    scores[np.triu_indices(tokens, 1)] = -np.inf
    factor = np.float32(size**-0.5 * np.log2(np.e))
    anchor, sums = np.full(tokens, -np.inf, np.float32), np.zeros((tokens, 4), np.float32)
    o_bar = np.zeros((tokens, size), np.float32)
    for start in range((tokens - 1) // TILE * TILE, -1, -TILE):
        tile = scores[:, start : start + TILE]
        new = np.maximum(anchor, tile.max(1))
        finite = np.where(np.isinf(new), np.float32(0), new)
        alpha = exp2_of_the_device((anchor - finite) * factor)
        p_bar = exp2_of_the_device(tile * factor - (finite * factor)[:, None])
        anchor = new
        columns = p_bar.reshape(tokens, -1, 4, 2).transpose(1, 3, 0, 2).reshape(-1, tokens, 4)
        # float64 holds the product; that it then rounds twice shows once in 2**29 sums.
        sums = (sums.astype(np.float64) * alpha[:, None] + columns[0]).astype(np.float32)
        for column in columns[1:]:
            sums = sums + column
        o_bar = matmul_add(o_bar * alpha[:, None], round_to(p_bar, BF16), v[start : start + TILE], model)
    halves = sums[:, :2] + sums[:, 2:]
    return round_to(o_bar * (np.float32(1) / (halves[:, 0] + halves[:, 1]))[:, None], BF16)


def by_the_walk(q, k, v, tokens):
    """O of some rows by the recipe `fa2`: its P-bar and row sum, the product with V by sm90."""
    q, k, v = (t[None].float() for t in (q, k, v))
    record = AttentionRecord(
        layer=0, sequence=0, step=None, storage="bf16", q=q, k=k, v=v, do=torch.zeros_like(v), x=None,
        geometry=Geometry(scale=q.shape[-1] ** -0.5, causal=True),
    )  # fmt: skip
    rows = []
    for token in tokens:
        walk = walk_row(record, resolve("fa2"), token)
        sums = np.zeros((1, v.shape[-1]), np.float32)
        for tile, alpha in enumerate(walk.tile_alpha):
            inside = walk.tile == tile
            sums = matmul_add(sums * alpha, walk.p_operand[None, inside], walk.v[inside], "sm90")
        rows.append(round_to(sums * (np.float32(1) / np.float32(walk.row_sum)), BF16)[0])
    return np.stack(rows)


def whole_rows(found, expected):
    """Share of rows of which every element has the same bits."""
    return np.mean((bits(found) == bits(expected)).all(1))


@pytest.mark.parametrize(("tokens", "seed"), [(512, 1), (1000, 2), (2048, 3)])
def test_flash_attention_is_as_modelled(tokens, seed):
    """The last rounding hides most of what other models do; in thousands of rows some of it shows."""
    q, k, v = saturated(tokens, 64, seed)
    o = flash(q, k, v)
    shares = {model: whole_rows(attention(q, k, v, model), o) for model in ("sm90", *WRONG)}
    some = range(3, tokens, 7)
    walked = whole_rows(by_the_walk(q, k, v, some), o[some])
    print(f"\nN {tokens}: rows equal to the kernel's", shares, "by the recipe's own exponential and row sum:", walked)
    assert shares["sm90"] == 1
    assert max(shares[model] for model in WRONG) < 1
    # P-bar flips in about one of 10,000 elements, and a row has hundreds.
    assert walked > 0.9
