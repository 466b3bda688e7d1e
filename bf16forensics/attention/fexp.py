"""How PyTorch's CPU flash attention walks a row: its approximate exponential, its row sum, and where it uses neither.

The kernel takes a row of a key tile in vectors of 8 (AVX2) or 16 (AVX-512) FP32 numbers. Whole vectors get `fexp_u20`,
a cubic whose result goes into the exponent field by an integer conversion, so that only about 17 bits of a result mean
anything; the keys left over at the end of a tile get the C library's exponential, and so does the factor of rescaling.

Reference: pytorch v2.13.0 aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (_exp_reduce_sum_fusion_kernel),
include/ATen/cpu/vec/vec256/vec256_float.h and vec512/vec512_float.h (fexp_u20), functional_base.h (vec_reduce_all);
the two accumulators of the row sum were read off the machine code of the build for x86-64, which agrees bit for bit.

Shapes: H heads, R rows, K keys of a tile.
"""

import torch

#: log2(e) and the coefficients of the cubic, largest power first; FP32 numbers, as are all constants here.
_LOG2_E = 1.44269502162933349609375
_COEFFICIENTS = (
    -0.079204238951206207275390625,
    -0.22433836758136749267578125,
    0.303542613983154296875,
    0.0001070343496394343674182891845703125,
)
#: Below the first (ln of the smallest normal number) the result is 0, above the second it is infinite.
_LOWEST, _LARGEST = -87.3365478515625, 88.72283935546875
#: Exponent bias and size of the fraction field of FP32.
_BIAS, _FRACTION = 127.0, 2.0**23
#: FP32 numbers of a vector register by `Recipe.row_sum_order`.
_LANES = {"avx2": 8, "avx512": 16}


def lanes_of(row_sum_order: str) -> int | None:
    """FP32 numbers of a vector for a recipe's `row_sum_order`; None for "any"."""
    return _LANES.get(row_sum_order)


def fexp_u20(values: torch.Tensor) -> torch.Tensor:
    """exp(x) by the cubic, bit for bit: fexp(0) = 0.9999466, relative error within 1.13e-4.

    Products and sums in float64 stand for fused multiply-adds; over all FP32 numbers between -88.5 and -2^-30 the
    result is the vector code's.

    Args:
        values: FP32, any shape. Below -87.34 (and for -inf) the result is 0, above 88.73 infinity. NaN stays NaN; the
            kernel's integer conversion would make it -0, but a row with a NaN has NaN in its row sum there too.
    """
    exponent = values * _LOG2_E
    narrow = exponent.floor().neg_().add_(exponent)
    fraction = narrow.double()
    correction = fraction * _COEFFICIENTS[0]
    for coefficient in _COEFFICIENTS[1:-1]:
        correction.copy_(narrow.copy_(correction.add_(coefficient))).mul_(fraction)
    narrow.copy_(correction.add_(_COEFFICIENTS[-1]))
    # Scaling by a power of two is exact, so this is the fused multiply-add that forms the code of the result.
    code = exponent.sub_(narrow).add_(_BIAS).mul_(_FRACTION)
    ordinary = (values >= _LOWEST).logical_and_(values <= _LARGEST)
    result = code.masked_fill_(ordinary.logical_not_(), 0.0).to(torch.int32).view(torch.float32)
    # A softmax has neither of these: its exponents are at most 0, and NaN is rare.
    unusual = ~(values <= _LARGEST)
    if unusual.any():
        result = torch.where(unusual, values.clamp(min=torch.inf), result)
    return result


def library_exp(values: torch.Tensor) -> torch.Tensor:
    """exp of an FP32 tensor, rounded once to FP32 (the C library's FP32 one errs by a step in 6 of 10,000 values)."""
    return values.double().exp_().float()


def library_log(values: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of an FP32 tensor, rounded once to FP32 (the C library's errs by a step in 3 of 10,000)."""
    return values.double().log_().float()


def row_exp(values: torch.Tensor, in_vectors: torch.Tensor | None) -> torch.Tensor:
    """exp of a tile's rows: `fexp_u20` for the keys that lie in whole vectors, `library_exp` for the others.

    Args:
        values: [..., K] FP32.
        in_vectors: bool [K] as of `vector_keys`; None for no key.
    """
    if in_vectors is None:
        return library_exp(values)
    result = fexp_u20(values)
    if not in_vectors.all():
        result[..., ~in_vectors] = library_exp(values[..., ~in_vectors])
    return result


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of FP32 tensors with one rounding to FP32 (but for double rounding in 2^-29 of all cases)."""
    return (a.double() * b.double()).add_(c.double()).float()


def vector_keys(tiles: tuple[tuple[int, int], ...], row_sum_order: str) -> torch.Tensor:
    """bool [K of all tiles]: the keys that lie in a whole vector of their tile; all of them for "any".

    Args:
        tiles: [start, end) of every key tile, relative to the first key of all.
        row_sum_order: `Recipe.row_sum_order`.
    """
    lanes = lanes_of(row_sum_order) or 1
    whole = torch.zeros(max(end for _, end in tiles), dtype=torch.bool)
    for start, end in tiles:
        whole[start : end - (end - start) % lanes] = True
    return whole


def sum_rows(p_bar: torch.Tensor, row_sum_order: str) -> torch.Tensor:
    """Sum of each row of a tile, [H, R] FP32, in the order of a recipe.

    With vectors, two accumulators take them in turn; they are added, the lanes in halves after that, and the keys left
    over one by one at last. "any" is the order that torch takes.

    Args:
        p_bar: [H, R, K] FP32.
        row_sum_order: `Recipe.row_sum_order`.
    """
    lanes = lanes_of(row_sum_order)
    if lanes is None:
        return p_bar.sum(-1)
    num_keys = p_bar.shape[-1]
    whole = num_keys - num_keys % lanes
    accumulators = p_bar.new_zeros((*p_bar.shape[:-1], 2 * lanes))
    for start in range(0, whole, 2 * lanes):
        part = p_bar[..., start : min(start + 2 * lanes, whole)]
        accumulators[..., : part.shape[-1]] += part
    total = accumulators
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    total = total[..., 0]
    for key in range(whole, num_keys):
        total = total + p_bar[..., key]
    return total
