"""Gradients in factors: that of a linear layer's weights is a product, which need not be taken to be followed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedkd.core import onednn
from fedkd.core.onednn import DEEP, LARGE, product
from fedkd.core.optim import Weights
from fedkd.core.unlocked import unlocked


class Beside(NamedTuple):
    """What is added to a gradient: shift + strength · (weights − centre); None is none of it."""

    shift: Weights | None = None
    centre: Weights | None = None
    strength: float = 0.0


@dataclass
class Terms:
    """One parameter's gradient: Σ left right + Σ plus + strength · (parameter − centre)."""

    left: list[Tensor] = field(default_factory=list)  # [..., outputs, batch]
    right: list[Tensor] = field(default_factory=list)  # [..., batch, inputs]
    plus: list[Tensor] = field(default_factory=list)
    centre: Tensor | None = None
    strength: float = 0.0


class Factors(dict[str, Terms]):
    """The gradient of one model, or of stacked ones, by parameter; what is given for a parameter adds up."""

    def put(self, name: str, slope: Tensor) -> None:
        """`slope`, for the parameter of that name."""
        self._terms(name).plus.append(slope)

    def product(self, name: str, left: Tensor, right: Tensor) -> None:
        """left right, for the parameter of that name."""
        terms = self._terms(name)
        terms.left.append(left)
        terms.right.append(right)

    def add(self, beside: Beside) -> None:
        """What is beside the gradient of all parameters; a centre only once."""
        for name, slope in (beside.shift or {}).items():
            self.put(name, slope)
        for name, centre in (beside.centre or {}).items():
            terms = self._terms(name)
            terms.centre, terms.strength = centre, beside.strength

    def named(self, prefix: str) -> "Factors":
        """For parameters whose names have a prefix."""
        return Factors({prefix + name: terms for name, terms in self.items()})

    def taken(self, weights: Mapping[str, Tensor]) -> Weights:
        """The gradient itself, in the order and the shapes of the weights; zero where there is none."""
        return {name: _taken(self[name], w) if name in self else w * 0 for name, w in weights.items()}

    def follow(self, weights: Weights, rate: float) -> None:
        """weights ← weights − rate · gradient, in place."""
        own, terms = [weights[name] for name in self], self.values()
        left, right, plus = [t.left for t in terms], [t.right for t in terms], [t.plus for t in terms]
        pulls = [rate * t.strength for t in terms]
        _follow(own, left, right, plus, [t.centre for t in terms], pulls, rate, onednn.usable(own[0]))

    def followed(self, weights: Weights, rate: float) -> Weights:
        """weights − rate · gradient, beside the weights."""
        moved = {name: w.clone() for name, w in weights.items()}
        self.follow(moved, rate)
        return moved

    def _terms(self, name: str) -> Terms:
        return self.setdefault(name, Terms())


def _taken(terms: Terms, weight: Tensor) -> Tensor:
    pairs = zip(terms.left, terms.right, strict=True)
    products = [product(a, b.mT) if onednn.gains(a, b) else a @ b for a, b in pairs]
    first, *others = [part.view_as(weight).to(weight.dtype) for part in (*products, *terms.plus)]
    for part in others:
        first = first + part
    return first if terms.centre is None else first.add(weight - terms.centre, alpha=terms.strength)


def _deep(left: Tensor, right: Tensor, deep: int = DEEP, large: int = LARGE) -> bool:
    """Whether oneDNN's product, subtracted, is faster than one that torch adds into a client's weights."""
    return right.size(-2) >= deep and left.size(-2) * left.size(-1) * right.size(-1) >= large


def _follow_one(
    weight: Tensor,
    left: list[Tensor],
    right: list[Tensor],
    plus: list[Tensor],
    centre: Tensor | None,
    pull: float,
    rate: float,
    fast: bool,
) -> None:
    """One parameter, of one client or of stacked ones."""
    if centre is not None:
        weight.lerp_(centre, pull)
    for a, b in zip(left, right):  # noqa: B905 - `strict` is not in TorchScript's language
        if fast and a.dim() == 2 and _deep(a, b):
            weight.sub_(product(a, b.t()), alpha=rate)
        elif a.dtype != weight.dtype:  # a lower precision of products, by autocast
            weight.sub_((a @ b).view_as(weight), alpha=rate)
        elif a.dim() == 3:  # a client may have several models
            weight.view(a.size(0), a.size(1), b.size(2)).baddbmm_(a, b, alpha=-rate)
        else:
            weight.addmm_(a, b, alpha=-rate)
    for slope in plus:
        weight.sub_(slope.view_as(weight), alpha=rate)


def followed(
    weights: list[Tensor],
    left: list[list[Tensor]],
    right: list[list[Tensor]],
    plus: list[list[Tensor]],
    centres: list[Tensor | None],
    pulls: list[float],
    rate: float,
    fast: bool,
) -> None:
    """Parameter by parameter; written for TorchScript."""
    for i, weight in enumerate(weights):
        a, b, c, centre = left[i], right[i], plus[i], centres[i]
        if fast and len(a) > 0 and weight.dim() == a[0].dim() == 3 and _deep(a[0], b[0]):
            for k in range(weight.size(0)):  # client by client, whose weights stay in the cache meanwhile
                own = None if centre is None else centre[k]
                parts = [t[k] for t in a], [t[k] for t in b], [t[k] for t in c]
                _follow_one(weight[k], parts[0], parts[1], parts[2], own, pulls[i], rate, fast)
        else:
            _follow_one(weight, a, b, c, centre, pulls[i], rate, fast)


_follow = unlocked(followed)
