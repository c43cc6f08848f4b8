"""Gradients in fully connected networks, written out for many clients at once.

Autograd would come to the same, in twice the time where the networks are small: most of it is not arithmetic.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedkd.core import onednn
from fedkd.core.losses import Batch, cross_entropy_slope
from fedkd.core.optim import Weights
from fedkd.core.sinks import Sink

threshold_backward = torch.ops.aten.threshold_backward.default  # the gradient behind a ReLU
Layers = list[str]


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


def backward(layers: Layers, weights: Weights, reads: list[Tensor], delta: Tensor, sink: Sink) -> None:
    """Hand the gradients behind `delta`, that of the logits, to `sink`, last layer first."""
    for layer, h in zip(reversed(layers), reversed(reads), strict=True):
        weight = weights[f"{layer}.weight"]
        slope = delta.reshape(len(h), -1, delta.shape[-1])  # of all units that read h
        if h is not reads[0]:  # before the sink changes the weight
            delta = threshold_backward(torch.bmm(weight.view(-1, *weight.shape[-2:]).mT, delta), h, 0)
        sink.product(f"{layer}.weight", slope, h.mT)
        sink.put(f"{layer}.bias", slope.sum(-1))


def _affine(weight: Tensor, h: Tensor, bias: Tensor) -> Tensor:
    """weight h + bias."""
    if onednn.gains(weight[0], h[0].mT, onednn.LARGE_OF_MANY):
        return torch.stack([onednn.product(w, one.mT) for w, one in zip(weight, h, strict=True)]).add_(bias)
    return torch.baddbmm(bias, weight, h)


def _for(h: Tensor, weight: Tensor) -> Tensor:
    """The weights of all units that read h, as a view."""
    return weight.view(len(h), -1, weight.shape[-1])


def cross_entropy(layers: Layers, weights: Weights, batch: Batch, sink: Sink) -> None:
    """Hand ∇ of each client's cross-entropy on its batch to `sink`; everything has a first axis over clients."""
    reads, logits = forward(layers, weights, batch.x)
    backward(layers, weights, reads, cross_entropy_slope(logits, batch, -2), sink)
