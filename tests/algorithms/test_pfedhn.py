"""pFedHN: oracle, ledger, embeddings of absent clients, what is generated for whom."""

import math

import numpy as np
import pytest
import torch
from mixtures import after, trained
from oracle import differences, federation
from tiny import Normed, assert_close, assert_equal, engine, world

from fedkd.algorithms.base import Setting
from fedkd.algorithms.pfedhn import PFedHN
from fedkd.core.optim import Local
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.federation import cohort
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

# φ in the oracle's order: an MLP 1-2-2, then a map to the two weights of the model and one to its two biases
SHAPES = {f"{name}/{part}": size for name, of_weight in
          {"mlp.0": 2, "mlp.1": 4, "head.weight": 4, "head.bias": 4}.items()
          for part, size in (("weight", of_weight), ("bias", 2))}  # fmt: skip
SMALL = {"hidden_size": 2, "hidden_layers": 1, "alpha": 0.3, "alpha_v": 0.2, "weight_decay": 0.05}


def linear(x, w, b):
    return [sum(w[len(x) * k + j] * v for j, v in enumerate(x)) + b[k] for k in range(2)]


def h(phi, v):
    """The model of embedding v: a linear layer, ReLU, another; from its output the weights and the biases."""
    parts, at = {}, 0
    for name, size in SHAPES.items():
        parts[name], at = phi[at : at + size], at + size
    layers = [
        (parts[f"{name}/weight"], parts[f"{name}/bias"]) for name in ("mlp.0", "mlp.1", "head.weight", "head.bias")
    ]
    x = linear([max(u, 0) for u in linear([v], *layers[0])], *layers[1])
    return [*linear(x, *layers[2]), *linear(x, *layers[3])]


def dot(a, b):
    return sum(u * v for u, v in zip(a, b, strict=True))


def listed(phi):
    assert {name: leaf.numel() for name, leaf in phi.items()} == SHAPES
    return [v for name in SHAPES for v in phi[name].flatten().tolist()]


def begun(run, seed_round=1, clients=2):
    """The server when the first round begins."""
    fed = Federation(run.world, seed_round, np.arange(clients), Ledger())
    return run.algorithm.begun(run.start().server, fed)


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("max_norm", [math.inf, 0.05])
def test_three_rounds_step_along_the_pull_back_of_the_updates(max_norm, participation, executor, tmp_path):
    run = federation(PFedHN(max_norm=max_norm, **SMALL), tmp_path, executor=executor, participation=participation)
    state, server = run.start(), begun(run)
    phi, v = listed(server.phi), server.v.flatten().tolist()  # d = 1 + 2/4 = 1
    m_phi, m_v = [0.0] * len(phi), [0.0, 0.0]
    lengths = []
    for t in (1, 2, 3):
        run.advance(state)
        who = cohort.draw(np.array([3, 2]), participation, "uniform", 0, t).tolist()
        thetas = {i: h(phi, v[i]) for i in who}
        deltas = {i: [a - b for a, b in zip(thetas[i], trained(thetas[i], i), strict=True)] for i in who}
        g_phi = differences(lambda p, d=deltas: sum(dot(h(p, v[i]), d[i]) for i in d), phi)
        g_v = {i: differences(lambda u, i=i, d=deltas, p=phi: dot(h(p, u[0]), d[i]), [v[i]])[0] for i in who}
        lengths.append(math.sqrt(dot(g_phi, g_phi) + sum(g * g for g in g_v.values())))
        part = min(1, max_norm / lengths[-1])
        m_phi = [0.9 * m + part * g + 0.05 * p for m, g, p in zip(m_phi, g_phi, phi, strict=True)]
        phi_next = [p - 0.3 * m for p, m in zip(phi, m_phi, strict=True)]
        for i in who:
            m_v[i] = 0.9 * m_v[i] + part * g_v[i] + 0.05 * v[i]
            v[i] -= 0.2 * m_v[i]
        phi = phi_next
    assert min(lengths) > 0.05  # the bound does bind where there is one
    assert listed(state.server.phi) == pytest.approx(phi, abs=2e-6)
    assert state.server.v.flatten().tolist() == pytest.approx(v, abs=2e-6)
    fed = Federation(run.world, 3, np.arange(2), Ledger())
    judged = run.algorithm.personal(state.server, state.store.gather(fed.cohort), fed)
    for i, model in enumerate(fed.up(judged, "model")):  # also the absent
        found = [*model.weights["head.weight"].flatten().tolist(), *model.weights["head.bias"].tolist()]
        assert found == pytest.approx(h(phi, v[i]), abs=5e-6)


def test_everyone_s_own_weights_come_down_and_updates_go_up(tmp_path):
    """P = 103; the hypernetwork itself stays at the server."""
    rows = after(1, "pfedhn", tmp_path).ledger.rows
    assert [(r.way, r.what, r.params, r.broadcast_params) for r in rows] == [
        ("down", "model", 4 * 103, 4 * 103),
        ("up", "update", 4 * 103, 4 * 103),
    ]


def test_running_statistics_are_one_mean_for_all(tmp_path):
    """6 numbers: each client receives them, but they are one message."""
    state = after(2, PFedHN(), tmp_path, architectures=(Normed(),))
    down = next(r for r in state.ledger.rows if r.what == "model statistics")
    assert (down.params, down.bytes, down.broadcast_bytes) == (0, 4 * 6 * 4, 6 * 4)
    run = engine(PFedHN(), tmp_path, architectures=(Normed(),))
    fed = Federation(run.world, 2, np.arange(4), Ledger())
    models = fed.up(run.algorithm.personal(state.server, state.store.gather(fed.cohort), fed), "model")
    for model in models:
        assert_equal(model.stats, state.server.stats)
    assert not torch.equal(models[0].stats["features.1.running_mean"], torch.zeros(3))
    assert not torch.equal(models[0].weights["head.weight"], models[1].weights["head.weight"])


def test_the_first_hypernetwork_is_a_function_of_the_seed(tmp_path):
    """Of the cohort it is not; N = 4 gives d = 1 + 4/4 = 2."""
    first, again, other = (
        begun(engine(PFedHN(), tmp_path, world=world(seed=seed), executor=None), clients=clients)
        for seed, clients in ((0, 4), (0, 1), (1, 4))
    )
    assert first.v.shape == (4, 2)
    assert {k: tuple(p.shape) for k, p in first.phi.items() if k.startswith("mlp.3")} == {
        "mlp.3/weight": (100, 100),
        "mlp.3/bias": (100,),
    }
    assert tuple(first.phi["head.weight/weight"].shape) == (15, 100)
    assert_equal(first, again)
    assert not torch.equal(first.v, other.v)


def test_absent_clients_embeddings_rest(tmp_path):
    run = engine("pfedhn", tmp_path, settings=Settings(participation=0.25, checkpoint_every=None))
    state, before = run.start(), begun(run, clients=4).v
    for _ in range(2):
        run.advance(state)
        assert int((state.server.v != before).any(1).sum()) == 1
        before = state.server.v


def test_without_momentum_it_runs_as_well(tmp_path):
    plain, slow = (after(2, PFedHN(momentum=m), tmp_path).server for m in (0.0, 1e-9))
    assert_close((plain.v, plain.phi), (slow.v, slow.phi), 1e-6)
    assert plain.momentum == ((), ())


def test_its_users_see_how_alike_the_embeddings_are(tmp_path):
    run = engine("pfedhn", tmp_path)
    state = run.start()
    run.advance(state)
    view = evaluate(run.algorithm, state.server, state.store, run.world, 1, np.arange(4)).views["embeddings"]
    assert view.values.diagonal() == pytest.approx([1] * 4)


def test_what_cannot_work_is_said():
    setting = Setting(4, 4, 1, Local())
    assert PFedHN().problems(setting) == PFedHN(hidden_layers=0, alpha_v=1.0).problems(setting) == []
    assert len(PFedHN(embedding_size=0, hidden_size=0, hidden_layers=-1, alpha=0).problems(setting)) == 4
