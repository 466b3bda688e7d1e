"""Kernel tests run natively where there is a GPU, and under Triton's interpreter where there is none.

The conftest of all tests switches the interpreter on before Triton is imported.
"""

import pytest
import torch


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Name the torch device that kernels run on; the other way of running is skipped by name."""
    pytest.importorskip("triton")
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return "cuda"
    if torch.cuda.is_available():
        pytest.skip("kernels run natively here")
    return "cpu"


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fill fresh memory with NaN, so that an element a kernel forgets to write is seen."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def poisoned(*args, _allocate=allocate, **kwargs):
            fresh = _allocate(*args, **kwargs)
            return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

        monkeypatch.setattr(torch, name, poisoned)
