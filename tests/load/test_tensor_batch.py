"""Recorded batches kept as tensors."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bf16forensics.load.tensor_batch import load_tensor_batch

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def load(path, *, block_size=16, vocab_size=11, sequences=None):
    return load_tensor_batch(path, block_size=block_size, vocab_size=vocab_size, sequences=sequences)


@pytest.fixture
def write(tmp_path):
    def write(kind="pt", **entries):
        path = tmp_path / f"batch.{kind}"
        if kind == "pt":
            torch.save(entries, path)
        elif kind == "npz":
            np.savez(path, **{name: value.numpy() for name, value in entries.items()})
        else:
            save_file({name: value.contiguous() for name, value in entries.items()}, path)
        return path

    return write


@pytest.mark.parametrize("kind", ["pt", "npz", "safetensors"])
@pytest.mark.parametrize("name", ["ids", "input_ids"])
def test_containers(write, kind, name):
    batch = load(write(kind, **{name: IDS}))
    assert torch.equal(batch.ids, IDS)
    assert batch.labels.tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]
    assert batch.steps == (None, None)
    assert batch.line_of_sequence == (None, None)
    assert batch.step_sequences == 2
    assert batch.files[0].role == "batch"
    assert any("next token" in note for note in batch.notes)


def test_ids_alone(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([3, 1, 2], dtype=np.uint16))
    batch = load(tmp_path / "ids.npy")
    assert batch.ids.tolist() == [[3, 1, 2]]
    assert batch.labels.tolist() == [[1, 2, -100]]
    torch.save(IDS, tmp_path / "ids.pt")
    assert torch.equal(load(tmp_path / "ids.pt").ids, IDS)


def test_labels_are_shifted_and_targets_are_not(write, refusal):
    other = torch.tensor([[9, -100, 8, 7], [1, 1, -100, 2]])
    shifted = load(write(ids=IDS, labels=other))
    assert shifted.labels.tolist() == [[-100, 8, 7, -100], [1, -100, 2, -100]]
    assert any("Hugging Face" in note for note in shifted.notes)
    aligned = load(write(ids=IDS, targets=other))
    assert torch.equal(aligned.labels, other)
    assert any("aligned" in note for note in aligned.notes)
    line = refusal(load, write(ids=IDS, targets=other, labels=other))
    assert "labels" in line
    assert "targets" in line


def test_mask_keeps_padding_out_of_the_default_labels(write):
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    batch = load(write(ids=IDS, attention_mask=mask))
    assert torch.equal(batch.attention_mask, mask.bool())
    assert batch.labels.tolist() == [[-100, 3, 4, -100], [6, 7, -100, -100]]
    given = load(write(ids=IDS, attention_mask=mask.float(), targets=IDS))
    assert torch.equal(given.labels, IDS)
    assert torch.equal(given.attention_mask, mask.bool())


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 3), "[2, 3]"),
        (torch.full((2, 4), 2), "0 and 1"),
        (torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), "sequence 1 is padding only"),
        (torch.ones(2, 1, 4, 4), "[2, 4]"),
    ],
)
def test_unusable_masks(write, refusal, mask, words):
    assert words in refusal(load, write(ids=IDS, attention_mask=mask))


def test_positions(write, refusal):
    positions = torch.tensor([[0, 0, 1, 2], [4, 5, 6, 15]])
    assert torch.equal(load(write(ids=IDS, position_ids=positions)).position_ids, positions)
    row = torch.tensor([0, 1, 2, 3])
    assert torch.equal(load(write(ids=IDS, position_ids=row)).position_ids, row.expand(2, 4))
    positions[1, 2] = 16
    line = refusal(load, write(ids=IDS, position_ids=positions))
    assert "sequence 1, position 2" in line
    assert "16" in line


def test_steps_and_sequences(write, refusal):
    ids = torch.arange(10).reshape(5, 2)
    path = write(ids=ids, steps=torch.tensor([7, 7, 7, 8, 8]))
    batch = load(path)
    assert batch.steps == (7, 7, 7, 8, 8)
    assert batch.step_sequences == 3
    cut = load(path, sequences=1)
    assert cut.ids[:, 0].tolist() == [0, 6]
    assert cut.steps == (7, 8)
    assert cut.step_sequences == 3
    assert load(write(ids=ids, steps=torch.tensor(9))).steps == (9,) * 5
    assert "5 sequences" in refusal(load, write(ids=ids, steps=torch.tensor([1, 2])))
    path = write(ids=ids, steps=torch.tensor([7, 7, 7, 8, 8]))
    for sequences in (0, 3):
        assert "--sequences must be 1 to 2" in refusal(load, path, sequences=sequences)
    assert load(write(ids=ids), sequences=2).num_sequences == 2


@pytest.mark.parametrize(("value", "inside"), [(10, True), (11, False), (-1, False)])
def test_id_range(write, refusal, value, inside):
    ids = IDS.clone()
    ids[1, 2] = value
    path = write(ids=ids)
    if inside:
        assert load(path).num_sequences == 2
        return
    line = refusal(load, path)
    assert "sequence 1, position 2" in line
    assert str(value) in line
    assert "11" in line


@pytest.mark.parametrize(("value", "inside"), [(-100, True), (0, True), (11, False), (-1, False)])
@pytest.mark.parametrize("name", ["labels", "targets"])
def test_label_range(write, refusal, name, value, inside):
    labels = IDS.clone()
    labels[0, 3] = value
    path = write(ids=IDS, **{name: labels})
    if inside:
        assert load(path).num_sequences == 2
    else:
        assert "sequence 0, position 3" in refusal(load, path)


def test_length(write, refusal):
    assert load(write(ids=torch.ones(1, 16, dtype=torch.int64))).num_tokens == 16
    line = refusal(load, write(ids=torch.ones(1, 17, dtype=torch.int64)))
    assert "17" in line
    assert "16" in line
    one = torch.ones(1, 1, dtype=torch.int64)
    assert load(write(ids=one, targets=one)).num_tokens == 1


def test_sequence_without_labels(write, refusal):
    labels = IDS.clone()
    labels[1] = -100
    assert "sequence 1 has no label" in refusal(load, write(ids=IDS, targets=labels))
    assert "sequence 0 has no label" in refusal(load, write(ids=torch.ones(1, 1, dtype=torch.int64)))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0,)])
def test_empty(write, refusal, shape):
    assert "empty" in refusal(load, write(ids=torch.ones(shape, dtype=torch.int64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_ids_that_are_no_integers(write, refusal, dtype):
    assert str(dtype).removeprefix("torch.") in refusal(load, write(ids=IDS.to(dtype)))


def test_wrong_names_and_shapes(write, refusal):
    line = refusal(load, write(tokens=IDS, a=IDS, b=IDS, c=IDS))
    assert "tokens, a, b and 1 more" in line
    assert "both" in refusal(load, write(ids=IDS, input_ids=IDS))
    assert "[1, 2, 4]" in refusal(load, write(ids=IDS[None]))
    assert "[2, 3]" in refusal(load, write(ids=IDS, labels=IDS[:, :3]))


def test_unused_entries_are_noted(write):
    assert any("loss_weight" in note for note in load(write(ids=IDS, loss_weight=torch.ones(2))).notes)
