"""`bf16forensics localize` on Hugging Face directories, and with recipes that leave something out."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

Run = Callable[..., Any]
LAYERS, HEADS, KV_HEADS, TOKENS, SEQUENCES = 2, 4, 2, 12, 18


def tiny(**changes: Any) -> Any:
    torch.manual_seed(1)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes}))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untied")
    tiny().save_pretrained(path)
    return path


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    ids = torch.randint(0, 64, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(2))
    save_file({"input_ids": ids, "steps": torch.arange(SEQUENCES) // 6}, tmp_path / "batch.safetensors")
    return tmp_path / "batch.safetensors"


def document(result: Any) -> dict[str, Any]:
    assert result.stdout.endswith("}\n"), result.stderr
    return dict(json.loads(result.stdout))


def copied(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> Path:
    """The directory with other tensors and other fields of config.json."""
    target.mkdir()
    fields = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(fields))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def one_line(result: Any, *words: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.strip().count("\n") == 0
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("activations", ["amp-bf16", "fp32"])
def test_a_directory_is_localized(run_cli: Run, untied: Path, batch: Path, activations: str) -> None:
    args = ["localize", untied, "--batch", batch, "--activations", activations, "--json"]
    built = document(run_cli(args))
    inputs = built["inputs"]
    assert (inputs["kind"], inputs["num_heads"], inputs["num_kv_heads"]) == ("hf", HEADS, KV_HEADS)
    assert inputs["activations"] == activations
    assert [item["role"] for item in inputs["files"]] == ["config", "checkpoint", "batch"]
    assert (inputs["layer_windows"], inputs["no_gradient"]) == ([None] * LAYERS, None)
    assert any("FP32" in note and "rotary" in note for note in inputs["notes"])
    assert [head["kv_head"] for head in built["heads"]] == [0, 0, 1, 1] * LAYERS
    for head in built["heads"]:
        assert head["rows"] == SEQUENCES * TOKENS
        assert head["dw_q"]["norm"] > 0
        assert head["w_q_spectral_norm"] > 0
    with torch.no_grad():
        model = transformers.LlamaForCausalLM.from_pretrained(untied)
        ids = load_file(batch)["input_ids"]
        own = float(model(input_ids=ids, labels=ids).loss)
    # BF16 roundings of a model whose logits are of order 1.
    assert inputs["loss"] == pytest.approx(own, rel=3e-3)
    threads = document(run_cli([*args, "--threads", "2"]))
    one = document(run_cli([*args, "--threads", "1"]))
    assert threads["heads"] == one["heads"] == built["heads"]


def test_w_q_is_the_rows_of_the_head(run_cli: Run, untied: Path, batch: Path) -> None:
    built = document(run_cli(["localize", untied, "--batch", batch, "--sequences", "1", "--json"]))
    weight = load_file(untied / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    for head in range(HEADS):
        found = built["heads"][HEADS + head]["w_q_spectral_norm"]
        assert found == pytest.approx(float(torch.linalg.matrix_norm(weight[8 * head : 8 * head + 8].double(), 2)))


def test_three_states_of_the_output_head(run_cli: Run, untied: Path, batch: Path, tmp_path: Path) -> None:
    """Tied without a head runs; untied without one gives forward evidence and exit 2; two different ones are noted."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    tied = copied(untied, tmp_path / "tied", drop, tie_word_embeddings=True)
    built = document(run_cli(["localize", tied, "--batch", batch, "--json"]))
    assert built["heads"][0]["delta_defect"] is not None
    assert math.isfinite(built["inputs"]["loss"])

    headless = copied(untied, tmp_path / "headless", drop)
    result = run_cli(["localize", headless, "--batch", batch, "--json"])
    assert result.exit_code == 2
    built = document(result)
    assert built["verdict"] == "cannot judge"
    assert built["inputs"]["no_gradient"].startswith("no output head")
    assert built["inputs"]["loss"] == "nan"
    assert "BF404" in [finding["code"] for finding in built["findings"]]
    for head in built["heads"]:
        assert (head["verdict"], head["code"]) == ("cannot judge", "BF404")
        assert head["reason"].startswith("no output head")
        assert (head["delta_err"], head["delta_defect"], head["dw_q"]) == (None, None, None)
        assert head["output_err"]["max_abs"] > 0
        assert head["w_q_spectral_norm"] > 0
        assert head["rows"] == SEQUENCES * TOKENS
    text = run_cli(["localize", headless, "--batch", batch])
    assert text.exit_code == 2
    assert "no output head" in text.stdout

    both = copied(untied, tmp_path / "both", lambda _: None, tie_word_embeddings=True)
    result = run_cli(["localize", both, "--batch", batch, "--json"])
    assert result.exit_code != 2
    assert len([note for note in document(result)["inputs"]["notes"] if "lm_head" in note]) == 1


def test_what_is_wrong_with_a_directory_is_one_line(run_cli: Run, untied: Path, batch: Path, tmp_path: Path) -> None:
    def localize(path: Path, *more: object) -> Any:
        return run_cli(["localize", path, "--batch", batch, *more])

    quantised = copied(untied, tmp_path / "q", lambda _: None, quantization_config={"quant_method": "gptq", "bits": 4})
    one_line(localize(quantised), "gptq")
    one_line(localize(copied(untied, tmp_path / "c", lambda _: None, clip_qkv=8.0)), "clip_qkv")
    one_line(localize(untied, "--n-head", "4"), "--n-head")
    (tmp_path / "empty").mkdir()
    one_line(localize(tmp_path / "empty"), "config.json")

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]

    one_line(localize(copied(untied, tmp_path / "m", lose)), "model.layers.1.self_attn.k_proj.weight")
    old = copied(untied, tmp_path / "bin", lambda _: None)
    torch.save(load_file(old / "model.safetensors"), old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    one_line(localize(old), "--allow-bin")
    assert localize(old, "--allow-bin", "--sequences", "1").exit_code == 0


def test_options_of_the_other_input_are_refused(run_cli: Run, tmp_path: Path) -> None:
    save_file({name: torch.zeros(1, 1, 4, 8) for name in ("q", "k", "v", "do")}, tmp_path / "r.safetensors")
    record = ["localize", "--record", tmp_path / "r.safetensors", "--layout", "bhtd"]
    one_line(run_cli([*record, "--activations", "fp32"]), "--activations")
    one_line(run_cli([*record, "--allow-bin"]), "--allow-bin")


def test_a_case_of_a_rotated_model_keeps_no_x(run_cli: Run, untied: Path, batch: Path, tmp_path: Path) -> None:
    case = tmp_path / "case"
    built = document(run_cli(["localize", untied, "--batch", batch, "-o", case, "--json"]))
    kept = case / "tensors" / f"{built['ranking'][0]}.safetensors"
    assert "x" not in load_file(kept)
    again = document(run_cli(["localize", "--record", kept, "--json"]))
    assert [head["code"] for head in again["heads"]] == ["BF906"]


def test_a_recipe_that_anchors_elsewhere_counts_no_ones(run_cli: Run, untied: Path, batch: Path) -> None:
    args = ["localize", untied, "--batch", batch, "--recipe", "fa4"]
    built = document(run_cli([*args, "--json"]))
    assert "BF104" in [finding["code"] for finding in built["findings"]]
    assert {head["ones"] for head in built["heads"]} == {None}
    assert {head["rows_repeated_max"] for head in built["heads"]} == {None}
    assert all(head["dw_q"]["norm"] > 0 for head in built["heads"])
    assert "anchored within 2^8" in run_cli(args).stdout


def test_a_forward_only_recipe(run_cli: Run, untied: Path, batch: Path) -> None:
    args = ["localize", untied, "--batch", batch, "--recipe", "fa3-fp8"]
    one_line(run_cli(args), "backward pass", "--activations fp32")
    result = run_cli([*args, "--activations", "fp32", "--json"])
    built = document(result)
    assert result.exit_code == 0
    assert {head["code"] for head in built["heads"]} == {"BF905"}
    assert "forward pass only" in built["inputs"]["no_gradient"]
    assert all(head["output_err"]["max_abs"] > 0 for head in built["heads"])
