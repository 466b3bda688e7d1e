"""One head of a source traced down to one row and feature."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.commands._demo_twins import BUNDLED, PLANTED
from bf16forensics.emulate.rounding import ulp_of
from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.results import HeadTrace
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.investigate.localize import SequencesDone
from bf16forensics.investigate.trace import TracedHead, TraceRequest, trace_head
from bf16forensics.investigate.trace_sequence import head_record
from bf16forensics.recipe.derive import resolve

Source = Any
MakeSource = Callable[..., Source]
LAYERS, HEADS, TOKENS, SIZE = 2, 4, 20, 8


def request(name: str = "fa2", **options: Any) -> TraceRequest:
    return TraceRequest(**({"layer": 1, "head": 2, "recipe": resolve(name)} | options))


def traced(source: Source, name: str = "fa2", **options: Any) -> HeadTrace:
    return trace_head(source, request(name, **options)).result


def same(first: TracedHead, second: TracedHead) -> bool:
    """Equal in every number; nan equals nan."""
    return repr(arrays_as_bytes(first.result)) == repr(arrays_as_bytes(second.result))


def arrays_as_bytes(found: HeadTrace) -> list[object]:
    trace = found.cumulative
    fields = [getattr(trace, name) for name in trace.__dataclass_fields__]
    flat = [value.tobytes() if isinstance(value, np.ndarray) else value for value in fields]
    return [flat, found.delta_err.tobytes(), found.tokens, found.token, found.delta_err_sum, found.ties, found.notes]


def dense(source: Source, name: str = "fa2", layer: int = 1, head: int = 2) -> tuple[np.ndarray, list[Any]]:
    """delta_err [S, N] of a head and the dual passes, computed for all heads together."""
    duals = [dual_pass(records[layer], resolve(name)) for records in source.sequences]
    return np.stack([dual.delta.delta_err[head].numpy() for dual in duals]), duals


# -- which row and feature --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["fa2", "paper"])
def test_the_worst_token_and_feature_are_those_of_the_dual_pass(
    make_source: MakeSource, name: str, kv_heads: int
) -> None:
    source = make_source(kv_heads=kv_heads)
    errors, duals = dense(source, name)
    found = traced(source, name)
    assert found.delta_err.tobytes() == errors.tobytes()
    assert found.delta_err_sum == math.fsum(errors.ravel().tolist())
    sequence, token = np.unravel_index(np.abs(errors).argmax(), errors.shape)
    assert (found.traced.sequence, found.traced.token) == (sequence, token)
    assert found.traced == found.tokens[0]
    assert [abs(t.delta_err) for t in found.tokens] == sorted(np.abs(errors).ravel().tolist(), reverse=True)
    assert found.token is not None
    o_err = duals[sequence].o_err[2, token]
    each = source.sequences[sequence][1].do[2, token].double() * o_err
    assert found.cumulative.feature == int(each.abs().argmax())
    assert found.token.features[0].contribution == each.abs().max() * each[each.abs().argmax()].sign()
    assert math.fsum([found.token.contributions, found.token.remainder]) == found.traced.delta_err
    kv = 2 // (4 // kv_heads)
    assert found.v_all.tolist() == source.sequences[sequence][1].v[kv, :, found.cumulative.feature].tolist()
    assert found.cumulative.o_lp == duals[sequence].o_lp[2, token, found.cumulative.feature]
    assert found.cumulative.o_hp == duals[sequence].o_hp[2, token, found.cumulative.feature]


def test_counts_of_the_head(make_source: MakeSource) -> None:
    source = make_source()
    errors, duals = dense(source)
    found = traced(source)
    floor = np.stack([dual.delta.magnitude[2].numpy() for dual in duals]) * 2.0**-22
    assert (found.positive, found.negative) == ((errors > floor).sum(), (errors < -floor).sum())
    assert (found.rows, found.num_queries, found.num_features) == (80, TOKENS, SIZE)
    assert (found.layer, found.head, found.sequences, found.sequences_of_run) == (1, 2, (0, 1, 2, 3), 4)
    first = next(t for t in found.tokens if (t.sequence, t.token) == (2, 5))
    assert (first.index, first.step, first.visible) == (2, 101, 6)
    assert first.ones == duals[2].maxima.ones_rounded[2, 5]
    assert first.defect == duals[2].delta.defect[2, 5]
    largest = duals[2].o_err[2, 5].abs()
    assert first.o_err_feature == int(largest.argmax())
    step = ulp_of(duals[2].o_hp[2, 5], "bf16")[first.o_err_feature]
    assert first.o_err_max_ulp == largest.max() / step


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"sequence": 3}, (3, None, None)),
        ({"sequence": 1, "token": 7}, (1, 7, None)),
        ({"token": 7}, (None, 7, None)),
        ({"sequence": 0, "token": 0, "feature": 5}, (0, 0, 5)),
        ({"feature": 0}, (None, None, 0)),
    ],
)
def test_what_is_asked_for_is_traced_and_the_rest_is_the_worst(make_source: MakeSource, asked, expected) -> None:
    source = make_source()
    errors, _ = dense(source)
    found = traced(source, **asked)
    among = np.abs(errors)
    if expected[0] is not None:
        among = np.where(np.arange(4)[:, None] == expected[0], among, -1)
    if expected[1] is not None:
        among = np.where(np.arange(TOKENS)[None] == expected[1], among, -1)
    assert (found.traced.sequence, found.traced.token) == np.unravel_index(among.argmax(), among.shape)
    if expected[2] is not None:
        assert found.cumulative.feature == expected[2]
    # The sums are of the whole head all the same.
    assert found.delta_err_sum == math.fsum(errors.ravel().tolist())


def test_without_do_the_largest_error_of_o_is_traced(make_source: MakeSource) -> None:
    source = make_source()
    for sequence in range(4):
        source.change(1, sequence, do=None)
    duals = [dual_pass(records[1], resolve("fa2")) for records in source.sequences]
    found = traced(source)
    assert found.token is None
    assert math.isnan(found.delta_err_sum)
    assert np.isnan(found.delta_err).all()
    assert found.traced.o_err_max_ulp == max(token.o_err_max_ulp for token in found.tokens)
    o_err = duals[found.traced.sequence].o_err[2, found.traced.token]
    assert found.cumulative.feature == found.traced.o_err_feature == int(o_err.abs().argmax())
    assert any("holds no dO" in note for note in found.notes)


def test_a_forward_recipe_has_no_delta(make_source: MakeSource) -> None:
    found = traced(make_source(kv_heads=2), "fa3-fp8")
    assert found.token is None
    assert any("forward pass only" in note for note in found.notes)
    assert any("2 query heads" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fa2", "rounding of delta itself to fp32"),
        ("eager", "takes delta from dP * P"),
        ("fa2+delta_products=bf16", "rounds the products dO * O to bf16"),
    ],
)
def test_the_remainder_is_explained(make_source: MakeSource, name: str, words: str) -> None:
    assert any(words in note for note in traced(make_source(), name).notes)


def test_padding_and_masked_rows_are_left_out(make_source: MakeSource) -> None:
    source = make_source()
    real = torch.ones(TOKENS, dtype=torch.bool)
    real[:3] = False
    keep = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool)
    keep[0, 10] = False
    geometry = Geometry(scale=SIZE**-0.5, key_padding=real, query_padding=real, keep=keep)
    source.change(1, 0, geometry=geometry)
    found = traced(source)
    out = np.isnan(found.delta_err)
    assert np.flatnonzero(out[0]).tolist() == [0, 1, 2, 10]
    assert not out[1:].any()
    assert found.rows == 76
    for token in (1, 10):
        with pytest.raises(InputError, match=rf"token {token} of sequence 0 does not exist, is padding or sees no key"):
            traced(source, sequence=0, token=token)
    # Another sequence has the row.
    assert traced(source, token=1).traced.sequence != 0


def test_masks_and_biases_are_those_of_the_head(make_source: MakeSource) -> None:
    source = make_source()
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(HEADS, TOKENS, TOKENS, generator=generator) < 0.7
    bias = torch.randn(HEADS, TOKENS, TOKENS, generator=generator)
    for sequence in range(4):
        source.change(1, sequence, geometry=Geometry(scale=SIZE**-0.5, keep=keep, bias=bias))
    errors, duals = dense(source)
    found = traced(source, sequence=0, token=19)
    visible = (keep[2] & torch.ones(TOKENS, TOKENS).tril().bool()).sum(-1)
    assert np.nan_to_num(found.delta_err).tobytes() == (errors * (visible > 0).numpy()).tobytes()
    assert found.cumulative.keys.tolist() == keep[2, 19].nonzero()[:, 0].tolist()
    assert found.cumulative.o_lp == duals[0].o_lp[2, 19, found.cumulative.feature]


# -- walks and accumulators -------------------------------------------------------------------------------------------


def test_the_walks_are_handed_out(make_source: MakeSource) -> None:
    source = make_source()
    found = trace_head(source, request("fa2+tile_k=4", accumulator="tile:2", sequence=1, token=17))
    assert [walk.recipe for walk in (found.run_walk, found.walk)] == ["fa2+tile_k=4", "fa2+tile_k=2"]
    assert found.ascending.recipe == "fa2+tile_k=20,tile_order=ascending"
    assert found.result.cumulative.walk_recipe == found.walk.recipe
    dual = dual_pass(source.sequences[1][1], resolve("fa2+tile_k=4"))
    assert found.run_walk.o.tolist() == dual.o_lp[2, 17].tolist()
    assert list(found.o_hp) == dual.o_hp[2, 17].tolist()
    assert len(found.result.cumulative.keys) == 18


@pytest.mark.parametrize("accumulator", ["fp32-prefix", "bf16-each-add", "tile:7", "sm80", "sm90", "sm100", "exact"])
def test_every_accumulator_is_traced_alike_each_time(make_source: MakeSource, accumulator: str) -> None:
    source = make_source()
    first = trace_head(source, request("paper", accumulator=accumulator))
    assert first.result.cumulative.accumulator == accumulator
    assert same(first, trace_head(source, request("paper", accumulator=accumulator, workers=3)))


def test_an_fp32_p_has_no_matrix_unit(make_source: MakeSource) -> None:
    with pytest.raises(InputError, match=r"sm90 multiplies 16-bit operands; recipe sdpa-math has fp32 P"):
        traced(make_source(), "sdpa-math", accumulator="sm90")


def test_ties_speak_of_the_runs_own_recipe(make_source: MakeSource) -> None:
    found = traced(make_source(), "paper", accumulator="tile:4")
    assert found.ties is not None
    assert found.ties.point == "o_bar"
    assert traced(make_source(), "fa4").ties is None


# -- some sequences, and one row alone --------------------------------------------------------------------------------


def test_only_the_sequences_asked_for_are_run(make_source: MakeSource) -> None:
    source = make_source()
    errors, _ = dense(source)
    found = traced(source, sequences=(1, 3))
    assert source.handed_out == [1, 3]
    assert (found.sequences, found.sequences_of_run) == ((1, 3), 4)
    assert found.delta_err.tobytes() == errors[[1, 3]].tobytes()
    assert [token.index for token in found.tokens if token.sequence == 3] == [1] * TOKENS
    assert traced(source, sequences=(1,), sequence=2).sequences == (1, 2)


class Resized:
    """A source that says how long its longest sequence is."""

    def __init__(self, source: Source, num_queries: int) -> None:
        self.shape = replace(source.shape, num_queries=num_queries)
        self.records, self.handed_out = source.records, source.handed_out


@pytest.mark.parametrize("name", ["fa2", "paper", "flex", "sdpa-cpu"])
def test_one_row_alone_is_the_row_of_the_whole(make_source: MakeSource, name: str) -> None:
    source = make_source()
    # Two blocks of rows, so that one is left out.
    record = source.sequences[1][1]
    long = {name: torch.cat([getattr(record, name)] * 8, 1) for name in ("q", "k", "v", "do")}
    source.change(1, 1, **long)
    source = Resized(source, 160)
    whole = traced(source, name, sequence=1, token=150)
    source.handed_out.clear()
    found = traced(source, name, sequence=1, token=150, rank=False)
    assert source.handed_out == [1]
    assert found.token is not None
    assert whole.token is not None
    assert replace(found.traced, index=1) == whole.traced
    assert found.token.features == whole.token.features
    assert found.cumulative.error.tobytes() == whole.cumulative.error.tobytes()
    assert (found.rows, found.tokens) == (1, (found.traced,))
    assert found.delta_err_sum == found.traced.delta_err
    assert np.isnan(found.delta_err).sum() == 159
    assert any("tokens are not ranked" in note for note in found.notes)
    # The other sequences do not have the token.
    assert traced(source, name, token=150).traced == whole.traced
    for rank in (True, False):
        with pytest.raises(InputError, match=r"token 150 is out of range; sequence 0 has tokens 0 to 19"):
            traced(source, name, sequence=0, token=150, rank=rank)


def test_progress_is_told_after_each_sequence(make_source: MakeSource) -> None:
    told: list[SequencesDone] = []
    trace_head(make_source(), request(), told.append)
    assert told == [SequencesDone(done=done, planned=4) for done in (1, 2, 3, 4)]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": 2}, "layer 2 is out of range; the input has layers 0 to 1"),
        ({"layer": -1}, "layer -1 is out of range"),
        ({"head": 4}, "head 4 is out of range; the input has heads 0 to 3"),
        ({"sequence": 4}, "sequence 4 is out of range; the input has sequences 0 to 3"),
        ({"sequences": (0, 9)}, "sequence 9 is out of range"),
        ({"sequences": ()}, "no sequence to trace"),
        ({"token": 20}, "token 20 is out of range; the input has tokens 0 to 19"),
        ({"token": -1}, "token -1 is out of range"),
        ({"feature": 8}, "feature 8 is out of range; V has features 0 to 7"),
        ({"accumulator": "fp8"}, "unknown accumulator 'fp8'"),
        ({"reference": "bf16"}, "reference must be fp32 or fp64"),
        ({"rank": False}, "needs both a sequence and a token"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_line(make_source: MakeSource, options, words: str) -> None:
    with pytest.raises(InputError) as caught:
        traced(make_source(), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_tensor_that_is_not_finite_is_named(make_source: MakeSource, name: str, value: float) -> None:
    source = make_source(kv_heads=2)
    tensor = getattr(source.sequences[2][1], name).clone()
    tensor[1 if name in "kv" else 2, 5, 3] = value
    source.change(1, 2, **{name: tensor})
    where = f"{name}[2, {1 if name in 'kv' else 2}, 5, 3] (sequence, head of the record, token, entry) is {value}"
    with pytest.raises(InputError, match=re.escape(f"L1.H2 cannot be traced: {where}")) as caught:
        traced(source)
    assert "\n" not in str(caught.value)
    # It is nobody else's.
    assert traced(source, head=1).rows == 80
    assert traced(source, sequences=(0, 1, 3)).rows == 60


def test_a_record_of_the_head_alone_gives_the_same(make_source: MakeSource) -> None:
    source = make_source(kv_heads=2)
    whole = trace_head(source, request())
    alone = make_source(kv_heads=1)
    for sequence in range(4):
        record = head_record(source.sequences[sequence][1], 2)
        alone.change(1, sequence, **{name: getattr(record, name) for name in ("q", "k", "v", "do")})
    alone = Resized(alone, TOKENS)
    alone.shape = replace(alone.shape, num_heads=1)
    assert same(trace_head(alone, request(head_of_record=0)), whole)
    with pytest.raises(InputError, match=r"head 1 is out of range; the input has heads 0 to 0"):
        traced(alone, head_of_record=1)


def test_a_layer_that_was_not_captured_is_named(make_source: MakeSource) -> None:
    class Partial:
        shape = make_source().shape

        def records(self, sequence: int, on_loss: object) -> Iterator[AttentionRecord]:
            yield make_source().sequences[sequence][0]

    with pytest.raises(InputError, match=r"layer 1 of sequence 0 was not captured"):
        traced(Partial())


# -- the planted head -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted() -> TracedHead:
    """The overwritten head of the bundled checkpoint under its recipe, over the first recorded step."""
    source = PLANTED.run(BUNDLED, threads=1).opened.source
    return trace_head(source, request("fa2+o_bar=bf16", layer=1, head=2, sequences=(0, 1, 2, 3)))


def test_the_planted_head_shares_a_sign(planted: TracedHead) -> None:
    found = planted.result
    assert found.positive > 10 * found.negative
    assert found.token is not None
    assert found.token.signs.correlation == 1.0
    assert math.fsum([found.token.contributions, found.token.remainder]) == found.traced.delta_err


def test_the_planted_heads_largest_jump_is_at_a_one(planted: TracedHead) -> None:
    found = planted.result.cumulative
    assert found.bound_exceeded == 0
    # A row of this head has two keys with P-bar = 1, of which the first is the first large term of the sum.
    assert found.is_one.sum() == 2
    assert found.jumps[0].is_one
    assert abs(found.jumps[0].size) > 100 * abs(found.jumps[1].size)
    assert found.v.max() < 0
