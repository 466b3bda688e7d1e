"""Files of bytes: refused early, whole or not at all."""

import os
from pathlib import Path

import pytest

from bf16forensics.errors import InputError
from bf16forensics.report import whole_file
from bf16forensics.report.whole_file import check_target, write_new, write_whole


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("data", [b"", b"\x00\r\n\xff"])
def test_bytes_are_written_as_given_and_nothing_else_is_left(tmp_path, data):
    write_whole(tmp_path / "new" / "a.bin", data)
    assert (tmp_path / "new" / "a.bin").read_bytes() == data
    assert names(tmp_path / "new") == ["a.bin"]


def test_what_is_there_is_replaced(tmp_path):
    for data in (b"long before", b"new"):
        write_whole(tmp_path / "a.bin", data)
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_whole(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "fsync", fail)
    with pytest.raises(InputError, match=r"cannot write .*a\.bin: No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.bin", tmp_path / "folder"):
        with pytest.raises(InputError, match="cannot write") as caught:
            write_whole(path, b"new")
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["file", "folder"]


def test_a_new_file_never_replaces_one(tmp_path):
    write_new(tmp_path / "a.bin", b"old")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a.bin", b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"old"


def test_a_target_is_refused_before_the_work(tmp_path):
    (tmp_path / "a.png").write_text("x")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    for name, force, message in (
        ("a.png", False, "exists; pass --force"),
        ("link.png", True, "is a symbolic link"),
        (".", True, "name a file for the figure"),
        ("a.png/b.png", True, "is not a folder that can be written"),
    ):
        with pytest.raises(InputError, match=message):
            check_target(tmp_path / name, force=force, what="figure")
    check_target(tmp_path / "a.png", force=True, what="figure")
    check_target(tmp_path / "missing" / "folder" / "b.png", force=False, what="figure")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_before_the_work(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="is not a folder that can be written"):
            check_target(tmp_path / "a.png", force=False, what="figure")
    finally:
        tmp_path.chmod(0o700)
