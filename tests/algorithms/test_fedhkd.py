"""FedHKD: oracle, ledger, reductions, privacy."""

import logging
import math
from dataclasses import dataclass

import numpy as np
import oracle
import pytest
import torch
from oracle import average, client, data, differences, federation, softmax
from tiny import Hidden, assert_equal, assert_reduced, engine, everyone, leaves, without_backward, world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.fedhkd import FedHKD
from fedkd.algorithms.steps import supervised
from fedkd.core import fit, privacy, tree
from fedkd.core.losses import Batch
from fedkd.core.optim import Local
from fedkd.core.privacy import spent_epsilon
from fedkd.core.seeds import numpy_rng
from fedkd.core.tree import Rows, mean_rows
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.models.net import Architecture, Net
from fedkd.models.split import Split

EXECUTORS = ("serial", "vmapped")


@dataclass(frozen=True)
class TwoFeatures(Architecture):
    """h_l = u_l x + v_l, z_k = Σ_l a_kl h_l + b_k: [u_0, u_1, v_0, v_1, a_00, a_01, a_10, a_11, b_0, b_1]."""

    name = "one_input"

    def module(self, shape, classes):
        return Split(nn.Sequential(nn.Flatten(), nn.Linear(1, 2)), nn.Linear(2, 2))


def features(w, x):
    return [w[0] * x + w[2], w[1] * x + w[3]]


def classifier(w, h):
    return [w[4] * h[0] + w[5] * h[1] + w[8], w[6] * h[0] + w[7] * h[1] + w[9]]


def norm(a, b):
    return math.sqrt(sum((p - q) ** 2 for p, q in zip(a, b, strict=True)))


def soft(z, temperature):
    return softmax([v / temperature for v in z])


def loss(w, samples, known, hp):
    """Eq. 11; `known` maps a class to its (H, Q)."""
    value = 0.0
    for x, y in samples:
        h = features(w, x)
        value -= math.log(softmax(classifier(w, h))[y]) / len(samples)
        if y in known:
            value += hp.gamma * norm(h, known[y][0]) / len(samples)
    for h, q in known.values():
        value += hp.lambda_ / 2 * norm(soft(classifier(w, h), hp.temperature), q)
    return value


def own_knowledge(w, samples, chi, hp):
    """Eq. 4, 7, 8 and the threshold ν: class -> (N, h, q)."""
    found = {}
    for j in (0, 1):
        mine = [features(w, x) for x, y in samples if y == j]
        if not mine or len(mine) / len(samples) < hp.nu:
            continue
        h = [sum(min(max(v[e], -hp.zeta), hp.zeta) for v in mine) / len(mine) for e in (0, 1)]
        h = [v + 2 * hp.zeta / len(mine) * hp.sigma * chi[j][e] for e, v in enumerate(h)]
        found[j] = (len(mine), h, average([soft(classifier(w, v), hp.temperature) for v in mine], [1] * len(mine)))
    return found


def flat(model):
    names = ("features.1.weight", "features.1.bias", "head.weight", "head.bias")
    return [v for name in names for v in model.weights[name].flatten().tolist()]


# classes 0 and 1 are 1/3 and 2/3 of client 0's data, 1/2 and 1/2 of client 1's: at ν = 0.4 client 0 keeps class 0 to
# itself, at 0.6 only client 0's class 1 is shared
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("lambda_", "gamma"), [(0.7, 0.3), (0.7, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize("nu", [0.0, 0.4, 0.6])
def test_three_rounds_are_those_of_algorithm_1(executor, lambda_, gamma, nu, tmp_path, monkeypatch):
    monkeypatch.setattr(oracle, "_OneInput", TwoFeatures)
    hp = FedHKD(lambda_=lambda_, gamma=gamma, nu=nu, sigma=0.2, zeta=0.4)
    run = federation(hp, tmp_path, executor=executor)
    state = run.start()
    w, known, clipped = flat(state.server.w), {}, 0
    for number in (1, 2, 3):
        run.advance(state)
        models, shared = [], []
        for i in range(2):
            w_i = list(w)
            for _ in range(2):  # two epochs of one full batch
                g = differences(lambda v, i=i, known=known: loss(v, data(i), known, hp), w_i)
                w_i = [a - oracle.LR * b for a, b in zip(w_i, g, strict=True)]
            chi = numpy_rng(0, "noise", "representations", number, i).standard_normal((2, 2), np.float32).tolist()
            models.append(w_i)
            shared.append(own_knowledge(w_i, data(i), chi, hp))
            clipped += sum(abs(v) > hp.zeta for x, _ in data(i) for v in features(w_i, x))
        w = average(models, [3, 2])
        known = {}
        for j in (0, 1):  # Eq. 9
            if some := [k[j] for k in shared if j in k]:
                counts = [n for n, _, _ in some]
                known[j] = average([h for _, h, _ in some], counts), average([q for _, _, q in some], counts)
        assert flat(state.server.w) == pytest.approx(w, abs=5e-6)
        assert state.server.knowledge.present.tolist() == [j in known for j in (0, 1)]
        for j, (h, q) in known.items():
            assert state.server.knowledge.values[j].tolist() == pytest.approx([*h, *q], abs=5e-6)
        for i in range(2):
            assert flat(client(state, i).w) == pytest.approx(models[i], abs=5e-6)
    assert len(known) == (1 if nu == 0.6 else 2)
    assert clipped > 0


def test_the_model_and_the_shared_classes_cross(tmp_path):
    """P = 103, d = 5, L = 3; by their class sizes the clients share 2, 3, 3, 3 classes at ν = 0.25.

    Client 0 holds 2, 2, 1 samples of 5; the others at least 2/7 of each class.
    """
    run = engine("fedhkd", tmp_path)
    state = run.start()
    run.advance(state)
    run.advance(state)
    up = [("up", "hyper-knowledge", 11 * 8, 11 * 8), ("up", "model", 4 * 103, 4 * 103)]
    assert [(r.round, r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        (1, "down", "model", 4 * 103, 103),
        *((1, *row) for row in up),
        (2, "down", "model", 4 * 103, 103),
        (2, "down", "hyper-knowledge", 4 * 3 * 8, 3 * 8),
        *((2, *row) for row in up),
    ]


def test_a_class_nobody_shares_does_not_cross(tmp_path):
    """At ν = 0.39 client 0 shares classes 0 and 1 (2/5 each), client 2 class 1 (3/7), the others (5/13) none."""
    run = engine(FedHKD(nu=0.39), tmp_path)
    state = run.start()
    run.advance(state)
    run.advance(state)
    tables = [(r.way, r.params, r.broadcast_params) for r in state.ledger.rows if r.what == "hyper-knowledge"]
    assert tables == [("up", 24, 24), ("down", 4 * 16, 16), ("up", 24, 24)]
    assert state.server.knowledge.present.tolist() == [True, True, False]
    assert bool((state.server.knowledge.values[2] == 0).all())


def test_a_class_at_the_threshold_is_shared_and_an_empty_one_never():
    net = Net(Hidden(), (1, 4, 4), 3)
    for nu, shares in ((0.1, [True, True, False]), (0.11, [False, True, False]), (0.0, [True, True, False])):
        sums = (torch.ones(3, 8), torch.tensor([3.0, 27.0, 0.0]))
        rows, _ = FedHKD(nu=nu).hyper_knowledge(net, sums, torch.ones(3, 5), torch.zeros(3, dtype=torch.int64))
        assert rows.present.tolist() == shares


def test_noise_is_on_the_representation_alone_and_shrinks_with_the_class():
    """(2ζ/N)σ χ: at N = 256, ζ = 3, σ = 7 the variance is 0.0269."""
    net = Net(Hidden(), (1, 4, 4), 3)
    sums = (torch.zeros(3, 8), torch.tensor([256.0, 128.0, 64.0]))
    rows, _ = FedHKD(nu=0).hyper_knowledge(net, sums, torch.ones(3, 5), torch.zeros(3, dtype=torch.int64))
    deviation = rows.values[:, :5]
    assert deviation[0].square().tolist() == pytest.approx([0.0269] * 5, abs=5e-5)
    assert (deviation / deviation[:1]).mean(1).tolist() == pytest.approx([1, 2, 4])
    assert bool((rows.values[:, 5:] == 0).all())


def test_aggregation_weighs_by_class_sizes_of_those_who_share():
    """Clients 0 and 1 share class 0 with 1 and 3 samples: 0.25·4 + 0.75·8 = 7; client 1 class 1; nobody class 2."""
    values = torch.tensor([[[4.0], [0.0], [0.0]], [[8.0], [5.0], [0.0]]])
    present = torch.tensor([[True, False, False], [True, True, False]])
    made = mean_rows(Rows(values, present), torch.tensor([[1.0, 9.0, 7.0], [3.0, 2.0, 0.0]]))
    assert made.values.flatten().tolist() == [7, 5, 0]
    assert made.present.tolist() == [True, True, False]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", [FedHKD(lambda_=0, gamma=0), FedHKD(nu=2)])
def test_without_its_terms_or_without_sharers_it_is_fedavg(method, participation, executor, tmp_path):
    settings = Settings(participation=participation)
    runs = [engine(a, tmp_path, settings=settings, executor=executor, rounds=3) for a in (method, FedAvg())]
    states = [run.start() for run in runs]
    for _ in range(3):
        for run, state in zip(runs, states, strict=True):
            run.advance(state)
        assert_reduced(states[0].server.w, states[1].server.w, executor)


def test_the_first_round_is_fedavgs_and_the_second_is_not(tmp_path):
    runs = [engine(a, tmp_path) for a in (FedHKD(), FedAvg())]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
    assert_equal(states[0].server.w, states[1].server.w)
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
    assert not torch.equal(leaves(states[0].server.w)[0], leaves(states[1].server.w)[0])


def test_without_gamma_the_extractor_follows_the_labels_alone():
    """FedHKD*: the gradient of the features' weights is that of the cross-entropy."""
    net = Net(Hidden(), (1, 4, 4), 3)
    w, batch, knowledge = net.init(0), some_batch(net), Rows(torch.randn(3, 8), torch.ones(3, dtype=torch.bool))
    star, full, plain = (
        fit.gradient(lambda v, f=f: f(tree.Params(v, {})), w.weights)[0]
        for f in (
            lambda v: FedHKD(gamma=0).loss(net, v, batch, knowledge),
            lambda v: FedHKD().loss(net, v, batch, knowledge),
            lambda v: supervised(net, v, batch),
        )
    )
    assert torch.equal(star["features.1.weight"], plain["features.1.weight"])
    assert not torch.equal(star["head.weight"], plain["head.weight"])
    assert not torch.equal(full["features.1.weight"], plain["features.1.weight"])


def some_batch(net):
    x = torch.linspace(-1, 1, 64).view(4, 1, 4, 4).sin()
    return Batch(x, torch.tensor([0, 1, 2, 0]), torch.full((4,), 0.25), torch.arange(4))


@pytest.mark.parametrize("stacked", [False, True])
def test_distances_of_zero_have_a_finite_gradient(stacked):
    """With weights of 0, R(x) = H = (0, 0) and Q(G(H)) = Q = (½, ½) to the bit: only cross-entropy pulls."""
    net, method = Net(TwoFeatures(init="zeros"), (1, 1, 1), 2), FedHKD(lambda_=1, gamma=1)
    w, batch = net.init(0), Batch(torch.ones(1, 1, 1, 1), torch.tensor([1]), torch.ones(1), torch.tensor([0]))
    knowledge = Rows(torch.tensor([[0, 0, 0.5, 0.5]] * 2), torch.ones(2, dtype=torch.bool))

    def slope_of(f, *given):
        if not stacked:
            return fit.gradient(lambda v: f(net, tree.Params(v, {}), batch, *given), w.weights)[0]
        one = tree.expand((w.weights, batch, *given), 2)
        lifted = torch.vmap(lambda v, *rest: f(net, tree.Params(v, {}), *rest))
        return tree.take(fit.gradient(lambda v: lifted(v, *one[1:]), one[0])[0], 1)

    ours, plain = slope_of(method.loss, knowledge), slope_of(supervised)
    assert any(bool(v.any()) for v in plain.values())
    for name, value in plain.items():
        assert torch.equal(ours[name], value)


def test_absent_clients_keep_their_models_and_release_nothing(tmp_path):
    run = engine(FedHKD(), tmp_path, settings=Settings(participation=0.5))
    state = run.start()
    start = everyone(state)["hidden"]
    run.advance(state)
    now = everyone(state)["hidden"]
    took_part = now.releases.sum(1) > 0
    assert int(took_part.sum()) == 2
    for name, before in start.w.weights.items():
        moved = (now.w.weights[name] != before).flatten(1).any(1)
        assert moved.tolist() == took_part.tolist()


def test_clients_are_judged_by_their_own_models_and_the_server_by_the_average(tmp_path):
    run = engine("fedhkd", tmp_path)
    state = run.start()
    run.advance(state)
    models = run.algorithm.personal(state.server, state.store.gather(np.arange(4)), None)._stacks["hidden"]
    sizes = torch.tensor([5.0, 11.0, 7.0, 13.0])
    for name, stack in models.weights.items():
        assert not torch.equal(stack[0], stack[1])
        torch.testing.assert_close(
            torch.einsum("i,i...->...", sizes / sizes.sum(), stack), state.server.w.weights[name]
        )
    assert run.algorithm.shared(state.server) is state.server.w


def observed(run, state):
    return evaluate(run.algorithm, state.server, state.store, run.world, state.round, np.arange(4))


def test_privacy_spent_and_pairs_shared_are_shown(tmp_path):
    """Two releases of each shared class; all d = 5 elements together move √5 times as far as one."""
    run = engine("fedhkd", tmp_path)
    state = run.start()
    run.advance(state)
    run.advance(state)
    verdict = observed(run, state)
    twice = spent_epsilon(7, 0.01, 2)
    assert verdict.metrics["privacy/epsilon"] == twice
    assert verdict.metrics["privacy/epsilon_vector"] == pytest.approx(spent_epsilon(7 / math.sqrt(5), 0.01, 2))
    assert verdict.metrics["hyper_knowledge/pairs"] == 11
    view = verdict.views["epsilon_spent"]
    assert (view.kind, view.rows, view.columns) == ("matrix", "client", "class")
    assert view.values.tolist() == [[twice, twice, 0], *([[twice] * 3] * 3)]


def test_without_noise_epsilon_is_infinite_and_without_releases_zero(tmp_path):
    for method, epsilon in ((FedHKD(sigma=0), math.inf), (FedHKD(nu=2), 0.0)):
        run = engine(method, tmp_path)
        state = run.start()
        run.advance(state)
        assert observed(run, state).metrics["privacy/epsilon"] == epsilon


def test_sharing_nothing_is_warned_of_once(tmp_path, caplog):
    run = engine(FedHKD(nu=0.9), tmp_path)
    state = run.start()
    with caplog.at_level(logging.WARNING, "fedkd"):
        run.advance(state)
        run.advance(state)
    (record,) = caplog.records
    assert "nu=0.9" in record.message
    assert "FedAvg" in record.message


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rounds_with_hyper_knowledge_stay_on_the_gpu(executor, tmp_path, monkeypatch):
    """The contract's test of the first round, for the second, where there is hyper-knowledge."""
    without_backward(monkeypatch)
    with FakeTensorMode():
        run = engine("fedhkd", tmp_path, world=world(executor, device="cuda"), executor=None)
        state = run.start()
        run.advance(state)
        run.advance(state)
        values = leaves((state.server, everyone(state)))
    assert len(values) > 10
    assert all(leaf.device.type == "cuda" for leaf in values)


def test_impossible_hyperparameters_are_refused(monkeypatch):
    setting = Setting(4, 4, 1, Local())
    assert FedHKD().problems(setting) == []
    wrong = FedHKD(lambda_=-1, gamma=-1, temperature=0, nu=-1, sigma=-1, zeta=math.inf, delta=0, accountant="none")
    assert len(wrong.problems(setting)) == 8
    assert len(FedHKD(delta=1).problems(setting)) == 1
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    (problem,) = FedHKD(accountant="dp_accounting").problems(setting)
    assert "fedkd[privacy]" in problem
