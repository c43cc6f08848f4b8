"""IFCA: gradient averaging (option I); the rest, which is HypCluster's, stands in test_hypcluster."""

import pytest
import torch
from oracle import CLIENTS, LR, data, federation, flat, gradient
from tiny import assert_close, assert_equal, engine, leaves
from torch import tensor

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.hypcluster import IFCA, Server
from fedkd.core.optim import Local
from fedkd.core.tree import Params

OPTION_I = IFCA(clusters=2, averaging="gradient")
# one model for client 0, whose label rises with x, one for client 1, whose label falls, and one that suits neither
FITS_0, FITS_1, FITS_NONE = [-1.0, 1.0, 0.6, -0.6], [1.0, -1.0, -0.5, 0.5], [0.0, 0.0, 9.0, -9.0]


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize(("start", "chosen"), [((FITS_0, FITS_1), (0, 1)), ((FITS_NONE, FITS_1), (1, 1))])
def test_gradients_are_averaged_over_the_cohort(executor, start, chosen, tmp_path):
    """θ_j ← θ_j − γ Σ_i n_i/n s_ij g_i: 3/5 of client 0's gradient, 2/5 of client 1's, wherever they go.

    In these rounds nobody changes over. One step a round, whatever `local.epochs` says (2).
    """
    run = federation(OPTION_I, tmp_path, executor=executor)
    state, models = run.start(), tensor(start)
    state.server = Server(Params({"head.weight": models[:, :2, None], "head.bias": models[:, 2:]}, {}))
    theta = [list(w) for w in start]
    for _ in range(3):
        run.advance(state)
        slopes = [gradient(theta[j], data(i)) for i, j in enumerate(chosen)]
        for i, j in enumerate(chosen):
            theta[j] = [w - LR * len(CLIENTS[i]) / 5 * g for w, g in zip(theta[j], slopes[i], strict=True)]
    for j in range(2):
        found = flat({name: w[j] for name, w in state.server.models.weights.items()})
        assert found == pytest.approx(theta[j], abs=2e-6)


def test_one_model_with_gradient_averaging_is_fedavg_of_one_step(tmp_path):
    states = []
    for method in (IFCA(clusters=1, averaging="gradient"), FedAvg()):
        run = engine(method, tmp_path, local=Local(steps=1, batch_size=4, lr=0.1))
        states.append(run.start())
        run.advance(states[-1])
    assert_equal([leaf.squeeze(0) for leaf in leaves(states[0].server)], leaves(states[1].server))


def test_a_gradient_is_as_large_as_a_model(tmp_path):
    """P = 103, c = 2: U = P, D = B = 2P."""
    run = engine(OPTION_I, tmp_path)
    state = run.start()
    run.advance(state)
    up, down = (sum(r.params for r in state.ledger.rows if r.way == way) for way in ("up", "down"))
    assert (up, down) == (4 * 103, 4 * 2 * 103)
    assert state.ledger.totals["comm/broadcast/params"] == 4 * 103 + 2 * 103


def test_the_executors_agree_on_gradient_averaging(tmp_path):
    states = []
    for executor in ("serial", "vmapped"):
        run = engine(OPTION_I, tmp_path, executor=executor)
        states.append(run.start())
        run.advance(states[-1])
    assert_close(states[0].server, states[1].server)
    assert torch.isfinite(states[0].server.models.weights["head.weight"]).all()


def test_what_cannot_work_is_refused():
    momentum = Setting(4, 4, 1, Local(momentum=0.9))
    assert IFCA().problems(momentum) == []
    (problem,) = OPTION_I.problems(momentum)
    assert "local.momentum=0" in problem
    (problem,) = IFCA(averaging="models").problems(momentum)
    assert "Did you mean model?" in problem
