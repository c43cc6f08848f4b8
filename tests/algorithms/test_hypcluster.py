"""HypCluster, and what IFCA has in common with it: oracle, reduction to FedAvg, ledger, clusters."""

import math

import numpy as np
import pytest
import torch
from groups import grouped, ran
from oracle import CLIENTS, average, data, federation, flat, gradient, scores, sgd, softmax
from tiny import assert_equal, engine, leaves, training_alone, world

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.hypcluster import IFCA, HypCluster, Server
from fedkd.core.optim import Local
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

EXECUTORS = ("serial", "vmapped")
METHODS = (HypCluster, IFCA)
# class 1 where 2x > 1.2, which client 0's labels nearly say; where 2x < 1, client 1's; and one that suits neither
RISING, FALLING, WRONG = [-1.0, 1.0, 0.6, -0.6], [1.0, -1.0, -0.5, 0.5], [0.0, 0.0, 9.0, -9.0]


def placed(state, models):
    """The state with these models at the server."""
    stacked = torch.tensor(models)
    weights = {"head.weight": stacked[:, :2, None].clone(), "head.bias": stacked[:, 2:].clone()}
    state.server = Server(Params(weights, {}))
    return state


def opened(server):
    return [flat({name: w[j] for name, w in server.models.weights.items()}) for j in range(len(server.models.weights))]


def loss(w, samples):
    return -sum(math.log(softmax(scores(w, x))[y]) for x, y in samples) / len(samples)


def choices(models):
    """argmin_j F_i(θ_j) of the two clients."""
    return [min(range(len(models)), key=lambda j: loss(models[j], data(i))) for i in range(2)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("start", "chosen"), [((RISING, FALLING), [0, 1]), ((FALLING, RISING), [1, 0]), ((WRONG, RISING), [1, 1])]
)
def test_three_rounds_train_the_model_of_least_loss(executor, method, start, chosen, tmp_path):
    run = federation(method(clusters=2), tmp_path, executor=executor)
    state, models = placed(run.start(), start), [list(w) for w in start]
    assert choices(models) == chosen
    for _ in range(3):
        run.advance(state)
        now, sent = choices(models), []
        for i in range(2):
            w = models[now[i]]
            for _ in range(2):
                w = sgd(w, gradient(w, data(i)))
            sent.append(w)
        for j in set(now):  # a model that nobody chose stays
            members = [i for i in range(2) if now[i] == j]
            models[j] = average([sent[i] for i in members], [len(CLIENTS[i]) for i in members])
    for found, expected in zip(opened(state.server), models, strict=True):
        assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("method", METHODS)
def test_one_model_is_fedavg(method, executor, tmp_path):
    """To the bit: same start, same batches, same weights."""
    states = []
    for algorithm in (method(clusters=1), FedAvg()):
        run = engine(algorithm, tmp_path, executor=executor)
        states.append(run.start())
        run.advance(states[-1])
        run.advance(states[-1])
    one, two = ([leaf.squeeze(0) for leaf in leaves(states[0].server)], leaves(states[1].server))
    assert_equal(one, two)
    assert states[0].ledger.totals["comm/total/params"] == states[1].ledger.totals["comm/total/params"]


def test_all_models_go_down_and_one_comes_up_with_its_number(tmp_path):
    """P = 103, c = 3. The number is no parameter, but 8 bytes."""
    run = engine(HypCluster(clusters=3), tmp_path)
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.params, r.broadcast_params, r.bytes) for r in state.ledger.rows] == [
        ("down", "models", 4 * 3 * 103, 3 * 103, 4 * 4 * 3 * 103),
        ("up", "model", 4 * 103, 4 * 103, 4 * 4 * 103),
        ("up", "model number", 0, 0, 4 * 8),
    ]


def test_the_models_start_at_different_points_of_which_the_first_is_fedavgs(tmp_path):
    weights = engine(HypCluster(clusters=3), tmp_path).start().server.models.weights["head.weight"]
    first = engine(FedAvg(), tmp_path).start().server.w.weights["head.weight"]
    assert weights[0].equal(first)
    assert not any(weights[a].equal(weights[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def judged(run, state, clients):
    """The personal models, opened, and what is seen beside them."""
    fed = Federation(run.world, 1, np.arange(clients), Ledger())
    own = state.store.gather(fed.cohort)
    (models,) = run.algorithm.personal(state.server, own, fed)._stacks.values()
    return models, run.algorithm.observe(state.server, own, fed)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_client_is_judged_by_the_model_that_fits_it_best_now(executor, tmp_path):
    run = federation(HypCluster(clusters=2), tmp_path, executor=executor)
    state = placed(run.start(), [FALLING, RISING])
    models, seen = judged(run, state, 2)
    found = [flat({name: leaf[i] for name, leaf in models.weights.items()}) for i in range(2)]
    assert found == [pytest.approx(RISING), pytest.approx(FALLING)]
    assert seen["clusters"].values.tolist() == [1, 0]
    assert seen["clusters/used"] == 2
    assert run.algorithm.shared(state.server) is None


def test_the_choice_sees_training_samples_only(tmp_path):
    runs = [engine(HypCluster(), tmp_path, world=w, executor=None) for w in (world(), training_alone(world()))]
    (one, a), (two, b) = (judged(run, run.start(), 4) for run in runs)
    assert_equal(one, two)
    assert a["clusters"].values.tolist() == b["clusters"].values.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_clients_of_one_kind_find_each_other(method, tmp_path):
    """12 clients in turn of two kinds, which name the classes differently.

    Of seeds 0-7 four part them; in the others one model suits everybody best from the start, and keeps everybody. With
    four models for the two kinds all of the eight part them.
    """
    run, state = ran(method(clusters=2), tmp_path, grouped(2, seed=2), rounds=3)
    _, seen = judged(run, state, 12)
    chosen = seen["clusters"].values.tolist()
    assert chosen == [chosen[0], chosen[1]] * 6
    assert seen["clusters/used"] == 2


def test_clusters_are_found_again_where_no_evaluation_has_left_them(tmp_path):
    """As with more clients than are judged together."""
    run = federation(HypCluster(clusters=2), tmp_path)
    state = placed(run.start(), [FALLING, RISING])
    fed = Federation(run.world, 1, np.arange(2), Ledger())
    seen = run.algorithm.observe(state.server, state.store.gather(fed.cohort), fed)
    assert seen["clusters"].values.tolist() == [1, 0]


@pytest.mark.parametrize("method", METHODS)
def test_no_model_is_refused(method):
    whole = Setting(4, 4, 1, Local(momentum=0.9))
    assert method().problems(whole) == []
    (problem,) = method(clusters=0).problems(whole)
    assert "at least 1" in problem
