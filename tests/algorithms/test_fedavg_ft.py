"""FedAvg with fine-tuning: oracle of what is judged, no trace, ledger, reduction."""

import copy

import numpy as np
import pytest
from oracle import CLIENTS, average, data, federation, flat, gradient, sgd
from tiny import assert_equal, engine, everyone

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.fedavg_ft import FedAvgFT
from fedkd.core.optim import Local
from fedkd.evaluate import evaluate
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize(("finetune_epochs", "steps"), [(None, 2), (3, 3), (0, 0)])
def test_the_personal_model_is_the_shared_one_trained_on(executor, finetune_epochs, steps, tmp_path):
    """Two epochs of one full batch a round, so that null is two steps."""
    run = federation(FedAvgFT(finetune_epochs), tmp_path, executor=executor)
    state = run.start()
    w = flat(state.server.w)
    for _ in range(2):
        run.advance(state)
        w = average([train(w, k, 2) for k in range(2)], [len(c) for c in CLIENTS])
    assert flat(run.algorithm.shared(state.server)) == pytest.approx(w, abs=1e-6)
    fed = Federation(run.world, 2, np.arange(2), Ledger())
    judged = run.algorithm.personal(state.server, state.store.gather(np.arange(2)), fed)._stacks["one_input"]
    for k in range(2):
        tuned = flat({name: leaf[k] for name, leaf in judged.weights.items()})
        assert tuned == pytest.approx(train(w, k, steps), abs=2e-6)


def train(w, k, steps):
    for _ in range(steps):
        w = sgd(w, gradient(w, data(k)))
    return w


def test_fine_tuning_leaves_no_trace(tmp_path):
    """Rounds with evaluations between them are FedAvg's rounds without."""
    states = []
    for method in (FedAvgFT(), FedAvg()):
        run = engine(method, tmp_path)
        state = run.start()
        for number in (1, 2):
            run.advance(state)
            if method.name == "fedavg_ft":
                before = copy.deepcopy((state.server, everyone(state)))
                evaluate(method, state.server, state.store, run.world, number, np.arange(4))
                assert_equal((state.server, everyone(state)), before)
        states.append(state)
    assert_equal(states[0].server, states[1].server)
    assert states[0].ledger.rows == states[1].ledger.rows  # P = 103 each way, nothing for the fine-tuning
    assert states[0].ledger.totals["comm/total/params"] == 2 * 2 * 4 * 103


def test_without_epochs_it_is_judged_as_fedavg(tmp_path):
    verdicts = []
    for method in (FedAvgFT(finetune_epochs=0), FedAvg()):
        run = engine(method, tmp_path)
        state = run.start()
        run.advance(state)
        verdicts.append(evaluate(method, state.server, state.store, run.world, 1, np.arange(4)).metrics)
    assert verdicts[0] == verdicts[1]


def test_a_negative_number_of_epochs_is_refused():
    whole = Setting(4, 4, 1, Local())
    assert FedAvgFT(0).problems(whole) == FedAvgFT().problems(whole) == []
    (problem,) = FedAvgFT(-1).problems(whole)
    assert "at least 0" in problem
