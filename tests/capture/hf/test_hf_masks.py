"""From a model's mask to a geometry that shows the same pairs, and the calls that are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.capture.hf.attention import AttentionCall, read_call
from bf16forensics.capture.hf.masks import SequenceMasks
from bf16forensics.errors import InputError

TOKENS = 9


def call(mask: torch.Tensor | None, **more: Any) -> AttentionCall:
    given = {"window": None, "causal": True, "softcap": None, "scale": 0.5, **more}
    q = torch.zeros(4, TOKENS, 2)
    return AttentionCall(module=torch.nn.Identity(), q=q, k=q[:2], v=q[:2], mask=mask, **given)


def causal(tokens: int = TOKENS) -> torch.Tensor:
    return torch.ones(1, tokens, tokens, dtype=torch.bool).tril()


def windowed(window: int) -> torch.Tensor:
    return causal() & torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1 - window)


def shown(geometry: Any) -> torch.Tensor:
    visible = geometry.visible((0, TOKENS), (0, TOKENS), TOKENS, TOKENS)
    return torch.ones(1, TOKENS, TOKENS, dtype=torch.bool) if visible is None else visible


@pytest.mark.parametrize(
    ("mask", "told", "expected"),
    [
        (causal(), {}, (True, None)),
        (causal(), {"window": 4096}, (True, 4096)),
        (windowed(3), {"window": 3}, (True, 3)),
        # A model that builds its window into the mask alone, and one whose window its mask does not have.
        (windowed(3), {}, (True, 3)),
        (windowed(1), {}, (True, 1)),
        (causal(), {"window": 3}, (True, None)),
        (windowed(4), {"window": 3}, (True, 4)),
        (torch.ones(1, TOKENS, TOKENS, dtype=torch.bool), {"causal": False}, (False, None)),
        # A module that calls itself causal and whose mask is not.
        (torch.ones(1, TOKENS, TOKENS, dtype=torch.bool), {}, (False, None)),
        (causal(), {"causal": False}, (True, None)),
    ],
)
def test_a_simple_geometry_is_found_where_one_fits(
    mask: torch.Tensor, told: dict[str, Any], expected: tuple[bool, int | None]
) -> None:
    masks = SequenceMasks()
    geometry = masks.geometry(call(mask, **told))
    assert (geometry.causal, geometry.window) == expected
    assert geometry.keep is None
    assert torch.equal(shown(geometry), mask)
    assert masks.kept_layers == set()


@given(st.integers(0, 2**32), st.booleans())
def test_any_other_mask_is_kept_as_it_is(seed: int, below: bool) -> None:
    mask = torch.rand(1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask = mask & causal() if below else mask
    module = SimpleNamespace(layer_idx=5)
    masks = SequenceMasks()
    made = call(mask)
    object.__setattr__(made, "module", module)
    geometry = masks.geometry(made)
    assert torch.equal(shown(geometry), mask)
    # Key ranges stay short where nothing lies above the diagonal.
    assert geometry.causal == bool((mask <= causal()).all())
    assert (masks.kept_layers == {5}) == (geometry.keep is not None)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_padding_do_not_count(side: str) -> None:
    real = torch.arange(TOKENS) >= 4 if side == "left" else torch.arange(TOKENS) < 5
    mask = causal() & real
    for pads_see in (False, True):
        # What a padded query sees is nobody's business.
        given = torch.where(real[:, None], mask, torch.full_like(mask, pads_see))
        geometry = SequenceMasks(real).geometry(call(given))
        assert (geometry.causal, geometry.window, geometry.keep) == (True, None, None)
        assert torch.equal(shown(geometry), mask & real[:, None])
    leaking = mask.clone()
    leaking[0, 4, 3 if side == "left" else 8] = True
    with pytest.raises(InputError, match="lets real tokens attend to padded ones"):
        SequenceMasks(real).geometry(call(leaking))


def test_padding_of_the_whole_sequence_is_no_error() -> None:
    real = torch.zeros(TOKENS, dtype=torch.bool)
    geometry = SequenceMasks(real).geometry(call(causal() & real))
    assert not shown(geometry).any()


@pytest.mark.parametrize("window", [None, 2])
def test_documents_are_told_by_positions_and_proved(window: int | None) -> None:
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1])
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    together = documents[:, None] == documents[None, :]
    base = causal() if window is None else windowed(window)
    geometry = SequenceMasks(None, positions).geometry(call(base & together, window=window))
    assert torch.equal(geometry.document_ids, documents)
    assert (geometry.window, geometry.keep) == (window, None)
    # A model that lets documents see each other is taken at its word.
    assert SequenceMasks(None, positions).geometry(call(base, window=window)).document_ids is None


def test_additive_masks_become_visibility_and_bias() -> None:
    bias = (
        torch.arange(float(TOKENS))[None, None, :].expand(4, TOKENS, TOKENS)
        * torch.tensor([1.0, 2, 3, 4])[:, None, None]
    )
    for hidden in (-torch.inf, torch.finfo(torch.float32).min):
        geometry = SequenceMasks().geometry(call(bias.masked_fill(~causal(), hidden)))
        assert (geometry.causal, geometry.keep) == (True, None)
        assert torch.equal(geometry.bias, bias * causal())
    geometry = SequenceMasks().geometry(call(torch.zeros(1, TOKENS, TOKENS)))
    assert (geometry.causal, geometry.bias) == (False, None)


def test_each_distinct_mask_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[int] = []
    original = SequenceMasks._prove
    monkeypatch.setattr(
        SequenceMasks, "_prove", lambda self, made, mask: proved.append(1) or original(self, made, mask)
    )
    masks = SequenceMasks()
    first, second = causal(), windowed(2)
    for _ in range(3):
        for mask in (first, second):
            masks.geometry(call(mask[0:1], scale=0.25))
    assert len(proved) == 2
    assert masks.geometry(call(first), scale=3.0).scale == 3.0
    assert masks.geometry(call(first, softcap=4.0), softcap=5.0).softcap == 4.0
    assert masks.geometry(call(first), softcap=5.0).softcap == 5.0
    assert len(proved) == 2


@pytest.mark.parametrize("cap", [0.0, -3.0, float("nan"), float("inf")])
def test_impossible_soft_caps_are_refused(cap: float) -> None:
    with pytest.raises(InputError, match="softcap must be a positive finite number"):
        SequenceMasks().geometry(call(causal(), softcap=cap))


def test_calls_without_a_mask_or_with_a_learned_one_are_refused() -> None:
    with pytest.raises(InputError, match="calls attention without a mask"):
        SequenceMasks().geometry(call(None))
    with pytest.raises(InputError, match="computes its attention mask from hidden states"):
        SequenceMasks().geometry(call(torch.zeros(1, TOKENS, TOKENS, requires_grad=True)))


def read(mask: torch.Tensor | None = None, shapes: Any = None, **arguments: Any) -> AttentionCall:
    module = torch.nn.Identity()
    module.layer_idx = 3
    q, k, v = (torch.zeros(shape) for shape in shapes or ((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 6)))
    return read_call(module, q, k, v, mask, arguments)


def test_what_a_call_says_is_read() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    found = read(mask, scaling=0.3, softcap=2, sliding_window=7, is_causal=False, position_ids=torch.zeros(1, 5))
    assert (found.scale, found.softcap, found.window, found.causal, found.layer) == (0.3, 2.0, 7, False, 3)
    assert [tuple(t.shape) for t in (found.q, found.k, found.v, found.mask)] == [
        (4, 5, 8),
        (2, 5, 8),
        (2, 5, 6),
        (1, 5, 5),
    ]
    silent = read()
    assert (silent.scale, silent.softcap, silent.window, silent.causal) == (8**-0.5, None, None, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("s_aux", torch.zeros(4)),
        ("sinks", torch.zeros(4)),
        ("head_mask", torch.ones(4)),
        ("position_bias", torch.zeros(1)),
        ("dropout", 0.1),
        ("cu_seq_lens_q", torch.zeros(2)),
        ("cache", object()),
        ("never_heard_of", 0),
    ],
)
def test_arguments_that_may_change_numbers_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"Identity of layer 3 passes '{name}' to attention"):
        read(**{name: value})
    assert read(**{name: None}).scale == 8**-0.5


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
        ((1, 6, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8)),
        ((1, 4, 5, 8), (1, 2, 5, 6), (1, 2, 5, 6)),
        ((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 4, 8)),
    ],
    ids=["two sequences", "6 heads on 4", "sizes of q and k", "lengths of k and v"],
)
def test_shapes_that_do_not_fit_are_refused(shapes: Any) -> None:
    with pytest.raises(InputError, match="do not fit together"):
        read(shapes=shapes)


@pytest.mark.parametrize("shape", [(1, 3, 5, 5), (1, 1, 5, 6), (2, 1, 5, 5), (5, 5)])
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"mask of shape .* for \[4, 5, 5\] scores"):
        read(torch.ones(shape, dtype=torch.bool))
