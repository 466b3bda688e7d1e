"""Rounding of tensors to a storage format in one step: the torch twin of `floats.arrays` and `floats.ulp`.

Values stay in the wide dtype (FP32 or FP64): a rounded value is a wide value that the narrow format can hold. Results
that differ from the input are detached from autograd, because a rounding has no useful derivative. Everything works
on any device and any strides, and gives the same bits whether or not the process flushes subnormals to zero, except
where stated.
"""

import torch
from torch import Tensor

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import FP32, FP64, FloatFormat, format_named

_WIDE = {torch.float32: FP32, torch.float64: FP64}
_BITS_DTYPE = {torch.float32: torch.int32, torch.float64: torch.int64}
#: Formats whose torch cast from FP32 was compared with the specification over all 2**32 FP32 codes.
_PROVEN_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def round_to(t: Tensor, fmt_name: str) -> Tensor:
    """Round every element to the nearest value of a format, ties to even, in one rounding.

    NaN stays NaN (its payload is not kept), infinities and signed zeros are kept, subnormals of the format are kept,
    values beyond the overflow threshold become infinities of their sign. An empty tensor stays empty. A format that
    holds every value of the dtype returns `t` itself.

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "bf16", "fp16", "fp32" or "fp64".

    Returns:
        Same shape and dtype as `t`.

    Raises:
        InputError: unknown format, or a dtype other than FP32 and FP64.
    """
    wide = _wide_format(t)
    fmt = format_named(fmt_name)
    if fmt.fraction_bits >= wide.fraction_bits:
        return t
    t = t.detach()
    if wide is FP32:
        return t.to(_PROVEN_CASTS[fmt_name]).to(torch.float32)
    return _round_fp64(t, fmt)


def ulp_of(t: Tensor, fmt_name: str) -> Tensor:
    """Return the step of a format at every element: the spacing of the binade that holds its magnitude.

    Zero and magnitudes below the smallest normal number have the smallest subnormal as step; finite magnitudes beyond
    the largest finite number have the step of the largest binade. Infinity and NaN give NaN, so that a ratio over them
    never passes for a small number. At a power of two the step is the one above it.

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "bf16", "fp16", "fp32" or "fp64".

    Returns:
        Same shape and dtype as `t`; positive, or NaN.

    Raises:
        InputError: unknown format, a dtype other than FP32 and FP64, or a format whose steps the dtype cannot hold.
    """
    wide = _wide_format(t)
    fmt = format_named(fmt_name)
    if fmt.step_exponent_min < wide.step_exponent_min:
        raise InputError(f"steps of {fmt_name} do not fit into {t.dtype}; convert the tensor to torch.float64")
    shift = wide.fraction_bits
    exponent = t.detach().view(_BITS_DTYPE[t.dtype]).bitwise_and(wide.infinity_code)
    is_special = exponent == wide.infinity_code
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


def changed_by_cast(t: Tensor, fmt_name: str) -> tuple[int, float]:
    """Count the elements that a format cannot hold, and find the largest rounding error among them.

    NaN and infinite elements are never counted; a finite element that overflows counts, with an infinite error. Where
    the process flushes subnormals to zero, errors below the dtype's smallest normal number may be reported as 0.

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "bf16", "fp16", "fp32" or "fp64".

    Returns:
        The number of changed elements, and max |rounded - t| over them (0.0 when there is none).

    Raises:
        InputError: unknown format, or a dtype other than FP32 and FP64.
    """
    rounded = round_to(t, fmt_name)
    if rounded is t or t.numel() == 0:
        return 0, 0.0
    t = t.detach()
    as_bits = _BITS_DTYPE[t.dtype]
    is_changed = (rounded.view(as_bits) != t.view(as_bits)).logical_and_(t.isfinite())
    error = rounded.sub_(t).abs_().masked_fill_(is_changed.logical_not(), 0.0)
    return int(is_changed.sum()), float(error.max())


def _wide_format(t: Tensor) -> FloatFormat:
    wide = _WIDE.get(t.dtype)
    if wide is None:
        raise InputError(f"cannot round a tensor of {t.dtype}; convert it to torch.float32 or torch.float64 first")
    return wide


def _round_fp64(t: Tensor, fmt: FloatFormat) -> Tensor:
    """Round FP64 to a narrower format by one addition of 1.5 * 2**52 steps, which leaves no room below the step."""
    shift = FP64.fraction_bits
    # [...]: bits of 2**e, e the exponent of each element, kept within the format's range; beyond it the final
    # multiplication overflows whatever the step was.
    magic = t.view(torch.int64).bitwise_and(FP64.infinity_code)
    magic.clamp_((fmt.exponent_min + FP64.bias) << shift, (fmt.exponent_max + FP64.bias) << shift)
    magic.add_(((shift - fmt.fraction_bits) << shift) | 1 << (shift - 1))
    anchor = magic.view(torch.float64)
    rounded = t.add(anchor).sub_(anchor)
    # Past the largest binade these two products overflow; within it they are exact.
    to_edge = 2.0 ** (FP64.exponent_max - fmt.exponent_max)
    rounded.mul_(to_edge).mul_(1.0 / to_edge)
    # A value that rounds to zero, and -0 itself, come out of the subtraction as +0.
    return rounded.copysign_(t)
