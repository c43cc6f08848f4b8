"""Tables over the clients' training samples: what is taken once a round instead of at every step."""

import numpy as np
import pytest
import torch
from tiny import Deep, Hidden, Normed, world

from fedkd.core.fit import of_passes
from fedkd.core.losses import looked_up
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger
from fedkd.federation.placed import Placed

EXECUTORS = ("serial", "vmapped")
COHORT = np.array([3, 0, 2])  # of 13, 5 and 7 samples


def federation(executor, architectures):
    return Federation(world(executor, architectures), 1, COHORT, Ledger())


def models(fed):
    """Another one at every client."""
    groups = {arch: [i for i, own in enumerate(fed.archs) if own == arch] for arch in fed.archs}
    nets = fed.nets
    made = {arch: [nets[arch].init(10 + i) for i in places] for arch, places in groups.items()}
    return Placed({arch: torch.utils._pytree.tree_map(lambda *w: torch.stack(w), *own) for arch, own in made.items()})


def features(net, batch, w):
    return net.features(w, batch.x)


@of_passes
def same_features(net, batch, w):
    return features(net, batch, w)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("fn", [features, same_features])
@pytest.mark.parametrize("architectures", [(Hidden(),), (Hidden(), Deep()), (Normed(),)], ids=lambda of: of[-1].name)
def test_in_training_a_batch_finds_its_samples_rows(executor, architectures, fn):
    fed = federation(executor, architectures)
    w, width = models(fed), next(iter(fed.nets.values())).feature_size
    table = fed.table(fn, width, w)

    def step(net, total, batch, table, w):
        found, expected = looked_up(table, batch.row), features(net, batch, w)
        error = (batch.weight[:, None] * (found - expected)).abs().sum()
        return total + torch.stack([error, (batch.weight[:, None] * found).abs().sum()])

    start = fed.each(lambda net, w: torch.zeros(2), w)
    for error, size in fed.up(fed.train(step, start, table, w), "errors"):
        assert error < 1e-5
        assert size > 0.1


def test_a_table_is_counted_nowhere():
    """It stays where it was made: at the clients."""
    fed = federation("serial", (Hidden(),))
    fed.table(features, 5, models(fed))
    assert fed.crossed == []
