"""One client's convolutional network as a chain of layers, its gradients written out.

Autograd comes to the same in a fifth more time: it has Python's lock more often than two threads can share it, keeps
gradients that are only made to be followed, and sums those of a bias over all of a map, not over its pooled quarter.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.function import once_differentiable

from fedkd.core import onednn
from fedkd.core.factors import Factors, followed
from fedkd.core.losses import Batch, cross_entropy_slope
from fedkd.core.optim import Weights
from fedkd.core.unlocked import unlocked
from fedkd.models.layers import Dropout, Flatten, Linear
from fedkd.models.links import NONE, SIDES, Found, Link, passed, returned
from fedkd.models.split import Pass, Split
from fedkd.models.written import Shown, Slope, Slopes, Written

KINDS: dict[type[nn.Module], str] = {
    nn.Conv2d: "convolution",
    nn.MaxPool2d: "pool",
    nn.ReLU: "rectifier",
    Dropout: "dropping",
    Flatten: "flattening",
    Linear: "affine",
}


class Places(NamedTuple):
    """Where in a chain a `Pass` is taken: behind so many links."""

    logits: int
    features: int
    stage_in: int
    stage_out: int


class Chain(Written):
    """A network's links, and the places between them that are seen."""

    def __init__(self, names: Sequence[str], links: list[Link], seen: Places) -> None:
        super().__init__(names)
        self.links, self.seen = links, seen
        self.shown = sorted({*seen} - {0})

    def serves(self, x: Tensor) -> bool:
        """Whether it can be used: not under vmap, in a lower precision, or for the gradient by the images."""
        plain = peek_interpreter_stack() is None and not torch.is_autocast_enabled(x.device.type)
        return plain and not x.requires_grad

    def show(self, weights: Weights, x: Tensor) -> Pass:
        """A training pass that autograd can come back to."""
        shown: tuple[Tensor, ...] = Whole.apply(self, x, *self.listed(weights))
        values = {0: x, **dict(zip(self.shown, shown, strict=True))}
        return Pass(*(values[place] for place in self.seen))

    def turned(self, part: Tensor) -> Tensor:
        return part

    def forward(self, weights: Weights, x: Tensor) -> tuple[Shown, list[list[Tensor]]]:
        shown = [self.seen.features, self.seen.logits]
        values, memories = _forward(self.listed(weights), x, self.links, shown, onednn.usable(x))
        return Shown(values[-1], values[0] if self.seen.features > 0 else x), memories

    def backward(self, weights: Weights, memory: list[list[Tensor]], slopes: Slopes, found: Factors) -> None:
        at = {self.seen.logits: slopes.logits}
        if slopes.features is not None:  # which are the logits, where a network has no head
            before = at.get(self.seen.features)
            at[self.seen.features] = slopes.features if before is None else before + slopes.features
        self.backward_from(at, weights, memory, found)

    def backward_from(
        self, slopes: Mapping[int, Tensor | None], weights: Weights, memory: list[list[Tensor]], found: Factors
    ) -> None:
        """Add the gradient behind `slopes`, by place."""
        at = [slopes.get(place) for place in range(len(self.links) + 1)]
        self._add(_backward(self.listed(weights), memory, at, self.links, onednn.usable(memory[0][0])), found)

    def cross_entropy(self, weights: Weights, batch: Batch) -> Factors:
        found = Factors()
        self._add(_cross_entropy(self.listed(weights), batch, self.links, onednn.usable(batch.x)), found)
        return found

    def head(self, weights: Weights) -> list[Tensor] | None:
        linear = self.names[-2:] == ["head.weight", "head.bias"] and self.seen.features == len(self.links) - 1 > 0
        return self.listed(weights)[-2:] if linear else None

    def walking(self, slope: Slope | None) -> Callable[..., None]:
        walk = _walking(slope or of_labels)
        return lambda *parts: walk(*parts, self.links)

    def _add(self, slopes: "Plain", found: Factors) -> None:
        for name, left, right, plus in zip(self.names, *slopes, strict=True):
            for factors in zip(left, right, strict=True):
                found.product(name, *factors)
            for slope in plus:
                found.put(name, slope)


class Whole(torch.autograd.Function):
    """A chain as one node of autograd, for losses that look at more than the labels."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        values, memories = _forward([w.detach() for w in weights], x, chain.links, chain.shown, onednn.usable(x))
        ctx.set_materialize_grads(False)
        ctx.chain, ctx.sizes = chain, [len(memory) for memory in memories]
        ctx.save_for_backward(*weights, *(tensor for memory in memories for tensor in memory))
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        chain, saved, found = ctx.chain, iter(ctx.saved_tensors), Factors()
        weights = {name: next(saved).detach() for name in chain.names}
        memories = [[next(saved) for _ in range(size)] for size in ctx.sizes]
        chain.backward_from(dict(zip(chain.shown, slopes, strict=True)), weights, memories, found)
        return None, None, *found.taken(weights).values()


# what workers run, in TorchScript's language


Plain = tuple[list[list[Tensor]], list[list[Tensor]], list[list[Tensor]]]


def _plain(found: Found) -> Plain:
    """For Python, where TorchScript would make a class for it, and every time anew."""
    return found.left, found.right, found.plus


@unlocked
def _forward(
    weights: list[Tensor], x: Tensor, links: list[Link], shown: list[int], fast: bool
) -> tuple[list[Tensor], list[list[Tensor]]]:
    return passed(weights, x, links, shown, fast)


@unlocked
def _backward(
    weights: list[Tensor], memories: list[list[Tensor]], slopes: list[Tensor | None], links: list[Link], fast: bool
) -> Plain:
    return _plain(returned(weights, memories, slopes, links, fast))


@unlocked
def _cross_entropy(weights: list[Tensor], batch: Batch, links: list[Link], fast: bool) -> Plain:
    logits, memories = passed(weights, batch.x, links, [len(links)], fast)
    slopes: list[Tensor | None] = [None for _ in links]
    slopes.append(cross_entropy_slope(logits[0], batch))
    return _plain(returned(weights, memories, slopes, links, fast))


def of_labels(
    logits: Tensor, features: Tensor, weights: list[Tensor], batch: Batch, values: list[Tensor]
) -> list[Tensor | None]:
    """Cross-entropy's slope."""
    return [cross_entropy_slope(logits, batch)]


@cache
def _walking(slope: Slope) -> Callable[..., None]:
    """The walk along the gradient behind a slope; but for the labels', the last layer is a head."""

    @unlocked
    def walk(
        weights: list[Tensor],
        batches: Batch,
        sizes: list[int],
        values: list[Tensor],
        rate: float,
        shift: list[Tensor] | None,
        centre: list[Tensor] | None,
        pull: float,
        fast: bool,
        links: list[Link],
    ) -> None:
        centres: list[Tensor | None] = []
        for i in range(len(weights)):
            centres.append(None if centre is None else centre[i])
        last = len(links)
        for t, size in enumerate(sizes):
            batch = Batch(batches.x[t, :size], batches.y[t, :size], batches.weight[t, :size], batches.row[t, :size])
            seen, memories = passed(weights, batch.x, links, [last - 1, last], fast)
            by = slope(seen[-1], seen[0], weights, batch, values)
            slopes: list[Tensor | None] = [None for _ in links]
            slopes.append(by[0])
            if len(by) > 1:
                slopes[last - 1] = by[1]
            found = returned(weights, memories, slopes, links, fast)
            for i, part in enumerate(by[2:]):
                if part is not None:
                    found.plus[len(weights) - 2 + i].append(part)
            if shift is not None:
                for i, part in enumerate(shift):
                    found.plus[i].append(part)
            followed(weights, found.left, found.right, found.plus, centres, [pull] * len(weights), rate, fast)

    return walk


# from a network to its chain


def of(network: Split) -> Chain | None:
    """The chain of a network's layers; None: some of them are not written out."""
    trunk, stage, rest = network.parts
    parts = {"features": (trunk, stage, rest), "projection": (network.projection,), "head": (network.head,)}
    names: list[str] = []
    links: list[Link] = []
    ends = []
    for name, part in ((name, part) for name, several in parts.items() for part in several):
        own: list[Link] = []
        for path, layer in _layers(name, part):
            places = {key: len(names) + i for i, (key, _) in enumerate(layer.named_parameters(recurse=False))}
            if (link := _link(layer, places)) is None:
                return None
            _join(own, link._replace(first=bool(places) and not names))
            names += [f"{path}.{key}" for key in places]
        links += own
        ends.append(len(links))
    stage_in, stage_out, _, features, logits = ends
    return Chain(names, links, Places(logits, features, stage_in, stage_out))


def _layers(name: str, module: nn.Module | None) -> list[tuple[str, nn.Module]]:
    """The layers of nested sequences, with their paths."""
    if module is None or isinstance(module, nn.Identity):
        return []
    if not isinstance(module, nn.Sequential):
        return [(name, module)]
    return [layer for key, child in module.named_children() for layer in _layers(f"{name}.{key}", child)]


def _link(layer: nn.Module, places: Mapping[str, int]) -> Link | None:
    """A layer whose parameters are at these places, if it is written out."""
    padding = getattr(layer, "padding", 0), getattr(layer, "padding_mode", "zeros")
    if type(layer) not in KINDS or isinstance(padding[0], str) or padding[1] != "zeros":
        return None
    bias = places.get("bias", NONE)
    return Link(
        KINDS[type(layer)],
        [_both(getattr(layer, side)) for side in SIDES if hasattr(layer, side)],
        places.get("weight", NONE),
        bias,
        summed=bias,
        groups=getattr(layer, "groups", 1),
        ceil=getattr(layer, "ceil_mode", False),
        p=getattr(layer, "p", 0.0),
    )


def _both(side: int | Sequence[int]) -> list[int]:
    return [side, side] if isinstance(side, int) else list(side)


def _join(links: list[Link], link: Link) -> None:
    """Put a layer after those of the same part; nobody looks between them."""
    last = links[-1] if links else Link("none", [])
    if link.kind == "pool" and last.kind == "convolution":  # a pool sends on all that comes back to it
        links[-1], link = last._replace(summed=NONE), link._replace(summed=last.bias)
    if link.kind == "rectifier":
        link = link._replace(in_place=last.kind in ("convolution", "pool", "affine"))
    links.append(link)
