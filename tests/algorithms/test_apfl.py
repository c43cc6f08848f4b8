"""APFL: oracle, ledger, reductions, the shares' limits."""

from functools import partial

import numpy as np
import pytest
import torch
from groups import ran
from oracle import CLIENTS, LR, average, client, data, federation, flat, gradient, sgd
from tiny import Normed, assert_equal, everyone, world

from fedkd.algorithms.apfl import APFL, Client
from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.local import Local
from fedkd.core import optim
from fedkd.core.fit import LeafByLeaf
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

EXECUTORS = ("serial", "vmapped")


def mixed(alpha, v, w):
    return [alpha * a + (1 - alpha) * b for a, b in zip(v, w, strict=True)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("start", "adaptive"), [(0.5, True), (0.3, False), (0.99, True)])
def test_three_rounds_are_those_of_algorithm_1(executor, start, adaptive, tmp_path):
    run = federation(APFL(alpha=start, adaptive=adaptive), tmp_path, executor=executor)
    state = run.start()
    w = flat(state.server.w)
    v, alpha = [w, w], [start, start]
    for _ in range(3):
        run.advance(state)
        sent = []
        for i in range(2):
            if adaptive:  # α_i ← α_i − η ⟨v_i − w_i, ∇f_i(v̄_i)⟩, clipped
                g = gradient(mixed(alpha[i], v[i], w), data(i))
                slope = sum((a - b) * c for a, b, c in zip(v[i], w, g, strict=True))
                alpha[i] = min(1.0, max(0.0, alpha[i] - LR * slope))
            w_i = w
            for _ in range(2):  # both from where they were before the step
                g = gradient(mixed(alpha[i], v[i], w_i), data(i))
                w_i, v[i] = sgd(w_i, gradient(w_i, data(i))), sgd(v[i], [alpha[i] * c for c in g])
            sent.append(w_i)
        w = average(sent, [len(c) for c in CLIENTS])
    assert flat(state.server.w) == pytest.approx(w, abs=1e-6)
    for i in range(2):
        assert flat(client(state, i).v) == pytest.approx(v[i], abs=1e-6)
        assert client(state, i).alpha.item() == pytest.approx(alpha[i], abs=1e-6)
    own, fed = state.store.gather(np.arange(2)), Federation(run.world, 3, np.arange(2), Ledger())
    judged = fed.up(run.algorithm.personal(state.server, own, fed), "model")
    assert [flat(m) for m in judged] == [pytest.approx(mixed(alpha[i], v[i], w), abs=1e-6) for i in range(2)]
    assert not adaptive or alpha[0] != start != alpha[1]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_a_share_of_the_own_the_personal_model_is_the_shared_one(executor, participation, tmp_path):
    run, state = ran(APFL(alpha=0.0, adaptive=False), tmp_path, world(executor, (Normed(),)))
    run.settings = Settings(participation=participation)
    run.advance(state)
    own, fed = state.store.gather(np.arange(4)), Federation(run.world, 2, np.arange(4), Ledger())
    for model in fed.up(run.algorithm.personal(state.server, own, fed), "model"):
        assert_equal(model, run.algorithm.shared(state.server))
    metrics = evaluate(run.algorithm, state.server, state.store, run.world, 2, np.arange(4)).metrics
    for which in ("mean", "std", "worst"):
        assert metrics[f"acc/personal/{which}"] == metrics[f"acc/shared/{which}"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_without_a_share_of_the_shared_the_own_models_are_those_of_local_training(executor, monkeypatch, tmp_path):
    """Given local training's first models; v̄ = v, and the gradient for v is 1 · ∇f(v)."""
    monkeypatch.setattr(APFL, "init_client", lambda self, net, _, seed: Client(net.init(seed), torch.tensor(1.0)))
    here = world(executor, (Normed(),))
    (_, mixture), (_, alone) = (ran(a, tmp_path, here, 2) for a in (APFL(alpha=1.0, adaptive=False), Local()))
    assert_equal(everyone(mixture)["normed"].v, everyone(alone)["normed"].w)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_shared_model_is_fedavgs_whatever_the_shares(executor, tmp_path):
    """Sent is P · P · P, as FedAvg does; neither v_i nor α_i leaves home."""
    here = world(executor, (Normed(),), local=optim.Local(epochs=2, batch_size=4, momentum=0.9))
    (_, apfl), (_, fedavg) = (ran(algorithm, tmp_path, here, 2) for algorithm in (APFL(), FedAvg()))
    assert_equal(apfl.server, fedavg.server)
    assert apfl.ledger.rows == fedavg.ledger.rows


@pytest.mark.parametrize(("lr", "limit"), [(1e6, (0.0, 1.0)), (0.0, (0.5,))])
def test_a_share_stays_between_nothing_and_all(lr, limit, tmp_path):
    run, state = ran(APFL(), tmp_path, world("serial"))
    own = state.store.gather(np.arange(4))
    fed = Federation(run.world, 2, np.arange(4), Ledger())
    w, (v, alpha) = fed.down(state.server.w, "model"), own
    moved = fed.train(LeafByLeaf(partial(run.algorithm.adapt, lr)), alpha, v, w, steps=1)
    assert set(fed.up(moved, "alpha").stack().tolist()) <= set(limit)


def test_the_shares_can_be_watched(tmp_path):
    run, state = ran(APFL(alpha=0.25), tmp_path, world(), 2)
    seen = evaluate(run.algorithm, state.server, state.store, run.world, 2, np.arange(4)).metrics
    alphas = everyone(state)["hidden"].alpha
    assert seen["alpha/mean"] == pytest.approx(alphas.mean().item())
    assert seen["alpha/min"] == alphas.min() < seen["alpha/mean"] < seen["alpha/max"] == alphas.max()


def test_shares_beyond_the_limits_are_refused():
    setting = Setting(4, 4, 1, optim.Local())
    assert [APFL(alpha=a).problems(setting) for a in (0.0, 0.5, 1.0)] == [[], [], []]
    for alpha in (-0.1, 1.1, float("nan")):
        (problem,) = APFL(alpha=alpha).problems(setting)
        assert "must lie between 0 (the shared model) and 1" in problem
