"""The self-test of the arithmetic that the tool relies on, on the machine at hand."""

import time
from collections.abc import Callable, Iterator

from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError
from bf16forensics.investigate.doctor import environment
from bf16forensics.investigate.doctor.exponential import exponential_checks
from bf16forensics.investigate.doctor.interpreter import InterpreterProcess, kernel_checks
from bf16forensics.investigate.doctor.precision import precision_checks
from bf16forensics.investigate.doctor.result import GROUPS, Check, DoctorReport, Setting, UnitProbe
from bf16forensics.investigate.doctor.rounding import ml_dtypes_checks, numpy_checks, torch_checks
from bf16forensics.investigate.doctor.sums import sum_checks
from bf16forensics.investigate.doctor.unit_checks import device_checks, model_checks, skipped

#: Called before each part with what comes next.
OnProgress = Callable[[str], None]


def examine(device: str | None = None, on_progress: OnProgress | None = None) -> DoctorReport:
    """Looks at the environment and tests its arithmetic by computing. Takes seconds.

    Args:
        device: "cpu" for the processor alone, "cuda" for the GPUs alone, None for everything there is.
        on_progress: told what comes next.

    Raises:
        InputError: "cuda" where there is no CUDA device.
    """
    started = time.perf_counter()
    tell = on_progress or _ignore
    # Before anything else, because libraries that are imported later may change them.
    settings = environment.settings()
    gpus, no_gpu = environment.gpus()
    if device == "cuda" and no_gpu is not None:
        raise InputError(f"{no_gpu}; leave --device out to test the processor")
    if device == "cpu":
        gpus, no_gpu = (), "not looked for, as --device cpu asks"
    checks: list[Check] = []
    units: list[UnitProbe] = []
    if device != "cuda":
        checks += _processor(settings, tell)
    for gpu in gpus:
        tell(f"arithmetic of {gpu.where}")
        checks += _common(gpu.where, settings)
        checks += kernel_checks(gpu.where, gpu.where)
        tell(f"matrix unit of {gpu.where}")
        for check, unit in device_checks(gpu.where):
            checks.append(check)
            units += () if unit is None else (unit,)
    if no_gpu is not None:
        checks.append(skipped("cuda", no_gpu))
    return DoctorReport(
        system=environment.system(gpus, no_gpu),
        settings=settings,
        checks=tuple(sorted(checks, key=lambda check: GROUPS.index(check.group))),
        units=tuple(units),
        wall_s=time.perf_counter() - started,
    )


def _processor(settings: tuple[Setting, ...], tell: OnProgress) -> list[Check]:
    interpreter = InterpreterProcess()
    try:
        tell("roundings of NumPy arrays")
        with strict_fp32():
            checks = [*numpy_checks(), *ml_dtypes_checks()]
        tell("arithmetic of the processor")
        checks += _common("cpu", settings)
        tell("accumulation models")
        checks += [*sum_checks(), *model_checks()]
        tell("Triton's interpreter")
        checks += interpreter.checks()
    finally:
        interpreter.stop()
    return checks


def _common(device: str, settings: tuple[Setting, ...]) -> Iterator[Check]:
    """What is tested on every kind of device."""
    yield from precision_checks(device, settings)
    with strict_fp32():
        yield from exponential_checks(device)
        yield from torch_checks(device)


def _ignore(_: str) -> None:
    """Tells nobody."""
