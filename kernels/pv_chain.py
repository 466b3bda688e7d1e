"""The product of P-bar and V as flash attention's forward pass chains it over key tiles, for a given P-bar.

It is there to compare a model of the matrix unit with the unit, without the exponentials that a whole forward pass
puts in between.
"""

import torch
import triton
import triton.language as tl
from bf16forensics.kernels.matrix_unit import TILES
from bf16forensics.kernels.rounding import round_to_bf16_bits


@triton.jit
def _pv_chain_kernel(
    p_p, p_v, p_alpha, p_inverse, p_o_bar, p_o, num_rows, num_keys, num_features, num_tiles,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i_rows = tl.program_id(0).to(tl.int64)
    i_features = tl.program_id(1).to(tl.int64)
    # [ROWS]
    o_row = i_rows * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    # [FEATURES]
    o_feature = i_features * FEATURES + tl.arange(0, FEATURES)
    m_feature = o_feature < num_features
    # [ROWS, FEATURES]
    b_o_bar = tl.full((ROWS, FEATURES), 0.0, tl.float32)
    for i_visit in range(num_tiles):
        # [TILE]
        o_key = (num_tiles - 1 - i_visit) * TILE + tl.arange(0, TILE)
        m_key = o_key < num_keys
        # [ROWS, TILE]
        b_p = tl.load(p_p + o_row[:, None] * num_keys + o_key[None, :], mask=m_row[:, None] & m_key[None, :], other=0.0)
        # [TILE, FEATURES]
        b_v = tl.load(
            p_v + o_key[:, None].to(tl.int64) * num_features + o_feature[None, :],
            mask=m_key[:, None] & m_feature[None, :],
            other=0.0,
        )
        # [ROWS]
        b_alpha = tl.load(p_alpha + o_row * num_tiles + i_visit, mask=m_row, other=0.0)
        b_o_bar = b_o_bar * b_alpha[:, None]
        b_o_bar = tl.dot(b_p, b_v, b_o_bar, input_precision="ieee")
    # [ROWS]
    b_inverse = tl.load(p_inverse + o_row, mask=m_row, other=0.0)
    # [ROWS, FEATURES]
    b_o = round_to_bf16_bits(b_o_bar * b_inverse[:, None])
    o_out = o_row[:, None] * num_features + o_feature[None, :]
    m_out = m_row[:, None] & m_feature[None, :]
    tl.store(p_o_bar + o_out, b_o_bar, mask=m_out)
    tl.store(p_o + o_out, b_o, mask=m_out)


def pv_chain(
    p: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, row_sum: torch.Tensor, tile: int, instruction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """O-bar and O of one head from P-bar: key tiles from last to first, one FP32 accumulator an element.

    Before each tile the accumulator is multiplied by the tile's alpha in FP32, then the matrix unit adds the tile's
    products to it, in the order of the keys. O = O-bar * (1 / row sum) in FP32, rounded once to BF16.

    Args:
        p: [R, M] BF16, on a GPU, or on the CPU under Triton's interpreter, which multiplies in FP32 instead.
        v: [M, E] BF16.
        alpha: [R, T] FP32, factor before each tile, in the order of visits.
        row_sum: [R] FP32.
        tile: keys a tile, a power of two from 16; T = ceil(M / tile).
        instruction: a key of `matrix_unit.TILES`.

    Returns:
        O-bar [R, E] FP32 and O [R, E] FP32 holding BF16 values. Zeros where M is 0. Bitwise reproducible on one device.

    Raises:
        ValueError: other dtypes or shapes.
    """
    _check(p, v, alpha, row_sum, tile)
    rows, warps = TILES[instruction]
    num_rows, num_keys = p.shape
    num_features = v.shape[1]
    p, v, alpha = (t.contiguous() for t in (p, v, alpha))
    if not p.is_cuda:
        p, v = p.float(), v.float()
    inverse = (1.0 / row_sum).contiguous()
    o_bar = torch.empty((num_rows, num_features), dtype=torch.float32, device=p.device)
    o = torch.empty_like(o_bar)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_features, _FEATURES))
    if o.numel():
        _pv_chain_kernel[grid](
            p, v, alpha, inverse, o_bar, o, num_rows, num_keys, num_features, alpha.shape[1],
            ROWS=rows, FEATURES=_FEATURES, TILE=tile, num_warps=warps,
        )  # fmt: skip
    return o_bar, o


_FEATURES = 64


def _check(p: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, row_sum: torch.Tensor, tile: int) -> None:
    dtypes = [p.dtype, v.dtype, alpha.dtype, row_sum.dtype]
    if dtypes != [torch.bfloat16] * 2 + [torch.float32] * 2:
        raise ValueError(f"expected P and V in BF16, alpha and row sum in FP32, got {dtypes}")
    shapes = [tuple(t.shape) for t in (p, v, alpha, row_sum)]
    if p.ndim != 2 or v.ndim != 2 or shapes != [
        p.shape, (p.shape[1], v.shape[1]), (len(p), -(-p.shape[1] // tile)), (len(p),)
    ]:  # fmt: skip
        raise ValueError(f"expected [R, M], [M, E], [R, ceil(M / {tile})] and [R], got {shapes}")
