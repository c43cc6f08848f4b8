"""Losses that are recorded, to be followed without Python: the same steps; and which losses are not."""

import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny import assert_close, images
from torch import nn

from fedkd.algorithms.base import ALGORITHMS
from fedkd.algorithms.fedhkd import FedHKD
from fedkd.algorithms.fedmd import FedMD
from fedkd.algorithms.fedproto import FedProto
from fedkd.algorithms.ktpfl import KTpFL
from fedkd.algorithms.moon import Moon
from fedkd.algorithms.steps import supervised
from fedkd.core import tree
from fedkd.core.fit import Descent, Fit, of_passes
from fedkd.core.losses import cross_entropy, looked_up
from fedkd.core.optim import SGD
from fedkd.core.tree import Rows, expand, stack, take
from fedkd.data import batches as batches_of
from fedkd.models.cnn import CNN
from fedkd.models.mlp import DNN
from fedkd.models.net import Architecture
from fedkd.models.split import Split

CLIENTS, SHARDS, RATE = 3, (9, 23, 4), 0.1
DENSE, CHAIN = DNN(hidden=(6,)), CNN(channels=(3, 4), kernel=3, hidden=(6,))


def given(model):
    """A net, three clients' models, and of each client a table of samples, rows by class, some absent, and a number."""
    data, draw = images(), torch.Generator().manual_seed(0)
    net = model.net(data.shape, data.classes)
    table = torch.rand(CLIENTS, len(data.labels), 6, generator=draw)
    rows = Rows(torch.rand(CLIENTS, data.classes, 6 + data.classes, generator=draw), torch.rand(CLIENTS, 3) > 0.4)
    return data, net, stack([net.init(seed) for seed in range(CLIENTS)]), table, rows, torch.arange(CLIENTS) + 1.0


@of_passes
def looking(net, w, batch, table, rows, number):
    """At logits, features, the head alone, a table, rows and a number."""
    out = net.forward(w, batch.x)
    known, other = torch.split(rows.values, [net.feature_size, net.classes], -1)
    value = cross_entropy(out.logits, batch) + 0.3 * number * (batch.weight * out.features.square().sum(-1)).sum(-1)
    value = value + 0.2 * (rows.present * (torch.softmax(net.head(w, known), -1) - other).square().sum(-1)).mean(-1)
    apart = (out.features - looked_up(table, batch.row)).abs().sum(-1) * out.logits.sin().mean(-1)
    return value + (batch.weight * apart).sum(-1), out.stats


def stream_of(data):
    rng = np.random.default_rng(0)
    walk = batches_of.epochs(
        [np.arange(n) for n in SHARDS], 2, 5, lambda place, count: rng.permutation(count)
    )  # batches of unequal sizes: 10, 4 and 2 of them
    return batches_of.Stream(data, walk, mean=True)


def walked(model, loss=looking, alter=lambda values: values):
    """Where the clients' models go along their streams, or None if the walk is refused; and where step by step."""
    data, net, models, *values = given(model)
    stream, descent = stream_of(data), Descent(loss, SGD(RATE))
    order = stream.walk.order
    start, values = tree.rows((models, tuple(alter(values))), order)
    whole, steps = (tree.map(torch.clone, start) for _ in range(2))
    if net.dense is not None:
        ran = descent.walk(net, Fit(whole, ()), stream.together(), *values)
        for t, alive in enumerate(stream.walk.alive.tolist()):
            own, others = take((steps, values), slice(alive))
            descent.together(net, Fit(own, ()), stream.step(t), *others)
    else:
        for rank in range(CLIENTS):
            ran = descent.walk(net, Fit(take(whole, rank), ()), stream.alone(rank), *take(values, rank))
        for rank in range(CLIENTS):
            for t in range(int((stream.walk.alive > rank).sum())):
                descent(net, Fit(take(steps, rank), ()), stream.one(t, rank), *take(values, rank))
    assert float(tree.squared_distance(steps.weights, start.weights)) > 0
    return (whole.weights if ran else None), steps.weights


@pytest.mark.parametrize("model", [DENSE, CHAIN], ids=["stacked", "alone"])
def test_a_recorded_loss_leads_where_python_leads(model):
    whole, steps = walked(model)
    assert_close(whole, steps, tolerance=1e-6)


def test_values_that_all_clients_share_come_to_the_same():
    def shared(values):
        table, rows, number = values
        return expand(table[0], CLIENTS), expand(take(rows, 0), CLIENTS), number

    whole, steps = walked(DENSE, alter=shared)
    assert_close(whole, steps, tolerance=1e-6)


def test_a_loss_recorded_with_shared_values_takes_each_clients_own_if_it_is_given_those():
    """How a table is looked up depends on that, and is decided in Python."""
    _, net, models, table, rows, number = given(DENSE)
    head = net.dense.head(models.weights)
    slopes = [
        net._recordings.slope(looking, net.dense, head, (t, rows, number)) for t in (expand(table[0], CLIENTS), table)
    ]
    assert slopes[0] is not slopes[1]
    assert None not in slopes
    assert slopes[1] is net._recordings.slope(looking, net.dense, head, (table * 2, rows, number))  # made once


def by_a_number(net, w, batch, *values):
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch) * (2 if bool(out.logits.sum() > 0) else 3), out.stats


def by_a_size(net, w, batch, *values):
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch) * len(batch.y.flatten()), out.stats


def in_two_passes(net, w, batch, *values):
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch) + net.forward(w, 2 * batch.x).logits.square().mean((-1, -2)), out.stats


def by_another_model(net, w, batch, *values):
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch) + (out.features * net.features(w, batch.x)).mean((-1, -2)), out.stats


def with_a_part_held_fixed(net, w, batch, *values):
    """A recording forgets `no_grad`."""
    out = net.forward(w, batch.x)
    with torch.no_grad():
        fixed = torch.softmax(out.logits, -1)
    return cross_entropy(out.logits, batch) + (fixed * out.logits).mean((-1, -2)), out.stats


@pytest.mark.parametrize(
    "loss",
    [by_a_number, by_a_size, in_two_passes, by_another_model, with_a_part_held_fixed],
    ids=lambda fn: fn.__name__,
)
@pytest.mark.parametrize("model", [DENSE, CHAIN], ids=["stacked", "alone"])
def test_what_a_recording_would_get_wrong_is_left_to_python(model, loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, _ = walked(model, of_passes(loss))
    assert whole is None


def test_a_loss_that_fails_tells_so_as_it_would_without():
    def failing(net, w, batch, *values):
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        walked(DENSE, of_passes(failing))


def test_a_loss_made_anew_every_round_is_not_recorded_forever():
    _, net, models, *values = given(DENSE)
    head = net.dense.head(models.weights)

    def anew(number):
        return of_passes(lambda net, w, *rest: (number * looking(net, w, *rest)[0], {}))

    made = [net._recordings.slope(anew(i), net.dense, head, tuple(values)) for i in range(20)]
    assert made[0] is not None
    assert made[-1] is None


def test_without_torchscript_python_goes_on(monkeypatch):
    monkeypatch.delattr(torch.jit, "trace")
    whole, _ = walked(DENSE)
    assert whole is None


@dataclass(frozen=True)
class OtherHead(Architecture):
    """Its head has no bias."""

    name = "other_head"

    def module(self, shape, classes):
        return Split(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten()), nn.Linear(12, classes, bias=False))


def test_nets_with_another_head_are_left_to_python():
    whole, _ = walked(OtherHead(), of_passes(lambda net, w, batch, *values: supervised(net, w, batch)))
    assert whole is None


METHODS = {
    "fedhkd": lambda: FedHKD().loss,
    "fedmd": lambda: FedMD().digest,
    "fedproto": lambda: FedProto().loss,
    "ktpfl": lambda: KTpFL().distil,
    "moon": lambda: Moon().loss,
}


def values_of(name, data):
    draw = torch.Generator().manual_seed(1)
    rows = Rows(torch.rand(CLIENTS, data.classes, 6 + data.classes, generator=draw), torch.rand(CLIENTS, 3) > 0.4)
    table = torch.rand(CLIENTS, len(data.labels), data.classes, generator=draw)
    return {
        "fedhkd": [rows],
        "fedmd": [table],
        "fedproto": [rows._replace(values=rows.values[..., :6])],
        "ktpfl": [table],
        "moon": [torch.rand(CLIENTS, len(data.labels), 6, generator=draw), torch.ones(CLIENTS, dtype=torch.bool)],
    }[name]


@pytest.mark.parametrize("model", [DENSE, CHAIN], ids=["stacked", "alone"])
@pytest.mark.parametrize("name", METHODS)
def test_the_methods_losses_are_recorded(name, model):
    assert name in ALGORITHMS
    whole, steps = walked(model, METHODS[name](), lambda _: values_of(name, images()))
    assert_close(whole, steps, tolerance=1e-6)
