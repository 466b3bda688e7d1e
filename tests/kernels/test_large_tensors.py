"""Tensors of more than 2^31 elements: the last heads come out as they do alone; and repeated runs, bit for bit.

Both need a GPU: the kernels address memory as they do there, and the tensors do not fit elsewhere.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from bf16forensics.kernels.fused_types import FusedInputs, FusedWishes

from bf16forensics.attention.fused_recipe import fused_recipe
from bf16forensics.recipe.derive import resolve

GIB = 2**30
#: Heads that run alone. As kernels are compiled for multiples of 16 apart from other numbers, so many.
LAST = 16


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """A GPU, whose memory is free before and after."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.empty_cache()
    yield torch.device("cuda")
    torch.cuda.empty_cache()


def need(gigabytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gigabytes:
        pytest.skip(f"{gigabytes:.0f} GiB of GPU memory are needed, {free:.0f} are free")


def draw(device: torch.device, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    # BF16 is drawn as such: in FP32 it would need three times the memory.
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def drawn(device: torch.device, heads: int, tokens: int, size: int, **masks: object) -> FusedInputs:
    q, k, v, do = (draw(device, heads, tokens, size, seed=seed) for seed in range(4))
    # Repeated and sharp keys in some heads, the last ones among them: rows of every kind are looked at a second time.
    k[-1, 1::3] = k[-1, :1]
    q[-2] *= 8.0
    return FusedInputs(q=q, k=k, v=v, do=do, scale=size**-0.5, causal=True, **masks)


def last_heads(inputs: FusedInputs) -> FusedInputs:
    cut = {name: getattr(inputs, name)[-LAST:].clone() for name in ("q", "k", "v", "do")}
    keep = inputs.keep
    return replace(inputs, **cut, keep=None if keep is None or len(keep) == 1 else keep[-LAST:].clone())


def same_bits(whole: object, part: object, heads: int) -> list[str]:
    """Names of the results whose last heads are others than in the small run; `heads` of the large one."""
    wrong = []
    for field in fields(part):
        large, small = getattr(whole, field.name), getattr(part, field.name)
        if small is None:
            continue
        assert large.shape[0] == heads, field.name
        if not torch.equal(large[-LAST:], small):
            wrong.append(field.name)
    return wrong


def large_shape(size: int) -> tuple[int, int, int]:
    """Just over 2^31 elements, in short rows: the address is what is tested."""
    tokens = 512
    heads = 2**31 // (tokens * size) + LAST
    assert heads * tokens * size > 2**31
    assert heads % LAST == 0
    return heads, tokens, size


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "size"), [("fa2", 64), ("paper", 64), ("fa2", 128)])
def test_the_forward_pass_and_the_carrier(gpu, recipe, size):
    from bf16forensics.kernels.dual_forward import dual_forward

    need(64)
    heads, tokens, size = large_shape(size)
    inputs = drawn(gpu, heads, tokens, size)
    constants = fused_recipe(resolve(recipe), size, tokens, True)
    wishes = FusedWishes(carrier=True, lowest=True, feature_sums=True)
    whole = dual_forward(inputs, constants, wishes)
    part = dual_forward(last_heads(inputs), constants, wishes)
    assert same_bits(whole, part, heads) == []
    assert part.o_hp.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fa2", "paper"])
def test_the_second_look_and_the_stages(gpu, recipe):
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.flagged_rows import count_and_anchor
    from bf16forensics.kernels.query_stages import query_stages

    need(112)
    heads, tokens, size = large_shape(64)
    inputs = drawn(gpu, heads, tokens, size)
    constants = fused_recipe(resolve(recipe), size, tokens, True)
    found = []
    for given in (inputs, last_heads(inputs)):
        forward = dual_forward(given, constants, FusedWishes())
        o_err = forward.o_lp.float() - forward.o_hp
        # Their positions alone are more than 2^31 numbers.
        counts = count_and_anchor(given, constants, forward, o_err=o_err, with_keys=True)
        errors, keys = o_err[-LAST:].clone(), counts.ones_keys[-LAST:].clone()
        counts = replace(counts, ones_keys=None)
        del o_err
        torch.cuda.empty_cache()
        found.append((forward, counts, query_stages(given, constants, forward, counts), errors, keys))
    (forward, counts, stages, errors, keys), part = found
    assert same_bits(forward, part[0], heads) == []
    assert same_bits(counts, part[1], heads) == []
    assert same_bits(stages, part[2], heads) == []
    assert torch.equal(errors, part[3])
    assert torch.equal(keys, part[4])
    # The second look had something to do in the last heads.
    assert (part[1].ones_rounded > 1).any()
    assert (part[1].top >= 0).any()


@pytest.mark.gpu
def test_a_mask_by_head(gpu):
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.flagged_rows import count_and_anchor

    need(16)
    heads, tokens, size = 48, 8192, 64
    generator = torch.Generator(device=gpu).manual_seed(9)
    keep = torch.randint(0, 2, (heads, tokens, tokens), generator=generator, device=gpu, dtype=torch.uint8)
    assert keep.numel() > 2**31
    inputs = drawn(gpu, heads, tokens, size, keep=keep)
    constants = fused_recipe(resolve("fa2"), size, tokens, True)
    found = []
    for given in (inputs, last_heads(inputs)):
        forward = dual_forward(given, constants, FusedWishes())
        found.append((forward, count_and_anchor(given, constants, forward, o_err=None, with_keys=False)))
    assert same_bits(found[0][0], found[1][0], heads) == []
    assert same_bits(found[0][1], found[1][1], heads) == []


@pytest.mark.gpu
def test_the_gradient_of_weights(gpu):
    from bf16forensics.kernels.weight_gradient import weight_gradients

    need(96)
    tokens, columns, features, last = 2**21 + 1024, 1024, 16, 512
    x = torch.randn(tokens, columns, device=gpu)
    assert x.numel() > 2**31
    stages = torch.zeros(2, tokens, features, device=gpu)
    stages[:, -last:] = torch.randn(2, last, features, device=gpu)
    # All tokens but the last ones add exactly nothing.
    expected = weight_gradients(stages[:, -last:].contiguous(), x[-last:].contiguous())
    assert torch.equal(weight_gradients(stages, x), expected)
    assert expected.abs().min() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fa2", "fa3", "paper"])
@pytest.mark.parametrize(("size", "groups"), [(64, 12), (128, 3), (80, 12)])
def test_repeated_runs_give_equal_bits(gpu, recipe, size, groups):
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.flagged_rows import count_and_anchor
    from bf16forensics.kernels.query_stages import query_stages

    # More blocks of rows than the GPU has room for at once, so that they come in another order each time.
    inputs = drawn(gpu, 12, 3000, size, window=2000)
    inputs = replace(inputs, k=inputs.k[:groups].contiguous(), v=inputs.v[:groups].contiguous())
    constants = fused_recipe(resolve(recipe), size, 3000, True)
    first = None
    for number in range(4):
        # Memory that was used before, for something else.
        torch.randn(2**26, device=gpu) * number
        forward = dual_forward(inputs, constants, FusedWishes(carrier=True, lowest=True, feature_sums=True))
        o_err = forward.o_lp.float() - forward.o_hp
        counts = count_and_anchor(inputs, constants, forward, o_err=o_err, with_keys=True)
        stages = query_stages(inputs, constants, forward, counts)
        found = [
            getattr(part, field.name) for part in (forward, counts, stages) for field in fields(part)
        ] + [o_err]  # fmt: skip
        if first is None:
            first = found
        for a, b in zip(first, found, strict=True):
            assert torch.equal(a, b)
