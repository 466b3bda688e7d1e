"""The JSON document of trace-head: strict, complete, bounded, and the same for the same trace."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest

from bf16forensics.recipe.presets import FA2
from bf16forensics.report.jsonio import dumps
from bf16forensics.report.trace.document import MAX_JUMPS, MAX_KEYS, trace_document

ARRAYS = ("keys", "p_bar", "v", "is_one", "tile_end", "exists", "running_lp", "running_hp", "error", "half_ulp")


@pytest.fixture
def document(traces):
    """The document of a trace after a way through text."""

    def of(trace=None, **context):
        text = dumps(trace_document(trace or traces.trace(), traces.context(**context)))

        def refuse(name):
            raise AssertionError(f"{name} is not strict JSON")

        return json.loads(text, parse_constant=refuse)

    return of


def test_golden_document(traces, fakes, repository):
    short = traces.trace(
        cumulative=traces.cumulative(12),
        tokens=traces.trace().tokens[:3],
        token=traces.token_trace(count=4),
        v_all=np.zeros(3, np.float32),
        ties=traces.ties(bits_dropped=(1, 0), residue_ulp=(0.5, -0.5), error_ulp=(0.25, 0.0), law_ulp=(0.25, 0.0)),
    )
    text = dumps(trace_document(short, traces.context()))
    fakes.check_golden(repository / "tests" / "golden" / "trace.json", text)


def test_keys_in_the_order_of_the_contract(document):
    names = (
        "schema_version tool command environment inputs recipe reference head tokens token traced cumulative jumps "
        "row_jumps ties notes next_commands"
    )
    assert list(document()) == names.split()
    assert document()["schema_version"] == 1
    assert document()["tool"] == {"name": "bf16forensics", "version": "0.1.0"}


def test_every_field_of_the_trace_is_in_it(document, traces):
    built = document()
    names = {*built, *built["head"], *built["cumulative"], *built["cumulative"]["arrays"]}
    # Rows and V of the whole sequence are in the export; here stand sums by sequence.
    assert {field.name for field in fields(traces.trace())} - names == {"delta_err", "v_all"}
    assert {field.name for field in fields(traces.cumulative())} - names == set()
    for name, sample in (("traced", traces.token()), ("token", traces.token_trace()), ("ties", traces.ties())):
        assert set(built[name]) == {field.name for field in fields(sample)}
    assert set(built["token"]["features"][0]) == {field.name for field in fields(traces.features()[0])}
    assert set(built["jumps"][0]) == {field.name for field in fields(traces.cumulative().jumps[0])}
    assert set(built["recipe"]) == {field.name for field in fields(FA2)}


def test_numbers_read_back_equal(document, traces):
    trace, built = traces.trace(), document()
    cumulative = trace.cumulative
    for name in ARRAYS:
        np.testing.assert_array_equal(built["cumulative"]["arrays"][name], getattr(cumulative, name))
    assert [item["contribution"] for item in built["token"]["features"]] == [
        item.contribution for item in trace.token.features
    ]
    assert math.fsum(item["contribution"] for item in built["token"]["features"]) == built["token"]["contributions"]
    assert len(built["tokens"]) == len(trace.tokens)
    assert built["head"]["delta_err_sum"] == trace.delta_err_sum
    rows = [math.fsum(value for value in row if not math.isnan(value)) for row in trace.delta_err.tolist()]
    assert built["head"]["delta_err_by_sequence"] == rows
    assert built["inputs"]["files"][0]["sha256"] == "0123456789abcdef" * 4


def test_counts_and_extremes(document, traces):
    cumulative, built = traces.cumulative(), document()["cumulative"]
    errors = cumulative.error.tolist()
    assert (built["num_keys"], built["num_ones"], built["num_exist"]) == (160, int(cumulative.is_one.sum()), 3)
    for name, value in (("least", min(errors)), ("largest", max(errors)), ("end", errors[-1])):
        found = built["extremes"][name]
        assert found["error"] == value == errors[found["position"]]
        assert found["key"] == cumulative.keys[found["position"]]
    assert 0 < built["largest_share_of_bound"] <= 1


@pytest.mark.parametrize(("keys", "whole"), [(1, True), (MAX_KEYS, True), (MAX_KEYS + 1, False)])
def test_arrays_are_bounded(document, traces, keys, whole):
    built = document(traces.trace(cumulative=traces.cumulative(keys)))
    assert (built["cumulative"]["arrays"] is not None) is whole
    assert built["cumulative"]["num_keys"] == keys
    assert built["cumulative"]["extremes"]["end"]["position"] == keys - 1
    assert len(built["jumps"]) == min(keys, MAX_JUMPS)


def test_what_does_not_exist_is_null(document, traces):
    free = traces.cumulative(half_ulp=None, bound_exceeded=None)
    built = document(traces.without_gradient(cumulative=free, ties=None), activations=None, case=None)
    assert built["token"] is None
    assert built["ties"] is None
    assert built["head"]["delta_err_sum"] == "nan"
    assert built["head"]["delta_err_by_sequence"] is None
    assert built["tokens"][0]["delta_err"] == "nan"
    assert built["tokens"][0]["step"] is None
    assert built["cumulative"]["arrays"]["half_ulp"] is None
    assert built["cumulative"]["largest_share_of_bound"] is None
    assert (built["inputs"]["activations"], built["inputs"]["case"]) == (None, None)


def test_what_is_not_finite_is_text(document, traces):
    error = traces.cumulative().error.copy()
    error[[3, 7]] = math.inf, math.nan
    built = document(traces.trace(cumulative=traces.cumulative(error=error)))["cumulative"]
    assert built["arrays"]["error"][3] == "inf"
    assert built["arrays"]["error"][7] == "nan"
    assert math.isfinite(built["extremes"]["largest"]["error"])
    lost = np.full(160, math.nan)
    assert document(traces.trace(cumulative=traces.cumulative(error=lost)))["cumulative"]["extremes"] is None


def test_only_the_volatile_part_differs_between_runs(traces):
    trace, context = traces.trace(), traces.context()
    later = replace(
        context,
        elapsed_s=9.0,
        environment=replace(context.environment, date="2027", host="b", threads=8, working_directory="/x"),
    )
    first, second = trace_document(trace, context), trace_document(trace, later)
    assert first["environment"].pop("volatile") != second["environment"].pop("volatile")
    assert dumps(first) == dumps(second)


def test_next_commands_are_those_of_the_terminal(document):
    bits, rerun = document()["next_commands"]
    assert bits.startswith("bf16forensics bits --event case:L1.H2:s3:t50:f20:k")
    assert rerun.endswith("--accumulator sm90")
