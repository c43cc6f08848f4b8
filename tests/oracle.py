"""Softmax regression in plain floats: what the algorithms' oracles are written with, independent of fedkd.

A model is [w_0, w_1, b_0, b_1]: two classes, one input. The world has two clients.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedkd.algorithms.base import Algorithm
from fedkd.core.optim import Local
from fedkd.core.tree import Params
from fedkd.data.datasets import Images
from fedkd.data.partition import Assignment
from fedkd.data.public import Public
from fedkd.engine import Engine, Settings
from fedkd.federation.executors import choose
from fedkd.federation.fed import World
from fedkd.federation.population import Population
from fedkd.logger.base import Loggers
from fedkd.models.net import Architecture, Net, Split

# (input in 1/255, label): three samples at client 0, two at client 1
CLIENTS = [[(51, 0), (204, 1), (255, 1)], [(102, 1), (153, 0)]]
PUBLIC = [0, 128, 255]
LR = 0.5


def data(client):
    return [(x / 255, y) for x, y in CLIENTS[client]]


def scores(w, x):
    return [w[0] * x + w[2], w[1] * x + w[3]]


def softmax(z):
    top = max(z)
    e = [math.exp(v - top) for v in z]
    return [v / sum(e) for v in e]


def gradient(w, samples):
    """Of the mean cross-entropy: (p − y) x for the weights, (p − y) for the biases."""
    g = [0.0] * 4
    for x, y in samples:
        p = softmax(scores(w, x))
        for k in range(2):
            error = p[k] - (k == y)
            g[k] += error * x / len(samples)
            g[2 + k] += error / len(samples)
    return g


def sgd(w, g, lr=LR):
    return [a - lr * b for a, b in zip(w, g, strict=True)]


def average(models, weights):
    return [sum(p * m[i] for p, m in zip(weights, models, strict=True)) / sum(weights) for i in range(len(models[0]))]


@dataclass(frozen=True)
class _OneInput(Architecture):
    name = "one_input"

    def module(self, shape, classes):
        return Split(nn.Flatten(), nn.Linear(1, 2))


def federation(algorithm: Algorithm, tmp_path, *, epochs=2, executor="serial", participation=1.0) -> Engine:
    """The same world for fedkd: whole-shard steps, so that the order of samples does not matter."""
    samples = [sample for client in CLIENTS for sample in client]
    pixels = torch.tensor([x for x, _ in samples], dtype=torch.uint8).view(-1, 1, 1, 1)
    labels = torch.tensor([y for _, y in samples])
    zero, one = torch.zeros(1), torch.ones(1)
    images = Images(pixels, labels, len(samples), 2, zero, one)
    seen = torch.tensor(PUBLIC, dtype=torch.uint8).view(-1, 1, 1, 1)
    public = Images(seen, torch.full((len(PUBLIC),), -1), len(PUBLIC), 2, zero, one)
    owner = np.repeat([0, 1], [len(client) for client in CLIENTS]).astype(np.int32)
    assignment = Assignment(np.arange(5), owner, np.zeros(5, np.uint8), np.arange(0))
    net = Net(_OneInput(), (1, 1, 1), 2)
    population = Population.of(images, public, {"one_input": net}, np.zeros(2, np.int64), assignment)
    executors = {"one_input": choose(executor, net, torch.device("cpu"), None, "fp32")}
    world = World(population, executors, Local(epochs=epochs, batch_size=None, lr=LR), 3, 0, Public("npz"))
    return Engine(algorithm, world, Settings(participation=participation), tmp_path, Loggers({}), {})


def flat(model: Params | dict) -> list[float]:
    """A fedkd model (or its weights) as the oracle's list."""
    weights = model.weights if isinstance(model, Params) else model
    return [*weights["head.weight"].flatten().tolist(), *weights["head.bias"].flatten().tolist()]


def client(state, number: int):
    """Client `number`'s state, opened."""
    from fedkd.core import tree

    return tree.take(state.store.gather(np.array([number]))._stacks["one_input"], 0)
