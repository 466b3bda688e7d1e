"""FP32 that is FP32, found by computing: the bits that products keep, and whether subnormals survive."""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bf16forensics.emulate.strict import effective_fp32_precision, strict_fp32
from bf16forensics.investigate.doctor.result import FAIL, NOTED, PASS, PRECISION, Check, Setting

#: Bits of an FP32 significand.
_FULL = 24
#: As large as torch needs to hand a product to oneDNN.
_SIZE = 128
#: Elements for each thread, from which torch splits an operation over its threads.
_SPLIT = 32768
_LOST = (
    "Something outside torch's settings takes bits away: unset NVIDIA_TF32_OVERRIDE and ONEDNN_DEFAULT_FPMATH_MODE. "
    "Until then the tool refuses to compare with an FP32 reference."
)


def precision_checks(device: str, settings: tuple[Setting, ...]) -> Iterator[Check]:
    """Multiplies and scales on one device, with the process's own settings and inside the tool.

    Args:
        device: "cpu" or a CUDA device.
        settings: those found at the start, to be named.
    """
    kind_of_device = torch.device(device).type
    reducing = [f"{setting.name}={setting.value}" for setting in settings if kind_of_device in setting.reduces]
    kind, bits = _products(device)
    is_full = kind == "ieee" and bits == _FULL
    yield Check(
        group=PRECISION,
        name="products, as found",
        where=device,
        status=PASS if is_full and not reducing else NOTED,
        observed=_bits_text(kind, bits) + (f"; {', '.join(reducing)}" if reducing else ""),
        expected=_bits_text("ieee", _FULL),
        what_it_means=(
            "Other programs with these settings compute FP32 like this. The tool sets IEEE FP32 for itself, and puts "
            "the settings back."
        ),
    )
    with strict_fp32():
        kind, bits = _products(device)
    is_full = kind == "ieee" and bits == _FULL
    yield Check(
        group=PRECISION,
        name="products, inside the tool",
        where=device,
        status=PASS if is_full else FAIL,
        observed=_bits_text(kind, bits),
        expected=_bits_text("ieee", _FULL),
        what_it_means="Every FP32 reference and every recipe stands on full FP32 products." if is_full else _LOST,
    )
    yield _subnormals(device, "subnormals, as found", NOTED)
    with strict_fp32():
        inside = _subnormals(device, "subnormals, inside the tool", FAIL)
    yield inside


def product_bits(device: str) -> int:
    """Count the significand bits of FP32 operands, of 24, that survive a product with a unit matrix from either side.

    Three patterns of every width, so that no scheme that splits an operand in two or three terms passes for more.
    """
    unit = torch.eye(_SIZE, dtype=torch.float32, device=device)
    probe = torch.ones(_SIZE, _SIZE, dtype=torch.float32, device=device)
    for width in range(2, _FULL + 1):
        lowest = 2.0 ** (1 - width)
        alternating = sum(2.0**-bit for bit in range(width - 1, -1, -2))
        probe[:, 3 * width] = 1.0 + lowest
        probe[:, 3 * width + 1] = 1.0 + 2.0 ** -(width // 2) + lowest
        probe[:, 3 * width + 2] = alternating
    # [columns]
    survives = ((unit @ probe).float() == probe).all(0) & ((probe @ unit).float() == probe).all(0)
    by_width = survives[3 : 3 * _FULL + 3].view(_FULL, 3).all(1).tolist()
    return by_width.index(False) if False in by_width else _FULL


def _products(device: str) -> tuple[str, int]:
    return effective_fp32_precision(device), product_bits(device)


def _bits_text(kind: str, bits: int) -> str:
    return f"{bits} of {_FULL} bits ({kind})"


def _subnormals(device: str, name: str, otherwise: str) -> Check:
    parts = {"torch": _torch_flushes(device)}
    if device == "cpu":
        parts |= {"torch's threads": _torch_flushes(device, _SPLIT * torch.get_num_threads())}
        parts |= {"NumPy": _numpy_flushes(), "Python": _python_flushes()}
    else:
        parts |= {"products": _products_flush(device)}
    flushing = [f"{part} flushes {what}" for part, what in parts.items() if what]
    return Check(
        group=PRECISION,
        name=name,
        where=device,
        status=otherwise if flushing else PASS,
        observed="; ".join(flushing) or f"kept by {', '.join(parts)}",
        expected=f"kept by {', '.join(parts)}",
        what_it_means=(
            "Subnormal numbers become zero, usually by a library built with -ffast-math or by set_flush_denormal; the "
            "tool keeps them for itself."
            if flushing and otherwise == NOTED
            else "Small P-bar and gradients keep their values, and roundings at the lower end of a format are right."
        ),
    )


def _what(is_result_lost: bool, is_operand_lost: bool) -> str:
    return " and ".join(
        word for word, is_lost in (("results", is_result_lost), ("operands", is_operand_lost)) if is_lost
    )


def _torch_flushes(device: str, size: int = 1) -> str:
    smallest_normal = torch.full((size,), 2.0**-126, device=device)
    # Built from its bits, because making it by arithmetic may flush it.
    subnormal = torch.full((size,), 1 << 9, dtype=torch.int32, device=device).view(torch.float32)
    return _what(_any_zero(smallest_normal.mul(0.5)), _any_zero(subnormal.mul(2.0**40)))


def _products_flush(device: str) -> str:
    unit = torch.eye(_SIZE, dtype=torch.float32, device=device)
    subnormal = torch.full((_SIZE, _SIZE), 1 << 9, dtype=torch.int32, device=device).view(torch.float32)
    normal = torch.full((_SIZE, _SIZE), 2.0**-126, device=device)
    return _what(_any_zero((unit * 0.5) @ normal), _any_zero((unit * 2.0**40) @ subnormal))


def _any_zero(t: Tensor) -> bool:
    # A flushed number compares equal to zero, so the bits are looked at.
    return bool((t.view(torch.int32) == 0).any())


def _numpy_flushes() -> str:
    found: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for floating, integer, smallest_normal in (
        (np.dtype(np.float32), np.dtype(np.uint32), 2.0**-126),
        (np.dtype(np.float64), np.dtype(np.uint64), 2.0**-1022),
    ):
        normal: NDArray[Any] = np.full(64, smallest_normal, dtype=floating)
        subnormal: NDArray[Any] = np.full(64, 1 << 9, dtype=integer).view(floating)
        # A Python number takes the array's dtype.
        found.append(((normal * 0.5).view(integer), (subnormal * 2.0**40).view(integer)))
    return _what(any((halved == 0).any() for halved, _ in found), any((raised == 0).any() for _, raised in found))


def _python_flushes() -> str:
    # From a list, so that nothing is computed when the source is compiled.
    normal, subnormal, half, large = [float.fromhex(text) for text in ("0x1p-1022", "0x1p-1060", "0x1p-1", "0x1p+40")]
    return _what(not any(struct.pack("<d", normal * half)), not any(struct.pack("<d", subnormal * large)))
