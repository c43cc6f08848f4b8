"""Where a written-out gradient goes, parameter by parameter: it is kept, or followed at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedkd.core import onednn
from fedkd.core.optim import Weights


class Sink(Protocol):
    """Takes gradients of one model, or of stacked ones, as they are found; what it takes for a parameter adds up."""

    def put(self, name: str, slope: Tensor) -> None:
        """`slope`, for the parameter of that name."""

    def product(self, name: str, a: Tensor, b: Tensor) -> None:
        """a b, of [..., outputs, batch] and [..., batch, inputs]."""

    def pulled(self, centre: Weights, strength: float) -> "Sink":
        """The same, to which `strength` · (weights − `centre`) is added; each parameter may be put there only once."""


class Kept:
    """Keeps all of it."""

    def __init__(self, weights: Mapping[str, Tensor], centre: Weights | None = None, strength: float = 0.0) -> None:
        self.weights, self.centre, self.strength = weights, centre, strength
        self._found: Weights = {}

    @property
    def found(self) -> Weights:
        """In the order and the shapes of the weights; zero where none came."""
        return {name: self._found[name] if name in self._found else w * 0 for name, w in self.weights.items()}

    def put(self, name: str, slope: Tensor) -> None:
        weight = self.weights[name]
        slope = slope.view_as(weight).to(weight.dtype)
        if self.centre is not None:
            slope = slope.add(weight - self.centre[name], alpha=self.strength)
        self._found[name] = self._found[name] + slope if name in self._found else slope

    def product(self, name: str, a: Tensor, b: Tensor) -> None:
        self.put(name, onednn.product(a, b.mT) if onednn.gains(a, b) else a @ b)

    def pulled(self, centre: Weights, strength: float) -> "Kept":
        also = Kept(self.weights, centre, strength)
        also._found = self._found
        return also


@dataclass(frozen=True)
class Follow:
    """Keeps none of it: into ← into − rate · gradient, in place, by the time of `flush`."""

    into: Weights
    rate: float
    centre: Weights | None = None
    strength: float = 0.0
    late: dict[str, Tensor] = field(default_factory=dict)  # small ones, to be followed all at once

    def put(self, name: str, slope: Tensor) -> None:
        if name in self.late:
            self.flush()
        weight = self._pull(name)
        self.late[name] = slope if slope.dim() == weight.dim() else slope.view_as(weight)

    def flush(self) -> None:
        torch._foreach_sub_([self.into[name] for name in self.late], list(self.late.values()), alpha=self.rate)
        self.late.clear()

    def product(self, name: str, a: Tensor, b: Tensor) -> None:
        """The product is added into the weights, unless the faster way to it cannot do that."""
        weight = self._pull(name)
        if weight.dim() > a.dim():  # several models of a client
            weight = weight.view(*a.shape[:-1], b.shape[-1])
        if a.dim() == 3 and onednn.gains(a[0], b[0], onednn.LARGE_OF_MANY):
            for w, one, other in zip(weight, a, b, strict=True):
                w.sub_(onednn.product(one, other.t()), alpha=self.rate)
        elif b.shape[-2] >= onednn.DEEP and onednn.gains(a, b):
            weight.sub_(onednn.product(a, b.t()), alpha=self.rate)
        elif a.dtype is weight.dtype:
            (weight.baddbmm_ if a.dim() == 3 else weight.addmm_)(a, b, alpha=-self.rate)
        else:  # a lower precision of products, by autocast
            weight.sub_(a @ b, alpha=self.rate)

    def pulled(self, centre: Weights, strength: float) -> "Follow":
        return replace(self, centre=centre, strength=strength)

    def _pull(self, name: str) -> Tensor:
        weight = self.into[name]
        return weight if self.centre is None else weight.lerp_(self.centre[name], self.rate * self.strength)


class Part(NamedTuple):
    """That part of another sink whose parameters have a prefix to their names."""

    whole: Sink
    prefix: str

    def put(self, name: str, slope: Tensor) -> None:
        self.whole.put(self.prefix + name, slope)

    def product(self, name: str, a: Tensor, b: Tensor) -> None:
        self.whole.product(self.prefix + name, a, b)

    def pulled(self, centre: Weights, strength: float) -> "Part":
        return Part(self.whole.pulled({self.prefix + name: c for name, c in centre.items()}, strength), self.prefix)
