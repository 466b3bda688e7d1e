"""P25: BF16 through NumPy, mixed and half-precision captures. P27: the order of heads and time."""

import struct
from typing import Any

import numpy as np
import pytest
import torch

CODES = np.array([0x3F80, 0x3F00, 0xC01A], np.uint16)
VALUES = [1.0, 0.5, -2.40625]


def parts() -> dict[str, np.ndarray]:
    """One query of head size 3 that scores a single key: any k, v, do do."""
    return {
        "k": np.ones((1, 1, 2, 3), np.float32),
        "v": np.arange(2, dtype=np.float32)[None, None, :, None],
        "do": np.ones((1, 1, 1, 1), np.float32),
    }


def raw_codes(kind: str) -> np.ndarray:
    shaped = CODES.reshape(1, 1, 1, 3)
    assert shaped.tobytes() == bytes.fromhex("803F003F1AC0")
    return shaped.view("V2") if kind == "void" else shaped


@pytest.mark.parametrize("kind", ["void", "uint16"])
def test_p25_two_byte_codes_need_to_be_declared(localize: Any, save: Any, kind: str) -> None:
    path = save(parts() | {"q": raw_codes(kind)}, "npy")
    line = localize(path).refusal()
    assert "q" in line
    assert "--dtype bf16" in line
    found = localize(path, "--dtype", "bf16")
    assert found.exit_code == 0
    # q.k of ones is the sum of the values, read as BF16 and never as integers.
    assert found.head["score_abs_max"] == pytest.approx(abs(sum(VALUES)) / 3**0.5, rel=1e-6)


def test_p25_the_safetensors_twin(localize: Any) -> None:
    q = torch.tensor(VALUES).bfloat16().view(1, 1, 1, 3)
    found = localize({name: torch.from_numpy(value) for name, value in parts().items()} | {"q": q}, kind="safetensors")
    assert found.head["score_abs_max"] == pytest.approx(abs(sum(VALUES)) / 3**0.5, rel=1e-6)
    assert found.document["inputs"]["notes"] == []


def test_p25_mixed_dtypes(localize: Any) -> None:
    tensors = {name: torch.from_numpy(value.copy()) for name, value in parts().items()}
    tensors["q"] = torch.ones(1, 1, 1, 3, dtype=torch.bfloat16)
    tensors["k"][0, 0, 1, 2] = 1 + 2.0**-12
    notes = localize(tensors, kind="safetensors").document["inputs"]["notes"]
    assert any(note.startswith("k: 1 element changed by the cast to BF16") for note in notes)
    tensors["k"][0, 0, 0, :2] = 1 + 2.0**-12
    notes = localize(tensors, kind="safetensors").document["inputs"]["notes"]
    assert any(note.startswith("k: 3 elements changed by the cast to BF16") for note in notes)


def test_p25_half_precision_capture(localize: Any, passes: Any) -> None:
    """The cast error is stated apart: V = 0.09998 becomes 0.1001 before attention starts."""
    tensors = parts() | {"q": np.zeros((1, 1, 1, 3), np.float16)}
    tensors["v"] = np.full((1, 1, 2, 1), 0.0999755859375, np.float16)
    found = localize(tensors)
    (note,) = [note for note in found.document["inputs"]["notes"] if note.startswith("v:")]
    assert "2 elements changed" in note
    assert "0.000122" in note
    assert found.head["output_err"]["max_abs"] == 0.0
    assert passes(tensors)[0].o_lp.item() == 0.10009765625
    kept = localize(tensors, "--dtype", "fp16").document["inputs"]
    assert kept["notes"] == []
    assert "storage fp16" in kept["shape"]


def test_p25_not_contiguous_and_slices(localize: Any, passes: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(1, 2, 5, 4, generator=generator).bfloat16() for name in ("q", "k", "v", "do")}
    transposed = {name: value.transpose(2, 3).contiguous().transpose(2, 3) for name, value in whole.items()}
    assert not transposed["q"].is_contiguous()
    large = {name: torch.zeros(1, 2, 5000, 4, dtype=torch.bfloat16) for name in whole}
    for name, value in whole.items():
        large[name][:, :, 100:105] = value
    slices = {name: value[:, :, 100:105] for name, value in large.items()}
    expected = localize(whole, kind="pt")
    assert localize(transposed, kind="pt").heads == expected.heads
    found = localize(slices, kind="pt")
    assert found.heads == expected.heads
    assert any("storage" in note for note in found.document["inputs"]["notes"])


def shaped(*shape: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tensors = {name: np.zeros(shape, np.float32) for name in ("q", "k")}
    tensors["v"] = rng.integers(-4, 5, shape).astype(np.float32)
    tensors["do"] = rng.integers(-4, 5, shape).astype(np.float32)
    return tensors


@pytest.mark.parametrize(("layout", "heads", "ones"), [("bhtd", 8, 80), ("bthd", 4, 144)])
def test_p27_the_layout_decides(localize: Any, layout: str, heads: int, ones: int) -> None:
    found = localize(shaped(1, 8, 4, 16), layout=layout)
    assert len(found.heads) == heads
    assert sum(head["ones"]["rounded"] for head in found.heads) == ones
    tokens = 32 // heads
    shape = found.document["inputs"]["shape"]
    for part in ("B 1", f"H {heads}", f"T {tokens}", "D 16", f"layout {layout}"):
        assert part in shape


def test_p27_no_silent_guess(localize: Any) -> None:
    line = localize(shaped(1, 8, 4, 16), layout=None).refusal()
    assert "--layout bhtd" in line
    assert "[1, 8, 4, 16]" in line


def test_p27_a_stored_layout(localize: Any) -> None:
    tensors = shaped(1, 8, 4, 16) | {"layout": np.array("bthd")}
    assert len(localize(tensors, layout=None).heads) == 4
    assert "contradicts" in localize(tensors, layout="bhtd").refusal()


def test_p27_the_two_layouts_of_one_call_agree(localize: Any) -> None:
    tensors = shaped(2, 3, 6, 4)
    swapped = {name: value.transpose(0, 2, 1, 3).copy() for name, value in tensors.items()}
    assert localize(tensors).heads == localize(swapped, layout="bthd").heads


@pytest.mark.parametrize(
    ("name", "shape"), [("do", (1, 8, 4, 8)), ("do", (1, 4, 8, 16)), ("v", (1, 8, 5, 16)), ("do", (1, 8, 5, 16))]
)
def test_p27_shapes_that_do_not_fit_name_both(localize: Any, name: str, shape: tuple[int, ...]) -> None:
    line = localize(shaped(1, 8, 4, 16) | {name: np.zeros(shape, np.float32)}).refusal()
    assert str(list(shape)) in line
    assert "[1, 8, 4, 16]" in line
    assert name in line


def test_p27_an_unreadable_file_gives_no_numbers(localize: Any, tmp_path: Any) -> None:
    path = tmp_path / "record.npz"
    path.write_bytes(struct.pack("<4sI", b"PK\x03\x04", 0))
    localize(path).refusal()
