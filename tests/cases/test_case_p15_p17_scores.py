"""P15: soft-capped scores. P17: the scale is what it is said to be."""

from typing import Any

import numpy as np
import pytest


def capped(record: Any) -> Any:
    return record([[10.0]], [[10.0], [9.0]], [[1.0], [0.0]])


@pytest.mark.parametrize("reference", ["fp64", "fp32"])
def test_p15_soft_cap(localize: Any, passes: Any, record: Any, reference: str) -> None:
    (dual,) = passes(capped(record), "fa2", reference, scale=1.0, softcap=50.0)
    # FP32 scores near 48 err by 2^-19, which is what O may err by.
    assert dual.o_hp.item() == pytest.approx(0.702886, abs=2e-6)
    assert dual.maxima.score_abs_max.item() == pytest.approx(48.201379, abs=4e-6)
    # lse = top + log(1 + P-bar of the second).
    assert np.expm1(dual.lse_hp.item() - dual.maxima.score_abs_max.item()) == pytest.approx(0.422706, abs=4e-6)
    found = localize(capped(record), "--scale", 1.0, "--softcap", 50.0, "--reference", reference)
    assert found.document["inputs"]["softcap"] == 50.0
    assert found.head["score_abs_max"] == pytest.approx(48.201379, abs=4e-6)
    assert found.head["output_err"]["max_abs"] == pytest.approx(abs(0.703125 - 0.702886), abs=2e-6)


def test_p15_without_the_cap(localize: Any, passes: Any, record: Any) -> None:
    assert passes(capped(record), scale=1.0)[0].o_hp.item() == pytest.approx(0.999955, abs=5e-7)
    assert localize(capped(record), "--scale", 1.0).head["score_abs_max"] == 100.0


def test_p15_a_cap_far_above_the_scores_changes_little(passes: Any, record: Any) -> None:
    assert passes(capped(record), scale=1.0, softcap=1e6)[0].o_hp.item() == pytest.approx(0.999955, abs=5e-7)


@pytest.mark.parametrize("cap", ["0.0", "-50", "nan", "inf", "-inf"])
def test_p15_no_such_cap(localize: Any, record: Any, cap: str) -> None:
    assert "softcap" in localize(capped(record), f"--softcap={cap}").refusal()


def scaled(record: Any, **more: Any) -> Any:
    q, k = np.zeros((1, 64)), np.zeros((2, 64))
    q[0, 63] = 4.0
    k[0, 63] = 6.0
    return record(q, k, [[1.0], [0.0]], **more)


def test_p17_scale_option(localize: Any, passes: Any, record: Any) -> None:
    (dual,) = passes(scaled(record), scale=1 / 12)
    assert dual.o_hp.item() == pytest.approx(0.880797, abs=5e-7)
    found = localize(scaled(record), "--scale", 1 / 12)
    assert found.document["inputs"]["scale"] == 1 / 12
    assert found.head["score_abs_max"] == pytest.approx(2.0, rel=1e-12)


def test_p17_rounded_scale_of_a_config(passes: Any, record: Any) -> None:
    assert passes(scaled(record), scale=0.0833333)[0].o_hp.item() == pytest.approx(0.880797, abs=5e-7)


def test_p17_default_scale(localize: Any, passes: Any, record: Any) -> None:
    assert passes(scaled(record))[0].o_hp.item() == pytest.approx(0.952574, abs=5e-7)
    found = localize(scaled(record))
    assert (found.document["inputs"]["scale"], found.head["score_abs_max"]) == (0.125, 3.0)


def test_p17_scale_of_the_file(localize: Any, record: Any) -> None:
    stored = scaled(record, scale=np.float64(1 / 12))
    assert localize(stored).document["inputs"]["scale"] == 1 / 12
    assert localize(stored, "--scale", 0.5).document["inputs"]["scale"] == 0.5


@pytest.mark.parametrize("scale", ["0", "-0.125", "nan", "inf"])
def test_p17_no_such_scale(localize: Any, record: Any, scale: str) -> None:
    assert "scale" in localize(scaled(record), f"--scale={scale}").refusal()
