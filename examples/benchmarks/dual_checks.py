"""Whether the fused dual pass is right, for the benchmark of it: against float64, and against the reference.

Shapes: H heads, N queries and keys, D elements of a head; causal.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from bf16forensics.kernels.fused_types import FusedForward, FusedInputs, RowCounts
from dual_counts import wrong_counts
from dual_rivals import Exact

from bf16forensics.attention.dual import block_of, dual_pass_at
from bf16forensics.attention.result import DualPass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.recipe.model import Recipe

#: The budget of O_hp, relative to sum P|V|: root mean square, and mean in any direction.
MOST_RMS, MOST_BIAS = 1e-6, 5e-7
#: Log-sum-exp of high precision: the FP32 sums of a product and of a row, and what an FP32 number of its size holds.
MOST_LSE, MOST_LSE_RELATIVE = 1e-5, 2e-6
#: P K takes P in one BF16 term, which is up to 2^-8 of it off; a hundredth of that for the sums.
MOST_CARRIER = 1.01 * 2.0**-8
#: delta and its error, relative to sum |dO| P|V|: ten times the rms of one element, for the largest of many rows.
MOST_DELTA = 10 * MOST_RMS
#: O_lp differs where an FP32 sum in another order puts a value across a halfway point. How often that is, the reference
#: says itself with the features of q and k in reverse order. The kernels also sum P-bar V in another order, which moves
#: O by some 2e-7 of sum P|V|. On normal data that sum is sqrt(keys) times O, and 2^-8 of O are a BF16 number: 0.3 % of
#: them move at 4,096 keys. (A rounding point that is somewhere else moves 1.4 % and more.)
SHARE_FACTOR, SHARE_FLOOR, FLOOR_KEYS, FAR_FLOOR = 3.0, 5e-3, 4096, 1e-3
#: What another order of FP32 sums moves, relative to sum P|V|: no difference.
SUM_NOISE = 2e-6
#: Nats by which the recipe's log-sum-exp may differ where none of its roundings flips.
LSE_NOISE = 1e-4
#: Heads of the reference at most.
_HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found, and in one clause each what is wrong."""

    #: Of O_hp against float64, relative to sum P|V|; and |O_hp - O| / |O|.
    rms: float
    bias: float
    norm: float
    #: Share of the elements of O_lp that differ from the reference on sampled rows, and of the reference itself with
    #: its sums in another order.
    differing: float
    twin: float
    rows: int
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differences:
    """Shares of elements of O_lp, and of rows for the log-sum-exp."""

    differing: float
    #: By more than one BF16 number.
    far: float
    lse: float


def check(
    inputs: FusedInputs, recipe: Recipe, forward: FusedForward, counts: RowCounts, true: Exact, tokens: list[int]
) -> Checked:
    """Compares a dual pass with float64, and the blocks of rows that hold some tokens with the reference.

    Args:
        inputs: of the pass.
        recipe: of the pass.
        forward: of the pass, with `carrier`.
        counts: of the pass.
        true: float64 of the first heads, with weights.
        tokens: queries.
    """
    # Where delta itself rounds, saturated rows have its error in the place of that of O.
    plain = (recipe.delta_source, recipe.delta_products, recipe.delta) == ("o", "fp32", "fp32")
    values, wrong = _against_exact(inputs, forward, true, None if plain else counts.top < 0)
    found, twins, rows = [], [], 0
    for token in tokens:
        record = _record(inputs, min(_HEADS, len(true.o)))
        turned = replace(record, q=record.q.flip(-1), k=record.k.flip(-1))
        (dual, span), (twin, _) = (dual_pass_at(one, recipe, token) for one in (record, turned))
        block = slice(*span)
        own = _Rows.of(forward, counts, len(record.q), block)
        weight = true.o_weight[: len(record.q), block].cpu() if true.o_weight is not None else dual.o_hp.abs()
        found.append(_differences(own.o_lp, own.lse_lp, dual, weight, recipe))
        twins.append(_differences(twin.o_lp, twin.lse_lp, dual, weight, recipe))
        block_rows = block_of(record, recipe, token)
        wrong += wrong_counts(own.counts, record, recipe, dual, block_rows, on_gpu=inputs.q.is_cuda)
        rows += len(record.q) * (span[1] - span[0])
    mine, other = _mean(found), _mean(twins)
    longer = math.sqrt(max(1.0, inputs.k.shape[1] / FLOOR_KEYS))
    # A row sum that is stored in BF16 and lies at a halfway point takes all of its row along: 2^-23 of it against 2^-8
    # are some 1e-4 of the rows, and three are allowed.
    far_floor = FAR_FLOOR + (0.0 if recipe.row_sum == "fp32" else 3 / rows)
    for name, floor in (("differing", SHARE_FLOOR * longer), ("far", far_floor), ("lse", SHARE_FLOOR)):
        share, most = getattr(mine, name), SHARE_FACTOR * getattr(other, name) + floor
        if not share <= most:
            what = {"differing": "elements of O_lp differ", "far": "elements of O_lp differ by over one BF16 number",
                    "lse": "rows differ in the log-sum-exp of the recipe"}[name]  # fmt: skip
            wrong.append(f"{share:.2%} of the {what}, at most {most:.2%}")
    rms, bias, norm = values
    return Checked(
        rms=rms, bias=bias, norm=norm, differing=mine.differing, twin=other.differing, rows=rows, wrong=tuple(wrong)
    )


def not_reproduced(first: tuple[FusedForward, RowCounts], second: tuple[FusedForward, RowCounts]) -> list[str]:
    """Names of the results whose bits differ between two runs."""
    wrong = []
    for one, other in zip(first, second, strict=True):
        for field in fields(one):  # type: ignore[arg-type]
            a, b = getattr(one, field.name), getattr(other, field.name)
            if a is not None and not torch.equal(a, b):
                wrong.append(f"{field.name} differs between two runs")
    return wrong


def _against_exact(
    inputs: FusedInputs, forward: FusedForward, true: Exact, of_o: torch.Tensor | None
) -> tuple[tuple[float, float, float], list[str]]:
    """rms, bias and relative norm of O_hp, and what is wrong with anything of high precision.

    `of_o`: bool [H, N], rows whose delta error is dO . (O_lp - O_hp); None for all.
    """
    heads = len(true.o)
    if true.o_weight is None or true.carrier_weight is None or forward.carrier is None or inputs.do is None:
        raise ValueError("expected weights, dO and P K")
    error = forward.o_hp[:heads].double() - true.o
    norm = (error.norm() / true.o.norm()).item()
    relative = error / true.o_weight
    rms = relative.square().mean().sqrt().item()
    # Upward, and away from zero: a sum that is cut off drifts toward zero.
    bias = max(abs(relative.mean().item()), abs((relative * true.o.sign()).mean().item()))
    do = inputs.do[:heads].double()
    scale = (do.abs() * true.o_weight).sum(-1)
    delta_err = (do * (forward.o_lp[:heads].double() - true.o)).sum(-1)
    delta_scale = scale if of_o is None else scale.masked_fill(~of_o[:heads], math.inf)
    carrier = (forward.carrier[:heads].double() - true.carrier).abs() / true.carrier_weight
    lse = (forward.lse_hp[:heads].double() - true.lse).abs() - MOST_LSE_RELATIVE * true.lse.abs()
    limits = [
        ("rms of O_hp", rms, MOST_RMS),
        ("bias of O_hp", bias, MOST_BIAS),
        ("log-sum-exp", lse.max().item(), MOST_LSE),
        ("P K", carrier.max().item(), MOST_CARRIER),
        ("delta_hp", _largest(forward.delta_hp, true.delta, scale), MOST_DELTA),
        ("delta error", _largest(forward.delta_err, delta_err, delta_scale), MOST_DELTA),
    ]
    # Written so that NaN is wrong.
    wrong = [f"{name} is off by {value:.2g}, at most {most:.2g}" for name, value, most in limits if not value <= most]
    return (rms, bias, norm), wrong


def _largest(found: torch.Tensor | None, expected: torch.Tensor, scale: torch.Tensor) -> float:
    if found is None:
        return math.nan
    return ((found[: len(expected)].double() - expected).abs() / scale).max().item()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A block of rows of the pass, on the CPU in float64."""

    o_lp: torch.Tensor
    lse_lp: torch.Tensor
    counts: dict[str, torch.Tensor]

    @classmethod
    def of(cls, forward: FusedForward, counts: RowCounts, heads: int, block: slice) -> "_Rows":
        names = ("ones_fp32", "ones_rounded", "near", "shared")
        return cls(
            o_lp=forward.o_lp[:heads, block].double().cpu(),
            lse_lp=forward.lse_lp[:heads, block].double().cpu(),
            counts={name: getattr(counts, name)[:heads, block].long().cpu() for name in names},
        )


def _record(inputs: FusedInputs, heads: int) -> AttentionRecord:
    """The first heads, without dO: the reference then is a forward pass only."""
    q, k, v = (t[:heads].float().cpu() for t in (inputs.q, inputs.k, inputs.v))
    return AttentionRecord(
        layer=0, sequence=0, step=None, storage="bf16", q=q, k=k, v=v, do=None, x=None,
        geometry=Geometry(scale=inputs.scale),
    )  # fmt: skip


def _differences(
    o_lp: torch.Tensor, lse: torch.Tensor, dual: DualPass, weight: torch.Tensor, recipe: Recipe
) -> _Differences:
    apart = (o_lp - dual.o_lp).abs()
    noise = SUM_NOISE * weight
    largest = torch.maximum(o_lp.abs(), dual.o_lp.abs())
    # A BF16 number has 8 bits: the next one is 2^-7 of its power of two away.
    step = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-38))) - 7) if recipe.o == "bf16" else 0.0
    far = ~(apart <= step + noise)
    lse_apart = ~((lse - dual.lse_lp).abs() <= LSE_NOISE)
    return _Differences(
        differing=(~(apart <= noise)).double().mean().item(),
        far=far.double().mean().item(),
        lse=lse_apart.double().mean().item(),
    )


def _mean(parts: list[_Differences]) -> _Differences:
    return _Differences(
        **{f.name: sum(getattr(part, f.name) for part in parts) / len(parts) for f in fields(_Differences)}
    )
