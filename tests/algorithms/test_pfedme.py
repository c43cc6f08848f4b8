"""pFedMe: oracle, which model is judged, ledger; that it is CGPFL with one cluster stands in test_cgpfl."""

import numpy as np
import pytest
from oracle import LR, average, client, data, federation, flat, gradient, sgd
from tiny import Normed, assert_close, assert_equal, engine, everyone

from fedkd.algorithms.base import Setting
from fedkd.algorithms.pfedme import PFedMe
from fedkd.core.optim import Local
from fedkd.engine import Settings
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

EXECUTORS = ("serial", "vmapped")
LAMBDA, R, K = 0.8, 3, 2


def pseudo_code(w, rounds, eta, beta):
    """Algorithm 1 for the oracle's two clients: w, θ of both, and the w_i that they sent last."""
    theta = [w, w]
    for _ in range(rounds):
        sent = []
        for i in range(2):
            w_i = w
            for _ in range(R):
                for _ in range(K):
                    pull = [LAMBDA * (a - b) for a, b in zip(theta[i], w_i, strict=True)]
                    theta[i] = sgd(theta[i], [g + p for g, p in zip(gradient(theta[i], data(i)), pull, strict=True)])
                w_i = [b - eta * LAMBDA * (b - a) for a, b in zip(theta[i], w_i, strict=True)]
            sent.append(w_i)
        mean = average(sent, [1, 1])  # each client counts the same, whatever its samples
        w = [(1 - beta) * a + beta * b for a, b in zip(w, mean, strict=True)]
    return w, theta, sent


def small(**how):
    return PFedMe(lambda_=LAMBDA, R=R, K=K, **how)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("eta", "beta"), [(0.2, 1.0), (None, 0.7), (0.2, 2.0)])
def test_three_rounds_are_those_of_algorithm_1(executor, eta, beta, tmp_path):
    run = federation(small(eta=eta, beta=beta), tmp_path, executor=executor)
    state = run.start()
    w, theta, _ = pseudo_code(flat(state.server.w), 3, LR if eta is None else eta, beta)
    for _ in range(3):
        run.advance(state)
    assert flat(state.server.w) == pytest.approx(w, abs=2e-6)
    for i in range(2):
        assert flat(client(state, i).theta) == pytest.approx(theta[i], abs=2e-6)


def test_the_personal_model_is_theta_and_not_what_the_client_sends(tmp_path):
    """A public implementation reports w_i, to which its personal model has become another name."""
    run = federation(small(eta=0.2), tmp_path)
    state = run.start()
    w, theta, sent = pseudo_code(flat(state.server.w), 1, 0.2, 1.0)
    run.advance(state)
    fed = Federation(run.world, 1, np.arange(2), Ledger())
    judged = run.algorithm.personal(state.server, state.store.gather(np.arange(2)), fed)
    for i in range(2):
        model = flat({name: leaf[i] for name, leaf in judged._stacks["one_input"].weights.items()})
        assert model == pytest.approx(theta[i], abs=2e-6)
        assert max(abs(a - b) for a, b in zip(model, sent[i], strict=True)) > 0.05
    assert flat(run.algorithm.shared(state.server)) == pytest.approx(w, abs=2e-6)


def test_one_model_goes_each_way(tmp_path):
    """P = 103, N = 4, m = 2: U = D = B = P."""
    run = engine(small(), tmp_path, settings=Settings(participation=0.5))
    state = run.start()
    run.advance(state)
    (down, up) = state.ledger.rows
    assert (down.way, down.what, down.params, down.broadcast_params) == ("down", "model", 2 * 103, 103)
    assert (up.way, up.what, up.params) == ("up", "model", 2 * 103)


def test_the_shared_model_is_judged_with_the_mean_of_the_running_statistics(tmp_path):
    """Whatever β is: a variance that is led beyond the mean may be negative."""
    run = engine(small(beta=3.0), tmp_path, architectures=(Normed(),))
    state = run.start()
    run.advance(state)
    stats = everyone(state)["normed"].theta.stats
    assert_close({name: leaf.mean(0) for name, leaf in stats.items()}, state.server.w.stats, tolerance=1e-6)
    assert [r.what for r in state.ledger.rows] == ["model", "model", "model statistics"]


def test_without_a_pull_the_shared_model_stays_and_the_clients_train_alone(tmp_path):
    """λ = 0: ω ← ω − 0; θ takes R·K plain steps, from w^0 on."""
    run = federation(PFedMe(lambda_=0.0, R=R, K=K), tmp_path)
    state = run.start()
    first = state.server
    run.advance(state)
    assert_equal(state.server, first)
    for i in range(2):
        theta = flat(first.w)
        for _ in range(R * K):
            theta = sgd(theta, gradient(theta, data(i)))
        assert flat(client(state, i).theta) == pytest.approx(theta, abs=2e-6)


def test_personal_models_survive_the_rounds_their_clients_sit_out(tmp_path):
    run = engine(small(), tmp_path, settings=Settings(participation=0.5), rounds=4)
    state, moved = run.start(), []
    for _ in range(4):
        before = everyone(state)["hidden"].theta.weights["head.weight"]
        run.advance(state)
        after = everyone(state)["hidden"].theta.weights["head.weight"]
        moved.append([not a.equal(b) for a, b in zip(before, after, strict=True)])
    assert [sum(row) for row in moved] == [2] * 4
    assert len(set(map(tuple, moved))) > 1


def test_what_cannot_work_is_refused():
    whole = Setting(4, 4, 1, Local())
    assert PFedMe().problems(whole) == []
    assert len(PFedMe(R=0, K=0, beta=0.0, eta=-1.0, lambda_=-1.0).problems(whole)) == 5
    (problem,) = PFedMe(lambda_=20.0).problems(whole)  # 20 · 0.1 = 2
    assert "local.lr=0.01" in problem  # 0.2 / 20
    (problem,) = PFedMe().problems(Setting(4, 4, 1, Local(momentum=0.9)))
    assert "local.momentum=0" in problem
