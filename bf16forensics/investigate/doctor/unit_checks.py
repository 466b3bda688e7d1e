"""The accumulation models against their own parameters, and the matrix unit of each GPU against the models."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bf16forensics.attention.matrix_unit import INSTRUCTIONS, OPERAND_DTYPES, matrix_unit_dot, why_unavailable
from bf16forensics.floats.accumulate import dot_add
from bf16forensics.floats.formats import FloatFormat, format_named
from bf16forensics.floats.matrix_unit import SM80, SM90, SM90_FP8, SM100, MatrixUnit
from bf16forensics.investigate.doctor.result import (
    FAIL,
    NOTED,
    PASS,
    SKIPPED,
    SUMS,
    Check,
    UnitFacts,
    UnitProbe,
)
from bf16forensics.investigate.doctor.unit import NUM_PRODUCTS, Dot, measure
from bf16forensics.investigate.doctor.unit_vectors import compare, unit_vectors

#: Models of matrix units. Sequential, pairwise and exact sums are nobody's unit.
UNITS = (SM80, SM90, SM100, SM90_FP8)
NO_MODEL = "no model matches this device: hardware-faithful traces are off"
_EXPECTED = "one of the accumulation models agrees in every bit"


def model_dot(model: str, operands: str | None = None) -> Dot:
    """An accumulation model as a unit to probe.

    Args:
        model: one of `floats.accumulate.ACCUMULATORS`.
        operands: format of the factors; None for the first of the model's that holds them.
    """

    def dot(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
        return dot_add(c, a, b, model, operands=operands)

    return dot


def candidates(fmt: FloatFormat) -> dict[str, Dot]:
    """The models of units that take operands of a format, by name; a unit may widen FP8 and add as for FP16."""
    return {
        unit.name: model_dot(unit.name, fmt.name if fmt.name in unit.operands else None)
        for unit in UNITS
        if fmt.bits == 8 or fmt.name in unit.operands
    }


def probe_unit(dot: Dot, fmt: FloatFormat, *, where: str, instruction: str) -> UnitProbe:
    """Measures a unit, and compares it with the models on vectors that tell them apart.

    Args:
        dot: the unit.
        fmt: format of the operands.
        where: device, for the result.
        instruction: for the result.
    """
    vectors = unit_vectors(fmt)
    return UnitProbe(
        where=where,
        instruction=instruction,
        operands=fmt.name,
        facts=measure(dot, fmt),
        num_vectors=len(vectors[2]),
        num_products=NUM_PRODUCTS,
        matches=compare(dot, candidates(fmt), vectors),
    )


def model_checks() -> Iterator[Check]:
    """Probes every model: what is measured from outside must be what the model was built from."""
    for unit in UNITS:
        facts = measure(model_dot(unit.name), format_named(unit.operands[0]))
        is_right = facts == _facts_of(unit)
        yield Check(
            group=SUMS,
            name=f"accumulation model {unit.name}",
            where="cpu",
            status=PASS if is_right else FAIL,
            observed=facts_text(facts),
            expected=facts_text(_facts_of(unit)),
            what_it_means=(
                "Traces with this accumulator add as its source says the unit does."
                if is_right
                else "The model does not add as its parameters say: do not use this accumulator, and report this line."
            ),
        )


def device_checks(where: str) -> Iterator[tuple[Check, UnitProbe | None]]:
    """Probes one GPU by every instruction and format that it has.

    Args:
        where: a CUDA device.

    Yields:
        A check, with what was measured; None for an instruction that cannot be run.
    """
    for instruction in INSTRUCTIONS:
        for name, dtype in OPERAND_DTYPES.items():
            with torch.cuda.device(where):
                missing = why_unavailable(dtype, instruction)
            if missing is not None:
                yield skipped(where, missing, name=f"{instruction}, {name}"), None
                continue
            dot = partial(_ask_device, where=where, instruction=instruction, dtype=dtype)
            probe = probe_unit(dot, format_named(name), where=where, instruction=instruction)
            yield unit_check(probe), probe


def unit_check(probe: UnitProbe) -> Check:
    """The check that a probe makes: "pass" where a model agrees, "noted" where none does."""
    facts = facts_text(probe.facts)
    if probe.models:
        text = f"{' and '.join(probe.models)} {'match' if len(probe.models) > 1 else 'matches'}"
        observed = f"{text} (0 of {probe.num_vectors:,} differ); {facts}"
        meaning = f"A trace with accumulator {' or '.join(probe.models)} shows the bits of this instruction."
    else:
        nearest = min(probe.matches, key=lambda match: match.differing)
        observed = f"nearest is {nearest.model} ({nearest.differing:,} of {probe.num_vectors:,} differ); {facts}"
        meaning = f"{NO_MODEL[0].upper()}{NO_MODEL[1:]}."
    return Check(
        group=SUMS,
        name=f"{probe.instruction}, {probe.operands}",
        where=probe.where,
        status=PASS if probe.models else NOTED,
        observed=observed,
        expected=_EXPECTED,
        what_it_means=meaning,
    )


def skipped(where: str, reason: str, *, name: str = "matrix unit of a GPU") -> Check:
    """A unit that was not asked.

    Args:
        where: device.
        reason: why, and what would make it possible.
        name: of the check.
    """
    return Check(
        group=SUMS,
        name=name,
        where=where,
        status=SKIPPED,
        observed=reason,
        expected=_EXPECTED,
        what_it_means="Accumulation models still work; that they are this machine's unit is not shown.",
    )


def facts_text(facts: UnitFacts) -> str:
    """What was measured, in one line."""
    if facts.alignment_bits is None:
        aligned = "terms keep all bits when aligned"
    else:
        aligned = f"aligned to {facts.alignment_bits} bits {facts.alignment_rounding}"
        aligned += "" if facts.aligns_c else ", C apart"
        aligned += f", {facts.block or f'{NUM_PRODUCTS} or more'} products at once"
        aligned += "" if facts.chains_in_order is not False else ", not chained in order"
        aligned += "" if facts.order_free is not False else ", order matters"
    if facts.output_bits is None:
        return f"{aligned}; result keeps all bits"
    return f"{aligned}; result {facts.output_bits} bits {facts.output_rounding or '(rounding not measured)'}"


def _facts_of(unit: MatrixUnit) -> UnitFacts:
    return UnitFacts(
        alignment_bits=unit.fraction_bits,
        alignment_rounding="toward zero",
        aligns_c=True,
        block=unit.block,
        chains_in_order=True,
        order_free=True,
        output_bits=unit.output_fraction_bits,
        output_rounding="toward zero",
    )


def _ask_device(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    *,
    where: str,
    instruction: str,
    dtype: torch.dtype,
) -> NDArray[np.float32]:
    tensors = [torch.from_numpy(values).to(where) for values in (a, b, c)]
    return matrix_unit_dot(tensors[0].to(dtype), tensors[1].to(dtype), tensors[2], instruction).cpu().numpy()
