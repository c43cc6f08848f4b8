"""What a loss makes of a training pass, as TorchScript: a walk along its gradient then needs no Python.

The loss is run once on a net that gives it tensors of the right shapes, and what it does to them is recorded. What it
decides in Python, by a tensor's numbers or sizes, is not. So the recording counts only if it finds the gradient that
Python finds on a batch of another size; else, as for losses that do more than look at one pass, Python goes on.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedkd.core import tree
from fedkd.core.losses import Batch
from fedkd.core.tree import Params
from fedkd.core.unlocked import compiling
from fedkd.models.written import Seen, Slope, Written

MOST = 16  # losses that are recorded for one net; one that is made anew every round is not worth it
SIZES = 5, 3  # of the batches it is recorded and tried on


class Recordings:
    """The slopes of losses on a net's passes, by the structure of the values that go with them."""

    def __init__(self, net: Any) -> None:
        self._net = net
        self._made: dict[Any, Slope | None] = {}

    def slope(self, loss: Callable[..., Any], written: Written, head: list[Tensor], values: tree.Tree) -> Slope | None:
        """That of `loss`, if it can be recorded; `head` and `values` are some that it will be given."""
        key = loss, repr(tree.map(lambda leaf: (leaf.dim(), leaf.dtype, tree.expanded(leaf)), values))
        if key not in self._made and len(self._made) < MOST:
            with compiling():
                if key not in self._made:
                    self._made[key] = self._recorded(loss, written, head, values)
        return self._made.get(key)

    def _recorded(
        self, loss: Callable[..., Any], written: Written, head: list[Tensor], values: tree.Tree
    ) -> Slope | None:
        def value(parts: list[Tensor]) -> Tensor:
            logits, features, weight, bias, *rest = parts
            batch, leaves, model = Batch(*rest[:4]), iter(rest[4:]), Params({}, {})
            seen = Seen(written.turned(logits), written.turned(features), {})
            net = OnePass(self._net, model, batch.x, seen, (weight, bias))
            found, _ = loss(net, model, batch, *tree.map(lambda _: next(leaves), values))
            return found  # type: ignore[no-any-return]

        example, other = (self._parts(size, written, head, values) for size in SIZES)
        try:
            warnings.simplefilter("error", torch.jit.TracerWarning)  # type: ignore[attr-defined] # of what is not recorded
            slope = _by_autograd(torch.jit.trace(value, (example,), check_trace=False))  # type: ignore[no-untyped-call]
            return slope if _agree(slope, value, other) else None
        except Exception:  # whatever it is, Python will find it, too, and say so
            return None

    def _parts(self, size: int, written: Written, head: list[Tensor], values: tree.Tree) -> list[Tensor]:
        """Logits, features, head, batch and values of a pass over `size` samples."""
        clients, draw = head[0].shape[:-2], torch.Generator().manual_seed(size)
        units = self._net.classes, self._net.feature_size
        seen = [written.turned(torch.randn(*clients, size, many, generator=draw)) for many in units]
        y = torch.randint(self._net.classes, (*clients, size), generator=draw)
        x, weight = torch.zeros(*clients, size, *self._net.shape), torch.full(y.shape, 1 / size)
        leaves = [_drawn(leaf, draw) for leaf in tree.leaves(values)]
        return [*seen, *head, x, y, weight, torch.zeros_like(y), *leaves]


def _drawn(leaf: Tensor, draw: torch.Generator) -> Tensor:
    """Numbers for a value; what it has may not tell much, as a table that is still to be filled. An index stays."""
    if tree.expanded(leaf):
        return _drawn(leaf[0], draw).expand_as(leaf)
    drawn = torch.rand(leaf.shape, generator=draw)
    return drawn > 0.5 if leaf.dtype is torch.bool else drawn.to(leaf) if leaf.is_floating_point() else leaf


class OnePass:
    """A net as a loss sees it that looks at one training pass of the model, and at its head."""

    def __init__(self, net: Any, model: Params, x: Tensor, seen: Seen, head: tuple[Tensor, Tensor]) -> None:
        self.classes, self.feature_size = net.classes, net.feature_size
        self._model, self._x, self._seen, self._head = model, x, seen, head

    def forward(self, model: Params, x: Tensor) -> Seen:
        if model is not self._model or x is not self._x:
            raise NotImplementedError
        return self._seen

    def head(self, model: Params, features: Tensor) -> Tensor:
        if model is not self._model:
            raise NotImplementedError
        weight, bias = self._head
        return features @ weight.mT + bias.unsqueeze(-2)


def _by_autograd(value: Any) -> Slope:
    """The slope behind a recorded value, for TorchScript."""

    def slope(
        logits: Tensor, features: Tensor, weights: list[Tensor], batch: Batch, values: list[Tensor]
    ) -> list[Tensor | None]:
        shown = [part.detach().requires_grad_() for part in [logits, features, weights[-2], weights[-1]]]
        rest = [batch.x, batch.y, batch.weight, batch.row]
        return torch.autograd.grad([value(shown + rest + values).sum()], shown, allow_unused=True)  # type: ignore[return-value]

    return slope


def _agree(slope: Slope, value: Callable[[list[Tensor]], Tensor], parts: list[Tensor]) -> bool:
    """Whether the slope is the one that autograd finds in Python."""
    with torch.enable_grad():
        shown = [part.detach().requires_grad_() for part in parts[:4]]
        expected = torch.autograd.grad(value(shown + parts[4:]).sum(), shown, allow_unused=True)
        found = torch.jit.script(slope)(parts[0], parts[1], parts[2:4], Batch(*parts[4:8]), parts[8:])
    zeros = [torch.zeros_like(part) for part in shown]
    pairs = [[z if g is None else g for g, z in zip(some, zeros, strict=True)] for some in (found, expected)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in zip(*pairs, strict=True))
