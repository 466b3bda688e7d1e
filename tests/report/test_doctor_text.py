"""The reports of `doctor`: what a person reads in 80 columns, and what a script reads."""

import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from bf16forensics.investigate.doctor.result import (
    FAIL,
    NOTED,
    PASS,
    PRECISION,
    ROUNDING,
    SKIPPED,
    SUMS,
    Check,
    DoctorReport,
    Gpu,
    ModelMatch,
    Package,
    Setting,
    System,
    UnitFacts,
    UnitProbe,
)
from bf16forensics.report.doctor_json import doctor_document
from bf16forensics.report.doctor_text import doctor_lines
from bf16forensics.report.jsonio import dumps


def check(group: str, name: str, status: str, observed: str) -> Check:
    return Check(
        group=group,
        name=name,
        where="cpu",
        status=status,
        observed=observed,
        expected="what is right",
        what_it_means="what follows.",
    )


REPORT = DoctorReport(
    system=System(
        python="3.12.1",
        platform="Linux x86_64",
        cpu="Some CPU",
        vector_isa="AVX2",
        threads=1,
        processors=8,
        packages=(
            Package(name="torch", version="2.13.0", extra=None),
            Package(name="triton", version=None, extra="gpu"),
            Package(name="scipy", version=None, extra=None),
        ),
        gpus=(),
        no_gpu="torch is built without CUDA",
    ),
    settings=(
        Setting(name="torch autocast cpu", value="True", reduces=("cpu",)),
        Setting(name="torch flush_denormal", value="False", reduces=()),
        Setting(name="NVIDIA_TF32_OVERRIDE", value=None, reduces=()),
        Setting(name="OMP_NUM_THREADS", value="1", reduces=()),
    ),
    checks=(
        check(PRECISION, "products", PASS, "24 of 24 bits (ieee)"),
        check(ROUNDING, "library's cast", NOTED, "5 of 9 differ"),
        check(SUMS, "matrix unit", SKIPPED, "no GPU"),
    ),
    units=(),
    wall_s=6.54,
)

TEXT = """\
doctor    bf16forensics 0.1.0, Linux x86_64, Python 3.12.1
cpu       Some CPU, AVX2, 1 thread on 8 processors
gpu       none: torch is built without CUDA
packages  torch 2.13.0
missing   triton (extra gpu), scipy (required)
settings  that can cost FP32 bits: torch autocast cpu=True; others:
          OMP_NUM_THREADS=1
VERDICT   everything tested that the tool relies on holds here

FP32 ARITHMETIC
pass      cpu, products: 24 of 24 bits (ieee)

ROUNDING
noted     cpu, library's cast: 5 of 9 differ
          means: what follows.

SUMS OF PRODUCTS
skipped   cpu, matrix unit: no GPU
          means: what follows.

done      3 checks: 1 pass, 0 fail, 1 noted, 1 skipped; 6.5 s
"""

GPU = Gpu(
    where="cuda:0",
    name="NVIDIA H200",
    capability="9.0",
    memory_bytes=150_000_000_000,
    driver="580.1",
    cuda=None,
)
FACTS = UnitFacts(
    alignment_bits=25,
    alignment_rounding="toward zero",
    aligns_c=True,
    block=16,
    chains_in_order=True,
    order_free=None,
    output_bits=23,
    output_rounding="toward zero",
)
UNIT = UnitProbe(
    where="cuda:0",
    instruction="wgmma",
    operands="bf16",
    facts=FACTS,
    num_vectors=1792,
    num_products=64,
    matches=(ModelMatch(model="sm80", differing=527), ModelMatch(model="sm90", differing=0)),
)


def text(report: DoctorReport, width: int = 80, encoding: str | None = "utf-8") -> str:
    return "".join(f"{line.text}\n" for line in doctor_lines(report, "0.1.0", width, encoding))


def document(report: DoctorReport, fakes: ModuleType) -> dict[str, Any]:
    built = doctor_document(report, command=("bf16forensics", "doctor", "--json"), environment=fakes.ENVIRONMENT)
    loaded: dict[str, Any] = json.loads(dumps(built))
    return loaded


def test_the_whole_text() -> None:
    assert text(REPORT) == TEXT


def test_a_failure_changes_the_verdict_and_says_what_was_expected() -> None:
    failed = replace(REPORT, checks=(*REPORT.checks, check(ROUNDING, "emulate", FAIL, "1 of 9 differ")))
    lines = text(failed).splitlines()
    assert "VERDICT   1 check failed: what the tool relies on does not hold on this machine" in lines
    place = lines.index("fail      cpu, emulate: 1 of 9 differ")
    assert lines[place + 1 : place + 3] == ["          expected: what is right", "          means: what follows."]
    assert lines[-1] == "done      4 checks: 1 pass, 1 fail, 1 noted, 1 skipped; 6.5 s"
    styles = {line.text: line.style for line in doctor_lines(failed, "0.1.0", 80, "utf-8")}
    assert styles["fail      cpu, emulate: 1 of 9 differ"] == "bold red"


def test_a_gpu_is_described_as_far_as_it_is_known() -> None:
    system = replace(REPORT.system, gpus=(GPU,), no_gpu=None)
    found = text(replace(REPORT, system=system))
    assert "gpu       cuda:0 NVIDIA H200: compute capability 9.0, 140 GiB, driver 580.1\n" in found
    assert "none:" not in found


@pytest.mark.parametrize("width", [1, 60, 61, 80, 200])
def test_lines_fit(width: int) -> None:
    long = check(ROUNDING, "a-name-without-any-blank" * 5, NOTED, "observed " * 60)
    found = text(replace(REPORT, checks=(long,)), width)
    assert max(map(len, found.splitlines())) <= min(max(width, 60), 80)


def test_what_a_stream_cannot_carry_is_escaped() -> None:
    system = replace(REPORT.system, cpu="Прибор")
    assert "\\u041f" in text(replace(REPORT, system=system), encoding="ascii")
    assert "Прибор" in text(replace(REPORT, system=system), encoding="utf-8")


def test_the_document_has_everything(fakes: ModuleType) -> None:
    found = document(replace(REPORT, units=(UNIT,)), fakes)
    assert list(found) == (
        "schema_version tool command environment verdict counts system settings checks units".split()
    )
    assert found["command"] == ["bf16forensics", "doctor", "--json"]
    assert found["verdict"] == "pass"
    assert found["counts"] == {"pass": 1, "fail": 0, "noted": 1, "skipped": 1}
    assert found["environment"]["volatile"]["wall_s"] == 6.54
    assert found["checks"][1] == {
        "group": "rounding",
        "name": "library's cast",
        "where": "cpu",
        "status": "noted",
        "observed": "5 of 9 differ",
        "expected": "what is right",
        "what_it_means": "what follows.",
    }
    assert found["system"]["packages"][1] == {"name": "triton", "version": None, "extra": "gpu"}
    (unit,) = found["units"]
    assert unit["models"] == ["sm90"]
    assert unit["matches"] == [{"model": "sm80", "differing": 527}, {"model": "sm90", "differing": 0}]
    assert unit["facts"]["order_free"] is None
    assert (unit["facts"]["alignment_bits"], unit["facts"]["block"]) == (25, 16)


def test_the_document_says_fail(fakes: ModuleType) -> None:
    failed = replace(REPORT, checks=(check(ROUNDING, "emulate", FAIL, "1 of 9 differ"),))
    assert document(failed, fakes)["verdict"] == "fail"
