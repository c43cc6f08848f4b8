"""KT-pFL: oracle, ledger, reductions, invariant, cohorts."""

import math
from dataclasses import dataclass

import pytest
from mixtures import (
    after,
    assert_only_the_cohort_s_part_changes,
    coefficients_step,
    distilled,
    mixture,
    seen,
    soft,
    trained,
)
from oracle import LR, PUBLIC, client, federation, flat
from tiny import Hidden, Linear, assert_close, assert_equal, engine, everyone

from fedkd.algorithms.base import OwnModel, Setting
from fedkd.algorithms.ktpfl import KTpFL
from fedkd.algorithms.local import Local
from fedkd.algorithms.steps import supervised
from fedkd.core import optim
from fedkd.engine import Settings
from fedkd.federation.placed import Placed

MIXED = (Hidden(), Linear())
T, ETA_2, ETA_3, RHO = 2.0, 0.8, 2.0, 0.1
SHARE = [3 / 5, 2 / 5]  # D_n/D


def kl(row, s, n):
    """Mean over public samples of KL(Σ_m c_m s_m ‖ s_n)."""
    pairs = zip(mixture(row, s), s[n], strict=True)
    return sum(p * math.log(p / q) for t, own in pairs for p, q in zip(t, own, strict=True)) / len(PUBLIC)


def mse(row, s, n):
    """Mean over public samples and both classes."""
    pairs = zip(mixture(row, s), s[n], strict=True)
    return sum((p - q) ** 2 for t, own in pairs for p, q in zip(t, own, strict=True)) / (2 * len(PUBLIC))


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
    moved = 0.0
    for _ in range(3):
        run.advance(state)
        w = [trained(w_n, n) for n, w_n in enumerate(w)]  # l. 11-13
        s = [soft(w_n, T) for w_n in w]
        w = [distilled(w_n, mixture(c[n], s), T, 2, ETA_2) for n, w_n in enumerate(w)]  # l. 14-16: R = 2
        for n in range(2):  # l. 7
            how = {"rate": lambda_ * SHARE[n], "rho": RHO, "eta_3": ETA_3, "domain": domain}
            c[n] = coefficients_step({"kl": kl, "mse": mse}[objective], c[n], s, n, **how)
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


EAGER = {"public_batch_size": 4, "eta_2": 20.0, "eta_3": 1.0, "lambda_": 1000.0}


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_an_infinite_rho_is_the_uniform_teacher(participation, tmp_path):
    settings = Settings(participation=participation, checkpoint_every=None)
    even, *others = (
        everyone(after(3, method, tmp_path, settings=settings, architectures=MIXED))
        for method in (UniformTeacher(**EAGER), KTpFL(rho=math.inf, **EAGER), KTpFL(rho=1e9, **EAGER))
    )
    for other in others:
        assert_close(other, even, tolerance=1e-5)
    learnt = everyone(after(3, KTpFL(rho=0.1, **EAGER), tmp_path, settings=settings, architectures=MIXED))
    with pytest.raises(AssertionError):
        assert_close(learnt, even, tolerance=1e-3)


def test_without_distillation_it_is_local_training(tmp_path):
    alone, silent = (
        after(2, method, tmp_path, architectures=MIXED) for method in (Local(), KTpFL(distillation_steps=0))
    )
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
    method = KTpFL(rho=0.1, domain=domain, **EAGER)
    assert_only_the_cohort_s_part_changes(method, tmp_path, architectures=MIXED)


def test_its_users_see_the_matrix(tmp_path):
    assert seen("coefficients", "ktpfl", tmp_path, architectures=MIXED).sum() == pytest.approx(4)


def test_what_cannot_work_is_said():
    setting = Setting(4, 4, 2, optim.Local())
    assert KTpFL().problems(setting) == []
    temperature, objective = KTpFL(temperature=0, objective="l1").problems(setting)
    assert "temperature" in temperature
    assert "kl, mse" in objective
