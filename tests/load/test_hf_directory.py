"""Hugging Face directories: which files are read, what an index may say, and one line for everything damaged."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bf16forensics.load.hf_directory import read_hf_directory
from bf16forensics.load.hf_json import read_json_object, shown

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def tensors(*names: str, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), value) for name in names}


def write_config(folder: Path, **values: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **values}))


def write_index(folder: Path, placement: object, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placement}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three shards with odd zero padding; the index is the only thing that ties them together."""
    write_config(tmp_path)
    names = ("model-0001-of-3.safetensors", "model-2-of-3.safetensors", "part.safetensors")
    for letter, name in zip("abc", names, strict=True):
        save_file(tensors(letter, letter + "2"), tmp_path / name)
    write_index(
        tmp_path, {letter + tail: name for letter, name in zip("abc", names, strict=True) for tail in ("", "2")}
    )
    return tmp_path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(3, dtype=torch.bfloat16)},
              tmp_path / "model.safetensors")  # fmt: skip
    return tmp_path


def test_a_single_file(single: Path) -> None:
    read = read_hf_directory(single)
    assert read.path == str(single)
    assert read.config == {"model_type": "llama"}
    assert read.tensors["b"].dtype == torch.bfloat16
    assert read.tensors["a"].isnan().tolist() == [False, True]
    assert [(facts.role, Path(facts.path).name) for facts in read.files] == [
        ("config", "config.json"), ("checkpoint", "model.safetensors")]  # fmt: skip
    data = (single / "model.safetensors").read_bytes()
    assert read.files[1].sha256 == hashlib.sha256(data).hexdigest()
    assert read.files[1].size_bytes == len(data)
    assert read.notes == ()


def test_shards_come_from_the_index(sharded: Path) -> None:
    save_file(tensors("stray"), sharded / "model-0002-of-3.safetensors")
    read = read_hf_directory(str(sharded))
    assert sorted(read.tensors) == ["a", "a2", "b", "b2", "c", "c2"]
    assert [facts.role for facts in read.files] == ["config", "index", "checkpoint", "checkpoint", "checkpoint"]
    assert len({facts.sha256 for facts in read.files}) == 5
    assert read.notes == ("weight files that are not read: model-0002-of-3.safetensors",)


@pytest.mark.parametrize(
    ("gone", "count"), [(["model-2-of-3.safetensors"], 1), (["part.safetensors", "model-2-of-3.safetensors"], 2)]
)
def test_a_missing_shard_is_named(sharded: Path, refusal, gone: list[str], count: int) -> None:
    for name in gone:
        (sharded / name).unlink()
    line = refusal(read_hf_directory, sharded)
    assert f"{count} of its files missing" in line
    assert all(name in line for name in gone)
    assert "incomplete download?" in line


def test_many_missing_shards_are_counted(tmp_path: Path, refusal) -> None:
    write_config(tmp_path)
    write_index(tmp_path, {f"t{i}": f"model-{i:05d}-of-00007.safetensors" for i in range(7)})
    line = refusal(read_hf_directory, tmp_path)
    assert "7 of its files missing" in line
    assert "model-00002-of-00007.safetensors and 4 more" in line


def test_a_stale_index_beside_a_complete_file(sharded: Path) -> None:
    """What the index names never existed; the single file is used and the note says so."""
    for name in ("model-0001-of-3.safetensors", "model-2-of-3.safetensors", "part.safetensors"):
        (sharded / name).unlink()
    save_file(tensors("x"), sharded / "model.safetensors")
    read = read_hf_directory(sharded)
    assert list(read.tensors) == ["x"]
    assert "model.safetensors is used (3 of the 3 files that the index names do not exist)" in read.notes[0]


def test_a_single_file_beside_its_complete_shards(sharded: Path) -> None:
    save_file(tensors("x"), sharded / "model.safetensors")
    read = read_hf_directory(sharded)
    assert list(read.tensors) == ["x"]
    assert read.notes == (
        "both model.safetensors and model.safetensors.index.json are there: model.safetensors is used",
        "weight files that are not read: model-0001-of-3.safetensors, model-2-of-3.safetensors, part.safetensors",
    )


def test_an_index_of_the_single_file_is_no_second_source(single: Path) -> None:
    write_index(single, {"a": "model.safetensors", "b": "model.safetensors"})
    read = read_hf_directory(single)
    assert read.notes == ()
    assert [facts.role for facts in read.files] == ["config", "index", "checkpoint"]


def test_a_stale_index_beside_other_shards(sharded: Path, refusal) -> None:
    """Other files hold all tensors, but no index says so: names are never guessed."""
    for new, old in enumerate(("model-0001-of-3.safetensors", "part.safetensors", "model-2-of-3.safetensors")):
        (sharded / old).rename(sharded / f"model-{new + 1}.safetensors")
    line = refusal(read_hf_directory, sharded)
    assert "3 of its files missing" in line
    assert "model-1.safetensors" in line
    assert "stale index?" in line


def test_a_tensor_that_its_shard_lacks(sharded: Path, refusal) -> None:
    save_file(tensors("b"), sharded / "model-2-of-3.safetensors")
    line = refusal(read_hf_directory, sharded)
    assert "'b2'" in line
    assert "model-2-of-3.safetensors" in line


def test_a_tensor_that_the_index_does_not_list(sharded: Path) -> None:
    save_file(tensors("b", "b2", "extra"), sharded / "model-2-of-3.safetensors")
    read = read_hf_directory(sharded)
    assert "extra" in read.tensors
    assert "does not list: extra" in read.notes[0]


@pytest.mark.parametrize(("value", "refused"), [(1.0, False), (2.0, True)])
def test_a_tensor_in_two_shards(sharded: Path, refusal, value: float, refused: bool) -> None:
    save_file({**tensors("c", "c2"), **tensors("a", value=value)}, sharded / "part.safetensors")
    if refused:
        assert "'a' has other values here" in refusal(read_hf_directory, sharded)
    else:
        assert read_hf_directory(sharded).notes == ()


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "C:x", 7, None]
)
def test_a_shard_outside_the_directory(sharded: Path, refusal, place: object) -> None:
    write_index(sharded, {"a": "model-0001-of-3.safetensors", "evil": place})
    line = refusal(read_hf_directory, sharded)
    assert "'evil'" in line
    assert "plain file name" in line


def test_links_to_files_elsewhere_are_followed(single: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The layout of a download cache: the directory holds links to blobs."""
    blob = tmp_path_factory.mktemp("blobs") / "0123abcd"
    (single / "model.safetensors").rename(blob)
    (single / "model.safetensors").symlink_to(blob)
    assert sorted(read_hf_directory(single).tensors) == ["a", "b"]


@pytest.mark.parametrize("content", ['{"weight_map": {}}', '{"weight_map": []}', '{"metadata": {}}', "[]", "{", ""])
def test_an_unusable_index(sharded: Path, refusal, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(read_hf_directory, sharded)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no config.json"),
        ("", "empty file"),
        (POINTER, "Git LFS pointer"),
        ("{'a': 1}", "not JSON"),
        ("[" * 100_000, "not JSON (nested too deep)"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ("[1]", "no JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": null}', "no model_type"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "'model_type' occurs twice"),
    ],
)
def test_an_unusable_config(single: Path, refusal, content: str | None, expected: str) -> None:
    (single / "config.json").unlink()
    if content is not None:
        (single / "config.json").write_text(content)
    assert expected in refusal(read_hf_directory, single)


def test_config_that_is_not_text(single: Path, refusal) -> None:
    (single / "config.json").write_bytes(b"\xff\xfe\x00{")
    assert "not a text file" in refusal(read_hf_directory, single)


def test_a_byte_order_mark_is_skipped(single: Path) -> None:
    (single / "config.json").write_text('\ufeff{"model_type": "llama"}', encoding="utf-8")
    assert read_hf_directory(single).config["model_type"] == "llama"


def damage_pointer(file: Path) -> None:
    file.write_text(POINTER)


def damage_tail(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-16])


def damage_head(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def damage_dtype(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'""   ', 1))


def damage_all(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (damage_pointer, ["Git LFS pointer", "git lfs pull"]),
        (damage_tail, ["truncated", "expected", "found"]),
        (damage_head, ["truncated", "expected", "found 40"]),
        (damage_dtype, ["'", "dtype ''"]),
        (damage_all, ["truncated", "found 0"]),
    ],
)
@pytest.mark.parametrize("shard", [False, True])
def test_a_damaged_weight_file(sharded: Path, refusal, damage, expected: list[str], shard: bool) -> None:
    name = "model-2-of-3.safetensors" if shard else "model.safetensors"
    if not shard:
        save_file(tensors("a"), sharded / name)
    damage(sharded / name)
    line = refusal(read_hf_directory, sharded)
    assert name in line
    assert all(word in line for word in expected)


def test_a_pointer_in_place_of_the_index(sharded: Path, refusal) -> None:
    damage_pointer(sharded / "model.safetensors.index.json")
    line = refusal(read_hf_directory, sharded)
    assert "model.safetensors.index.json" in line
    assert "Git LFS pointer" in line


def test_no_weights_lists_what_is_there(tmp_path: Path, refusal) -> None:
    write_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "found model.gguf." in refusal(read_hf_directory, tmp_path)
    (tmp_path / "model.gguf").unlink()
    assert "found config.json, tokenizer.json." in refusal(read_hf_directory, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter without its base model" in refusal(read_hf_directory, tmp_path)


def test_an_adapter_beside_the_model_is_noted(single: Path) -> None:
    (single / "adapter_config.json").write_text("{}")
    assert "not applied" in read_hf_directory(single).notes[0]


def test_no_directory(tmp_path: Path, refusal) -> None:
    assert "no such directory" in refusal(read_hf_directory, tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "not a directory" in refusal(read_hf_directory, tmp_path / "file")


@pytest.mark.parametrize("layout", ["tf", "flax"])
def test_weights_of_other_frameworks(single: Path, refusal, layout: str) -> None:
    save_file(tensors("a"), single / "model.safetensors", metadata={"format": layout})
    assert f"written by {layout}" in refusal(read_hf_directory, single)


def test_no_tensor_at_all(single: Path, refusal) -> None:
    save_file({}, single / "model.safetensors")
    assert "holds no tensor" in refusal(read_hf_directory, single)


# --- torch files


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    write_config(tmp_path)
    torch.save(tensors("a", "b"), tmp_path / "pytorch_model.bin")
    return tmp_path


def test_torch_files_need_leave(pickled: Path, refusal) -> None:
    line = refusal(read_hf_directory, pickled)
    assert "--allow-bin" in line
    assert "pytorch_model.bin" in line
    assert sorted(read_hf_directory(pickled, allow_bin=True).tensors) == ["a", "b"]


def test_sharded_torch_files(tmp_path: Path, refusal) -> None:
    write_config(tmp_path)
    torch.save(tensors("a"), tmp_path / "one.bin")
    torch.save(tensors("b"), tmp_path / "two.bin")
    write_index(tmp_path, {"a": "one.bin", "b": "two.bin"}, "pytorch_model.bin.index.json")
    assert "--allow-bin" in refusal(read_hf_directory, tmp_path)
    read = read_hf_directory(tmp_path, allow_bin=True)
    assert sorted(read.tensors) == ["a", "b"]
    (tmp_path / "two.bin").unlink()
    assert "two.bin (incomplete download?)" in refusal(read_hf_directory, tmp_path, allow_bin=True)


def test_safetensors_win(pickled: Path) -> None:
    save_file(tensors("c"), pickled / "model.safetensors")
    read = read_hf_directory(pickled, allow_bin=True)
    assert list(read.tensors) == ["c"]
    assert "torch files too" in read.notes[0]


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def test_torch_files_run_no_code(pickled: Path, refusal, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({**tensors("a"), "evil": Payload(marker)}, pickled / "pytorch_model.bin")
    assert "nothing was executed" in refusal(read_hf_directory, pickled, allow_bin=True)
    assert not marker.exists()


@pytest.mark.parametrize("tree", [[1], {"a": torch.ones(1), "epoch": 3}, torch.ones(2)])
def test_torch_files_that_are_no_state_dict(pickled: Path, refusal, tree: object) -> None:
    torch.save(tree, pickled / "pytorch_model.bin")
    assert "save model.state_dict()" in refusal(read_hf_directory, pickled, allow_bin=True)


def test_json_helpers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": NaN, "y": [1, {"z": 2}]}')
    read = read_json_object(tmp_path / "a.json")
    assert read["y"] == [1, {"z": 2}]
    assert read["x"] != read["x"]
    assert shown(None) == "null"
    assert shown({"a": 1.5}) == '{"a": 1.5}'
    assert len(shown("x" * 100)) == 40
