"""KT-pFL: oracle, ledger, reductions, invariant, cohorts."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracle import LR, PUBLIC, client, data, federation, flat, gradient, scores, sgd, softmax
from tiny import Hidden, Linear, assert_close, assert_equal, engine, everyone

from fedkd.algorithms.base import OwnModel, Setting
from fedkd.algorithms.ktpfl import KTpFL
from fedkd.algorithms.local import Local
from fedkd.algorithms.steps import supervised
from fedkd.core import optim
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.federation.placed import Placed

MIXED = (Hidden(), Linear())
T, ETA_2, ETA_3, RHO = 2.0, 0.8, 2.0, 0.1
SHARE = [3 / 5, 2 / 5]  # D_n/D


def mixture(row, s):
    return [[sum(c * s_m[x][k] for c, s_m in zip(row, s, strict=True)) for k in range(2)] for x in range(len(s[0]))]


def kl(row, s, n):
    """Mean over public samples of KL(Σ_m c_m s_m ‖ s_n)."""
    pairs = zip(mixture(row, s), s[n], strict=True)
    return sum(p * math.log(p / q) for t, own in pairs for p, q in zip(t, own, strict=True)) / len(PUBLIC)


def mse(row, s, n):
    """Mean over public samples and both classes."""
    pairs = zip(mixture(row, s), s[n], strict=True)
    return sum((p - q) ** 2 for t, own in pairs for p, q in zip(t, own, strict=True)) / (2 * len(PUBLIC))


def slope(f, row, s, n, h=1e-5):
    """∂f/∂c_nm by central differences."""
    found = []
    for m in range(2):
        up, down = list(row), list(row)
        up[m] += h
        down[m] -= h
        found.append((f(up, s, n) - f(down, s, n)) / (2 * h))
    return found


def within(domain, row):
    if domain == "simplex":  # the nearest point of the line a + b = 1, then of its part in the first quadrant
        a = min(max((row[0] - row[1] + 1) / 2, 0), 1)
        return [a, 1 - a]
    return softmax([5 * v for v in row]) if domain == "softmax" else row


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize(
    ("domain", "objective", "lambda_"),
    [("simplex", "kl", 40.0), ("softmax", "kl", 40.0), ("none", "kl", 0.05), ("simplex", "mse", 80.0)],
)
def test_three_rounds_are_those_of_algorithm_1(executor, domain, objective, lambda_, tmp_path):
    method = KTpFL(T, 2, 3, ETA_2, ETA_3, lambda_, RHO, domain, objective)
    run = federation(method, tmp_path, executor=executor)
    state = run.start()
    w = [flat(client(state, n).w) for n in range(2)]
    c = [[0.5, 0.5], [0.5, 0.5]]
    public = [x / 255 for x in PUBLIC]
    moved = 0.0
    for _ in range(3):
        run.advance(state)
        for n in range(2):
            for _ in range(2):  # l. 11-13: two epochs of one full batch
                w[n] = sgd(w[n], gradient(w[n], data(n)))
        s = [[softmax([z / T for z in scores(w_m, x)]) for x in public] for w_m in w]
        for n in range(2):
            teacher = mixture(c[n], s)
            for _ in range(2):  # l. 14-16: R = 2 passes, all three public samples at once
                g = [0.0] * 4
                for x, target in zip(public, teacher, strict=True):
                    q = softmax([z / T for z in scores(w[n], x)])
                    for k in range(2):
                        # ∂/∂z_k of −Σ_j target_j log q_j, a mean over samples
                        error = (sum(target) * q[k] - target[k]) / (T * len(public))
                        g[k] += error * x
                        g[2 + k] += error
                w[n] = sgd(w[n], g, ETA_2)
        for n in range(2):  # l. 7
            f = {"kl": kl, "mse": mse}[objective]
            step = [a - ETA_3 * lambda_ * SHARE[n] * b for a, b in zip(c[n], slope(f, c[n], s, n), strict=True)]
            c[n] = within(domain, [(a + 2 * ETA_3 * RHO / 2) / (1 + 2 * ETA_3 * RHO) for a in step])
            moved = max(moved, abs(c[n][0] - 0.5))
    assert 0.02 < moved < 0.48  # the coefficients do take part in it, away from their bounds
    assert state.server.c.flatten().tolist() == pytest.approx([*c[0], *c[1]], abs=2e-5)
    for n in range(2):
        assert flat(client(state, n).w) == pytest.approx(w[n], abs=5e-6)


def test_soft_predictions_go_up_and_everyone_gets_its_own_mixture(tmp_path):
    """Q_t = 6 public samples a round, L = 3 classes."""
    run = engine("ktpfl", tmp_path, architectures=MIXED)
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.clients, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        ("up", "soft predictions", 4, 4 * 18, 4 * 18),
        ("down", "personalised soft predictions", 4, 4 * 18, 4 * 18),
    ]


@dataclass(frozen=True)
class UniformTeacher(KTpFL):
    """Everyone distils from the cohort's mean."""

    def round(self, server, own, fed):
        (w,) = own
        w = fed.fit(supervised, w)
        s = fed.up(fed.each(self.soften, fed.predict_public(w)), "soft predictions")
        w = fed.fit(self.distil, w, fed.down(s.mean(), "mean"), over="public", epochs=1, batch_size=4, lr=self.eta_2)
        return server, Placed.pack(OwnModel, w)


def after(rounds, algorithm, tmp_path, settings=None):
    run = engine(algorithm, tmp_path, architectures=MIXED, settings=settings)
    state = run.start()
    for _ in range(rounds):
        run.advance(state)
    return state


EAGER = {"public_batch_size": 4, "eta_2": 20.0, "eta_3": 1.0, "lambda_": 1000.0}


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_an_infinite_rho_is_the_uniform_teacher(participation, tmp_path):
    settings = Settings(participation=participation, checkpoint_every=None)
    even, *others = (
        everyone(after(3, method, tmp_path, settings))
        for method in (UniformTeacher(**EAGER), KTpFL(rho=math.inf, **EAGER), KTpFL(rho=1e9, **EAGER))
    )
    for other in others:
        assert_close(other, even, tolerance=1e-5)
    learnt = everyone(after(3, KTpFL(rho=0.1, **EAGER), tmp_path, settings))
    with pytest.raises(AssertionError):
        assert_close(learnt, even, tolerance=1e-3)


def test_without_distillation_it_is_local_training(tmp_path):
    alone, silent = (after(2, method, tmp_path) for method in (Local(), KTpFL(distillation_steps=0)))
    assert_equal(everyone(silent), everyone(alone))


def test_eta_2_is_eta_1_unless_given(tmp_path):
    runs = [federation(KTpFL(eta_2=eta_2), tmp_path) for eta_2 in (None, LR, 2 * LR)]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
    none, same, other = (flat(client(state, 0).w) for state in states)
    assert none == same != other


@pytest.mark.parametrize("domain", ["simplex", "softmax"])
def test_rows_stay_distributions_and_only_the_cohort_s_part_changes(domain, tmp_path):
    settings = Settings(participation=0.5, checkpoint_every=None)
    run = engine(KTpFL(rho=0.1, domain=domain, **EAGER), tmp_path, architectures=MIXED, settings=settings)
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


def test_its_users_see_the_matrix(tmp_path):
    state = after(1, "ktpfl", tmp_path)
    run = engine("ktpfl", tmp_path, architectures=MIXED)
    verdict = evaluate(run.algorithm, state.server, state.store, run.world, 1, np.arange(4))
    view = verdict.views["coefficients"]
    assert (view.kind, view.values.shape) == ("matrix", (4, 4))
    assert verdict.metrics["coefficients/self"] == pytest.approx(float(view.values.diagonal().mean()))


def test_what_cannot_work_is_said():
    setting = Setting(4, 4, 2, optim.Local())
    assert KTpFL().problems(setting) == []
    temperature, objective = KTpFL(temperature=0, objective="l1").problems(setting)
    assert "temperature" in temperature
    assert "kl, mse" in objective
