"""Traces of heads that never existed: numbers from a fixed recurrence, consistent with one another."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.evidence.trace.results import (
    CumulativeTrace,
    FeatureContribution,
    HeadTrace,
    Jump,
    RowJumps,
    RowTies,
    SignCell,
    SignTable,
    TokenError,
    TokenTrace,
)
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import BF16
from bf16forensics.floats.ulp import ulp_array
from bf16forensics.load.files import FileFacts
from bf16forensics.recipe.presets import FA2
from bf16forensics.report.environment import Environment
from bf16forensics.report.row_trace import RowTrace
from bf16forensics.report.trace.context import TraceContext

ENVIRONMENT = Environment(
    tool_version="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    numpy="2.2.0",
    triton=None,
    platform="Linux x86_64",
    device="cpu",
    threads=2,
    host="bench",
    date="2026-01-02T03:04:05+00:00",
)
COMMAND = ("bf16forensics", "trace-head", "case", "--layer", "1", "--head", "2", "--json", "--plot", "head.png")


def uniform(count: int, seed: int) -> np.ndarray:
    """`count` numbers in [0, 1) from a 32-bit linear congruence: the same on every machine and in every version."""
    values, state = [], seed
    for _ in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        values.append(state / 2**32)
    return np.array(values)


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to BF16, as float32."""
    return round_to(values.astype(np.float64), BF16).astype(np.float32)


def row(keys: int = 160, seed: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P-bar, V and ones of a row: one key in sixteen at 1, V mostly negative."""
    is_one = uniform(keys, seed) < 1 / 16
    p_bar = np.where(is_one, 1.0, uniform(keys, seed + 1) ** 4 / 16)
    return bf16(p_bar), bf16(0.4 - 3 * uniform(keys, seed + 2)), is_one


def cumulative(keys: int = 160, *, tile: int = 64, feature: int = 20, **fields: Any) -> CumulativeTrace:
    """The prefix errors of such a row, under FP32 prefixes rounded once to BF16."""
    p_bar, v, is_one = row(keys)
    running = np.cumsum(p_bar * v, dtype=np.float32).astype(np.float64)
    stored = round_to(running, BF16)
    error = stored - running
    positions = np.arange(keys)
    tile_end = (positions % tile == tile - 1) | (positions == keys - 1)
    half_ulp = ulp_array(running, BF16) / 2
    values: dict[str, Any] = {
        "feature": feature,
        "accumulator": "fp32-prefix",
        "meaning": (
            "the FP32 sum of each prefix, rounded once to bf16; its error is bounded by half an ulp, and nothing "
            "accumulates: a jump is the difference of two bounded errors."
        ),
        "walk_recipe": "fa2+tile_k=all",
        "keys": positions.astype(np.int64),
        "p_bar": p_bar,
        "v": v,
        "is_one": is_one,
        "tile_end": tile_end,
        "exists": tile_end,
        "running_lp": stored,
        "running_hp": running,
        "error": error,
        "half_ulp": half_ulp,
        "bound_exceeded": int((np.abs(error) > half_ulp).sum()),
        "o_accumulator": -0.453125,
        "o_lp": -0.453125,
        "o_hp": -0.45381234567,
        **fields,
    }
    return with_jumps(values)


def with_jumps(values: dict[str, Any]) -> CumulativeTrace:
    """The trace with the jumps of its errors."""
    error = values["error"]
    sizes = np.diff(error, prepend=0.0)
    order = sorted(range(len(error)), key=lambda position: (-abs(sizes[position]), position))[:1000]
    jumps = tuple(
        Jump(
            position=position,
            key=int(values["keys"][position]),
            size=float(sizes[position]),
            p_bar=float(values["p_bar"][position]),
            v=float(values["v"][position]),
            is_one=bool(values["is_one"][position]),
            exists=bool(values["exists"][position]),
        )
        for position in order
    )
    counted = {"jumps": jumps, "top_jumps_at_ones": sum(j.is_one for j in jumps[:10]), "top_jumps": len(jumps[:10])}
    return CumulativeTrace(**{**counted, **values})


def token(index: int = 0, number: int = 50, **fields: Any) -> TokenError:
    """One row."""
    values: dict[str, Any] = {
        "index": index,
        "sequence": index + 3,
        "step": 401 + index,
        "token": number,
        "delta_err": -1.25e-7 / (1 + number),
        "defect": -1.125e-7 / (1 + number),
        "visible": number + 1,
        "ones": 1 + number % 4,
        "sign_counts": True,
        "o_err_max_ulp": 0.75,
        "o_err_feature": number % 32,
    }
    return TokenError(**{**values, **fields})


def features(count: int = 32) -> tuple[FeatureContribution, ...]:
    """The features of a token, largest contribution first; the last one has no gradient."""
    do = np.round((uniform(count, 21) - 0.6) * 2.0**12) * 2.0**-32
    do[-1] = 0.0
    o_hp = -3 * uniform(count, 22)
    o_lp = round_to(o_hp, BF16)
    ulps = ulp_array(o_hp, BF16)
    built = [
        FeatureContribution(
            feature=i,
            do=float(do[i]),
            o_lp=float(o_lp[i]),
            o_hp=float(o_hp[i]),
            o_err=float(o_lp[i] - o_hp[i]),
            o_err_ulp=float((o_lp[i] - o_hp[i]) / ulps[i]),
            contribution=float(do[i] * (o_lp[i] - o_hp[i])),
        )
        for i in range(count)
    ]
    return tuple(sorted(built, key=lambda item: (-abs(item.contribution), item.feature)))


def signs(items: tuple[FeatureContribution, ...]) -> SignTable:
    """The meeting of their signs."""
    pairs = [(int(np.sign(item.do)), int(np.sign(item.o_err)), item.contribution) for item in items]
    cells = tuple(
        SignCell(
            sign_do=a,
            sign_err=b,
            features=sum((x, y) == (a, b) for x, y, _ in pairs),
            contribution=math.fsum(value for x, y, value in pairs if (x, y) == (a, b)),
        )
        for a, b in ((1, 1), (-1, -1), (1, -1), (-1, 1))
    )
    counted = [x * y for x, y, _ in pairs if x and y]
    return SignTable(
        cells=cells,
        zero=len(pairs) - len(counted),
        correlation=sum(counted) / len(counted) if counted else math.nan,
    )


def token_trace(first: TokenError | None = None, count: int = 32) -> TokenTrace:
    """A token by feature, with a delta that was rounded to FP32."""
    items = features(count)
    total = math.fsum(item.contribution for item in items)
    delta_err = float(np.float32(total))
    return TokenTrace(
        token=replace(token() if first is None else first, delta_err=delta_err),
        features=items,
        signs=signs(items),
        contributions=total,
        remainder=delta_err - total,
    )


def ties(**fields: Any) -> RowTies:
    """A row with two ones."""
    count = 32
    values: dict[str, Any] = {
        "point": "o",
        "ones": 2,
        "bits_dropped": (1, 0) * (count // 2),
        "residue_ulp": (0.001,) * count,
        "error_ulp": (0.499, -0.001) * (count // 2),
        "law_ulp": (0.249, 0.0) * (count // 2),
        "mean_error_ulp": 0.249,
        "mean_law_ulp": 0.1245,
        "tie_share": 0.5,
        "same_sign_share": 0.96875,
    }
    return RowTies(**{**values, **fields})


def trace(**fields: Any) -> HeadTrace:
    """Two sequences of 64 queries."""
    rows = 2 * (uniform(128, 31).reshape(2, 64) - 0.6) * 2.0**-20
    rows[1, 60:] = math.nan
    traced = token_trace()
    finite = rows[np.isfinite(rows)]
    values: dict[str, Any] = {
        "layer": 1,
        "head": 2,
        "sequences": (3, 4),
        "sequences_of_run": 96,
        "num_queries": 64,
        "num_features": 32,
        "delta_err_sum": math.fsum(finite),
        "rows": len(finite),
        "positive": int((finite > 0).sum()),
        "negative": int((finite < -(2.0**-30)).sum()),
        "delta_err": rows,
        "tokens": (
            traced.token,
            *(token(i % 2, 50 - i, sign_counts=i % 5 != 4, ones=None if i == 3 else 2) for i in range(1, 30)),
        ),
        "token": traced,
        "traced": traced.token,
        "cumulative": cumulative(),
        "row_jumps": RowJumps(top=10, top_at_ones=9, share_at_ones=0.75, share_of_keys=0.0125),
        "v_all": row(200)[1],
        "ties": ties(),
        "notes": ("the row has 4 padding rows beside it", "all values of V are finite"),
    }
    return HeadTrace(**{**values, **fields})


def without_gradient(**fields: Any) -> HeadTrace:
    """A trace of a record without dO."""
    tokens = tuple(token(0, i, delta_err=math.nan, defect=math.nan, step=None) for i in range(12))
    return trace(
        **{
            "delta_err_sum": math.nan,
            "positive": 0,
            "negative": 0,
            "delta_err": np.full((2, 64), math.nan),
            "tokens": tokens,
            "token": None,
            "traced": tokens[0],
            **fields,
        }
    )


def context(**fields: Any) -> TraceContext:
    """A trace from a case."""
    values: dict[str, Any] = {
        "recipe": FA2,
        "reference": "fp64",
        "activations": "amp-bf16",
        "inputs": (
            FileFacts(role="checkpoint", path="run 7/ckpt.pt", size_bytes=42_500_000, sha256="0123456789abcdef" * 4),
            FileFacts(role="tokens", path="train.bin", size_bytes=2_000_000, sha256="fedcba9876543210" * 4),
        ),
        "kind": "nanogpt",
        "shape": "2 layers, 4 heads, head size 32, width 128",
        "geometry": "scale 0.176777, causal (bottom-right), no window, no soft-cap",
        "head_size": 32,
        "causal": True,
        "storage": "bf16",
        "case": "case",
        "command": COMMAND,
        "environment": ENVIRONMENT,
        "elapsed_s": 1.25,
    }
    return TraceContext(**{**values, **fields})


def walk(keys: int = 6, features: int = 3, *, tile: int = 4, seed: int = 11, **fields: Any) -> RowWalk:
    """A walk of a row; the last key is invisible."""
    p_bar, _, is_one = row(keys, seed)
    visible = np.arange(keys) < keys - 1
    tiles = np.arange(keys) // tile
    values: dict[str, Any] = {
        "recipe": "fa2",
        "keys": np.arange(keys, dtype=np.int64),
        "visible": visible,
        "p_bar": (p_bar * visible).astype(np.float32),
        "p_operand": (p_bar * visible).astype(np.float32),
        "is_one": is_one & visible,
        "tile": tiles.astype(np.int64),
        "tile_alpha": bf16(uniform(int(tiles[-1]) + 1, seed + 3)),
        "v": bf16(uniform(keys * features, seed + 4) - 0.5).reshape(keys, features),
        "p_format": "bf16",
        "row_sum": 1.2345678806304932,
        "division": "reciprocal",
        "o_bar_format": "fp32",
        "o_bar_at": "end",
        "o_format": "bf16",
        "o": bf16(uniform(features, seed + 5) - 0.5),
        "lse": 3.5,
        **fields,
    }
    return RowWalk(**values)


def row_trace(**fields: Any) -> RowTrace:
    """A row as two walks."""
    values: dict[str, Any] = {
        "layer": 1,
        "head": 2,
        "sequence": 3,
        "token": 50,
        "step": 401,
        "run": walk(keys=10, tile=4),
        "ascending": walk(keys=7, tile=7, recipe="fa2+tile_k=all"),
        "o_hp": uniform(3, 41) - 0.5,
    }
    return RowTrace(**{**values, **fields})
