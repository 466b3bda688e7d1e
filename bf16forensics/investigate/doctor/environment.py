"""The machine, what is installed on it, and the settings that can change arithmetic, as they are found."""

import os
import platform
import re
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bf16forensics.emulate.strict import flushes_subnormals
from bf16forensics.investigate.cores import usable_cores
from bf16forensics.investigate.doctor.result import Gpu, Package, Setting, System

#: What is looked up, with the extra that brings it; None for what every installation has, "test" for what tests use.
PACKAGES = (
    ("torch", None),
    ("numpy", None),
    ("scipy", None),
    ("safetensors", None),
    ("triton", "gpu"),
    ("transformers", "hf"),
    ("matplotlib", "plot"),
    ("ml_dtypes", "test"),
)
_BOTH = ("cpu", "cuda")
#: Variables that libraries read: the kind of device that they concern, and the values that cost FP32 nothing.
_VARIABLES = (
    ("NVIDIA_TF32_OVERRIDE", "cuda", ("0",)),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "cuda", ("0",)),
    ("ONEDNN_DEFAULT_FPMATH_MODE", "cpu", ("STRICT", "strict")),
    ("DNNL_DEFAULT_FPMATH_MODE", "cpu", ("STRICT", "strict")),
)
#: Variables that change how a run computes, and not with how many bits.
_OTHER_VARIABLES = ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "TRITON_INTERPRET")
#: (backend, operator) of torch's precision settings by backend, with the kinds of device that they concern.
_KEYS = (("generic", "all", _BOTH), ("cuda", "matmul", ("cuda",)), ("mkldnn", "matmul", ("cpu",)))
_IEEE = ("ieee", "none")


def system(gpus: tuple[Gpu, ...], no_gpu: str | None) -> System:
    """Reads versions, processor and threads.

    Args:
        gpus: the devices to be tested.
        no_gpu: why there is none; None otherwise.
    """
    return System(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_model(Path("/proc/cpuinfo")) or platform.processor() or None,
        vector_isa=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        processors=usable_cores(),
        packages=tuple(Package(name=name, version=_version(name), extra=extra) for name, extra in PACKAGES),
        gpus=gpus,
        no_gpu=no_gpu,
    )


def gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The CUDA devices of this process, and why there is none."""
    with warnings.catch_warnings():
        # A driver that is too old or broken warns; the answer is the same.
        warnings.simplefilter("ignore")
        is_available = torch.cuda.is_available()
    if not is_available:
        built = torch.version.cuda
        reason = "torch finds no CUDA device" if built else "torch is built without CUDA"
        return (), f"{reason} (torch {torch.__version__})"
    driver = _driver(Path("/proc/driver/nvidia/version"))
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                where=f"cuda:{index}",
                name=properties.name,
                capability=f"{properties.major}.{properties.minor}",
                memory_bytes=properties.total_memory,
                driver=driver,
                cuda=torch.version.cuda,
            )
        )
    return tuple(found), None


def settings() -> tuple[Setting, ...]:
    """The settings of torch and the variables of the environment that the tool overrides, checks or is moved by."""
    found = [
        _setting("torch float32_matmul_precision", torch.get_float32_matmul_precision, ("highest",), _BOTH),
        # Convolutions only; it is on by default.
        _setting("torch cudnn.allow_tf32", torch._C._get_cudnn_allow_tf32, ("True", "False"), ("cuda",)),
        _setting("torch flush_denormal", flushes_subnormals, ("True", "False"), ("cpu",)),
    ]
    for kind in _BOTH:
        read = partial(torch.is_autocast_enabled, kind)
        found.append(_setting(f"torch autocast {kind}", read, ("False",), (kind,)))
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for backend, operator, kinds in _KEYS:
            read_key = partial(torch._C._get_fp32_precision_getter, backend, operator)
            found.append(_setting(f"torch fp32_precision {backend} {operator}", read_key, _IEEE, kinds))
    for name, kind, harmless in _VARIABLES:
        text = os.environ.get(name)
        is_harmless = text in (None, "", *harmless)
        found.append(Setting(name=name, value=text, reduces=() if is_harmless else (kind,)))
    found += [Setting(name=name, value=os.environ.get(name), reduces=()) for name in _OTHER_VARIABLES]
    return tuple(found)


def _setting(name: str, read: Callable[[], object], harmless: tuple[str, ...], kinds: tuple[str, ...]) -> Setting:
    try:
        value = str(read())
    except RuntimeError:
        # torch refuses to read an old setting that a new one contradicts, and so one of the two is reduced.
        return Setting(name=name, value="contradicted by another setting", reduces=kinds)
    return Setting(name=name, value=value, reduces=() if value in harmless else kinds)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model(path: Path) -> str | None:
    return _first_match(path, r"^model name\s*:\s*(.+?)\s*$")


def _driver(path: Path) -> str | None:
    return _first_match(path, r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(pattern, text, flags=re.MULTILINE)
    return match.group(1) if match else None
