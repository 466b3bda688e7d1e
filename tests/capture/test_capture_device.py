"""Where a captured model runs: the choice of a device, and a capture that keeps to it, on a simulated one."""

import importlib.util
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bf16forensics.attention import gpu_attention as gpu
from bf16forensics.attention.gpu_attention import GpuAttention, is_flash
from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.capture import device as devices
from bf16forensics.capture.activations import Activations, AmpActivations, Fp32Activations
from bf16forensics.capture.device import CPU, DeviceStore, capture_device, device_words, room_on, turn_on
from bf16forensics.capture.exact_attention import exact_attention
from bf16forensics.capture.moved import MovedSource
from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import ForensicsError, InputError, RecipeError
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.nanogpt import NanoGPTCheckpoint
from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.fused import FA2

Make = Callable[..., NanoGPTCheckpoint]
TENSORS = ("q", "k", "v", "do", "x", "labelled")


@pytest.fixture
def simulated() -> ModuleType:
    """The module tests/evidence/simulated_device.py: a device that refuses what a GPU refuses."""
    path = Path(__file__).resolve().parents[1] / "evidence" / "simulated_device.py"
    spec = importlib.util.spec_from_file_location("bf16forensics_test_simulated_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class ByRecipe:
    """The model in FP32 around attention by a recipe: what the emulation of autocast adds needs the CPU."""

    inner: RecipeAttention
    storage: str = "bf16"
    name: str = "by recipe"
    notes: tuple[str, ...] = ()

    def arithmetic(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def operands(self, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.bfloat16() for t in qkv)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        return self.inner(q, k, v, geometry).float()

    def projection_input(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().float()

    def output_gradient(self, do: torch.Tensor) -> torch.Tensor:
        return do.bfloat16().float()

    def product_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def drawn(tokens: int = 20, seed: int = 1, **more: Any) -> SequenceInput:
    both = torch.randint(0, 19, (tokens + 1,), generator=torch.Generator().manual_seed(seed))
    return SequenceInput(index=0, step=3, ids=both[:-1], labels=more.pop("labels", both[1:]), **more)


def captured(capture: NanoGPTCapture, sequence: SequenceInput) -> tuple[list[AttentionRecord], list[float]]:
    losses: list[float] = []
    return list(capture.sequence_records(sequence, losses.append)), losses


def assert_same(found: list[AttentionRecord], expected: list[AttentionRecord], device: torch.device) -> None:
    """Equal bits, and every tensor of the first list on a device."""
    assert len(found) == len(expected) == 3
    for mine, wanted in zip(found, expected, strict=True):
        for name in TENSORS:
            tensor, truth = getattr(mine, name), getattr(wanted, name)
            assert (tensor is None) == (truth is None), name
            if truth is not None:
                assert tensor.device == device, name
                assert torch.equal(getattr(tensor, "held", tensor), truth), (mine.layer, name)
        assert mine.geometry.scale == wanted.geometry.scale


PADDED = torch.arange(20) >= 4
SEQUENCES = {
    "plain": drawn(),
    "padded": drawn(real=PADDED, position_ids=(PADDED.cumsum(0) - 1).clamp(min=0)),
    "some labels ignored": drawn(labels=torch.where(torch.arange(20) % 3 == 0, -100, torch.arange(20) % 19)),
    "no label": drawn(labels=torch.full((20,), -100)),
}
RECIPES = ("fa2", "paper", "sdpa-math", "sdpa-cpu", "eager", "flex", "fa4")


@pytest.mark.parametrize("graph_bytes", [0, 2**30])
@pytest.mark.parametrize("case", SEQUENCES)
def test_a_capture_keeps_to_its_device(
    make_checkpoint: Make, simulated: ModuleType, case: str, graph_bytes: int
) -> None:
    checkpoint = make_checkpoint(bias=True)
    expected, losses = captured(NanoGPTCapture(checkpoint=checkpoint), SEQUENCES[case])
    with simulated.SimulatedDevice():
        capture = NanoGPTCapture(checkpoint=checkpoint, device=simulated.DEVICE, graph_bytes=graph_bytes)
        found, found_losses = captured(capture, SEQUENCES[case])
    assert_same(found, expected, simulated.DEVICE)
    assert found_losses == pytest.approx(losses, nan_ok=True, abs=0)
    assert capture.notes[0] == f"the model ran on {simulated.DEVICE}"


@pytest.mark.parametrize("case", ["plain", "padded"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_by_a_recipe_keeps_to_its_device(
    make_checkpoint: Make, simulated: ModuleType, recipe: str, case: str
) -> None:
    checkpoint, activations = make_checkpoint(), ByRecipe(RecipeAttention(resolve(recipe)))
    expected, _ = captured(NanoGPTCapture(checkpoint=checkpoint, activations=activations), SEQUENCES[case])
    with simulated.SimulatedDevice():
        capture = NanoGPTCapture(
            checkpoint=checkpoint, activations=activations, device=simulated.DEVICE, graph_bytes=2**30
        )
        found, _ = captured(capture, SEQUENCES[case])
    assert_same(found, expected, simulated.DEVICE)


def geometries(simulated: ModuleType) -> dict[str, Geometry]:
    generator = torch.Generator().manual_seed(4)
    keep = torch.rand(4, 24, 24, generator=generator) < 0.7
    return {
        "window": Geometry(scale=0.3, window=7),
        "window, not causal": Geometry(scale=0.3, causal=False, window=5),
        "documents": Geometry(scale=0.3, document_ids=torch.arange(24) // 9),
        "mask by head": Geometry(scale=0.3, causal=False, keep=keep),
        "bias and soft-cap": Geometry(scale=0.3, softcap=2.0, bias=torch.randn(1, 24, 24, generator=generator)),
        "padding": Geometry(scale=0.3, key_padding=torch.arange(24) > 2, query_padding=torch.arange(24) > 2),
    }


@pytest.mark.parametrize("recipe", [None, "fa2", "flex", "eager"])
@pytest.mark.parametrize("name", geometries(SimpleNamespace()))  # type: ignore[arg-type]
def test_attention_of_every_mask_keeps_to_its_device(simulated: ModuleType, recipe: str | None, name: str) -> None:
    """Forward and backward with two query heads a key head; None is the exact attention."""
    geometry, generator = geometries(simulated)[name], torch.Generator().manual_seed(5)
    shapes = ((4, 24, 8), (2, 24, 8), (2, 24, 6))
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    do = torch.randn(4, 24, 6, generator=generator).bfloat16()
    if recipe is None:
        q, k, v, do = q.float(), k.float(), v.float(), do.float()
    attend = exact_attention if recipe is None else RecipeAttention(resolve(recipe))

    def run(where: Callable[[Any], Any]) -> list[torch.Tensor]:
        leaves = [where(t).requires_grad_() for t in (q, k, v)]
        with strict_fp32():
            o = attend(*leaves, where(geometry))
            return [o.detach(), *torch.autograd.grad(o, leaves, where(do))]

    expected = run(lambda value: value)
    with simulated.SimulatedDevice():
        found = run(simulated.on_device)
    assert all(torch.equal(mine.held, truth) for mine, truth in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "activations", [Fp32Activations(), AmpActivations(by_recipe=RecipeAttention(FA2))], ids=["fp32", "amp-bf16"]
)
@pytest.mark.parametrize("case", ["plain", "padded"])
def test_kept_graphs_change_no_bit(make_checkpoint: Make, activations: Activations, case: str) -> None:
    checkpoint = make_checkpoint(bias=True)
    runs = [
        captured(NanoGPTCapture(checkpoint=checkpoint, activations=activations, graph_bytes=room), SEQUENCES[case])
        for room in (0, 2**30)
    ]
    assert_same(runs[1][0], runs[0][0], CPU)
    assert runs[1][1] == runs[0][1]


@pytest.mark.parametrize("room", [0, 5000, 2**30])
def test_weights_that_do_not_fit_are_moved_at_every_use(
    make_checkpoint: Make, simulated: ModuleType, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    from bf16forensics.capture import nanogpt_weights

    checkpoint, moved = make_checkpoint(bias=True), []
    monkeypatch.setattr(nanogpt_weights, "room_on", lambda device: room)
    original = nanogpt_weights.NanoGPTWeights._moved_layer
    monkeypatch.setattr(
        nanogpt_weights.NanoGPTWeights,
        "_moved_layer",
        lambda self, index: moved.append(index) or original(self, index),
    )
    expected, _ = captured(NanoGPTCapture(checkpoint=checkpoint), drawn())
    with simulated.SimulatedDevice():
        capture = NanoGPTCapture(checkpoint=checkpoint, device=simulated.DEVICE, graph_bytes=0)
        for _ in range(2):
            found, _ = captured(capture, drawn())
            assert_same(found, expected, simulated.DEVICE)
    # Forward over layers 0 and 1, then back from layer 2; twice. A layer of this model has 12,704 * 4 bytes.
    assert moved == ([0, 1, 2] if room == 2**30 else [0, 1, 2, 1, 0] * 2)


def test_weights_are_kept_in_bf16_only_where_autocast_is_real() -> None:
    weight = torch.tensor([1.0, 1.0 + 2.0**-9])
    for activations in (Fp32Activations(), AmpActivations(by_recipe=RecipeAttention(FA2))):
        assert activations.product_weight(weight) is weight
    on_gpu = AmpActivations(by_recipe=GpuAttention(FA2), on_gpu=True)
    assert torch.equal(on_gpu.product_weight(weight), torch.tensor([1.0, 1.0], dtype=torch.bfloat16))


def test_a_store_keeps_what_fits() -> None:
    made: list[int] = []

    def make(size: int) -> Callable[[], torch.Tensor]:
        return lambda: made.append(size) or torch.zeros(size)  # type: ignore[func-returns-value]

    asked: list[int] = []
    store = DeviceStore(lambda: asked.append(1) or 4 * 12)  # type: ignore[func-returns-value]
    for _ in range(2):
        for size in (8, 5, 4):
            assert len(store.get(str(size), make(size))) == size
    # 8 and 4 fit into 12 elements; 5 does not beside 8.
    assert made == [8, 5, 4, 5]
    assert asked == [1]
    assert sorted(len(t) for t in store.tensors()) == [4, 8]


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert capture_device("cpu", gpu_computes=True) == capture_device("auto") == CPU
    with pytest.raises(InputError, match="^--device cuda: no CUDA device; use --device cpu$"):
        capture_device("cuda")
    with pytest.raises(InputError, match="unknown --device 'gpu'; choose one of auto, cpu, cuda"):
        capture_device("gpu")
    assert device_words(CPU) == "cpu"
    assert room_on(CPU) == 0
    assert isinstance(turn_on(CPU), nullcontext)


@pytest.mark.parametrize(
    ("cuda", "capability", "words"),
    [
        ("13.0", (7, 5), "T4 has compute capability 7.5, and BF16 products need 8.0; use --device cpu"),
        (None, (9, 0), "the GPU is not NVIDIA's; use --device cpu"),
    ],
)
def test_a_gpu_that_will_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, capability: tuple[int, int], words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(InputError, match=words):
        capture_device("cuda")


def test_a_gpu_whose_fp32_is_not_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("get_device_capability", (9, 0)), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    asked: list[torch.device] = []
    monkeypatch.setattr(devices, "require_ieee", asked.append)
    assert capture_device("auto", gpu_computes=True) == torch.device("cuda", 0)
    assert asked == [torch.device("cuda", 0)]

    def refuse(device: torch.device) -> None:
        raise ForensicsError("FP32 products keep only tf32 precision")

    monkeypatch.setattr(devices, "require_ieee", refuse)
    with pytest.raises(ForensicsError, match="tf32"):
        capture_device("cuda")


def operand(heads: int = 4, tokens: int = 16, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(shape=torch.Size((heads, tokens, size)), dtype=dtype, is_cuda=True)


PLAIN = Geometry(scale=0.125)
#: What keeps a call from being the kernel's: recipe, q, k, v, geometry.
OTHERS = {
    "derived recipe": ("fa2+o=fp32", operand(), operand(), operand(), PLAIN),
    "other recipe": ("fa3", operand(), operand(), operand(), PLAIN),
    "window": ("fa2", operand(), operand(), operand(), replace(PLAIN, window=4)),
    "soft-cap": ("fa2", operand(), operand(), operand(), replace(PLAIN, softcap=30.0)),
    "padding": ("fa2", operand(), operand(), operand(), replace(PLAIN, key_padding=torch.ones(16, dtype=torch.bool))),
    "queries padded": ("fa2", operand(), operand(), operand(), replace(PLAIN, query_padding=torch.ones(16) > 0)),
    "documents": ("fa2", operand(), operand(), operand(), replace(PLAIN, document_ids=torch.zeros(16))),
    "mask": ("fa2", operand(), operand(), operand(), replace(PLAIN, keep=torch.ones(1, 16, 16) > 0)),
    "bias": ("fa2", operand(), operand(), operand(), replace(PLAIN, bias=torch.ones(1, 16, 16))),
    "more keys": ("fa2", operand(), operand(tokens=17), operand(tokens=17), PLAIN),
    "one token": ("fa2", operand(tokens=1), operand(tokens=1), operand(tokens=1), PLAIN),
    "other size of v": ("fa2", operand(), operand(), operand(size=32), PLAIN),
    "size 68": ("fa2", *(operand(size=68) for _ in range(3)), PLAIN),
    "size 264": ("fa2", *(operand(size=264) for _ in range(3)), PLAIN),
    "heads that do not share": ("fa2", operand(), operand(heads=3), operand(heads=3), PLAIN),
    "FP16": ("fa2", *(operand(dtype=torch.float16) for _ in range(3)), PLAIN),
}


@pytest.mark.parametrize("geometry", [PLAIN, replace(PLAIN, causal=False)], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_calls_that_are_the_kernels(monkeypatch: pytest.MonkeyPatch, geometry: Geometry, kv_heads: int) -> None:
    kv = operand(heads=kv_heads)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert is_flash(resolve("fa2"), operand(), kv, kv, geometry)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not is_flash(resolve("fa2"), operand(), kv, kv, geometry)


@pytest.mark.parametrize("name", OTHERS)
def test_calls_that_are_not_the_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    recipe, q, k, v, geometry = OTHERS[name]
    assert not is_flash(resolve(recipe), q, k, v, geometry)


def test_without_a_gpu_the_recipe_is_obeyed() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 16, 8, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    attend = GpuAttention(FA2)
    assert attend.notes == ()
    results = [torch.autograd.grad(a(q, k, v, PLAIN).sum(), (q, k, v)) for a in (attend, RecipeAttention(FA2))]
    assert all(torch.equal(mine, truth) for mine, truth in zip(*results, strict=True))
    assert attend.notes == ("attention of the captured model: recipe fa2 in torch operations on the GPU",)
    with pytest.raises(RecipeError, match="forward pass only"):
        GpuAttention(resolve("fa3-fp8"))


class FakeKernel:
    """The kernel's two operators with FP32 attention on the CPU in their place."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []
        self.order: list[tuple[int, ...]] = []

    def _flash_attention_forward(self, q: Any, k: Any, v: Any, *more: Any, scale: float) -> tuple[torch.Tensor, ...]:
        ends_q, ends_k, most_q, most_k, dropout, causal, debug = more
        assert (dropout, debug, most_q, most_k) == (0.0, False, len(q), len(k))
        assert ends_q.tolist() == ends_k.tolist() == [0, len(q)]
        assert ends_q.dtype == torch.int32
        self.order.append((*q.shape, *k.shape))
        o = self._attend(q, k, v, scale, causal)
        return o, torch.zeros(q.shape[1], len(q)), torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def _flash_attention_backward(self, do: Any, q: Any, k: Any, v: Any, *more: Any, scale: float) -> Any:
        self.deterministic.append(torch.are_deterministic_algorithms_enabled())
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            return torch.autograd.grad(self._attend(*leaves, scale, more[7]), leaves, do)

    def _attend(self, q: Any, k: Any, v: Any, scale: float, causal: bool) -> torch.Tensor:
        with torch.enable_grad():
            group = q.shape[1] // k.shape[1]
            q, k, v = (t.transpose(0, 1).float() for t in (q, k, v))
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            return torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=causal, scale=scale
            )[0].transpose(0, 1).bfloat16()  # fmt: skip


@pytest.mark.parametrize("warns", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_gets_one_sequence_and_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch, causal: bool, warns: bool
) -> None:
    """Axes, scale and gradients as of the recipe; the process's own setting is back afterwards."""
    kernel = FakeKernel()
    monkeypatch.setattr(gpu, "is_flash", lambda *_: True)
    monkeypatch.setattr(torch.ops, "aten", kernel)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, 16, 8, generator=generator).bfloat16().requires_grad_() for h in (4, 2, 2))
    do = torch.randn(4, 16, 8, generator=generator).bfloat16()
    geometry, attend = Geometry(scale=0.3, causal=causal), GpuAttention(FA2)
    torch.use_deterministic_algorithms(warns, warn_only=warns)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        o = attend(q, k, v, geometry)
        found = torch.autograd.grad(o, (q, k, v), do)
        assert torch.are_deterministic_algorithms_enabled() is warns
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
        assert torch.utils.deterministic.fill_uninitialized_memory is fills
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.undo()
    wanted = RecipeAttention(FA2)(q, k, v, geometry)
    gradients = torch.autograd.grad(wanted, (q, k, v), do)
    assert kernel.order == [(16, 4, 8, 16, 2, 8)]
    assert kernel.deterministic == [True]
    for mine, truth in zip((o, *found), (wanted, *gradients), strict=True):
        assert mine.shape == truth.shape
        assert mine.dtype == torch.bfloat16
        # Both hold BF16 numbers of exact results with P rounded or not: a few steps of 2^-8 of the largest.
        assert (mine - truth).abs().max() <= 2.0**-6 * truth.abs().max()
    assert attend.notes == ("attention of the captured model: SDPA flash (FlashAttention-2, its keys not split)",)


def test_records_of_a_moved_source(make_checkpoint: Make, simulated: ModuleType) -> None:
    capture = NanoGPTCapture(checkpoint=make_checkpoint())

    class Source:
        shape, notes = "shape", ("note",)

        def weights(self, layer: int) -> int:
            return layer

        def records(self, sequence: int, on_loss: Any) -> Any:
            return capture.sequence_records(drawn(seed=sequence), on_loss)

    losses: list[float] = []
    with simulated.SimulatedDevice():
        moved = MovedSource(Source(), simulated.DEVICE)  # type: ignore[arg-type]
        found = list(moved.records(2, losses.append))
    assert_same(found, captured(capture, drawn(seed=2))[0], simulated.DEVICE)
    assert (moved.shape, moved.notes, moved.weights(1)) == ("shape", ("note",), 1)
    assert math.isfinite(losses[0])
