"""The Gaussian mechanism: the paper's figures, and ε over several releases against its definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkd.core import privacy
from fedkd.core.privacy import (
    accountant_problems,
    mean_sensitivity,
    needed_sigma,
    noise_variance,
    renyi_epsilon,
    spent_delta,
    spent_epsilon,
)


def test_fedhkds_sigma_for_half_an_epsilon_is_6_215():
    """sqrt(2 log(1.25/0.01))/0.5 = 3.10751/0.5."""
    assert needed_sigma(0.5, 0.01) == pytest.approx(6.215, abs=5e-4)


def test_fedhkds_noise_variance_at_256_samples_is_0_0269():
    """(2·3/256·7)² = 0.1640625² = 0.026917."""
    assert mean_sensitivity(256, 3) == 6 / 256
    assert noise_variance(256, 3, 7) == pytest.approx(0.0269, abs=5e-5)


def test_the_mean_of_bounded_numbers_moves_by_at_most_its_sensitivity():
    """Lemma 1, attained: one of N numbers goes from −ζ to ζ."""
    before, after = np.array([-3.0, 1.0, 2.0, 0.5]), np.array([3.0, 1.0, 2.0, 0.5])
    assert after.mean() - before.mean() == pytest.approx(mean_sensitivity(4, 3))


@pytest.mark.parametrize(("sigma", "epsilon", "releases"), [(7, 0.1, 1), (1.0, 0.5, 1), (2.0, 1.5, 9), (0.5, 4.0, 1)])
def test_spent_delta_is_the_integral_of_what_exceeds_epsilon(sigma, epsilon, releases):
    """δ = ∫ max(0, p − e^ε q): p and q are `releases` times N(1, σ²) and N(0, σ²), told apart by their mean alone.

    The mean of t draws is N(1, σ²/t) or N(0, σ²/t).
    """
    deviation = sigma / math.sqrt(releases)
    x = np.linspace(-12 * deviation, 1 + 12 * deviation, 2_000_001)
    p, q = (np.exp(-(((x - m) / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi)) for m in (1, 0))
    integral = np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0])
    assert spent_delta(sigma, epsilon, releases) == pytest.approx(integral, abs=1e-6)


def test_the_classical_sigma_is_enough_for_its_epsilon():
    for epsilon in (0.1, 0.5, 1.0):
        for delta in (0.01, 1e-5):
            assert spent_epsilon(needed_sigma(epsilon, delta), delta) < epsilon


@given(st.floats(0.05, 50), st.floats(1e-9, 0.5), st.integers(1, 500))
def test_spent_epsilon_is_the_least_that_delta_allows_and_below_the_renyi_bound(sigma, delta, releases):
    epsilon = spent_epsilon(sigma, delta, releases)
    assert epsilon <= renyi_epsilon(sigma, delta, releases)
    assert spent_delta(sigma, epsilon, releases) <= delta
    if epsilon:
        assert spent_delta(sigma, epsilon * (1 - 1e-6), releases) > delta * (1 - 1e-9)


def test_nine_releases_are_one_with_a_third_of_the_noise():
    assert spent_epsilon(6, 0.01, 9) == pytest.approx(spent_epsilon(2, 0.01), rel=1e-12)


def test_renyi_epsilon_is_the_least_over_all_orders():
    """At order α, ε(α) = tα/(2σ²) + log(1/δ)/(α − 1); here by a fine grid of α."""
    order = 1 + np.geomspace(1e-3, 1e3, 200_001)
    bound = 50 * order / (2 * 7**2) + math.log(1 / 0.01) / (order - 1)
    assert renyi_epsilon(7, 0.01, 50) == pytest.approx(bound.min(), rel=1e-6)


def test_fifty_rounds_of_the_papers_noise():
    """An element, σ=7 and δ=0.01; the figure is dp-accounting 0.6.0's, composed of 50 privacy loss distributions."""
    assert spent_epsilon(7, 0.01, 50) == pytest.approx(2.34946862, abs=1e-7)
    assert spent_epsilon(7, 0.01) == pytest.approx(0.16138912, abs=1e-7)


def test_the_package_agrees(capsys):
    with capsys.disabled():  # it keeps the stream that stderr is now, and closes it when Hydra sets up logging
        pytest.importorskip("dp_accounting")
    for sigma, delta, releases in ((7, 0.01, 50), (2, 1e-5, 3)):
        there = spent_epsilon(sigma, delta, releases, "dp_accounting")
        assert there == pytest.approx(spent_epsilon(sigma, delta, releases), rel=1e-4)


def test_nothing_released_costs_nothing_and_no_noise_costs_everything():
    assert spent_epsilon(7, 0.01, 0) == 0
    assert spent_epsilon(0, 0.01, 0) == 0
    assert spent_epsilon(0, 0.01, 1) == math.inf
    assert spent_epsilon(100, 0.01, 1) == 0  # δ(0) = 2Φ(1/200) − 1 = 0.004 < 0.01


def test_extreme_noise_neither_overflows_nor_hangs():
    assert spent_epsilon(1e-3, 1e-5, 1000) == pytest.approx(1000 / (2 * 1e-6), rel=1e-3)  # ρ = t/(2σ²) prevails


def test_a_missing_package_is_said_with_what_to_type(monkeypatch):
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    (problem,) = accountant_problems("dp_accounting")
    assert "pip install 'fedkd[privacy]'" in problem
    assert accountant_problems("exact") == []
    (problem,) = accountant_problems("moments")
    assert "exact, dp_accounting" in problem
