"""Inputs of the loader tests: a tiny nanoGPT, a tiny record, and one check of every error line."""

import re
from collections.abc import Callable

import pytest
import torch

from bf16forensics.errors import InputError

#: Sizes of the tiny model: 2 layers, 2 heads, width 8, 16 positions, 11 tokens.
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "vocab_size": 11}
StateFactory = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def model_args() -> dict[str, object]:
    return {**SIZES, "bias": False, "dropout": 0.0}


@pytest.fixture
def make_state() -> StateFactory:
    def make(bias: bool = False, dtype: torch.dtype = torch.float32, seed: int = 7) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        c, v, t = 8, 11, 16

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        state = {"transformer.wte.weight": draw(v, c), "transformer.wpe.weight": draw(t, c)}
        for index in range(2):
            prefix = f"transformer.h.{index}."
            for name, shape in (
                ("ln_1", (c,)),
                ("attn.c_attn", (3 * c, c)),
                ("attn.c_proj", (c, c)),
                ("ln_2", (c,)),
                ("mlp.c_fc", (4 * c, c)),
                ("mlp.c_proj", (c, 4 * c)),
            ):
                state[f"{prefix}{name}.weight"] = draw(*shape)
                if bias:
                    state[f"{prefix}{name}.bias"] = draw(shape[0])
        state["transformer.ln_f.weight"] = draw(c)
        if bias:
            state["transformer.ln_f.bias"] = draw(c)
        state["lm_head.weight"] = state["transformer.wte.weight"]
        return state

    return make


@pytest.fixture
def record() -> dict[str, torch.Tensor]:
    """B 2, H 4, G 2, N 5, M 7, D 8, E 6, C 16; every value representable in BF16; heads before time."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {"q": draw(2, 4, 5, 8), "k": draw(2, 2, 7, 8), "v": draw(2, 2, 7, 6), "do": draw(2, 4, 5, 6)}


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Calls a loader that must refuse; returns the error line after checking that it is one."""

    def check(load: Callable[..., object], *args: object, **kwargs: object) -> str:
        with pytest.raises(InputError) as caught:
            load(*args, **kwargs)
        line = str(caught.value)
        assert "\n" not in line
        assert len(line) < 500
        assert not re.search(r"Traceback|Error\(", line)
        assert caught.value.exit_code == 2
        return line

    return check
