"""PerFed-CKT: oracle, ledger, reductions, clusters."""

import numpy as np
import pytest
import torch
from oracle import LR, PUBLIC, average, client, data, federation, flat, gradient, scores, softmax
from tiny import Hidden, Linear, assert_equal, engine, everyone

from fedkd.algorithms.base import Setting
from fedkd.algorithms.local import Local as LocalTraining
from fedkd.algorithms.perfed_ckt import PerFedCKT, nearest
from fedkd.core.optim import Local
from fedkd.engine import Settings

EXECUTORS = ("serial", "vmapped")
X = [x / 255 for x in PUBLIC]


def predictions(w):
    return [softmax(scores(w, x)) for x in X]


def knowledge_gradient(w, target, lambda_):
    """Of λ · mean over public x of ‖s̄(x) − s(w, x)‖², through ∂s_j/∂z_k = s_j (δ_jk − s_k)."""
    g = [0.0] * 4
    for x, t in zip(X, target, strict=True):
        s = softmax(scores(w, x))
        for k in range(2):
            slope = sum(2 * (s[j] - t[j]) * s[j] * ((j == k) - s[k]) for j in range(2)) * lambda_ / len(X)
            g[k] += slope * x
            g[2 + k] += slope
    return g


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("clusters", [1, 2])
def test_three_rounds_are_those_of_algorithm_1(executor, clusters, tmp_path):
    """With c=1 everyone learns from the mean, with c=2 of two clients each from its own last predictions."""
    run = federation(PerFedCKT(clusters=clusters, lambda_=3.0, public_batch_size=3), tmp_path, executor=executor)
    state = run.start()
    w = [flat(client(state, k).w) for k in range(2)]
    for _ in range(3):
        run.advance(state)
        s = [predictions(w_k) for w_k in w]
        mean = [average([s[0][i], s[1][i]], [1, 1]) for i in range(len(X))]
        for k in range(2):
            target = mean if clusters == 1 else s[k]
            for _ in range(2):  # two epochs of the whole shard: τ = 2, b' = 3 of three public samples
                g = [a + b for a, b in zip(gradient(w[k], data(k)), knowledge_gradient(w[k], target, 3.0), strict=True)]
                w[k] = [a - LR * b for a, b in zip(w[k], g, strict=True)]
    for k in range(2):
        assert flat(client(state, k).w) == pytest.approx(w[k], abs=2e-6)


def test_predictions_go_up_and_centroids_come_down(tmp_path):
    """Q = 6, L = 3, c = 2, m = 4: U = 18, D = B = 36; the first centroids cost one upload more."""
    run = engine("perfed_ckt", tmp_path, architectures=(Hidden(), Linear()))
    state = run.start()
    run.advance(state)
    run.advance(state)
    first, second = ([r for r in state.ledger.rows if r.round == t] for t in (1, 2))
    assert [(r.way, r.what, r.params, r.broadcast_params) for r in second] == [
        ("down", "centroids", 4 * 36, 36),
        ("up", "predictions", 4 * 18, 4 * 18),
    ]
    assert [(r.way, r.params) for r in first] == [("up", 72), ("down", 144), ("up", 72)]


def test_without_the_knowledge_term_it_is_local_training(tmp_path):
    how = {"architectures": (Hidden(), Linear())}
    runs = [engine(a, tmp_path, **how) for a in (PerFedCKT(lambda_=0.0), LocalTraining())]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
        run.advance(state)
    mine, other = everyone(states[0]), everyone(states[1])
    for arch in mine:
        assert_equal(mine[arch].w, other[arch].w)


def test_the_nearest_centroid_is_chosen():
    centroids = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.6, 0.4]]])
    target, chosen = nearest(None, centroids, torch.tensor([[0.7, 0.3]]))
    assert chosen.item() == 2
    assert torch.equal(target, centroids[2])


def test_clients_that_agree_share_a_cluster(tmp_path):
    """Four clients, two of which hold one half of the classes and two the other, end in two clusters."""
    run = engine(PerFedCKT(clusters=2, lambda_=0.1), tmp_path, local=Local(epochs=60, batch_size=None, lr=0.3))
    population = run.world.population
    labels = population.images.labels
    groups = {0: 0, 1: 2, 2: 0, 3: 2}  # the class each client sees
    for k, label in groups.items():
        labels[population.train[k]] = label
    state = run.start()
    run.advance(state)
    run.advance(state)
    chosen = everyone(state)["hidden"].cluster.tolist()
    assert chosen[0] == chosen[2] != chosen[1] == chosen[3]


def test_more_clusters_than_clients_of_a_round_are_refused():
    (problem,) = PerFedCKT(clusters=5).problems(Setting(20, 4, 1, Local()))
    assert "algorithm.clusters=5" in problem
    assert "4" in problem
    assert PerFedCKT(clusters=4).problems(Setting(20, 4, 1, Local())) == []


def test_public_samples_that_change_from_round_to_round_are_refused():
    (problem,) = PerFedCKT().problems(Setting(20, 4, 1, Local(), public_per_round=100))
    assert "public.per_round=100" in problem


def test_absent_clients_keep_their_model_and_show_no_cluster(tmp_path):
    run = engine("perfed_ckt", tmp_path, settings=Settings(participation=0.5))
    state = run.start()
    run.advance(state)
    chosen = everyone(state)["hidden"].cluster.numpy()
    assert sorted(np.sign(chosen + 1).tolist()) == [0, 0, 1, 1]
