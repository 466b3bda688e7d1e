"""The self-test: its boundaries are right, it passes here, and every check of it can fail."""

import subprocess
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.errors import InputError
from bf16forensics.floats import arrays, scalar
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FP16, FP32, FP64, FloatFormat
from bf16forensics.investigate.doctor import checks as doctor_module
from bf16forensics.investigate.doctor import (
    environment,
    exponential,
    interpreter,
    precision,
    rounding,
    sums,
    unit_checks,
)
from bf16forensics.investigate.doctor.boundaries import NUM_RANDOM_BITS, boundaries, differing
from bf16forensics.investigate.doctor.compare import Comparison
from bf16forensics.investigate.doctor.result import FAIL, GROUPS, NOTED, PASS, SKIPPED, Check, Setting

NARROWER = [(E4M3, FP32), (E5M2, FP64), (BF16, FP32), (BF16, FP64), (FP16, FP32), (FP16, FP64), (FP32, FP64)]
IDS = [f"{fmt.name}-{wide.name}" for fmt, wide in NARROWER]


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def statuses(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


# Boundaries


@pytest.mark.parametrize(("fmt", "wide"), NARROWER, ids=IDS)
@pytest.mark.parametrize("overflow", ["nonfinite", "saturate"])
@pytest.mark.parametrize("mode", scalar.MODES)
def test_expected_values_are_the_specifications(fmt: FloatFormat, wide: FloatFormat, mode: str, overflow: str) -> None:
    cases = boundaries(fmt, wide)
    chosen = np.random.default_rng(1).choice(len(cases.values), 300)
    # The special values and the top of the range, of both signs, in any case.
    half = len(cases.values) // 2
    chosen = np.concatenate([chosen, np.arange(half - 9, half), np.arange(len(cases.values) - 9, len(cases.values))])
    expected = cases.expected(mode, overflow)[chosen]
    for index, right in zip(chosen, expected, strict=True):
        bits = int(cases.random[index])
        random = scalar.fraction_from_bits(bits, NUM_RANDOM_BITS) if mode == "stochastic" else None
        found = scalar.round_to(float(cases.values[index]), fmt, mode, overflow=overflow, random=random)
        assert not differing(np.array([found]), np.array([right])).any(), (cases.values[index], found, right)


@pytest.mark.parametrize(("fmt", "wide"), NARROWER[:6], ids=IDS[:6])
def test_every_midpoint_and_its_neighbours_are_tried(fmt: FloatFormat, wide: FloatFormat) -> None:
    values = set(boundaries(fmt, wide).values.tolist())
    dtype = np.float32 if wide is FP32 else np.float64
    for code in range(0, fmt.max_finite_code, 7):
        low, high = (scalar.float_from_code(each, fmt) for each in (code, code + 1))
        middle = dtype((low + high) / 2)
        around = (np.nextafter(middle, dtype(0)), middle, np.nextafter(middle, dtype(np.inf)))
        assert {low, *(float(value) for value in around)} <= values
        assert {-float(value) for value in around} <= values
    assert {np.inf, -np.inf, 0.0} <= values
    assert any(value != value for value in values)


def test_signs_of_zero_and_nan_count_as_they_should() -> None:
    expected = np.array([0.0, -0.0, np.nan, 1.0])
    assert differing(np.array([-0.0, -0.0, -np.nan, np.nan]), expected).tolist() == [True, False, False, True]


# Every check passes here, or is one of the known deviations of libraries


def test_roundings_of_numpy_arrays_pass() -> None:
    found = statuses([*rounding.numpy_checks()])
    assert set(found.values()) == {PASS}
    assert {"floats.scalar", *(f"floats.arrays to {name}" for name in ("e4m3", "e5m2", "bf16", "fp16", "fp32"))} <= set(
        found
    )


def test_roundings_of_tensors_pass_and_double_rounding_is_noted() -> None:
    found = by_name(rounding.torch_checks("cpu"))
    for name in ("bf16", "fp16", "e4m3", "e5m2", "fp32"):
        assert found[f"emulate to {name}"].status == PASS
    for name in ("torch fp32 to bf16", "torch fp32 to fp16", "torch fp32 to e5m2, in range"):
        assert found[name].status == PASS
    # Halfway plus less than FP32 holds becomes halfway, and goes to even: half of all neighbourhoods, both signs.
    assert found["torch fp64 to bf16"].status == NOTED
    assert found["torch fp64 to bf16"].observed.startswith("65,280 of ")


def test_ml_dtypes_is_observed_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ml_dtypes")
    assert statuses(rounding.ml_dtypes_checks()) == {
        "ml_dtypes fp32 to bf16": PASS,
        "ml_dtypes fp64 to bf16": NOTED,
    }
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    assert list(rounding.ml_dtypes_checks()) == []


def test_arithmetic_and_exponentials_pass() -> None:
    assert set(statuses(exponential.exponential_checks("cpu")).values()) == {PASS}
    found = statuses(precision.precision_checks("cpu", ()))
    assert found["products, inside the tool"] == found["subnormals, inside the tool"] == PASS


def test_accumulation_models_pass() -> None:
    found = statuses([*sums.sum_checks(), *unit_checks.model_checks()])
    names = ("exact", "fp32-sequential", "fp32-pairwise", "sm80", "sm90", "sm100", "sm90-fp8")
    assert found == {f"accumulation model {name}": PASS for name in names}


# Every check can fail


def truncating(t: torch.Tensor, fmt_name: str, **options: Any) -> torch.Tensor:
    """Rounding toward zero on the bits, as an interpreter of kernels may have it."""
    if t.dtype == torch.float32 and fmt_name == "bf16":
        return (t.view(torch.int32) & -65536).view(torch.float32)
    return t


def by_way_of_fp32(x: np.ndarray, fmt: FloatFormat, mode: str, **options: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        narrow = x.astype(np.float32)
    return RIGHT_ARRAYS(narrow, fmt, mode, **options).astype(x.dtype)


def flushing(x: np.ndarray, fmt: FloatFormat, mode: str, **options: Any) -> np.ndarray:
    result = RIGHT_ARRAYS(x, fmt, mode, **options)
    return np.where(np.abs(result) < fmt.min_normal, np.copysign(0.0, result), result)


def losing_signs_of_zero(x: np.ndarray, fmt: FloatFormat, mode: str, **options: Any) -> np.ndarray:
    return RIGHT_ARRAYS(x, fmt, mode, **options) + 0.0


def always_saturating(x: np.ndarray, fmt: FloatFormat, mode: str, **options: Any) -> np.ndarray:
    return RIGHT_ARRAYS(x, fmt, mode, **{**options, "overflow": "saturate"})


def ties_away(x: np.ndarray, fmt: FloatFormat, mode: str, **options: Any) -> np.ndarray:
    return RIGHT_ARRAYS(x, fmt, "rna" if mode == "rne" else mode, **options)


RIGHT_ARRAYS = arrays.round_to


@pytest.mark.parametrize("wrong", [by_way_of_fp32, flushing, losing_signs_of_zero, always_saturating, ties_away])
def test_a_wrong_rounding_of_arrays_fails(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "round_to", wrong)
    check = rounding._arrays(BF16)
    assert check.status == FAIL
    assert "do not use" in check.what_it_means


def test_a_truncating_rounding_of_tensors_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding.rounding, "round_to", truncating)
    check = rounding._emulate(BF16, "cpu")
    assert check.status == FAIL
    # The largest FP32 number below 1, truncated.
    assert "fp32 to bf16, rne: 0.9999999403953552 gives 0.99609375, not 1.0" in check.observed
    assert check.expected == "0 differ from exact rounding"


def test_stochastic_rounding_by_the_next_integer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rounding.stochastic.round_with_bits

    def wrong(t: torch.Tensor, fmt_name: str, bits: torch.Tensor, num_bits: int, **options: Any) -> torch.Tensor:
        return right(t, fmt_name, (bits - 1).clamp(min=0), num_bits, **options)

    monkeypatch.setattr(rounding.stochastic, "round_with_bits", wrong)
    assert rounding._emulate(BF16, "cpu").status == FAIL


def test_a_wrong_specification_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scalar.round_to
    monkeypatch.setattr(
        scalar, "round_to", lambda x, fmt, mode, **options: right(x, fmt, "rz" if mode == "rne" else mode, **options)
    )
    assert rounding.specification().status == FAIL


def test_a_librarys_truncation_is_noted_and_no_failure() -> None:
    def cast(x: np.ndarray) -> np.ndarray:
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    check = rounding.observe_cast("library", "cpu", BF16, FP32, cast)
    assert check.status == NOTED
    assert "not 1.0" in check.observed


def test_nothing_compared_is_no_pass() -> None:
    assert Comparison(name="empty", where="cpu", is_relied_on=True).check().status == FAIL


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=str)
def test_bits_that_a_leak_takes_are_counted(dtype: torch.dtype, bits: int) -> None:
    assert precision.product_bits("cpu") == 24
    with torch.autocast("cpu", dtype=dtype):
        assert precision.product_bits("cpu") == bits


def test_a_leak_is_noted_and_stopped_inside_the_tool() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        settings = environment.settings()
        found = by_name(precision.precision_checks("cpu", settings))
    assert found["products, as found"].status == NOTED
    assert found["products, as found"].observed == "8 of 24 bits (bf16); torch autocast cpu=True"
    assert found["products, inside the tool"].status == PASS


def test_a_leak_that_cannot_be_stopped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "product_bits", lambda device: 11)
    found = by_name(precision.precision_checks("cpu", ()))
    assert found["products, inside the tool"].status == FAIL
    assert "ONEDNN_DEFAULT_FPMATH_MODE" in found["products, inside the tool"].what_it_means


def test_flushing_is_noted_and_stopped_inside_the_tool() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        found = by_name(precision.precision_checks("cpu", ()))
    finally:
        torch.set_flush_denormal(False)
    noted = found["subnormals, as found"]
    assert noted.status == NOTED
    for part in ("torch", "NumPy", "Python"):
        assert f"{part} flushes results and operands" in noted.observed
    assert found["subnormals, inside the tool"].status == PASS


def test_flushing_that_cannot_be_stopped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_numpy_flushes", lambda: "results")
    check = by_name(precision.precision_checks("cpu", ()))["subnormals, inside the tool"]
    assert (check.status, check.observed) == (FAIL, "NumPy flushes results")


@pytest.mark.parametrize(
    ("factor", "status"), [(lambda x: 1.0 + 2.0**-22 * (x == x), FAIL), (lambda x: 1.0 + x * 1e-6, NOTED)]
)
def test_a_wrong_exponential(
    factor: Callable[[torch.Tensor], Any], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.exp2
    monkeypatch.setattr(torch, "exp2", lambda x: right(x) * factor(x))
    found = by_name(exponential.exponential_checks("cpu"))
    assert found["torch.exp2, FP32"].status == status
    assert found["torch.exp, FP32"].status == PASS


def test_models_that_add_otherwise_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = unit_checks.dot_add
    others = {"sm90": "sm80", "exact": "fp32-sequential", "fp32-sequential": "fp32-pairwise"}

    def wrong(c: Any, a: Any, b: Any, model: str, **options: Any) -> Any:
        return right(c, a, b, others.get(model, model), **options)

    monkeypatch.setattr(unit_checks, "dot_add", wrong)
    monkeypatch.setattr(sums, "dot_add", wrong)
    found = statuses([*sums.sum_checks(), *unit_checks.model_checks()])
    assert {name.removeprefix("accumulation model ") for name, status in found.items() if status == FAIL} == set(others)


# Kernels


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    ours, tritons = interpreter.InterpreterProcess().checks()
    assert (ours.name, ours.where, ours.status) == ("kernel rounding to bf16", "interpreter", PASS)
    # Versions up to 3.9 truncate.
    assert (tritons.name, tritons.status in (NOTED, PASS)) == ("Triton fp32 to bf16", True)


def test_kernels_without_triton_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None)
    checks = interpreter.InterpreterProcess().checks()
    assert [check.status for check in checks] == [SKIPPED, SKIPPED]
    assert checks[0].observed == "Triton is not installed; install bf16forensics[gpu]"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('first\\nlast words')", "last words"),
        ("import sys; sys.exit(9)", "exit code 9"),
    ],
)
def test_an_interpreter_that_breaks_is_skipped_with_its_reason(
    program: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return right([command[0], "-c", program], **options)

    monkeypatch.setattr(interpreter, "find_spec", lambda name: True)
    monkeypatch.setattr(interpreter.subprocess, "Popen", start)
    checks = interpreter.InterpreterProcess().checks()
    assert {check.status for check in checks} == {SKIPPED}
    assert checks[0].observed == f"Triton's interpreter does not run here: {reason}"


def test_an_interpreter_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    right, started = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> Any:
        started.append(right([command[0], "-c", "import time; time.sleep(600)"], **options))
        return started[0]

    monkeypatch.setattr(interpreter, "find_spec", lambda name: True)
    monkeypatch.setattr(interpreter.subprocess, "Popen", start)
    monkeypatch.setattr(interpreter, "_TIMEOUT_S", 0.2)
    checks = interpreter.InterpreterProcess().checks()
    assert "took more than 0.2 s" in checks[0].observed
    assert started[0].poll() is not None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_truncating_kernel_fails(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(t: torch.Tensor) -> torch.Tensor:
        return truncating(t, "bf16") if is_wrong else t.bfloat16().float()

    names = [entry[0] for entry in interpreter._ROUNDINGS]
    monkeypatch.setattr(interpreter, "_ROUNDINGS", ((names[0], kernel, True), (names[1], kernel, False)))
    found = interpreter.kernel_checks("cpu", "interpreter")
    assert [check.status for check in found] == ([FAIL, NOTED] if is_wrong else [PASS, PASS])


def test_kernels_on_the_processor_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    checks = interpreter.kernel_checks("cpu", "cpu")
    assert {check.status for check in checks} == {SKIPPED}
    assert "Triton" in checks[0].observed or "TRITON_INTERPRET" in checks[0].observed


# Environment


def test_extras_are_those_of_the_package(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for name, extra in environment.PACKAGES:
        declared = project["dependencies"] if extra is None else extras[extra]
        assert any(requirement.startswith(name) for requirement in declared), name


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", (("torch", None), ("no-such-package-here", "gpu")))
    packages = environment.system((), "none").packages
    assert packages[0].version == torch.__version__
    assert (packages[1].version, packages[1].extra) == (None, "gpu")


def test_processor_and_driver_are_read_where_the_system_tells(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.40GHz  \nflags\t: fpu\n", encoding="utf-8")
    assert environment._cpu_model(path) == "Some CPU @ 2.40GHz"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    path.write_text(line, encoding="utf-8")
    assert environment._driver(path) == "580.95.05"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed\n", encoding="utf-8")
    assert environment._driver(path) == "535.104.12"
    assert environment._cpu_model(path) is None
    assert environment._driver(tmp_path / "absent") is None


def settings_by_name() -> dict[str, Setting]:
    return {setting.name: setting for setting in environment.settings()}


@pytest.mark.parametrize(
    ("variable", "value", "reduces"),
    [
        ("NVIDIA_TF32_OVERRIDE", "1", ("cuda",)),
        ("NVIDIA_TF32_OVERRIDE", "0", ()),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", ("cpu",)),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT", ()),
        ("OMP_NUM_THREADS", "3", ()),
    ],
)
def test_variables_are_found(
    variable: str, value: str, reduces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    setting = settings_by_name()[variable]
    assert (setting.value, setting.reduces) == (value, reduces)
    monkeypatch.delenv(variable)
    setting = settings_by_name()[variable]
    assert (setting.value, setting.reduces) == (None, ())


def test_torch_settings_are_found() -> None:
    before = torch.get_float32_matmul_precision()
    assert settings_by_name()["torch float32_matmul_precision"].reduces == ()
    torch.set_float32_matmul_precision("medium")
    try:
        setting = settings_by_name()["torch float32_matmul_precision"]
    finally:
        torch.set_float32_matmul_precision(before)
    assert (setting.value, setting.reduces) == ("medium", ("cpu", "cuda"))


def test_a_setting_that_torch_refuses_to_read_is_named() -> None:
    def read() -> object:
        raise RuntimeError("mix of the legacy and new APIs")

    setting = environment._setting("precision", read, ("highest",), ("cuda",))
    assert (setting.value, setting.reduces) == ("contradicted by another setting", ("cuda",))


# The whole


def test_a_gpu_that_is_asked_for_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"torch .* CUDA.*; leave --device out to test the processor"):
        doctor_module.examine("cuda")


@pytest.mark.slow
def test_the_whole_on_this_machine() -> None:
    told: list[str] = []
    report = doctor_module.examine("cpu", told.append)
    assert report.verdict == PASS
    assert [check for check in report.checks if check.status == FAIL] == []
    order = [GROUPS.index(check.group) for check in report.checks]
    assert order == sorted(order)
    assert set(order) == set(range(len(GROUPS)))
    assert report.system.gpus == ()
    assert told[-1] == "Triton's interpreter"
    assert [check.status for check in report.checks if check.where == "cuda"] == [SKIPPED]
