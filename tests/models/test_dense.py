"""Cross-entropy's gradient written out, against autograd."""

import itertools

import numpy as np
import pytest
import torch
from tiny import assert_close, images
from torch import nn

from fedkd.algorithms.scaffold import Corrected
from fedkd.algorithms.steps import Proximal, supervised
from fedkd.core import tree
from fedkd.core.factors import Factors
from fedkd.core.fit import Descent, Fit, factored_together, gradient, slope
from fedkd.core.losses import Batch
from fedkd.core.optim import SGD
from fedkd.core.tree import Params, stack, take
from fedkd.data import batches as batches_of
from fedkd.models import dense
from fedkd.models.cnn import SmallCNN
from fedkd.models.mlp import DNN, MLR

SHAPE, CLIENTS, BATCH = (1, 8, 8), 3, 5


def batches() -> Batch:
    """Three clients' batches of 5, 5 and 3 samples, the last one padded."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.full((CLIENTS, BATCH), 1 / BATCH)
    weight[2] = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0, 0])
    x = torch.randn(CLIENTS, BATCH, *SHAPE, generator=generator)
    y = torch.randint(0, 10, (CLIENTS, BATCH), generator=generator)
    return Batch(x, y, weight, torch.arange(CLIENTS * BATCH).view(CLIENTS, BATCH))


def slopes(loss, net, models, *rest):
    """The gradients of stacked clients."""
    return factored_together(loss, net, models, *rest)[0].taken(models.weights)


@pytest.mark.parametrize("model", [MLR(), DNN(hidden=(7,)), DNN(hidden=(9, 6, 5)), DNN(hidden=(6,), projection=4)])
@pytest.mark.parametrize("loss", ["supervised", "proximal"])
def test_stacked_clients_have_the_gradients_they_have_alone(model, loss):
    net, batch = model.net(SHAPE, 10), batches()
    models = stack([net.init(seed) for seed in range(CLIENTS)])
    centre = stack([net.init(seed + 10) for seed in range(CLIENTS)])
    fn, rest = (supervised, ()) if loss == "supervised" else (Proximal(0.3), (centre,))

    def plain(net, w, *others):  # the same without its shortcuts
        return fn(net, w, *others)

    found = slopes(fn, net, models, batch, *rest)
    for client in range(CLIENTS):
        alone, _ = slope(plain, net, *take((models, batch, *rest), client))
        assert_close(take(found, client), alone, tolerance=1e-6)
        assert list(found) == list(alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["supervised", "proximal", "corrected"])
def test_a_gradient_that_is_followed_at_once_leads_where_it_leads_when_kept(loss, dtype):
    net, batch = DNN(hidden=(9, 6)).net(SHAPE, 10), batches()
    models, other = (stack([net.init(seed + start) for seed in range(CLIENTS)]) for start in (0, 10))
    fn, rest = {"supervised": (supervised, ()), "proximal": (Proximal(0.3), (other,)),
                "corrected": (Corrected(), (other.weights,))}[loss]  # fmt: skip
    found = slopes(lambda *parts: fn(*parts), net, models, batch, *rest)  # noqa: PLW0108 - no shortcut
    expected = tree.sub(models.weights, found, 0.1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
        factored_together(fn, net, models, batch, *rest)[0].follow(models.weights, 0.1)
    assert_close(models.weights, expected, tolerance=1e-6 if dtype is torch.float32 else 1e-2)


def test_the_gradients_of_several_models_of_a_client_are_those_of_each():
    net, batch = DNN(hidden=(9, 6)).net(SHAPE, 10), batches()
    models = stack([stack([net.init(10 * client + i) for i in range(4)]) for client in range(CLIENTS)])
    reads, logits = net.dense.trace(models.weights, batch.x)
    delta = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    factors = Factors()
    net.dense.retrace(models.weights, reads, delta, factors)
    found = factors.taken(models.weights)
    for client, i in itertools.product(range(CLIENTS), range(4)):
        one = take(take(models, client), i)
        alone, _ = gradient(lambda w, at=4 * client + i, x=batch.x[client]: (
            (net.forward(Params(w, {}), x).logits.mT * delta[at]).sum(), {}), one.weights)  # fmt: skip
        assert_close(take(take(found, client), i), alone)


def test_only_networks_that_are_linear_layers_with_relu_between_count_as_dense():
    assert MLR().net(SHAPE, 10).dense.layers == ["head"]
    assert DNN(hidden=(9, 6)).net(SHAPE, 10).dense.layers == ["features.1", "features.3", "head"]
    assert DNN(projection=4).net(SHAPE, 10).dense is None
    assert SmallCNN().net(SHAPE, 10).dense is None
    layers = nn.Flatten(), nn.Linear(4, 3)
    assert dense.of(nn.Sequential(*layers, nn.Tanh()), nn.Linear(3, 2)) is None
    assert dense.of(nn.Sequential(*layers), nn.Linear(3, 2)) is None  # no ReLU before the head
    assert dense.of(nn.Sequential(*layers, nn.ReLU()), nn.Linear(3, 2, bias=False)) is None
    assert dense.of(nn.Sequential(*layers, nn.ReLU()), nn.Identity()) is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("batch_size", [32, 20])  # whole registers, and not
def test_large_products_come_to_the_same(batch_size):
    """784-200-10: from 2^20 multiply-adds a client on, oneDNN takes them where it can."""
    draw = torch.Generator().manual_seed(0)
    net = DNN(hidden=(200,)).net((1, 28, 28), 10)
    models = stack([net.init(seed) for seed in range(CLIENTS)])
    x = torch.randn(CLIENTS, batch_size, 1, 28, 28, generator=draw)
    y = torch.randint(0, 10, (CLIENTS, batch_size), generator=draw)
    batch = Batch(x, y, torch.full(y.shape, 1 / batch_size), y)
    found = slopes(supervised, net, models, batch)
    alone = [slope(supervised, net, *take((models, batch), client))[0] for client in range(CLIENTS)]
    assert_close(found, stack(alone), tolerance=1e-5)
    expected = tree.sub(models.weights, found, 0.1)
    factored_together(supervised, net, models, batch)[0].follow(models.weights, 0.1)
    assert_close(models.weights, expected, tolerance=1e-6)


@pytest.mark.parametrize("loss", ["supervised", "proximal", "corrected"])
def test_a_whole_walk_leads_where_its_steps_lead(loss, monkeypatch):
    """Clients of 23, 9 and 4 samples, batches of 5, two epochs: 10, 4 and 2 steps, fetched five batches at a time."""
    monkeypatch.setattr(batches_of, "FETCHED", 5 * 5 * 16 * 4)
    data = images()
    net = DNN(hidden=(6,)).net(data.shape, data.classes)
    start, other = (stack([net.init(seed + first) for seed in range(CLIENTS)]) for first in (0, 10))
    fn, values = {"supervised": (supervised, ()), "proximal": (Proximal(0.3), (other,)),
                  "corrected": (Corrected(), (other.weights,))}[loss]  # fmt: skip
    rng = np.random.default_rng(0)
    walk = batches_of.epochs([np.arange(n) for n in (9, 23, 4)], 2, 5, lambda place, count: rng.permutation(count))
    stream = batches_of.Stream(data, walk, mean=True)
    descent, ranked = Descent(fn, SGD(0.1)), tree.rows((start, values), walk.order)

    whole = tree.map(torch.clone, ranked[0])
    assert descent.walk(net, Fit(whole, ()), stream.together(), *ranked[1])

    steps = tree.map(torch.clone, ranked[0])
    for t, alive in enumerate(walk.alive.tolist()):
        model, others = take((steps, ranked[1]), slice(alive))  # views, stepped in place
        descent.together(net, Fit(model, ()), stream.step(t), *others)
    assert_close(whole.weights, steps.weights, tolerance=1e-7)
    assert float(tree.squared_distance(whole.weights, ranked[0].weights)) > 0


def test_no_walk_for_momentum_losses_of_ones_own_and_other_networks():
    data = images()
    pieces = batches_of.Stream(data, batches_of.in_order([np.arange(4)], 2), mean=True).together()
    dnn, cnn = DNN(hidden=(6,)).net(data.shape, data.classes), SmallCNN().net(data.shape, data.classes)
    fit = Fit(stack([dnn.init(0)]), ())
    assert not Descent(supervised, SGD(0.1, momentum=0.9)).walk(dnn, fit, pieces)
    assert not Descent(lambda *parts: supervised(*parts), SGD(0.1)).walk(dnn, fit, pieces)  # noqa: PLW0108
    assert not Descent(supervised, SGD(0.1)).walk(cnn, Fit(stack([cnn.init(0)]), ()), pieces)
    assert not Descent(supervised, SGD(0.1)).walk(dnn, Fit(dnn.init(0), ()), pieces)
