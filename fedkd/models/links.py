"""The layers of a chain, there and back, in TorchScript's language."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedkd.core.draws import mask
from fedkd.core.onednn import large, product

SIDES = "kernel_size", "stride", "padding", "dilation"  # of a window
NONE = -1  # the place of a parameter that a layer does not have
_mask = torch.jit.ignore(mask)  # type: ignore[no-untyped-call] # by Python, where all else is TorchScript's


class Link(NamedTuple):
    """One layer, as TorchScript reads it; parameters are named by their places in the chain's list of them."""

    kind: str
    sides: list[list[int]]  # of its window, [down, across], if it has one: see SIDES
    weight: int = NONE
    bias: int = NONE
    summed: int = NONE  # the bias whose gradient is the sum of what comes back to this layer
    first: bool = False  # of those with parameters: what it reads needs no gradient
    groups: int = 1
    ceil: bool = False
    in_place: bool = False  # nobody else reads what enters
    p: float = 0.0


class Found(NamedTuple):
    """Gradients in factors (`core/factors.py`), by the parameters' places."""

    left: list[list[Tensor]]
    right: list[list[Tensor]]
    plus: list[list[Tensor]]


def _onward(link: Link, weights: list[Tensor], x: Tensor, fast: bool) -> tuple[Tensor, list[Tensor]]:
    """What leaves a layer, and what it keeps for the way back."""
    bias = weights[link.bias] if link.bias >= 0 else None
    if link.kind == "convolution":
        _, stride, padding, dilation = link.sides
        return torch.conv2d(x, weights[link.weight], bias, stride, padding, dilation, link.groups), [x]
    if link.kind == "pool":
        kernel, stride, padding, dilation = link.sides
        y, chosen = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, link.ceil)
        return y, [x, chosen]
    if link.kind == "rectifier":
        y = x.relu_() if link.in_place else x.relu()
        return y, [y]
    if link.kind == "flattening":
        return x.flatten(1), [x]
    if link.kind == "dropping":
        drawn = _mask(x, link.p)
        return x * drawn, [drawn]
    weight = weights[link.weight]
    if fast and large(x, weight):
        y = product(x, weight, bias)
    else:
        y = (weight @ x.t()).t()  # in this order MKL takes two thirds of the time
        if bias is not None:
            y.add_(bias)
    return y, [x]


def _back(link: Link, weights: list[Tensor], memory: list[Tensor], slope: Tensor, found: Found, fast: bool) -> Tensor:
    """The gradient by what enters a layer, behind `slope`, that by what leaves it."""
    if link.summed >= 0:
        found.plus[link.summed].append(slope.sum([0, 2, 3] if slope.dim() == 4 else [0]))
    kept = memory[0]
    if link.kind == "convolution":
        _, stride, padding, dilation = link.sides
        wanted = [not link.first, True, False]
        by_x, by_weight, _ = torch.ops.aten.convolution_backward(
            slope, kept, weights[link.weight], None, stride, padding, dilation, False, [0, 0], link.groups, wanted
        )
        found.plus[link.weight].append(by_weight)
        return slope if link.first else by_x
    if link.kind == "pool":
        kernel, stride, padding, dilation = link.sides
        return torch.ops.aten.max_pool2d_with_indices_backward(  # type: ignore[no-any-return]
            slope, kept, kernel, stride, padding, dilation, link.ceil, memory[1]
        )
    if link.kind == "rectifier":
        return torch.ops.aten.threshold_backward(slope, kept, 0)  # type: ignore[no-any-return]
    if link.kind == "flattening":  # as its input lies: from another layout a max-pool takes seven times as long
        slope = slope.view(kept.size())
        return slope if kept.is_contiguous() else slope.contiguous(memory_format=torch.channels_last)
    if link.kind == "dropping":
        return slope * kept
    weight = weights[link.weight]
    found.left[link.weight].append(slope.t())
    found.right[link.weight].append(kept)
    return product(slope, weight.t()) if fast and large(slope, weight) else slope @ weight


def passed(
    weights: list[Tensor], x: Tensor, links: list[Link], shown: list[int], fast: bool
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """What is seen at those places, and what the layers keep."""
    values: list[Tensor] = []
    memories: list[list[Tensor]] = []
    for i, link in enumerate(links):
        x, memory = _onward(link, weights, x, fast)
        memories.append(memory)
        if i + 1 in shown:
            values.append(x)
    return values, memories


def returned(
    weights: list[Tensor], memories: list[list[Tensor]], slopes: list[Tensor | None], links: list[Link], fast: bool
) -> Found:
    """The gradients behind `slopes`, by place.

    What a layer has kept is let go as soon as it is read: memory that is used again at once is still in the cache.
    """
    found = Found([[] for _ in weights], [[] for _ in weights], [[] for _ in weights])
    slope: Tensor | None = None
    for i in range(len(links) - 1, -1, -1):
        here, memory = slopes[i + 1], memories.pop()
        if here is not None:
            slope = here if slope is None else slope + here
        if slope is not None:
            slope = _back(links[i], weights, memory, slope, found, fast)
        if links[i].first:
            break
    return found
