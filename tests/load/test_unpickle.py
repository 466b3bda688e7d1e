"""Restricted unpickling: extras never block the weights, and nothing in a file is ever executed."""

import argparse
import builtins
import collections
import datetime
import functools
import io
import os
import pathlib
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bf16forensics.load.inert import Placeholder, TensorRef
from bf16forensics.load.torchfile import read_torch_file
from bf16forensics.load.unpickle import load_pickle

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


class Reduced:
    """Unpickles to a call of any callable."""

    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


class WritesOnSetState:
    """Creates its marker when a pickle restores its state."""

    def __init__(self, marker):
        self.marker = marker

    def __getstate__(self):
        return {"marker": self.marker}

    def __setstate__(self, state):
        Path(state["marker"]).touch()


def save(tree, path, zipped=True):
    torch.save(tree, path, _use_new_zipfile_serialization=zipped)
    return path


@FORMATS
def test_tree_equals_what_torch_reads(tmp_path, zipped):
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(6, 4, generator=generator)
    tree = {
        "model": collections.OrderedDict(
            {
                "fp32": base,
                "transposed": base.t(),
                "slice": base[2:4, 1:3],
                "bf16": base.to(torch.bfloat16),
                "fp16": base.half(),
                "fp64": base.double(),
                "int": torch.arange(5),
                "bool": base > 0,
                "scalar": torch.tensor(3.5),
                "empty": torch.empty(0, 3),
                "expanded": base[:1].expand(6, 4),
                "parameter": torch.nn.Parameter(base.clone()),
            }
        ),
        "iter_num": 12,
        "best_val_loss": torch.tensor(1.25),
        "nested": [(1, 2.5, "text", None, True), {"a": {1, 2}}],
    }
    read = read_torch_file(save(tree, tmp_path / "a.pt", zipped)).tree
    reference = torch.load(tmp_path / "a.pt", weights_only=True)
    assert list(read) == list(reference)
    assert read["iter_num"] == 12
    assert read["nested"] == tree["nested"]
    for name, expected in reference["model"].items():
        found = read["model"][name]
        assert found.dtype == expected.dtype, name
        assert found.shape == expected.shape, name
        assert found.stride() == expected.stride() or expected.numel() == 0, name
        assert torch.equal(found, expected.detach()), name


@FORMATS
def test_shared_storage_stays_shared(tmp_path, zipped):
    base = torch.arange(12.0).reshape(3, 4)
    read = read_torch_file(save({"a": base, "b": base, "row": base[1]}, tmp_path / "a.pt", zipped)).tree
    assert read["a"].data_ptr() == read["b"].data_ptr()
    assert read["row"].data_ptr() == read["a"].data_ptr() + 16


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_dtypes_of_the_third_rebuild_version(tmp_path, dtype):
    values = torch.arange(7).to(dtype)
    assert torch.equal(read_torch_file(save({"a": values}, tmp_path / "a.pt")).tree["a"], values)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path):
    path = save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    before = path.read_bytes()
    read_torch_file(path).tree["a"].fill_(1.0)
    assert path.read_bytes() == before


HARMLESS = {
    "tensor": (lambda: torch.tensor(0.5), None),
    "numpy.float64": (lambda: np.float64(0.5), None),
    "numpy.float32": (lambda: np.float32(0.5), None),
    "numpy.int64": (lambda: np.int64(3), None),
    "path": (lambda: pathlib.PurePosixPath("/data/run"), "PurePosixPath"),
    "concrete path": (lambda: pathlib.Path("/data/run"), "Path"),
    "namespace": (lambda: argparse.Namespace(lr=1e-3, out=pathlib.Path("x")), "argparse.Namespace"),
    "datetime": (lambda: datetime.datetime(2024, 1, 2), "datetime.datetime"),
    "array": (lambda: np.arange(3.0), "_reconstruct"),
    "defaultdict": (lambda: collections.defaultdict(list, {"a": [1]}), None),
    "deque": (lambda: collections.deque([1, 2], maxlen=3), "collections.deque"),
    "version": (lambda: torch.__version__, "TorchVersion"),
    "generator state": (lambda: np.random.RandomState(1).get_state(), "_reconstruct"),
    "optimiser": (lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), "torch.optim"),
}


@FORMATS
@pytest.mark.parametrize("case", HARMLESS)
def test_extras_do_not_block_the_weights(tmp_path, case, zipped):
    make, noted = HARMLESS[case]
    path = save({"model": {"w": torch.ones(2, 3)}, "config": {"x": make()}, "last": 5}, tmp_path / "a.pt", zipped)
    read = read_torch_file(path)
    assert torch.equal(read.tree["model"]["w"], torch.ones(2, 3))
    assert read.tree["last"] == 5
    if noted is None:
        assert read.notes == ()
    else:
        assert read.notes[0].startswith("blocked types replaced by placeholders: ")
        assert noted in read.notes[0]


@pytest.mark.parametrize("value", [np.float64(-2.5), np.float32(0.1), np.int64(-7), np.uint8(200), np.bool_(True)])
def test_numpy_scalars_keep_their_value(tmp_path, value):
    found = read_torch_file(save({"x": value}, tmp_path / "a.pt")).tree["x"]
    assert found == value.item()
    assert type(found) is type(value.item())


def test_big_endian_numpy_scalar(tmp_path):
    value = np.array([1.5], dtype=">f8")[0]
    assert read_torch_file(save({"x": value}, tmp_path / "a.pt")).tree["x"] == 1.5


def test_namespace_attributes_stay_readable(tmp_path):
    found = read_torch_file(save({"c": argparse.Namespace(n_head=4)}, tmp_path / "a.pt")).tree["c"]
    assert isinstance(found, Placeholder)
    assert found.dotted_name == "argparse.Namespace"
    assert found.state == {"n_head": 4}


@FORMATS
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("system", lambda marker: Reduced(os.system, f"touch {marker}")),
        ("open", lambda marker: Reduced(open, str(marker), "w")),
        ("builtins.exec", lambda marker: Reduced(exec, f"open({str(marker)!r}, 'w')")),
        ("builtins.eval", lambda marker: Reduced(eval, f"open({str(marker)!r}, 'w')")),
        ("subprocess.Popen", lambda marker: Reduced(subprocess.Popen, ["touch", str(marker)])),
        ("builtins.getattr", lambda marker: Reduced(pathlib.Path.touch, Path(marker))),
        ("functools.partial", lambda marker: Reduced(functools.partial(os.mkdir, str(marker)))),
        ("argparse.FileType", lambda marker: Reduced(argparse.FileType("w"), str(marker))),
        ("save", lambda marker: Reduced(np.save, str(marker) + ".npy", [1])),
        ("save", lambda marker: Reduced(torch.save, [1], str(marker))),
        ("torch.serialization.load", lambda marker: Reduced(torch.load, str(marker))),
        ("WritesOnSetState", lambda marker: WritesOnSetState(str(marker))),
    ],
)
def test_dangerous_object_is_refused_by_name_and_never_runs(tmp_path, refusal, zipped, name, call):
    marker = tmp_path / "marker"
    path = save({"model": {"w": torch.ones(2)}, "extra": call(marker)}, tmp_path / "a.pt", zipped)
    line = refusal(read_torch_file, path)
    assert not marker.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
    assert "nothing was executed" in line
    assert name in line


def test_the_marker_test_can_fail(tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(WritesOnSetState(str(marker))))
    assert marker.exists()


def op(module, name):
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def mapping_state(**attributes):
    """Opcodes of the (None, {...}) state with which BUILD sets attributes one by one."""
    body = b"".join(pickle.BINUNICODE + len(k).to_bytes(4, "little") + k.encode() + pickle.NONE for k in attributes)
    return pickle.NONE + pickle.EMPTY_DICT + pickle.MARK + body + pickle.SETITEMS + pickle.TUPLE2


@pytest.mark.parametrize(
    "target",
    [
        op("collections", "OrderedDict"),
        op("torch._utils", "_rebuild_tensor_v2"),
        op("argparse", "Namespace"),
        op("torch", "FloatStorage"),
        op("torch", "float32"),
        op("numpy", "dtype"),
    ],
)
def test_building_on_a_named_object_changes_nothing(target):
    before = vars(Placeholder).copy()
    crafted = pickle.PROTO + b"\x02" + target + mapping_state(__call__=1, _make=1, dotted_name=1) + b"b" + pickle.STOP
    try:
        load_pickle(io.BytesIO(crafted), "crafted")
    except Exception as error:
        assert type(error).__name__ == "InputError"
    assert vars(Placeholder) == before
    tree = load_pickle(io.BytesIO(pickle.dumps(collections.OrderedDict(a=1), 2)), "after").tree
    assert tree == {"a": 1}


def test_building_on_a_reference_changes_nothing(tmp_path):
    ref = TensorRef(storage=None, dtype=torch.float32, offset=0, size=(1,), stride=(1,))
    ref.__setstate__([None, torch.float32, -5, (9,), (9,)])
    assert (ref.offset, ref.size) == (0, (1,))


def test_tensor_outside_its_storage_is_refused(tmp_path, refusal):
    path = save({"w": torch.ones(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    tree = next(name for name in members if name.endswith("data.pkl"))
    # K\x04\x85: the tuple (4,) of the tensor's size.
    assert members[tree].count(b"K\x04\x85") == 1
    members[tree] = members[tree].replace(b"K\x04\x85", b"K\x7f\x85")
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    line = refusal(read_torch_file, tmp_path / "b.pt")
    assert "[127]" in line
    assert "508 bytes" in line


def test_compressed_and_misaligned_archives_are_read(tmp_path):
    path = save({"w": torch.arange(9.0), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "a.pt")
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(tmp_path / "b.pt", "w", kind) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        read = read_torch_file(tmp_path / "b.pt").tree
        assert torch.equal(read["w"], torch.arange(9.0))
        assert torch.equal(read["b"], torch.ones(3, dtype=torch.bfloat16))


@FORMATS
@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.999])
def test_truncated_file(tmp_path, refusal, zipped, share):
    path = save({"w": torch.ones(300), "v": torch.zeros(300)}, tmp_path / "a.pt", zipped)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    line = refusal(read_torch_file, path)
    assert "truncated" in line or (share < 0.1 and "damaged" in line)
    assert str(path) in line


def test_other_files_are_told_apart(tmp_path, refusal):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 43677351\n"
    cases = {
        "empty.pt": (b"", "empty"),
        "text.pt": (b"step 1: loss 3.5\n" * 9, "text file, not a checkpoint"),
        "pointer.pt": (pointer.encode(), "git lfs pull"),
        "plain.pkl": (pickle.dumps({"a": 1}), "plain pickle"),
        "noise.bin": (bytes(range(1, 256)) * 2 + b"\0", "not a checkpoint"),
        "short.pt": (b"PK", "truncated"),
    }
    for name, (data, expected) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert expected.lower() in refusal(read_torch_file, tmp_path / name).lower(), name
    assert "no such file" in refusal(read_torch_file, tmp_path / "missing.pt")
    assert "directory" in refusal(read_torch_file, tmp_path)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "not a checkpoint" in refusal(read_torch_file, tmp_path / "other.zip")


def test_random_damage_never_escapes(tmp_path):
    generator = np.random.default_rng(5)
    clean = pickle.dumps({"a": [1, 2.5, "x"], "b": collections.OrderedDict(c=(1, 2))}, 2)
    for _ in range(400):
        damaged = bytearray(clean)
        for at in generator.integers(0, len(damaged), size=3):
            damaged[at] = generator.integers(0, 256)
        try:
            load_pickle(io.BytesIO(bytes(damaged)), "damaged")
        except Exception as error:
            assert type(error).__name__ == "InputError", error


def test_reading_imports_nothing_that_the_file_names(tmp_path):
    name = "wave" if "wave" not in sys.modules else "chunk"
    crafted = pickle.PROTO + b"\x02" + op(name, "Wave_read") + pickle.STOP
    with pytest.raises(Exception, match="refers to"):
        load_pickle(io.BytesIO(crafted), "crafted")
    assert name not in sys.modules
    assert builtins.open is open


@pytest.mark.parametrize(
    "crafted",
    [
        pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f" + pickle.STOP,
        pickle.BYTEARRAY8 + (1 << 40).to_bytes(8, "little") + pickle.STOP,
        pickle.BINBYTES8 + (1 << 40).to_bytes(8, "little") + pickle.STOP,
        pickle.FRAME + (1 << 40).to_bytes(8, "little") + pickle.STOP,
    ],
)
def test_a_length_in_the_file_reserves_no_memory(crafted):
    tracemalloc.start()
    try:
        load_pickle(io.BytesIO(pickle.PROTO + b"\x05" + crafted), "crafted")
    except Exception as error:
        assert type(error).__name__ == "InputError"
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 24
