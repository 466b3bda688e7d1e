"""Raw records: containers, layouts, storage formats, shapes."""

import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bf16forensics.load.records import load_record

CODES = np.array([16256, 16128, 49178], dtype=np.uint16)


def bf16_codes(tensor):
    return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def as_numpy(entries):
    return {
        name: value.float().numpy() if value.is_floating_point() else value.numpy() for name, value in entries.items()
    }


@pytest.fixture
def write(tmp_path):
    def write(entries, kind="pt"):
        path = tmp_path / f"record.{kind}"
        if kind == "pt":
            torch.save(entries, path)
        elif kind == "npz":
            np.savez(path, **as_numpy(entries))
        elif kind == "safetensors":
            save_file({name: value.contiguous() for name, value in entries.items()}, path)
        else:
            path = tmp_path / "folder"
            path.mkdir(exist_ok=True)
            for name, value in as_numpy(entries).items():
                np.save(path / f"{name}.npy", value)
        return path

    return write


@pytest.mark.parametrize("kind", ["pt", "npz", "safetensors", "folder"])
def test_containers_agree(write, record, kind):
    loaded = load_record(write(record, kind), layout="bhtd")
    for name, expected in record.items():
        found = getattr(loaded, name)
        assert found.dtype == torch.float32
        assert torch.equal(found, expected.float()), name
    assert (loaded.storage, loaded.layout, loaded.notes, loaded.unused_tensors) == ("bf16", "bhtd", (), ())
    assert (loaded.x, loaded.w_q, loaded.w_k, loaded.mask, loaded.scale) == (None,) * 5
    assert loaded.facts.role == "record"
    assert loaded.facts.size_bytes > 0


def test_file_hash(write, record):
    path = write(record)
    assert load_record(path, layout="bhtd").facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_folder_hash_depends_on_names_and_bytes(write, record, tmp_path):
    path = write(record, "folder")
    first = load_record(path, layout="bhtd").facts.sha256
    (path / "readme.md").write_text("ignored")
    assert load_record(path, layout="bhtd").facts.sha256 == first
    k, v = np.load(path / "k.npy"), np.load(path / "v.npy")
    np.save(path / "k.npy", k[..., :6])
    np.save(path / "v.npy", v)
    np.save(path / "q.npy", np.load(path / "q.npy")[..., :6])
    swapped = load_record(path, layout="bhtd").facts.sha256
    (path / "k.npy").rename(path / "t.npy")
    (path / "v.npy").rename(path / "k.npy")
    (path / "t.npy").rename(path / "v.npy")
    assert len({first, swapped, load_record(path, layout="bhtd").facts.sha256}) == 3


@pytest.mark.parametrize("kind", ["pt", "npz", "safetensors", "folder"])
def test_layouts(write, record, kind):
    turned = {name: value.transpose(1, 2) for name, value in record.items()}
    loaded = load_record(write(turned, kind), layout="bthd")
    assert loaded.layout == "bthd"
    for name, expected in record.items():
        assert torch.equal(getattr(loaded, name), expected.float()), name


def test_one_file_read_both_ways(write):
    """The same tensors are 8 heads of 4 tokens or 4 heads of 8 tokens: only the declared layout tells."""
    zeros = torch.zeros(1, 8, 4, 16)
    path = write(dict.fromkeys(("q", "k", "v", "do"), zeros))
    assert load_record(path, layout="bhtd").q.shape == (1, 8, 4, 16)
    assert load_record(path, layout="bthd").q.shape == (1, 4, 8, 16)


def test_layout_is_never_guessed(write, record, refusal):
    line = refusal(load_record, write(record))
    assert "--layout" in line
    assert "[2, 4, 5, 8]" in line
    assert "bhtd or bthd" in refusal(load_record, write(record), layout="bshd")


def test_stored_layouts(record, tmp_path, refusal):
    torch.save(record | {"layout": "bhtd"}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", layout="bhtd", **as_numpy(record))
    save_file(record, tmp_path / "a.safetensors", metadata={"layout": "BHTD"})
    (tmp_path / "folder").mkdir()
    for name, value in as_numpy(record).items():
        np.save(tmp_path / "folder" / f"{name}.npy", value)
    (tmp_path / "folder" / "layout.txt").write_text("bhtd\n")
    for name in ("a.pt", "a.npz", "a.safetensors", "folder"):
        assert load_record(tmp_path / name).layout == "bhtd"
        assert load_record(tmp_path / name, layout="bhtd").layout == "bhtd"
        line = refusal(load_record, tmp_path / name, layout="bthd")
        assert "bthd" in line
        assert "bhtd" in line
    torch.save(record | {"layout": "heads first"}, tmp_path / "b.pt")
    assert "heads first" in refusal(load_record, tmp_path / "b.pt")


def single(values):
    return values.reshape(1, 1, -1, 1)


@pytest.mark.parametrize("dtype", ["|V2", "<u2"])
@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_bf16_codes_only_when_told_so(tmp_path, refusal, dtype, kind):
    arrays = {name: single(CODES.view(dtype)) for name in ("q", "k", "v", "do")}
    if kind == "npz":
        path = tmp_path / "a.npz"
        np.savez(path, **arrays)
    else:
        path = tmp_path / "a"
        path.mkdir()
        for name, value in arrays.items():
            np.save(path / f"{name}.npy", value)
    for given in (None, "fp32", "fp16"):
        line = refusal(load_record, path, layout="bhtd", dtype=given)
        assert "'q'" in line
        assert "--dtype bf16" in line
    loaded = load_record(path, layout="bhtd", dtype="bf16")
    assert loaded.q.flatten().tolist() == [1.0, 0.5, -2.40625]
    assert loaded.notes == ()


def test_sidecars_tell_what_codes_are(tmp_path, refusal):
    for name in ("q", "k", "v"):
        np.save(tmp_path / f"{name}.npy", single(CODES))
    (tmp_path / "q.dtype").write_text("bf16\n")
    assert "'k'" in refusal(load_record, tmp_path, layout="bhtd")
    (tmp_path / "dtypes.json").write_text(json.dumps({"k": "bf16", "v": "bf16"}))
    loaded = load_record(tmp_path, layout="bhtd")
    assert loaded.v.flatten().tolist() == [1.0, 0.5, -2.40625]
    (tmp_path / "dtypes.json").write_text("[")
    assert "dtypes.json" in refusal(load_record, tmp_path, layout="bhtd")


def test_safetensors_bf16_is_direct(tmp_path):
    values = single(torch.tensor([1.0, 0.5, -2.40625], dtype=torch.bfloat16))
    save_file({name: values.clone() for name in ("q", "k", "v")}, tmp_path / "a.safetensors")
    loaded = load_record(tmp_path / "a.safetensors", layout="bhtd")
    assert loaded.q.flatten().tolist() == [1.0, 0.5, -2.40625]
    assert loaded.do is None
    assert any("no do" in note for note in loaded.notes)


def test_integers_are_no_values(write, record, refusal):
    line = refusal(load_record, write(record | {"q": record["q"].to(torch.int16)}), layout="bhtd", dtype="bf16")
    assert "'q'" in line
    assert "int16" in line


def test_mixed_capture_names_the_changed_element(write, record):
    k = record["k"].float()
    k[0, 1, 2, 3] = 1 + 2**-12
    loaded = load_record(write(record | {"k": k}), layout="bhtd")
    assert loaded.notes == (f"k: 1 element changed by the cast to BF16 (largest error {2**-12:.3g})",)
    assert loaded.k[0, 1, 2, 3] == 1.0
    kept = load_record(write(record | {"k": k}), layout="bhtd", dtype="fp32")
    assert kept.notes == ()
    assert kept.storage == "fp32"
    assert torch.equal(kept.k, k)


def test_fp16_capture_states_its_cast_error(write):
    value = torch.full((1, 1, 1, 2), 0.0999755859375, dtype=torch.float16)
    loaded = load_record(write({"q": value, "k": value.clone(), "v": value.clone()}), layout="bhtd")
    assert loaded.q.flatten().tolist() == [0.10009765625] * 2
    assert "q: 2 elements changed by the cast to BF16 (largest error 0.000122)" in loaded.notes
    assert (
        load_record(write({"q": value, "k": value, "v": value}), layout="bhtd", dtype="fp16").q[0, 0, 0, 0]
        == value[0, 0, 0, 0].float()
    )


def test_fp64_is_rounded_once(write):
    # Through FP32 this would first become the tie 1 + 2^-8 and then 1.
    value = torch.full((1, 1, 1, 1), 1 + 2**-8 + 2**-40, dtype=torch.float64)
    assert load_record(write({"q": value, "k": value, "v": value}), layout="bhtd").q.item() == 1 + 2**-7


def test_strided_tensors(write, record):
    base = record["q"].transpose(2, 3).contiguous().transpose(2, 3)
    assert not base.is_contiguous()
    loaded = load_record(write(record | {"q": base}), layout="bhtd")
    assert torch.equal(loaded.q, record["q"].float())
    assert loaded.notes == ()


def test_slice_that_carries_its_storage(write, record):
    large = torch.zeros(100, *record["k"].shape[1:], dtype=torch.bfloat16)
    large[3:5] = record["k"]
    loaded = load_record(write(record | {"k": large[3:5]}), layout="bhtd")
    assert torch.equal(loaded.k, record["k"].float())
    assert len(loaded.notes) == 1
    assert loaded.notes[0].startswith("size: k ")
    assert str(large.numel() * 2) in loaded.notes[0]


def test_parts_of_one_storage_need_no_size_note(write):
    qkv = torch.zeros(1, 3, 4, 8)
    assert load_record(write({"q": qkv[:, :1], "k": qkv[:, 1:2], "v": qkv[:, 2:]}), layout="bhtd").notes[1:] == ()


def test_non_finite_values_are_kept(write, record):
    k = record["k"].clone()
    k[0, 0, 0, 0], k[0, 0, 0, 1] = float("nan"), float("inf")
    loaded = load_record(write(record | {"k": k}), layout="bhtd")
    assert loaded.notes == ()
    assert int(loaded.k.isnan().sum()) == 1
    assert int(loaded.k.isinf().sum()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": (2, 2, 7, 4)}, ["q and k", "[2, 4, 5, 8]", "[2, 2, 7, 4]"]),
        ({"v": (2, 2, 6, 6)}, ["k and v", "[2, 2, 6, 6]"]),
        ({"v": (2, 1, 7, 6)}, ["k and v", "[2, 1, 7, 6]"]),
        ({"do": (2, 4, 5, 8)}, ["'do'", "[2, 4, 5, 8]", "[2, 4, 5, 6]"]),
        ({"do": (2, 4, 4, 6)}, ["'do'", "[2, 4, 4, 6]"]),
        ({"k": (2, 3, 7, 8), "v": (2, 3, 7, 6)}, ["4 query heads", "3 key/value heads"]),
        ({"k": (1, 2, 7, 8), "v": (1, 2, 7, 6)}, ["q and k"]),
        ({"q": (2, 4, 0, 8)}, ["'q' is empty"]),
        ({"k": (2, 2, 0, 8), "v": (2, 2, 0, 6)}, ["'k' is empty"]),
        ({"q": (0, 4, 5, 8)}, ["'q' is empty"]),
        ({"q": (4, 5, 8)}, ["4 axes", "[4, 5, 8]"]),
    ],
)
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_shapes_that_do_not_fit(write, record, refusal, change, words, layout):
    entries = record | {name: torch.zeros(shape) for name, shape in change.items()}
    if layout == "bthd":
        entries = {n: t.transpose(1, 2) if t.dim() == 4 else t for n, t in entries.items()}
        words = [word for word in words if "[" not in word]
    line = refusal(load_record, write(entries), layout=layout)
    for word in words:
        assert word in line
    assert "record.pt" in line


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_grouped_heads(write, heads, kv):
    entries = {"q": torch.ones(1, heads, 2, 2), "k": torch.ones(1, kv, 2, 2), "v": torch.ones(1, kv, 2, 2)}
    assert load_record(write(entries), layout="bhtd").k.shape[1] == kv


def test_single_token(write):
    entries = {name: torch.ones(1, 1, 1, 2) for name in ("q", "k", "v", "do")}
    assert load_record(write(entries), layout="bhtd").q.shape == (1, 1, 1, 2)


def test_missing_tensors(write, record, refusal):
    line = refusal(load_record, write({"query": record["q"], "k": record["k"]}), layout="bhtd")
    assert "q, v" in line
    assert "query, k" in line
    line = refusal(load_record, write(record | {"q": np.zeros(3)}), layout="bhtd")
    assert "q (numpy" in line


def test_extras(write, record):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 16, generator=generator)
    w_q, w_k = torch.randn(32, 16, generator=generator), torch.randn(16, 16, generator=generator)
    loaded = load_record(write(record | {"x": x, "w_q": w_q, "w_k": w_k, "rope": x, "scale": 0.25}), layout="bhtd")
    assert torch.equal(loaded.x, x)
    assert torch.equal(loaded.w_q, w_q)
    assert torch.equal(loaded.w_k, w_k)
    assert loaded.scale == 0.25
    assert loaded.unused_tensors == ("rope",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": (2, 4, 16)}, ["'x'", "[2, 5, C]"]),
        ({"x": (2, 5)}, ["'x'"]),
        ({"w_q": (16, 32)}, ["'w_q'", "[32, 16]", "transposed"]),
        ({"w_q": (31, 16)}, ["'w_q'", "[31, 16]", "[32, 16]"]),
        ({"w_k": (32, 16)}, ["'w_k'", "[16, 16]"]),
        ({"w_k": (16, 15)}, ["'w_k'", "[16, 15]"]),
    ],
)
def test_extras_that_do_not_fit(write, record, refusal, change, words):
    shapes = {"x": (2, 5, 16), "w_q": (32, 16), "w_k": (16, 16)} | change
    line = refusal(load_record, write(record | {n: torch.zeros(s) for n, s in shapes.items()}), layout="bhtd")
    for word in words:
        assert word in line
    assert ("transposed" in line) == ("transposed" in words)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (1, 4, 5, 7), (2, 4, 5, 7)])
def test_masks(write, record, shape):
    keep = torch.arange(int(np.prod(shape))).reshape(shape) % 3 > 0
    for mask in (keep, keep.to(torch.int64), keep.to(torch.uint8)):
        loaded = load_record(write(record | {"mask": mask}), layout="bhtd")
        assert loaded.mask.dtype == torch.bool
        assert torch.equal(loaded.mask, keep if keep.dim() == 4 else keep[None, None])
    additive = torch.where(keep, 0.0, torch.finfo(torch.float16).min).half()
    loaded = load_record(write(record | {"mask": additive}), layout="bhtd")
    assert loaded.mask.dtype == torch.float16
    assert loaded.mask.dim() == 4


@pytest.mark.parametrize("mask", [torch.ones(7, 5), torch.ones(2, 5, 7), torch.ones(3, 1, 5, 7), torch.full((5, 7), 2)])
def test_unusable_masks(write, record, refusal, mask):
    assert "'mask'" in refusal(load_record, write(record | {"mask": mask}), layout="bhtd")


def test_padding_and_documents(write, record, refusal):
    padding = torch.ones(2, 7, dtype=torch.int64)
    padding[0, :2] = 0
    documents = torch.arange(14).reshape(2, 7) // 3
    loaded = load_record(write(record | {"key_padding": padding, "document_ids": documents}), layout="bhtd")
    assert torch.equal(loaded.key_padding, padding.bool())
    assert torch.equal(loaded.document_ids, documents)
    shared = load_record(write(record | {"key_padding": padding[0].bool()}), layout="bhtd")
    assert torch.equal(shared.key_padding, padding[:1].bool().expand(2, 7))
    for name, value in (
        ("key_padding", padding[:, :5]),
        ("key_padding", padding * 2),
        ("document_ids", documents.float()),
        ("document_ids", documents[:, :5]),
    ):
        assert f"'{name}'" in refusal(load_record, write(record | {name: value}), layout="bhtd")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_unusable_scales(write, record, refusal, scale):
    assert "'scale'" in refusal(load_record, write(record | {"scale": scale}), layout="bhtd")


def test_unknown_storage_format(write, record, refusal):
    assert "bf16, fp16, fp32" in refusal(load_record, write(record), layout="bhtd", dtype="fp8")
