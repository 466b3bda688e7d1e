"""Coupling to the weights from gradients that are known."""

import math

import numpy as np
import pytest

from bf16forensics.evidence.coupling import family_tests, gradient_couplings
from bf16forensics.evidence.gradient import SummedParts
from bf16forensics.evidence.gradient_products import StepSpan, head_grams, head_products
from bf16forensics.evidence.results import GradientCoupling
from bf16forensics.evidence.sign_flips import flip_tests
from bf16forensics.evidence.statistics import bias_bounds, u_statistic
from bf16forensics.evidence.store import GradientStore

D, C = 3, 4
Parts = dict[str, np.ndarray]


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape).astype(np.float32)


def couple(
    hp: np.ndarray,
    parts: Parts,
    key_mean: np.ndarray | None = None,
    steps: tuple[StepSpan, ...] | None = None,
    weights: tuple[float, float] = (1.0, 0.5),
    budget: int = 2**30,
) -> GradientCoupling:
    """One head; hp and parts [n, D, C]; parts hold scores, defect, cast_ds, cast_dq and optionally full, direction."""
    n = len(hp)
    zero = np.zeros_like(hp)
    scores, defect, cast_ds, cast_dq = (parts.get(name, zero) for name in ("scores", "defect", "cast_ds", "cast_dq"))
    store = GradientStore(1, n + 2, D * C, budget)
    for index in range(n):
        total = scores[index] + defect[index] + cast_ds[index] + cast_dq[index]
        store.put(slice(0, 1), index, hp[index][None], defect[index][None], total[None])
    sums = SummedParts(
        full=parts.get("full", zero).sum(0, dtype=np.float64)[None],
        scores=scores.sum(0, dtype=np.float64)[None],
        cast_ds=cast_ds.sum(0, dtype=np.float64)[None],
        cast_dq=cast_dq.sum(0, dtype=np.float64)[None],
        direction=parts.get("direction", zero).sum(0, dtype=np.float64)[None],
        weight_sum=np.array([weights[0]]),
        weight_square_sum=np.array([weights[1]]),
    )
    grams = head_grams(store, 0, n)
    steps = steps or (StepSpan(step=None, sequences=tuple(range(n))),)
    products = head_products(store, 0, n, sums, 0, np.ones(D) if key_mean is None else key_mean, steps)
    return gradient_couplings([grams], [products], family_tests([grams]), steps, [0.25])[0]


@pytest.mark.parametrize("budget", [2**30, 0], ids=["memory", "file"])
def test_figures_are_those_of_the_definitions(budget: int) -> None:
    n = 18
    hp = draw(1, n, D, C) + 0.5
    parts = {"scores": draw(2, n, D, C) * 0.1, "defect": draw(3, n, D, C) * 0.2 + 0.03, "full": draw(4, n, D, C)}
    parts |= {"cast_ds": draw(5, n, D, C) * 0.01, "cast_dq": draw(6, n, D, C) * 0.01}
    found = couple(hp, parts, budget=budget)
    g, e = (a.reshape(n, -1).astype(np.float64) for a in (hp, parts["defect"]))
    total = sum(parts[name].astype(np.float64) for name in ("scores", "defect", "cast_ds", "cast_dq")).reshape(n, -1)
    norm = np.linalg.norm(g.mean(0))
    # Stored in FP32: 2^-24 of each entry.
    near = {"rel": 1e-5}
    assert found.norm == pytest.approx(norm, **near)
    assert found.error_defect_relative == pytest.approx(np.linalg.norm(e.mean(0)) / norm, **near)
    assert found.error_total_relative == pytest.approx(np.linalg.norm(total.mean(0)) / norm, **near)
    assert found.error_full_relative == pytest.approx(np.linalg.norm(parts["full"].mean(0)) / norm, **near)
    assert found.sequences == n
    assert found.functional_relative == 0.25
    v_g = (g**2).sum(1).mean() - u_statistic(g @ g.T)
    assert found.sampling_noise == pytest.approx(math.sqrt(v_g), **near)
    assert found.signal == pytest.approx(math.sqrt(u_statistic(g @ g.T)), **near)
    assert found.signal_p == flip_tests([g @ g.T])[0].p < 0.01
    for statistics, error in ((found.defect, e), (found.total, total)):
        gram = error @ error.T
        v_e = (error**2).sum(1).mean() - u_statistic(gram)
        assert statistics.rho == pytest.approx(math.sqrt(v_e / v_g), rel=1e-4)
        test = flip_tests([gram])[0]
        bias = bias_bounds(gram, test.family_quantile)
        assert statistics.bias == pytest.approx(bias.value, rel=1e-4)
        assert statistics.bias_lower == pytest.approx(bias.lower, rel=1e-4)
        assert statistics.bias_upper == pytest.approx(bias.upper, rel=1e-4)
        assert statistics.minimum_detectable == pytest.approx(bias.minimum_detectable, rel=1e-4)
        assert statistics.p == pytest.approx(test.p, abs=2e-3)
        powers = (error**2).sum(1)
        assert statistics.n_effective == pytest.approx(powers.sum() ** 2 / (powers**2).sum(), **near)
        assert statistics.gain == pytest.approx(u_statistic(g @ error.T) / u_statistic(g @ g.T), rel=1e-3, abs=1e-6)


def test_shares_of_the_telescope_add_up_to_one_without_a_rest() -> None:
    parts = {name: draw(10 + i, 8, D, C) for i, name in enumerate(("scores", "defect", "cast_ds", "cast_dq"))}
    telescope = couple(draw(9, 8, D, C), parts).telescope
    shares = [telescope.share_scores, telescope.share_defect, telescope.share_cast_ds, telescope.share_cast_dq]
    assert sum(shares) == pytest.approx(1.0, abs=1e-5)
    assert telescope.share_rest == pytest.approx(0.0, abs=1e-5)
    assert sum(shares) + telescope.share_rest == pytest.approx(1.0, abs=1e-14)


def test_shares_are_signed() -> None:
    one = np.ones((4, D, C), np.float32)
    telescope = couple(draw(9, 4, D, C), {"scores": 3 * one, "defect": -one}).telescope
    assert telescope.share_scores == pytest.approx(1.5)
    assert telescope.share_defect == pytest.approx(-0.5)
    norm = np.linalg.norm(draw(9, 4, D, C).mean(0))
    assert telescope.defect_relative == pytest.approx(np.linalg.norm(one[0]) / norm, rel=1e-5)


def test_without_any_error_shares_are_undefined_and_figures_0() -> None:
    found = couple(draw(9, 16, D, C), {})
    assert math.isnan(found.telescope.share_defect)
    assert (found.error_defect_relative, found.defect.rho, found.defect.bias, found.defect.bias_upper) == (0, 0, 0, 0)
    assert math.isnan(found.defect.n_effective)
    assert math.isnan(found.flat_share)


def test_a_gradient_along_the_mean_key_is_flat() -> None:
    key = np.array([1.0, -2.0, 0.5])
    along = (key[:, None] * draw(20, 6, 1, C)).astype(np.float32)
    across = (np.array([2.0, 1.0, 0.0])[:, None] * draw(21, 6, 1, C)).astype(np.float32)
    found = couple(across, {"defect": along}, key_mean=key)
    assert found.flat_share == pytest.approx(1.0, rel=1e-6)
    assert found.flat_share_gradient == pytest.approx(0.0, abs=1e-12)
    mixed = couple(along + across, {"defect": across}, key_mean=key)
    power = (along**2).sum() / ((along + across) ** 2).sum()
    assert mixed.flat_share_gradient == pytest.approx(float(power), rel=1e-5)
    assert math.isnan(couple(along, {"defect": across}, key_mean=np.zeros(3)).flat_share)


def coherence_of(terms: np.ndarray) -> tuple[float, float]:
    """Coherence with and without signs of rank-one terms [rows, D, C] in one sequence of two."""
    w = np.linalg.norm(terms.reshape(len(terms), -1), axis=1)
    defect = np.stack([terms.sum(0), np.zeros((D, C))]).astype(np.float32)
    direction = np.stack([np.abs(terms).sum(0), np.zeros((D, C))]).astype(np.float32)
    found = couple(
        draw(9, 2, D, C), {"defect": defect, "direction": direction}, weights=(float(w.sum()), float((w**2).sum()))
    )
    return found.coherence, found.coherence_direction


def test_coherence_is_1_for_parallel_rows() -> None:
    term = np.abs(np.outer(draw(30, D), draw(31, C)))
    sizes = np.abs(draw(32, 40)) + 0.1
    assert coherence_of(sizes[:, None, None] * term) == pytest.approx((1.0, 1.0), rel=1e-5)


def test_coherence_with_signs_falls_where_signs_alternate() -> None:
    term = np.abs(np.outer(draw(30, D), draw(31, C)))
    signs = np.where(np.arange(40) % 2, 1.0, -1.0)
    signed, direction = coherence_of(signs[:, None, None] * term)
    # (0 - n) / (n^2 - n)
    assert signed == pytest.approx(-1 / 39, rel=1e-4)
    assert direction == pytest.approx(1.0, rel=1e-5)


def test_coherence_is_about_0_for_random_rows() -> None:
    # T3: 2,000 random directions; the cross terms have deviation sqrt(2 / (D C)) / rows of the square of the sum.
    terms = draw(33, 2000, D, 1) * draw(34, 2000, 1, C)
    assert abs(coherence_of(terms)[0]) < 5 * math.sqrt(2 / (D * C)) / 2000 * 2


def test_split_half_across_steps() -> None:
    steps = tuple(StepSpan(step=10 + i, sequences=tuple(range(4 * i, 4 * i + 4))) for i in range(4))
    shared = np.repeat(draw(40, 1, D, C), 16, 0)
    same = couple(draw(41, 16, D, C), {"defect": shared + 0.01 * draw(42, 16, D, C)}, steps=steps)
    assert same.coherence_steps == pytest.approx(1.0, abs=0.01)
    turned = shared.copy()
    turned[4:8] *= -1
    turned[12:] *= -1
    assert couple(draw(41, 16, D, C), {"defect": turned}, steps=steps).coherence_steps == pytest.approx(-1.0, abs=1e-5)
    assert math.isnan(couple(draw(41, 16, D, C), {"defect": shared}).coherence_steps)


def test_steps_have_their_own_ratios() -> None:
    hp, defect = draw(50, 6, D, C), draw(51, 6, D, C) * 0.1
    steps = (StepSpan(step=3, sequences=(0, 2, 4)), StepSpan(step=4, sequences=(1, 3, 5)))
    found = couple(hp, {"defect": defect, "scores": 2 * defect}, steps=steps).steps
    assert [(item.step, item.sequences) for item in found] == [(3, 3), (4, 3)]
    for item, span in zip(found, steps, strict=True):
        chosen = list(span.sequences)
        norm = np.linalg.norm(hp[chosen].mean(0))
        assert item.norm == pytest.approx(norm, rel=1e-5)
        assert item.error_defect_relative == pytest.approx(np.linalg.norm(defect[chosen].mean(0)) / norm, rel=1e-5)
        assert item.error_total_relative == pytest.approx(3 * item.error_defect_relative, rel=1e-5)


def test_a_gain_needs_a_detected_gradient() -> None:
    noise = draw(60, 16, D, C)
    noise -= noise.mean(0)
    assert math.isnan(couple(noise, {"defect": draw(61, 16, D, C)}).defect.gain)
    detected = couple(noise * 0.1 + 1, {"defect": 0.01 * np.ones((16, D, C), np.float32)})
    assert detected.signal_p < 0.05
    assert detected.defect.gain == pytest.approx(0.01, rel=0.1)


def test_an_error_that_never_varies_has_rho_0_and_not_nan() -> None:
    found = couple(draw(62, 16, D, C), {"defect": np.full((16, D, C), 0.1, np.float32)})
    assert found.defect.rho == pytest.approx(0.0, abs=1e-6)


def test_a_vanished_gradient_gives_nan_ratios() -> None:
    found = couple(np.zeros((3, D, C), np.float32), {"defect": draw(63, 3, D, C)})
    assert found.norm == 0
    assert math.isnan(found.error_defect_relative)
    assert math.isnan(found.defect.rho)
    assert found.sampling_noise == 0


def test_one_sequence_has_sizes_and_no_statistics() -> None:
    found = couple(draw(64, 1, D, C), {"defect": draw(65, 1, D, C)})
    assert found.norm > 0
    assert found.error_defect_relative > 0
    for value in (found.sampling_noise, found.signal, found.signal_p, found.defect.rho, found.defect.bias_upper):
        assert math.isnan(value)


def test_only_finite_inner_products_count_as_finite() -> None:
    store = GradientStore(1, 2, D * C)
    values = draw(66, 1, D, C)
    store.put(slice(0, 1), 0, values, values, values)
    assert head_grams(store, 0, 1).finite
    bad = values.copy()
    bad[0, 1, 1] = np.inf
    store.put(slice(0, 1), 1, values, bad, values)
    assert not head_grams(store, 0, 2).finite
