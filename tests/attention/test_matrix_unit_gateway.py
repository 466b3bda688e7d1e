"""The gateway to the matrix unit where something is missing: one line that says what."""

import sys

import pytest
import torch

from bf16forensics.attention import matrix_unit
from bf16forensics.attention.matrix_unit import INSTRUCTIONS, matrix_instructions, matrix_unit_dot, why_unavailable
from bf16forensics.errors import InputError

ONES = torch.ones(2, 16, dtype=torch.bfloat16)


@pytest.fixture
def device(monkeypatch):
    """A made-up GPU with Triton, of a compute capability that the test sets."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
        monkeypatch.setitem(sys.modules, "triton", torch)

    return pretend


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_without_a_gpu(monkeypatch, instruction):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (
        lambda: matrix_unit_dot(ONES, ONES, torch.zeros(2), instruction),
        lambda: matrix_instructions(torch.bfloat16, instruction),
    ):
        with pytest.raises(InputError, match=r"^no CUDA device: [^\n]+$"):
            call()


def test_without_triton(monkeypatch, device):
    device((9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InputError, match=r"^Triton is not installed: install bf16forensics\[gpu\] [^\n]+$"):
        matrix_unit_dot(ONES, ONES, torch.zeros(2), "mma.sync")


@pytest.mark.parametrize(
    ("capability", "dtype", "instruction", "reason"),
    [
        ((8, 0), torch.bfloat16, "wgmma", "has no wgmma"),
        ((10, 0), torch.bfloat16, "wgmma", "has no wgmma"),
        ((7, 5), torch.bfloat16, "mma.sync", "takes no bfloat16; that needs 8.0"),
        ((8, 6), torch.float8_e4m3fn, "mma.sync", "takes no float8_e4m3fn; that needs 8.9"),
        ((9, 0), torch.float8_e4m3fn, "mma.sync", "multiplies FP8 as FP16; ask wgmma"),
        ((9, 0), torch.float32, "wgmma", "not torch.float32; convert them first"),
        ((9, 0), torch.bfloat16, "hmma", "unknown matrix instruction 'hmma'; choose one of mma.sync, wgmma"),
    ],
    ids=str,
)
def test_what_a_gpu_lacks(device, capability, dtype, instruction, reason):
    device(capability)
    found = why_unavailable(dtype, instruction)
    assert found is not None
    assert reason in found
    assert "\n" not in found
    ones = torch.ones(1, 1).to(dtype)
    with pytest.raises(InputError, match="^[^\n]+$") as caught:
        matrix_unit_dot(ones, ones, torch.zeros(1), instruction)
    assert str(caught.value) == found


@pytest.mark.parametrize(
    ("capability", "dtype", "instruction"),
    [
        ((8, 0), torch.bfloat16, "mma.sync"),
        ((8, 9), torch.float8_e4m3fn, "mma.sync"),
        ((9, 0), torch.float16, "mma.sync"),
        ((9, 0), torch.float8_e4m3fn, "wgmma"),
        ((12, 0), torch.float8_e4m3fn, "mma.sync"),
    ],
    ids=str,
)
def test_what_a_gpu_has(device, capability, dtype, instruction):
    device(capability)
    assert why_unavailable(dtype, instruction) is None


def test_every_type_has_a_name():
    assert set(matrix_unit.OPERAND_DTYPES.values()) == {torch.bfloat16, torch.float16, torch.float8_e4m3fn}
