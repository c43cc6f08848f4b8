"""FedAMP: oracle, ledger, attention, a pull that pulls."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from groups import grouped, ran
from oracle import LR, client, data, federation, flat, gradient
from tiny import Hidden, assert_close, everyone, leaves, world

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedamp import FedAMP
from fedkd.algorithms.steps import supervised
from fedkd.core import fit, optim
from fedkd.core.losses import Batch
from fedkd.core.tree import Params
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.federation import cohort
from fedkd.models.net import Net

EXECUTORS = ("serial", "vmapped")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_three_rounds_are_those_of_algorithm_1(executor, tmp_path):
    """Two clients: ξ_12 = ξ_21 = α/σ e^(−‖w_1 − w_2‖²/σ); then two steps of F_i(w) + λ/(2α) ‖w − u_i‖² from u_i."""
    alpha, lambda_, sigma = 0.4, 0.6, 0.9
    run = federation(FedAMP(alpha=alpha, lambda_=lambda_, sigma=sigma), tmp_path, executor=executor)
    state = run.start()
    w = [flat(client(state, i).w) for i in range(2)]
    assert w[0] == w[1]
    for _ in range(3):
        run.advance(state)
        xi = alpha / sigma * math.exp(-sum((a - b) ** 2 for a, b in zip(*w, strict=True)) / sigma)
        u = [[(1 - xi) * a + xi * b for a, b in zip(w[i], w[1 - i], strict=True)] for i in range(2)]
        for i in range(2):
            w[i] = u[i]
            for _ in range(2):
                slope = gradient(w[i], data(i))
                w[i] = [a - LR * (g + lambda_ / alpha * (a - b)) for a, g, b in zip(w[i], slope, u[i], strict=True)]
    assert 0.1 < xi < 0.4
    for i in range(2):
        assert flat(client(state, i).w) == pytest.approx(w[i], abs=1e-6)


def test_the_pull_carries_a_gradient():
    """λ/α (w − u), beside ∇F_i(w): a term computed on detached weights would have none."""
    net = Net(Hidden(), (1, 4, 4), 3)
    w, u = net.init(0), net.init(1)
    batch = Batch(torch.randn(5, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1]), torch.full((5,), 0.2), torch.arange(5))
    method = FedAMP(alpha=0.5, lambda_=3.0, sigma=10.0)
    pulled, _ = fit.gradient(lambda weights: method.objective(4)(net, Params(weights, {}), batch, u), w.weights)
    plain, _ = fit.gradient(lambda weights: supervised(net, Params(weights, {}), batch), w.weights)
    expected = {name: plain[name] + 6.0 * (w.weights[name] - u.weights[name]) for name in plain}
    assert_close(pulled, expected, tolerance=1e-5)
    assert all(not torch.allclose(pulled[name], plain[name], atol=0.1) for name in plain)


def test_a_stronger_pull_keeps_the_clients_nearer_to_their_mixtures(tmp_path):
    """From a common start every u_i of round 1 is the start itself."""

    def wandered(lambda_):
        run, state = ran(FedAMP(alpha=1.0, lambda_=lambda_), tmp_path, world())
        start = leaves(everyone(run.start()))
        return sum((a - b).square().sum().item() for a, b in zip(leaves(everyone(state)), start, strict=True))

    assert wandered(5.0) < 0.7 * wandered(0.5) < 0.7 * wandered(0.0)


def test_attention_falls_with_the_squared_distance_and_the_rest_is_ones_own():
    """Models (0, 0), (1, 0), (0, 3): squared distances 1, 9, 10. α = 0.5, σ = 2: ξ = e^(−d/2)/4 beside the diagonal."""
    models = {"a": torch.tensor([[0.0], [1.0], [0.0]]), "b": torch.tensor([[[0.0]], [[0.0]], [[3.0]]])}
    near, far, farther = (math.exp(-d / 2) / 4 for d in (1, 9, 10))
    expected = [
        [1 - near - far, near, far],
        [near, 1 - near - farther, farther],
        [far, farther, 1 - far - farther],
    ]
    assert_close(FedAMP(alpha=0.5, sigma=2.0).attention(models), torch.tensor(expected), tolerance=1e-6)


def test_by_default_equal_models_weigh_the_same():
    """α = σ/m: ξ_ij = 1/m at distance 0, and 1 − (m − 1)/m for one's own."""
    assert_close(FedAMP().attention({"w": torch.ones(5, 7)}), torch.full((5, 5), 0.2), tolerance=1e-6)


def test_models_that_are_nearly_the_same_are_told_apart():
    """Around 1000, 0.5 apart in one of 4 numbers, d = 0.25; products of such numbers have no digit left for it."""
    models = torch.full((2, 4), 1000.0)
    models[1, 0] += 0.5
    xi = FedAMP(alpha=0.1, sigma=0.1).attention({"w": models})
    assert xi[0, 1].item() == pytest.approx(math.exp(-2.5), rel=1e-5)


def test_each_client_sends_its_model_and_receives_one_made_for_it(tmp_path):
    """P · P · m·P with P = 103, m = 4, also in round 1, when all are alike."""
    _, state = ran(FedAMP(), tmp_path, world(), 2)
    assert [(r.round, r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        (number, way, what, 4 * 103, 4 * 103)
        for number in (1, 2)
        for way, what in (("up", "model"), ("down", "cloud model"))
    ]


def test_clients_of_one_kind_pay_attention_to_each_other(tmp_path):
    """12 clients in turn of three kinds, which name the classes differently."""
    run, state = ran(FedAMP(alpha=0.05, sigma=1.0), tmp_path, grouped(3), 4)
    verdict = evaluate(run.algorithm, state.server, state.store, run.world, 4, np.arange(12))
    view = verdict.views["attention"]
    assert (view.kind, view.rows, view.columns) == ("matrix", "client, receiving", "client, giving")
    assert view.values.sum(1) == pytest.approx(np.ones(12), abs=1e-6)
    assert verdict.metrics["attention/self"] == pytest.approx(view.values.diagonal().mean())
    kind = np.arange(12) % 3
    same, other = kind[:, None] == kind, kind[:, None] != kind
    np.fill_diagonal(same, False)
    assert view.values[same].min() > view.values[other].max()


def test_models_far_apart_are_left_alone(tmp_path):
    """With σ = 1e-6 nobody hears anyone once they differ: round 2 goes on from the client's own model."""
    alone, near = (ran(FedAMP(alpha=a, sigma=s, lambda_=0.0), tmp_path, world(), 2) for a, s in ((1e-7, 1e-6), (1, 9)))
    xi = alone[0].algorithm.attention(everyone(alone[1])["hidden"].w.weights)
    assert_close(xi, torch.eye(4))
    assert not torch.equal(leaves(everyone(alone[1]))[0], leaves(everyone(near[1]))[0])


def test_of_a_partial_cohort_only_the_members_are_mixed(tmp_path):
    """Without a pull and nearly without a learning rate w_i is u_i: of two members by ξ and 1 − ξ; the absent stay."""
    run, state = ran(FedAMP(alpha=4.0, sigma=10.0, lambda_=0.0), tmp_path, world())
    run.settings, before = Settings(participation=0.5), everyone(state)["hidden"].w.weights
    run.world = replace(run.world, local=optim.Local(lr=1e-30))
    pair = cohort.draw(run.world.population.train.sizes, 0.5, "uniform", 0, 2)
    xi = run.algorithm.attention({name: leaf[pair] for name, leaf in before.items()})
    run.advance(state)
    after = everyone(state)["hidden"].w.weights
    for name, leaf in before.items():
        expected = leaf.clone()
        expected[pair] = torch.einsum("ij,j...->i...", xi, leaf[pair])
        assert_close(after[name], expected, tolerance=1e-6)
    assert 0.01 < xi[0, 1] < 0.4


def test_weights_that_could_turn_negative_are_refused():
    setting = Setting(100, 21, 1, optim.Local())
    assert FedAMP().problems(setting) == FedAMP(alpha=0.5).problems(setting) == []
    (problem,) = FedAMP(alpha=1.0, sigma=10.5).problems(setting)  # 1 · 20/10.5 = 1.904...; null would be 10.5/21
    assert "alpha·20/sigma = 1.90476" in problem
    assert "Type algorithm.alpha=null, which is 0.5 here" in problem
    assert len(FedAMP(alpha=0.0, lambda_=-1.0, sigma=0.0).problems(setting)) == 3
    assert [len(FedAMP(sigma=s).problems(setting)) for s in (-1.0, 0.0, math.inf)] == [1, 1, 1]
