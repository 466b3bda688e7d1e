"""`write_json` into a folder that is none."""

from pathlib import Path

import pytest

from bf16forensics.errors import InputError
from bf16forensics.report.jsonio import write_json


def test_a_file_in_place_of_the_folder_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot write"):
        write_json(tmp_path / "file" / "out.json", {"schema_version": 1}, force=False)
