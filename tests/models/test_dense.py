"""Cross-entropy's gradient written out, against autograd."""

import itertools

import pytest
import torch
from tiny import assert_close
from torch import nn

from fedkd.algorithms.scaffold import Corrected
from fedkd.algorithms.steps import Proximal, supervised
from fedkd.core import tree
from fedkd.core.fit import gradient, slope, slopes
from fedkd.core.losses import Batch
from fedkd.core.sinks import Follow, Kept
from fedkd.core.tree import Params, stack, take
from fedkd.models import dense
from fedkd.models.cnn import SmallCNN
from fedkd.models.dense import linear_layers
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


@pytest.mark.parametrize("model", [MLR(), DNN(hidden=(7,)), DNN(hidden=(9, 6, 5)), DNN(hidden=(6,), projection=4)])
@pytest.mark.parametrize("loss", ["supervised", "proximal"])
def test_stacked_clients_have_the_gradients_they_have_alone(model, loss):
    net, batch = model.net(SHAPE, 10), batches()
    models = stack([net.init(seed) for seed in range(CLIENTS)])
    centre = stack([net.init(seed + 10) for seed in range(CLIENTS)])
    fn, rest = (supervised, ()) if loss == "supervised" else (Proximal(0.3), (centre,))

    def plain(net, w, *others):  # the same without its shortcuts
        return fn(net, w, *others)

    found, _ = slopes(fn, net, models, batch, *rest)
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
    found, _ = slopes(lambda *parts: fn(*parts), net, models, batch, *rest)  # noqa: PLW0108 - no shortcut
    expected = tree.sub(models.weights, found, 0.1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
        follow = Follow(models.weights, 0.1)
        assert fn.hand(follow, net, models, batch, *rest)
        follow.flush()
    assert_close(models.weights, expected, tolerance=1e-6 if dtype is torch.float32 else 1e-2)


def test_the_gradients_of_several_models_of_a_client_are_those_of_each():
    net, batch = DNN(hidden=(9, 6)).net(SHAPE, 10), batches()
    models = stack([stack([net.init(10 * client + i) for i in range(4)]) for client in range(CLIENTS)])
    reads, logits = dense.forward(net.dense, models.weights, batch.x)
    delta = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    kept = Kept(models.weights)
    dense.backward(net.dense, models.weights, reads, delta, kept)
    for client, i in itertools.product(range(CLIENTS), range(4)):
        one = take(take(models, client), i)
        alone, _ = gradient(lambda w, at=4 * client + i, x=batch.x[client]: (
            (net.forward(Params(w, {}), x).logits.mT * delta[at]).sum(), {}), one.weights)  # fmt: skip
        assert_close(take(take(kept.found, client), i), alone)


def test_only_networks_that_are_linear_layers_with_relu_between_count_as_dense():
    assert MLR().net(SHAPE, 10).dense == ["head"]
    assert DNN(hidden=(9, 6)).net(SHAPE, 10).dense == ["features.1", "features.3", "head"]
    assert DNN(projection=4).net(SHAPE, 10).dense is None
    assert SmallCNN().net(SHAPE, 10).dense is None
    layers = nn.Flatten(), nn.Linear(4, 3)
    assert linear_layers(nn.Sequential(*layers, nn.Tanh()), nn.Linear(3, 2)) is None
    assert linear_layers(nn.Sequential(*layers), nn.Linear(3, 2)) is None  # no ReLU before the head
    assert linear_layers(nn.Sequential(*layers, nn.ReLU()), nn.Linear(3, 2, bias=False)) is None
    assert linear_layers(nn.Sequential(*layers, nn.ReLU()), nn.Identity()) is None
