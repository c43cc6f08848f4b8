"""Local training: oracle, ledger."""

import pytest
from oracle import client, data, federation, flat, gradient, sgd
from tiny import engine

from fedkd.algorithms.local import Local
from fedkd.engine import Settings


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
def test_each_client_descends_its_own_loss(executor, tmp_path):
    run = federation(Local(), tmp_path, executor=executor)
    state = run.start()
    w = [flat(client(state, k).w) for k in range(2)]
    for _ in range(2):
        run.advance(state)
        for k in range(2):
            for _ in range(2):
                w[k] = sgd(w[k], gradient(w[k], data(k)))
    for k in range(2):
        assert flat(client(state, k).w) == pytest.approx(w[k], abs=1e-6)


def test_nothing_crosses_and_everyone_trains_whatever_the_participation(tmp_path):
    run = engine("local", tmp_path, settings=Settings(participation=0.25))
    state = run.start()
    before = [client_weights(state, k) for k in range(4)]
    run.advance(state)
    assert state.ledger.rows == []
    assert all(not before[k].equal(client_weights(state, k)) for k in range(4))


def client_weights(state, k):
    import numpy as np

    return state.store.gather(np.array([k]))._stacks["hidden"].w.weights["head.weight"].clone()
