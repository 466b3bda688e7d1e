"""Saturating FP8 against the conversion instructions of a GPU, over every FP32 value."""

import pytest
import torch

from bf16forensics.emulate.rounding import round_to
from bf16forensics.floats.formats import format_named

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.gpu

BLOCK = 1024
CHUNK = 1 << 26


@triton.jit
def convert_kernel(values, codes, is_e4m3: tl.constexpr, block: tl.constexpr):
    where = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(values + where)
    if is_e4m3:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, $1, $1; cvt.u32.u16 $0, two; }",
            "=r,f",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b16 two; cvt.rn.satfinite.e5m2x2.f32 two, $1, $1; cvt.u32.u16 $0, two; }",
            "=r,f",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    tl.store(codes + where, (pair & 0xFF).to(tl.uint8))


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_fp32_value_rounds_as_the_hardware_does(name, dtype):
    """T1, 2**32 values: PTX cvt.rn.satfinite, of which every NaN is the code 0x7F."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no CUDA device that converts to FP8")
    seen = set()
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        values = torch.arange(start, start + CHUNK, device="cuda").to(torch.int32).view(torch.float32)
        codes = torch.full((CHUNK,), 0x55, dtype=torch.uint8, device="cuda")
        convert_kernel[(CHUNK // BLOCK,)](values, codes, name == "e4m3", BLOCK)
        hardware, ours = codes.view(dtype).float(), round_to(values, name)
        both_nan = hardware.isnan() & ours.isnan()
        assert ((hardware.view(torch.int32) == ours.view(torch.int32)) | both_nan).all()
        assert (hardware.isnan() == values.isnan()).all()
        seen |= set(codes.unique().tolist())
    largest = format_named(name).max_finite_code
    assert seen == {*range(largest + 1), *range(0x80, 0x80 + largest + 1), 0x7F}
