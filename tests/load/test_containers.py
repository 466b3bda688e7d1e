"""Damaged and misnamed tensor files: safetensors, NumPy, folders."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bf16forensics.errors import InputError
from bf16forensics.load.arrays import read_npy, read_npz
from bf16forensics.load.files import container_of, file_facts
from bf16forensics.load.safetensors_file import read_safetensors
from bf16forensics.load.tensors import NAMELESS, read_tensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(20.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}, path, metadata={"k": "v"})
    return path


def rewrite(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def test_whole_file(model):
    loaded = read_safetensors(model)
    assert torch.equal(loaded.tensors["a"], torch.arange(20.0))
    assert loaded.tensors["b"].dtype == torch.bfloat16
    assert loaded.metadata == {"k": "v"}


def test_pointer(model, refusal):
    model.write_bytes(POINTER)
    for load in (read_safetensors, container_of, lambda path: read_tensors(path, "record")):
        line = refusal(load, model)
        assert "Git LFS pointer" in line
        assert "git lfs pull" in line


@pytest.mark.parametrize("keep", [-16, -1, 40, 9, 8, 5, 0])
def test_truncated(model, refusal, keep):
    data = model.read_bytes()
    cut = data[:keep] if keep else b""
    model.write_bytes(cut)
    line = refusal(read_safetensors, model)
    assert "truncated" in line
    assert f"found {len(cut)}" in line
    if keep < 0:
        assert f"expected {len(data)} bytes" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["b"].update(dtype=""), ["'b'", "dtype ''"]),
        (lambda h: h["b"].update(dtype="BF17"), ["'b'", "BF17"]),
        (lambda h: h["a"].pop("dtype"), ["'a'", "None"]),
        (lambda h: h["a"].update(shape=[21]), ["'a'", "84 bytes", "80"]),
        (lambda h: h["a"].update(shape="x"), ["'a'", "shape"]),
        (lambda h: h["a"].update(data_offsets=[0]), ["'a'", "data_offsets"]),
        (lambda h: h.update(a=3), ["'a'"]),
    ],
)
def test_damaged_header_names_the_entry(model, refusal, change, words):
    rewrite(model, change)
    line = refusal(read_safetensors, model)
    for word in words:
        assert word in line


def test_overlapping_entries_are_one_line(model, refusal):
    rewrite(model, lambda h: h.update(c=dict(h["a"])))
    assert "damaged" in refusal(read_safetensors, model)


def test_text_under_the_name_of_safetensors(model, refusal):
    model.write_text("this is a text file with enough bytes in it")
    assert "not a safetensors file" in refusal(read_safetensors, model)
    model.write_bytes((12).to_bytes(8, "little") + b"no json here")
    assert "not JSON" in refusal(read_safetensors, model)


def test_shard_of_zeros_loads(tmp_path):
    save_file({"w": torch.zeros(4, 4)}, tmp_path / "z.safetensors")
    assert not read_safetensors(tmp_path / "z.safetensors").tensors["w"].any()


def test_content_wins_over_the_name(model, tmp_path):
    other = tmp_path / "model.pt"
    other.write_bytes(model.read_bytes())
    assert container_of(other) == "safetensors"
    assert torch.equal(read_tensors(other, "record").tensors["a"], torch.arange(20.0))


def test_numpy_dtypes(tmp_path):
    for dtype in ("<f4", ">f4", "<f2", "<f8", "i1", "<i8", "<u2", "?"):
        array = np.array([[1, 0, 3], [4, 5, 6]]).astype(dtype)
        np.save(tmp_path / "a.npy", array)
        found = read_npy(tmp_path / "a.npy")
        assert found.tolist() == array.tolist()
    np.save(tmp_path / "a.npy", np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert read_npy(tmp_path / "a.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    np.save(tmp_path / "a.npy", np.float32(2.5))
    assert read_npy(tmp_path / "a.npy").item() == 2.5
    np.save(tmp_path / "a.npy", np.array("bhtd"))
    assert read_npy(tmp_path / "a.npy") == "bhtd"


def test_writing_to_a_mapped_array_leaves_the_file_alone(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(5))
    read_npy(tmp_path / "a.npy").fill_(1.0)
    assert not np.load(tmp_path / "a.npy").any()


def test_numpy_refusals(tmp_path, refusal):
    path = tmp_path / "a.npy"
    np.save(path, np.array([object()]), allow_pickle=True)
    assert "Python objects" in refusal(read_npy, path)
    np.save(path, np.zeros(3, dtype=np.complex64))
    assert "complex64" in refusal(read_npy, path)
    np.save(path, np.zeros(100))
    path.write_bytes(path.read_bytes()[:400])
    assert "truncated" in refusal(read_npy, path)
    path.write_bytes(b"")
    assert "empty" in refusal(read_npy, path)
    assert "no such file" in refusal(read_npy, tmp_path / "none.npy")


def test_npz_refusals(tmp_path, refusal):
    path = tmp_path / "a.npz"
    np.savez(path, q=np.zeros(500), bad=np.array([object()]))
    line = refusal(read_npz, path)
    assert "'bad'" in line
    np.savez(path, q=np.zeros(500), k=np.ones(500))
    data = path.read_bytes()
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(data[: int(len(data) * share)])
        assert "truncated" in refusal(read_tensors, path, "record")


def test_names_and_texts(tmp_path):
    torch.save({"a": torch.ones(2), "layout": "bhtd", "scale": 0.5, "n": 3, "other": [1]}, tmp_path / "a.pt")
    file = read_tensors(tmp_path / "a.pt", "record")
    assert sorted(file.tensors) == ["a", "n", "scale"]
    assert file.texts == {"layout": "bhtd"}
    assert file.other_names == ("other (list)",)
    torch.save(torch.ones(2), tmp_path / "b.pt")
    assert list(read_tensors(tmp_path / "b.pt", "batch").tensors) == [NAMELESS]


def test_nothing_inside(tmp_path, refusal):
    torch.save({"a": [1], "b": None}, tmp_path / "a.pt")
    assert "no tensor" in refusal(read_tensors, tmp_path / "a.pt", "record")
    (tmp_path / "folder").mkdir()
    assert "NAME.npy" in refusal(read_tensors, tmp_path / "folder", "record")


def test_facts_of_known_bytes(tmp_path, refusal):
    (tmp_path / "a").write_bytes(b"abc")
    facts = file_facts("tokens", tmp_path / "a")
    assert facts.size_bytes == 3
    assert facts.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert "no such file" in refusal(file_facts, "tokens", tmp_path / "b")


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "npz", "npy"])
def test_damaged_files_end_in_one_line(tmp_path, kind):
    generator = np.random.default_rng(11)
    tree = {"a": torch.ones(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": np.float64(1)}
    path = tmp_path / "clean"
    if kind in ("zip", "legacy"):
        torch.save(tree, path, _use_new_zipfile_serialization=kind == "zip")
    elif kind == "safetensors":
        path = tmp_path / "clean.safetensors"
        save_file({"a": tree["a"], "b": tree["b"]}, path)
    else:
        with path.open("wb") as stream:
            np.savez(stream, a=np.ones(3), b=np.zeros(2)) if kind == "npz" else np.save(stream, np.ones((3, 4)))
    clean = path.read_bytes()
    refused = 0
    for trial in range(300):
        damaged = bytearray(clean)
        limit = len(damaged) if trial % 2 else min(len(damaged), 600)
        for at in generator.integers(0, limit, size=int(generator.integers(1, 4))):
            damaged[at] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            read_tensors(path, "record")
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 0
