"""FedGen: oracle, ledger, reduction, the generator's labels and weights."""

import math
from dataclasses import dataclass

import numpy as np
import oracle
import pytest
import torch
from oracle import LR, Adam, average, data, differences, federation, softmax
from tiny import Hidden, Linear, Normed, assert_close, assert_reduced, engine, leaves, without_backward, world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.fedgen import POOL, Draw, FedGen, Taught, code, generator, sameness
from fedkd.algorithms.steps import supervised
from fedkd.core import fit, tree
from fedkd.core.losses import Batch
from fedkd.core.optim import Local
from fedkd.core.seeds import derive, numpy_rng
from fedkd.core.tree import Params
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger
from fedkd.models.net import Architecture, Net
from fedkd.models.split import Split

EXECUTORS = ("serial", "vmapped")
NOISE, HIDDEN = 2, 3


@dataclass(frozen=True)
class TwoFeatures(Architecture):
    """h_l = u_l x, z_k = Σ_l a_kl h_l: [u_0, u_1, a_00, a_01, a_10, a_11]."""

    name = "one_input"

    def module(self, shape, classes):
        return Split(nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False)), nn.Linear(2, 2, bias=False))


def head(a, h):
    return [a[0] * h[0] + a[1] * h[1], a[2] * h[0] + a[3] * h[1]]


def predict(theta, x):
    return head(theta[2:], [theta[0] * x, theta[1] * x])


def rows(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


def layers(w):
    """The generator's [first, scale, shift, second, bias]: (ε, one-hot) of 4 numbers -> 3 -> 2 features."""
    ends = np.cumsum([HIDDEN * (NOISE + 2), HIDDEN, HIDDEN, 2 * HIDDEN, 2]).tolist()
    return [w[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def generate(w, codes, statistics=None):
    """Features, and the mean and variance (over n) of what is normalised; with given statistics those serve."""
    first, scale, shift, second, bias = layers(w)
    inner = [[sum(f * c for f, c in zip(row, one, strict=True)) for row in rows(first, NOISE + 2)] for one in codes]
    if statistics is None:
        means = [sum(column) / len(codes) for column in zip(*inner, strict=True)]
        spread = [
            sum((v - m) ** 2 for v in column) / len(codes)
            for column, m in zip(zip(*inner, strict=True), means, strict=True)
        ]
        statistics = means, spread
    made = []
    for one in inner:
        normal = [(v - m) / math.sqrt(s + 1e-5) for v, m, s in zip(one, *statistics, strict=True)]
        lit = [max(a * v + b, 0.0) for a, v, b in zip(scale, normal, shift, strict=True)]
        made.append([sum(f * v for f, v in zip(row, lit, strict=True)) + b
                     for row, b in zip(rows(second, HIDDEN), bias, strict=True)])  # fmt: skip
    return made, statistics


def coded(epsilon, y):
    return [*epsilon, float(y == 0), float(y == 1)]


def entropy(z, y):
    return -math.log(softmax(z)[y])


def objective(w, drawn, heads, counts, eta):
    """Eq. 4 with the heads weighted by label counts, and the price of sameness."""
    made, _ = generate(w, [coded(e, y) for y, e in drawn])
    value = 0.0
    for (y, _), z in zip(drawn, made, strict=True):
        ensemble = average([head(a, z) for a in heads], [c[y] for c in counts])
        value += entropy(ensemble, y) / len(drawn)
    apart = 0.0
    for (_, e), z in zip(drawn, made, strict=True):
        for (_, f), v in zip(drawn, made, strict=True):
            near = sum((a - b) ** 2 for a, b in zip(e, f, strict=True)) / NOISE
            apart += near * sum(abs(a - b) for a, b in zip(z, v, strict=True)) / 2
    return value + eta * math.exp(-apart / len(drawn) ** 2)


def local_loss(theta, frozen, samples, w, statistics, pairs, alpha, beta):
    """Eq. 5 and the pull of β towards predictions of generated features, which `frozen` makes a constant."""
    value = 0.0
    for (x, y), (y_hat, epsilon) in zip(samples, pairs, strict=True):
        (z_hat, z_y), _ = generate(w, [coded(epsilon, y_hat), coded(epsilon, y)], statistics)
        target = softmax(head(frozen[2:], z_y))
        found = softmax(predict(theta, x))
        value += entropy(predict(theta, x), y) + alpha * entropy(head(theta[2:], z_hat), y_hat)
        value += beta * sum(p * math.log(p / q) for p, q in zip(target, found, strict=True))
    return value / len(samples)


def flat(model, *names):
    return [v for name in names for v in model.weights[name].flatten().tolist()]


def opened(server):
    theta = flat(server.theta, "features.1.weight", "head.weight")
    w = flat(server.w, *(f"features.{name}" for name in ("1.weight", "2.weight", "2.bias", "4.weight", "4.bias")))
    return theta, w, tuple(server.w.stats[f"features.2.running_{s}"].tolist() for s in ("mean", "var"))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("alpha", "beta"), [(1.5, 0.0), (0.0, 0.7), (1.5, 0.7)])
def test_three_rounds_are_those_of_algorithm_1(executor, alpha, beta, tmp_path, monkeypatch):
    """Client 0 has labels 0, 1, 1 and client 1 has 1, 0: heads count 1/2, 1/2 for label 0 and 2/3, 1/3 for label 1.

    Sample i of the dataset takes pair i of its client's pool. The first round has no generated features.
    """
    monkeypatch.setattr(oracle, "_OneInput", TwoFeatures)
    hp = FedGen(alpha=alpha, beta=beta, decay=0.8, eta=0.5, noise=NOISE, hidden=HIDDEN, server_steps=3,
                server_batch_size=5, server_lr=0.02, server_weight_decay=0.1)  # fmt: skip
    run = federation(hp, tmp_path, executor=executor)
    state = run.start()
    theta, w, statistics = opened(state.server)
    counts, places = [(1, 2), (1, 1)], [range(3), range(3, 5)]
    for number in (1, 2, 3):
        run.advance(state)
        models = []
        for k in range(2):
            pool = numpy_rng(0, "noise", "generated", number, k).standard_normal((POOL, NOISE + 2), np.float32).tolist()
            pairs = [(int(pool[i][NOISE + 1] > pool[i][NOISE]), pool[i][:NOISE]) for i in places[k]]
            own, fade = list(theta), 0.8 ** (number - 1) * (number > 1)
            for _ in range(2):
                fixed = (list(own), data(k), w, statistics, pairs, alpha * fade, beta * fade)
                g = differences(lambda v, fixed=fixed: local_loss(v, *fixed), own)
                own = [a - LR * b for a, b in zip(own, g, strict=True)]
            models.append(own)
        theta, adam = average(models, [3, 2]), Adam(len(w))
        for t in range(3):
            rng = numpy_rng(derive(0, "generator", number), t)
            labels = [int(u * 5 >= 2) for u in rng.random(5, "f4").tolist()]  # p̂ = (2/5, 3/5)
            drawn = list(zip(labels, rng.standard_normal((5, NOISE), "f4").tolist(), strict=True))
            _, (means, spread) = generate(w, [coded(e, y) for y, e in drawn])
            statistics = (  # a tenth of the batch's, whose variance is over n − 1 = 4
                [0.9 * a + 0.1 * b for a, b in zip(statistics[0], means, strict=True)],
                [0.9 * a + 0.1 * b * 5 / 4 for a, b in zip(statistics[1], spread, strict=True)],
            )
            heads = [m[2:] for m in models]
            g = differences(lambda v, d=drawn, h=heads: objective(v, d, h, counts, 0.5), w)
            w = adam.step(w, [d + 0.1 * v for d, v in zip(g, w, strict=True)], 0.02)
        found = opened(state.server)
        assert found[0] == pytest.approx(theta, abs=5e-6)
        assert found[1] == pytest.approx(w, abs=2e-5)
        for one, two in zip(found[2], statistics, strict=True):
            assert one == pytest.approx(two, abs=1e-5)


def test_the_generator_comes_down_with_the_model_and_label_counts_go_up(tmp_path):
    """P = 103, L = 3; G = (32 + 3)·256 + 2·256 + 256·5 + 5 = 10,757, its running statistics apart."""
    run = engine("fedgen", tmp_path)
    state = run.start()
    run.advance(state)
    sent = {way: {r.what: (r.params, r.broadcast_params) for r in state.ledger.rows if r.way == way}
            for way in ("up", "down")}  # fmt: skip
    assert sent["up"] == {"label counts": (4 * 3, 4 * 3), "model": (4 * 103, 4 * 103)}
    generator_sent = {"generator": (4 * 10_757, 10_757), "generator statistics": (0, 0)}
    assert sent["down"] == {"model": (4 * 103, 103), **generator_sent}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_its_terms_it_is_fedavg(executor, participation, tmp_path):
    settings = Settings(participation=participation)
    runs = [engine(a, tmp_path, settings=settings, executor=executor) for a in (FedGen(alpha=0, beta=0), FedAvg())]
    states = [run.start() for run in runs]
    for _ in range(2):
        for run, state in zip(runs, states, strict=True):
            run.advance(state)
        assert_reduced(states[0].server.theta, states[1].server.w, executor)


def test_generated_features_teach_the_head_alone():
    """The features' weights get the gradient of α=0: a generated sample has not come through them."""
    net = Net(Hidden(), (1, 4, 4), 3)
    theta, y_hat = net.init(0), torch.randint(3, (POOL,))
    batch = Batch(torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0]), torch.full((4,), 0.25), torch.arange(4))
    z_hat = torch.randn(5, 5)
    with_it, without = (
        fit.gradient(lambda v, f=f: f(net, Params(v, {}), batch, z_hat, y_hat), theta.weights)[0]
        for f in (Taught(alpha=10.0, beta=0.0), lambda net, w, batch, *_: supervised(net, w, batch))
    )
    assert torch.equal(with_it["features.1.weight"], without["features.1.weight"])
    assert not torch.equal(with_it["head.weight"], without["head.weight"])


def test_the_server_draws_labels_as_often_as_the_cohort_has_them():
    """3, 0 and 9 samples: label 1 is never drawn, label 2 three times as often as label 0 (σ of its share: 0.006)."""
    counts, method = torch.tensor([[2.0, 0.0, 4.0], [1.0, 0.0, 5.0]]), FedGen(server_batch_size=5000)
    y = method.draw(counts, 7, 0).y
    shares = torch.bincount(y, minlength=3) / len(y)
    assert shares[1] == 0
    assert float(shares[2]) == pytest.approx(0.75, abs=0.025)
    assert not torch.equal(y, method.draw(counts, 7, 1).y)


def test_a_head_does_not_vote_on_labels_its_client_has_never_seen():
    """Client 0 alone has label 0, client 1 alone label 1: whatever the other head says, the objective is the same."""
    net, method = Net(Hidden(), (1, 4, 4), 3), FedGen(noise=4, hidden=8, eta=0.0)
    maker, counts = generator(7, 8, 5), torch.tensor([[4.0, 0.0, 0.0], [0.0, 6.0, 0.0]])
    models = [{k: v for k, v in net.init(i).weights.items() if k.startswith("head.")} for i in range(3)]
    drawn = Draw(torch.zeros(6, dtype=torch.int64), torch.randn(6, 4))

    def value(*heads):
        return method.objective(maker, maker.init(0), drawn, net, tree.stack(heads), counts)[0]

    assert torch.equal(value(models[0], models[1]), value(models[0], models[2]))
    assert not torch.equal(value(models[0], models[1]), value(models[2], models[1]))


def test_sameness_is_one_where_noise_makes_no_difference():
    """Two samples with ε = 0, 2 (dim 1) and z = (0, 0), (1, 3): mean over 4 pairs of 4·(4/2) twice, exp(−4)."""
    epsilon, z = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert float(sameness(epsilon, z)) == pytest.approx(math.exp(-4))
    assert float(sameness(epsilon, torch.ones(2, 2))) == 1


def test_the_generator_learns_what_the_heads_know(tmp_path):
    """Of the features made for a label the shared head takes ever more for that label."""
    run = engine(FedGen(server_lr=0.01), tmp_path, rounds=3)
    state, seen = run.start(), []
    for _ in range(3):
        seen.append(run.algorithm.observe(state.server, (), _at(run, state))["generator/accuracy"])
        run.advance(state)
    metrics = evaluate(run.algorithm, state.server, state.store, run.world, 3, np.arange(4)).metrics
    assert metrics["generator/accuracy"] > max(0.8, seen[0])
    assert metrics["acc/personal/mean"] == metrics["acc/shared/mean"]


def _at(run, state):
    return Federation(run.world, max(state.round, 1), np.arange(4), Ledger())


def test_the_first_round_is_fedavgs_and_the_second_is_not(tmp_path):
    runs = [engine(a, tmp_path) for a in (FedGen(), FedAvg())]
    (ours, one), (plain, other) = [(run, run.start()) for run in runs]
    for same in (True, False):
        ours.advance(one)
        plain.advance(other)
        assert torch.equal(leaves(one.server.theta)[0], leaves(other.server.w)[0]) == same


@pytest.mark.parametrize("executor", EXECUTORS)
def test_learning_from_the_generator_stays_on_the_gpu(executor, tmp_path, monkeypatch):
    """The contract's test stops after the first round, where clients do not; here the second comes first."""
    without_backward(monkeypatch)
    with FakeTensorMode():
        run = engine(FedGen(beta=1), tmp_path, world=world(executor, device="cuda"), executor=None)
        state = run.start()
        state.round = 1
        run.advance(state)
    assert {leaf.device.type for leaf in leaves(state.server)} == {"cuda"}


def test_bf16_learns_nearly_the_same_from_the_generator(tmp_path):
    full, half = (engine(FedGen(beta=1), tmp_path, precision=p) for p in ("fp32", "bf16"))
    states = [full.start(), half.start()]
    for run, state in zip((full, half), states, strict=True):
        state.round = 1
        run.advance(state)
    assert_close(states[0].server, states[1].server, tolerance=0.05)


@pytest.mark.parametrize("architecture", [Linear(), Normed()])
def test_any_features_will_do_also_the_pixels(architecture, tmp_path):
    """`linear` has the 16 pixels for features, `normed` 12 behind a convolution."""
    run = engine("fedgen", tmp_path, architectures=(architecture,))
    state = run.start()
    run.advance(state)
    run.advance(state)
    (size,) = state.server.w.weights["features.4.bias"].shape
    assert size == run.world.population.nets[architecture.name].feature_size
    assert all(bool(leaf.isfinite().all()) for leaf in leaves(state.server))


def test_the_code_is_noise_and_one_hot_label():
    drawn = Draw(torch.tensor([2, 0]), torch.tensor([[0.5], [-1.0]]))
    expected = [[0.5, 0, 0, 1], [-1, 1, 0, 0]]
    assert code(drawn, Net(Hidden(), (1, 4, 4), 3)).flatten(1).tolist() == expected


def test_impossible_values_are_refused():
    setting = Setting(4, 4, 1, Local())
    assert FedGen().problems(setting) == []
    wrong = FedGen(alpha=-1, beta=math.nan, decay=0, eta=-1, noise=0, hidden=0, server_steps=-1, server_batch_size=1,
                   server_lr=0, server_weight_decay=-1)  # fmt: skip
    assert len(wrong.problems(setting)) == 10
