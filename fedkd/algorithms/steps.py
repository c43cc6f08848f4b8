"""Steps that several papers share, each a pure function of one client."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedkd.core import tree
from fedkd.core.factors import Beside, Factors
from fedkd.core.fit import Descent, Fit, written_out
from fedkd.core.losses import Batch, cross_entropy
from fedkd.core.optim import SGD, Weights
from fedkd.core.tree import Params, Rows, squared_distance
from fedkd.models.net import Net


def hand_supervised(net: Net, w: Params, batch: Batch) -> Factors | None:
    return net.cross_entropy(w.weights, batch)


@written_out(hand_supervised, Net.walk)
def supervised(net: Net, w: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy on the client's labels: F_k(w)."""
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch), out.stats


@dataclass(frozen=True)
class Proximal:
    """F_k(w) + strength/2 ‖w − centre‖²: training on the client's labels, pulled towards another model."""

    bare = staticmethod(supervised)

    strength: float

    def __call__(self, net: Net, w: Params, batch: Batch, centre: Params) -> tuple[Tensor, dict[str, Tensor]]:
        f, stats = supervised(net, w, batch)
        return f + self.strength / 2 * squared_distance(w.weights, centre.weights), stats

    def beside(self, centre: Params) -> Beside:
        return Beside(centre=centre.weights, strength=self.strength)


class Pair(NamedTuple):
    """A personal model, and the model that it is pulled towards."""

    theta: Params
    omega: Weights


@dataclass(frozen=True)
class Envelope:
    """A step on one batch: `steps` of θ down F_k(θ) + λ/2 ‖θ − ω‖², then one of ω down that function's envelope.

    θ ← θ − lr (∇F_k(θ) + λ (θ − ω)), `steps` times; ω ← ω − pull (ω − θ). Like `Descent`, it writes over its carry.
    """

    in_place: ClassVar[bool] = True

    lr: float
    lambda_: float
    steps: int
    pull: float

    def __call__(self, net: Net, pair: Pair, batch: Batch) -> Pair:
        return self._round(self._descent, net, pair, batch)

    def together(self, net: Net, pair: Pair, batch: Batch) -> Pair:
        return self._round(self._descent.together, net, pair, batch)

    @cached_property
    def _descent(self) -> Descent:
        return Descent(Proximal(self.lambda_), SGD(self.lr))

    def _round(self, descend: Callable[..., Fit], net: Net, pair: Pair, batch: Batch) -> Pair:
        fit, omega = Fit(pair.theta, ()), pair.omega
        for _ in range(self.steps):
            fit = descend(net, fit, batch, Params(omega, {}))
        return Pair(fit.model, tree.map(lambda w, theta: w.lerp_(theta, self.pull), omega, fit.model.weights))


def class_means(total: Tensor, weight: Tensor) -> Rows:
    """The means behind `class_sums`; a class without samples is absent."""
    return Rows(total / torch.where(weight > 0, weight, 1).unsqueeze(-1), weight > 0)


def class_sums(values: Tensor, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """By class, the sum of the batch's values, [classes, ...], and its samples, [classes]; for `fed.sum`."""
    of_class = batch.weight.unsqueeze(-1) * (batch.y.unsqueeze(-1) == torch.arange(classes, device=batch.y.device))
    total = (of_class.mT @ values.reshape(*batch.y.shape, -1)).float()  # bf16 where autocast says so
    return total.view(*total.shape[:-1], *values.shape[batch.y.dim() :]), of_class.sum(-2)
