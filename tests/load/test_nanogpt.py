"""nanoGPT checkpoints: names, shapes, dtypes, buffers, the tied head."""

import argparse
import hashlib
import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bf16forensics.load.nanogpt import load_nanogpt


def save(path, state, model_args=None, **extra):
    tree = {"model": state, "iter_num": 40, **extra}
    if model_args is not None:
        tree["model_args"] = model_args
    torch.save(tree, path)
    return path


def layer_tensors(checkpoint):
    layers = [checkpoint.layer(i) for i in range(checkpoint.config.n_layer)]
    named = {f"{i}.{f}": getattr(layer, f) for i, layer in enumerate(layers) for f in layer.__dataclass_fields__}
    return named | {"wte": checkpoint.wte, "wpe": checkpoint.wpe, "ln_f": checkpoint.ln_f_weight,
                    "ln_f_bias": checkpoint.ln_f_bias, "head": checkpoint.lm_head}  # fmt: skip


def assert_same(a, b):
    left, right = layer_tensors(a), layer_tensors(b)
    for name, tensor in left.items():
        other = right[name]
        assert (tensor is None) == (other is None), name
        assert tensor is None or torch.equal(tensor, other), name


@pytest.mark.parametrize("bias", [False, True])
def test_round_trip(tmp_path, make_state, model_args, bias):
    state = make_state(bias=bias)
    path = save(tmp_path / "a.pt", state, model_args | {"bias": bias})
    loaded = load_nanogpt(path)
    config = loaded.config
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size, config.vocab_size) == (2, 2, 8, 16, 11)
    assert config.bias is bias
    assert (loaded.iter_num, loaded.weight_dtype, loaded.tied) == (40, "fp32", True)
    assert loaded.notes == ()
    assert loaded.unused_tensors == ()
    assert loaded.path == str(path)
    assert loaded.size_bytes == path.stat().st_size
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    layer = loaded.layer(1)
    for field, name in {
        "ln_1_weight": "ln_1.weight", "ln_1_bias": "ln_1.bias", "c_attn_weight": "attn.c_attn.weight",
        "c_attn_bias": "attn.c_attn.bias", "attn_proj_weight": "attn.c_proj.weight",
        "attn_proj_bias": "attn.c_proj.bias", "ln_2_weight": "ln_2.weight", "ln_2_bias": "ln_2.bias",
        "fc_weight": "mlp.c_fc.weight", "fc_bias": "mlp.c_fc.bias", "mlp_proj_weight": "mlp.c_proj.weight",
        "mlp_proj_bias": "mlp.c_proj.bias",
    }.items():  # fmt: skip
        found, expected = getattr(layer, field), state.get(f"transformer.h.1.{name}")
        assert (found is None) == (expected is None), field
        assert found is None or torch.equal(found, expected), field
    assert torch.equal(loaded.wpe, state["transformer.wpe.weight"])
    assert torch.equal(loaded.lm_head, state["transformer.wte.weight"])


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("bare", [False, True])
def test_five_spellings_are_one_checkpoint(tmp_path, make_state, model_args, prefix, bare):
    clean = load_nanogpt(save(tmp_path / "clean.pt", make_state(), model_args))
    state = {prefix + name: value for name, value in make_state().items()}
    if bare:
        torch.save(state, tmp_path / "a.pt")
        loaded = load_nanogpt(tmp_path / "a.pt", n_head=2)
    else:
        loaded = load_nanogpt(save(tmp_path / "a.pt", state, model_args))
    assert_same(clean, loaded)
    assert loaded.unused_tensors == ()


def test_conflicting_names_are_refused(tmp_path, make_state, model_args, refusal):
    state = make_state()
    state["_orig_mod.transformer.ln_f.weight"] = state["transformer.ln_f.weight"] + 1
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args))
    assert "'transformer.ln_f.weight'" in line
    assert "'_orig_mod.transformer.ln_f.weight'" in line


def test_nothing_matches(tmp_path, refusal, model_args):
    state = {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(8, 8) for i in range(5)}
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args))
    for index in range(3):
        assert f"model.layers.{index}.self_attn.q_proj.weight" in line
    assert "and 2 more" in line
    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.ln_f.weight"):
        assert name in line


@pytest.mark.parametrize("tree", [[1, 2], {}, {"epoch": 3, "loss": 0.5}, torch.ones(3)])
def test_no_state_dict(tmp_path, refusal, tree):
    torch.save(tree, tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in refusal(load_nanogpt, tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")],
)
def test_weight_formats(tmp_path, make_state, model_args, dtype, name):
    loaded = load_nanogpt(save(tmp_path / "a.pt", make_state(dtype=dtype), model_args))
    assert loaded.weight_dtype == name
    for tensor in layer_tensors(loaded).values():
        assert tensor is None or tensor.dtype == torch.float32
    expected = make_state(dtype=dtype)["transformer.h.0.attn.c_attn.weight"].float()
    assert torch.equal(loaded.layer(0).c_attn_weight, expected)
    assert (name == "fp64") == any("FP64" in note for note in loaded.notes)


def test_mixed_formats(tmp_path, make_state, model_args):
    state = make_state(dtype=torch.bfloat16)
    state["transformer.ln_f.weight"] = state["transformer.ln_f.weight"].float()
    assert load_nanogpt(save(tmp_path / "a.pt", state, model_args)).weight_dtype == "bf16+fp32"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_weights_are_refused_by_name(tmp_path, make_state, model_args, refusal, dtype):
    state = make_state()
    name = "transformer.h.1.attn.c_attn.weight"
    state[name] = state[name].to(torch.int8).to(dtype) if dtype != torch.float8_e4m3fn else state[name].to(dtype)
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args))
    assert name in line
    assert str(dtype).removeprefix("torch.") in line


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensor_class_is_refused_by_name(tmp_path, make_state, model_args, refusal):
    state = make_state()
    name = "transformer.h.0.mlp.c_fc.weight"
    state[name] = torch._make_per_tensor_quantized_tensor(state[name].to(torch.int8), 0.1, 0)
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args))
    assert name in line
    assert "_rebuild_qtensor" in line


def test_sizes_are_inferred_but_heads_are_not(tmp_path, make_state, model_args, refusal):
    torch.save(make_state(), tmp_path / "a.pt")
    loaded = load_nanogpt(tmp_path / "a.pt", n_head=4)
    assert (loaded.config.n_layer, loaded.config.n_head, loaded.config.block_size) == (2, 4, 16)
    assert loaded.iter_num is None
    assert "--n-head" in refusal(load_nanogpt, tmp_path / "a.pt")
    with_args = save(tmp_path / "b.pt", make_state(), model_args)
    assert load_nanogpt(with_args, n_head=2).config.n_head == 2
    line = refusal(load_nanogpt, with_args, n_head=4)
    assert "4" in line
    assert "2" in line
    assert "--n-head" in refusal(load_nanogpt, tmp_path / "a.pt", n_head=0)


def test_heads_that_do_not_divide(tmp_path, make_state, model_args, refusal):
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", make_state(), model_args | {"n_head": 3}))
    assert "n_embd 8" in line
    assert "n_head 3" in line


def test_sizes_from_the_training_config(tmp_path, make_state, model_args):
    config = model_args | {"learning_rate": 1e-3, "batch_size": 32}
    loaded = load_nanogpt(save(tmp_path / "a.pt", make_state(), config=config))
    assert loaded.config.n_head == 2
    assert loaded.notes == ()


def test_sizes_from_a_namespace(tmp_path, make_state, model_args):
    loaded = load_nanogpt(save(tmp_path / "a.pt", make_state(), argparse.Namespace(**model_args)))
    assert loaded.config.n_head == 2
    assert "argparse.Namespace" in loaded.notes[0]


def test_extras_of_training_do_not_block(tmp_path, make_state, model_args):
    plain = load_nanogpt(save(tmp_path / "plain.pt", make_state(), model_args))
    for extra in (np.float64(3.5), torch.tensor(3.5), pathlib.Path("out"), argparse.Namespace(a=1)):
        path = save(tmp_path / "a.pt", make_state(), model_args, best_val_loss=extra, config={"out": extra})
        assert_same(plain, load_nanogpt(path))


def test_numpy_sizes_are_integers(tmp_path, make_state, model_args):
    path = save(tmp_path / "a.pt", make_state(), model_args | {"n_head": np.int64(4)})
    assert load_nanogpt(path).config.n_head == 4


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "two"])
def test_sizes_that_are_no_sizes(tmp_path, make_state, model_args, refusal, value):
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", make_state(), model_args | {"n_head": value}))
    assert "n_head" in line


def test_unknown_model_args_are_noted(tmp_path, make_state, model_args):
    loaded = load_nanogpt(save(tmp_path / "a.pt", make_state(), model_args | {"window": 4, "flash": True}))
    assert loaded.notes == ("model_args keys not applied: flash, window",)


def test_dropout_is_forced_to_zero_and_said(tmp_path, make_state, model_args):
    loaded = load_nanogpt(save(tmp_path / "a.pt", make_state(), model_args | {"dropout": 0.1}))
    assert loaded.notes == ("dropout 0.1 forced to 0",)
    assert loaded.config.dropout == 0.1


def test_missing_tensors_are_named(tmp_path, make_state, model_args, refusal):
    state = make_state()
    for name in ("ln_1.weight", "ln_2.weight", "mlp.c_fc.weight", "attn.c_proj.weight"):
        del state["transformer.h.1." + name]
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args))
    assert line.count("transformer.h.1.") == 3
    assert "and 1 more" in line


def test_one_missing_bias_is_named(tmp_path, make_state, model_args, refusal):
    state = make_state(bias=True)
    del state["transformer.h.1.attn.c_attn.bias"]
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args | {"bias": True}))
    assert "transformer.h.1.attn.c_attn.bias" in line


def test_declared_biases_that_are_absent(tmp_path, make_state, model_args, refusal):
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", make_state(), model_args | {"bias": True}))
    assert ".bias" in line


def test_undeclared_biases_are_applied_with_a_note(tmp_path, make_state, model_args):
    loaded = load_nanogpt(save(tmp_path / "a.pt", make_state(bias=True), model_args))
    assert loaded.layer(0).c_attn_bias is not None
    assert "bias" in loaded.notes[0]


def test_more_layers_than_declared(tmp_path, make_state, model_args, refusal):
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", make_state(), model_args | {"n_layer": 1}))
    assert "n_layer is 1" in line
    assert "layer 1" in line


def test_fewer_layers_than_declared(tmp_path, make_state, model_args, refusal):
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", make_state(), model_args | {"n_layer": 3}))
    assert "transformer.h.2." in line


def test_transposed_projection_gets_the_hint(tmp_path, make_state, model_args, refusal):
    state = make_state()
    name = "transformer.h.0.attn.c_attn.weight"
    state[name] = state[name].t().contiguous()
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args))
    assert name in line
    assert "[8, 24]" in line
    assert "[24, 8]" in line
    assert "transposed: Hugging Face Conv1D orientation?" in line


def test_other_shape_has_no_hint(tmp_path, make_state, model_args, refusal):
    state = make_state()
    state["transformer.wpe.weight"] = torch.ones(17, 8)
    line = refusal(load_nanogpt, save(tmp_path / "a.pt", state, model_args))
    assert "[17, 8]" in line
    assert "[16, 8]" in line
    assert "transposed" not in line


def test_q_rows_by_head_keep_their_orientation(tmp_path):
    """Spectral norms of the two heads' W_Q are 3 and 5; 5 and 3 would be the transposed reading."""
    c = 4
    q = torch.tensor([[0, 0, 0, 3], [1, 0, 0, 0], [0, 5, 0, 0], [0, 0, 2, 0]], dtype=torch.float32)
    state = {
        "transformer.wte.weight": torch.ones(5, c), "transformer.wpe.weight": torch.ones(6, c),
        "transformer.h.0.ln_1.weight": torch.ones(c), "transformer.h.0.ln_2.weight": torch.ones(c),
        "transformer.h.0.attn.c_attn.weight": torch.cat([q, torch.zeros(2 * c, c)]),
        "transformer.h.0.attn.c_proj.weight": torch.zeros(c, c), "transformer.h.0.mlp.c_fc.weight": torch.zeros(16, c),
        "transformer.h.0.mlp.c_proj.weight": torch.zeros(c, 16), "transformer.ln_f.weight": torch.ones(c),
    }  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    weight = load_nanogpt(tmp_path / "a.pt", n_head=2).layer(0).c_attn_weight
    norms = [float(torch.linalg.matrix_norm(weight[2 * h : 2 * h + 2], 2)) for h in range(2)]
    assert norms == pytest.approx([3.0, 5.0], rel=1e-6)


def test_causal_mask_buffers_are_no_parameters(tmp_path, make_state, model_args):
    state = make_state()
    state["transformer.h.0.attn.bias"] = torch.ones(16, 16).tril()[None, None]
    state["transformer.h.1.attn.bias"] = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    loaded = load_nanogpt(save(tmp_path / "a.pt", state, model_args))
    assert loaded.unused_tensors == ()
    assert loaded.config.bias is False


def test_learned_bias_of_the_buffer_name_is_listed(tmp_path, make_state, model_args):
    state = make_state()
    state["transformer.h.0.attn.bias"] = torch.ones(2, 16, 16)
    state["transformer.h.1.attn.bias"] = torch.ones(16, 16)[None, None]
    loaded = load_nanogpt(save(tmp_path / "a.pt", state, model_args))
    assert loaded.unused_tensors == ("transformer.h.0.attn.bias", "transformer.h.1.attn.bias")


def test_tensors_not_applied_are_listed_in_file_order(tmp_path, make_state, model_args):
    state = make_state()
    extra = ("transformer.h.0.attn.q_norm.weight", "transformer.rotary.inv_freq", "lm_head.bias", "adapter.a")
    for name in extra:
        state["_orig_mod." + name] = torch.ones(3)
    assert load_nanogpt(save(tmp_path / "a.pt", state, model_args)).unused_tensors == extra


def test_other_state_dicts_in_the_file_are_noted(tmp_path, make_state, model_args):
    path = save(tmp_path / "a.pt", make_state(), model_args, ema={"w": torch.ones(2)}, optimizer={"s": torch.ones(2)})
    notes = load_nanogpt(path).notes
    assert len(notes) == 1
    assert notes[0].endswith(": ema")


def test_head_only_is_the_embedding_too(tmp_path, make_state, model_args):
    both = load_nanogpt(save(tmp_path / "both.pt", make_state(), model_args))
    state = make_state()
    del state["transformer.wte.weight"]
    loaded = load_nanogpt(save(tmp_path / "a.pt", state, model_args))
    assert loaded.notes == ("wte absent: the tied lm_head copy is used",)
    assert loaded.tied
    assert_same(both, loaded)


def test_embedding_only_is_the_head_too(tmp_path, make_state, model_args, refusal):
    both = load_nanogpt(save(tmp_path / "both.pt", make_state(), model_args))
    state = make_state()
    del state["lm_head.weight"]
    loaded = load_nanogpt(save(tmp_path / "a.pt", state, model_args))
    assert loaded.notes == ()
    assert_same(both, loaded)
    untied = save(tmp_path / "b.pt", state, model_args | {"tie_word_embeddings": False})
    assert "no output head" in refusal(load_nanogpt, untied)


def test_equal_copy_is_tied_and_different_head_is_used_as_stored(tmp_path, make_state, model_args):
    state = make_state()
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    assert load_nanogpt(save(tmp_path / "a.pt", state, model_args)).tied
    state["lm_head.weight"][0, 0] += 1
    loaded = load_nanogpt(save(tmp_path / "b.pt", state, model_args))
    assert not loaded.tied
    assert len(loaded.notes) == 1
    assert not torch.equal(loaded.lm_head, loaded.wte)


def test_non_finite_weights_are_kept(tmp_path, make_state, model_args):
    state = make_state()
    state["transformer.h.0.attn.c_attn.weight"][3, 1] = float("nan")
    loaded = load_nanogpt(save(tmp_path / "a.pt", state, model_args))
    assert int(loaded.layer(0).c_attn_weight.isnan().sum()) == 1


def test_safetensors(tmp_path, make_state, refusal):
    state = make_state(dtype=torch.bfloat16)
    plain = {name: value.clone() for name, value in state.items()}
    save_file(plain, tmp_path / "a.safetensors")
    loaded = load_nanogpt(tmp_path / "a.safetensors", n_head=2)
    assert loaded.weight_dtype == "bf16"
    assert loaded.tied
    assert torch.equal(loaded.layer(1).fc_weight, state["transformer.h.1.mlp.c_fc.weight"].float())
    assert "--n-head" in refusal(load_nanogpt, tmp_path / "a.safetensors")
    save_file(plain, tmp_path / "b.safetensors", metadata={"n_head": "4", "iter_num": "7", "dropout": "0.2"})
    loaded = load_nanogpt(tmp_path / "b.safetensors")
    assert (loaded.config.n_head, loaded.iter_num) == (4, 7)
    assert loaded.notes == ("dropout 0.2 forced to 0",)


def test_layer_out_of_range(tmp_path, make_state, model_args, refusal):
    loaded = load_nanogpt(save(tmp_path / "a.pt", make_state(), model_args))
    for index in (-1, 2):
        assert "layers are 0 to 1" in refusal(loaded.layer, index)


@pytest.mark.parametrize(
    ("folder", "iter_num", "dtype", "size"),
    [("diverging-gpt", 1000, "fp32", 43677351), ("healthy-gpt", 800, "bf16", 21843879)],
)
def test_real_checkpoint(shared_data, folder, iter_num, dtype, size):
    path = shared_data(folder) / "ckpt.pt"
    loaded = load_nanogpt(path)
    assert (loaded.iter_num, loaded.weight_dtype, loaded.size_bytes) == (iter_num, dtype, size)
    assert (loaded.config.n_layer, loaded.config.n_head, loaded.config.n_embd) == (6, 6, 384)
    assert loaded.tied
    assert loaded.notes == ()
    assert loaded.unused_tensors == ()
    reference = torch.load(path, weights_only=True, map_location="cpu")["model"]
    assert set(reference) == set(loaded.tensors)
    for name, expected in reference.items():
        assert torch.equal(loaded.tensors[name], expected), name
    assert torch.equal(loaded.layer(5).mlp_proj_weight, reference["transformer.h.5.mlp.c_proj.weight"].float())
