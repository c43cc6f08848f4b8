"""FedProx: oracle and ledger; that μ=0 is FedAvg stands in test_fedavg."""

import pytest
from oracle import CLIENTS, average, data, federation, flat, gradient, sgd
from tiny import engine

from fedkd.algorithms.fedprox import FedProx

MU = 0.7


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
def test_two_rounds_are_those_of_the_pseudo_code(executor, tmp_path):
    run = federation(FedProx(mu=MU), tmp_path, executor=executor)
    state = run.start()
    w = flat(state.server.w)
    for _ in range(2):
        run.advance(state)
        locals_ = []
        for k in range(2):
            w_k = list(w)
            for _ in range(2):
                pull = [MU * (a - b) for a, b in zip(w_k, w, strict=True)]  # ∇ μ/2 ‖w_k − w^t‖²
                w_k = sgd(w_k, [g + p for g, p in zip(gradient(w_k, data(k)), pull, strict=True)])
            locals_.append(w_k)
        w = average(locals_, [len(c) for c in CLIENTS])
    assert flat(state.server.w) == pytest.approx(w, abs=1e-6)


def test_it_sends_what_fedavg_sends(tmp_path):
    rows = []
    for name in ("fedavg", "fedprox"):
        run = engine(name, tmp_path)
        state = run.start()
        run.advance(state)
        rows.append(state.ledger.rows)
    assert rows[0] == rows[1]


def test_a_large_pull_keeps_the_model_where_it_was(tmp_path):
    """With lr·μ = 1 a step lands on w^t minus lr times the gradient there, whatever came before."""
    run = federation(FedProx(mu=2.0), tmp_path, epochs=1)  # lr = 0.5
    longer = federation(FedProx(mu=2.0), tmp_path, epochs=2)
    state, far = run.start(), longer.start()
    w = flat(state.server.w)
    longer.advance(far)
    after_one = [sgd(w, gradient(w, data(k))) for k in range(2)]
    after_two = [sgd(w, gradient(w_k, data(k))) for k, w_k in enumerate(after_one)]
    assert flat(far.server.w) == pytest.approx(average(after_two, [3, 2]), abs=1e-6)
