"""nanoGPT token files and recorded window starts."""

import numpy as np
import pytest
import torch

from bf16forensics.load.batch import load_token_batch


@pytest.fixture
def files(tmp_path):
    """100 tokens and the given index lines."""

    def make(text="0,10\n91,20\n", tokens=None, name="generated_indices_rank_0.txt"):
        ids = np.arange(100) % 50 + 1 if tokens is None else np.asarray(tokens)
        (tmp_path / "train.bin").write_bytes(ids.astype("<u2").tobytes())
        (tmp_path / name).write_text(text)
        return tmp_path / "train.bin", tmp_path / name

    return make


def load(paths, *, lines=None, sequences=None, block_size=8, vocab_size=50304, iter_num=1000, first_step=None):
    return load_token_batch(
        *paths, lines=lines, sequences=sequences, block_size=block_size, vocab_size=vocab_size, iter_num=iter_num,
        first_step=first_step,
    )  # fmt: skip


def test_windows_and_targets(files):
    batch = load(files())
    assert batch.ids.dtype == batch.labels.dtype == torch.int64
    assert batch.ids.shape == batch.labels.shape == (4, 8)
    for row, start in enumerate((0, 10, 91, 20)):
        window = torch.arange(start, start + 9) % 50 + 1
        assert torch.equal(batch.ids[row], window[:8])
        assert torch.equal(batch.labels[row], window[1:])
    assert batch.steps == (1001, 1001, 1002, 1002)
    assert batch.line_of_sequence == (0, 0, 1, 1)
    assert batch.step_sequences == 2
    assert batch.attention_mask is None
    assert batch.position_ids is None
    assert (batch.num_sequences, batch.num_tokens) == (4, 8)
    assert [fact.role for fact in batch.files] == ["tokens", "indices"]
    assert batch.files[0].size_bytes == 200
    assert any("0-based" in note and "step 1001" in note for note in batch.notes)


def test_lines_sequences_and_steps(files):
    paths = files("0,1,2\n3,4,5\n6,7,8\n")
    batch = load(paths, lines=(1, 3), sequences=2)
    assert batch.ids[:, 0].tolist() == [4, 5, 7, 8]
    assert batch.steps == (1002, 1002, 1003, 1003)
    assert batch.line_of_sequence == (1, 1, 2, 2)
    assert batch.step_sequences == 3
    assert load(paths, lines=(2, 3), first_step=10).steps == (12, 12, 12)
    assert load(paths, lines=(0, 1), iter_num=None).steps == (None, None, None)
    assert load(paths, lines=(0, 1), iter_num=None, first_step=0).steps == (0, 0, 0)


@pytest.mark.parametrize(("start", "fits"), [(91, True), (92, False), (93, False)])
def test_last_window(files, refusal, start, fits):
    paths = files(f"0,10\n{start}\n")
    if fits:
        assert load(paths).num_sequences == 3
        return
    line = refusal(load, paths)
    assert "line 2 (index 1)" in line
    assert str(paths[1]) in line
    assert f"start {start}" in line
    assert "91" in line
    assert "100" in line


def test_window_is_checked_before_the_sequences_cut(files, refusal):
    assert "line 2 (index 1)" in refusal(load, files("0,10\n91,92,93\n"), lines=(1, 2), sequences=1)


def test_negative_start(files, refusal):
    line = refusal(load, files("0,10\n5,-1\n"))
    assert "line 2 (index 1)" in line
    assert "-1" in line


def test_file_shorter_than_a_window(files, refusal):
    line = refusal(load, files("0\n", tokens=range(8)))
    assert "8 tokens" in line
    assert load(files("0\n", tokens=range(9))).num_sequences == 1


def test_odd_byte_count(files, refusal):
    paths = files()
    paths[0].write_bytes(paths[0].read_bytes() + b"\0")
    assert "201 bytes" in refusal(load, paths)


@pytest.mark.parametrize("at", [3, 60, 99])
def test_id_outside_the_vocabulary(files, refusal, at):
    tokens = np.ones(100, dtype=np.int64)
    tokens[at] = 60000
    paths = files(tokens=tokens)
    line = refusal(load, paths)
    assert "60000" in line
    assert f"offset {at} " in line
    assert "50304" in line
    tokens[at] = 50303
    assert load(files(tokens=tokens)).num_sequences == 4


def test_32_bit_file_warns(files):
    wide = np.arange(1, 51, dtype="<u4").view("<u2")
    notes = load(files(tokens=wide)).notes
    assert any("warning" in note and "every second token" in note and "32-bit" in note for note in notes)


@pytest.mark.parametrize("tokens", [np.zeros(100), np.arange(100) + 1, np.arange(100) % 2])
def test_16_bit_files_do_not_warn(files, tokens):
    expected = bool((tokens[1::2] == 0).all() and tokens.any())
    assert any("32-bit" in note for note in load(files(tokens=tokens)).notes) is expected


def test_blank_lines(files, refusal):
    assert load(files("0,10\n5,6\n\n \n")).num_sequences == 4
    assert load(files("0,10\r\n5,6\r\n")).num_sequences == 4
    line = refusal(load, files("0,10\n\n5,6\n"), lines=(0, 1))
    assert "line 2 (index 1)" in line
    assert "blank" in line


@pytest.mark.parametrize("text", ["0,ten\n", "0;10\n", "0,,10\n", "0,1.5\n", "0,1_0\n", "0x10\n", "0,\n"])
def test_text_that_is_no_integer(files, refusal, text):
    line = refusal(load, files(text))
    assert "line 1 (index 0)" in line
    assert "not an integer" in line


def test_spaces_are_no_error(files):
    assert load(files(" 0 , 10 \n")).num_sequences == 2


@pytest.mark.parametrize("lines", [(0, 0), (1, 1), (2, 1), (-1, 1)])
def test_empty_range(files, refusal, lines):
    assert "selects nothing" in refusal(load, files(), lines=lines)


def test_range_beyond_the_file(files, refusal):
    line = refusal(load, files(), lines=(1, 3))
    assert "1:3" in line
    assert "2 lines" in line


@pytest.mark.parametrize("sequences", [0, -1, 3])
def test_more_sequences_than_the_line_holds(files, refusal, sequences):
    line = refusal(load, files(), sequences=sequences)
    assert "line 1 (index 0)" in line
    assert "1 to 2" in line


def test_lines_of_different_length_are_noted(files):
    batch = load(files("0,1\n2,3,4\n"))
    assert batch.step_sequences == 3
    assert any("2 to 3 sequences" in note for note in batch.notes)


def test_index_file_of_another_rank_is_noted(files):
    assert any("rank 1" in note for note in load(files(name="generated_indices_rank_1.txt")).notes)
    assert not any("rank" in note for note in load(files()).notes)


def test_unusable_files(files, refusal, tmp_path):
    tokens, indices = files()
    assert "no such file" in refusal(load, (tmp_path / "none.bin", indices))
    assert "no such file" in refusal(load, (tokens, tmp_path / "none.txt"))
    assert "directory" in refusal(load, (tmp_path, indices))
    indices.write_bytes(b"\xff\xfe\x00,1")
    assert "not a text file" in refusal(load, (tokens, indices))
    indices.write_text("\n\n")
    assert "no window starts" in refusal(load, (tokens, indices))
    indices.write_text("")
    assert "empty" in refusal(load, (tokens, indices))
    indices.write_text("0\n")
    tokens.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(load, (tokens, indices))


@pytest.mark.parametrize(("folder", "iter_num"), [("diverging-gpt", 1000), ("healthy-gpt", 800)])
def test_real_batches(shared_data, folder, iter_num):
    root = shared_data(folder)
    tokens = np.fromfile(root / "train.bin", dtype="<u2")
    paths = (root / "train.bin", root / "generated_indices_rank_0.txt")
    batch = load(paths, lines=(7, 8), sequences=2, block_size=512, vocab_size=256, iter_num=iter_num)
    start = int(paths[1].read_text().splitlines()[7].split(",")[1])
    assert batch.ids[1].tolist() == tokens[start : start + 512].tolist()
    assert batch.labels[1].tolist() == tokens[start + 1 : start + 513].tolist()
    assert batch.steps == (iter_num + 8,) * 2
    assert batch.step_sequences == 32
    assert len(batch.notes) == 1
    whole = load(paths, block_size=512, vocab_size=256, iter_num=iter_num)
    assert whole.num_sequences == 256
