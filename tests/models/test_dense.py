"""Cross-entropy's gradient written out, against autograd."""

import pytest
import torch
from tiny import assert_close
from torch import nn

from fedkd.algorithms.steps import proximal, supervised
from fedkd.core.fit import slope, slopes
from fedkd.core.losses import Batch
from fedkd.core.tree import stack, take
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
    centre = stack([net.init(seed + 10).weights for seed in range(CLIENTS)])
    fn, rest = (supervised, ()) if loss == "supervised" else (proximal, (centre, 0.3))

    def plain(net, w, *others):  # the same without its shortcuts
        return fn(net, w, *others)

    found, _ = slopes(fn, net, models, batch, *rest)
    for client in range(CLIENTS):
        own = [take(part, client) if part is centre else part for part in rest]
        alone, _ = slope(plain, net, take(models, client), take(batch, client), *own)
        assert_close(take(found, client), alone, tolerance=1e-6)
        assert list(found) == list(alone)


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
