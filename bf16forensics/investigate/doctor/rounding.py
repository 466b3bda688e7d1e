"""Every conversion that the tool relies on, at every boundary of its format; and those of libraries, as observed."""

from collections.abc import Callable, Iterator
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray

from bf16forensics.emulate import rounding, stochastic
from bf16forensics.floats import arrays, scalar
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, OVERFLOWS, FloatFormat
from bf16forensics.investigate.doctor.boundaries import NUM_RANDOM_BITS, Boundaries, boundaries
from bf16forensics.investigate.doctor.compare import Comparison
from bf16forensics.investigate.doctor.result import Check

#: Targets of roundings; nothing here is wider than FP64.
_TARGETS = tuple(fmt for fmt in FORMATS if fmt is not FP64)
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Every so many boundary values one is rounded by the specification as well.
_SPECIFICATION_STRIDE = 977


def numpy_checks() -> Iterator[Check]:
    """The specification, the roundings of `floats`, and NumPy's own conversions."""
    yield specification()
    for fmt in _TARGETS:
        yield _arrays(fmt)
    for wide in (FP32, FP64):
        yield observe_cast(f"NumPy {wide.name} to fp16", "cpu", FP16, wide, lambda x: x.astype(np.float16))


def torch_checks(device: str) -> Iterator[Check]:
    """The roundings of `emulate` on one device, the casts under them, and other casts of torch."""
    for fmt in _TARGETS:
        yield _emulate(fmt, device)
    for fmt in (BF16, FP16, E5M2):
        yield _torch_cast(fmt, FP32, device, is_relied_on=True)
    for fmt, wide in ((BF16, FP64), (FP16, FP64), (E4M3, FP32)):
        yield _torch_cast(fmt, wide, device, is_relied_on=False)


def ml_dtypes_checks() -> Iterator[Check]:
    """The conversions of ml_dtypes, where it is installed; only tests use it."""
    try:
        # By name, because nothing that the package brings along depends on it.
        bfloat16 = import_module("ml_dtypes").bfloat16
    except ImportError:
        return
    for wide in (FP32, FP64):
        yield observe_cast(f"ml_dtypes {wide.name} to bf16", "cpu", BF16, wide, lambda x: x.astype(bfloat16))


def observe_cast(
    name: str,
    where: str,
    fmt: FloatFormat,
    wide: FloatFormat,
    cast: Callable[[NDArray[np.floating]], NDArray[np.generic]],
) -> Check:
    """A library's conversion at every boundary of a format: "pass" where it rounds once, "noted" where it does not.

    Args:
        name: for the check.
        where: for the check.
        fmt: the format that `cast` converts to.
        wide: FP32 or FP64, from which it converts.
        cast: takes [n] values and returns [n] of any dtype that NumPy converts to float64.
    """
    cases = boundaries(fmt, wide)
    comparison = Comparison(name=name, where=where, is_relied_on=False)
    # Libraries warn of NaN and overflow.
    with np.errstate(all="ignore"):
        found = cast(cases.values).astype(np.float64)
    comparison.add(f"{wide.name} to {fmt.name}, rne", cases.values, found, _nearest(cases))
    return comparison.check()


def specification() -> Check:
    """Boundary values of every format and mode, rounded one at a time in exact integers."""
    comparison = Comparison(name="floats.scalar", where="cpu", is_relied_on=True)
    for fmt in _TARGETS:
        cases = boundaries(fmt, FP64)
        chosen = range(0, len(cases.values), _stride(cases))
        for mode in scalar.MODES:
            found = [_specified(cases, index, mode) for index in chosen]
            expected = cases.expected(mode)[chosen.start : chosen.stop : chosen.step]
            values = cases.values[chosen.start : chosen.stop : chosen.step]
            comparison.add(f"fp64 to {fmt.name}, {mode}", values, np.array(found), expected)
    return comparison.check()


def _stride(cases: Boundaries) -> int:
    # FP8 formats are small enough to be taken more densely, and never with a step that a period of theirs divides.
    return 7 if len(cases.values) < 10_000 else _SPECIFICATION_STRIDE


def _specified(cases: Boundaries, index: int, mode: str) -> float:
    bits = int(cases.random[index])
    random = scalar.fraction_from_bits(bits, NUM_RANDOM_BITS) if mode == "stochastic" else None
    return scalar.round_to(float(cases.values[index]), cases.fmt, mode, random=random)


def _arrays(fmt: FloatFormat) -> Check:
    comparison = Comparison(name=f"floats.arrays to {fmt.name}", where="cpu", is_relied_on=True)
    for wide in _wider(fmt):
        cases = boundaries(fmt, wide)
        for mode in scalar.MODES:
            random = cases.random if mode == "stochastic" else None
            for overflow in OVERFLOWS:
                found = arrays.round_to(cases.values, fmt, mode, overflow=overflow, random=random)
                comparison.add(_label(wide, fmt, mode), cases.values, found, cases.expected(mode, overflow))
    return comparison.check()


def _emulate(fmt: FloatFormat, device: str) -> Check:
    comparison = Comparison(name=f"emulate to {fmt.name}", where=device, is_relied_on=True)
    for wide in _wider(fmt):
        cases = boundaries(fmt, wide)
        t = torch.from_numpy(cases.values).to(device)
        bits = torch.from_numpy(cases.random.astype(np.int32)).to(device)
        for overflow in OVERFLOWS:
            nearest = rounding.round_to(t, fmt.name, overflow=overflow).cpu().numpy()
            comparison.add(_label(wide, fmt, "rne"), cases.values, nearest, cases.expected("rne", overflow))
            at_random = stochastic.round_with_bits(t, fmt.name, bits, NUM_RANDOM_BITS, overflow=overflow)
            expected = cases.expected("stochastic", overflow)
            comparison.add(_label(wide, fmt, "stochastic"), cases.values, at_random.cpu().numpy(), expected)
    return comparison.check()


def _torch_cast(fmt: FloatFormat, wide: FloatFormat, device: str, *, is_relied_on: bool) -> Check:
    cases = boundaries(fmt, wide)
    keep = np.ones(len(cases.values), dtype=bool)
    name = f"torch {wide.name} to {fmt.name}"
    if is_relied_on and fmt.bits == 8:
        # Beyond the range the cast depends on torch's version, and `emulate` limits values before it.
        keep = ~(np.abs(cases.values) > fmt.max_finite)
        name += ", in range"
    comparison = Comparison(name=name, where=device, is_relied_on=is_relied_on)
    t = torch.from_numpy(cases.values[keep]).to(device)
    found = t.to(_TORCH[fmt.name]).to(torch.float32).cpu().numpy()
    comparison.add(_label(wide, fmt, "rne"), cases.values[keep], found, _nearest(cases)[keep])
    return comparison.check()


def _nearest(cases: Boundaries) -> NDArray[np.float64]:
    return cases.expected("rne")


def _wider(fmt: FloatFormat) -> tuple[FloatFormat, ...]:
    return (FP64,) if fmt is FP32 else (FP32, FP64)


def _label(wide: FloatFormat, fmt: FloatFormat, mode: str) -> str:
    return f"{wide.name} to {fmt.name}, {mode}"
