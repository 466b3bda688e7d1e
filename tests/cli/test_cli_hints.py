"""What a new user gets wrong first: the message says what is missing."""

from pathlib import Path


def test_a_token_file_without_indices_is_told_to_give_them(run_cli, repository: Path) -> None:
    demo = repository / "bf16forensics" / "demo"
    result = run_cli(["localize", str(demo / "planted.pt"), "--batch", "tokens.bin"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "--indices" in result.stderr
    assert "tokens.bin" in result.stderr
