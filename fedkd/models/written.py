"""Networks whose gradients are written out, and what a loss sees of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkd.core import onednn
from fedkd.core.factors import Beside, Factors
from fedkd.core.losses import Batch, Piece
from fedkd.core.optim import Weights
from fedkd.core.tree import Params


class Shown(NamedTuple):
    """What a pass shows."""

    logits: Tensor
    features: Tensor  # what enters the head


class Slopes(NamedTuple):
    """The gradient by what a pass has shown; None: nothing depends on it."""

    logits: Tensor | None
    features: Tensor | None = None


# slope(logits, features, weights, batch, values) -> the gradient by logits, that by features, the head's weight, its
# bias, or the first alone; None: zero. Logits and features lie as the network computes them.
Slope = Callable[[Tensor, Tensor, list[Tensor], Batch, list[Tensor]], list[Tensor | None]]


class Written(ABC):
    """A network, for one client or for stacked ones; `names` are those of its parameters, first layer to last."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    @abstractmethod
    def forward(self, weights: Weights, x: Tensor) -> tuple[Shown, Any]:
        """What a training pass shows, and what the way back needs of it."""

    @abstractmethod
    def backward(self, weights: Weights, memory: Any, slopes: Slopes, found: Factors) -> None:
        """Add the gradient by the weights to what is found."""

    @abstractmethod
    def cross_entropy(self, weights: Weights, batch: Batch) -> Factors:
        """The gradient of cross-entropy on the batch."""

    @abstractmethod
    def walking(self, slope: Slope | None) -> Callable[..., None]:
        """The way along the gradient behind a slope (None: cross-entropy's), for `walk`; it needs no Python."""

    @abstractmethod
    def turned(self, part: Tensor) -> Tensor:
        """Logits or features as they are shown, [..., batch, units], from how they lie here; and back."""

    @abstractmethod
    def head(self, weights: Weights) -> list[Tensor] | None:
        """The head's weight and bias, if that is all it has."""

    def walk(
        self,
        weights: Weights,
        piece: Piece,
        rate: float,
        beside: Beside,
        slope: Slope | None = None,
        values: Sequence[Tensor] = (),
    ) -> None:
        """Follow the gradient behind a slope, which is given `values`, through a piece of a stream, in place."""
        shift, centre = (None if part is None else self.listed(part) for part in (beside.shift, beside.centre))
        pull, fast = rate * beside.strength, onednn.usable(piece.batches.x)
        self.walking(slope)(self.listed(weights), *piece, [*values], rate, shift, centre, pull, fast)

    def listed(self, weights: Weights) -> list[Tensor]:
        return [weights[name] for name in self.names]


class Seen(NamedTuple):
    """What a loss sees of a training pass: an `Output` without the last stage."""

    logits: Tensor
    features: Tensor
    stats: dict[str, Tensor]


class Tape:
    """A net as a loss sees it whose gradient is wanted: training passes are kept, to come back to.

    Autograd has only the loss to go through, down to what the passes have shown.
    """

    def __init__(self, net: Any, written: Written) -> None:
        self.classes, self.feature_size = net.classes, net.feature_size
        self.predict, self.features = net.predict, net.features  # of models that are not trained
        self._net, self._written = net, written
        self._passes: list[tuple[Weights, Any, Shown]] = []
        self._heads: list[Weights] = []

    def forward(self, model: Params, x: Tensor) -> Seen:
        with torch.no_grad():
            shown, memory = self._written.forward(model.weights, x)
        shown = Shown(*(part.detach().requires_grad_() for part in shown))
        self._passes.append((model.weights, memory, shown))
        return Seen(*shown, model.stats)

    def head(self, model: Params, features: Tensor) -> Tensor:
        own = {name: w.detach().requires_grad_() for name, w in model.weights.items() if name.startswith("head.")}
        self._heads.append(own)
        return self._net.head(Params(own, {}), features)  # type: ignore[no-any-return]

    def gradient(self, value: Tensor) -> Factors:
        """∇ value by the weights of the one model that was trained."""
        shown = [part for *_, parts in self._passes for part in parts]
        own = [leaf for head in self._heads for leaf in head.values()]
        slopes = iter(torch.autograd.grad(value, [*shown, *own], torch.ones_like(value), allow_unused=True))
        found = Factors()
        for weights, memory, _ in self._passes:
            self._written.backward(weights, memory, Slopes(next(slopes), next(slopes)), found)
        for name, slope in zip((name for head in self._heads for name in head), slopes, strict=True):
            if slope is not None:
                found.put(name, slope)
        return found
