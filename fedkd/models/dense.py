"""Fully connected networks of many clients at once, their gradients written out.

Autograd would come to the same, in twice the time where the networks are small: most of it is not arithmetic.
Everything lies [models, units, batch], so that gradients come out in the weights' own layout.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedkd.core import onednn
from fedkd.core.factors import Factors, followed
from fedkd.core.losses import Batch, cross_entropy_slope
from fedkd.core.onednn import LARGE, product
from fedkd.core.optim import Weights
from fedkd.core.unlocked import unlocked
from fedkd.models.written import Shown, Slope, Slopes, Written

WIDE = 16  # numbers that the processor takes at once


class Trace(NamedTuple):
    """A pass of stacked models through their layers."""

    reads: list[Tensor]  # what each layer reads, first to last
    logits: Tensor


class Dense(Written):
    """Linear layers with ReLU between; `layers` are their names, first to last.

    Weights have a first axis over clients. Where a client has several models, their axis being the weights' second, the
    first layers of all are one product.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__([f"{layer}.{part}" for layer in layers for part in ("weight", "bias")])
        self.layers = layers

    @staticmethod
    def stacked(weights: Weights) -> bool:
        return weights["head.weight"].dim() == 3

    def trace(self, weights: Weights, x: Tensor) -> Trace:
        *reads, logits = _forward(self.listed(weights), x, onednn.usable(x))
        return Trace(reads, logits)

    def retrace(
        self, weights: Weights, reads: list[Tensor], delta: Tensor, found: Factors, features: Tensor | None = None
    ) -> None:
        """Add the gradient behind `delta`, that of the logits, and behind that of the features."""
        self._add(_backward(self.listed(weights), reads, delta, features, onednn.usable(delta)), found)

    def turned(self, part: Tensor) -> Tensor:
        return part.mT

    def forward(self, weights: Weights, x: Tensor) -> tuple[Shown, Trace]:
        trace = self.trace(weights, x)
        return Shown(self.turned(trace.logits), self.turned(trace.reads[-1])), trace

    def backward(self, weights: Weights, memory: Trace, slopes: Slopes, found: Factors) -> None:
        logits, features = (None if slope is None else self.turned(slope) for slope in slopes)
        self.retrace(
            weights, memory.reads, torch.zeros_like(memory.logits) if logits is None else logits, found, features
        )

    def cross_entropy(self, weights: Weights, batch: Batch) -> Factors:
        found = Factors()
        self._add(_cross_entropy(self.listed(weights), batch, onednn.usable(batch.x)), found)
        return found

    def head(self, weights: Weights) -> list[Tensor]:
        return self.listed(weights)[-2:]

    def walking(self, slope: Slope | None) -> Callable[..., None]:
        return _walking(slope or of_labels)

    def _add(self, slopes: list[tuple[Tensor, Tensor, Tensor]], found: Factors) -> None:
        for i, (left, right, bias) in enumerate(slopes):
            found.product(self.names[2 * i], left, right)
            found.put(self.names[2 * i + 1], bias)


def _matmul(a: Tensor, b: Tensor, fast: bool, wide: int = WIDE) -> Tensor:
    """a b, matrix by matrix; as (bᵀ aᵀ)ᵀ where that suits the processor's registers better.

    Of AMD's processors (`fast`) it does where a row of b ends in half a register; of others, where the whole row fits
    into one, and b lies transposed. There it would else take up to three times as long.
    """
    short = b.size(2) <= wide and b.stride(1) == 1
    if b.size(2) % wide > 0 and (fast or short):
        return _products(b.mT, a.mT, fast).mT
    return _products(a, b, fast)


def _products(a: Tensor, b: Tensor, fast: bool, large: int = LARGE // 2) -> Tensor:
    if fast and a.size(1) * b.size(1) * b.size(2) >= large:
        return torch.stack([product(a[k], b[k].t()) for k in range(a.size(0))])
    return torch.bmm(a, b)


def _passed(weights: list[Tensor], x: Tensor, fast: bool) -> list[Tensor]:
    """What each layer reads, and the logits."""
    h = x.flatten(-3).mT
    found = [h]
    for i in range(0, len(weights), 2):
        weight, bias = weights[i], weights[i + 1]
        every = weight.view(h.size(0), -1, weight.size(-1))  # those of all units that read h
        y = _matmul(every, h, fast).add_(bias.reshape(h.size(0), -1, 1))
        h = y.reshape(-1, weight.size(-2), h.size(-1))
        if i + 2 < len(weights):
            h = h.relu_()
        found.append(h)
    return found


def _returned(
    weights: list[Tensor], reads: list[Tensor], delta: Tensor, features: Tensor | None, fast: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Layer by layer, first to last, the factors of the weight's gradient, and the bias's."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for i in range(len(reads) - 1, -1, -1):
        weight, h = weights[2 * i], reads[i]
        slope = delta.reshape(h.size(0), -1, delta.size(-1))  # of all units that read h
        found.insert(0, (slope, h.mT, slope.sum(-1)))
        if i > 0:
            below = _matmul(weight.view(-1, weight.size(-2), weight.size(-1)).mT, delta, fast)
            if features is not None and i == len(reads) - 1:
                below = below + features
            delta = torch.ops.aten.threshold_backward(below, h, 0)
    return found


@unlocked
def _forward(weights: list[Tensor], x: Tensor, fast: bool) -> list[Tensor]:
    return _passed(weights, x, fast)


@unlocked
def _backward(
    weights: list[Tensor], reads: list[Tensor], delta: Tensor, features: Tensor | None, fast: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    return _returned(weights, reads, delta, features, fast)


@unlocked
def _cross_entropy(weights: list[Tensor], batch: Batch, fast: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    reads = _passed(weights, batch.x, fast)
    delta = cross_entropy_slope(reads.pop(), batch, -2)
    return _returned(weights, reads, delta, None, fast)


def _first(tensors: list[Tensor] | None, count: int) -> list[Tensor]:
    return [] if tensors is None else [tensor[:count] for tensor in tensors]


def of_labels(
    logits: Tensor, features: Tensor, weights: list[Tensor], batch: Batch, values: list[Tensor]
) -> list[Tensor | None]:
    """Cross-entropy's slope."""
    return [cross_entropy_slope(logits, batch, -2)]


@cache
def _walking(slope: Slope) -> Callable[..., None]:
    """The walk along the gradient behind a slope."""

    @unlocked
    def walk(
        weights: list[Tensor],
        batches: Batch,
        alive: list[int],
        values: list[Tensor],
        rate: float,
        shift: list[Tensor] | None,
        centre: list[Tensor] | None,
        pull: float,
        fast: bool,
    ) -> None:
        at = 0
        for count in alive:
            till = at + count
            batch = Batch(batches.x[at:till], batches.y[at:till], batches.weight[at:till], batches.row[at:till])
            own, shifts, centres = _first(weights, count), _first(shift, count), _first(centre, count)
            reads = _passed(own, batch.x, fast)
            logits = reads.pop()
            by = slope(logits, reads[-1], own, batch, _first(values, count))
            delta, features = by[0], by[1] if len(by) > 1 else None
            if delta is None:
                delta = torch.zeros_like(logits)
            left: list[list[Tensor]] = []
            right: list[list[Tensor]] = []
            plus: list[list[Tensor]] = []
            towards: list[Tensor | None] = []
            for a, b, bias in _returned(own, reads, delta, features, fast):
                left += [[a], []]
                right += [[b], []]
                plus += [[], [bias]]
            for i in range(len(own)):
                if shift is not None:
                    plus[i].append(shifts[i])
                towards.append(None if centre is None else centres[i])
            for i, part in enumerate(by[2:]):
                if part is not None:
                    plus[len(own) - 2 + i].append(part)
            followed(own, left, right, plus, towards, [pull] * len(own), rate, fast)
            at = till

    return walk


def of(features: nn.Module, head: nn.Module) -> Dense | None:
    """The network that is these two, if it is linear layers with ReLU between; else None."""
    found: list[str] = []
    inner = list(features.named_children()) or [("", features)]
    for i, (name, layer) in enumerate(inner):
        expected = nn.Flatten if i == 0 else nn.Linear if i % 2 else nn.ReLU
        if not isinstance(layer, expected) or getattr(layer, "bias", True) is None:
            return None
        found += [f"features.{name}"] if expected is nn.Linear else []
    whole = len(inner) % 2 == 1 and isinstance(head, nn.Linear) and head.bias is not None
    return Dense([*found, "head"]) if whole else None
