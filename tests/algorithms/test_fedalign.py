"""FedAlign: oracle, ledger, reductions, the largest singular value, and networks it is used with."""

import logging
import math
from dataclasses import dataclass

import oracle
import pytest
import torch
from oracle import average, data, differences, federation, sgd, softmax, weights
from tiny import SHAPE, Deep, Linear, assert_close, assert_reduced, engine, leaves, without_backward, world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedalign import FedAlign
from fedkd.algorithms.fedavg import FedAvg
from fedkd.core import fit, tree
from fedkd.core.losses import Batch
from fedkd.core.optim import Local
from fedkd.models.net import MODELS, Architecture, Net
from fedkd.models.split import Split

SLOW = pytest.mark.slow
EXECUTORS = ("serial", "vmapped")
CLIP = 0.5


@dataclass(frozen=True)
class Block(Architecture):
    """s = w_0 x; two inner channels w_1 s, w_2 s; two features w_3 i_0 + w_4 i_1, w_5 i_0 + w_6 i_1; two logits."""

    name = "one_input"

    def module(self, shape, classes):
        layers = [nn.Linear(a, b, bias=False) for a, b in ((1, 1), (1, 2), (2, 2))]
        return Split(nn.Sequential(nn.Flatten(), *layers), nn.Linear(2, 2, bias=False))


@dataclass(frozen=True)
class Maps(Architecture):
    """A trunk, a last stage of two convolutions with batch statistics, a head."""

    name = "maps"

    def module(self, shape, classes):
        stage = (nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3), nn.ReLU())
        return Split(nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), *stage, nn.Flatten()), nn.Linear(12, classes))


def features(w, s, inner):
    """The last stage's output; when only one of its two inner channels is there, it counts twice (D1)."""
    i = [w[1] * s, w[2] * s] if inner == 2 else [2 * w[1] * s, 0]
    return [w[3] * i[0] + w[4] * i[1], w[5] * i[0] + w[6] * i[1]]


def cross_entropy(w, samples):
    value = 0.0
    for x, y in samples:
        f = features(w, w[0] * x, 2)
        value -= math.log(softmax([w[7] * f[0] + w[8] * f[1], w[9] * f[0] + w[10] * f[1]])[y]) / len(samples)
    return value


def apart(w, samples, there):
    """Mean (K_F − K_S)², K_F and the stage's input taken `there`: X is f sᵀ, whose only singular value is ‖f‖ |s|."""
    value = 0.0
    for x, _ in samples:
        s = there[0] * x
        k_full, k_slim = (math.hypot(*features(v, s, inner)) * abs(s) for v, inner in ((there, 2), (w, 1)))
        value += (k_full - k_slim) ** 2 / len(samples)
    return value


def slope(w, samples, mu):
    """∇(CE + μ (CE/L)·L), the fraction and the targets held fixed at w, by central differences; clipped."""
    scale = mu * cross_entropy(w, samples) / apart(w, samples, w)
    found = differences(lambda v: cross_entropy(v, samples) + scale * apart(v, samples, w), w)
    length = math.hypot(*found)
    return [g * min(1, CLIP / length) for g in found]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_rounds_are_those_of_the_paper(executor, tmp_path, monkeypatch):
    """At width 0.5 the slim stage has one of two inner channels; the weights are listed as the layers lie."""
    monkeypatch.setattr(oracle, "_OneInput", Block)
    run = federation(FedAlign(width=0.5, clip=CLIP), tmp_path, executor=executor)
    state = run.start()
    shared = weights(state.server.w)
    for _ in range(2):
        run.advance(state)
        first = [sgd(shared, slope(shared, data(k), 0.45)) for k in range(2)]
        second = [sgd(w, slope(w, data(k), 0.45)) for k, w in enumerate(first)]
        shared = average(second, [3, 2])
        assert weights(state.server.w) == pytest.approx(shared, abs=2e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("method", "net"),
    [(FedAlign(mu=0, clip=0.1), Deep()), (FedAlign(width=1, clip=math.inf), Maps()), (FedAlign(clip=0.1), Linear())],
)
def test_without_weight_at_full_width_or_without_inner_channels_it_is_fedavg(method, net, executor, tmp_path):
    states = []
    for algorithm in (method, FedAvg()):
        run = engine(algorithm, tmp_path, world=world(executor, (net,)), executor=None)
        states.append(run.start())
        run.advance(states[-1])
        run.advance(states[-1])
    assert_reduced(states[0].server.w, states[1].server.w, executor)
    assert states[0].ledger.rows == states[1].ledger.rows  # P up, P down, one message


@pytest.mark.parametrize("net", [Deep(), Maps()])
def test_executors_agree_where_there_is_something_to_align(net, tmp_path):
    states = []
    for method, executor in ((FedAlign(clip=1), "serial"), (FedAlign(clip=1), "vmapped"), (FedAvg(), "serial")):
        run = engine(
            method, tmp_path, world=world(executor, (net,), Local(epochs=2, batch_size=4, lr=0.02)), executor=None
        )
        states.append(run.start())
        run.advance(states[-1])
        run.advance(states[-1])
    assert_close(states[0].server, states[1].server)
    name = "features.3.weight"
    assert not torch.allclose(states[0].server.w.weights[name], states[2].server.w.weights[name])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_alignment_stays_on_the_gpu(executor, tmp_path, monkeypatch):
    without_backward(monkeypatch)
    with FakeTensorMode():
        tiny = world(executor, (Deep(),), Local(steps=1), device="cuda")
        run = engine(FedAlign(power_iterations=1), tmp_path, world=tiny, executor=None)
        state = run.start()
        run.advance(state)
    assert {leaf.device.type for leaf in leaves(state.server)} == {"cuda"}


def some(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_constant_is_the_largest_singular_value_of_the_transmitting_matrix():
    """X = F^{L-1} (F^L)ᵀ / HW for maps of 5x5, the input's pooled from 10x10."""
    stage_in, stage_out = some(6, 7, 10, 10).abs(), some(6, 4, 5, 5).abs()
    pooled = stage_in.view(6, 7, 5, 2, 5, 2).mean((3, 5))
    x = torch.einsum("bihw,bohw->bio", pooled, stage_out) / 25
    expected = torch.linalg.svdvals(x)[:, 0]
    torch.testing.assert_close(FedAlign().lipschitz(stage_out, stage_in), expected)


def test_its_gradient_is_that_of_the_singular_value():
    stage_in, stage_out = some(3, 4, 6).abs()[..., None], some(3, 5, 6).abs()[..., None].requires_grad_()
    (ours,) = torch.autograd.grad(FedAlign().lipschitz(stage_out, stage_in).sum(), stage_out)
    x = stage_in.squeeze(-1) @ stage_out.squeeze(-1).mT / 6
    (exact,) = torch.autograd.grad(torch.linalg.svdvals(x)[:, 0].sum(), stage_out)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_of_flat_features_it_is_the_product_of_their_lengths_and_of_none_zero():
    a, b = some(3, 5), some(3, 7)
    b[2] = 0
    torch.testing.assert_close(FedAlign().lipschitz(a, b), a.norm(dim=1) * b.norm(dim=1))


def gradients(net, method, batch):
    w = net.init(0)
    return fit.gradient(lambda v: method.loss(net, tree.Params(v, w.stats), batch), w.weights)[0]


def test_the_alignment_moves_the_last_stage_alone():
    """Its input is detached, and the head follows it: their gradients are those of the labels."""
    net = Net(Maps(), SHAPE, 3)
    batch = Batch(some(6, *SHAPE), torch.arange(6) % 3, torch.full((6,), 1 / 6), torch.arange(6))
    plain, ours = (gradients(net, FedAlign(mu=mu), batch) for mu in (0, 0.45))
    changed = {name for name, g in plain.items() if not torch.allclose(g, ours[name], atol=1e-6)}
    assert changed
    assert {name.split(".")[1] for name in changed} <= {"2", "3", "5", "6"}  # the stage's layers


def test_the_alignment_weighs_mu_times_the_cross_entropy():
    net = Net(Deep(), SHAPE, 3)
    w, batch = net.init(0), Batch(some(6, *SHAPE), torch.arange(6) % 3, torch.full((6,), 1 / 6), torch.arange(6))
    plain, ours = (FedAlign(mu=mu).loss(net, w, batch)[0].item() for mu in (0, 0.45))
    assert ours == pytest.approx(1.45 * plain)


@pytest.mark.parametrize("name", ["cnn", pytest.param("resnet18", marks=SLOW), pytest.param("shufflenet", marks=SLOW)])
def test_it_trains_the_networks_of_the_tables(name, tmp_path):
    """Only the last stage differs from FedAvg's after one step of one round."""
    moved, tiny = set(), world("serial", (MODELS[name](),), Local(steps=1, batch_size=4, lr=0.01))
    runs = [engine(m, tmp_path, world=tiny, executor=None) for m in (FedAlign(clip=math.inf), FedAvg())]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
    for key, weight in states[0].server.w.weights.items():
        assert weight.isfinite().all()
        if (weight - states[1].server.w.weights[key]).abs().max() > 1e-7:  # rounding is not alignment
            moved.add(key.split(".")[1])
    assert moved == {"cnn": {"3", "7"}, "resnet18": {"layer4"}, "shufflenet": {"stage4"}}[name]


def test_a_network_with_nothing_to_align_is_told_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "fedkd"):
        engine(FedAlign(), tmp_path, architectures=(Deep(),)).start()
        assert not caplog.records
        engine(FedAlign(), tmp_path, architectures=(Linear(),)).start()
    (record,) = caplog.records
    assert record.getMessage().startswith("model=linear has a single layer before its head, so FedAlign has nothing")


def test_impossible_hyperparameters_are_refused():
    setting = Setting(4, 4, 1, Local())
    assert FedAlign().problems(setting) == []
    assert len(FedAlign(mu=-1, width=0, power_iterations=0, clip=0).problems(setting)) == 4
    assert len(FedAlign(width=1.1).problems(setting)) == 1
