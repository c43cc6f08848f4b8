"""FedProto: oracle, ledger, reductions, mixed architectures."""

import math

import numpy as np
import oracle
import pytest
import torch
from oracle import Embedding, average, classify, client, data, differences, embed, federation, sgd, weights
from tiny import (
    CLASSES,
    SHAPE,
    Deep,
    Hidden,
    Linear,
    assert_equal,
    assert_reduced,
    engine,
    everyone,
    leaves,
    without_backward,
    world,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.fedproto import FedProto
from fedkd.algorithms.local import Local as LocalTraining
from fedkd.algorithms.steps import class_means, class_sums, supervised
from fedkd.build import _sizes_differ
from fedkd.core import fit, tree
from fedkd.core.losses import Batch
from fedkd.core.optim import Local
from fedkd.core.tree import Rows, mean_rows
from fedkd.engine import Settings
from fedkd.models.net import Net

EXECUTORS = ("serial", "vmapped")


def prototype(w, samples, j):
    """Eq. 3, or None of a class without samples."""
    mine = [embed(w, x) for x, y in samples if y == j]
    return average(mine, [1] * len(mine)) if mine else None


def objective(w, samples, known, lambda_, distance):
    """Eq. 7 and 8 over a batch of all the client's samples."""
    value = 0.0
    for x, y in samples:
        value -= math.log(classify(w, embed(w, x))[y]) / len(samples)
    for j, c in known.items():
        if (mine := prototype(w, samples, j)) is not None:
            far = math.dist(mine, c)
            value += lambda_ * (far if distance == "l2" else far**2 / 2)
    return value


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("share_model", [False, True])
@pytest.mark.parametrize(("classes", "distance"), [("both", "mse"), ("both", "l2"), ("one each", "mse")])
def test_three_rounds_are_those_of_algorithm_1(classes, distance, share_model, executor, tmp_path, monkeypatch):
    """Clients hold 1, 2 and 1, 1 samples of the classes; or 3 of class 0 and 2 of class 1."""
    if classes == "one each":
        monkeypatch.setattr(oracle, "CLIENTS", [[(51, 0), (204, 0), (255, 0)], [(102, 1), (153, 1)]])
    monkeypatch.setattr(oracle, "_OneInput", Embedding)
    method = FedProto(lambda_=0.4, distance=distance, share_model=share_model)
    run = federation(method, tmp_path, executor=executor)
    state = run.start()
    models = [weights(client(state, i).w) for i in range(2)]
    assert (models[0] == models[1]) == share_model
    known = {}
    for _ in range(3):
        run.advance(state)
        losses = [lambda v, i=i, c=known: objective(v, data(i), c, 0.4, distance) for i in range(2)]
        for _ in range(2):  # two epochs of one batch
            models = [sgd(w, differences(f, w)) for f, w in zip(losses, models, strict=True)]
        known = {}
        for j in (0, 1):
            count = [sum(y == j for _, y in data(i)) for i in range(2)]
            mine = [prototype(w, data(i), j) or [0, 0] for i, w in enumerate(models)]
            known[j] = average(mine, count)  # Eq. 6 with weights |D_ij| / N_j
            assert state.server.prototypes.values[j].tolist() == pytest.approx(known[j], abs=1e-5)
        for i in range(2):
            assert weights(client(state, i).w) == pytest.approx(models[i], abs=1e-5)
        if share_model:
            models = [average(models, [3, 2])] * 2
            assert weights(run.algorithm.shared(state.server)) == pytest.approx(models[0], abs=1e-5)


def crossed(state):
    return [(r.round, r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows]


def test_prototypes_of_the_classes_a_client_holds_go_up_and_all_come_down(tmp_path):
    """d = 5, L = 3; each of the four clients holds all three classes."""
    run = engine("fedproto", tmp_path)
    state = run.start()
    run.advance(state)
    run.advance(state)
    up = ("up", "prototypes", 4 * 3 * 5, 4 * 3 * 5)
    assert crossed(state) == [(1, *up), (2, "down", "prototypes", 4 * 15, 15), (2, *up)]


def test_a_class_a_client_lacks_is_not_sent(tmp_path):
    tiny = world()
    tiny.population.images.labels[tiny.population.images.labels == 2] = 0  # nobody holds class 2
    run = engine(FedProto(), tmp_path, world=tiny, executor=None)
    state = run.start()
    run.advance(state)
    run.advance(state)
    up = ("up", "prototypes", 4 * 2 * 5, 4 * 2 * 5)
    assert crossed(state) == [(1, *up), (2, "down", "prototypes", 4 * 10, 10), (2, *up)]
    assert state.server.prototypes.present.tolist() == [True, True, False]


def test_with_shared_models_these_cross_too(tmp_path):
    """P = 103."""
    run = engine(FedProto(share_model=True), tmp_path)
    state = run.start()
    run.advance(state)
    run.advance(state)
    model = [("down", "model", 4 * 103, 103), ("up", "prototypes", 60, 60), ("up", "model", 4 * 103, 4 * 103)]
    assert [row[1:] for row in crossed(state) if row[0] == 1] == model
    second = [row[1:] for row in crossed(state) if row[0] == 2]
    assert second == [model[0], ("down", "prototypes", 4 * 15, 15), *model[1:]]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("method", "plain"), [(FedProto(lambda_=0, share_model=True), FedAvg()), (FedProto(lambda_=0), LocalTraining())]
)
def test_without_the_distance_it_is_local_training_or_fedavg(method, plain, executor, tmp_path):
    states = []
    for algorithm in (method, plain):
        run = engine(algorithm, tmp_path, executor=executor, rounds=3)
        states.append(run.start())
        for _ in range(3):
            run.advance(states[-1])
    if method.share_model:
        assert_reduced(states[0].server.w, states[1].server.w, executor)
    else:
        assert_reduced(everyone(states[0]), everyone(states[1]), executor)


def test_architectures_of_one_feature_size_share_their_prototypes(tmp_path):
    run = engine(FedProto(), tmp_path, architectures=(Hidden(), Deep()))
    state = run.start()
    run.advance(state)
    own = everyone_features(run, state)
    held = run.world.population.train
    labels = run.world.population.images.labels.numpy()
    for j in range(CLASSES):
        every = np.concatenate([own[i][labels[held.of(np.array([i]))[0]] == j] for i in range(4)])
        assert state.server.prototypes.values[j].tolist() == pytest.approx(every.mean(0).tolist(), abs=1e-5)


def everyone_features(run, state):
    """Every client's representations of its own training samples, by its model."""
    population, found = run.world.population, []
    for i in range(4):
        stacks = state.store.gather(np.array([i]))._stacks
        ((arch, own),) = stacks.items()
        rows = torch.from_numpy(population.train.of(np.array([i]))[0])
        found.append(population.nets[arch].features(tree.take(own.w, 0), population.images.batch(rows)).numpy())
    return found


def test_other_feature_sizes_are_refused_with_their_names():
    nets = {a.name: Net(a, SHAPE, CLASSES) for a in (Hidden(), Linear())}
    problem = _sizes_differ(FedProto(), nets)
    assert "algorithm=fedproto shares representations" in problem
    assert "differ in size: hidden 5, linear 16." in problem
    assert _sizes_differ(FedProto(), {"hidden": nets["hidden"]}) is None
    assert _sizes_differ(LocalTraining(), nets) is None
    assert (
        _sizes_differ(FedProto(), {a.name: Net(a, SHAPE, 3) for a in (Hidden(projection=4), Linear(projection=4))})
        is None
    )


def test_a_class_nobody_of_the_cohort_holds_keeps_its_prototype():
    """Of class 0 two clients with 1 and 3 samples: (4 + 3·8)/4 = 7; class 1 as before; class 2 still unknown."""
    values = torch.tensor([[[4.0], [0.0], [0.0]], [[8.0], [0.0], [0.0]]])
    present = torch.tensor([[True, False, False]] * 2)
    old = Rows(torch.tensor([[1.0], [5.0], [0.0]]), torch.tensor([True, True, False]))
    made = mean_rows(Rows(values, present), torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]), old)
    assert made.values.flatten().tolist() == [7, 5, 0]
    assert made.present.tolist() == [True, True, False]


def test_a_batch_pulls_only_the_classes_it_holds_and_the_server_knows():
    """Class 0 is known and here, class 1 here but unknown, class 2 known but not here."""
    net = Net(Hidden(), SHAPE, 3)
    w, x = net.init(0), torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.tensor([0, 1, 0, 1]), torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]), torch.arange(4))
    known = Rows(torch.ones(3, 5), torch.tensor([True, False, True]))
    f, plain = net.features(w, x), supervised(net, w, batch)[0]
    far = ((f[0] + f[2]) / 2 - 1).norm().item()
    for distance, expected in (("l2", far), ("mse", far**2 / 5)):
        ours = FedProto(lambda_=2.0, distance=distance).loss(net, w, batch, known)[0]
        assert (ours - plain).item() == pytest.approx(2 * expected, abs=1e-5)


def test_class_means_do_not_depend_on_the_scale_of_weights():
    values, y = torch.tensor([[1.0], [3.0], [8.0]]), torch.tensor([0, 0, 2])
    for weight in (1.0, 1 / 3):
        batch = Batch(values, y, torch.full((3,), weight), torch.arange(3))
        means = class_means(*class_sums(values, batch, 3))
        assert means.values.flatten().tolist() == pytest.approx([2, 0, 8])
        assert means.present.tolist() == [True, False, True]


def test_a_prototype_that_is_met_has_a_finite_gradient():
    """With weights of 0 the features are those of the prototype: only the labels pull."""
    net = Net(Hidden(init="zeros"), SHAPE, 3)
    w, batch = net.init(0), Batch(torch.ones(2, *SHAPE), torch.tensor([0, 1]), torch.full((2,), 0.5), torch.arange(2))
    known = Rows(torch.zeros(3, 5), torch.ones(3, dtype=torch.bool))
    slope, _ = fit.gradient(lambda v: FedProto(distance="l2").loss(net, tree.Params(v, {}), batch, known), w.weights)
    plain, _ = fit.gradient(lambda v: supervised(net, tree.Params(v, {}), batch), w.weights)
    assert_equal(slope, plain)
    assert any(bool(g.any()) for g in plain.values())


def test_absent_clients_keep_their_models_and_every_client_is_judged_by_its_own(tmp_path):
    run = engine(FedProto(share_model=True), tmp_path, settings=Settings(participation=0.5))
    state = run.start()
    run.advance(state)
    own = state.store.gather(np.arange(4))
    judged = run.algorithm.personal(state.server, own, None)._stacks["hidden"].weights["head.weight"]
    start = run.start().server.w.weights["head.weight"]
    assert sum(torch.equal(head, start) for head in judged) == 2
    assert not any(torch.equal(head, state.server.w.weights["head.weight"]) for head in judged)


@pytest.mark.parametrize("share_model", [False, True])
def test_rounds_with_prototypes_stay_on_the_gpu(share_model, tmp_path, monkeypatch):
    """The contract's test of the first round, for the second, where there are prototypes."""
    without_backward(monkeypatch)
    method = FedProto(share_model=share_model)
    with FakeTensorMode():
        run = engine(method, tmp_path, world=world("vmapped", device="cuda"), executor=None)
        state = run.start()
        run.advance(state)
        run.advance(state)
        values = leaves((state.server, everyone(state)))
    assert {leaf.device.type for leaf in values} == {"cuda"}


def test_impossible_settings_are_refused():
    assert FedProto().problems(Setting(4, 4, 2, Local())) == []
    assert len(FedProto(lambda_=-1, distance="l3").problems(Setting(4, 4, 1, Local()))) == 2
    (problem,) = FedProto(share_model=True).problems(Setting(4, 4, 2, Local()))
    assert "there are 2 architectures" in problem
