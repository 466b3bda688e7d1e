"""Every branch of the verdict about one head, with its neighbour on the other side of each threshold."""

import math
from dataclasses import replace

import pytest

from bf16forensics.verdict.findings import (
    BIAS_WITHOUT_COUPLING,
    CANNOT_JUDGE,
    COMPOUNDING_BIAS,
    NOISE_ABOVE_SAMPLING,
    NOISE_AT_CHANCE,
)
from bf16forensics.verdict.judge import judge

NAN, INF = math.nan, math.inf
BELOW, ABOVE = math.nextafter(1.0, 0.0), math.nextafter(1.0, 2.0)


@pytest.fixture
def verdict_of(fakes):
    """The verdict about a single head with these fields."""

    def of(*, step_sequences=16, **fields):
        return judge(fakes.result(fakes.head(**fields), step_sequences=step_sequences)).heads[0]

    return of


def test_a_head_below_every_limit_is_noise(verdict_of):
    verdict = verdict_of()
    assert (verdict.verdict, verdict.code) == (NOISE_AT_CHANCE, None)
    assert verdict.harmless_limit == pytest.approx(1.0, rel=1e-15)
    assert verdict.sequences_needed is None


def test_the_harmless_limit_is_the_sampling_noise_over_steps_and_sequences(fakes):
    head = fakes.head(dw_q=fakes.coupling(sampling_noise=8.0))
    verdict = judge(fakes.result(head, step_sequences=4)).heads[0]
    assert verdict.harmless_limit == 8.0 / 2.0 / math.sqrt(1000)


def test_non_finite_inputs_cannot_be_judged_whatever_else_is_known(verdict_of, fakes):
    verdict = verdict_of(nonfinite=("k[0, 7, 3, 1]",), dw_q=fakes.biased(), delta_defect=fakes.signed(p=1e-9))
    assert (verdict.verdict, verdict.code) == (CANNOT_JUDGE, "BF401")
    assert "k[0, 7, 3, 1]" in verdict.reason
    assert not verdict.delta_biased


@pytest.mark.parametrize(
    ("rows", "code"),
    [(0, "BF904"), (1, None)],
)
def test_nothing_compared_is_never_noise(verdict_of, fakes, rows, code):
    assert verdict_of(counts=fakes.counts(rows=rows)).code == code


def test_without_do_there_is_forward_evidence_only(verdict_of):
    verdict = verdict_of(delta_err=None, delta_defect=None, ds_row_sum=None, dw_q=None)
    assert (verdict.verdict, verdict.code) == (CANNOT_JUDGE, "BF905")


@pytest.mark.parametrize(
    ("sequences", "p", "biased"),
    [(16, 0.049, True), (16, 0.05, False), (15, 0.001, False), (32, NAN, False)],
)
def test_without_x_only_the_bias_of_delta_is_known(verdict_of, fakes, sequences, p, biased):
    verdict = verdict_of(dw_q=None, delta_defect=fakes.signed(sequences=sequences, p=p))
    assert (verdict.verdict, verdict.code) == (CANNOT_JUDGE, "BF906")
    assert verdict.delta_biased is biased


@pytest.mark.parametrize(("sequences", "code"), [(2, "BF901"), (15, "BF901"), (16, None)])
def test_sixteen_sequences_are_the_least(verdict_of, fakes, sequences, code):
    assert verdict_of(dw_q=fakes.coupling(sequences=sequences)).code == code


def test_few_sequences_are_named_before_a_bias_is(verdict_of, fakes):
    assert verdict_of(dw_q=fakes.biased(sequences=15)).code == "BF901"


@pytest.mark.parametrize(
    ("upper", "needed"),
    # n (upper / limit)^2 sequences, but 16 at least; unknown bounds leave 16.
    [(0.4, 16), (3.0, 72), (NAN, 16), (INF, 16), (1e9, 16)],
)
def test_sequences_needed_by_few(verdict_of, fakes, upper, needed):
    dw_q = fakes.coupling(sequences=8, defect=fakes.errors(bias_upper=upper))
    assert verdict_of(dw_q=dw_q).sequences_needed == needed


@pytest.mark.parametrize(
    ("n_effective", "code"),
    [(10.0, None), (math.nextafter(10.0, 0.0), "BF902"), (0.0, "BF902"), (NAN, "BF902"), (-INF, "BF902")],
)
def test_ten_effective_sequences_are_the_least(verdict_of, fakes, n_effective, code):
    assert verdict_of(dw_q=fakes.coupling(defect=fakes.errors(n_effective=n_effective))).code == code


def test_sequences_needed_when_few_carry_the_error(verdict_of, fakes):
    dw_q = fakes.coupling(defect=fakes.errors(n_effective=4.0))
    assert verdict_of(dw_q=dw_q).sequences_needed == 80
    assert verdict_of(dw_q=fakes.coupling(defect=fakes.errors(n_effective=0.0))).sequences_needed is None


@pytest.mark.parametrize(
    ("lower", "p", "verdict"),
    [
        (1.01, 0.049, COMPOUNDING_BIAS),
        (1.01, 0.05, CANNOT_JUDGE),
        (0.99, 0.001, CANNOT_JUDGE),
        (NAN, 0.001, CANNOT_JUDGE),
        (1.01, NAN, CANNOT_JUDGE),
        (INF, 0.001, CANNOT_JUDGE),
    ],
)
def test_a_bias_needs_its_lower_bound_and_its_test(verdict_of, fakes, lower, p, verdict):
    part = fakes.errors(bias=1.5, bias_lower=lower, bias_upper=2.0, p_adjusted=p)
    assert verdict_of(dw_q=fakes.coupling(defect=part)).verdict == verdict


@pytest.mark.parametrize(
    ("defect", "total", "code"), [(True, True, "BF301"), (True, False, "BF301"), (False, True, "BF303")]
)
def test_a_bias_of_the_whole_error_alone_is_not_blamed_on_delta(verdict_of, fakes, defect, total, code):
    biased = fakes.errors(bias=2.0, bias_lower=1.5, bias_upper=2.5, p_adjusted=0.01)
    sound = fakes.errors()
    dw_q = fakes.coupling(defect=biased if defect else sound, total=biased if total else sound)
    verdict = verdict_of(dw_q=dw_q)
    assert (verdict.verdict, verdict.code) == (COMPOUNDING_BIAS, code)


@pytest.mark.parametrize("part", ["defect", "total"])
@pytest.mark.parametrize(("rho", "verdict"), [(1.0, NOISE_AT_CHANCE), (ABOVE, NOISE_ABOVE_SAMPLING)])
def test_rho_above_one_is_more_than_sampling_noise(verdict_of, fakes, part, rho, verdict):
    assert verdict_of(dw_q=fakes.coupling(**{part: fakes.errors(rho=rho)})).verdict == verdict


def test_bias_comes_before_noise(verdict_of, fakes):
    dw_q = fakes.biased(defect=fakes.errors(rho=3.0, bias_lower=2.0, bias_upper=4.0, p_adjusted=0.01))
    assert verdict_of(dw_q=dw_q).verdict == COMPOUNDING_BIAS


@pytest.mark.parametrize("part", ["defect", "total"])
def test_noise_needs_both_upper_bounds_below_the_limit(fakes, verdict_of, part):
    limit = verdict_of().harmless_limit
    for upper, verdict in ((limit, NOISE_AT_CHANCE), (math.nextafter(limit, 2.0), CANNOT_JUDGE)):
        dw_q = fakes.coupling(**{part: fakes.errors(bias_upper=upper)})
        assert verdict_of(dw_q=dw_q).verdict == verdict


@pytest.mark.parametrize(
    ("p", "verdict"), [(0.049, BIAS_WITHOUT_COUPLING), (0.05, NOISE_AT_CHANCE), (NAN, CANNOT_JUDGE)]
)
def test_a_biased_delta_that_dw_q_does_not_feel(verdict_of, fakes, p, verdict):
    assert verdict_of(delta_defect=fakes.signed(p=p)).verdict == verdict


def test_not_significant_is_not_noise(verdict_of, fakes):
    part = fakes.errors(bias=0.0, bias_lower=-1.0, bias_upper=2.0, p=0.9, p_adjusted=1.0, minimum_detectable=1.5)
    verdict = verdict_of(dw_q=fakes.coupling(defect=part, total=part))
    assert (verdict.verdict, verdict.code) == (CANNOT_JUDGE, "BF903")
    assert verdict.sequences_needed == 128
    assert "needs about 130 sequences" in verdict.reason


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("part", ["defect", "total"])
@pytest.mark.parametrize("field", ["rho", "bias_lower", "bias_upper", "minimum_detectable", "p_adjusted"])
def test_a_number_that_is_not_finite_never_makes_noise(verdict_of, fakes, value, part, field):
    dw_q = fakes.coupling(**{part: fakes.errors(**{field: value})})
    verdict = verdict_of(dw_q=dw_q)
    assert (verdict.verdict, verdict.code) == (CANNOT_JUDGE, "BF903")
    assert f"{part} {field}" in verdict.reason


@pytest.mark.parametrize("noise", [0.0, -1.0, 5e-324, NAN, INF])
def test_without_sampling_noise_there_is_no_limit(verdict_of, fakes, noise):
    verdict = verdict_of(dw_q=fakes.coupling(sampling_noise=noise))
    assert (verdict.verdict, verdict.code) == (CANNOT_JUDGE, "BF903")
    assert math.isnan(verdict.harmless_limit)


def test_without_a_step_there_is_no_limit(verdict_of):
    assert verdict_of(step_sequences=0).code == "BF903"


def test_an_error_that_is_exactly_zero_is_noise(verdict_of, fakes):
    zero = fakes.errors(
        rho=0.0,
        bias=0.0,
        bias_lower=0.0,
        bias_upper=0.0,
        minimum_detectable=0.0,
        p=NAN,
        p_adjusted=NAN,
        n_effective=NAN,
        gain=0.0,
    )
    exact = fakes.signed(p=NAN, t=NAN, sum=0.0, mean=0.0, positive=0, negative=0, zero=1024)
    assert verdict_of(dw_q=fakes.coupling(defect=zero, total=zero), delta_defect=exact).verdict == NOISE_AT_CHANCE
    # The defect of an exact delta has no n_effective; then the whole error's counts.
    whole = fakes.errors(n_effective=4.0)
    assert verdict_of(dw_q=fakes.coupling(defect=zero, total=whole), delta_defect=exact).code == "BF902"
    # Zero bounds beside a rho that is not zero are no exact zero.
    odd = replace(zero, rho=0.01)
    assert verdict_of(dw_q=fakes.coupling(defect=odd, total=zero), delta_defect=exact).verdict == CANNOT_JUDGE


def test_a_damaged_head_has_no_p_of_its_delta_whatever_it_carries(fakes):
    sound = [fakes.head(0, number, delta_defect=fakes.signed(p=0.04)) for number in range(2)]
    damaged = [fakes.head(1, number, delta_defect=fakes.signed(p=0.0), nonfinite=("v[0, 0]",)) for number in range(9)]
    heads = judge(fakes.result(*sound, *damaged)).heads
    assert [head.delta_p_adjusted for head in heads[:2]] == [0.04, 0.04]
    assert [head.verdict for head in heads[:2]] == [BIAS_WITHOUT_COUPLING] * 2
    assert all(math.isnan(head.delta_p_adjusted) for head in heads[2:])
