"""`bf16forensics localize --observe` as scripts and people meet it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

Run = Callable[..., Any]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., list[object]]:
    """Arguments of a record of two sequences whose keys come twice, so that many rows have two maxima."""

    def write(*left_out: str, **changes: torch.Tensor) -> list[object]:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        built = {name: draw(2, 4, 12, 8).bfloat16() for name in ("q", "k", "v", "do")}
        built["k"][:, :, 6:] = built["k"][:, :, :6].clone()
        built |= {"x": draw(2, 12, 10), "w_q": draw(32, 10), "w_k": draw(32, 10)} | changes
        save_file({name: tensor for name, tensor in built.items() if name not in left_out}, tmp_path / "r.safetensors")
        return ["localize", "--record", tmp_path / "r.safetensors", "--layout", "bhtd", "--observe"]

    return write


def document(result: Any) -> dict[str, Any]:
    assert result.stdout.endswith("}\n"), result.stderr
    return dict(json.loads(result.stdout))


def test_the_observation_agrees_with_the_counts_of_the_heads(run_cli: Run, record: Any) -> None:
    built = document(run_cli([*record(), "--json"]))
    found = built["observation"]
    assert [head["name"] for head in found["heads"]] == [head["name"] for head in built["heads"]]
    for mine, theirs in zip(found["heads"], built["heads"], strict=True):
        assert mine["rows_repeated"] == theirs["rows_repeated_max"] > 0
        assert mine["most_ones"] == theirs["most_ones"]
        assert mine["next"]["pairs"] == 2 * 11
        assert mine["matrix_drawn"]["pairs"] == 2 * 12 * 11 // 2
    rows = found["repeated_rows"]
    assert rows["total"] == rows["listed"] == sum(head["rows_repeated_max"] for head in built["heads"])
    for row in rows["rows"]:
        assert row["ones"] == len(row["keys"]) >= 2
        # Equal keys stand six apart.
        assert {key % 6 for key in row["keys"] if (key + 6) % 12 in row["keys"]}


def test_nothing_else_changes_and_threads_change_nothing(run_cli: Run, record: Any) -> None:
    arguments = record()
    plain = document(run_cli([*arguments[:-1], "--json"]))
    assert "observation" not in plain
    one, two = (document(run_cli([*arguments, "--json", "--threads", number])) for number in (1, 2))
    assert one["observation"] == two["observation"]
    for name in ("verdict", "heads", "summary", "ranking"):
        assert one[name] == plain[name]


def test_the_report_has_the_section(run_cli: Run, record: Any) -> None:
    result = run_cli(record())
    said = " ".join(result.stdout.split())
    assert "observed (PK)[T]^T X[T] is rank one" in said
    assert "rows with two or more P" in said
    assert "observed " not in run_cli(record()[:-1]).stdout


def test_without_do_and_x(run_cli: Run, record: Any) -> None:
    whole = document(run_cli([*record(), "--json", "--reference", "fp64"]))["observation"]
    bare = document(run_cli([*record("do", "x"), "--json", "--reference", "fp64"]))["observation"]
    assert bare["layers"] == []
    assert bare["repeated_rows"] == whole["repeated_rows"]
    for one, other in zip(bare["heads"], whole["heads"], strict=True):
        assert one["coherence"] is None
        assert one["next"]["mean"] == pytest.approx(other["next"]["mean"], abs=1e-12)


def test_a_head_that_is_not_finite_is_named(run_cli: Run, record: Any) -> None:
    arguments = record()
    whole = document(run_cli([*arguments, "--json"]))["observation"]["heads"]
    q = torch.randn(2, 4, 12, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    q[1, 2, 5, 0] = float("nan")
    result = run_cli([*record(q=q), "--json"])
    assert result.exit_code == 2
    found = document(result)["observation"]["heads"]
    assert found[2]["nonfinite"] == ["q[1, 2, 5, 0]"]
    assert (found[2]["next"]["mean"], found[2]["coherence"], found[2]["rows_repeated"]) == ("nan", "nan", None)
    assert [found[head] for head in (0, 1, 3)] == [whole[head] for head in (0, 1, 3)]
