"""The steps of the cumulative errors of a whole row, against the traces of its features one by one."""

import math
from typing import Any

import numpy as np
import pytest

from bf16forensics.attention.row_walk import RowWalk
from bf16forensics.evidence.trace.cumulative import cumulative
from bf16forensics.evidence.trace.row_jumps import row_jumps
from bf16forensics.floats.arrays import round_to
from bf16forensics.floats.formats import BF16


def drawn_walk(seed: int, *, ones: int, features: int, keys: int = 90, **changes: Any) -> RowWalk:
    """A saturated row: some keys at P-bar = 1, the others small; V of one sign in a binade."""
    generator = np.random.default_rng(seed)
    p = round_to(np.exp(-generator.uniform(8, 14, keys)).astype(np.float32), BF16)
    p[generator.choice(keys, ones, replace=False)] = 1.0
    v = round_to(generator.uniform(2, 4, (keys, features)).astype(np.float32), BF16)
    fields: dict[str, Any] = {
        "recipe": "hand",
        "keys": np.arange(keys),
        "visible": np.ones(keys, np.bool_),
        "p_bar": p,
        "p_operand": p,
        "is_one": p == 1,
        "tile": np.zeros(keys, np.int64),
        "tile_alpha": np.ones(1, np.float32),
        "v": v,
        "p_format": "bf16",
        "row_sum": float(p.sum()),
        "division": "divide",
        "o_bar_format": "fp32",
        "o_bar_at": "end",
        "o_format": "bf16",
        "o": np.zeros(features, np.float32),
        "lse": 0.0,
    }
    return RowWalk(**(fields | changes))


@pytest.mark.parametrize("accumulator", ["fp32-prefix", "bf16-each-add", "exact", "tile:32"])
@pytest.mark.parametrize(("ones", "features", "seed"), [(2, 24, 1), (5, 7, 2), (1, 3, 3)])
def test_they_are_the_steps_of_every_feature(accumulator: str, ones: int, features: int, seed: int) -> None:
    walk = drawn_walk(seed, ones=ones, features=features)
    found = row_jumps(walk, accumulator)
    assert found is not None
    traces = [cumulative(walk, feature, accumulator, 0.0) for feature in range(features)]
    steps = sorted((-abs(jump.size), jump.is_one) for each in traces for jump in each.jumps)
    sizes = [-size for size, _ in steps]
    assert found.top == min(10, len(steps))
    # Steps of equal size may be taken in any order, so the count lies between the extremes.
    border = sizes[found.top - 1]
    certain = sum(is_one for size, is_one in steps if -size > border)
    tied = [is_one for size, is_one in steps if -size == border]
    open_places = found.top - sum(-size > border for size, _ in steps)
    assert certain + max(0, open_places - tied.count(False)) <= found.top_at_ones
    assert found.top_at_ones <= certain + min(open_places, tied.count(True))
    at_ones = math.fsum(-size for size, is_one in steps if is_one)
    assert found.share_at_ones == pytest.approx(at_ones / math.fsum(sizes), rel=1e-12)
    assert found.share_of_keys == ones / 90


def test_the_large_steps_of_a_row_with_two_ones_sit_there() -> None:
    found = row_jumps(drawn_walk(4, ones=2, features=32), "fp32-prefix")
    assert found is not None
    assert (found.top, found.top_at_ones) == (10, 10)
    # By size: half of the sums of two values of a binade round by half an ulp, 2^-6, so the two keys hold 2^-7 a
    # feature; the 88 others move an error by their own product, (e^-8 - e^-14) / 6 * 3 on average.
    expected = 2.0**-7 / (2.0**-7 + 88 * 3 * (math.exp(-8) - math.exp(-14)) / 6)
    assert found.share_at_ones == pytest.approx(expected, rel=0.3)
    without = row_jumps(drawn_walk(4, ones=2, features=32, is_one=np.zeros(90, np.bool_)), "fp32-prefix")
    assert without is not None
    assert (without.top_at_ones, without.share_at_ones) == (0, 0.0)


@pytest.mark.parametrize("accumulator", ["sm80", "sm90", "sm100"])
def test_a_matrix_unit_has_no_step_at_a_key(accumulator: str) -> None:
    assert row_jumps(drawn_walk(5, ones=2, features=2), accumulator) is None


def test_a_row_without_rounding_has_no_step() -> None:
    walk = drawn_walk(6, ones=2, features=4, v=np.zeros((90, 4), np.float32))
    found = row_jumps(walk, "fp32-prefix")
    assert found is not None
    assert found.top == 0
    assert math.isnan(found.share_at_ones)


def test_a_feature_that_overflows_leaves_the_row_without_a_ranking() -> None:
    v = np.full((90, 2), 3.0e38, np.float32)
    assert row_jumps(drawn_walk(7, ones=3, features=2, v=round_to(v, BF16)), "fp32-prefix") is None
