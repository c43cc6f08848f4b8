"""Softmax regression in plain floats: what the algorithms' oracles are written with, independent of fedkd.

A model is [w_0, w_1, b_0, b_1]: two classes, one input. The world has two clients.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fedkd.algorithms.base import Algorithm
from fedkd.core.optim import Local
from fedkd.core.tree import Params
from fedkd.data.datasets import Images
from fedkd.data.partition import VALIDATION, Assignment
from fedkd.data.public import Public
from fedkd.engine import Engine, Settings
from fedkd.federation.executors import choose
from fedkd.federation.fed import World
from fedkd.federation.population import Population, Shards
from fedkd.logger.base import Loggers
from fedkd.models.net import Architecture, Net
from fedkd.models.split import Split

# (input in 1/255, label): three samples at client 0, two at client 1
CLIENTS = [[(51, 0), (204, 1), (255, 1)], [(102, 1), (153, 0)]]
HELD = [[0, 3], [1, 4]]  # the samples, counted through CLIENTS, on which the two clients validate, where they do
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


def differences(f, w, step=1e-5):
    """∇f by central differences: their error is of the order of 1e-10."""
    moved = [[v + s * (i == j) for j, v in enumerate(w)] for i in range(len(w)) for s in (step, -step)]
    return [(f(up) - f(down)) / (2 * step) for up, down in zip(moved[::2], moved[1::2], strict=True)]


class Adam:
    """β = (0.9, 0.999), ε = 1e-8, both moments corrected for their start at 0."""

    def __init__(self, size):
        self.t, self.first, self.second = 0, [0.0] * size, [0.0] * size

    def step(self, w, g, lr):
        self.t += 1
        self.first = [0.9 * m + 0.1 * d for m, d in zip(self.first, g, strict=True)]
        self.second = [0.999 * v + 0.001 * d * d for v, d in zip(self.second, g, strict=True)]
        unbiased = [
            (m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)) for m, v in zip(self.first, self.second, strict=True)
        ]
        return [a - lr * m / (math.sqrt(v) + 1e-8) for a, (m, v) in zip(w, unbiased, strict=True)]


def average(models, weights):
    return [sum(p * m[i] for p, m in zip(weights, models, strict=True)) / sum(weights) for i in range(len(models[0]))]


@dataclass(frozen=True)
class _OneInput(Architecture):
    name = "one_input"

    def module(self, shape, classes):
        return Split(nn.Flatten(), nn.Linear(1, 2))


@dataclass(frozen=True)
class Embedding(Architecture):
    """For what looks at features: `embed` and `classify`, a model being [a_0, a_1, b_00, b_01, b_10, b_11]."""

    name = "one_input"

    def module(self, shape, classes):
        body = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False), nn.Tanh())
        return Split(body, nn.Linear(2, 2, bias=False))


def embed(w, x):
    return [math.tanh(w[0] * x), math.tanh(w[1] * x)]


def classify(w, f):
    return softmax([w[2] * f[0] + w[3] * f[1], w[4] * f[0] + w[5] * f[1]])


def weights(model: Params) -> list[float]:
    """All weights of a fedkd model, as its layers lie."""
    return [v for weight in model.weights.values() for v in weight.flatten().tolist()]


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


def validated(run: Engine, held: list[list[int]] = HELD) -> Engine:
    """The oracle's world, with a validation split."""
    rows, owner = np.concatenate(held).astype(np.int64), np.repeat([0, 1], [len(h) for h in held]).astype(np.int32)
    assignment = Assignment(rows, owner, np.full(len(rows), VALIDATION, np.uint8), np.arange(0))
    population = replace(run.world.population, validation=Shards(assignment, VALIDATION, 2))
    run.world = replace(run.world, population=population)
    return run


def flat(model: Params | dict) -> list[float]:
    """A fedkd model (or its weights) as the oracle's list."""
    weights = model.weights if isinstance(model, Params) else model
    return [*weights["head.weight"].flatten().tolist(), *weights["head.bias"].flatten().tolist()]


def client(state, number: int):
    """Client `number`'s state, opened."""
    from fedkd.core import tree

    return tree.take(state.store.gather(np.array([number]))._stacks["one_input"], 0)
