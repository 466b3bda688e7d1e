"""FP32 that is FP32: switching off, restoring and checking every setting that quietly computes it with fewer bits.

What can leak into an FP32 reference: TF32 on CUDA (matrix products, cuDNN), BF16 or TF32 math modes of oneDNN on the
CPU, autocast, and flushing of subnormals to zero.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bf16forensics.errors import ForensicsError

_AUTOCAST_DEVICES = ("cpu", "cuda")
#: (backend, operator) of the precision settings of torch >= 2.9, parents before children: a parent's value shows
#: through a child that is "none", so a child's own value can be read only while its parents are "none".
_PRECISION_KEYS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
#: Large enough (over 16**3 multiplications) for torch to hand the product to oneDNN when a reduced mode is on.
_PROBE_SIZE = 128
_SUBNORMAL_FP32 = 2.0**-140


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessPrecision:
    """The process-wide settings as they were: what `strict_fp32` puts back."""

    #: `torch.get_float32_matmul_precision()`: "highest", "high" or "medium".
    matmul: str
    #: `torch.backends.cudnn.allow_tf32`.
    cudnn_tf32: bool
    #: Own value of each key of `_PRECISION_KEYS`, in order; empty before torch 2.9.
    by_key: tuple[str, ...]


_process_lock = threading.Lock()
_process_users = 0
_process_saved: _ProcessPrecision | None = None

_single_lock = threading.Lock()
_single_users = 0
_single_base = 1
_single_here = threading.local()


@contextmanager
def strict_fp32() -> Iterator[None]:
    """Make FP32 mean IEEE FP32 inside the block, whatever the process set; put everything back after, also on errors.

    Inside: TF32 off for CUDA products, convolutions and recurrent layers; oneDNN math modes "ieee"; autocast off for
    CPU and CUDA; subnormals kept on the calling thread. Where the threads of torch's pool still flush subnormals (they
    keep the setting they were started under), torch computes on the calling thread alone.
    Nests, and may be entered by several threads at once: the process-wide settings return when the last one leaves.
    A setting changed by hand inside the block is overwritten on leaving.

    An override by environment variable (NVIDIA_TF32_OVERRIDE, ONEDNN_DEFAULT_FPMATH_MODE) is out of reach of this
    process: `require_ieee` tells.
    """
    with ExitStack() as stack:
        stack.enter_context(_process_wide_ieee())
        stack.enter_context(_autocast_off())
        stack.enter_context(_subnormals_kept())
        yield


@contextmanager
def single_thread() -> Iterator[None]:
    """Make torch compute on the calling thread alone inside the block; put its thread count back after.

    torch keeps one thread count for each thread that has computed, and one for the process from which a new thread
    takes its first. Changing the count changes both. The count of threads that already compute is left alone; a thread
    that computes for the first time while another is inside such a block starts with a count of 1, unless it enters
    one itself.
    """
    global _single_users, _single_base
    with _single_lock:
        # Reading first matters: a thread's first computation takes over the process's count, and would undo a count
        # set before it.
        own = torch.get_num_threads()
        was_inside = getattr(_single_here, "is_inside", False)
        if _single_users == 0:
            _single_base = own
        elif own == 1 and not was_inside:
            own = _single_base
        _single_here.is_inside = True
        _single_users += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _single_lock:
            _single_users -= 1
            _single_here.is_inside = was_inside
            torch.set_num_threads(own)


def effective_fp32_precision(device: str | torch.device = "cpu") -> str:
    """Multiply FP32 matrices that show how many bits of each operand survive on a device.

    The product with a unit matrix is exact in FP32, so any lost bit comes from a narrower format.

    Returns:
        "ieee" when every bit survives; "tf32" when values lose bits but a fraction of 10 bits survives (FP16 and
        multi-term TF32 modes answer so too); "bf16" when less does.
    """
    unit = torch.eye(_PROBE_SIZE, dtype=torch.float32, device=device)
    # The fraction of the first column fits TF32 but not BF16; that of the second takes all 23 bits and survives no
    # splitting into two terms of 11.
    probe = torch.full((_PROBE_SIZE, _PROBE_SIZE), 1.0 + 2.0**-9, dtype=torch.float32, device=device)
    probe[:, 1::2] = 1.0 + 2.0**-12 + 2.0**-23
    products = (unit @ probe, probe @ unit)
    if all(_same(product, probe) for product in products):
        return "ieee"
    if all(_same(product[:, ::2], probe[:, ::2]) for product in products):
        return "tf32"
    return "bf16"


def flushes_subnormals() -> bool:
    """Tell whether the calling thread computes with subnormals flushed to zero."""
    return _flushes(torch.full((1,), _SUBNORMAL_FP32))


def require_ieee(device: str | torch.device = "cpu") -> None:
    """Check by computing that products on a device keep every bit of FP32 inside `strict_fp32`.

    Raises:
        ForensicsError: they do not, so something out of reach of torch's settings reduces the precision.
    """
    with strict_fp32():
        found = effective_fp32_precision(device)
    if found != "ieee":
        raise ForensicsError(
            f"FP32 products on {device} keep only {found} precision although every torch setting is at IEEE; unset "
            "NVIDIA_TF32_OVERRIDE and ONEDNN_DEFAULT_FPMATH_MODE in the environment"
        )


def _same(product: Tensor, expected: Tensor) -> bool:
    return bool((product.to(torch.float32) == expected).all())


def _flushes(subnormal: Tensor) -> bool:
    # A flushed operand or result compares equal to zero, so the bits are looked at.
    return bool((subnormal.mul(0.5).view(torch.int32) == 0).any())


@contextmanager
def _process_wide_ieee() -> Iterator[None]:
    global _process_users, _process_saved
    with _process_lock:
        if _process_users == 0:
            _process_saved = _save_and_set_ieee()
        _process_users += 1
    try:
        yield
    finally:
        with _process_lock:
            _process_users -= 1
            if _process_users == 0 and _process_saved is not None:
                _restore(_process_saved)
                _process_saved = None


def _save_and_set_ieee() -> _ProcessPrecision:
    # torch keeps the old and the new settings apart, and refuses to read an old one that a new one contradicts. So
    # the new ones go first, and everything ends in agreement for whoever reads inside the block.
    by_key = []
    if _has_keys():
        for key in _PRECISION_KEYS:
            by_key.append(torch._C._get_fp32_precision_getter(*key))
            torch._C._set_fp32_precision_setter(*key, "none")
    saved = _ProcessPrecision(
        matmul=torch.get_float32_matmul_precision(), cudnn_tf32=_read_cudnn_tf32(), by_key=tuple(by_key)
    )
    torch.set_float32_matmul_precision("highest")
    torch._C._set_cudnn_allow_tf32(False)
    if _has_keys():
        for key in _PRECISION_KEYS:
            torch._C._set_fp32_precision_setter(*key, "ieee")
    return saved


def _restore(saved: _ProcessPrecision) -> None:
    torch.set_float32_matmul_precision(saved.matmul)
    torch._C._set_cudnn_allow_tf32(saved.cudnn_tf32)
    if saved.by_key:
        for key, value in zip(_PRECISION_KEYS, saved.by_key, strict=True):
            torch._C._set_fp32_precision_setter(*key, value)


def _has_keys() -> bool:
    return hasattr(torch._C, "_set_fp32_precision_setter")


def _read_cudnn_tf32() -> bool:
    if not _has_keys():
        return torch._C._get_cudnn_allow_tf32()
    torch._C._set_fp32_precision_setter("cuda", "conv", "tf32")
    torch._C._set_fp32_precision_setter("cuda", "rnn", "tf32")
    try:
        return torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        # The new settings say TF32, so only an old "no" can contradict them.
        return False


@contextmanager
def _autocast_off() -> Iterator[None]:
    saved = [torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    for device in _AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device, is_enabled in zip(_AUTOCAST_DEVICES, saved, strict=True):
            torch.set_autocast_enabled(device, is_enabled)


@contextmanager
def _subnormals_kept() -> Iterator[None]:
    was_flushing = flushes_subnormals()
    if was_flushing:
        torch.set_flush_denormal(False)
    try:
        if _pool_flushes():
            with single_thread():
                yield
        else:
            yield
    finally:
        if was_flushing:
            torch.set_flush_denormal(True)


def _pool_flushes() -> bool:
    """Tell whether a thread of torch's pool flushes: 32,768 elements is the least that torch splits over threads."""
    num_threads = torch.get_num_threads()
    return num_threads > 1 and _flushes(torch.full((32768 * num_threads,), _SUBNORMAL_FP32))
