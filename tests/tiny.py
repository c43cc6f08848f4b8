"""Worlds small enough to test every algorithm in: random 4x4 images, a handful of clients of unequal sizes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkd.algorithms.base import ALGORITHMS, Algorithm, OneModel, SharedModel
from fedkd.algorithms.steps import supervised
from fedkd.core.optim import Local
from fedkd.data.datasets import Images
from fedkd.data.partition import Assignment
from fedkd.data.public import Public
from fedkd.engine import Engine, Settings
from fedkd.federation.executors import choose
from fedkd.federation.fed import World
from fedkd.federation.population import Population
from fedkd.logger.base import Loggers
from fedkd.models.net import Architecture, Net
from fedkd.models.split import Split

CLASSES, SHAPE = 3, (1, 4, 4)
# where a paper's values would take seconds a round
QUICK = {name: {"steps": 12, "patience": 8, "check_every": 4} for name in ("feddf", "pfeddf")}
QUICK["fedgen"] = {"server_steps": 10}  # of more, one meets a kink of ReLU or |z_i - z_j| where rounding takes sides


@dataclass(frozen=True)
class Linear(Architecture):
    name = "linear"

    def module(self, shape, classes):
        return Split(nn.Flatten(), nn.Linear(16, classes))


@dataclass(frozen=True)
class Hidden(Architecture):
    name = "hidden"

    def module(self, shape, classes):
        return Split(nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU()), nn.Linear(5, classes))


@dataclass(frozen=True)
class Deep(Architecture):
    """As many features as `Hidden`, from a last stage of two layers."""

    name = "deep"

    def module(self, shape, classes):
        stage = (nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh())
        return Split(nn.Sequential(nn.Flatten(), *stage), nn.Linear(5, classes))


@dataclass(frozen=True)
class Normed(Architecture):
    """A convolution with batch statistics."""

    name = "normed"

    def module(self, shape, classes):
        body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
        return Split(body, nn.Linear(12, classes))


def images(device="cpu", samples=60, seed=0) -> Images:
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) % CLASSES
    pixels = rng.integers(0, 256, (samples, 4, 4, 1)) // 2 + 40 * labels[:, None, None, None]
    return Images(
        pixels=torch.from_numpy(pixels.astype(np.uint8)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        train=samples - 12,
        classes=CLASSES,
        mean=torch.tensor([0.4]),
        std=torch.tensor([0.3]),
    ).to(device)


HIDDEN = (Hidden(),)


def world(executor="serial", architectures=HIDDEN, local=None, device="cpu", rounds=2, seed=0, precision="fp32"):
    """Four clients with 5, 11, 7 and 13 training samples, 1 validation and 2 test samples each."""
    data = images(device)
    sizes = [5, 11, 7, 13]
    client = np.repeat(np.arange(4), [s + 3 for s in sizes])
    role = np.concatenate([[0] * s + [1, 2, 2] for s in sizes])
    assignment = Assignment(np.arange(48), client.astype(np.int32), role.astype(np.uint8), np.arange(0))
    nets = {a.name: Net(a, SHAPE, CLASSES) for a in architectures}
    public = images(device, samples=9, seed=1)
    public = replace(public, labels=torch.full_like(public.labels, -1))
    population = Population.of(data, public, nets, np.arange(4) % len(nets), assignment)
    executors = {name: choose(executor, net, torch.device(device), None, precision) for name, net in nets.items()}
    local = local or Local(epochs=2, batch_size=4, lr=0.1)
    return World(population, executors, local, rounds, seed, Public("npz", per_round=6))


def training_alone(of: World) -> World:
    """The same world with every sample black that is in no client's training split: nothing may depend on these."""
    rows = torch.from_numpy(np.concatenate(of.population.train.of(np.arange(4))))
    pixels = torch.zeros_like(of.population.images.pixels).index_copy(0, rows, of.population.images.pixels[rows])
    return replace(of, population=replace(of.population, images=replace(of.population.images, pixels=pixels)))


def engine(algorithm: Algorithm | str, directory: Path, settings: Any = None, **how: Any) -> Engine:
    method = ALGORITHMS[algorithm](**QUICK.get(algorithm, {})) if isinstance(algorithm, str) else algorithm
    if isinstance(how.get("executor", ""), str):
        how = {"world": world(**how)}
    return Engine(method, how["world"], settings or Settings(checkpoint_every=None), directory, Loggers({}), {})


@dataclass(frozen=True)
class EvenFedAvg(OneModel):
    """FedAvg whose clients count the same, as in SCAFFOLD and Per-FedAvg."""

    def round(self, server, own, fed):
        w = fed.fit(supervised, fed.down(server.w, "model"))
        return SharedModel(fed.up(w, "model").mean()), own


def everyone(state) -> Any:
    """All clients' states, opened."""
    return state.store.gather(np.arange(4))._stacks


def leaves(value) -> list[torch.Tensor]:
    from fedkd.core import tree

    return list(tree.leaves(value))


def assert_close(a, b, tolerance=1e-5) -> None:
    one, two = leaves(a), leaves(b)
    assert len(one) == len(two)
    for x, y in zip(one, two, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_equal(a, b) -> None:
    assert_close(a, b, tolerance=0)


def assert_reduced(a, b, executor) -> None:
    """To the bit where clients take the same steps one by one; stacked, a plain loss may go by quicker arithmetic."""
    assert_close(a, b, tolerance=0 if executor == "serial" else 1e-6)


def without_backward(monkeypatch) -> None:
    """Take autograd's gradients as zero, after real forward passes: its backward pass needs a real device."""
    monkeypatch.setattr(torch.autograd, "grad", lambda value, leaves, *_, **__: [torch.zeros_like(x) for x in leaves])
