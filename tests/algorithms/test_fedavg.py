"""FedAvg: oracle, ledger, reductions of the methods that become it."""

import pytest
from oracle import CLIENTS, average, client, data, federation, flat, gradient, sgd
from tiny import Normed, assert_reduced, engine

from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.fedper import FedPer
from fedkd.algorithms.fedprox import FedProx

EXECUTORS = ("serial", "vmapped")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_rounds_are_those_of_the_pseudo_code(executor, tmp_path):
    run = federation(FedAvg(), tmp_path, executor=executor)
    state = run.start()
    w = flat(state.server.w)
    for _ in range(2):
        run.advance(state)
        locals_ = []
        for k in range(2):
            w_k = list(w)
            for _ in range(2):  # E = 2 epochs of one full batch
                w_k = sgd(w_k, gradient(w_k, data(k)))
            locals_.append(w_k)
        w = average(locals_, [len(c) for c in CLIENTS])
    assert flat(state.server.w) == pytest.approx(w, abs=1e-6)
    assert client(state, 0) == ()


def test_one_model_goes_down_and_one_comes_up(tmp_path):
    """hidden: 16·5 + 5 + 5·3 + 3 = 103 parameters, float32."""
    run = engine("fedavg", tmp_path)
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.clients, r.params, r.bytes, r.broadcast_params) for r in state.ledger.rows] == [
        ("down", "model", 4, 4 * 103, 4 * 4 * 103, 103),
        ("up", "model", 4, 4 * 103, 4 * 4 * 103, 4 * 103),
    ]


def test_running_statistics_cross_in_bytes_but_not_in_params(tmp_path):
    """normed: conv 3·9 + 3, norm 3 + 3, head 12·3 + 3 = 75 parameters; 3 means and 3 variances."""
    run = engine("fedavg", tmp_path, architectures=(Normed(),))
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.params, r.bytes) for r in state.ledger.rows] == [
        ("down", "model", 4 * 75, 4 * 4 * 75),
        ("down", "model statistics", 0, 4 * 4 * 6),
        ("up", "model", 4 * 75, 4 * 4 * 75),
        ("up", "model statistics", 0, 4 * 4 * 6),
    ]
    assert state.ledger.totals["comm/total/params"] == 8 * 75
    assert state.ledger.totals["comm/total/bytes"] == 8 * 4 * 81


@pytest.mark.parametrize("other", [FedProx(mu=0.0), FedPer(personal_layers=0)], ids=lambda a: a.name)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_methods_without_their_extra_are_fedavg(other, executor, tmp_path):
    runs = [engine(a, tmp_path, executor=executor) for a in (FedAvg(), other)]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
        run.advance(state)
    assert_reduced(states[0].server, states[1].server, executor)
