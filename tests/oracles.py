"""Attention written down a second time, slowly: what the tests of the attention room compare with.

Nothing here imports the package. `dense` is float64 NumPy over whole matrices; `rational_row` is exact arithmetic on
fractions with every rounding spelled out; `fa2_rows` and `authors_rows` are NumPy FP32 with ml_dtypes roundings.

Shapes: H query heads, G key/value heads, N queries, M keys, D and E head sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

F32 = np.float32


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention call: FP32 arrays of BF16 values, and what is done to the scores."""

    #: [H, N, D], [G, M, D], [G, M, E], [H, N, E].
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    #: [M], [N] bool; [M] int; [H or 1, N, M] bool; [H or 1, N, M] float.
    key_padding: np.ndarray | None = None
    query_padding: np.ndarray | None = None
    document_ids: np.ndarray | None = None
    keep: np.ndarray | None = None
    bias: np.ndarray | None = None

    def kv_head(self, head: int) -> int:
        """Key/value head of a query head: groups of consecutive query heads share one."""
        return head // (self.q.shape[0] // self.k.shape[0])

    def visible(self, head: int) -> np.ndarray:
        """bool [N, M], pair by pair."""
        n, m = self.q.shape[1], self.k.shape[1]
        seen = np.zeros((n, m), bool)
        for i in range(n):
            for j in range(m):
                seen[i, j] = self.sees(head, i, j)
        return seen

    def sees(self, head: int, i: int, j: int) -> bool:
        """Whether query i sees key j; the last query stands at the last key."""
        distance = (i + self.k.shape[1] - self.q.shape[1]) - j
        if self.causal and distance < 0:
            return False
        if self.window is not None and abs(distance) >= self.window:
            return False
        if self.key_padding is not None and not self.key_padding[j]:
            return False
        if self.query_padding is not None and not self.query_padding[i]:
            return False
        if self.document_ids is not None and self.document_ids[i] != self.document_ids[j]:
            return False
        return self.keep is None or bool(self.keep[head if self.keep.shape[0] > 1 else 0, i, j])


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Attention forward and backward in float64."""

    o: np.ndarray
    lse: np.ndarray
    p: np.ndarray
    scores: np.ndarray
    delta: np.ndarray
    #: [H, N, D], [H, M, D], [H, M, E]: dK and dV by *query* head.
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    #: [H, N, D] scale * (P * slope) K.
    carrier: np.ndarray
    visible: np.ndarray


def dense(call: Call, delta: np.ndarray | None = None) -> Dense:
    """Plain softmax attention over whole matrices.

    Args:
        call: the call.
        delta: [H, N] to use in dS instead of rowsum(dO * O).
    """
    heads = call.q.shape[0]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in Dense.__dataclass_fields__}
    for h in range(heads):
        g = call.kv_head(h)
        q, k, v, do = (a.astype(np.float64) for a in (call.q[h], call.k[g], call.v[g], call.do[h]))
        scores = (q @ k.T) * call.scale
        slope = np.ones_like(scores)
        if call.softcap is not None:
            slope = 1.0 / np.cosh(scores / call.softcap) ** 2
            scores = call.softcap * np.tanh(scores / call.softcap)
        if call.bias is not None:
            scores = scores + call.bias[h if call.bias.shape[0] > 1 else 0]
        seen = call.visible(h)
        some = seen.any(1)
        top = np.where(some, np.where(seen, scores, -np.inf).max(1), 0.0)
        p_bar = np.where(seen, np.exp(np.where(seen, scores - top[:, None], 0.0)), 0.0)
        total = p_bar.sum(1)
        p = p_bar / np.where(some, total, 1.0)[:, None]
        o = p @ v
        dp = do @ v.T
        own = (do * o).sum(1) if delta is None else delta[h]
        ds = p * (dp - own[:, None]) * slope * call.scale
        found = {
            "o": o,
            "lse": np.where(some, top + np.log(np.where(some, total, 1.0)), -np.inf),
            "p": p,
            "scores": scores,
            "delta": own,
            "dq": ds @ k,
            "dk": ds.T @ q,
            "dv": p.T @ do,
            "carrier": call.scale * ((p * slope) @ k),
            "visible": seen,
        }
        for name, value in found.items():
            parts[name].append(value)
    return Dense(**{name: np.stack(values) for name, values in parts.items()})


# -- exact rational arithmetic ------------------------------------------------------------------------------------


def nearest(value: Fraction, fraction_bits: int) -> Fraction:
    """Round to nearest even with that many fraction bits; normal range only."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = Fraction(2) ** (exponent - fraction_bits)
    # Python rounds halves of integers to even.
    return round(value / step) * step


def to_fp32(value: Fraction) -> Fraction:
    """Nearest FP32 number."""
    return nearest(value, 23)


def to_bf16(value: Fraction) -> Fraction:
    """Nearest BF16 number."""
    return nearest(value, 7)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Which values a row of online softmax rounds to BF16; the fields are named after what is stored."""

    p_bar: bool = True
    row_sum_input: bool = False
    row_sum: bool = False
    o_bar: bool = False
    o_bar_each_tile: bool = False
    divides: bool = False
    tile_k: int = 10**9
    descending: bool = True


def rational_row(
    exponents: Sequence[int | None], values: Sequence[Sequence[Fraction]], how: Rounding
) -> list[Fraction]:
    """One row of online softmax whose P-bar are powers of two, in exact arithmetic with explicit roundings.

    Args:
        exponents: score of each key in units of ln 2; None where the key is not visible.
        values: [M][E] values.
        how: rounding points, tiles, order.

    Returns:
        [E] output in BF16; zeros where the row sees no key.
    """

    def bf16_if(condition: bool, value: Fraction) -> Fraction:
        return to_bf16(value) if condition else value

    features = len(values[0])
    row_max: int | None = None
    row_sum = Fraction(0)
    o_bar = [Fraction(0)] * features
    starts = range(0, len(exponents), how.tile_k)
    for start in reversed(starts) if how.descending else starts:
        tile = [(exponents[j], values[j]) for j in range(start, min(start + how.tile_k, len(exponents)))]
        shown = [e for e, _ in tile if e is not None]
        if not shown:
            continue
        new_max = max(shown) if row_max is None else max(row_max, *shown)
        alpha = Fraction(0) if row_max is None else Fraction(2) ** (row_max - new_max)
        p_bar = [Fraction(0) if e is None else Fraction(2) ** (e - new_max) for e, _ in tile]
        tile_sum = to_fp32(sum((bf16_if(how.row_sum_input, p) for p in p_bar), Fraction(0)))
        row_sum = bf16_if(how.row_sum, to_fp32(alpha * row_sum + tile_sum))
        for f in range(features):
            product = to_fp32(
                sum((bf16_if(how.p_bar, p) * v[f] for p, (_, v) in zip(p_bar, tile, strict=True)), Fraction(0))
            )
            if how.o_bar_each_tile:
                o_bar[f] = to_bf16(to_bf16(to_fp32(o_bar[f] * alpha)) + to_bf16(product))
            else:
                o_bar[f] = to_fp32(to_fp32(o_bar[f] * alpha) + product)
        row_max = new_max
    if row_max is None:
        return [Fraction(0)] * features
    out = []
    for f in range(features):
        whole = bf16_if(how.o_bar, o_bar[f])
        out.append(to_bf16(to_fp32(whole / row_sum) if how.divides else to_fp32(whole * to_fp32(1 / row_sum))))
    return out


# -- NumPy FP32 with explicit casts -------------------------------------------------------------------------------


def bf16(values: np.ndarray) -> np.ndarray:
    """FP32 to the nearest BF16 number, as FP32."""
    if values.dtype != F32:
        raise TypeError(f"rounding starts from FP32, got {values.dtype}")
    return values.astype(ml_dtypes.bfloat16).astype(F32)


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A product of BF16 matrices whose float64 sums are exact, rounded once to FP32."""
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(F32)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A forward pass: [N, E] output, its value before the last cast, [N] log-sum-exp and counts of ones."""

    o: np.ndarray
    o_unrounded: np.ndarray
    lse: np.ndarray
    ones: np.ndarray


def fa2_rows(
    call: Call,
    head: int,
    *,
    scores_bf16: bool = False,
    row_sum_input_bf16: bool = False,
    o_bar_bf16: bool = False,
) -> Rows:
    """LP-kernel, and with one cast more LP-paper or S-BF16: one tile over the whole row.

    Exponentials and row sums are taken in float64 and rounded once to FP32, so results differ from an FP32 kernel by
    FP32 rounding only.
    """
    g = call.kv_head(head)
    scores = exact_product(call.q[head], call.k[g].T)
    if scores_bf16:
        scores = bf16(bf16(scores) * F32(call.scale))
        nats = scores.astype(np.float64)
    else:
        nats = scores.astype(np.float64) * call.scale
    seen = call.visible(head)
    top = np.where(seen, nats, -np.inf).max(1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    p_bar = np.where(seen, np.exp(np.where(seen, nats - top, 0.0)), 0.0).astype(F32)
    operand = bf16(p_bar)
    summed = operand if row_sum_input_bf16 else p_bar
    row_sum = summed.astype(np.float64).sum(1).astype(F32)
    o_bar = exact_product(operand, call.v[g])
    if o_bar_bf16:
        o_bar = bf16(o_bar)
    safe = np.where(row_sum == 0, F32(1), row_sum)
    unrounded = o_bar * (F32(1) / safe)[:, None]
    with np.errstate(divide="ignore"):
        lse = top[:, 0] + np.log(row_sum.astype(np.float64))
    return Rows(o=bf16(unrounded), o_unrounded=unrounded, lse=lse, ones=((operand == 1) & seen).sum(1))


def authors_rows(call: Call, head: int, tile_k: int = 512) -> Rows:
    """The authors' eager forward pass: thirteen steps for each tile of keys, ascending, casts written out."""
    g = call.kv_head(head)
    q, k, v = call.q[head], call.k[g], call.v[g]
    n, m = q.shape[0], k.shape[0]
    seen = call.visible(head)
    low = F32(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
    row_max = np.full(n, low)
    row_sum = np.zeros(n, F32)
    out = np.zeros((n, v.shape[1]), F32)
    for start in range(0, m, tile_k):
        span = slice(start, min(start + tile_k, m))
        s0 = bf16(exact_product(q, k[span].T))
        s = bf16(s0 * F32(call.scale))
        s = np.where(seen[:, span], s, low)
        new_max = np.maximum(row_max, s.max(1))
        t = bf16(s - new_max[:, None])
        p = np.where(seen[:, span], np.exp(t.astype(np.float64)), 0.0).astype(F32)
        tile_sum = p.astype(np.float64).sum(1).astype(F32)
        e = bf16(exact_product(bf16(p), v[span]))
        shift = bf16(np.maximum(row_max - new_max, low))
        alpha = np.exp(shift.astype(np.float64)).astype(F32)
        row_sum = bf16(alpha * row_sum + tile_sum)
        out = bf16(out * alpha[:, None])
        out = bf16(out + e)
        row_max = new_max
    safe = np.where(row_sum == 0, F32(1), row_sum)
    unrounded = out / safe[:, None]
    with np.errstate(divide="ignore"):
        lse = np.log(row_sum.astype(np.float64)) + row_max
    final = bf16(np.where(seen, bf16(bf16(exact_product(q, k.T)) * F32(call.scale)), low) - row_max[:, None])
    ones = ((bf16(np.exp(final.astype(np.float64)).astype(F32)) == 1) & seen).sum(1)
    return Rows(o=bf16(unrounded), o_unrounded=unrounded, lse=lse, ones=ones)


# -- inputs -------------------------------------------------------------------------------------------------------


def draw(
    seed: int,
    *,
    heads: int = 2,
    kv_heads: int | None = None,
    queries: int = 37,
    keys: int | None = None,
    size: int = 16,
    value_size: int | None = None,
    spread: float = 1.0,
    **geometry: object,
) -> Call:
    """A call with normally distributed BF16 tensors; `spread` widens the scores."""
    rng = np.random.default_rng(seed)
    keys, kv_heads, value_size = keys or queries, kv_heads or heads, value_size or size

    def normal(*shape: int) -> np.ndarray:
        return bf16(rng.standard_normal(shape).astype(F32))

    return Call(
        q=bf16(normal(heads, queries, size) * F32(spread)),
        k=normal(kv_heads, keys, size),
        v=normal(kv_heads, keys, value_size),
        do=normal(heads, queries, value_size),
        scale=float(geometry.pop("scale", 1.0 / math.sqrt(size))),  # type: ignore[arg-type]
        **geometry,  # type: ignore[arg-type]
    )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Largest absolute errors that a computation of the same formula may have (class T2)."""

    o: float
    lse: float
    delta: float
    dq: float


def budget(call: Call, found: Dense, eps: float) -> Budget:
    """First-order error bounds of the softmax formula with unit roundoff `eps`, twice over for the second order.

    A score errs by (D + 4) eps times the sum of its products' sizes, a probability relatively by that and M eps, O by
    the probabilities' errors times the values, and so on down the chain.
    """
    group = call.q.shape[0] // call.k.shape[0]
    q, k, v, do = (np.abs(a).astype(np.float64) for a in (call.q, call.k, call.v, call.do))
    size = float((q @ np.repeat(k, group, 0).transpose(0, 2, 1)).max()) * call.scale
    extra = (call.softcap or 0.0) + (0.0 if call.bias is None else float(np.abs(call.bias).max()))
    keys, head_size, features = k.shape[1], k.shape[2], v.shape[2]
    relative = eps * ((head_size + 4) * (size + extra) + keys + 8)
    outputs = float(do.sum(-1).max()) * float(v.max())
    seen = np.isfinite(found.lse)
    largest_lse = float(np.abs(found.lse[seen]).max()) if seen.any() else 0.0
    return Budget(
        o=4 * relative * float(v.max()),
        lse=2 * (relative + eps * largest_lse),
        delta=4 * (relative + features * eps) * outputs,
        dq=8 * (relative + (features + keys) * eps) * outputs * float(k.max()) * call.scale,
    )
