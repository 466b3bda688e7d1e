"""strict_fp32: what leaks is stopped, and every setting is as before afterwards.

On a CPU without BF16 or TF32 units oneDNN ignores a reduced mode, so the leak itself shows only through autocast; the
settings are compared everywhere.
"""

import contextlib
import threading
import warnings

import numpy as np
import pytest
import torch

from bf16forensics.emulate import strict
from bf16forensics.emulate.strict import (
    effective_fp32_precision,
    flushes_subnormals,
    require_ieee,
    single_thread,
    strict_fp32,
)
from bf16forensics.errors import ForensicsError

HAS_KEYS = hasattr(torch._C, "_get_fp32_precision_getter")
needs_keys = pytest.mark.skipif(not HAS_KEYS, reason="precision settings by backend came with torch 2.9")


def settings():
    """Return everything that strict_fp32 may touch, as torch shows it."""
    keys = [torch._C._get_fp32_precision_getter(*key) for key in strict._PRECISION_KEYS] if HAS_KEYS else []
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return keys, autocast, torch.get_num_threads(), flushes_subnormals()


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was():
    saved = strict._save_and_set_ieee()
    strict._restore(saved)
    num_threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(num_threads)
    if HAS_KEYS:
        for key in strict._PRECISION_KEYS:
            torch._C._set_fp32_precision_setter(*key, "none")
    strict._restore(saved)


def subnormals(size):
    return torch.from_numpy(np.full(size, 512, dtype=np.int32)).view(torch.float32)


def operands():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(96, 128, generator=generator), torch.randn(128, 80, generator=generator)


@contextlib.contextmanager
def matmul_precision(name):
    torch.set_float32_matmul_precision(name)
    yield


@contextlib.contextmanager
def key_precision(backend, op, name):
    torch._C._set_fp32_precision_setter(backend, op, name)
    yield


@contextlib.contextmanager
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


LEAKS = {
    "nothing": contextlib.nullcontext,
    "matmul high": lambda: matmul_precision("high"),
    "matmul medium": lambda: matmul_precision("medium"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "flushing": flushing,
}
if HAS_KEYS:
    LEAKS |= {
        "mkldnn matmul bf16": lambda: key_precision("mkldnn", "matmul", "bf16"),
        "mkldnn conv tf32": lambda: key_precision("mkldnn", "conv", "tf32"),
        "mkldnn all bf16": lambda: key_precision("mkldnn", "all", "bf16"),
        "generic tf32": lambda: key_precision("generic", "all", "tf32"),
        "cuda matmul tf32": lambda: key_precision("cuda", "matmul", "tf32"),
        "cuda conv ieee": lambda: key_precision("cuda", "conv", "ieee"),
    }


@pytest.mark.parametrize("leak", LEAKS)
def test_products_are_those_of_the_default_and_settings_return(leak):
    a, b = operands()
    small = subnormals(1 << 17)
    with strict_fp32():
        expected, expected_small = a @ b, small * 0.5
    with LEAKS[leak]():
        before = settings()
        with strict_fp32():
            found, found_small = a @ b, small * 0.5
            assert torch.get_float32_matmul_precision() == "highest"
            keys, autocast, _, is_flushing = settings()
            assert set(keys) <= {"ieee"}
            assert autocast == [False, False]
            assert not is_flushing
        assert settings() == before
    assert found.dtype == torch.float32
    assert (found.view(torch.int32) == expected.view(torch.int32)).all()
    assert (found_small.view(torch.int32) == expected_small.view(torch.int32)).all()
    assert (found_small.view(torch.int32) == 256).all()


@pytest.mark.parametrize("leak", LEAKS)
def test_settings_return_after_an_error(leak):
    with LEAKS[leak]():
        before = settings()
        with pytest.raises(ZeroDivisionError), strict_fp32(), strict_fp32():
            raise ZeroDivisionError
        assert settings() == before


@needs_keys
def test_a_child_that_follows_its_parent_still_follows_it_afterwards():
    torch._C._set_fp32_precision_setter("generic", "all", "tf32")
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "none")
    with strict_fp32():
        pass
    assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "tf32"
    torch._C._set_fp32_precision_setter("generic", "all", "ieee")
    assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "ieee"


@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_matmul_precision_returns(name):
    torch.set_float32_matmul_precision(name)
    with strict_fp32():
        pass
    assert torch.get_float32_matmul_precision() == name
    assert torch.backends.cuda.matmul.allow_tf32 == (name != "highest")


@pytest.mark.parametrize("is_allowed", [True, False])
def test_cudnn_switch_can_be_read_inside_and_returns(is_allowed):
    torch.backends.cudnn.allow_tf32 = is_allowed
    with strict_fp32():
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
        with torch.backends.cudnn.flags(enabled=False):
            pass
    assert torch.backends.cudnn.allow_tf32 == is_allowed


@needs_keys
def test_contradicting_old_and_new_settings_are_survived():
    """Torch refuses to read its old setting while a new one contradicts it."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    with strict_fp32():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_older_torch_has_only_the_legacy_switches(monkeypatch):
    if HAS_KEYS:
        monkeypatch.delattr(torch._C, "_set_fp32_precision_setter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = True
        with strict_fp32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32


def test_settings_return_when_the_last_of_several_threads_leaves():
    torch.set_float32_matmul_precision("medium")
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with strict_fp32():
            inside.set()
            leave.wait(30)

    worker = threading.Thread(target=hold)
    with strict_fp32():
        worker.start()
        assert inside.wait(30)
    assert torch.get_float32_matmul_precision() == "highest"
    leave.set()
    worker.join()
    assert torch.get_float32_matmul_precision() == "medium"


def test_a_pool_that_flushes_is_not_used(monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setattr(strict, "_pool_flushes", lambda: True)
    with strict_fp32():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_pool_started_while_flushing_is_noticed():
    """A pool thread keeps the mode it was started under; the starting thread's later change does not reach it."""
    found = {}
    small = subnormals(1 << 17)

    def train_then_diagnose():
        torch.set_num_threads(2)
        if not torch.set_flush_denormal(True):
            return
        small.mul(0.5)
        torch.set_flush_denormal(False)
        found["plain"] = bool((small.mul(0.5).view(torch.int32) == 256).all())
        with strict_fp32():
            found["strict"] = bool((small.mul(0.5).view(torch.int32) == 256).all())

    worker = threading.Thread(target=train_then_diagnose)
    worker.start()
    worker.join()
    if not found:
        pytest.skip("this CPU cannot flush subnormals")
    if found["plain"]:
        pytest.skip("torch's pool on this machine does not inherit the mode")
    assert found["strict"]


class TestProbe:
    def test_default_is_ieee(self):
        with strict_fp32():
            assert effective_fp32_precision() == "ieee"
        require_ieee()

    def test_autocast_is_seen(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert effective_fp32_precision() == "bf16"
            require_ieee()

    @pytest.mark.parametrize(
        ("kept_bits", "expected"), [(23, "ieee"), (22, "tf32"), (12, "tf32"), (10, "tf32"), (8, "bf16"), (7, "bf16")]
    )
    @pytest.mark.parametrize("is_rounding", [True, False])
    def test_each_precision_is_told_apart(self, monkeypatch, kept_bits, expected, is_rounding):
        """Both operands lose their lowest bits, by rounding or by truncation, as reduced-precision units do."""
        product = torch.Tensor.__matmul__

        def narrow(t):
            dropped = 23 - kept_bits
            half = (1 << dropped) >> 1 if is_rounding else 0
            return ((t.view(torch.int32) + half) >> dropped << dropped).view(torch.float32)

        monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: product(narrow(a), narrow(b)))
        assert effective_fp32_precision() == expected

    def test_split_into_two_tf32_terms_is_not_ieee(self, monkeypatch):
        product = torch.Tensor.__matmul__

        def narrow(t):
            return (t.view(torch.int32) >> 13 << 13).view(torch.float32)

        def split_product(a, b):
            a_big, b_big = narrow(a), narrow(b)
            a_small, b_small = narrow(a - a_big), narrow(b - b_big)
            return product(a_small, b_big) + product(a_big, b_small) + product(a_big, b_big)

        monkeypatch.setattr(torch.Tensor, "__matmul__", split_product)
        assert effective_fp32_precision() == "tf32"

    def test_what_cannot_be_switched_off_is_refused(self, monkeypatch):
        monkeypatch.setattr(strict, "effective_fp32_precision", lambda device: "tf32")
        with pytest.raises(ForensicsError, match="FP32 products on cpu keep only tf32 precision although") as caught:
            require_ieee()
        assert "NVIDIA_TF32_OVERRIDE" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.gpu
    def test_tf32_on_a_gpu_is_seen_and_stopped(self):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        torch.set_float32_matmul_precision("high")
        assert effective_fp32_precision("cuda") == "tf32"
        require_ieee("cuda")


class TestSingleThread:
    def in_worker(self, function):
        found = []
        worker = threading.Thread(target=lambda: found.append(function()))
        worker.start()
        worker.join()
        return found[0]

    def test_count_is_one_inside_and_returns(self):
        torch.set_num_threads(2)
        with single_thread():
            assert torch.get_num_threads() == 1
            with single_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2

    def test_count_returns_after_an_error(self):
        torch.set_num_threads(2)
        with pytest.raises(ZeroDivisionError), single_thread():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
        assert self.in_worker(torch.get_num_threads) == 2

    def test_a_worker_that_starts_while_another_is_inside_gets_the_process_count_back(self):
        torch.set_num_threads(2)

        def work():
            with single_thread():
                inside = torch.get_num_threads()
            return inside, torch.get_num_threads()

        with single_thread():
            assert self.in_worker(work) == (1, 2)
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert self.in_worker(torch.get_num_threads) == 2

    def test_the_main_thread_keeps_its_count_while_a_worker_is_inside(self):
        torch.set_num_threads(2)
        inside, leave = threading.Event(), threading.Event()

        def hold():
            with single_thread():
                inside.set()
                leave.wait(30)

        worker = threading.Thread(target=hold)
        worker.start()
        assert inside.wait(30)
        assert torch.get_num_threads() == 2
        leave.set()
        worker.join()
        assert torch.get_num_threads() == 2
