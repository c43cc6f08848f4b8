"""PerFed-CKT's linear regression: Theorem 4.2's closed forms and Figure 1's three clients.

Cho et al., arXiv:2109.08119, Section 4 and Appendix E.

    paper   here      meaning
    w_i     true      client i's true model, θ + ζ_i
    ŵ_i     own       its least-squares estimate
    w̃_k     learnt    the minimiser of ‖X w − y‖² + λ ‖s̄ − P w‖² (Eq. 13)
    s̄_k               mean of the predictions P ŵ_i over all clients, or over the nearest cluster

Departures
    D1  B_k of Theorem 4.2 is printed with the denominator σ² + A_k β v_k²; the theorem's own derivation (the covariance
        below Eq. 45) gives σ² + A_k + β v_k², which is what minimises the risk, and what stands here.
    D2  noise, sizes and the number of rounds of Figure 1 are not printed: standard deviation 10, 10 samples a client,
        50 public samples, 20 rounds.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedkd.core.kmeans import kmeans
from fedkd.core.seeds import numpy_rng

SPREADS = (2.0, 5.0, 200.0)  # σ_1, σ_2, σ_3 of Appendix E
SAMPLES, PUBLIC, NOISE, ROUNDS, LAMBDA = 10, 50, 10.0, 20, 50.0


def optimal(beta: float, nu: float, sigma: float, v: np.ndarray, k: int) -> tuple[float, np.ndarray]:
    """λ*_k and α*_k of Theorem 4.2 (Eq. 16), for XᵀX = βI and PᵀP = νI."""
    spread = sigma**2 + beta * v**2
    a = 1 / sum(1 / s for i, s in enumerate(spread) if i != k)
    b = a * spread[k] / (sigma**2 + a + beta * v[k] ** 2)  # D1
    return sigma**2 / (v[k] ** 2 * nu), b / spread


class Result(NamedTuple):
    """Models [client, 2] of one draw."""

    true: np.ndarray
    own: np.ndarray
    shared: np.ndarray  # FedAvg's, [2]
    averaged: np.ndarray  # knowledge transfer from all
    clustered: np.ndarray  # from the nearest cluster

    def error(self, models: np.ndarray) -> np.ndarray:
        """Each client's distance from its true model."""
        return np.asarray(np.linalg.norm(models - self.true, axis=1))


def simulate(seed: int) -> Result:
    """Three clients, two alike and one apart, learning from all or from the nearest of two clusters."""
    rng = numpy_rng(seed, "figure1")
    theta = rng.uniform(-10, 10, 2)
    true = theta + rng.normal(size=(3, 2)) * np.array(SPREADS)[:, None]
    x = rng.uniform(-10, 10, (3, SAMPLES, 2))
    y = np.einsum("knd,kd->kn", x, true) + NOISE * rng.normal(size=(3, SAMPLES))
    public = rng.uniform(-10, 10, (PUBLIC, 2))
    own = np.stack([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)])
    shared = np.linalg.lstsq(x.reshape(-1, 2), y.ravel(), rcond=None)[0]
    return Result(true, own, shared, *(_transfer(x, y, public, own, clusters, seed) for clusters in (1, 2)))


def _transfer(
    x: np.ndarray, y: np.ndarray, public: np.ndarray, own: np.ndarray, clusters: int, seed: int
) -> np.ndarray:
    """Rounds of Algorithm 1 with the local problem solved exactly."""
    w = own
    for _ in range(ROUNDS):
        s = w @ public.T
        centroids = kmeans(torch.from_numpy(s), clusters, seed)[0].numpy()
        nearest = centroids[np.square(s[:, None] - centroids).sum(-1).argmin(1)]  # Eq. 4
        # each sum of squares is a mean here, so that λ weighs a public sample as it weighs a private one
        left = [a.T @ a / len(a) + LAMBDA * public.T @ public / len(public) for a in x]
        right = [a.T @ b / len(a) + LAMBDA * public.T @ t / len(public) for a, b, t in zip(x, y, nearest, strict=True)]
        w = np.stack([np.linalg.solve(m, r) for m, r in zip(left, right, strict=True)])
    return w


def run(config: dict[str, Any], directory: Path) -> dict[str, float]:
    """Simulate, draw, and return the mean distance from the true models of the two clients that are alike."""
    result = simulate(config["seed"])
    draw(directory / "figure1.png", result)
    kinds = {"local": result.own, "without_clusters": result.averaged, "with_clusters": result.clustered}
    return {f"distance/{name}": float(result.error(models)[:2].mean()) for name, models in kinds.items()}


def draw(path: Path, result: Result) -> None:
    """Figure 1: the true models and FedAvg's, then each client's."""
    from fedkd.report.plots import COLOURS, figure_of, title_axes

    figure = figure_of(13, 3.4)
    panels = figure.subplots(1, 4)
    for k in range(3):
        panels[0].scatter(*result.true[k], color=COLOURS[k], marker="*", s=150, label=f"true model {k}", zorder=3)
    panels[0].scatter(*result.shared, color="black", marker="X", s=80, label="FedAvg's model")
    title_axes(panels[0], x="w₁", y="w₂", title="(a) true models and FedAvg")
    for k, axes in enumerate(panels[1:]):
        axes.scatter(*result.true[k], color=COLOURS[k], marker="*", s=150, label="true", zorder=3)
        axes.scatter(*result.own[k], color="grey", marker="o", s=50, label="local")
        axes.scatter(*result.averaged[k], color="black", marker="s", s=50, label="without clusters")
        axes.scatter(*result.clustered[k], color=COLOURS[k], marker="D", s=50, label="with clusters")
        title_axes(axes, x="w₁", y="", title=f"({'bcd'[k]}) client {k}")
    for axes in panels:
        axes.margins(0.2)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
