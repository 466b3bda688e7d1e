"""The JSON document: its fields, their order, strictness and stability."""

import dataclasses
import json
import math

import pytest

from bf16forensics.report.document import document
from bf16forensics.report.environment import collect
from bf16forensics.report.jsonio import dumps
from bf16forensics.verdict.judge import judge

STATISTICS = [
    "sum",
    "mean",
    "standard_error",
    "z",
    "positive",
    "negative",
    "zero",
    "clustered",
    "robust",
]


def _refuse(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture
def build(fakes):
    """The document of a run, after a trip through a strict parser."""

    def of(result, environment=None):
        judgement = judge(result, command=fakes.COMMAND)
        built = document(result, judgement, command=fakes.COMMAND, environment=environment or fakes.ENVIRONMENT)
        parsed = json.loads(dumps(built), parse_constant=_refuse)
        assert parsed == built
        return parsed

    return of


def test_the_first_keys_are_the_contract_in_order(build, fakes):
    built = build(fakes.mixed())
    assert list(built)[:11] == [
        *("schema_version", "tool", "command", "environment", "inputs", "recipe", "reference", "verdict", "findings"),
        *("heads", "unused_tensors"),
    ]
    assert built["schema_version"] == 1
    assert built["command"] == list(fakes.COMMAND)
    assert built["verdict"] == "compounding bias"
    assert built["reference"] == "fp64"
    assert built["recipe"]["name"] == "fa2"
    assert built["unused_tensors"] == ["transformer.h.0.attn.q_norm.weight"]


def test_a_head_has_every_field_of_the_contract(build, fakes):
    head = build(fakes.mixed())["heads"][4]
    assert (head["layer"], head["head"], head["name"], head["verdict"]) == (1, 0, "L1.H0", "compounding bias")
    assert list(head)[:12] == [
        *("layer", "head", "delta_err", "delta_defect", "output_err", "ones", "rows", "rows_repeated_max"),
        *("rows_fully_masked", "w_q_spectral_norm", "w_k_spectral_norm", "dw_q"),
    ]
    assert list(head["delta_err"]) == list(head["delta_defect"]) == STATISTICS
    assert list(head["output_err"])[:4] == ["mean_ulp", "max_abs", "token", "feature"]
    assert list(head["ones"]) == ["fp32_exact", "rounded", "shared_maximum"]
    assert list(head["dw_q"])[:15] == [
        *("norm", "error_full_relative", "error_defect_relative", "error_total_relative", "sequences", "n_effective"),
        *("rho", "bias", "bias_upper", "minimum_detectable", "p_adjusted", "functional_relative", "flat_share"),
        *("coherence", "bias_lower"),
    ]
    # The flat fields are the defect part's, the whole error has its own object.
    assert head["dw_q"]["rho"] == 0.4
    assert (head["dw_q"]["bias"], head["dw_q"]["total"]["bias"]) == (3.0, 3.1)
    assert head["dw_q"]["norm_detected"] is True
    assert head["dw_q"]["telescope"]["share_defect"] == 0.95
    assert [step["step"] for step in head["dw_q"]["steps"]] == [101, 102]
    assert head["rows_repeated_max"] == 310


def test_nothing_of_the_evidence_is_lost(build, fakes):
    head, built = fakes.head(), build(fakes.result(fakes.head()))["heads"][0]
    for field in dataclasses.fields(head):
        if field.name == "counts":
            names = [inner.name for inner in dataclasses.fields(head.counts)]
            assert all(built[name] == getattr(head.counts, name) for name in names)
        elif field.name != "dw_q":
            assert field.name in built
    inner = {field.name for field in dataclasses.fields(head.dw_q)} - {"defect"}
    inner |= {field.name for field in dataclasses.fields(head.dw_q.defect)}
    assert inner <= set(built["dw_q"])


def test_missing_evidence_is_null(build, fakes):
    head = fakes.head(delta_err=None, delta_defect=None, ds_row_sum=None, dw_q=None, spectrum=None)
    built = build(fakes.result(head))["heads"][0]
    for name in ("delta_err", "delta_defect", "dw_q", "w_q_spectral_norm", "w_k_spectral_norm", "spectrum"):
        assert built[name] is None


def test_numbers_that_are_not_finite_are_strings(build, fakes):
    dw_q = fakes.coupling(norm=math.inf, signal=-math.inf, coherence_steps=math.nan)
    built = build(fakes.result(fakes.head(dw_q=dw_q, score_abs_max=math.nan), loss=math.nan))
    head = built["heads"][0]
    assert (head["dw_q"]["norm"], head["dw_q"]["signal"], head["dw_q"]["coherence_steps"]) == ("inf", "-inf", "nan")
    assert head["score_abs_max"] == built["inputs"]["loss"] == "nan"


def test_heads_are_in_order_and_the_ranking_names_them(build, fakes):
    loud = fakes.coupling(defect=fakes.errors(rho=0.9))
    built = build(fakes.result(fakes.head(1, 0), fakes.head(0, 10, dw_q=loud), fakes.head(0, 2)))
    assert [head["name"] for head in built["heads"]] == ["L0.H2", "L0.H10", "L1.H0"]
    assert built["ranking"] == ["L0.H10", "L0.H2", "L1.H0"]


def test_findings_carry_code_place_and_reasoning(build, fakes):
    found = build(fakes.mixed())["findings"][0]
    assert list(found) == [
        *("code", "name", "severity", "layer", "head", "heads", "num_heads"),
        *("message", "observed", "inferred", "would_refute", "next_command"),
    ]
    assert (found["code"], found["severity"], found["layer"], found["head"]) == ("BF301", "error", 1, 0)


def test_only_declared_fields_differ_between_runs(build, fakes):
    first = fakes.mixed()
    again = dataclasses.replace(first, timing=dataclasses.replace(first.timing, load_s=9.0, peak_rss_bytes=1))
    elsewhere = dataclasses.replace(
        fakes.ENVIRONMENT, threads=64, host="other", date="2031-01-01T00:00:00+00:00", working_directory="/elsewhere"
    )
    one, two = build(first), build(again, elsewhere)
    assert one != two
    assert set(one["environment"]["volatile"]) == {
        *("date", "host", "threads", "working_directory"),
        *("load_s", "capture_s", "evidence_s", "analysis_s", "peak_rss_bytes"),
    }
    del one["environment"]["volatile"], two["environment"]["volatile"]
    assert dumps(one) == dumps(two)


def test_the_recipe_is_whole(build, fakes):
    result = fakes.mixed()
    built = build(result)["recipe"]
    for field in dataclasses.fields(result.recipe):
        value = getattr(result.recipe, field.name)
        assert built[field.name] == ([dataclasses.asdict(rule) for rule in value] if field.name == "tiles" else value)


def test_the_golden_document(build, fakes, repository):
    built = build(fakes.mixed())
    # Presets have tests of their own; here only that the recipe is named.
    built["recipe"] = {name: built["recipe"][name] for name in ("name", "version")}
    fakes.check_golden(repository / "tests" / "golden" / "localize.json", dumps(built))


def test_the_environment_of_this_process():
    environment = collect(tool_version="1.2.3", threads=3)
    assert environment.torch
    assert environment.threads == 3
    assert environment.device == "cpu"
    assert environment.date.endswith("+00:00")
    assert collect(tool_version="1.2.3").threads >= 1


def test_running_sums_stand_apart_from_the_statistics(build, fakes):
    head = build(fakes.mixed())["heads"][0]
    assert list(head["delta_err"]) == STATISTICS
    assert set(head["running_sums"]) == {"delta_err", "delta_defect", "ds_row_sum"}
    assert head["running_sums"]["delta_defect"] == {"tokens": [-0.5, -1.25], "steps": [-1.25]}


def test_without_do_there_are_no_running_sums(build, fakes):
    head = build(fakes.result(fakes.head(0, 0, delta_err=None, delta_defect=None, ds_row_sum=None, dw_q=None)))[
        "heads"
    ][0]
    assert head["running_sums"] == {"delta_err": None, "delta_defect": None, "ds_row_sum": None}
