"""KT-pFL for one architecture: oracle, ledger, reductions, invariant, cohorts."""

import math
from dataclasses import dataclass

import pytest
from mixtures import after, assert_only_the_cohort_s_part_changes, coefficients_step, seen, trained
from oracle import average, client, federation, flat, sgd
from tiny import Hidden, Normed, assert_close, engine, everyone

from fedkd.algorithms.base import OneModel, OwnModel, Setting, SharedModel
from fedkd.algorithms.ktpfl_homo import KTpFLHomo
from fedkd.algorithms.steps import supervised
from fedkd.core import optim
from fedkd.engine import Settings
from fedkd.federation.placed import Placed

ETA_2, ETA_3, RHO = 0.1, 0.3, 0.2
SHARE = [3 / 5, 2 / 5]  # D_n/D


def distance(row, models, n, unit):
    """L_dis(Σ_m c_m w^m, w^n)."""
    mixed = [sum(c * w[i] for c, w in zip(row, models, strict=True)) for i in range(4)]
    return unit * sum((a - b) ** 2 for a, b in zip(mixed, models[n], strict=True))


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize(
    ("of", "unit", "lambda_", "domain"),
    [("squared", 1, 2.0, "simplex"), ("mse", 1 / 4, 8.0, "simplex"), ("squared", 1, 2.0, "none")],
)
def test_three_rounds_are_those_of_algorithm_2(executor, of, unit, lambda_, domain, tmp_path):
    run = federation(KTpFLHomo(3, ETA_2, ETA_3, lambda_, RHO, domain, of), tmp_path, executor=executor)
    state = run.start()
    w = [flat(client(state, n).w) for n in range(2)]
    assert w[0] == w[1] == flat(state.server.w_0)  # l. 3
    c = [[0.5, 0.5], [0.5, 0.5]]
    moved = 0.0
    for _ in range(3):
        run.advance(state)
        w = [trained(w_n, n) for n, w_n in enumerate(w)]  # l. 11-13
        sent = [list(w_n) for w_n in w]
        for n in range(2):
            mixed = [c[n][0] * a + c[n][1] * b for a, b in zip(*sent, strict=True)]
            for _ in range(3):  # l. 14-15: R = 3 steps along −∇‖mixed − w‖²
                w[n] = sgd(w[n], [2 * unit * (a - b) for a, b in zip(w[n], mixed, strict=True)], ETA_2)
        for n in range(2):  # l. 7
            how = {"rate": lambda_ * SHARE[n], "rho": RHO, "eta_3": ETA_3, "domain": domain}
            c[n] = coefficients_step(distance, c[n], sent, n, unit, h=0.5, **how)  # exact for a square
        moved = max(moved, *(abs(row[0] - 0.5) for row in c))
    assert 0.02 < moved < 0.48  # away from the bounds
    assert state.server.c.flatten().tolist() == pytest.approx([*c[0], *c[1]], abs=5e-6)
    for n in range(2):
        assert flat(client(state, n).w) == pytest.approx(w[n], abs=5e-6)


def test_models_go_up_and_everyone_gets_its_own_mixture(tmp_path):
    """P = 103; a net with running statistics (3 means, 3 variances) sends them beside its 30 + 6 + 39 parameters."""
    for net, expected in (
        (Hidden(), [("up", "model", 4 * 103, 4 * 103), ("down", "personalised model", 4 * 103, 4 * 103)]),
        (
            Normed(),
            [
                ("up", "model", 4 * 75, 4 * 75),
                ("up", "model statistics", 0, 0),
                ("down", "personalised model", 4 * 75, 4 * 75),
                ("down", "personalised model statistics", 0, 0),
            ],
        ),
    ):
        run = engine("ktpfl_homo", tmp_path, architectures=(net,))
        state = run.start()
        run.advance(state)
        assert [(r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows] == expected
        assert {r.clients for r in state.ledger.rows} == {4}


@dataclass(frozen=True)
class EvenFedAvg(OneModel):
    """FedAvg with even weights."""

    def round(self, server, own, fed):
        w = fed.fit(supervised, fed.down(server.w, "model"))
        return SharedModel(fed.up(w, "model").mean()), own


@dataclass(frozen=True)
class UniformMixture(KTpFLHomo):
    """Everyone goes towards the cohort's mean."""

    def round(self, server, own, fed):
        (w,) = own
        w = fed.fit(supervised, w)
        mean = fed.down(fed.up(w, "model").mean(), "mean")
        return server, Placed.pack(OwnModel, fed.each(lambda net, *two: self.transfer(1.0, *two), w, mean))


EAGER = {"eta_2": 0.2, "eta_3": 1.0, "lambda_": 1.0}


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_an_infinite_rho_is_the_uniform_mixture(participation, tmp_path):
    settings = Settings(participation=participation, checkpoint_every=None)
    even, *others = (
        everyone(after(6, method, tmp_path, settings=settings))
        for method in (UniformMixture(**EAGER), KTpFLHomo(rho=math.inf, **EAGER), KTpFLHomo(rho=1e9, **EAGER))
    )
    for other in others:
        assert_close(other, even)
    learnt = everyone(after(6, KTpFLHomo(rho=0.1, **EAGER), tmp_path, settings=settings))
    with pytest.raises(AssertionError):
        assert_close(learnt, even, tolerance=1e-3)


@pytest.mark.parametrize("net", [Hidden(), Normed()])
def test_the_uniform_mixture_in_the_models_place_is_fedavg_with_even_weights(net, tmp_path):
    """η_2 = 1/2: w − 2 η_2 (w − mixture) = mixture, the same one for all when c = 1/N."""
    own = after(2, KTpFLHomo(eta_2=0.5, rho=math.inf), tmp_path, architectures=(net,))
    shared = after(2, EvenFedAvg(), tmp_path, architectures=(net,)).server.w
    (stack,) = everyone(own).values()
    for i in range(4):
        assert_close(tuple({k: v[i] for k, v in part.items()} for part in stack.w), tuple(shared))


def test_without_transfer_it_is_local_training_from_a_common_start(tmp_path):
    run = federation(KTpFLHomo(distillation_steps=0), tmp_path)
    state = run.start()
    w = [flat(state.server.w_0)] * 2
    for _ in range(2):
        run.advance(state)
        w = [trained(w_n, n) for n, w_n in enumerate(w)]
    for n in range(2):
        assert flat(client(state, n).w) == pytest.approx(w[n], abs=2e-6)
    assert w[0] != pytest.approx(average(w, [1, 1]), abs=1e-3)


def test_rows_stay_distributions_and_only_the_cohort_s_part_changes(tmp_path):
    assert_only_the_cohort_s_part_changes(KTpFLHomo(rho=0.1, **EAGER), tmp_path)


def test_its_users_see_the_matrix(tmp_path):
    assert seen("coefficients", "ktpfl_homo", tmp_path).sum() == pytest.approx(4)


def test_what_cannot_work_is_said():
    setting = Setting(4, 4, 1, optim.Local())
    assert KTpFLHomo().problems(setting) == []
    assert KTpFLHomo(eta_2=3.0, distance="mse").problems(setting) == []
    (past,) = KTpFLHomo(eta_2=0.6).problems(setting)
    assert "past the mixture" in past
    (distance,) = KTpFLHomo(distance="l1").problems(setting)
    assert "squared, mse" in distance
