"""Steps that several papers share, each a pure function of one client."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedkd.core.fit import Slope, written_out
from fedkd.core.losses import Batch, cross_entropy
from fedkd.core.optim import Weights
from fedkd.core.tree import Params, Rows, add, lerp, squared_distance, sub
from fedkd.models.dense import Follow, cross_entropy_slopes
from fedkd.models.net import Net


def supervised_slopes(net: Net, w: Params, batch: Batch) -> Weights | None:
    return None if net.dense is None else cross_entropy_slopes(net.dense, w.weights, batch)


def supervised_descent(rate: float, net: Net, w: Params, batch: Batch) -> bool:
    return descend_dense(net, w, batch, Follow(w.weights, rate))


def descend_dense(net: Net, at: Params, batch: Batch, follow: Follow) -> bool:
    """Follow the gradient of `supervised` at some models, if they are fully connected; clients stacked."""
    if net.dense is None:
        return False
    cross_entropy_slopes(net.dense, at.weights, batch, follow)
    return True


@written_out(supervised_slopes, supervised_descent)
def supervised(net: Net, w: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy on the client's labels: F_k(w)."""
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch), out.stats


@dataclass(frozen=True)
class Proximal:
    """F_k(w) + strength/2 ‖w − centre‖²: training on the client's labels, pulled towards another model."""

    strength: float

    def __call__(self, net: Net, w: Params, batch: Batch, centre: Params) -> tuple[Tensor, dict[str, Tensor]]:
        f, stats = supervised(net, w, batch)
        return f + self.strength / 2 * squared_distance(w.weights, centre.weights), stats

    def along(
        self, slope: Slope, net: Net, w: Params, batch: Batch, centre: Params
    ) -> tuple[Weights, dict[str, Tensor]]:
        """∇F_k(w) + strength (w − centre)."""
        g, stats = slope(supervised, net, w, batch)
        return add(g, sub(w.weights, centre.weights), self.strength), stats

    def descend(self, rate: float, net: Net, w: Params, batch: Batch, centre: Params) -> bool:
        return descend_dense(net, w, batch, Follow(w.weights, rate, centre.weights, self.strength))


class Pair(NamedTuple):
    """A personal model, and the model that it is pulled towards."""

    theta: Params
    omega: Weights


def envelope_round(
    slope: Slope, net: Net, pair: Pair, batch: Batch, *, lr: float, lambda_: float, steps: int, pull: float
) -> Pair:
    """Some steps of θ on one batch down f_i(θ) + λ/2 ‖θ − ω‖², then one of ω down its envelope; for `LeafByLeaf`.

    θ ← θ − lr (∇f_i(θ) + λ (θ − ω)), `steps` times; ω ← ω − pull (ω − θ).
    """
    theta, omega = pair
    for _ in range(steps):
        g, stats = slope(supervised, net, theta, batch)
        theta = Params(sub(lerp(theta.weights, omega, lr * lambda_), g, lr), stats)
    return Pair(theta, lerp(omega, theta.weights, pull))


def class_means(total: Tensor, weight: Tensor) -> Rows:
    """The means behind `class_sums`; a class without samples is absent."""
    return Rows(total / torch.where(weight > 0, weight, 1).unsqueeze(-1), weight > 0)


def class_sums(values: Tensor, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """By class, the sum of the batch's values, [classes, ...], and its samples, [classes]; for `fed.sum`."""
    of_class = batch.weight.unsqueeze(-1) * (batch.y.unsqueeze(-1) == torch.arange(classes, device=batch.y.device))
    total = (of_class.T @ values.flatten(1)).float()  # bf16 where autocast says so
    return total.view(classes, *values.shape[1:]), of_class.sum(0)
