"""MOON: oracle, ledger, reduction to FedAvg, and who has a previous model."""

import math

import numpy as np
import oracle
import pytest
import torch
from oracle import Embedding, average, classify, client, data, differences, embed, federation, weights
from tiny import SHAPE, Deep, Hidden, Normed, assert_close, assert_reduced, engine, everyone, world

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.moon import Moon
from fedkd.core import fit, tree
from fedkd.core.losses import Batch
from fedkd.core.optim import Local
from fedkd.engine import Settings
from fedkd.models.net import MODELS, Net

SLOW = pytest.mark.slow
EXECUTORS = ("serial", "vmapped")


def cosine(a, b):
    return (a[0] * b[0] + a[1] * b[1]) / (math.hypot(*a) * math.hypot(*b))


def loss(w, samples, w_t, previous, mu, tau):
    value = 0.0
    for x, y in samples:
        z = embed(w, x)
        value -= math.log(classify(w, z)[y])
        if previous is not None:
            near, far = (math.exp(cosine(z, embed(v, x)) / tau) for v in (w_t, previous))
            value -= mu * math.log(near / (near + far))
    return value / len(samples)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_three_rounds_are_those_of_algorithm_1(executor, participation, tmp_path, monkeypatch):
    """With half of the two clients a round, a client may meet a contrast, a first time, or neither."""
    monkeypatch.setattr(oracle, "_OneInput", Embedding)
    run = federation(Moon(mu=2.0, temperature=0.3), tmp_path, executor=executor, participation=participation)
    state = run.start()
    w, previous = weights(state.server.w), [None, None]
    for _ in range(3):
        before = [weights(client(state, i).w) for i in range(2)]
        run.advance(state)
        took_part = [i for i in range(2) if weights(client(state, i).w) != before[i]]
        assert len(took_part) == 2 * participation
        for i in took_part:
            w_i = list(w)
            for _ in range(2):
                g = differences(lambda v, i=i, w=w: loss(v, data(i), w, previous[i], 2.0, 0.3), w_i)
                w_i = [a - oracle.LR * b for a, b in zip(w_i, g, strict=True)]
            previous[i] = w_i
            assert weights(client(state, i).w) == pytest.approx(w_i, abs=1e-5)
        w = average([previous[i] for i in took_part], [(3, 2)[i] for i in took_part])
        assert weights(state.server.w) == pytest.approx(w, abs=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("net", [Hidden(), Hidden(projection=3), Normed()])
def test_without_the_contrast_it_is_fedavg(net, executor, tmp_path):
    settings = Settings(participation=0.5)
    runs = [
        engine(a, tmp_path, settings=settings, world=world(executor, (net,), rounds=3), executor=None)
        for a in (Moon(mu=0), FedAvg())
    ]
    states = [run.start() for run in runs]
    for _ in range(3):
        for run, state in zip(runs, states, strict=True):
            run.advance(state)
        assert_reduced(states[0].server.w, states[1].server.w, executor)
        assert states[0].ledger.rows == states[1].ledger.rows  # P up, P down, one message


def test_the_first_round_has_no_contrast_and_the_second_does(tmp_path):
    after = []  # [method][round]
    for method in (Moon(mu=5), FedAvg()):
        run = engine(method, tmp_path, rounds=2)
        state = run.start()
        after.append([])
        for _ in range(2):
            run.advance(state)
            after[-1].append(weights(state.server.w))
    assert after[0][0] == after[1][0]
    assert after[0][1] != pytest.approx(after[1][1])


def test_a_client_keeps_the_model_it_sent_and_whether_it_has_one(tmp_path):
    run = engine(Moon(), tmp_path, settings=Settings(participation=0.5))
    state = run.start()
    start = everyone(state)["hidden"]
    assert not start.trained.any()
    run.advance(state)
    now = everyone(state)["hidden"]
    moved = (now.w.weights["head.weight"] != start.w.weights["head.weight"]).flatten(1).any(1)
    assert moved.sum() == 2
    assert torch.equal(now.trained, moved)
    sizes = torch.tensor([5.0, 11.0, 7.0, 13.0]) * moved
    mean = torch.einsum("i,i...->...", sizes / sizes.sum(), now.w.weights["head.weight"])
    torch.testing.assert_close(mean, state.server.w.weights["head.weight"])


class Showing:
    """A net whose models are their features."""

    def features(self, model, x):
        return model


def test_the_contrast_pulls_towards_the_global_model_and_away_from_the_previous_one():
    """z = z_glob ⟂ z_prev: similarities 1 and 0, so log(1 + e^{−1/τ}); the other way round log(1 + e^{1/τ})."""
    a, b = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    method, batch = Moon(temperature=0.5), Batch(*[torch.zeros(1)] * 4)

    def contrast(z, z_glob, z_prev):
        return method.contrast(z, method.away(Showing(), batch, z_glob, z_prev)).item()

    assert contrast(a, a, b) == pytest.approx(math.log(1 + math.exp(-2)))
    assert contrast(a, b, a) == pytest.approx(math.log(1 + math.exp(2)))
    assert contrast(a, b, b) == pytest.approx(math.log(2))


def test_features_of_zero_have_a_finite_gradient():
    """A dead ReLU's features have no direction."""
    net = Net(Hidden(init="zeros"), SHAPE, 3)
    w, other = net.init(0), Net(Hidden(), SHAPE, 3).init(1)
    batch = Batch(torch.ones(2, *SHAPE), torch.tensor([0, 1]), torch.full((2,), 0.5), torch.arange(2))
    away = Moon().away(net, batch, w, other)
    slope, _ = fit.gradient(lambda v: Moon().loss(net, tree.Params(v, {}), batch, away, torch.tensor(True)), w.weights)
    assert all(bool(g.isfinite().all()) for g in slope.values())


def test_with_a_projection_its_outputs_are_contrasted(tmp_path):
    """And so the projection gets a gradient beyond the labels': here the labels' is turned off."""
    net = Net(Deep(projection=4), SHAPE, 3)
    w, w_t, previous = (net.init(seed) for seed in (3, 1, 2))  # of seed 0 the projection's hidden layer is dead
    x = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.arange(6) % 3, torch.full((6,), 1 / 6), torch.arange(6))

    away = Moon().away(net, batch, w_t, previous)
    assert away.shape == (6, 4)

    def slope(mu):
        loss = lambda v: Moon(mu=mu).loss(net, tree.Params(v, {}), batch, away, torch.tensor(True))  # noqa: E731
        return fit.gradient(loss, w.weights)[0]

    contrast = tree.sub(slope(1.0), slope(0.0))
    assert contrast["projection.2.weight"].abs().max() > 1e-4
    assert contrast["head.weight"].abs().max() < 1e-6


@pytest.mark.parametrize("net", [Deep(projection=4), Normed(projection=4)])
def test_executors_agree_with_a_projection(net, tmp_path):
    states = []
    for executor in EXECUTORS:
        run = engine(Moon(mu=5), tmp_path, world=world(executor, (net,)), executor=None)
        state = run.start()
        run.advance(state)
        run.advance(state)
        states.append((state.server, everyone(state)))
    assert_close(*states)


@pytest.mark.parametrize("name", ["cnn", pytest.param("resnet18", marks=SLOW), pytest.param("shufflenet", marks=SLOW)])
def test_it_trains_the_networks_of_the_tables(name, tmp_path):
    net, local = MODELS[name](projection=8), Local(steps=1, batch_size=4, lr=0.001)
    states = []
    for mu in (0, 1):
        run = engine(Moon(mu=mu), tmp_path, world=world("serial", (net,), local), executor=None)
        states.append(run.start())
        run.advance(states[-1])
        run.advance(states[-1])
    plain, contrasted = (state.server.w.weights["projection.2.weight"] for state in states)
    assert contrasted.isfinite().all()
    assert not torch.equal(plain, contrasted)


def test_impossible_hyperparameters_are_refused():
    setting = Setting(4, 4, 1, Local())
    assert Moon().problems(setting) == []
    assert len(Moon(mu=-1, temperature=0).problems(setting)) == 2
    assert len(Moon(mu=np.nan).problems(setting)) == 1
