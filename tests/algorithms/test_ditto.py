"""Ditto: oracle, ledger, reductions."""

import numpy as np
import pytest
from groups import ran
from oracle import CLIENTS, LR, average, client, data, federation, flat, gradient
from tiny import Normed, assert_equal, everyone, leaves, world

from fedkd.algorithms.base import Setting
from fedkd.algorithms.ditto import Ditto
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.local import Local
from fedkd.core import optim
from fedkd.engine import Settings
from fedkd.evaluate import evaluate

EXECUTORS = ("serial", "vmapped")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("personal_epochs", [None, 3])
def test_three_rounds_are_those_of_algorithm_1(executor, personal_epochs, tmp_path):
    """w is FedAvg's; v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w^t)), from where it was, with the w^t received."""
    run = federation(Ditto(lambda_=0.7, personal_epochs=personal_epochs), tmp_path, executor=executor)
    state = run.start()
    w, v = flat(state.server.w), [flat(client(state, k).v) for k in range(2)]
    for _ in range(3):
        run.advance(state)
        sent = []
        for k in range(2):
            w_k = w
            for _ in range(2):  # r: two epochs of one full batch
                w_k = [a - LR * g for a, g in zip(w_k, gradient(w_k, data(k)), strict=True)]
            sent.append(w_k)
            for _ in range(personal_epochs or 2):  # s
                slope = gradient(v[k], data(k))
                v[k] = [a - LR * (g + 0.7 * (a - b)) for a, g, b in zip(v[k], slope, w, strict=True)]
        w = average(sent, [len(c) for c in CLIENTS])
    assert flat(state.server.w) == pytest.approx(w, abs=1e-6)
    assert [flat(client(state, k).v) for k in range(2)] == [pytest.approx(v_k, abs=1e-6) for v_k in v]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_without_the_pull_the_personal_models_are_those_of_local_training(executor, tmp_path):
    here = world(executor, (Normed(),))
    (_, pulled), (_, alone) = (ran(algorithm, tmp_path, here, 2) for algorithm in (Ditto(lambda_=0.0), Local()))
    assert_equal(everyone(pulled)["normed"].v, everyone(alone)["normed"].w)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_shared_model_and_what_is_sent_are_fedavgs(executor, tmp_path):
    """P · P · P: the personal models never leave home."""
    here = world(executor, (Normed(),))
    (_, ditto), (_, fedavg) = (ran(algorithm, tmp_path, here, 2) for algorithm in (Ditto(lambda_=2.0), FedAvg()))
    assert_equal(ditto.server, fedavg.server)
    assert ditto.ledger.rows == fedavg.ledger.rows


def test_a_client_goes_on_from_its_own_model_when_it_comes_back(tmp_path):
    """Were v_k begun anew from w, as fine-tuning has it, the rounds before would leave no trace in it."""
    run, state = ran(Ditto(lambda_=0.1), tmp_path, world())
    run.settings = Settings(participation=0.5)
    other = run.start()
    other.server, other.round = state.server, state.round  # the same w, but personal models as drawn
    for s in (state, other):
        run.advance(s)
    assert_equal(state.server, other.server)
    moved = [leaves(everyone(s)["hidden"].v)[0] for s in (state, other)]
    assert all(not moved[0][k].equal(moved[1][k]) for k in range(4))


def test_the_personal_model_is_v_and_the_shared_one_w(tmp_path):
    run, state = ran(Ditto(), tmp_path, world(), 2)
    assert run.algorithm.shared(state.server) is state.server.w
    verdict = evaluate(run.algorithm, state.server, state.store, run.world, 2, np.arange(4))
    assert verdict.metrics["loss/personal/mean"] != verdict.metrics["loss/shared/mean"]


def test_negative_pulls_and_no_epochs_are_refused():
    setting = Setting(4, 4, 1, optim.Local())
    assert Ditto().problems(setting) == Ditto(lambda_=0.0, personal_epochs=1).problems(setting) == []
    first, second = Ditto(lambda_=-1.0, personal_epochs=0).problems(setting)
    assert "algorithm.lambda_=-1 must not be negative" in first
    assert "algorithm.personal_epochs=0 must be at least 1" in second
