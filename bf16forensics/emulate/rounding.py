"""Rounding of tensors to a storage format in one step: the torch twin of `floats.arrays` and `floats.ulp`.

Values stay in the wide dtype (FP32 or FP64): a rounded value is a wide value that the narrow format can hold. Results
that differ from the input are detached from autograd, because a rounding has no useful derivative. Everything works
on any device and any strides, and gives the same bits whether or not the process flushes subnormals to zero, except
where stated. `stochastic` rounds at random.
"""

import math

import torch
from torch import Tensor

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import FP32, FP64, FloatFormat, format_named

_WIDE = {torch.float32: FP32, torch.float64: FP64}
_BITS_DTYPE = {torch.float32: torch.int32, torch.float64: torch.int64}
#: Formats whose torch cast from FP32 was compared with the specification over all 2**32 FP32 codes.
_PROVEN_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The same for values within the range of the format. Beyond it torch's casts to FP8 depend on its version: E4M3 is NaN
#: before 2.12 and saturates since. The cast to E4M3 is right within, but the way back from it takes several times as
#: long as the additions that replace both.
_PROVEN_CASTS_IN_RANGE = {**_PROVEN_CASTS, "e5m2": torch.float8_e5m2}


def round_to(t: Tensor, fmt_name: str, *, overflow: str | None = None) -> Tensor:
    """Round every element to the nearest value of a format, ties to even, in one rounding.

    NaN stays NaN (its payload is not kept), signed zeros are kept, subnormals of the format are kept. In "nonfinite"
    infinities are kept and values beyond the overflow threshold become infinities of their sign, or NaN both, in a
    format without infinity; in "saturate" both become the largest finite value of their sign. An empty tensor stays
    empty. A format that holds every value of the dtype returns `t` itself, unless its infinities saturate.

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "e4m3", "e5m2", "bf16", "fp16", "fp32" or "fp64".
        overflow: "nonfinite" or "saturate"; None for the format's own: the FP8 formats saturate, as the conversions of
            FP8 attention kernels do; the others do not.

    Returns:
        Same shape and dtype as `t`.

    Raises:
        InputError: unknown format or overflow, a dtype other than FP32 and FP64, or a largest value to saturate at
            that the dtype cannot hold.
    """
    wide = wide_format(t)
    fmt = format_named(fmt_name)
    beyond = fmt.value_beyond(overflow)
    is_kept = fmt.fraction_bits >= wide.fraction_bits
    is_saturated = math.isfinite(beyond)
    if is_kept and not is_saturated:
        return t
    t = t.detach()
    limited = _saturated(t, fmt, wide) if is_saturated else t
    if is_kept:
        return limited
    casts = _PROVEN_CASTS_IN_RANGE if is_saturated else _PROVEN_CASTS
    if wide is FP32 and fmt_name in casts:
        return limited.to(casts[fmt_name]).to(torch.float32)
    rounded = _round_by_addition(limited, fmt, wide, beyond, out=limited if is_saturated else None)
    # A value that rounds to zero, and -0 itself, come out of the additions as +0.
    return rounded.copysign_(t)


def ulp_of(t: Tensor, fmt_name: str) -> Tensor:
    """Return the step of a format at every element: the spacing of the binade that holds its magnitude.

    Zero and magnitudes below the smallest normal number have the smallest subnormal as step; finite magnitudes beyond
    the largest finite number have the step of the largest binade. Infinity and NaN give NaN, so that a ratio over them
    never passes for a small number. At a power of two the step is the one above it.

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "e4m3", "e5m2", "bf16", "fp16", "fp32" or "fp64".

    Returns:
        Same shape and dtype as `t`; positive, or NaN.

    Raises:
        InputError: unknown format, a dtype other than FP32 and FP64, or a format whose steps the dtype cannot hold.
    """
    wide = wide_format(t)
    fmt = format_named(fmt_name)
    if fmt.step_exponent_min < wide.step_exponent_min:
        raise InputError(f"steps of {fmt_name} do not fit into {t.dtype}; convert the tensor to torch.float64")
    shift = wide.fraction_bits
    exponent = t.detach().view(_BITS_DTYPE[t.dtype]).bitwise_and(wide.exponent_mask)
    is_special = exponent == wide.exponent_mask
    lowest, highest = (fmt.exponent_min + wide.bias) << shift, (fmt.exponent_max + wide.bias) << shift
    exponent.clamp_(lowest, highest)
    if fmt.step_exponent_min >= wide.exponent_min:
        step = exponent.sub_(fmt.fraction_bits << shift)
    else:
        # A step below the dtype's normal range is one bit of the fraction field, built without arithmetic on
        # subnormals, which the process may flush.
        field = exponent.bitwise_right_shift_(shift).sub_(fmt.fraction_bits)
        subnormal = torch.ones_like(field).bitwise_left_shift_((field + (shift - 1)).clamp_(0, shift - 1))
        step = torch.where(field > 0, field.bitwise_left_shift(shift), subnormal)
    return step.view(t.dtype).masked_fill_(is_special, float("nan"))


def changed_by_cast(t: Tensor, fmt_name: str, *, overflow: str | None = None) -> tuple[int, float]:
    """Count the elements that a format cannot hold, and find the largest rounding error among them.

    NaN and infinite elements are never counted, also where infinities saturate. A finite element that overflows
    counts: its error is infinite in "nonfinite", and its distance from the largest finite value in "saturate". Where
    the process flushes subnormals to zero, errors below the dtype's smallest normal number may be reported as 0.

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "e4m3", "e5m2", "bf16", "fp16", "fp32" or "fp64".
        overflow: "nonfinite" or "saturate"; None for the format's own.

    Returns:
        The number of changed elements, and max |rounded - t| over them (0.0 when there is none).

    Raises:
        InputError: as `round_to`.
    """
    rounded = round_to(t, fmt_name, overflow=overflow)
    if rounded is t or t.numel() == 0:
        return 0, 0.0
    t = t.detach()
    as_bits = _BITS_DTYPE[t.dtype]
    is_changed = (rounded.view(as_bits) != t.view(as_bits)).logical_and_(t.isfinite())
    error = rounded.sub_(t).abs_().masked_fill_(is_changed.logical_not(), 0.0)
    # Only where there is no infinity does a finite element become NaN.
    largest = float(error.max())
    return int(is_changed.sum()), math.inf if math.isnan(largest) else largest


def wide_format(t: Tensor) -> FloatFormat:
    """Return the format of a tensor that can be rounded.

    Raises:
        InputError: a dtype other than FP32 and FP64.
    """
    wide = _WIDE.get(t.dtype)
    if wide is None:
        raise InputError(f"cannot round a tensor of {t.dtype}; convert it to torch.float32 or torch.float64 first")
    return wide


def _saturated(t: Tensor, fmt: FloatFormat, wide: FloatFormat) -> Tensor:
    if fmt.max_finite > wide.max_finite:
        raise InputError(f"{t.dtype} cannot hold the largest {fmt.name} value; convert the tensor to torch.float64")
    return t.clamp(-fmt.max_finite, fmt.max_finite)


def _round_by_addition(t: Tensor, fmt: FloatFormat, wide: FloatFormat, beyond: float, out: Tensor | None) -> Tensor:
    """Round to a narrower format by one addition of 1.5 * 2**23 (FP32) or 1.5 * 2**52 steps (FP64).

    A sum of that size leaves no room below the step.
    """
    shift = wide.fraction_bits
    # [...]: bits of 2**e, e the exponent of each element, kept within the format's range; beyond it the value
    # overflows whatever the step was.
    magic = t.view(_BITS_DTYPE[t.dtype]).bitwise_and(wide.exponent_mask)
    magic.clamp_((fmt.exponent_min + wide.bias) << shift, (fmt.exponent_max + wide.bias) << shift)
    magic.add_(((shift - fmt.fraction_bits) << shift) | 1 << (shift - 1))
    anchor = magic.view(t.dtype)
    rounded = torch.add(t, anchor, out=out).sub_(anchor)
    if math.isinf(beyond):
        # Past the largest binade these two products overflow; within it they are exact.
        to_edge = 2.0 ** (wide.exponent_max - fmt.exponent_max)
        rounded.mul_(to_edge).mul_(1.0 / to_edge)
    elif math.isnan(beyond):
        rounded.masked_fill_(rounded.abs() > fmt.max_finite, beyond)
    return rounded
