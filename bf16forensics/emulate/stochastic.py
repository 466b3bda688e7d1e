"""Stochastic rounding of tensors: the torch twin of the mode "stochastic" of `floats.arrays`.

A value between two neighbours of a format goes to the one farther from zero with a probability equal to its distance
from the other, in steps, so its expectation is the value itself. As in `rounding`, values stay in the wide dtype and
results are detached from autograd.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bf16forensics.emulate.rounding import round_to, wide_format
from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, FP32, FP64, FloatFormat, format_named

#: The widest random digits that an int32 holds.
_DIGIT_BITS = 31
#: Random integers up to here are exact in FP64, in which they are compared.
_NUM_BITS_MAX = 53
_BF16_DROPPED_BITS = 16


def round_stochastic(t: Tensor, fmt_name: str, generator: torch.Generator, *, overflow: str | None = None) -> Tensor:
    """Round every element to one of its two neighbours in a format, with an expectation equal to the element.

    The probability is exact: random digits are drawn until they decide, which the first 31 bits do but for one element
    in 2**31. Every element takes one draw, in row-major order, also one that the format holds; so the result depends
    on the generator's state, the shape and the values, not on strides, and FP32 and FP64 tensors of the same values
    round alike. The same state gives the same result on one torch version and kind of device.

    A value that the format holds never moves. NaN stays NaN, zeros keep their sign, subnormals of the format are kept.
    Infinities stay or saturate as in `round_to`. A value between the largest finite one and the next step, were there
    one, goes to one of these two, and whatever is at or beyond that step overflows: in "nonfinite" to infinity, or to
    NaN in a format without one; in "saturate" to the largest finite value, so values beyond it are biased toward zero.
    Where the process flushes subnormals to zero, elements that are subnormal in their dtype never go up, but in FP32
    to "bf16"; without flushing that has a probability below 2**-100. A format that holds every value of the dtype
    returns what `round_to` does, and draws nothing.

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "e4m3", "e5m2", "bf16", "fp16", "fp32" or "fp64".
        generator: Of the device of `t`.
        overflow: "nonfinite" or "saturate"; None for the format's own, which saturates FP8 alone.

    Returns:
        Same shape and dtype as `t`.

    Raises:
        InputError: as `round_to`; or a generator of another device.
    """
    if generator.device.type != t.device.type:
        raise InputError(f"the generator is on {generator.device}, the tensor on {t.device}; make one on that device")

    def draw(shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=t.device).random_(0, 1 << _DIGIT_BITS, generator=generator)

    def bf16_bits() -> Tensor:
        return draw(t.shape).bitwise_right_shift_(_DIGIT_BITS - _BF16_DROPPED_BITS)

    return _round(t, fmt_name, overflow, lambda rest: goes_up_exactly(rest, draw, _DIGIT_BITS), bf16_bits)


def round_with_bits(
    t: Tensor, fmt_name: str, random_bits: Tensor, num_bits: int, *, overflow: str | None = None
) -> Tensor:
    """Round as `round_stochastic`, with random numbers from the caller: an integer r of k bits stands for r / 2**k.

    An element goes away from zero exactly if r / 2**k is below its distance, in steps, from the neighbour next to
    zero. Over all 2**k integers that is exactly unbiased for elements whose distance is a multiple of 2**-k; others
    come out too far from zero, on average by less than 2**-k steps. 16 bits do for FP32 to "bf16".

    Args:
        t: Any shape, FP32 or FP64.
        fmt_name: "e4m3", "e5m2", "bf16", "fp16", "fp32" or "fp64".
        random_bits: Shape of `t`, int32 or int64, each in [0, 2**num_bits).
        num_bits: 1 to 53, the k above.
        overflow: "nonfinite" or "saturate"; None for the format's own, which saturates FP8 alone.

    Returns:
        Same shape and dtype as `t`.

    Raises:
        InputError: as `round_to`; or random bits of another shape, dtype, device or range.
    """
    _check_bits(t, random_bits, num_bits)

    def bf16_bits() -> Tensor:
        # Fewer bits than 16 are the leading ones; bits below the 16th cannot change a comparison with 16 bits.
        excess = num_bits - _BF16_DROPPED_BITS
        bits = random_bits >> excess if excess >= 0 else random_bits << -excess
        return bits.to(torch.int32)

    return _round(t, fmt_name, overflow, lambda rest: rest.mul_(2.0**num_bits) > random_bits, bf16_bits)


def goes_up_exactly(rest: Tensor, draw: Callable[[torch.Size], Tensor], digit_bits: int) -> Tensor:
    """Compare every element with a random number in [0, 1) of which only as many digits are drawn as decide.

    Args:
        rest: Any shape, FP64 in [0, 1) or NaN; overwritten.
        draw: Takes a shape and returns random integers in [0, 2**digit_bits), of any integer dtype.
        digit_bits: At most 52.

    Returns:
        Same shape, bool: whether the random number is below the element.
    """
    gap = rest.mul_(2.0**digit_bits).sub_(draw(rest.shape))
    is_up = gap > 0
    is_open = is_up & (gap < 1)
    if is_open.any():
        is_up[is_open] = goes_up_exactly(gap[is_open], draw, digit_bits)
    return is_up


def _round(
    t: Tensor,
    fmt_name: str,
    overflow: str | None,
    goes_up: Callable[[Tensor], Tensor],
    bf16_bits: Callable[[], Tensor],
) -> Tensor:
    wide = wide_format(t)
    fmt = format_named(fmt_name)
    beyond = fmt.value_beyond(overflow)
    if fmt.fraction_bits >= wide.fraction_bits:
        return round_to(t, fmt_name, overflow=overflow)
    t = t.detach()
    if wide is FP32 and fmt is BF16:
        magnitude = _round_bf16_magnitude(t, bf16_bits())
    else:
        magnitude = _round_magnitude(t.double(), fmt, goes_up).to(t.dtype)
    magnitude.masked_fill_(magnitude > fmt.max_finite, beyond)
    return torch.where(t.isnan(), t, magnitude.copysign_(t))


def _round_bf16_magnitude(t: Tensor, bits: Tensor) -> Tensor:
    """Round |FP32| to BF16 by a carry out of the dropped half, without arithmetic on subnormals, which may be flushed.

    The lower half carries when it is above `bits`, as 16-bit integers. NaN gives anything.
    """
    dropped = (1 << _BF16_DROPPED_BITS) - 1
    code = t.view(torch.int32).bitwise_and(FP32.sign_mask - 1)
    code.add_(dropped).sub_(bits).bitwise_and_(~dropped)
    return code.view(torch.float32)


def _round_magnitude(t: Tensor, fmt: FloatFormat, goes_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Round |FP64| to a narrower format, whose exponents have no upper end here. NaN gives NaN."""
    shift = FP64.fraction_bits
    # Bits of 2**e, e the exponent of each element, kept within the format's range; beyond it the value overflows
    # whatever the step is.
    binade = t.view(torch.int64).bitwise_and(FP64.exponent_mask)
    binade.clamp_((fmt.exponent_min + FP64.bias) << shift, (fmt.exponent_max + FP64.bias) << shift)
    step = binade.sub(fmt.fraction_bits << shift).view(torch.float64)
    # [...]: bits of 1 / step.
    inverse = binade.neg_().add_((2 * FP64.bias + fmt.fraction_bits) << shift).view(torch.float64)
    num_steps = t.abs().mul_(inverse)
    whole = num_steps.floor()
    return whole.add_(goes_up(num_steps.sub_(whole))).mul_(step)


def _check_bits(t: Tensor, random_bits: Tensor, num_bits: int) -> None:
    if random_bits.dtype not in (torch.int32, torch.int64) or random_bits.shape != t.shape:
        raise InputError(
            f"random bits are int32 or int64 of shape {tuple(t.shape)}, got {random_bits.dtype} of shape "
            f"{tuple(random_bits.shape)}"
        )
    if random_bits.device != t.device:
        raise InputError(f"the random bits are on {random_bits.device}, the tensor on {t.device}; move one")
    if not 1 <= num_bits <= _NUM_BITS_MAX:
        raise InputError(f"num_bits must be 1 to {_NUM_BITS_MAX}, got {num_bits}")
    if random_bits.numel() and (int(random_bits.min()) < 0 or int(random_bits.max()) >= 1 << num_bits):
        raise InputError(f"random bits lie outside [0, 2**{num_bits}); mask them to {num_bits} bits")
