"""SCAFFOLD: oracle, ledger, invariant, reduction."""

import pytest
import torch
from oracle import LR, client, data, federation, flat, gradient, sgd
from tiny import EvenFedAvg, assert_close, engine, everyone

from fedkd.algorithms.base import Setting
from fedkd.algorithms.scaffold import Scaffold
from fedkd.core.optim import Local
from fedkd.engine import Settings

EXECUTORS = ("serial", "vmapped")


def plus(*vectors):
    return [sum(values) for values in zip(*vectors, strict=True)]


def times(factor, vector):
    return [factor * v for v in vector]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_three_rounds_are_those_of_algorithm_1(executor, server_lr, tmp_path):
    run = federation(Scaffold(server_lr=server_lr), tmp_path, executor=executor)
    state = run.start()
    x, c, c_i = flat(state.server.x), [0.0] * 4, [[0.0] * 4, [0.0] * 4]
    steps = 2  # K: two epochs of one full batch
    for _ in range(3):
        run.advance(state)
        moved, varied = [], []
        for i in range(2):
            y = list(x)
            for _ in range(steps):
                y = sgd(y, plus(gradient(y, data(i)), times(-1, c_i[i]), c))  # l. 10
            c_plus = plus(c_i[i], times(-1, c), times(1 / (steps * LR), plus(x, times(-1, y))))  # l. 12 (ii)
            moved.append(plus(y, times(-1, x)))
            varied.append(plus(c_plus, times(-1, c_i[i])))
            c_i[i] = c_plus
        x = plus(x, times(server_lr / 2, plus(*moved)))  # l. 16, 17
        c = plus(c, times(1 / 2, plus(*varied)))  # |S|/N = 1
    assert flat(state.server.x) == pytest.approx(x, abs=1e-6)
    assert flat(state.server.c) == pytest.approx(c, abs=1e-6)
    for i in range(2):
        assert flat(client(state, i).c) == pytest.approx(c_i[i], abs=1e-6)


def test_model_and_control_cross_both_ways(tmp_path):
    run = engine("scaffold", tmp_path)
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        ("down", "model", 4 * 103, 103),
        ("down", "control", 4 * 103, 103),
        ("up", "model and control", 4 * 206, 4 * 206),
    ]


def test_the_servers_control_is_the_mean_of_the_clients_also_with_partial_cohorts(tmp_path):
    run = engine("scaffold", tmp_path, settings=Settings(participation=0.5))
    state = run.start()
    for _ in range(3):
        run.advance(state)
        controls = everyone(state)["hidden"].c
        assert_close({k: v.mean(0) for k, v in controls.items()}, state.server.c)
    assert any(bool(v.abs().sum() > 0) for v in state.server.c.values())


def test_the_first_round_with_zero_controls_is_fedavg_with_even_weights(tmp_path):
    """c = c_i = 0 in round 1, and c is frozen at 0 then."""
    runs = [engine(a, tmp_path) for a in (Scaffold(), EvenFedAvg())]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
    assert_close(states[0].server.x, states[1].server.w, tolerance=1e-6)


def test_frozen_controls_are_fedavg_in_every_round(tmp_path, monkeypatch):
    def frozen(self, lr, x, y, c_i, c, steps):
        own, delta = finish(self, lr, x, y, c_i, c, steps)
        zeros = {k: torch.zeros_like(v) for k, v in c_i.items()}
        return own._replace(c=zeros), delta._replace(control=zeros)

    finish = Scaffold.finish
    monkeypatch.setattr(Scaffold, "finish", frozen)
    runs = [engine(a, tmp_path) for a in (Scaffold(), EvenFedAvg())]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
        run.advance(state)
    assert_close(states[0].server.x, states[1].server.w, tolerance=1e-6)


def test_anything_but_plain_sgd_is_refused():
    for local in (Local(optimizer="adam"), Local(momentum=0.9), Local(weight_decay=0.1)):
        (problem,) = Scaffold().problems(Setting(4, 4, 1, local))
        assert "local.momentum=0" in problem
    assert Scaffold().problems(Setting(4, 4, 1, Local())) == []
