"""Theorem 4.2 against a numeric minimisation, and what Figure 1 shows."""

import numpy as np
import pytest

from fedkd.examples.perfed_ckt_figure1 import optimal, simulate

BETA, NU, SIGMA, V = 2.0, 1.5, 1.3, np.array([0.7, 1.1, 3.0, 0.4])


def risk(k, lam, alpha):
    """E (w̃_k − w_k)² for one coordinate, exactly, with θ under a very flat prior: everything is Gaussian.

    ŵ_i = θ + ζ_i + e_i with var e = σ²/β; w̃_k = (β ŵ_k + λν Σ α_i ŵ_i)/(β + λν). Its error is linear in (θ, ζ, e).
    """
    clients = len(V)
    flat = 1e6
    weight = lam * NU * alpha
    weight = weight + BETA * (np.arange(clients) == k)
    weight = weight / (BETA + lam * NU)
    on_theta = weight.sum() - 1
    on_zeta = weight - (np.arange(clients) == k)
    return flat * on_theta**2 + (on_zeta**2 * V**2).sum() + (weight**2).sum() * SIGMA**2 / BETA


@pytest.mark.parametrize("k", range(4))
def test_the_closed_form_is_where_the_risk_is_least(k):
    from scipy.optimize import minimize

    lam, alpha = optimal(BETA, NU, SIGMA, V, k)
    best = risk(k, lam, alpha)
    rng = np.random.default_rng(0)
    for _ in range(200):  # no neighbour is better
        assert risk(k, lam * (1 + 0.05 * rng.normal()), alpha * (1 + 0.05 * rng.normal(size=4))) >= best - 1e-6
    found = min(
        minimize(lambda p: risk(k, abs(p[0]), p[1:]), rng.uniform(0.1, 1, 5), method="BFGS").fun for _ in range(5)
    )
    assert best == pytest.approx(found, rel=1e-3)


def test_the_optimal_weights_fall_with_a_clients_divergence():
    _, alpha = optimal(BETA, NU, SIGMA, V, 0)
    assert np.argsort(alpha).tolist() == np.argsort(-V).tolist()


def test_clusters_bring_the_clients_that_are_alike_nearer_to_their_true_models():
    """Over 30 draws, clients 0 and 1 (Figure 1 b, c) are nearer with clusters than with the plain average."""
    results = [simulate(seed) for seed in range(30)]
    averaged, clustered = np.array([[r.error(m)[:2].mean() for m in (r.averaged, r.clustered)] for r in results]).T
    assert (clustered < averaged).mean() > 0.9
    assert np.median(clustered) < np.median(averaged) / 3
