"""The self-test on a GPU: nothing the tool relies on fails, and the matrix unit is recognised from outside."""

import pytest
import torch

from bf16forensics.attention.matrix_unit import why_unavailable
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.investigate.doctor.checks import examine
from bf16forensics.investigate.doctor.precision import product_bits
from bf16forensics.investigate.doctor.result import FAIL, PASS

pytestmark = pytest.mark.gpu

#: Fraction bits, products at once, bits of the result, and the models that agree, on compute capability 9.
HOPPER = {
    ("mma.sync", "bf16"): (25, 16, 23, ("sm90", "sm100")),
    ("mma.sync", "fp16"): (25, 16, 23, ("sm90", "sm100")),
    ("wgmma", "bf16"): (25, 16, 23, ("sm90", "sm100")),
    ("wgmma", "fp16"): (25, 16, 23, ("sm90", "sm100")),
    ("wgmma", "e4m3"): (13, 32, 13, ("sm90-fp8",)),
}


@pytest.fixture(scope="module")
def report():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("triton")
    return examine("cuda")


def test_what_the_tool_relies_on_holds(report):
    assert [check for check in report.checks if check.status == FAIL] == []
    names = {check.name for check in report.checks if check.status == PASS and check.where == "cuda:0"}
    assert {"products, inside the tool", "subnormals, inside the tool", "kernel rounding to bf16"} <= names
    assert {f"emulate to {name}" for name in ("bf16", "fp16", "e4m3", "e5m2", "fp32")} <= names


def test_the_device_is_described(report):
    gpu = report.system.gpus[0]
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.capability == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert gpu.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_a_reduced_mode_is_measured_and_stopped():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        # TF32 keeps 10 fraction bits.
        assert product_bits("cuda") == 11
        with strict_fp32():
            assert product_bits("cuda") == 24
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("instruction", "operands"), HOPPER, ids="-".join)
def test_the_matrix_unit_is_recognised(report, instruction, operands):
    if torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("the expectations are those of compute capability 9")
    (unit,) = [
        unit
        for unit in report.units
        if (unit.where, unit.instruction, unit.operands) == ("cuda:0", instruction, operands)
    ]
    bits, block, output_bits, models = HOPPER[instruction, operands]
    facts = unit.facts
    assert (facts.alignment_bits, facts.block, facts.output_bits) == (bits, block, output_bits)
    assert (facts.alignment_rounding, facts.output_rounding) == ("toward zero", "toward zero")
    assert (facts.aligns_c, facts.chains_in_order, facts.order_free) == (True, True, True)
    assert unit.models == models
    # The vectors tell the others apart, so agreement means something.
    assert all(match.differing > unit.num_vectors / 10 for match in unit.matches if match.model not in models)


def test_every_instruction_is_probed_or_skipped_with_a_reason(report):
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
    probed = {(unit.instruction, unit.operands) for unit in report.units if unit.where == "cuda:0"}
    for instruction in ("mma.sync", "wgmma"):
        for name, dtype in formats.items():
            missing = why_unavailable(dtype, instruction)
            assert ((instruction, name) in probed) == (missing is None)
