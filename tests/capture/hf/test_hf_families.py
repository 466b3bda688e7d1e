"""Records of every tested family against a model written out in plain torch, and dW_Q against autograd's own."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.hf.attention import handling
from bf16forensics.capture.hf.trace import Watched, query_path, watching
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.evidence.gradient import gradient_parts, weight_gradient
from bf16forensics.recipe.presets import FA2

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "olmo2", "deepseek", "deepseek-direct")
#: FP32 against float64: some 50 roundings deep, each 6e-8 of the largest element of a tensor.
DEPTH = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, hf: ModuleType, plain: ModuleType, tmp_path_factory: Any) -> Any:
    """A family, run on one sequence by the capture and by the plain twin."""
    twins = hf.make_twins(plain, request.param, tmp_path_factory.mktemp(request.param))
    twins.ids, twins.labels = hf.draw()
    twins.labels[3:5] = -100
    twins.records, twins.loss = hf.run(twins.capture, twins.ids, twins.labels)
    expected = twins.twin.loss(twins.ids, twins.labels, torch.arange(len(twins.ids)), twins.visible_of)
    expected.backward(retain_graph=True)
    twins.expected_loss = float(expected.detach())
    return twins


def assert_near(found: torch.Tensor, expected: torch.Tensor, share: float = DEPTH) -> None:
    """Every element within a share of the largest one."""
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= share * float(expected.abs().max())


def query_weight(case: Any, layer: int) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Name of the weight that holds W_Q in the files, and how it splits into [H, D, C]."""
    plan = case.twin.plan
    if plan.family == "gpt2":
        return f"transformer.h.{layer}.attn.c_attn.weight", lambda w: w[:, : w.shape[0]].T.reshape(4, 8, 32)
    part = "q_b_proj" if f"model.layers.{layer}.self_attn.q_b_proj.weight" in case.twin.weights else "q_proj"
    return f"model.layers.{layer}.self_attn.{part}.weight", lambda w: w.view(plan.heads, plan.size, -1)


def key_weight(case: Any, layer: int) -> torch.Tensor:
    """[G, D, C] W_K."""
    weights, plan = case.twin.weights, case.twin.plan
    if plan.family == "gpt2":
        return weights[f"transformer.h.{layer}.attn.c_attn.weight"][:, 32:64].T.reshape(4, 8, 32)
    name = f"model.layers.{layer}.self_attn"
    if plan.family == "deepseek":
        both = weights[f"{name}.kv_b_proj.weight"].view(plan.heads, plan.nope + plan.value, plan.kv_rank)
        return both[:, : plan.nope]
    return weights[f"{name}.k_proj.weight"].view(plan.kv_heads, plan.size, -1)


def test_records_are_those_of_the_plain_model(case: Any) -> None:
    assert case.loss == pytest.approx(case.expected_loss, rel=1e-6)
    assert [record.layer for record in case.records] == [0, 1]
    for record, seen in zip(case.records, case.twin.seen, strict=True):
        for name in ("x", "q", "k", "v"):
            found = getattr(record, name)
            assert found.dtype == torch.float32
            assert not found.requires_grad
            assert_near(found, getattr(seen, name).detach())
        assert float(record.do.abs().max()) > 0
        assert_near(record.do, seen.o.grad)
        assert record.labelled.tolist() == [True] * 3 + [False] * 2 + [True] * 7


def test_geometry_is_proved_and_not_the_mask_itself(case: Any) -> None:
    tokens = len(case.ids)
    for record, seen in zip(case.records, case.twin.seen, strict=True):
        geometry = record.geometry
        visible = geometry.visible((0, tokens), (0, tokens), tokens, tokens)
        assert torch.equal(visible[0], seen.visible)
        assert (geometry.keep, geometry.bias, geometry.key_padding, geometry.document_ids) == (None,) * 4
        assert geometry.causal
        assert geometry.window == case.twin.plan.window_of(record.layer)
        assert geometry.scale == pytest.approx(case.twin.plan.scale, rel=1e-15)
        assert geometry.softcap == case.twin.plan.softcap


def test_weights_by_head_are_the_files_rows(case: Any) -> None:
    for layer in range(2):
        weights = case.capture.weights(layer)
        name, split = query_weight(case, layer)
        assert weights.w_q.dtype == weights.w_k.dtype == torch.float32
        assert torch.equal(weights.w_q, split(case.twin.weights[name].detach()).float())
        assert torch.equal(weights.w_k, key_weight(case, layer).detach().float())


def test_gradient_of_w_q_through_the_path_is_autograds(case: Any) -> None:
    for record in case.records:
        dual = dual_pass(record, FA2, "fp64")
        dq = dual.dq.hp if record.query_path is None else record.query_path.pull_back(dual.dq.hp[None])[0]
        found = weight_gradient(dq.double(), record.x.double())
        name, split = query_weight(case, record.layer)
        expected = split(case.twin.weights[name].grad)
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_delta_alone_moves_w_q_as_the_evidence_says(case: Any) -> None:
    for record, seen in zip(case.records, case.twin.seen, strict=True):
        dual = dual_pass(record, FA2, "fp64")
        found = gradient_parts(dual.delta, dual.dq, record.x, record.query_path).full
        # By hand: dS = P (dP - delta), so an error of delta moves dQ by scale * P K, row by row.
        plan, group = case.twin.plan, seen.q.shape[0] // seen.k.shape[0]
        keys = seen.k.detach().repeat_interleave(group, 0)
        scores = plan.scale * seen.q.detach() @ keys.transpose(1, 2)
        slope = torch.ones_like(scores)
        if plan.softcap is not None:
            slope = 1 - torch.tanh(scores / plan.softcap) ** 2
            scores = plan.softcap * torch.tanh(scores / plan.softcap)
        p = torch.softmax(scores.masked_fill(~seen.visible, -torch.inf), -1) * slope
        moved = -plan.scale * dual.delta.delta_err[..., None] * (p @ keys)
        name, split = query_weight(case, record.layer)
        expected = split(torch.autograd.grad(seen.q, case.twin.weights[name], moved, retain_graph=True)[0])
        assert float(expected.norm()) > 0
        assert float((torch.from_numpy(found).double() - expected).norm() / expected.norm()) < 1e-4


def test_only_a_projection_that_is_q_itself_has_no_path(case: Any) -> None:
    for record in case.records:
        assert (record.query_path is None) == (case.twin.plan.family == "gpt2")
        if record.query_path is not None:
            # The same operations on the same numbers: bit for bit what the model gave to attention.
            assert torch.equal(record.query_path.query.detach(), record.q)


def test_pull_back_and_push_forward_are_adjoint(case: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for record in case.records:
        path = record.query_path
        if path is None:
            continue
        u, v = (torch.randn(3, *record.q.shape, generator=generator) for _ in range(2))
        forward = (u.double() * path.push_forward(v).double()).sum((1, 2, 3))
        backward = (path.pull_back(u).double() * v.double()).sum((1, 2, 3))
        # Sums of some 1e3 FP32 products of either sign.
        scale = float(u.double().norm() * path.push_forward(v).double().norm())
        assert float((forward - backward).abs().max()) <= 1e-6 * scale


def test_push_forward_is_the_finite_difference_of_the_models_own_code(case: Any) -> None:
    skeleton = case.capture.skeleton()
    place = case.capture.structure.layers[1]
    if place.is_direct:
        return
    arguments: list[Any] = []
    with (
        watching(skeleton, place.attention) as watched,
        handling(lambda call: call.q.new_zeros((*call.q.shape[:2], call.v.shape[-1]))),
        skeleton.observed(lambda index, given, run: arguments.append(given) or run(given.hidden)),
    ):
        skeleton.module(input_ids=case.ids[None], use_cache=False)
    name = place.query.module
    move = torch.randn(case.records[1].q.shape, generator=torch.Generator().manual_seed(3))
    flat = torch.zeros_like(watched.outputs[name][0])
    flat[:, place.query.columns] = move.transpose(0, 1)

    def moved(by: float) -> Any:
        outputs = {**watched.outputs, name: watched.outputs[name] + by * flat}
        changed = Watched(args=watched.args, kwargs=watched.kwargs, inputs=watched.inputs, outputs=outputs)
        return query_path(skeleton, place, changed)

    step = 2.0**-6
    difference = (moved(step).query - moved(-step).query).double() / (2 * step)
    pushed = moved(0.0).push_forward(move[None])[0]
    # Third derivatives of a norm give step^2, rounding 1e-7 / step.
    assert_near(pushed.detach(), difference.detach(), share=1e-3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # Clipped in place, fused, interleaved and partly rotated, scaled, and a layer without rotation.
        ("Olmo", {"clip_qkv": 0.5}),
        ("Phi3", {"pad_token_id": 0}),
        ("GPTNeoX", {"num_key_value_heads": None, "rotary_pct": 0.5}),
        ("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 40, "dropout": 0.0}),
        ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
        ("Mixtral", {"num_local_experts": 4}),
        ("Cohere", {}),
    ],
)
def test_families_beyond_the_tested_ones_follow_their_own_code(
    hf: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    given = {key: value for key, value in {**hf.COMMON, **settings}.items() if value is not None}
    if name == "OPT":
        given = {key: value for key, value in given.items() if key not in ("intermediate_size", "num_key_value_heads")}
    model = hf.save(hf.build(name, given), tmp_path)
    capture = hf.open_capture(tmp_path)
    ids, labels = hf.draw()
    records, loss = hf.run(capture, ids, labels)
    model.set_attn_implementation("eager")
    with strict_fp32():
        expected = torch.nn.functional.cross_entropy(model(ids[None], use_cache=False).logits[0], labels)
        expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    weights = dict(model.named_parameters())
    for record, place in zip(records, capture.structure.layers, strict=True):
        assert place.query is not None
        dq = dual_pass(record, FA2, "fp64").dq.hp
        dq = dq if record.query_path is None else record.query_path.pull_back(dq[None])[0]
        found = weight_gradient(dq.double(), record.x.double())
        wanted = weights[f"{place.query.module}.weight"].grad[place.query.columns.flatten()].view(found.shape).double()
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
