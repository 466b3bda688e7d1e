"""The exponential of FlashAttention-4: hardware exp2 for most keys, a cubic polynomial for some.

Blackwell's tensor cores outrun its exponential unit, so part of the exponentials of a row is computed by fused
multiply-adds instead. Which part is a pattern in the columns of a key tile: a thread owns a row, walks it in fragments
of 32 columns, and takes the polynomial for the last four columns of every `frequency`, except in the last fragment
and in the first ones. The backward pass uses the hardware exponential everywhere, so that its P differs there.

Reference: flash-attention@0251105 flash_attn/cute/utils.py (ex2_emulation_2), softmax.py (apply_exp2_convert),
flash_fwd_sm100.py (tuning table), interface.py (two-block kernels).
"""

import torch

#: Coefficients of 2^f on [0, 1), constant first; FP32 numbers.
_COEFFICIENTS = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)
#: Exponents below this become it; its result is 0.
_LOWEST = -127.0
_FP32_FRACTION_BITS = 23
_FRAGMENT = 32
#: Columns of each period that the polynomial takes.
_TAKEN = 4
#: (frequency, first fragment) for (two-block kernel, causal or window, padded head size); `_DEFAULT` otherwise.
_TUNED = {
    (True, False, 128): (10, 1),
    (True, False, 192): (16, 0),
    (False, True, 192): (32, 1),
}
_DEFAULT = (16, 1)
#: Largest padded head size to which the default applies; larger ones use the hardware alone.
_DEFAULT_UP_TO = 128


def fused_multiply_subtract(values: torch.Tensor, factor: float, minus: torch.Tensor) -> torch.Tensor:
    """values * factor - minus with one rounding to FP32 (but for double rounding in 2^-29 of all cases).

    Args:
        values: FP32.
        factor: rounded to FP32 first.
        minus: FP32, broadcastable.
    """
    exact_factor = torch.tensor(factor, dtype=torch.float32).item()
    return values.double().mul_(exact_factor).sub_(minus.double()).float()


def cubic_exp2(exponents: torch.Tensor) -> torch.Tensor:
    """2^x by the degree-3 polynomial, bit for bit but for double roundings; largest relative error 8.8e-5.

    Args:
        exponents: FP32, below 128. Below -127 the result is 0, between -127 and -126 it is a subnormal number far
            from 2^x, as in the kernel. NaN stays NaN (the kernel's maximum would make it 0).
    """
    clamped = exponents.clamp(min=_LOWEST)
    whole = torch.floor(clamped)
    fraction = (clamped - whole).double()
    value = torch.full_like(clamped, _COEFFICIENTS[-1])
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        value = (value.double() * fraction + coefficient).float()
    # The integer part goes into the exponent field, as an addition of integers.
    shifted = value.view(torch.int32) + whole.nan_to_num().to(torch.int32).bitwise_left_shift(_FP32_FRACTION_BITS)
    return torch.where(exponents.isnan(), exponents, shifted.view(torch.float32))


def cubic_keys(
    head_size: int, causal: bool, num_queries: int, keys: tuple[int, int], tile_k: int
) -> torch.Tensor | None:
    """bool [K]: the keys of a block whose exponential is the polynomial's; None when there is none.

    Args:
        head_size: elements of one query vector; the kernel pads it to a multiple of 16.
        causal: whether the call has a causal mask or a window.
        num_queries: N of the whole call: the kernel that joins two thread blocks needs more than two query tiles.
        keys: [start, end) of the block's keys in the whole row.
        tile_k: keys a tile.
    """
    padded = -(-head_size // 16) * 16
    two_blocks = not causal and padded in (128, 192) and num_queries > 2 * 128
    tuned = _TUNED.get((two_blocks, causal, padded), _DEFAULT if padded <= _DEFAULT_UP_TO else None)
    if tuned is None:
        return None
    frequency, first_fragment = tuned
    column = torch.arange(*keys) % tile_k
    fragment = column // _FRAGMENT
    # Exponentials come in pairs: the even column of a pair decides for both.
    pair = column % _FRAGMENT // 2 * 2
    last_fragment = -(-tile_k // _FRAGMENT) - 1
    return (pair % frequency >= frequency - _TAKEN) & (fragment >= first_fragment) & (fragment < last_fragment)
