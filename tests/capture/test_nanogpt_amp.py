"""The captured model in BF16 mixed precision, bit for bit against the same model with its casts written by hand."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bf16forensics.attention.recipe_attention import RecipeAttention
from bf16forensics.capture.activations import AmpActivations, Fp32Activations
from bf16forensics.capture.nanogpt import NanoGPTCapture
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.capture.sequence import SequenceInput
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.load.nanogpt import NanoGPTCheckpoint
from bf16forensics.recipe.derive import resolve

LAYERS, HEADS, WIDTH, TOKENS, VOCABULARY = 3, 4, 32, 20, 19
SCALE = 1.0 / math.sqrt(WIDTH // HEADS)

Make = Callable[..., NanoGPTCheckpoint]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """BF16 times BF16: exact products, FP32 sums, one rounding. Autograd rounds the gradients at the same casts."""
    return (a.float() @ b.float()).bfloat16()


def projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer on operands cast to BF16, its bias added before the result is rounded."""
    product = x.bfloat16().float() @ weight.bfloat16().float().T
    if bias is not None:
        product = product + bias.bfloat16().float()
    return product.bfloat16()


class Gelu(torch.autograd.Function):
    """In FP32 on a BF16 operand, result and gradient rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        wide = ctx.saved_tensors[0].float()
        cdf = 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))
        pdf = torch.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)
        return (gradients[0].float() * (cdf + wide * pdf)).bfloat16()


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The recipe "eager" in its own framework's operations."""
    scores = multiplied(q, k.mT) * SCALE
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1, dtype=torch.float32).bfloat16()
    return multiplied(p, v)


class Block(nn.Module):
    def __init__(self, bias: bool, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=bias), nn.LayerNorm(WIDTH, bias=bias)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.c_out = nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(hidden)
        q, k, v = (
            part.view(TOKENS, HEADS, WIDTH // HEADS).transpose(0, 1)
            for part in projected(x, self.c_attn.weight, self.c_attn.bias).split(WIDTH, 1)
        )
        o = self.attention(q, k, v)
        o.retain_grad()
        self.seen = {"x": x, "q": q, "k": k, "v": v, "o": o}
        joined = o.transpose(0, 1).reshape(TOKENS, WIDTH)
        middle = hidden + projected(joined, self.c_proj.weight, self.c_proj.bias).float()
        inside = Gelu.apply(projected(self.ln_2(middle), self.c_fc.weight, self.c_fc.bias))
        return middle + projected(inside, self.c_out.weight, self.c_out.bias).float()


class Model(nn.Module):
    def __init__(self, bias: bool, attention: Attention) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(24, WIDTH)
        self.h = nn.ModuleList(Block(bias, attention) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, bias=bias)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(ids) + self.wpe.weight[:TOKENS]
        for block in self.h:
            hidden = block(hidden)
        logits = projected(self.ln_f(hidden), self.wte.weight, None)
        return functional.nll_loss(LogSoftmax.apply(logits).float(), labels, ignore_index=-100)


class LogSoftmax(torch.autograd.Function):
    """What cross_entropy does to BF16 logits under autocast: BF16 log-probabilities, and gradients from them."""

    @staticmethod
    def forward(ctx, logits):
        output = torch.log_softmax(logits.float(), -1).bfloat16()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        wide = gradient.float()
        return (wide - torch.exp(output.float()) * wide.sum(-1, keepdim=True)).bfloat16()


def by_hand(state: Mapping[str, torch.Tensor], bias: bool, attention: Attention) -> Model:
    model = Model(bias, attention)
    names = {"transformer.": "", "attn.c_attn": "c_attn", "attn.c_proj": "c_proj", "mlp.c_fc": "c_fc",
             "mlp.c_proj": "c_out"}  # fmt: skip
    renamed = {}
    for name, value in state.items():
        if name != "lm_head.weight":
            for old, new in names.items():
                name = name.replace(old, new)
            renamed[name] = value.float()
    model.load_state_dict(renamed)
    return model


def captured(checkpoint: NanoGPTCheckpoint, recipe: str, **more: Any) -> tuple[list[AttentionRecord], float]:
    losses: list[float] = []
    activations = AmpActivations(by_recipe=RecipeAttention(recipe=resolve(recipe)))
    capture = NanoGPTCapture(checkpoint=checkpoint, activations=activations)
    ids, labels = draw_tokens()
    sequence = SequenceInput(index=0, step=None, **{"ids": ids, "labels": labels, **more})
    records = list(capture.sequence_records(sequence, losses.append))
    assert len(losses) == 1
    return records[::-1], losses[0]


def draw_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randint(0, VOCABULARY, (TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    labels = both[1:].clone()
    labels[4:7] = -100
    return both[:-1].clone(), labels


def assert_same_bits(records: list[AttentionRecord], loss: float, model: Model) -> None:
    expected = model(*draw_tokens())
    expected.backward()
    assert loss == float(expected.detach())
    for record, block in zip(records, model.h, strict=True):
        assert record.x is not None
        assert record.do is not None
        # As the linear layer multiplies it.
        assert torch.equal(record.x, block.seen["x"].detach().bfloat16().float())
        for name in ("q", "k", "v"):
            assert block.seen[name].dtype == torch.bfloat16
            assert torch.equal(getattr(record, name), block.seen[name].detach().float())
        assert float(record.do.abs().max()) > 0
        assert torch.equal(record.do, block.seen["o"].grad.float())


@pytest.mark.parametrize("bias", [False, True])
def test_records_are_those_of_the_model_with_its_casts_written_out(make_checkpoint: Make, bias: bool) -> None:
    checkpoint = make_checkpoint(bias=bias)
    assert_same_bits(*captured(checkpoint, "eager"), by_hand(checkpoint.tensors, bias, eager))


@pytest.mark.parametrize("recipe", ["fa2", "sdpa-math"])
def test_the_recipe_runs_in_the_model(make_checkpoint: Make, recipe: str) -> None:
    checkpoint = make_checkpoint(bias=True)
    attend = RecipeAttention(recipe=resolve(recipe))
    model = by_hand(checkpoint.tensors, True, lambda q, k, v: attend(q, k, v, Geometry(scale=SCALE)))
    assert_same_bits(*captured(checkpoint, recipe), model)


def test_a_bf16_checkpoint_is_its_values_as_fp32_masters(make_checkpoint: Make) -> None:
    stored = make_checkpoint(dtype=torch.bfloat16)
    widened = make_checkpoint(state={name: t.float() for name, t in stored.tensors.items()})
    found, loss = captured(stored, "eager")
    expected, expected_loss = captured(widened, "eager")
    assert loss == expected_loss
    for record, other in zip(found, expected, strict=True):
        assert record.do is not None
        assert other.do is not None
        assert torch.equal(record.q, other.q)
        assert torch.equal(record.do, other.do)


def test_it_is_neither_the_fp32_model_nor_far_from_it(make_checkpoint: Make) -> None:
    checkpoint = make_checkpoint(bias=True)
    ids, labels = draw_tokens()
    losses: list[float] = []
    plain = NanoGPTCapture(checkpoint=checkpoint, activations=Fp32Activations())
    sequence = SequenceInput(index=0, step=None, ids=ids, labels=labels)
    wide = list(plain.sequence_records(sequence, losses.append))[::-1]
    narrow, loss = captured(checkpoint, "fa2")
    assert loss == pytest.approx(losses[0], rel=0.02)
    for record, other in zip(narrow, wide, strict=True):
        assert record.storage == "bf16"
        assert record.do is not None
        assert other.do is not None
        for name in ("q", "k", "v", "do"):
            found, expected = getattr(record, name), getattr(other, name)
            assert found.dtype == torch.float32
            assert not found.requires_grad
            assert torch.equal(found, found.bfloat16().float())
            assert not torch.equal(found, expected)
            # A dozen BF16 roundings a layer, 2^-9 each, through three layers of a model that is not trained.
            assert float((found - expected).norm() / expected.norm()) < 36 * 2.0**-9


def test_no_label_gives_zero_gradients_and_padding_stays_out(make_checkpoint: Make) -> None:
    records, loss = captured(make_checkpoint(), "fa2", labels=torch.full((TOKENS,), -100))
    assert math.isnan(loss)
    assert all(record.do is not None and not record.do.any() for record in records)
    real = torch.arange(TOKENS) >= 6
    _, labels = draw_tokens()
    positions = (torch.arange(TOKENS) - 6).clamp(min=0)
    labels = labels.masked_fill(~real, -100)
    records, loss = captured(make_checkpoint(), "fa2", labels=labels, real=real, position_ids=positions)
    assert math.isfinite(loss)
    for record in records:
        assert record.do is not None
        assert record.do.isfinite().all()
        assert not record.do[:, ~real].any()
        assert record.do[:, real].any()


def test_autocast_is_off_again_between_records(make_checkpoint: Make) -> None:
    ids, labels = draw_tokens()
    activations = AmpActivations(by_recipe=RecipeAttention(recipe=resolve("fa2")))
    capture = NanoGPTCapture(checkpoint=make_checkpoint(), activations=activations)
    sequence = SequenceInput(index=0, step=None, ids=ids, labels=labels)
    x = torch.ones(2, 2)
    for _ in capture.sequence_records(sequence, lambda loss: None):
        assert not torch.is_autocast_enabled("cpu")
        assert (x @ x).dtype == torch.float32
