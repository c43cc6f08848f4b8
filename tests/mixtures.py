"""What the tests of methods share whose clients learn from mixtures: steps in plain floats, the matrix of weights."""

import numpy as np
import pytest
import torch
from oracle import LR, PUBLIC, data, differences, gradient, scores, sgd, softmax
from tiny import engine

from fedkd.engine import Settings
from fedkd.evaluate import evaluate

POINTS = [x / 255 for x in PUBLIC]


def trained(w, n, epochs=2):
    """Epochs of one full batch at client n of the oracle's world."""
    for _ in range(epochs):
        w = sgd(w, gradient(w, data(n)))
    return w


def soft(w, temperature):
    """Probabilities of the public samples."""
    return [softmax([z / temperature for z in scores(w, x)]) for x in POINTS]


def mixture(row, s):
    return [[sum(c * s_m[x][k] for c, s_m in zip(row, s, strict=True)) for k in range(2)] for x in range(len(s[0]))]


def distilled(w, teacher, temperature, passes, lr=LR):
    """Passes over all three public samples at once, towards the teacher's probabilities."""
    for _ in range(passes):
        g = [0.0] * 4
        for x, target, q in zip(POINTS, teacher, soft(w, temperature), strict=True):
            for k in range(2):
                # ∂/∂z_k of −Σ_j target_j log q_j, a mean over samples
                error = (sum(target) * q[k] - target[k]) / (temperature * len(POINTS))
                g[k] += error * x
                g[2 + k] += error
        w = sgd(w, g, lr)
    return w


def coefficients_step(f, row, *known, rate, rho, eta_3, domain, h=1e-5):
    """The step of one client's row down rate·f(row, *known), whose slope is a central difference, and ρ‖row − 1/2‖²."""
    g = differences(lambda row: f(row, *known), row, step=h)
    pull = 2 * eta_3 * rho
    return within(domain, [(a - eta_3 * rate * b + pull / 2) / (1 + pull) for a, b in zip(row, g, strict=True)])


def within(domain, row):
    if domain == "simplex":  # the nearest point of the line a + b = 1, then of its part in the first quadrant
        a = min(max((row[0] - row[1] + 1) / 2, 0), 1)
        return [a, 1 - a]
    return softmax([5 * v for v in row]) if domain == "softmax" else row


def after(rounds, algorithm, directory, **how):
    """A run's state after some rounds."""
    run = engine(algorithm, directory, **how)
    state = run.start()
    for _ in range(rounds):
        run.advance(state)
    return state


def assert_only_the_cohort_s_part_changes(algorithm, directory, **how) -> None:
    """And that rows stay distributions."""
    run = engine(algorithm, directory, settings=Settings(participation=0.5, checkpoint_every=None), **how)
    state = run.start()
    before, changed = torch.full((4, 4), 0.25), set()
    for _ in range(8):
        run.advance(state)
        c = state.server.c
        assert bool((c >= 0).all())
        torch.testing.assert_close(c.sum(1), torch.ones(4))
        rows, columns = (~torch.isclose(c, before)).nonzero(as_tuple=True)
        assert len({*rows.tolist(), *columns.tolist()}) <= 2  # the two clients of the cohort
        changed |= {*rows.tolist()}
        before = c
    assert len(changed) >= 3  # cohorts differ


def seen(what, algorithm, directory, **how) -> np.ndarray:
    """The matrix that its users see under this name after a round."""
    run = engine(algorithm, directory, **how)
    state = run.start()
    run.advance(state)
    verdict = evaluate(run.algorithm, state.server, state.store, run.world, 1, np.arange(4))
    view = verdict.views[what]
    assert (view.kind, view.values.shape) == ("matrix", (4, 4))
    assert verdict.metrics[f"{what}/self"] == pytest.approx(float(view.values.diagonal().mean()))
    return view.values
