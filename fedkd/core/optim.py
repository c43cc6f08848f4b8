"""Local training's settings and its optimisers, as pure functions of (weights, gradient, state)."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedkd.core import tree

Weights = dict[str, Tensor]
State = tree.Tree


class Optimizer(Protocol):
    """`update` may write its results where `weights`, `gradient` and `state` were."""

    stacks: ClassVar[bool]  # whether `update` reads the same for several clients, stacked

    @property
    def plain_rate(self) -> float | None:
        """The lr of an update that is w ← w − lr·g and nothing else."""

    def init(self, weights: Weights) -> State: ...
    def update(self, weights: Weights, gradient: Weights, state: State) -> tuple[Weights, State]: ...


@dataclass(frozen=True)
class SGD:
    """w ← w − lr·v with v ← momentum·v + g + weight_decay·w, as torch.optim.SGD."""

    stacks: ClassVar[bool] = True

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def plain_rate(self) -> float | None:
        return None if self.momentum or self.weight_decay else self.lr

    def init(self, weights: Weights) -> State:
        return tree.zeros_like(weights) if self.momentum else ()

    def update(self, weights: Weights, gradient: Weights, state: State) -> tuple[Weights, State]:
        if self.weight_decay:
            gradient = tree.map(lambda g, w: g.add_(w, alpha=self.weight_decay), gradient, weights)
        if self.momentum:
            state = gradient = tree.map(lambda v, g: v.mul_(self.momentum).add_(g), state, gradient)
        return tree.map(lambda w, g: w.sub_(g, alpha=self.lr), weights, gradient), state


class Moments(NamedTuple):
    """Adam's state."""

    first: Weights
    second: Weights
    step: Tensor


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam with its default β = (0.9, 0.999) and ε = 1e-8; weight decay is added to the gradient."""

    stacks: ClassVar[bool] = False
    plain_rate: ClassVar[None] = None

    lr: float
    weight_decay: float = 0.0

    def init(self, weights: Weights) -> State:
        one = next(iter(weights.values()))
        return Moments(tree.zeros_like(weights), tree.zeros_like(weights), one.new_zeros(()))

    def update(self, weights: Weights, gradient: Weights, state: State) -> tuple[Weights, State]:
        if self.weight_decay:
            gradient = tree.map(lambda g, w: g.add_(w, alpha=self.weight_decay), gradient, weights)
        step = state.step + 1
        first = tree.map(lambda m, g: m.mul_(0.9).add_(g, alpha=0.1), state.first, gradient)
        second = tree.map(lambda v, g: v.mul_(0.999).add_(g * g, alpha=0.001), state.second, gradient)
        rate, root = self.lr / (1 - 0.9**step), torch.sqrt(1 - 0.999**step)
        weights = tree.map(lambda w, m, v: w.sub_(m * rate / v.sqrt().div_(root).add_(1e-8)), weights, first, second)
        return weights, Moments(first, second, step)


@dataclass(frozen=True)
class Clipped:
    """An optimiser whose gradients are first shortened to a length of at most `norm`, all weights taken together."""

    stacks: ClassVar[bool] = False
    plain_rate: ClassVar[None] = None

    optimizer: Optimizer
    norm: float

    def init(self, weights: Weights) -> State:
        return self.optimizer.init(weights)

    def update(self, weights: Weights, gradient: Weights, state: State) -> tuple[Weights, State]:
        length = tree.dot(gradient, gradient).sqrt()
        factor = torch.where(length > self.norm, self.norm / length, 1.0)
        return self.optimizer.update(weights, tree.scale(factor, gradient), state)


OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("constant", "cosine", "step", "exponential")


@dataclass(frozen=True)
class Local:
    """How every client trains: the config node `local`.

    Parameters
    ----------
    epochs, steps : passes over the client's data, or iterations; where `steps` is given it counts.
    batch_size : samples a step; None is the whole shard, one step an epoch.
    lr, optimizer, momentum, weight_decay : of `sgd` or `adam` (which has no momentum).
    schedule : of the learning rate over rounds: `constant`, `cosine` (to 0 at the last round), `step` (times `decay`
        every `decay_every` rounds), `exponential` (times `decay` every round).
    """

    epochs: int | None = 5
    steps: int | None = None
    batch_size: int | None = 32
    lr: float = 0.1
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    decay: float = 0.5
    decay_every: int = 10

    def lr_at(self, round: int, rounds: int) -> float:
        """The learning rate of round 1, 2, ..., rounds."""
        done = round - 1
        factor = {
            "constant": 1.0,
            "cosine": (1 + math.cos(math.pi * done / rounds)) / 2,
            "step": self.decay ** (done // self.decay_every),
            "exponential": self.decay**done,
        }[self.schedule]
        return self.lr * factor

    def optimizer_at(self, lr: float) -> Optimizer:
        if self.optimizer == "adam":
            return Adam(lr, self.weight_decay)
        return SGD(lr, self.momentum, self.weight_decay)

    def problems(self) -> list[str]:
        """What is wrong with these settings, if anything."""
        found = []
        if self.epochs is None and self.steps is None:
            found.append("local.epochs and local.steps are both null: give one, e.g. local.epochs=5 or local.steps=50.")
        for name in ("epochs", "steps", "batch_size", "decay_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"local.{name}={value} must be at least 1.")
        if self.lr <= 0:
            found.append(f"local.lr={self.lr} must be positive.")
        if self.optimizer not in OPTIMIZERS:
            found.append(f"local.optimizer={self.optimizer} does not exist; there are {', '.join(OPTIMIZERS)}.")
        if self.schedule not in SCHEDULES:
            found.append(f"local.schedule={self.schedule} does not exist; there are {', '.join(SCHEDULES)}.")
        if self.optimizer == "adam" and self.momentum:
            found.append(f"local.momentum={self.momentum} has no meaning with local.optimizer=adam; leave it 0.")
        return found
