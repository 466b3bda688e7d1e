"""Row files, row files in a case, and exports: bit for bit what was written, and one line for whatever is not one."""

import errno
import json
import math
import pickle
import struct
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from bf16forensics.errors import InputError
from bf16forensics.report.array_file import array_bytes, read_arrays
from bf16forensics.report.case import check_target, write_case, write_row_trace_into_case
from bf16forensics.report.row_trace import read_row_trace, row_arrays, row_file_name, row_metadata, write_row_trace
from bf16forensics.report.trace.export import check_export_target, write_export

DOCUMENT = {"schema_version": 1, "heads": []}


def same(first, second):
    """Whether two traces are equal, bit for bit."""
    for field in fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name in ("run", "ascending"):
            assert same(a, b)
        elif isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), field.name
        else:
            assert type(a) is type(b)
            assert struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else a == b, field.name
    return True


@pytest.fixture
def path(tmp_path):
    return tmp_path / "L1.H2.s3.t50.safetensors"


@pytest.mark.parametrize("step", [None, 0, 401, 10**17])
def test_a_row_is_read_back_as_written(traces, path, step):
    trace = traces.row_trace(step=step)
    write_row_trace(path, trace)
    assert same(read_row_trace(path), trace)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6),
    wide=st.lists(st.floats(), min_size=3, max_size=3),
    scalar=st.floats(),
)
def test_every_pattern_survives(traces, tmp_path_factory, bits, wide, scalar):
    path = tmp_path_factory.mktemp("row") / "row.safetensors"
    odd = np.array(bits, dtype=np.uint32).view(np.float32)
    walk = traces.walk(p_bar=odd, lse=scalar, row_sum=-0.0)
    trace = traces.row_trace(ascending=walk, o_hp=np.array(wide))
    write_row_trace(path, trace)
    assert same(read_row_trace(path), trace)


def test_every_field_of_a_walk_is_stored(traces, path):
    changed = traces.walk(value_scale=0.375, v_format="e4m3", o_bar_at="tile", o_bar_format="bf16", division="none")
    write_row_trace(path, traces.row_trace(run=changed))
    found = read_row_trace(path).run
    assert {field.name for field in fields(found)} == {
        name.partition(".")[2]
        for name in {*row_arrays(traces.row_trace()), *row_metadata(traces.row_trace())}
        if "run." in name
    }
    assert (found.value_scale, found.v_format, found.o_bar_at, found.division) == (0.375, "e4m3", "tile", "none")


def test_the_same_row_gives_the_same_bytes(traces, path, run_python):
    write_row_trace(path, traces.row_trace())
    data = path.read_bytes()
    write_row_trace(path, traces.row_trace())
    assert path.read_bytes() == data
    # The library orders metadata by a hash that differs between processes.
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    assert list(metadata) == sorted(metadata)
    assert length % 8 == 0


def test_the_file_is_one_that_the_library_reads(traces, path):
    trace = traces.row_trace()
    write_row_trace(path, trace)
    found = load_file(path)
    np.testing.assert_array_equal(found["run.v"], trace.run.v)
    assert {str(array.dtype) for array in found.values()} == {"float32", "float64", "int64", "bool"}


def test_reading_needs_no_tensor_library(traces, path, run_python):
    write_row_trace(path, traces.row_trace())
    code = (
        "import sys; from pathlib import Path; from bf16forensics.report.row_trace import read_row_trace; "
        f"print(read_row_trace(Path({str(path)!r})).token, 'torch' in sys.modules, 'triton' in sys.modules)"
    )
    assert run_python(["-c", code]).stdout.split() == ["50", "False", "False"]


def rewritten(path, arrays=None, metadata=None):
    """The file with arrays and metadata replaced; None as a value removes one."""
    file = read_arrays(path)
    kept = {**file.arrays, **(arrays or {})}
    words = {**file.metadata, **(metadata or {})}
    save_file(
        {name: np.asarray(array) for name, array in kept.items() if array is not None},
        path,
        metadata={name: word for name, word in words.items() if word is not None},
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"run.keys": None}, "array 'run.keys' is missing"),
        ({"o_hp": None}, "array 'o_hp' is missing"),
        ({"run.keys": np.arange(10.0)}, "'run.keys' is float64 with 1 axes instead of int64"),
        ({"run.v": np.zeros(30, np.float32)}, "'run.v' is float32 with 1 axes instead of float32 with 2"),
        ({"run.lse": np.zeros(1)}, "'run.lse' is float64 with 1 axes"),
        ({"run.p_bar": np.zeros(9, np.float32)}, "run.p_bar has 9 entries along K, the others 10"),
        ({"run.o": np.zeros(4, np.float32)}, "run.o has 4 entries along E, the others 3"),
        ({"run.tile_alpha": np.zeros(2, np.float32)}, "run.tile does not count from 0 to 1"),
        ({"run.tile": np.array([0, 0, 0, 0, 2, 2, 2, 2, 2, 2])}, "run.tile does not count from 0 to 2"),
        ({"run.tile": np.array([0, 0, 1, 1, 0, 0, 1, 1, 2, 2])}, "run.tile does not count from 0 to 2"),
        ({"run.keys": np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 8])}, "run.keys holds a negative or a repeated position"),
        ({"run.keys": np.arange(10) - 1}, "run.keys holds a negative"),
        ({"run.is_one": np.ones(10, bool)}, "run.is_one marks a key that the query does not see"),
        ({"o_hp": np.zeros(4)}, "different numbers of features"),
        ({"run.p_bar": np.zeros(10, np.float16)}, "array 'run.p_bar' has dtype F16"),
        ({"extra": np.zeros(3, np.int32)}, "array 'extra' has dtype I32"),
    ],
)
def test_arrays_that_no_row_has_are_told(traces, path, arrays, message):
    write_row_trace(path, traces.row_trace())
    rewritten(path, arrays)
    with pytest.raises(InputError, match=message) as caught:
        read_row_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"row_trace": None}, "not a row of trace-head"),
        ({"row_trace": "2"}, "schema '2', this program reads 1"),
        ({"layer": None}, "metadata layer is ''"),
        ({"token": "-1"}, "metadata token is '-1'"),
        ({"token": "1_0"}, "metadata token is '1_0'"),
        ({"head": "\u0661"}, "metadata head is "),
        ({"sequence": "9" * 5000}, "metadata sequence is "),
        ({"step": "soon"}, "metadata step is 'soon'"),
        ({"run.division": "multiply"}, "metadata run.division is 'multiply'"),
        ({"run.p_format": "fp64"}, "metadata run.p_format is 'fp64'"),
        ({"run.recipe": "fa2\x1b[2J"}, r"metadata run.recipe is 'fa2.x1b"),
        ({"run.recipe": "x" * 5000}, "metadata run.recipe is 'xxx"),
        ({"ascending.o_bar_at": None}, "metadata ascending.o_bar_at is None"),
    ],
)
def test_words_that_no_row_has_are_told(traces, path, metadata, message):
    write_row_trace(path, traces.row_trace())
    rewritten(path, metadata=metadata)
    with pytest.raises(InputError, match=message) as caught:
        read_row_trace(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_empty_walks_are_refused(traces, path):
    write_row_trace(path, traces.row_trace())
    none = {f"run.{name}": np.zeros(0, array.dtype) for name, array in read_run_arrays(traces) if array.ndim == 1}
    rewritten(path, {**none, "run.o": np.zeros(3, np.float32), "run.v": np.zeros((0, 3), np.float32)})
    with pytest.raises(InputError, match="run is empty"):
        read_row_trace(path)


def read_run_arrays(traces):
    arrays = row_arrays(traces.row_trace())
    return [(name.removeprefix("run."), array) for name, array in arrays.items() if name.startswith("run.")]


class _Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        b"\xff" * 64,
        b"PK\x03\x04" + bytes(60),
        pickle.dumps(_Bomb()),
        (2**40).to_bytes(8, "little") + b"{}",
    ],
    ids=["empty", "short", "ones", "zip", "pickle", "huge header"],
)
def test_what_is_no_file_of_arrays_is_one_line(path, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path.write_bytes(data)
    with pytest.raises(InputError, match=path.name) as caught:
        read_row_trace(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_a_cut_file_a_folder_and_nothing(traces, path, tmp_path):
    write_row_trace(path, traces.row_trace())
    data = path.read_bytes()
    for size in (9, 200, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match="damaged safetensors file"):
            read_row_trace(path)
    path.write_bytes(data + b"x")
    with pytest.raises(InputError, match="damaged safetensors file"):
        read_row_trace(path)
    for odd in (tmp_path, tmp_path / "absent.safetensors"):
        with pytest.raises(InputError, match="is a directory|no such file"):
            read_row_trace(odd)


def test_bytes_that_are_no_bool_are_refused(traces, path):
    write_row_trace(path, traces.row_trace())
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + length])["run.visible"]["data_offsets"][0]
    data[8 + length + start] = 2
    path.write_bytes(data)
    with pytest.raises(InputError, match="'run.visible' holds bytes that are no bool"):
        read_row_trace(path)


def test_arrays_of_other_types_are_a_mistake_of_the_program():
    with pytest.raises(TypeError, match="int32"):
        array_bytes({"a": np.zeros(2, np.int32)}, {})


@given(st.lists(st.text(max_size=20), max_size=5))
def test_metadata_of_any_text_is_kept(tmp_path_factory, words):
    path = tmp_path_factory.mktemp("meta") / "a.safetensors"
    metadata = {f"k{number}": word for number, word in enumerate(words)} | {"z": "1"}
    try:
        path.write_bytes(array_bytes({"a": np.arange(3), "b": np.array([True]), "c": np.float64([1.5])}, metadata))
    except UnicodeEncodeError:
        # Half of a surrogate pair is no text; what the program writes is.
        return
    found = read_arrays(path)
    assert found.metadata == metadata
    assert found.arrays["a"].tolist() == [0, 1, 2]
    assert found.arrays["c"].tolist() == [1.5]


def test_a_file_that_cannot_be_written_leaves_nothing(traces, path, monkeypatch):
    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="cannot write .*No space left"):
        write_row_trace(path, traces.row_trace())
    assert list(path.parent.iterdir()) == []


@pytest.fixture
def case(tmp_path):
    write_case(tmp_path / "case", DOCUMENT, [], force=False)
    return tmp_path / "case"


def test_a_case_takes_rows_and_replaces_them(traces, case):
    first, second = traces.row_trace(), traces.row_trace(token=51)
    path = write_row_trace_into_case(case, first)
    assert path == case / "traces" / "L1.H2.s3.t50.safetensors"
    assert path.name == row_file_name(1, 2, 3, 50)
    data = path.read_bytes()
    write_row_trace_into_case(case, first)
    assert path.read_bytes() == data
    write_row_trace_into_case(case, second)
    write_row_trace_into_case(case, replace(first, step=9))
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name, "L1.H2.s3.t51.safetensors"]
    assert read_row_trace(path).step == 9


def test_a_case_with_rows_is_still_a_case(traces, case):
    write_row_trace_into_case(case, traces.row_trace())
    # What a killed process may leave.
    (case / "traces" / ".L1.H2.s3.t51.0a0b0c0d.tmp.safetensors").write_bytes(b"half")
    check_target(case, force=True)
    write_case(case, {**DOCUMENT, "new": True}, [], force=True)
    assert [entry.name for entry in case.iterdir()] == ["case.json"]


@pytest.mark.parametrize("foreign", ["traces/mine.txt", "traces/folder.safetensors/x", "tracks/a.safetensors"])
def test_what_is_no_row_is_not_deleted(traces, case, foreign):
    write_row_trace_into_case(case, traces.row_trace())
    (case / foreign).parent.mkdir(exist_ok=True)
    (case / foreign).write_text("precious")
    with pytest.raises(InputError, match=r"traces/(mine|folder)|tracks"):
        check_target(case, force=True)


def test_rows_go_into_cases_only(traces, tmp_path, case):
    with pytest.raises(InputError, match=r"not a case: it has no case\.json"):
        write_row_trace_into_case(tmp_path, traces.row_trace())
    (tmp_path / "elsewhere").mkdir()
    (case / "traces").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="symbolic link"):
        write_row_trace_into_case(case, traces.row_trace())
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_case_that_cannot_be_written_is_told(traces, case):
    (case / "traces").write_text("in the way")
    with pytest.raises(InputError, match="cannot write"):
        write_row_trace_into_case(case, traces.row_trace())


def test_an_export_holds_the_row_and_everything_else(traces, tmp_path):
    path = tmp_path / "out" / "head.safetensors"
    trace, rows, context = traces.trace(), traces.row_trace(), traces.context()
    write_export(path, trace, rows, context, force=False)
    assert same(read_row_trace(path), rows)
    found = load_file(path)
    np.testing.assert_array_equal(found["delta_err"], trace.delta_err)
    assert found["sequences"].tolist() == [3, 4]
    for name in ("keys", "p_bar", "v", "is_one", "tile_end", "exists", "running_lp", "running_hp", "error", "half_ulp"):
        np.testing.assert_array_equal(found[f"cumulative.{name}"], getattr(trace.cumulative, name))
    assert found["features.feature"].tolist() == [item.feature for item in trace.token.features]
    assert found["features.contribution"].tolist() == [item.contribution for item in trace.token.features]
    assert math.fsum(found["features.contribution"]) == trace.token.contributions
    assert found["jumps.size"].tolist() == [jump.size for jump in trace.cumulative.jumps]
    np.testing.assert_array_equal(found["v_all"], trace.v_all)
    metadata = read_arrays(path).metadata
    assert (metadata["accumulator"], metadata["feature"], metadata["recipe"]) == ("fp32-prefix", "20", "fa2")
    data = path.read_bytes()
    write_export(path, trace, rows, context, force=True)
    assert path.read_bytes() == data


def test_an_export_without_a_gradient_or_a_bound_lacks_their_arrays(traces, tmp_path):
    path = tmp_path / "head.safetensors"
    free = traces.cumulative(half_ulp=None, bound_exceeded=None)
    write_export(path, traces.without_gradient(cumulative=free), traces.row_trace(), traces.context(), force=False)
    found = load_file(path)
    assert not [name for name in found if name.startswith("features.") or "half_ulp" in name]
    assert np.isnan(found["delta_err"]).all()


def test_export_targets(tmp_path, traces):
    check_export_target(tmp_path / "new" / "a.safetensors", force=False)
    for name in ("a.npz", "a", "a.safetensors.txt"):
        with pytest.raises(InputError, match=r"does not end in \.safetensors"):
            check_export_target(tmp_path / name, force=True)
    taken = tmp_path / "taken.safetensors"
    taken.write_text("mine")
    with pytest.raises(InputError, match="--force"):
        write_export(taken, traces.trace(), traces.row_trace(), traces.context(), force=False)
    assert taken.read_text() == "mine"
    check_export_target(taken, force=True)


def test_no_byte_of_an_array_changes_unnoticed(traces, path, tmp_path):
    write_row_trace(path, traces.row_trace())
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    generator = np.random.default_rng(11)
    for place in (start, len(data) - 1, *generator.integers(start, len(data), 40).tolist()):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(generator.integers(8))
        other = tmp_path / "damaged.safetensors"
        other.write_bytes(bytes(damaged))
        with pytest.raises(InputError):
            read_row_trace(other)


def test_a_changed_word_of_the_metadata_is_noticed(traces, path):
    write_row_trace(path, traces.row_trace())
    data = path.read_bytes()
    assert b'"token":"' in data
    before = data.index(b'"token":"') + len(b'"token":"')
    path.write_bytes(data[:before] + (b"7" if data[before : before + 1] != b"7" else b"3") + data[before + 1 :])
    with pytest.raises(InputError, match="checksum"):
        read_row_trace(path)
