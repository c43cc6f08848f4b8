"""A world whose clients form groups: all see the same three kinds of images, each group has other names for them."""

from itertools import permutations

import numpy as np
import torch
from tiny import CLASSES, SHAPE, Linear, engine

from fedkd.core.optim import Local
from fedkd.data.datasets import Images
from fedkd.data.partition import Assignment
from fedkd.data.public import Public
from fedkd.federation.executors import choose
from fedkd.federation.fed import World
from fedkd.federation.population import Population
from fedkd.models.net import Net

SAMPLES = 30  # a client


def grouped(groups: int, clients: int = 12, seed: int = 0) -> World:
    """Client i is of group i mod `groups` (at most 6, the ways to name three things)."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, CLASSES, clients * SAMPLES)
    owner = np.repeat(np.arange(clients), SAMPLES)
    names = np.array(list(permutations(range(CLASSES))))
    labels = names[owner % groups, kind]
    pixels = rng.integers(0, 180, (CLASSES, 4, 4, 1))[kind] + rng.integers(0, 76, (len(kind), 4, 4, 1))
    images = Images(
        pixels=torch.from_numpy(pixels.astype(np.uint8)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        train=len(kind),
        classes=CLASSES,
        mean=torch.tensor([0.5]),
        std=torch.tensor([0.25]),
    )
    role = np.zeros(len(kind), np.uint8)
    assignment = Assignment(np.arange(len(kind)), owner.astype(np.int32), role, np.arange(0))
    net = Net(Linear(), SHAPE, CLASSES)
    population = Population.of(images, None, {"linear": net}, np.zeros(clients, np.int64), assignment)
    executors = {"linear": choose("vmapped", net, torch.device("cpu"), None, "fp32")}
    return World(population, executors, Local(batch_size=20, lr=0.05), 4, seed, Public("none"))


def ran(algorithm, directory, world: World, rounds: int = 1):
    """The run and its state after some rounds."""
    run = engine(algorithm, directory, world=world, executor=None)
    state = run.start()
    for _ in range(rounds):
        run.advance(state)
    return run, state
