"""What changes a model's attention arrives: the same logits as transformers' own eager attention, and other ones than
without the change. Padding, positions, packed documents."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.capture.hf.attention import handling
from bf16forensics.capture.hf.masks import SequenceMasks
from bf16forensics.emulate.strict import strict_fp32

GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def eager(model: Any, ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad(), strict_fp32():
        return model(input_ids=ids[None], use_cache=False, **more).logits[0]


def captured(capture: Any, ids: torch.Tensor, real: torch.Tensor | None = None, **more: torch.Tensor) -> torch.Tensor:
    """Logits of the captured forward pass."""
    masks = SequenceMasks(real, None if "position_ids" not in more else more["position_ids"][0])

    def attend(call: Any) -> torch.Tensor:
        geometry = masks.geometry(call, scale=capture.model.scale, softcap=capture.model.softcap)
        return capture.activations.attend(call.q, call.k, call.v, geometry)

    with torch.no_grad(), strict_fp32(), handling(attend):
        return capture.skeleton().module(input_ids=ids[None], use_cache=False, **more).logits[0]


@pytest.mark.parametrize(
    ("name", "settings", "change"),
    [
        ("Llama", {}, {"num_key_value_heads": 1}),
        ("Llama", {}, {"rope_theta": 300.0}),
        ("Llama", {}, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
        ("Mistral", {"sliding_window": None}, {"sliding_window": 4}),
        ("Gemma2", GEMMA2, {"query_pre_attn_scalar": 3}),
        ("Gemma2", GEMMA2, {"attn_logit_softcapping": 0.5}),
        ("Gemma2", GEMMA2, {"final_logit_softcapping": 2.0}),
        ("Gemma2", GEMMA2, {"sliding_window": 2}),
        ("Gemma3", GEMMA2, {"query_pre_attn_scalar": 3}),
        ("Granite", {}, {"attention_multiplier": 0.05}),
        ("GPT2", {}, {"scale_attn_by_inverse_layer_idx": True}),
        ("GPT2", {}, {"scale_attn_weights": False}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_a_setting_changes_the_model_as_it_does_in_transformers(
    hf: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any], change: dict[str, Any]
) -> None:
    base = {} if name == "GPT2" else hf.COMMON
    if name == "GPT2":
        base = hf.FAMILIES["gpt2"][1]
    ids, _ = hf.draw()
    found = {}
    for which, more in (("without", {}), ("with", change)):
        # Drawn in the order of the parameters: the same weights where no shape changed.
        model = hf.save(hf.build(name, {**base, **settings, **more}), tmp_path / which)
        found[which] = captured(hf.open_capture(tmp_path / which), ids)
        # FP32 on both sides, some 50 roundings deep.
        torch.testing.assert_close(found[which], eager(model, ids), rtol=1e-5, atol=1e-5)
    assert float((found["with"] - found["without"]).abs().max()) > 1e-2


@pytest.fixture(scope="module")
def llama(hf: ModuleType, plain: ModuleType, tmp_path_factory: Any) -> Any:
    return hf.make_twins(plain, "llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mistral(hf: ModuleType, plain: ModuleType, tmp_path_factory: Any) -> Any:
    return hf.make_twins(plain, "mistral", tmp_path_factory.mktemp("mistral"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen_by_nobody(hf: ModuleType, llama: Any, side: str) -> None:
    ids, labels = hf.draw()
    real = torch.arange(12) >= 3 if side == "left" else torch.arange(12) < 9
    labels[~real] = -100
    positions = (real.long().cumsum(0) - 1).clamp(min=0)
    records, loss = hf.run(llama.capture, ids, labels, real=real, position_ids=positions)
    alone, alone_loss = hf.run(llama.capture, ids[real], labels[real])
    assert loss == pytest.approx(alone_loss, rel=1e-6)
    for record, expected in zip(records, alone, strict=True):
        geometry = record.geometry
        assert torch.equal(geometry.key_padding, real)
        assert torch.equal(geometry.query_padding, real)
        assert geometry.keep is None
        for name in ("q", "k", "v", "do"):
            found, wanted = getattr(record, name)[:, real], getattr(expected, name)
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-5 * float(wanted.abs().max()))
        assert not record.do[:, ~real].any()
    more = {"attention_mask": real.long()[None], "position_ids": positions[None]}
    logits = captured(llama.capture, ids, real, **more)
    torch.testing.assert_close(logits[real], eager(llama.model, ids, **more)[real], rtol=1e-5, atol=1e-5)
    assert float((logits - captured(llama.capture, ids))[real].abs().max()) > (1e-2 if side == "left" else -1)


def test_padding_that_pads_nothing_changes_nothing(hf: ModuleType, llama: Any) -> None:
    ids, labels = hf.draw()
    plain_records, _ = hf.run(llama.capture, ids, labels)
    records, _ = hf.run(llama.capture, ids, labels, real=torch.ones(12, dtype=torch.bool))
    for record, expected in zip(records, plain_records, strict=True):
        assert record.geometry.key_padding is None
        assert torch.equal(record.do, expected.do)


def test_positions_arrive(hf: ModuleType, plain: ModuleType, llama: Any, tmp_path: Path) -> None:
    ids, labels = hf.draw()
    gpt2 = hf.make_twins(plain, "gpt2", tmp_path)
    for twins, moves_loss in ((gpt2, True), (llama, False)):
        records, loss = hf.run(twins.capture, ids, labels, position_ids=torch.arange(12) + 9)
        expected = float(twins.twin.loss(ids, labels, torch.arange(12) + 9, twins.visible_of).detach())
        assert loss == pytest.approx(expected, rel=1e-6)
        # Rotations turn q and k together: the loss of a rotary model does not know where a sequence starts.
        assert (abs(loss - hf.run(twins.capture, ids, labels)[1]) > 1e-3) == moves_loss
        for record, seen in zip(records, twins.twin.seen, strict=True):
            torch.testing.assert_close(record.q.double(), seen.q.detach(), rtol=0.0, atol=3e-5)
        assert records[0].geometry.document_ids is None


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_documents_are_documents_alone(hf: ModuleType, request: pytest.FixtureRequest, family: str) -> None:
    twins = request.getfixturevalue(family)
    ids, labels = hf.draw(tokens=16)
    pieces = (slice(0, 3), slice(3, 4), slice(4, 16))
    positions = torch.cat([torch.arange(piece.stop - piece.start) for piece in pieces])
    records, _ = hf.run(twins.capture, ids, labels, position_ids=positions)
    for record in records:
        assert record.geometry.document_ids.tolist() == [0] * 3 + [1] + [2] * 12
        assert record.geometry.keep is None
        assert record.geometry.window == (5 if family == "mistral" else None)
    for piece in pieces:
        alone, _ = hf.run(twins.capture, ids[piece], labels[piece])
        share = (piece.stop - piece.start) / 16
        for record, expected in zip(records, alone, strict=True):
            for name in ("q", "k", "v"):
                torch.testing.assert_close(getattr(record, name)[:, piece], getattr(expected, name), rtol=0, atol=2e-5)
            wanted = expected.do * share
            torch.testing.assert_close(record.do[:, piece], wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    assert any("new document starts" in note for note in twins.capture.notes)
    logits = captured(twins.capture, ids, position_ids=positions[None])
    expected_logits = eager(twins.model, ids, position_ids=positions[None])
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)


def test_a_batch_that_the_model_cannot_take_is_refused(hf: ModuleType, plain: ModuleType, tmp_path: Path) -> None:
    from bf16forensics.errors import InputError

    ids, labels = hf.draw()
    twins = hf.make_twins(plain, "gpt2", tmp_path)
    with pytest.raises(InputError, match=r"transformer\.wpe\.weight has 64 rows; the batch asks for row 64"):
        hf.run(twins.capture, ids, labels, position_ids=torch.arange(12) + 53)
    ids[3] = 64
    with pytest.raises(InputError, match=r"transformer\.wte\.weight has 64 rows; the batch asks for row 64"):
        hf.run(twins.capture, ids, labels)
    ids[3] = -1
    with pytest.raises(InputError, match="the batch asks for row -1"):
        hf.run(twins.capture, ids, labels)
