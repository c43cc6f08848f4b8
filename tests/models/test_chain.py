"""Gradients of convolutional networks written out, against the layers themselves under autograd."""

import math

import numpy as np
import pytest
import torch
from tiny import assert_close
from torch import nn

from fedkd.algorithms.apfl import joined, mixture
from fedkd.algorithms.scaffold import Corrected
from fedkd.algorithms.steps import Proximal, supervised
from fedkd.core import tree
from fedkd.core.draws import drawing
from fedkd.core.fit import Descent, Fit, factored, slope
from fedkd.core.losses import Batch
from fedkd.core.optim import SGD
from fedkd.core.tree import Params
from fedkd.data import batches as batches_of
from fedkd.data.datasets import Images
from fedkd.models import chain
from fedkd.models.alexnet import AlexNet
from fedkd.models.cnn import CNN, LeNet, SmallCNN
from fedkd.models.net import Architecture, Net
from fedkd.models.split import Pass, Split
from fedkd.models.vgg import VGG11

SHAPE = (3, 18, 18)


class Odd(Architecture):
    """What the zoo lacks: no bias, a stride, overlapping pools after a ReLU, groups, dropout, no stage of its own."""

    name = "odd"

    def module(self, shape, classes):
        body = (
            nn.Conv2d(3, 4, 3, stride=2, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Sequential(nn.Conv2d(4, 6, (3, 1), groups=2), nn.ReLU()),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(48, 5, bias=False),
        )
        return Split(nn.Sequential(*body), nn.Linear(5, classes))


MODELS = [
    CNN(channels=(4, 6), hidden=(7,)),
    LeNet(),
    SmallCNN(),
    SmallCNN(projection=5),
    AlexNet(hidden=(16,)),
    CNN(channels=(8, 16), padding=0, kernel=3, hidden=(1024, 256)),  # large products
    Odd(),
]


def batch(samples: int = 64) -> Batch:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, SHAPE[1], SHAPE[2], SHAPE[0], generator=draw).movedim(-1, -3)
    y, weight = torch.randint(0, 10, (samples,), generator=draw), torch.rand(samples, generator=draw)
    return Batch(x, y, weight / weight.sum(), torch.arange(samples))


def by_layers(net: Net, w: Params, x: torch.Tensor) -> Pass:
    """A training pass layer by layer, as torch does it."""
    with net._layers.training.having(w.weights) as module:
        return module(x)


def pair(model, other: int = 1):
    net = model.net(SHAPE, 10)
    assert net.chain is not None
    return net, net.init(0), net.init(other)


def by_autograd(net, weights, fn):
    """∇ of a function of a pass."""
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    with drawing(5):
        found = torch.autograd.grad(fn(leaves), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def cross_entropy(logits, of):
    return (of.weight * nn.functional.cross_entropy(logits, of.y, reduction="none")).sum()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name}-{model.projection}")
@pytest.mark.parametrize("loss", ["supervised", "proximal", "corrected"])
def test_kept_or_followed_it_is_the_gradient_that_autograd_finds(model, loss):
    (net, w, other), of = pair(model), batch()
    fn, rest, added = {
        "supervised": (supervised, (), tree.zeros_like(w.weights)),
        "proximal": (Proximal(0.3), (other,), tree.scale(0.3, tree.sub(w.weights, other.weights))),
        "corrected": (Corrected(), (other.weights,), other.weights),
    }[loss]
    plain = by_autograd(net, w.weights, lambda v: cross_entropy(by_layers(net, Params(v, {}), of.x).logits, of))
    expected = tree.add(plain, added)
    with drawing(5):
        found, stats = slope(fn, net, w, of, *rest)
    assert_close(found, expected, tolerance=1e-5)
    assert list(found) == list(w.weights)
    assert stats == {}
    into = tree.map(torch.clone, w)
    with drawing(5):
        factored(fn, net, into, of, *rest)[0].follow(into.weights, 0.1)
    assert_close(into.weights, tree.sub(w.weights, expected, 0.1), tolerance=1e-5)


@pytest.mark.parametrize("model", [SmallCNN(), Odd()], ids=lambda model: model.name)
@pytest.mark.parametrize("loss", ["supervised", "proximal", "corrected"])
def test_a_whole_walk_leads_where_its_steps_lead(model, loss, monkeypatch):
    """One of two clients: 23 samples in batches of 5, the last of them of 3, fetched two at a time."""
    monkeypatch.setattr(batches_of, "FETCHED", 2 * 5 * math.prod(SHAPE) * 4)
    net, start, other = pair(model)
    fn, values = {"supervised": (supervised, ()), "proximal": (Proximal(0.3), (other,)),
                  "corrected": (Corrected(), (other.weights,))}[loss]  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    channels, *sides = SHAPE
    pixels = torch.randint(0, 256, (32, *sides, channels), generator=draw, dtype=torch.uint8)
    data = Images(pixels, torch.arange(32) % 10, 32, 10, *torch.full((2, channels), 0.5))
    walk = batches_of.epochs([np.arange(9), np.arange(9, 32)], 1, 5, lambda _, count: np.arange(count)[::-1])
    stream = batches_of.Stream(data, walk, mean=True)
    descent, rank = Descent(fn, SGD(0.1)), 0

    whole = tree.map(torch.clone, start)
    with torch.no_grad(), drawing(5):
        assert descent.walk(net, Fit(whole, ()), stream.alone(rank), *values)

    steps, seen = tree.map(torch.clone, start), []
    with torch.no_grad(), drawing(5):
        for t in range(5):
            of = stream.one(t, rank)
            seen += of.row.tolist()
            descent(net, Fit(steps, ()), of, *values)
    assert seen == list(range(31, 8, -1))
    assert_close(whole.weights, steps.weights, tolerance=1e-7)
    assert float(tree.squared_distance(whole.weights, start.weights)) > 0


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name}-{model.projection}")
def test_a_loss_may_look_at_all_that_a_pass_shows(model):
    (net, w, _), of = pair(model), batch(8)

    def looked(out):
        parts = out.logits, out.features, out.stage_in, out.stage_out
        return sum((part.sin() * (i + 1)).mean() for i, part in enumerate(parts))

    expected = by_autograd(net, w.weights, lambda v: looked(by_layers(net, Params(v, {}), of.x)))
    found = by_autograd(net, w.weights, lambda v: looked(net.forward(Params(v, {}), of.x)))
    assert_close(found, expected, tolerance=1e-5)
    with torch.no_grad(), drawing(3):
        layers = by_layers(net, w, of.x)
    with drawing(3):
        shown = net.forward(w, of.x)
    assert_close(tuple(part.detach() for part in shown[:4]), tuple(layers), tolerance=1e-5)


def test_layers_before_what_a_loss_looks_at_alone_have_a_gradient_and_those_behind_it_none():
    net, w, _ = pair(LeNet())
    found = by_autograd(net, w.weights, lambda v: net.forward(Params(v, {}), batch(4).x).stage_in.square().sum())
    assert all(bool(found[name].any()) for name in found if name.startswith("features.0."))
    assert not any(bool(found[name].any()) for name in found if name.startswith("head"))


def test_the_mixtures_of_apfl_move_as_autograd_says():
    (net, w, v), of, alpha = pair(LeNet()), batch(), torch.tensor(0.3)
    both = joined(w, v)
    found, _ = slope(mixture, net, both, of, alpha)
    alone = by_autograd(net, both.weights, lambda weights: mixture(net, Params(weights, {}), of, alpha)[0])
    assert_close(found, alone, tolerance=1e-5)


def test_networks_with_other_layers_are_left_to_autograd():
    assert VGG11(batch_norm=False).net((3, 32, 32), 10).chain is None  # an average pool
    layers = nn.Conv2d(3, 4, 3), nn.Flatten()
    for body in (
        [nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten()],
        [nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Flatten()],
        [*layers, nn.Tanh()],
    ):
        assert chain.of(Split(nn.Sequential(*body), nn.Linear(4, 2))) is None


def test_vmap_a_lower_precision_and_gradients_by_the_images_do_not_go_through_the_chain():
    net, x = LeNet().net(SHAPE, 10), batch(2).x
    assert net.chain.serves(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not net.chain.serves(x)
    assert not net.chain.serves(x.clone().requires_grad_())
    seen = []
    torch.vmap(lambda image: seen.append(net.chain.serves(image)) or image)(x)
    assert seen == [False]


def test_samples_that_weigh_nothing_have_no_say():
    (net, w, _), of = pair(LeNet()), batch(6)
    padded = of._replace(weight=of.weight * torch.tensor([1, 1, 1, 1, 0, 0]))
    found, _ = slope(supervised, net, w, padded)
    alone, _ = slope(supervised, net, w, Batch(*(part[:4] for part in padded)))
    assert_close(found, alone, tolerance=1e-6)
    assert not math.isnan(float(found["head.bias"].sum()))
