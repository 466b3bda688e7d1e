"""The torch twin of `floats.ties`: roundings taken apart on any device, without leaving it.

Float64 operations, one by one those of the original, so that every element is the same, bit for bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bf16forensics.floats.formats import FP64, FloatFormat
from bf16forensics.floats.ties import MOST_BITS

_EXPONENT = FP64.exponent_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class TieTensors:
    """One rounding an element, as `floats.ties.TieTerms`; floats are 0 where `defined` is False."""

    #: bool, and int64.
    defined: Tensor
    bits_dropped: Tensor
    #: float64 in ulp.
    residue: Tensor
    error: Tensor
    law: Tensor
    #: bool.
    halfway: Tensor


def tie_tensors(
    main: Tensor, grid: Tensor, before: Tensor, after: Tensor, fmt: FloatFormat, odd: Tensor, noise: float
) -> TieTensors:
    """Takes roundings apart; arguments as those of `floats.ties.tie_terms`, which shapes broadcast against.

    Args:
        main: float64 [...] main sums.
        grid: float64 [...] a power of two each, or inf.
        before: float64 [...].
        after: float64 [...].
        fmt: the format of the rounding.
        odd: int64 [...], odd and positive.
        noise: relative, where `odd` is not 1.
    """
    defined = before.isfinite() & (before != 0) & after.isfinite() & main.isfinite()
    main, grid = main.masked_fill(~defined, 0.0), grid.masked_fill(~defined, torch.inf)
    before, after = before.masked_fill(~defined, 1.0), after.masked_fill(~defined, 1.0)
    ulp = tensor_steps_at(before, fmt)
    sign = torch.where(main == 0, before, main).sign()
    away = before.sign()
    beyond = before - main
    # Adding +0 leaves no zero negative.
    residue = beyond / ulp * sign + 0.0
    error = (after - before) / ulp * away + 0.0
    steps = (ulp / grid).clamp(1.0, 2.0**MOST_BITS)
    heard = torch.where((odd == 1) | (beyond.abs() > noise * before.abs()), residue, 0.0)
    law = _law(steps, heard, odd) * (sign * away) + 0.0
    places = main.abs() / ulp
    return TieTensors(
        defined=defined,
        # Of a power of two the exponent is all there is.
        bits_dropped=((steps.view(torch.int64) & _EXPONENT) >> FP64.fraction_bits) - FP64.bias,
        residue=residue.masked_fill(~defined, 0.0),
        error=error.masked_fill(~defined, 0.0),
        law=law.masked_fill(~defined, 0.0),
        halfway=places - places.floor() == 0.5,
    )


def tensor_steps_at(values: Tensor, fmt: FloatFormat) -> Tensor:
    """`floats.ties.steps_at` of a float64 tensor that holds no NaN."""
    binade = (values.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)
    return binade.clamp(2.0**fmt.exponent_min, 2.0**fmt.exponent_max) * 2.0**-fmt.fraction_bits


def _law(steps: Tensor, residue: Tensor, odd: Tensor) -> Tensor:
    places_an_ulp = steps * odd
    place = residue.abs() * places_an_ulp
    place = place - place.floor()
    fine = (0.5 - place) * (place != 0)
    coarse = (place.round() - place) * (place != 0.5)
    return torch.where(steps == 1, coarse, fine) / places_an_ulp * residue.sign()
