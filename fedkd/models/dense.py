"""Gradients in fully connected networks, written out for many clients at once.

Autograd would come to the same, in twice the time where the networks are small: most of it is not arithmetic.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedkd.core.losses import Batch
from fedkd.models import onednn

threshold_backward = torch.ops.aten.threshold_backward.default  # the gradient behind a ReLU
LARGE = 2**24  # multiply-adds of products that are taken one by one, by oneDNN, instead of all at once
Layers = list[str]
Weights = dict[str, Tensor]


def linear_layers(features: nn.Module, head: nn.Module) -> Layers | None:
    """The names of the linear layers, first to last, of a network that is these with ReLU between; None: it is not."""
    found: list[str] = []
    inner = list(features.named_children()) or [("", features)]
    for i, (name, layer) in enumerate(inner):
        expected = nn.Flatten if i == 0 else nn.Linear if i % 2 else nn.ReLU
        if not isinstance(layer, expected) or getattr(layer, "bias", True) is None:
            return None
        found += [f"features.{name}"] if expected is nn.Linear else []
    whole = len(inner) % 2 == 1 and isinstance(head, nn.Linear) and head.bias is not None
    return [*found, "head"] if whole else None


class Trace(NamedTuple):
    """A pass of stacked models through their layers."""

    reads: list[Tensor]  # what each layer reads, first to last
    logits: Tensor


def forward(layers: Layers, weights: Weights, x: Tensor) -> Trace:
    """The logits of models with a first axis over clients, on each client's batch; see `backward`.

    Everything lies [models, units, batch], so that gradients come out in the weights' own layout. Where a client has
    several models, their axis being the weights' second, the first layers of all are one product.
    """
    reads, h = [], x.flatten(-3).mT
    for layer in layers:
        reads.append(h)
        weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
        h = _affine(_for(h, weight), h, bias.reshape(len(h), -1, 1)).view(-1, weight.shape[-2], h.shape[-1])
        if layer is not layers[-1]:
            h = h.relu_()
    return Trace(reads, h)


class Follow(NamedTuple):
    """What to do with a gradient at once, in place: into ← into − rate · (gradient + strength · (into − centre))."""

    into: Weights
    rate: float
    centre: Weights | None = None
    strength: float = 0.0


def backward(
    layers: Layers, weights: Weights, reads: list[Tensor], delta: Tensor, follow: Follow | None = None
) -> Weights:
    """The gradients behind `delta`, that of the logits; where they are followed at once, none is kept."""
    found: Weights = {}
    for layer, h in zip(reversed(layers), reversed(reads), strict=True):
        names = f"{layer}.weight", f"{layer}.bias"
        weight, bias = (weights[name] for name in names)
        slope = delta.reshape(len(h), -1, delta.shape[-1])  # of all units that read h
        if h is not reads[0]:
            delta = threshold_backward(torch.bmm(weight.view(-1, *weight.shape[-2:]).mT, delta), h, 0)
        if follow is not None:
            weight, bias = (follow.into[name] for name in names)
            if follow.centre is not None:
                for name in names:
                    follow.into[name].lerp_(follow.centre[name], follow.rate * follow.strength)
            _descend(_for(h, weight), slope, h, follow.rate)
            bias.sub_(slope.sum(-1).view_as(bias), alpha=follow.rate)
        else:
            found[names[0]] = torch.bmm(slope, h.mT).view_as(weight).to(weight.dtype)
            found[names[1]] = slope.sum(-1).view_as(bias).to(bias.dtype)
    return {name: found[name] for name in weights if name in found}


def _affine(weight: Tensor, h: Tensor, bias: Tensor) -> Tensor:
    """weight h + bias."""
    if onednn.gains(weight[0], h[0].mT, LARGE):
        return torch.stack([onednn.product(w, one.mT) for w, one in zip(weight, h, strict=True)]).add_(bias)
    return torch.baddbmm(bias, weight, h)


def _descend(weight: Tensor, slope: Tensor, h: Tensor, rate: float) -> None:
    """weight ← weight − rate · slope hᵀ."""
    if onednn.gains(slope[0], h[0], LARGE):
        for w, s, one in zip(weight, slope, h, strict=True):
            w.sub_(onednn.product(s, one), alpha=rate)
    elif slope.dtype is weight.dtype:
        weight.baddbmm_(slope, h.mT, alpha=-rate)
    else:  # a lower precision of products, by autocast
        weight.sub_(torch.bmm(slope, h.mT), alpha=rate)


def _for(h: Tensor, weight: Tensor) -> Tensor:
    """The weights of all units that read h, as a view."""
    return weight.view(len(h), -1, weight.shape[-1])


def cross_entropy_slopes(layers: Layers, weights: Weights, batch: Batch, follow: Follow | None = None) -> Weights:
    """∇ of each client's cross-entropy on its batch; everything has a first axis over clients."""
    reads, logits = forward(layers, weights, batch.x)
    delta = torch.softmax(logits, -2)
    delta.scatter_add_(-2, batch.y.unsqueeze(-2), delta.new_tensor(-1).expand_as(batch.y).unsqueeze(-2))
    return backward(layers, weights, reads, delta.mul_(batch.weight.unsqueeze(-2)), follow)
