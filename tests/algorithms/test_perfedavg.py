"""Per-FedAvg: oracle of both variants, the adaptation and its data, ledger, reduction."""

import numpy as np
import pytest
import torch
from oracle import average, client, data, federation, flat, gradient, scores, sgd, softmax
from tiny import EvenFedAvg, assert_close, assert_equal, engine, training_alone, world

from fedkd.algorithms.base import Setting
from fedkd.algorithms.perfedavg import PerFedAvg
from fedkd.core.optim import Local
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

EXECUTORS = ("serial", "vmapped")
ALPHA = 0.4


def hessian_times(w, v, samples):
    """∇²f(w) v exactly: with a = v's scores on x, the scores' Hessian diag(p) − p pᵀ gives u = p ∘ (a − p·a)."""
    out = [0.0] * 4
    for x, _ in samples:
        p, a = softmax(scores(w, x)), scores(v, x)
        mean = sum(q * b for q, b in zip(p, a, strict=True))
        for j in range(2):
            u = p[j] * (a[j] - mean) / len(samples)
            out[j] += u * x
            out[2 + j] += u
    return out


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_three_rounds_are_those_of_algorithm_1(executor, variant, tmp_path):
    """Whole-shard batches, so that D = D' = D''. The difference of gradients is within 2e-5 of the exact Hessian."""
    run = federation(PerFedAvg(alpha=ALPHA, variant=variant, delta=0.01), tmp_path, executor=executor)
    state = run.start()
    w = flat(state.server.w)
    for _ in range(3):
        run.advance(state)
        sent = []
        for i in range(2):
            w_i = w
            for _ in range(2):  # τ = 2
                v = gradient(sgd(w_i, gradient(w_i, data(i)), ALPHA), data(i))
                if variant == "hf":
                    v = sgd(v, hessian_times(w_i, v, data(i)), ALPHA)  # (I − α ∇²f) v
                w_i = sgd(w_i, v)
            sent.append(w_i)
        w = average(sent, [1, 1])  # each client counts the same
    assert flat(state.server.w) == pytest.approx(w, abs=2e-5 if variant == "hf" else 2e-6)
    assert client(state, 0) == ()


def personal(run, state, clients):
    fed = Federation(run.world, 1, np.arange(clients), Ledger())
    (models,) = run.algorithm.personal(state.server, state.store.gather(fed.cohort), fed)._stacks.values()
    return models


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_personal_model_is_one_step_of_alpha_from_the_shared_one(executor, tmp_path):
    run = federation(PerFedAvg(alpha=ALPHA), tmp_path, executor=executor)
    state = run.start()
    run.advance(state)
    w, models = flat(state.server.w), personal(run, state, 2)
    assert flat(run.algorithm.shared(state.server)) == w
    for i in range(2):
        adapted = flat({name: leaf[i] for name, leaf in models.weights.items()})
        assert adapted == pytest.approx(sgd(w, gradient(w, data(i)), ALPHA), abs=2e-6)


def test_the_adaptation_sees_no_test_sample(tmp_path):
    """Some public code adapts on test data, which is a leak."""
    runs = [engine(PerFedAvg(), tmp_path, world=w, executor=None) for w in (world(), training_alone(world()))]
    assert_equal(*(personal(run, run.start(), 4) for run in runs))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_without_adaptation_it_is_fedavg_with_even_weights(executor, variant, tmp_path):
    """α = 0: w̃ = w and the Hessian falls out, so that D' alone counts, whose batches are FedAvg's."""
    states = []
    for method in (PerFedAvg(alpha=0.0, variant=variant), EvenFedAvg()):
        run = engine(method, tmp_path, executor=executor)
        states.append(run.start())
        run.advance(states[-1])
        run.advance(states[-1])
    assert_close(states[0].server.w, states[1].server.w, tolerance=1e-6)


def test_the_batches_of_a_step_are_drawn_apart(tmp_path):
    seen = []

    def look(net, count, *batches):
        seen.append([batch.row.tolist() for batch in batches])
        return count + 1

    run = engine(PerFedAvg(), tmp_path, executor="serial")
    fed = Federation(run.world, 1, np.array([3]), Ledger())  # 13 samples, in batches of 4, twice
    counted = fed.train(look, fed.each(lambda net: torch.zeros(())), draws=3)
    assert fed.up(counted, "steps").stack().tolist() == [8.0]
    for epoch in (seen[:4], seen[4:]):
        passes = [[row for step in epoch for row in step[i]] for i in range(3)]
        assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
        assert passes[0] != passes[1] != passes[2] != passes[0]


def test_one_model_goes_each_way(tmp_path):
    run = engine("perfedavg", tmp_path)
    state = run.start()
    run.advance(state)
    crossed = [(r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows]
    assert crossed == [("down", "model", 412, 103), ("up", "model", 412, 412)]  # P = 103, four clients


def test_what_cannot_work_is_refused():
    whole = Setting(4, 4, 1, Local())
    assert PerFedAvg().problems(whole) == []
    assert len(PerFedAvg(alpha=-1.0, variant="second", delta=0.0).problems(whole)) == 3
    (problem,) = PerFedAvg().problems(Setting(4, 4, 1, Local(optimizer="adam")))
    assert "local.optimizer=sgd" in problem
