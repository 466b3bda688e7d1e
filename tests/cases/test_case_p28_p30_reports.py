"""P28: NaN must not slip through. P29: the metric of an output error is its ulp. P30: one input, one answer."""

import json
from typing import Any

import numpy as np
import pytest
import torch

Q = [[1.0, 0.0]] * 4
K = [[2.0, 0.0], [2.0, 0.0], [1.0, 0.0], [2.0, 0.0]]
V = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


def two_heads(record: Any, **more: Any) -> dict[str, np.ndarray]:
    """P03 input A twice over; only head 1 will be damaged."""
    tensors = record(Q, K, V)
    return {name: np.concatenate([value, value], 1) for name, value in tensors.items()} | more


@pytest.mark.parametrize("recipe", ["fa2", "paper"])
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("k", (0, 1, 1, 0), np.nan),
        ("v", (0, 1, 2, 1), np.inf),
        ("do", (0, 1, 3, 0), np.nan),
        ("q", (0, 1, 0, 1), -np.inf),
    ],
)
def test_p28_non_finite_inputs(
    localize: Any, record: Any, name: str, at: tuple[int, ...], value: float, recipe: str
) -> None:
    clean, tensors = two_heads(record), two_heads(record)
    tensors[name][at] = value
    found = localize(tensors, "--recipe", recipe)
    assert found.exit_code == 2
    position = f"{name}[{', '.join(map(str, at))}]"
    assert found.heads[1]["nonfinite"] == [position]
    (finding,) = [finding for finding in found.document["findings"] if finding["code"] == "BF401"]
    assert position in finding["message"]
    assert found.heads[1]["verdict"] == "cannot judge"
    # Nothing that the NaN touches is printed as 0, and the other head is what it was.
    assert found.heads[1]["delta_err"]["sum"] == "nan"
    if name != "do":
        assert found.heads[1]["output_err"]["max_abs"] == "nan"
    expected = localize(clean, "--recipe", recipe).heads[0]
    assert {**found.heads[0]} == expected


def test_p28_a_masked_key_is_still_reported(localize: Any, record: Any) -> None:
    """Key 2 is hidden from every query: no result rests on it, and none is given for the head."""
    keep = np.ones((4, 4), bool)
    keep[:, 2] = False
    tensors = two_heads(record, mask=keep)
    tensors["k"][0, 1, 2, 0] = np.nan
    found = localize(tensors)
    assert found.exit_code == 2
    assert found.heads[1]["nonfinite"] == ["k[0, 1, 2, 0]"]
    hidden_only = two_heads(record, mask=keep)
    assert found.heads[0] == localize(hidden_only).heads[0]


def test_p28_a_shared_key_touches_its_readers(localize: Any, record: Any) -> None:
    """Grouped heads: the NaN counts against every query head that reads the key, and no other."""
    tensors = two_heads(record)
    tensors["q"] = np.concatenate([tensors["q"]] * 2, 1)
    tensors["do"] = np.concatenate([tensors["do"]] * 2, 1)
    tensors["k"][0, 1, 0, 0] = np.nan
    found = localize(tensors)
    assert [bool(head["nonfinite"]) for head in found.heads] == [False, False, True, True]


def test_p28_in_one_sequence_of_two(localize: Any, record: Any) -> None:
    tensors = {name: np.concatenate([value, value]) for name, value in record(Q, K, V).items()}
    tensors["v"][1, 0, 3, 1] = np.nan
    found = localize(tensors)
    assert (found.exit_code, found.head["nonfinite"]) == (2, ["v[1, 0, 3, 1]"])
    assert localize(tensors, "--sequences", 1).exit_code == 0


def test_p28_fail_on_does_not_hide_it(localize: Any, record: Any) -> None:
    tensors = two_heads(record)
    tensors["v"][0, 0, 0, 0] = np.nan
    assert localize(tensors, "--fail-on", "error").exit_code == 2


PAIRS = [(17.0, 17.125), (17.125, 17.25), (0.00390625, 0.003936767578125)]


def test_p29_half_an_ulp_each(localize: Any, passes: Any) -> None:
    v = np.array(PAIRS, np.float32)[None, :, :, None]
    tensors = {
        "q": np.zeros((1, 3, 1, 2), np.float32),
        "k": np.zeros((1, 3, 2, 2), np.float32),
        "v": v,
        "do": np.ones((1, 3, 1, 1), np.float32),
    }
    (dual,) = passes(tensors)
    assert dual.o_hp.flatten().tolist() == [17.0625, 17.1875, 0.0039215087890625]
    assert dual.o_lp.flatten().tolist() == [17.0, 17.25, 0.00390625]
    heads = localize(tensors).heads
    for head, (hp, lp) in zip(
        heads, [(17.0625, 17.0), (17.1875, 17.25), (0.0039215087890625, 0.00390625)], strict=True
    ):
        error = head["output_err"]
        assert error["max_ulp"] == 0.5
        assert error["max_abs"] == abs(lp - hp)
        # Signed mean, + away from zero.
        assert error["mean_ulp"] == (0.5 if lp > hp else -0.5)
        assert (error["sequence"], error["token"], error["feature"]) == (0, 0, 0)


def test_p29_neighbour_that_bf16_holds(localize: Any) -> None:
    tensors = {
        "q": np.zeros((1, 1, 1, 2), np.float32),
        "k": np.zeros((1, 1, 2, 2), np.float32),
        "v": np.array([17.0, 17.25], np.float32)[None, None, :, None],
        "do": np.ones((1, 1, 1, 1), np.float32),
    }
    assert localize(tensors).head["output_err"]["max_ulp"] == 0.0


def capture() -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(30)

    def normal(*shape: int) -> np.ndarray:
        return torch.randn(shape, generator=generator).bfloat16().float().numpy()

    tensors = {name: normal(3, 2, 64, 32) for name in ("q", "k", "v", "do")}
    return tensors | {"x": normal(3, 64, 16), "w_q": normal(64, 16), "w_k": normal(64, 16)}


def stable(found: Any) -> str:
    """The document without what is declared to vary, and without the command that was typed."""
    document = dict(found.document)
    document["environment"] = {k: v for k, v in document["environment"].items() if k != "volatile"}
    for name in ("command", "next_commands"):
        document.pop(name)
    for finding in document["findings"]:
        finding.pop("next_command", None)
    return json.dumps(document, indent=1)


@pytest.mark.parametrize("recipe", ["fa2", "paper"])
def test_p30_runs_and_threads(localize: Any, save: Any, recipe: str) -> None:
    path = save(capture())
    first = localize(path, "--recipe", recipe)
    assert first.head if len(first.heads) == 1 else len(first.heads) == 2
    expected = stable(first)
    assert stable(localize(path, "--recipe", recipe)) == expected
    for threads in (1, 2, 3):
        was = torch.get_num_threads()
        torch.set_num_threads(min(threads, 2))
        try:
            assert stable(localize(path, "--recipe", recipe, "--threads", threads)) == expected
        finally:
            torch.set_num_threads(was)


def test_p30_only_declared_fields_vary_in_the_text(localize: Any, save: Any) -> None:
    """The same command twice: the same bytes outside environment.volatile."""
    path = save(capture())
    texts = []
    for _ in range(2):
        found = localize(path)
        volatile = json.dumps(found.document["environment"]["volatile"], indent=2)
        kept = [line for line in found.stdout.splitlines() if line.strip().rstrip(",") not in volatile]
        texts.append("\n".join(kept))
    assert texts[0] == texts[1]


def test_p30_alone_and_in_the_batch(localize: Any, passes: Any) -> None:
    tensors = capture()
    together = passes(tensors)
    alone_heads = []
    for sequence in range(3):
        part = {name: value[sequence : sequence + 1] if value.ndim > 2 else value for name, value in tensors.items()}
        (alone,) = passes(part)
        for name in ("o_lp", "o_hp", "o_err", "lse_lp"):
            assert torch.equal(getattr(alone, name), getattr(together[sequence], name)), name
        assert torch.equal(alone.delta.delta_err, together[sequence].delta.delta_err)
        assert torch.equal(alone.dq.lp, together[sequence].dq.lp)
        alone_heads.append(localize(part).heads)
    for head, batch in enumerate(localize(tensors).heads):
        singles = [heads[head] for heads in alone_heads]
        for kind in ("fp32_exact", "rounded", "shared_maximum"):
            assert batch["ones"][kind] == sum(single["ones"][kind] for single in singles)
        for sign in ("positive", "negative", "zero"):
            assert batch["delta_err"][sign] == sum(single["delta_err"][sign] for single in singles)
        assert batch["output_err"]["max_abs"] == max(single["output_err"]["max_abs"] for single in singles)
        assert batch["output_err"]["max_ulp"] in [single["output_err"]["max_ulp"] for single in singles]


def test_p30_p03_input_c_twice(localize: Any, save: Any, record: Any) -> None:
    column = -(128 + (37 * np.arange(128)) % 128) / 64
    path = save(record(np.zeros((128, 2)), np.zeros((128, 2)), np.stack([column, column], 1)))
    assert stable(localize(path)) == stable(localize(path, "--threads", 1))
