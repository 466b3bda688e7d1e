"""Reducing records and joining them, against dense recounts."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from bf16forensics.attention.dual import dual_pass
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import ulp_of
from bf16forensics.evidence.accumulate import LayerAccumulator, SequenceEvidence
from bf16forensics.evidence.assemble import head_evidence
from bf16forensics.evidence.gradient import gradient_parts
from bf16forensics.evidence.results import HeadEvidence
from bf16forensics.evidence.summary import summarise
from bf16forensics.recipe.presets import FA2

Make = Callable[..., AttentionRecord]


def evidence(record: AttentionRecord, nonfinite: tuple[tuple[str, ...], ...] = ((), ())) -> SequenceEvidence:
    dual = dual_pass(record, FA2, "fp64")
    parts = None
    if dual.delta is not None and dual.dq is not None and record.x is not None:
        parts = gradient_parts(dual.delta, dual.dq, record.x)
    return SequenceEvidence(
        layer=0,
        sequence=record.sequence,
        summary=summarise(record, dual, "bf16"),
        parts=parts,
        key_sum=record.k.sum(1).double().numpy(),
        key_count=record.k.shape[1],
        nonfinite=nonfinite,
    )


def heads(records: list[AttentionRecord], nonfinite: tuple[str, ...] = ()) -> list[HeadEvidence]:
    accumulator = LayerAccumulator(2, sum(record.q.shape[1] for record in records))
    for record in records:
        accumulator.add(evidence(record))
    return [head_evidence(0, head, head, accumulator, None, None, nonfinite) for head in range(2)]


def test_figures_are_dense_recounts_over_all_sequences(make_record: Make) -> None:
    labelled = torch.arange(24) % 5 != 0
    records = [make_record(i, sequence=i, sharpness=5.0, labelled=labelled) for i in range(3)]
    # Equal keys make rows with several ones.
    records = [replace(r, k=torch.cat([r.k[:, :12], r.k[:, :12]], 1)) for r in records]
    duals = [dual_pass(record, FA2, "fp64") for record in records]
    for head, found in enumerate(heads(records)):
        ones = torch.stack([dual.maxima.ones_rounded[head] for dual in duals])
        assert found.ones.rounded == int(ones.sum())
        assert found.ones.fp32_exact == sum(int(dual.maxima.ones_fp32[head].sum()) for dual in duals)
        assert found.ones.shared_maximum == sum(int(dual.maxima.shared[head].sum()) for dual in duals)
        assert found.counts.rows == 72
        assert found.counts.rows_repeated_max == int((ones > 1).sum()) > 0
        assert found.counts.rows_repeated_max_unlabelled == int(((ones > 1) & ~labelled).sum()) > 0
        assert found.counts.most_ones == int(ones.max())
        assert found.counts.rows_fully_masked == found.counts.rows_padding == 0
        assert found.pairs == 3 * 24 * 25 // 2
        assert found.score_abs_max == max(float(dual.maxima.score_abs_max[head].max()) for dual in duals)
        assert found.counts.sink_share == pytest.approx(
            float(torch.stack([dual.maxima.sink[head] for dual in duals]).mean())
        )
        defects, repeated = [], []
        for dual, count in zip(duals, ones, strict=True):
            assert dual.delta is not None
            defects.append(dual.delta.defect[head])
            repeated.append(count > 1)
        defect, several = torch.cat(defects), torch.cat(repeated)
        swamped = torch.cat([dual.maxima.swamped[head] for dual in duals])
        assert found.counts.rows_swamped == int(swamped.sum())
        assert found.counts.swamped_power_share == pytest.approx(
            float(defect[swamped].square().sum() / defect.square().sum()), rel=1e-9
        )
        assert found.counts.repeated_sum_share == pytest.approx(float(defect[several].sum() / defect.sum()), rel=1e-6)
        assert found.delta_defect is not None
        assert found.delta_defect.sum == pytest.approx(float(defect.sum()), rel=1e-12)
        assert found.ds_row_sum is not None
        assert found.ds_row_sum.sum == pytest.approx(
            -sum(float((d.delta.defect * d.delta.p_row_sum)[head].sum()) for d in duals if d.delta is not None)
        )


def test_row_sum_of_ds_is_that_of_a_dense_ds(make_record: Make) -> None:
    # P of the recipe's backward pass differs from hp's by FP32 noise under fa2, so hp's P will do for the row sum.
    record = make_record(5, sharpness=3.0)
    dual = dual_pass(record, FA2, "fp64")
    assert dual.delta is not None
    assert record.do is not None
    found = summarise(record, dual, "bf16").delta
    assert found is not None
    scores = record.q.double() @ record.k.double().transpose(1, 2) * record.geometry.scale
    p = torch.softmax(scores.masked_fill(~torch.ones(24, 24).tril().bool(), -torch.inf), -1)
    ds = p * (record.do.double() @ record.v.double().transpose(1, 2) - dual.delta.delta_lp[..., None])
    np.testing.assert_allclose(found.ds_row_sum, ds.sum(-1).numpy(), rtol=1e-3, atol=1e-5)


def test_the_largest_output_error_is_found_where_it_is(make_record: Make) -> None:
    records = [make_record(10 + i, sequence=i) for i in range(3)]
    duals = [dual_pass(record, FA2, "fp64") for record in records]
    for head, found in enumerate(heads(records)):
        errors = torch.stack([(dual.o_lp - dual.o_hp)[head].abs() for dual in duals])
        sequence, token, feature = (int(i) for i in np.unravel_index(int(errors.argmax()), errors.shape))
        output = found.output_err
        assert (output.sequence, output.token, output.feature) == (sequence, token, feature)
        assert output.max_abs == pytest.approx(float(errors.max()), rel=1e-9)
        at = duals[sequence].o_hp[head, token, feature]
        assert output.max_ulp == pytest.approx(float(errors.max() / ulp_of(at.reshape(1), "bf16")), rel=1e-9)


def test_mean_ulp_is_over_elements_within_one_ulp_and_away_from_zero(make_record: Make) -> None:
    records = [make_record(20 + i, sequence=i) for i in range(2)]
    for head, found in enumerate(heads(records)):
        values = []
        for record in records:
            dual = dual_pass(record, FA2, "fp64")
            in_ulp = (dual.o_err / ulp_of(dual.o_hp, "bf16"))[head]
            values.append((in_ulp * torch.sign(dual.o_hp[head]))[in_ulp.abs() <= 1])
        assert found.output_err.mean_ulp == pytest.approx(float(torch.cat(values).mean()), rel=1e-9, abs=1e-12)


def test_sign_correlation_names_the_feature(make_record: Make) -> None:
    record = make_record(30)
    dual = dual_pass(record, FA2, "fp64")
    assert record.do is not None
    # In feature 5 dO points where the error points.
    do = record.do.clone()
    do[..., 5] = torch.sign(dual.o_err[..., 5]).float()
    for found in heads([replace(record, do=do)]):
        assert found.output_err.sign_correlation_feature == 5
        assert found.output_err.sign_correlation == 1.0


def test_padding_and_blind_rows_are_counted_apart(make_record: Make) -> None:
    real = torch.ones(24, dtype=torch.bool)
    real[20:] = False
    keep = torch.ones(1, 24, 24, dtype=torch.bool)
    keep[:, 7] = False
    record = make_record(40, key_padding=real, query_padding=real, keep=keep)
    for found in heads([record]):
        assert (found.counts.rows, found.counts.rows_padding, found.counts.rows_fully_masked) == (19, 4, 1)
        assert found.pairs == sum(row + 1 for row in range(20) if row != 7)
        assert found.delta_err is not None
        assert found.delta_err.positive + found.delta_err.negative + found.delta_err.zero == 19
        assert found.output_err.token != 7


def test_without_do_there_is_forward_evidence_only(make_record: Make) -> None:
    for found in heads([replace(make_record(50), do=None)]):
        assert (found.delta_err, found.delta_defect, found.ds_row_sum, found.dw_q) == (None, None, None, None)
        assert found.output_err.max_abs > 0
        assert math.isnan(found.output_err.sign_correlation)
        assert found.output_err.sign_correlation_feature is None
        assert math.isnan(found.counts.swamped_power_share)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [("k[0, 0, 1, 2]", False, False), ("do[0, 0, 1, 2]", True, False), ("x[0, 3]", True, True), ("w_q[0]", True, True)],
)
def test_what_a_bad_input_touches_is_withheld(make_record: Make, name: str, forward: bool, backward: bool) -> None:
    found = heads([make_record(60)], (name,))[0]
    assert found.nonfinite == (name,)
    assert math.isfinite(found.output_err.max_abs) == forward
    assert (found.output_err.token is not None) == forward
    assert (found.counts.rows > 0) == forward
    assert math.isfinite(found.score_abs_max) == forward
    assert found.delta_err is not None
    assert math.isfinite(found.delta_err.sum) == backward
    assert math.isfinite(found.counts.swamped_power_share) == backward


def test_an_undefined_maximum_is_not_lost_in_later_sequences(make_record: Make) -> None:
    for order in ((0, 1), (1, 0)):
        accumulator = LayerAccumulator(2, 48)
        parts = [evidence(make_record(70 + i, sequence=i)) for i in range(2)]
        broken = parts[1].summary.output
        broken.max_abs[0] = math.nan
        for index in order:
            accumulator.add(parts[index])
        found = head_evidence(0, 0, 0, accumulator, None, None, ())
        assert math.isnan(found.output_err.max_abs)
        assert found.output_err.sequence == 1
        assert math.isfinite(head_evidence(0, 1, 1, accumulator, None, None, ()).output_err.max_abs)


def test_an_empty_accumulator_has_no_heads() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        head_evidence(0, 0, 0, LayerAccumulator(1, 1), None, None, ())
