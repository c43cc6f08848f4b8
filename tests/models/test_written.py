"""Losses of what passes show: their gradients written out, against autograd through the layers."""

import pytest
import torch
from tiny import assert_close
from torch.nn.functional import cosine_similarity

from fedkd.core import tree
from fedkd.core.fit import factored, factored_together, gradient, of_passes, slope
from fedkd.core.losses import Batch, cross_entropy, looked_up
from fedkd.core.tree import Params, stack, take
from fedkd.models.cnn import LeNet, SmallCNN
from fedkd.models.mlp import DNN, MLR

SHAPE, CLIENTS, SAMPLES, CLASSES = (1, 16, 16), 3, 6, 5


def batches(seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS, SAMPLES, SHAPE[1], SHAPE[2], SHAPE[0], generator=draw).movedim(-1, -3)
    y = torch.randint(0, CLASSES, (CLIENTS, SAMPLES), generator=draw)
    return Batch(x, y, torch.full(y.shape, 1 / SAMPLES), torch.arange(SAMPLES).expand(CLIENTS, SAMPLES))


def looking_everywhere(net, w, batch, public, teacher, table):
    """Two training passes, a model that is not trained, features, the head alone, a table's rows."""
    one, other = net.forward(w, batch.x), net.forward(w, public.x)
    value = cross_entropy(one.logits, batch) + 0.3 * other.logits.square().mean((-1, -2))
    near = cosine_similarity(one.features, net.features(teacher, batch.x), -1)
    value = value + (batch.weight * near).sum(-1) - 0.1 * net.predict(teacher, public.x).mean((-1, -2))
    value = value + 0.2 * net.head(w, table).sin().mean((-1, -2))
    return value + (batch.weight * (one.features - looked_up(table, batch.y)).square().mean(-1)).sum(-1), one.stats


passing = of_passes(lambda *parts: looking_everywhere(*parts))  # noqa: PLW0108 - a function of its own to mark


def given(net):
    models, teachers = (stack([net.init(seed + first) for seed in range(CLIENTS)]) for first in (0, 10))
    table = torch.randn(CLIENTS, CLASSES, net.feature_size, generator=torch.Generator().manual_seed(1))
    return models, (batches(), batches(1), teachers, table)


def everything(net):
    models, rest = given(net)
    return models, *rest


def by_autograd(net, w, *rest):
    """Through the layers themselves."""
    found, _ = gradient(lambda weights: looking_everywhere(net, Params(weights, {}), *rest), w.weights)
    return found


@pytest.mark.parametrize("model", [MLR(), DNN(hidden=(7,)), DNN(hidden=(9, 6))], ids=["mlr", "dnn", "deeper"])
def test_stacked_clients_follow_the_gradients_they_have_alone(model):
    net = model.net(SHAPE, CLASSES)
    models, rest = given(net)
    alone = stack([by_autograd(net, *take((models, *rest), client)) for client in range(CLIENTS)])
    factors, _ = factored_together(passing, net, models, *rest)
    assert_close(factors.taken(models.weights), alone, tolerance=1e-5)
    expected = tree.sub(models.weights, alone, 0.1)
    factors.follow(models.weights, 0.1)
    assert_close(models.weights, expected, tolerance=1e-6)


@pytest.mark.parametrize("model", [LeNet(), SmallCNN(projection=4)], ids=["lenet", "projected"])
def test_one_client_follows_the_gradient_that_autograd_finds(model):
    net = model.net(SHAPE, CLASSES)
    w, *rest = take(everything(net), 1)
    expected = by_autograd(net, w, *rest)
    factors, _ = factored(passing, net, w, *rest)
    assert_close(factors.taken(w.weights), expected, tolerance=1e-5)


def test_a_loss_that_does_not_look_at_the_logits_leaves_the_head_alone():
    net = DNN(hidden=(7,)).net(SHAPE, CLASSES)
    models, (batch, *_) = given(net)
    looking = of_passes(lambda net, w, batch: (net.forward(w, batch.x).features.square().sum((-1, -2)), {}))
    found, _ = factored_together(looking, net, models, batch)
    taken = found.taken(models.weights)
    assert not taken["head.weight"].any()
    assert taken["features.1.weight"].any()


def test_networks_that_are_not_written_out_have_their_gradient_from_autograd():
    net = DNN(hidden=(7,), projection=4).net(SHAPE, CLASSES)
    w, *rest = take(everything(net), 0)
    found, _ = slope(passing, net, w, *rest)
    assert_close(found, by_autograd(net, w, *rest), tolerance=1e-6)
