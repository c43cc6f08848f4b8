"""One client's convolutional network as a chain of layers, its gradients written out.

Autograd comes to the same in an eighth more time: it has Python's lock more often than two threads can share it, keeps
gradients that are only made to be followed, and sums those of a bias over all of a map, not over its pooled quarter.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

from fedkd.core import onednn
from fedkd.core.draws import mask
from fedkd.core.factors import Factors
from fedkd.core.optim import Weights
from fedkd.models.layers import Dropout, Flatten, Linear
from fedkd.models.split import Pass, Split
from fedkd.models.written import Shown, Slopes, Written

aten = torch.ops.aten
convolution_backward = aten.convolution_backward.default
max_pool = aten.max_pool2d_with_indices.default
max_pool_backward = aten.max_pool2d_with_indices_backward.default
threshold_backward = aten.threshold_backward.default  # the gradient behind a ReLU
Memory = tuple[Tensor, ...]  # what a layer keeps of its pass for the way back


class Link(ABC):
    """One layer; `names` are those of its parameters, the weight's first."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.names = [f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False)]

    @abstractmethod
    def forward(self, weights: Weights, x: Tensor) -> tuple[Tensor, Memory]: ...

    @abstractmethod
    def backward(self, weights: Weights, memory: Memory, slope: Tensor, found: Factors, first: bool) -> Tensor:
        """The gradient by the input, behind `slope`, that by the output; the `first` layer's is not needed."""


class Convolution(Link):
    """With the max-pool right after it, if there is one."""

    pool: "Pool | None" = None

    def __init__(self, name: str, layer: nn.Conv2d) -> None:
        super().__init__(name, layer)
        self.how: Any = (layer.stride, layer.padding, layer.dilation, layer.groups)

    @staticmethod
    def serves(layer: nn.Conv2d) -> bool:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

    def forward(self, weights: Weights, x: Tensor) -> tuple[Tensor, Memory]:
        weight, bias = weights[self.names[0]], weights[self.names[1]] if len(self.names) > 1 else None
        y = conv2d(x, weight, bias, *self.how)
        if self.pool is None:
            return y, (x,)
        y, memory = self.pool.forward(weights, y)
        return y, (x, *memory)

    def backward(self, weights: Weights, memory: Memory, slope: Tensor, found: Factors, first: bool) -> Tensor:
        (x, *pooled), (weight, *bias) = memory, self.names
        for name in bias:
            found.put(name, slope.sum((0, 2, 3)))  # a pool sends all of it on
        if self.pool is not None:
            slope = self.pool.backward(weights, tuple(pooled), slope, found, False)
        *shape, groups = self.how
        wanted = [not first, True, False]
        by_x, by_weight, _ = convolution_backward(
            slope, x, weights[weight], None, *shape, False, [0, 0], groups, wanted
        )
        found.put(weight, by_weight)
        return by_x  # type: ignore[no-any-return]


class Pool(Link):
    """A max-pool."""

    def __init__(self, name: str, layer: nn.MaxPool2d) -> None:
        super().__init__(name, layer)
        sides = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        self.how = (*([side, side] if isinstance(side, int) else list(side) for side in sides), layer.ceil_mode)

    def forward(self, weights: Weights, x: Tensor) -> tuple[Tensor, Memory]:
        y, chosen = max_pool(x, *self.how)
        return y, (x, chosen)

    def backward(self, weights: Weights, memory: Memory, slope: Tensor, found: Factors, first: bool) -> Tensor:
        x, chosen = memory
        return max_pool_backward(slope, x, *self.how, chosen)  # type: ignore[no-any-return]


class Rectifier(Link):
    """ReLU; `in_place` where nobody else reads its input."""

    in_place = False

    def forward(self, weights: Weights, x: Tensor) -> tuple[Tensor, Memory]:
        y = x.relu_() if self.in_place else x.relu()
        return y, (y,)

    def backward(self, weights: Weights, memory: Memory, slope: Tensor, found: Factors, first: bool) -> Tensor:
        return threshold_backward(slope, *memory, 0)  # type: ignore[no-any-return]


class Flattening(Link):
    """Sends gradients back as its input lies: from another layout a max-pool takes seven times as long."""

    def forward(self, weights: Weights, x: Tensor) -> tuple[Tensor, Memory]:
        return x.flatten(1), (x,)

    def backward(self, weights: Weights, memory: Memory, slope: Tensor, found: Factors, first: bool) -> Tensor:
        (x,) = memory
        layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        return slope.view(x.shape).contiguous(memory_format=layout)


class Dropping(Link):
    """Dropout."""

    def __init__(self, name: str, layer: nn.Dropout) -> None:
        super().__init__(name, layer)
        self.p = layer.p

    def forward(self, weights: Weights, x: Tensor) -> tuple[Tensor, Memory]:
        drawn = mask(x, self.p)
        return x * drawn, (drawn,)

    def backward(self, weights: Weights, memory: Memory, slope: Tensor, found: Factors, first: bool) -> Tensor:
        (drawn,) = memory
        return slope * drawn


class Affine(Link):
    """A linear layer."""

    def forward(self, weights: Weights, x: Tensor) -> tuple[Tensor, Memory]:
        given = [weights[name] for name in self.names]
        y = onednn.product(x, *given) if onednn.gains(x, given[0]) else nn.functional.linear(x, *given)
        return y, (x,)

    def backward(self, weights: Weights, memory: Memory, slope: Tensor, found: Factors, first: bool) -> Tensor:
        (x,), (name, *bias) = memory, self.names
        weight = weights[name]
        by_x = onednn.product(slope, weight.t()) if onednn.gains(slope, weight) else slope @ weight
        found.product(name, slope.t(), x)
        for other in bias:
            found.put(other, slope.sum(0))
        return by_x


class Places(NamedTuple):
    """Where in a chain a `Pass` is taken: behind so many links."""

    logits: int
    features: int
    stage_in: int
    stage_out: int


class Chain(Written):
    """A network's links, and the places between them that are seen."""

    def __init__(self, links: Sequence[Link], seen: Places) -> None:
        self.links, self.seen = links, seen
        self.names = [name for link in links for name in link.names]
        self.first = next(i for i, link in enumerate(links) if link.names)
        self.shown = sorted({*seen} - {0})

    def serves(self, x: Tensor) -> bool:
        """Whether it can be used: not under vmap, in a lower precision, or for the gradient by the images."""
        plain = peek_interpreter_stack() is None and not torch.is_autocast_enabled(x.device.type)
        return plain and not x.requires_grad

    def show(self, weights: Weights, x: Tensor) -> Pass:
        """A training pass that autograd can come back to."""
        shown: tuple[Tensor, ...] = Whole.apply(self, x, *(weights[name] for name in self.names))
        values = {0: x, **dict(zip(self.shown, shown, strict=True))}
        return Pass(*(values[place] for place in self.seen))

    def forward(self, weights: Weights, x: Tensor) -> tuple[Shown, list[Memory]]:
        values, memories = self.walk(weights, x)
        return Shown(values[self.seen.logits], values[self.seen.features]), memories

    def backward(self, weights: Weights, memory: list[Memory], slopes: Slopes, found: Factors) -> None:
        at: dict[int, Tensor | None] = {self.seen.logits: slopes.logits}
        if slopes.features is not None:  # which are the logits, where a network has no head
            before = at.get(self.seen.features)
            at[self.seen.features] = slopes.features if before is None else before + slopes.features
        self.walk_back(weights, memory, at, found)

    def walk(self, weights: Weights, x: Tensor) -> tuple[list[Tensor], list[Memory]]:
        """What enters each link and what leaves the last, and what the links keep of it."""
        values, memories = [x], []
        for link in self.links:
            value, memory = link.forward(weights, values[-1])
            values.append(value)
            memories.append(memory)
        return values, memories

    def walk_back(
        self, weights: Weights, memories: Sequence[Memory], slopes: Mapping[int, Tensor | None], found: Factors
    ) -> None:
        """Add the gradients behind `slopes`, by place, to what is found."""
        slope: Tensor | None = None
        for i in range(len(self.links) - 1, self.first - 1, -1):
            if (here := slopes.get(i + 1)) is not None:
                slope = here if slope is None else slope + here
            if slope is not None:
                slope = self.links[i].backward(weights, memories[i], slope, found, i == self.first)


class Whole(torch.autograd.Function):
    """A chain as one node of autograd, for losses that look at more than the labels."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        values, memories = chain.walk(dict(zip(chain.names, weights, strict=True)), x)
        ctx.set_materialize_grads(False)
        ctx.chain, ctx.sizes = chain, [len(memory) for memory in memories]
        ctx.save_for_backward(*weights, *(tensor for memory in memories for tensor in memory))
        return tuple(values[place] for place in chain.shown)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        chain, saved, found = ctx.chain, iter(ctx.saved_tensors), Factors()
        weights = {name: next(saved) for name in chain.names}
        memories = [tuple(next(saved) for _ in range(size)) for size in ctx.sizes]
        chain.walk_back(weights, memories, dict(zip(chain.shown, slopes, strict=True)), found)
        return None, None, *found.taken(weights).values()


LINKS: dict[type[nn.Module], type[Link]] = {
    nn.Conv2d: Convolution,
    nn.MaxPool2d: Pool,
    nn.ReLU: Rectifier,
    Dropout: Dropping,
    Flatten: Flattening,
    Linear: Affine,
}


def of(network: Split) -> Chain | None:
    """The chain of a network's layers; None: some of them are not written out."""
    trunk, stage, rest = network.parts
    parts = {"features": (trunk, stage, rest), "projection": (network.projection,), "head": (network.head,)}
    links: list[Link] = []
    ends = []
    for name, part in ((name, part) for name, several in parts.items() for part in several):
        own: list[Link] = []
        for path, layer in _layers(name, part):
            if type(layer) not in LINKS or (isinstance(layer, nn.Conv2d) and not Convolution.serves(layer)):
                return None
            _join(own, LINKS[type(layer)](path, layer))
        links += own
        ends.append(len(links))
    stage_in, stage_out, _, features, logits = ends
    return Chain(links, Places(logits, features, stage_in, stage_out))


def _layers(name: str, module: nn.Module | None) -> list[tuple[str, nn.Module]]:
    """The layers of nested sequences, with their paths."""
    if module is None or isinstance(module, nn.Identity):
        return []
    if not isinstance(module, nn.Sequential):
        return [(name, module)]
    return [layer for key, child in module.named_children() for layer in _layers(f"{name}.{key}", child)]


def _join(links: list[Link], link: Link) -> None:
    """Put a link after those of the same part; nobody looks between them."""
    last = links[-1] if links else None
    if isinstance(link, Pool) and isinstance(last, Convolution) and last.pool is None:
        last.pool = link
        return
    if isinstance(link, Rectifier):
        link.in_place = isinstance(last, Convolution | Affine)
    links.append(link)
