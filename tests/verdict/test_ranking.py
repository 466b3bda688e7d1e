"""The order of heads."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.verdict.ranking import rank


def _names(heads):
    return [(head.layer, head.head) for head in heads]


def test_rho_of_the_defect_then_its_bias_then_layer_and_head(fakes):
    def head(layer, number, rho, bias, total_rho=0.0, ratio=0.0):
        dw_q = fakes.coupling(
            defect=fakes.errors(rho=rho, bias=bias), total=fakes.errors(rho=total_rho), error_defect_relative=ratio
        )
        return fakes.head(layer, number, dw_q=dw_q)

    heads = [
        head(0, 0, 0.1, 0.5),
        head(0, 1, 0.2, 0.1),
        # Neither the whole error nor a ratio to the mean gradient ranks.
        head(0, 2, 0.01, 0.1, total_rho=9.0, ratio=7e12),
        head(1, 0, 0.1, 0.7),
        head(1, 1, 0.1, 0.5),
        head(1, 2, 0.1, math.nan),
    ]
    assert _names(rank(heads)) == [(0, 1), (1, 0), (0, 0), (1, 1), (1, 2), (0, 2)]


def test_heads_without_a_gradient_follow_and_undefined_ones_come_last(fakes):
    undefined = fakes.coupling(defect=fakes.errors(rho=math.nan))
    overflow = fakes.coupling(defect=fakes.errors(rho=math.inf))
    heads = [
        fakes.head(0, 0, dw_q=undefined, delta_defect=fakes.signed(t=99.0)),
        fakes.head(0, 1, dw_q=overflow, delta_defect=fakes.signed(t=-100.0)),
        fakes.head(0, 2, dw_q=None, delta_defect=fakes.signed(t=math.nan)),
        fakes.head(0, 3, dw_q=None, delta_defect=None, counts=fakes.counts(rows_repeated_max=5)),
        fakes.head(0, 4, dw_q=None, delta_defect=fakes.signed(t=1.0)),
        fakes.head(0, 5, dw_q=None, delta_defect=fakes.signed(t=-3.0)),
        fakes.head(0, 6, dw_q=None, delta_defect=fakes.signed(t=math.inf)),
        fakes.head(0, 7),
    ]
    assert _names(rank(heads)) == [(0, 7), (0, 6), (0, 5), (0, 4), (0, 3), (0, 2), (0, 1), (0, 0)]
    assert rank([]) == ()


NUMBER = st.sampled_from([0.0, 0.5, 1.0, -1.0, math.nan, math.inf, -math.inf])


@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER, st.booleans()), max_size=8), st.randoms())
def test_the_order_of_the_input_does_not_matter(fakes, numbers, random):
    heads = [
        fakes.head(
            0,
            index,
            dw_q=fakes.coupling(defect=fakes.errors(rho=rho, bias=bias)) if coupled else None,
            delta_defect=fakes.signed(t=t),
        )
        for index, (rho, bias, t, coupled) in enumerate(numbers)
    ]
    shuffled = heads.copy()
    random.shuffle(shuffled)
    assert _names(rank(shuffled)) == _names(rank(heads))
