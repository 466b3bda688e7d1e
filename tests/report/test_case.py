"""The case directory: what it holds, that it is whole, and what it refuses to replace."""

import json
import math
import os

import pytest
import torch
from safetensors import safe_open

from bf16forensics.errors import InputError
from bf16forensics.investigate.keep import KeptRecord
from bf16forensics.report import case as case_module
from bf16forensics.report.case import check_target, read_case, write_case
from bf16forensics.report.tensors import record_tensors, tensors_sha256, write_record

DOCUMENT = {"schema_version": 1, "heads": []}


@pytest.fixture
def record():
    """Builds a record of 2 sequences, 5 queries, 7 keys, sizes 4 and 3, width 8."""

    def build(name="L1.H7", **fields):
        generator = torch.Generator().manual_seed(5)

        def bf16(*shape):
            return torch.randn(*shape, generator=generator).to(torch.bfloat16).float()

        values = {
            "layer": 1,
            "head": 7,
            "sequences": (0, 3),
            "steps": (101, None),
            "storage": "bf16",
            "recipe": "fa2+o_bar=bf16",
            "q": bf16(2, 5, 4),
            "k": bf16(2, 7, 4),
            "v": bf16(2, 7, 3),
            "do": bf16(2, 5, 3),
            "x": torch.randn(2, 5, 8, generator=generator),
            "w_q": torch.randn(4, 8, generator=generator),
            "scale": 0.1,
            "causal": True,
            "window": None,
        }
        return KeptRecord(name=name, **{**values, **fields})

    return build


def _files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_case_holds_the_document_and_the_tensors(tmp_path, record):
    kept = record()
    written = write_case(tmp_path / "out" / "case", DOCUMENT, [kept], force=False)
    folder = tmp_path / "out" / "case"
    assert _files(folder) == ["case.json", "tensors/L1.H7.safetensors"]
    assert read_case(folder) == written == json.loads((folder / "case.json").read_text())
    (entry,) = written["tensors"]
    assert entry["file"] == "tensors/L1.H7.safetensors"
    assert (entry["layer"], entry["head"], entry["sequences"], entry["steps"]) == (1, 7, [0, 3], [101, None])
    assert entry["size_bytes"] == (folder / entry["file"]).stat().st_size
    with safe_open(folder / entry["file"], framework="pt") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
    assert metadata["layout"] == "bhtd"
    assert (metadata["layer"], metadata["head"], metadata["recipe"]) == ("1", "7", "fa2+o_bar=bf16")
    assert (metadata["causal"], metadata["window"]) == ("true", "")
    assert entry["sha256"] == tensors_sha256(tensors)
    assert sorted(tensors) == entry["tensors"] == ["do", "k", "q", "scale", "v", "w_q", "x"]
    for name in ("q", "k", "v", "do"):
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name][:, 0].float(), getattr(kept, name))
    assert tensors["q"].shape == (2, 1, 5, 4)
    assert torch.equal(tensors["x"], kept.x)
    assert tensors["scale"].item() == 0.1


def test_values_that_bf16_does_not_hold_stay_fp32(record):
    q = torch.full((2, 5, 4), 1 + 2**-12)
    assert record_tensors(record(q=q))["q"].dtype == torch.float32
    with_nan = torch.full((2, 5, 4), math.nan)
    assert record_tensors(record(q=with_nan))["q"].dtype == torch.bfloat16
    half = record(storage="fp16", q=torch.full((2, 5, 4), 1 + 2**-10))
    assert record_tensors(half)["q"].dtype == torch.float16


def test_optional_tensors_and_views(record):
    base = torch.zeros(2, 7, 50)
    kept = record(
        do=None,
        x=None,
        w_q=None,
        k=base[:, :, 3:7],
        mask=torch.ones(2, 5, 7, dtype=torch.bool),
        key_padding=torch.ones(2, 7, dtype=torch.bool),
        document_ids=torch.zeros(2, 7, dtype=torch.int64),
    )
    tensors = record_tensors(kept)
    assert sorted(tensors) == ["document_ids", "k", "key_padding", "mask", "q", "scale", "v"]
    assert tensors["k"].untyped_storage().nbytes() == 2 * 7 * 4 * 2
    assert tensors["mask"].shape == (2, 1, 5, 7)


def test_the_hash_is_of_the_values_and_not_of_the_file(record):
    assert tensors_sha256(record_tensors(record())) == tensors_sha256(record_tensors(record(recipe="paper")))
    changed = record()
    changed.v[0, 0, 0] += 1
    assert tensors_sha256(record_tensors(record())) != tensors_sha256(record_tensors(changed))


def test_the_file_is_the_same_in_every_process(tmp_path, record):
    # The library orders metadata at random, process by process; sorted metadata is the only order that repeats.
    write_record(tmp_path / "a.safetensors", record())
    data = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    assert list(metadata) == sorted(metadata)
    assert len(metadata) > 5


def test_a_kept_record_is_read_back_as_a_record(tmp_path, record):
    from bf16forensics.load.records import load_record

    kept = record(x=torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)))
    write_record(tmp_path / "L1.H7.safetensors", kept)
    raw = load_record(tmp_path / "L1.H7.safetensors")
    assert raw.storage == "bf16"
    assert raw.scale == 0.1
    assert torch.equal(raw.q[:, 0], kept.q)
    assert torch.equal(raw.do[:, 0], kept.do)
    assert torch.equal(raw.x, kept.x)
    assert raw.unused_tensors == ()


def test_a_case_without_records_has_no_tensors(tmp_path):
    assert write_case(tmp_path / "case", DOCUMENT, [], force=False)["tensors"] == []
    assert _files(tmp_path / "case") == ["case.json"]


def test_an_existing_directory_needs_force(tmp_path, record):
    folder = tmp_path / "case"
    write_case(folder, DOCUMENT, [record("L0.H0"), record("L0.H1")], force=False)
    with pytest.raises(InputError, match=r"case exists; pass --force"):
        write_case(folder, DOCUMENT, [], force=False)
    assert len(_files(folder)) == 3
    write_case(folder, DOCUMENT, [record("L0.H2")], force=True)
    assert _files(folder) == ["case.json", "tensors/L0.H2.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_an_empty_directory_may_be_replaced_with_force_only(tmp_path):
    folder = tmp_path / "case"
    folder.mkdir()
    with pytest.raises(InputError, match="exists"):
        write_case(folder, DOCUMENT, [], force=False)
    write_case(folder, DOCUMENT, [], force=True)
    assert read_case(folder)["tensors"] == []


@pytest.mark.parametrize("foreign", ["notes.txt", "tensors/mine.txt", "tensors/folder.safetensors/x", "data/a"])
@pytest.mark.parametrize("is_case", [True, False])
def test_force_never_deletes_what_is_no_part_of_a_case(tmp_path, foreign, is_case):
    folder = tmp_path / "case"
    path = folder / foreign
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    if is_case:
        (folder / "case.json").write_text('{"schema_version": 1}')
    before = _files(folder)
    with pytest.raises(InputError, match="no part of a case"):
        write_case(folder, DOCUMENT, [], force=True)
    assert _files(folder) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["case"]


def test_files_and_links_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        check_target(tmp_path / "file", force=True)
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    with pytest.raises(InputError, match="symbolic link"):
        check_target(tmp_path / "link", force=True)
    check_target(tmp_path / "new" / "case", force=False)


def test_record_names_are_file_names_and_unique(tmp_path, record):
    for kept in ([record("../L0.H0")], [record(), record()]):
        with pytest.raises(InputError, match="record name"):
            write_case(tmp_path / "case", DOCUMENT, kept, force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["_fill", "_swap"])
def test_a_failure_leaves_the_old_case_and_nothing_else(tmp_path, monkeypatch, record, broken):
    folder = tmp_path / "case"
    write_case(folder, DOCUMENT, [record("L0.H0")], force=False)
    before = {name: (folder / name).read_bytes() for name in _files(folder)}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(case_module, broken, fail)
    with pytest.raises(InputError, match="cannot write .*No space left"):
        write_case(folder, {**DOCUMENT, "new": 1}, [record()], force=True)
    assert {name: (folder / name).read_bytes() for name in _files(folder)} == before
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_a_failed_rename_puts_the_old_case_back(tmp_path, monkeypatch):
    folder = tmp_path / "case"
    write_case(folder, DOCUMENT, [], force=False)
    rename = type(folder).rename

    def fail_for_the_new(self, target):
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(folder), "rename", fail_for_the_new)
    with pytest.raises(InputError, match="Input/output error"):
        write_case(folder, {**DOCUMENT, "new": 1}, [], force=True)
    assert "new" not in read_case(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_not_a_case(tmp_path):
    with pytest.raises(InputError, match=r"is not a case: it has no case\.json"):
        read_case(tmp_path)
