"""The preset fa4: the lagging anchor and the cubic exponential, against loops over single numbers."""

import math
import struct
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.cubic import cubic_exp2, cubic_keys, fused_multiply_subtract
from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.lp import LpRows, backward_probabilities, forward_rows
from bf16forensics.attention.scores import Block, lp_scores
from bf16forensics.attention.tiles import plan_tiles
from bf16forensics.recipe.derive import resolve

FA4 = resolve("fa4")
EXACT = resolve("fa4+arithmetic=exact")
LN2 = math.log(2.0)
F32 = np.float32
#: Exact FP32 numbers of flash_attn/cute/utils.py, highest power first.
CUBIC = (0.077119089663028717041015625, 0.227564394474029541015625, 0.695146143436431884765625, 1.0)


# -- the kernel, number by number ---------------------------------------------------------------------------------


def fma(oracle: ModuleType, a: Any, b: Any, c: Any) -> np.float32:
    """a * b + c in exact arithmetic, rounded once."""
    return F32(float(oracle.to_fp32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))))


def scalar_cubic(oracle: ModuleType, x: float) -> np.float32:
    """ex2_emulation of one number: floor by an addition that rounds down, Horner, exponent by integer addition."""
    clamped = max(F32(x), F32(-127.0))
    floor = math.floor(clamped)
    fraction = F32(clamped - F32(floor))
    value = F32(CUBIC[0])
    for coefficient in CUBIC[1:]:
        value = fma(oracle, value, fraction, coefficient)
    bits = struct.unpack("<I", struct.pack("<f", value))[0] + (floor << 23)
    return F32(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


def emulated_columns(tile_k: int, frequency: int, start: int) -> set[int]:
    """The loops of apply_exp2_convert: 32-wide fragments, pairs, the residue of each period."""
    found = set()
    fragments = tile_k // 32
    for j in range(fragments):
        for k in range(0, 32, 2):
            if not (k % frequency < frequency - 4 or j >= fragments - 1 or j < start):
                found |= {32 * j + k, 32 * j + k + 1}
    return found


def scalar_row(
    oracle: ModuleType, scores: list[float | None], v: np.ndarray, scale: float, columns: set[int], threshold: float
) -> tuple[np.ndarray, np.float32, np.float32, int, list[np.float32]]:
    """One row over 128-key tiles from last to first: O, lse, anchor, rescalings after the first tile, last P-bar."""
    c = F32(F32(scale) * F32(math.log2(math.e)))
    anchor, row_sum = F32(-np.inf), F32(0)
    o_bar = np.zeros(v.shape[1], F32)
    rescaled, p_bar = 0, []
    for first in reversed(range(0, len(scores), 128)):
        tile = scores[first : first + 128]
        shown = [F32(s) for s in tile if s is not None]
        new = max([anchor, *shown])
        safe = new if new != -np.inf else F32(0)
        lag = F32(F32(anchor - safe) * c) if anchor != -np.inf else F32(-np.inf)
        alpha = F32(2.0 ** float(lag))
        if lag >= -threshold:
            safe, alpha = anchor, F32(1)
        else:
            rescaled += int(np.isfinite(anchor))
            anchor = new
        minus = F32(safe * c)
        p_bar = []
        for column, s in enumerate(tile):
            if s is None:
                p_bar.append(F32(0))
                continue
            x = fma(oracle, F32(s), c, -minus)
            p_bar.append(scalar_cubic(oracle, x) if column in columns else F32(2.0 ** float(x)))
        total = F32(sum(float(p) for p in p_bar))
        row_sum = F32(F32(alpha * row_sum) + total)
        operand = oracle.bf16(np.array(p_bar, F32)).astype(np.float64)
        part = (operand @ v[first : first + 128].astype(np.float64)).astype(F32)
        o_bar = (o_bar * alpha).astype(F32) + part
    inverse = F32(1) / (row_sum if row_sum else F32(1))
    lse = F32(float(anchor) * scale + math.log(row_sum)) if row_sum else F32(-np.inf)
    return oracle.bf16((o_bar * inverse).astype(F32)), lse, anchor, rescaled, p_bar


def rows_of(call: Any, record: Any, recipe: Any) -> tuple[LpRows, Any, Any]:
    """The recipe's forward pass of all rows of head 0 as one block."""
    n, m = call.q.shape[1], call.k.shape[1]
    block = Block(rows=(0, n), keys=(0, m), num_queries=n, num_keys=m)
    scores = lp_scores(record.q[:1], record.k[:1], record.geometry, recipe, block, None)
    plan = plan_tiles(recipe, record.geometry, block, call.q.shape[2])
    return forward_rows(scores, record.v[:1], plan, recipe), scores, plan


# -- the cubic ----------------------------------------------------------------------------------------------------


def test_cubic_bit_for_bit(oracle: ModuleType) -> None:
    """T0, at the edges of the range and of the fraction, and in between."""
    edges = [0.0, -0.0, -1e-10, 1e-10, -1.0, 1.0, 8.0, 7.9999995, -0.5, -126.0, -126.5, -127.0, -127.5, -1e9, 127.0]
    near = [float(np.nextafter(F32(x), F32(d))) for x in (-1, 0, 1, -126, -127) for d in (-200, 200)]
    random = np.random.default_rng(1).uniform(-130, 9, 3000).astype(F32).tolist()
    x = torch.tensor([*edges, *near, *random], dtype=torch.float32)
    expected = torch.tensor([float(scalar_cubic(oracle, value)) for value in x.tolist()], dtype=torch.float32)
    assert torch.equal(cubic_exp2(x).view(torch.int32), expected.view(torch.int32))


def test_cubic_of_what_is_no_number() -> None:
    found = cubic_exp2(torch.tensor([-math.inf, math.nan]))
    assert found[0] == 0
    assert found[1].isnan()


def test_error_of_the_cubic() -> None:
    """Largest relative error 8.8e-5, mean 8e-6, and a BF16 P-bar that differs in 1 % of the elements."""
    x = torch.linspace(-8.0, 0.0, 2**20 + 1, dtype=torch.float64).float()
    exact = torch.exp2(x.double())
    error = cubic_exp2(x).double() / exact - 1.0
    assert error.abs().max().item() == pytest.approx(8.77e-5, abs=0.01e-5)
    assert error.mean().item() == pytest.approx(8.2e-6, abs=0.1e-6)
    different = (cubic_exp2(x).bfloat16() != exact.float().bfloat16()).double().mean().item()
    assert different == pytest.approx(0.0100, abs=0.0005)


@pytest.mark.parametrize(
    ("size", "causal", "queries", "frequency", "start"),
    [
        (128, True, 4096, 16, 1), (128, False, 4096, 10, 1), (128, False, 256, 16, 1), (120, False, 257, 10, 1),
        (64, True, 4096, 16, 1), (64, False, 4096, 16, 1), (16, True, 1, 16, 1),
        (192, True, 4096, 32, 1), (192, False, 4096, 16, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tile_k", [128, 64, 96])
def test_which_columns_are_cubic(
    size: int, causal: bool, queries: int, frequency: int, start: int, tile_k: int
) -> None:
    found = cubic_keys(size, causal, queries, (0, 3 * tile_k), tile_k)
    assert found is not None
    once = emulated_columns(tile_k, frequency, start)
    assert set(found.nonzero()[:, 0].tolist()) == {i * tile_k + column for i in range(3) for column in once}
    assert once or tile_k == 64


def test_columns_belong_to_the_whole_rows_tiles() -> None:
    """A block whose keys begin inside a tile, as a window's does."""
    whole, part = (cubic_keys(64, True, 512, keys, 128) for keys in ((0, 512), (171, 500)))
    assert whole is not None
    assert part is not None
    assert torch.equal(whole[171:500], part)
    assert part.any()


@pytest.mark.parametrize("size", [144, 256])
def test_large_heads_use_the_hardware(size: int) -> None:
    assert cubic_keys(size, True, 512, (0, 256), 128) is None


def test_the_fused_multiply_rounds_once(oracle: ModuleType) -> None:
    rng = np.random.default_rng(3)
    values, minus = (rng.standard_normal(2000).astype(F32) * F32(30) for _ in range(2))
    found = fused_multiply_subtract(torch.from_numpy(values), 0.18033688, torch.from_numpy(minus))
    expected = [float(fma(oracle, a, F32(0.18033688), -b)) for a, b in zip(values, minus, strict=True)]
    assert found.tolist() == expected
    separate = (torch.from_numpy(values) * 0.18033688) - torch.from_numpy(minus)
    assert (separate != found).double().mean() > 0.1


# -- the anchor ---------------------------------------------------------------------------------------------------


def stepped_call(oracle: ModuleType, steps: list[int], values: Any) -> Any:
    """One query, 128 keys a tile; the last tile, visited first, has maximum 0, the others `steps` (units of ln 2)."""
    k = np.full((1, 128 * (len(steps) + 1), 1), -20.0, np.float32)
    for tile, step in enumerate([*reversed(steps), 0]):
        # Column 3 of a tile is never the cubic's.
        k[0, 128 * tile + 3, 0] = step
    v = values((1, k.shape[1], 2)).astype(np.float32)
    return oracle.Call(
        q=np.ones((1, 1, 1), np.float32),
        k=k,
        v=oracle.bf16(v),
        do=np.ones((1, 1, 2), np.float32),
        scale=LN2,
        causal=False,
    )


@pytest.mark.parametrize(
    ("steps", "anchor"),
    [([], 0), ([8], 0), ([9], 9), ([3, 8], 0), ([8, 9], 9), ([9, 17], 9), ([9, 18], 18), ([-5], 0), ([5, -3, 8, 7], 0)],
)
def test_the_anchor_is_kept_up_to_eight(oracle: ModuleType, record_of: Any, steps: list[int], anchor: int) -> None:
    """T0: the threshold itself is kept; it is counted from the anchor, not from the last maximum."""
    call = stepped_call(oracle, steps, np.ones)
    rows, _, _ = rows_of(call, record_of(call), FA4)
    assert rows.anchor.item() == anchor
    assert rows.row_max.item() == max([0, *steps])
    at_maximum = rows_of(call, record_of(call), resolve("fa4+rescale_threshold=0"))[0]
    assert at_maximum.anchor.item() == max([0, *steps])
    exact = sum(2.0 ** float(s) for s in call.k[0, :, 0])
    assert rows.lse.item() == pytest.approx(math.log(exact), rel=2.0**-20, abs=2.0**-20)
    # The row sum is relative to the anchor: P-bar reaches 2^8.
    assert rows.row_sum.item() == pytest.approx(exact / 2.0**anchor, rel=1e-4)


def test_it_is_the_point_that_others_ask() -> None:
    assert not FA4.anchored_at_maximum
    assert resolve("fa4+rescale_threshold=0").anchored_at_maximum
    assert all(resolve(name).anchored_at_maximum for name in ("fa2", "fa3", "fa3-fp8", "flex", "eager", "paper"))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mask", ["causal", "window", "keep"])
def test_against_loops_over_single_numbers(oracle: ModuleType, record_of: Any, seed: int, mask: str) -> None:
    """Anchors T0. O T2: an FP32 sum in another order and an exp2 off by one step flip a BF16 rounding now and then."""
    rng = np.random.default_rng(seed)
    kind: dict[str, Any] = {"causal": {}, "window": {"window": 170}, "keep": {"causal": False}}[mask]
    if mask == "keep":
        keep = rng.random((1, 10, 400)) < 0.6
        keep[0, 3] = False
        keep[0, 4, 256:] = False
        kind["keep"] = keep
    call = oracle.draw(600 + seed, heads=1, queries=10, keys=400, size=16, spread=6.0, **kind)
    record = record_of(call)
    assert record.q.shape[1] == 10
    rows, _, _ = rows_of(call, record, EXACT)
    columns = emulated_columns(128, 16, 1)
    rescaled, lagging = 0, 0
    outputs = []
    for i in range(10):
        raw = [
            float(s) if call.sees(0, i, j) else None
            for j, s in enumerate(oracle.exact_product(call.q[0], call.k[0].T)[i])
        ]
        o, lse, anchor, times, _ = scalar_row(oracle, raw, call.v[0], call.scale, columns, 8.0)
        assert float(rows.anchor[0, i]) == float(anchor)
        top = max((s for s in raw if s is not None), default=-math.inf)
        assert float(rows.row_max[0, i]) == top
        assert float(rows.lse[0, i]) == pytest.approx(float(lse), rel=2.0**-20, abs=2.0**-20)
        rescaled, lagging = rescaled + times, lagging + (float(anchor) != top)
        outputs.append(o)
    # Both branches were taken.
    assert lagging > 0
    assert rescaled > 0 or mask == "window"
    expected = torch.from_numpy(np.stack(outputs))
    different = rows.o[0] != expected
    assert different.double().mean() <= 0.02
    assert ((rows.o[0] - expected).abs() <= 2.0**-7 * expected.abs()).all()
    # Blocks of the dual pass see the same tiles and columns.
    assert torch.equal(dual_pass(record, EXACT).o_lp[0], rows.o[0].double())
    # The loops can tell: with an anchor at the maximum the row sum, which is relative to the anchor, is another one.
    at_maximum = rows_of(call, record, resolve("fa4+arithmetic=exact,rescale_threshold=0"))[0]
    assert not torch.allclose(at_maximum.row_sum, rows.row_sum, rtol=1e-3)


def test_p_bar_itself(oracle: ModuleType, record_of: Any) -> None:
    """Values that are unit vectors show each BF16 P-bar, times the one FP32 number 1 / l."""
    call = oracle.draw(610, heads=1, queries=40, keys=128, size=16, causal=False, spread=0.5)
    call = oracle.Call(
        q=call.q,
        k=call.k,
        v=np.eye(128, dtype=F32)[None],
        do=np.ones((1, 40, 128), F32),
        scale=call.scale,
        causal=False,
    )
    columns = emulated_columns(128, 16, 1)
    raw = oracle.exact_product(call.q[0], call.k[0].T)
    p_bar = np.array(
        [scalar_row(oracle, [*map(float, row)], call.v[0], call.scale, columns, 8.0)[4] for row in raw], F32
    )
    moved = {}
    for name in ("fa4", "fa4+exponential=exp2"):
        rows, _, _ = rows_of(call, record_of(call), resolve(f"{name}+o=fp32,arithmetic=exact"))
        expected = oracle.bf16(p_bar) * (F32(1) / rows.row_sum[0].numpy())[:, None]
        moved[name] = np.argwhere(rows.o[0].numpy() != expected)
    # A hardware exponential that is off by one FP32 step flips a BF16 rounding in about 1e-4 of the elements.
    assert len(moved["fa4"]) <= 0.0005 * p_bar.size
    # 1 % of the cubic ones, and no other.
    cubic = [column for _, column in moved["fa4+exponential=exp2"] if column in columns]
    assert len(cubic) >= 0.003 * 40 * len(columns)
    assert len(moved["fa4+exponential=exp2"]) - len(cubic) <= 0.0005 * p_bar.size


def test_p_bar_above_one_reaches_the_output_unharmed(oracle: ModuleType, record_of: Any) -> None:
    """T0: powers of two in FP32 and BF16 are exact, so O is the exact one whatever the anchor."""
    call = stepped_call(oracle, [8, 3], lambda shape: np.random.default_rng(4).integers(-8, 9, shape))
    weights = [Fraction(2) ** int(s) for s in call.k[0, :, 0]]
    # Keys at 2^-20 are cubic in some columns, so only the three large ones have values.
    call.v[0, call.k[0, :, 0] == -20] = 0
    total = sum(weights, Fraction(0))
    rows, _, _ = rows_of(call, record_of(call), FA4)
    for feature in range(2):
        exact = sum((w * Fraction(float(x)) for w, x in zip(weights, call.v[0, :, feature], strict=True)), Fraction(0))
        assert float(rows.o[0, 0, feature]) == pytest.approx(float(exact / total), rel=2.0**-8)


# -- the backward pass --------------------------------------------------------------------------------------------


def test_the_backward_pass_has_no_cubic(oracle: ModuleType, record_of: Any) -> None:
    """P = exp2(S c - lse log2(e)) by the hardware everywhere, with the log-sum-exp of the forward pass."""
    call = oracle.draw(620, heads=1, queries=10, keys=400, size=16)
    record = record_of(call)
    rows, scores, plan = rows_of(call, record, FA4)
    found = backward_probabilities(scores, rows, FA4)
    exact = torch.exp(scores.values.double() * call.scale - rows.lse.double()[..., None])
    # FP32 exponents up to 2^4 in units of 2^-24, and one step of exp2.
    assert ((found.double() - exact).abs() <= 2.0**-19 * exact).all()
    plain = dual_pass(record, resolve("fa4+exponential=exp2"))
    cubic = dual_pass(record, FA4)
    assert plan.cubic is not None
    assert plan.cubic.any()
    assert plain.delta is not None
    assert cubic.delta is not None
    # Rows of P add up to 1 only without the cubic, whose errors are in the row sum that lse carries.
    off = {name: (dual.delta.p_row_sum - 1).abs() for name, dual in (("cubic", cubic), ("plain", plain))}
    assert off["plain"].max() <= 2.0**-20
    assert off["cubic"].max() <= 8.8e-5 + 2.0**-20
    assert off["cubic"].mean() > 3 * off["plain"].mean()
