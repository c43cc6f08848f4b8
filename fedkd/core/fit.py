"""Gradient steps as pure functions, under plain autograd or lifted by vmap."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from fedkd.core import tree
from fedkd.core.draws import drawing
from fedkd.core.errors import FedkdError
from fedkd.core.factors import Beside, Factors
from fedkd.core.losses import Piece
from fedkd.core.optim import Optimizer, State, Weights
from fedkd.core.tree import Params

MARGIN = 1e-4  # by which a score must fall to count as better
ROUNDING = 1e-6  # of the largest element of a gradient: what is smaller may be rounding alone

# loss(net, model, batch, *values) -> (loss, the running statistics after it)
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
L = TypeVar("L", bound=Loss)
P = TypeVar("P", bound=Callable[..., Any])
# factored(loss, net, model, batch, *values) -> (its gradient, the running statistics after it)
Factored = Callable[..., tuple[Factors, dict[str, Tensor]]]
# hand(net, model, batch, *values) -> the gradient, if it is written out
Hand = Callable[..., Factors | None]
# walk(net, weights, pieces, rate, beside) -> whether it has followed the gradient along a stream, in place
Walk = Callable[..., bool]


class Fit(NamedTuple):
    """A model in training, with its optimiser's state."""

    model: Params
    optimizer: State


def gradient(fn: Callable[[Weights], tuple[Tensor, Any]], weights: Weights) -> tuple[Weights, Any]:
    """∇fn at `weights`, and what fn returns beside its value: for the steps that algorithms write themselves.

    Inside vmap this is torch.func.grad; elsewhere plain autograd, which costs 15 % (CNN) to 70 % (MLP) less.
    """
    if peek_interpreter_stack() is not None:
        return torch.func.grad(fn, has_aux=True)(weights)  # type: ignore[no-any-return]
    with torch.enable_grad():
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        value, aux = fn(leaves)
        found = torch.autograd.grad(value.sum() if value.dim() else value, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {k: torch.zeros_like(w) if g is None else g for (k, w), g in pairs}, tree.map(torch.Tensor.detach, aux)


def written_out(hand: Hand, walk: Walk | None = None) -> Callable[[L], L]:
    """Give a loss its gradient: hand(net, model, batch, *values) finds it, or returns None.

    It must know by the batch whether it is given one client or several, stacked. Autograd and vmap take more time of
    small networks than arithmetic does, and of others some. `walk` may follow it for many steps.
    """

    def give(loss: L) -> L:
        loss.hand, loss.walk = hand, walk  # type: ignore[attr-defined]
        return loss

    return give


def of_passes(fn: P) -> P:
    """Say of a loss or a sum that it looks at models only through `net`, at their logits and features, and that it
    reads the same for stacked clients: it counts axes from the end, and gives each client's value.

    The loss's gradient is then written out wherever that of cross-entropy is, and the sum needs no vmap. The gradient
    goes through `net.forward` and `net.head`; `net.predict` and `net.features` are for models that stay as they are.
    """
    fn.of_passes = True  # type: ignore[attr-defined]
    return fn


def factored(loss: Loss, net: Any, model: Params, *rest: Any) -> tuple[Factors, dict[str, Tensor]]:
    """∇loss(net, model, *rest) of one client, and the running statistics after it.

    A loss that adds to another, `bare`, what has a simple gradient may say by `beside(*values)` what that is. Autograd
    would walk over the weights some six times for it.
    """
    if (found := _by_hand(loss, net, model, *rest)) is not None:
        return found, model.stats
    if hasattr(loss, "beside"):
        return _with_beside(factored, loss, net, model, *rest)
    return _as_factors(gradient(lambda weights: loss(net, Params(weights, model.stats), *rest), model.weights))


def factored_together(loss: Loss, net: Any, models: Params, *rest: Any) -> tuple[Factors, dict[str, Tensor]]:
    """The same of several clients, stacked: their losses do not meet, so the sum's gradient is each one's own."""
    if (found := _by_hand(loss, net, models, *rest)) is not None:
        return found, models.stats
    if hasattr(loss, "beside"):
        return _with_beside(factored_together, loss, net, models, *rest)

    def losses(weights: Weights) -> tuple[Tensor, Any]:
        return torch.vmap(lambda model, *own: loss(net, model, *own))(Params(weights, models.stats), *rest)

    return _as_factors(gradient(losses, models.weights))


def _with_beside(
    factored: Factored, loss: Any, net: Any, model: Params, batch: Any, *values: Any
) -> tuple[Factors, dict[str, Tensor]]:
    found, stats = factored(loss.bare, net, model, batch)
    found.add(loss.beside(*values))
    return found, stats


def _as_factors(found: tuple[Weights, dict[str, Tensor]]) -> tuple[Factors, dict[str, Tensor]]:
    factors, (slopes, stats) = Factors(), found
    factors.add(Beside(shift=slopes))
    return factors, stats


def _by_hand(loss: Loss, net: Any, model: Params, *rest: Any) -> Factors | None:
    if getattr(loss, "of_passes", False):
        return net.gradient(loss, model, *rest)  # type: ignore[no-any-return]
    return loss.hand(net, model, *rest) if hasattr(loss, "hand") else None


def slope(loss: Loss, net: Any, model: Params, *rest: Any) -> tuple[Weights, dict[str, Tensor]]:
    """One client's gradient, as a tree."""
    found, stats = factored(loss, net, model, *rest)
    return found.taken(model.weights), stats


@dataclass(frozen=True)
class LeafByLeaf:
    """A step that several gradients go into: step(gradient, net, carry, batch, *values), written for one client.

    What it does beside calling `gradient` is arithmetic leaf by leaf, which is the same for stacked clients. So these
    need no vmap over the step, and their gradients are those of `Descent`, in factors. It may write over its carry.
    """

    in_place: ClassVar[bool] = True

    step: Callable[..., Any]

    def __call__(self, *parts: Any) -> Any:
        return self.step(factored, *parts)

    def together(self, *parts: Any) -> Any:
        return self.step(factored_together, *parts)


@dataclass(frozen=True)
class Descent:
    """The training step that follows the gradient of `loss`.

    It is not pure: it writes the new weights where the old ones were, which saves a third of the
    time of small nets. So it needs a carry that nobody else holds, which `Federation.train` copies for it.
    """

    in_place: ClassVar[bool] = True

    loss: Loss
    optimizer: Optimizer

    def __call__(self, net: Any, fit: Fit, *rest: Any) -> Fit:
        """One client's step."""
        return self._step(factored, self.optimizer.update, net, fit, *rest)

    def together(self, net: Any, fit: Fit, *rest: Any) -> Fit:
        """The steps of several clients, stacked."""
        update = self.optimizer.update if self.optimizer.stacks else torch.vmap(self.optimizer.update)
        return self._step(factored_together, update, net, fit, *rest)

    def walk(self, net: Any, fit: Fit, pieces: Iterable[Piece], *values: Any) -> bool:
        """All steps of stacked clients or of one, if that can be done with few words of Python."""
        loss, rate, beside = getattr(self.loss, "bare", self.loss), self.optimizer.plain_rate, Beside()
        if rate is None:
            return False
        if hasattr(self.loss, "beside"):
            beside, values = self.loss.beside(*values), ()
        if getattr(loss, "of_passes", False):
            return net.walk(fit.model.weights, pieces, rate, beside, loss, values)  # type: ignore[no-any-return]
        walk = getattr(loss, "walk", None)
        return walk is not None and walk(net, fit.model.weights, pieces, rate, beside)

    def _step(self, factored: Factored, update: Callable[..., Any], net: Any, fit: Fit, *rest: Any) -> Fit:
        weights, rate = fit.model.weights, self.optimizer.plain_rate
        found, stats = factored(self.loss, net, fit.model, *rest)
        if rate is not None:
            found.follow(weights, rate)
            return Fit(Params(weights, stats), fit.optimizer)
        weights, state = update(weights, found.taken(weights), fit.optimizer)
        return Fit(Params(weights, stats), state)


@dataclass(frozen=True)
class Adding:
    """The step of a sum over samples: total + fn(net, batch, *values)."""

    fn: Callable[..., Any]

    def __call__(self, net: Any, total: tree.Tree, batch: Any, *values: Any) -> tree.Tree:
        here = self.fn(net, batch, *values)
        return here if total == () else tree.add(total, here)

    def together(self, net: Any, *parts: Any) -> tree.Tree:
        """For several clients, stacked."""
        return Adding(_lifted(self.fn, net))(net, *parts)


@dataclass(frozen=True)
class Filling:
    """The step that writes fn(net, batch, *values) into a table's rows, by sample; the last row is for padding."""

    fn: Callable[..., Tensor]
    table: Tensor

    def __call__(self, net: Any, nothing: tree.Tree, batch: Any, *values: Any) -> tree.Tree:
        found = self.fn(net, batch, *values)
        at = torch.where(batch.weight > 0, batch.row, len(self.table) - 1)
        self.table.index_copy_(0, at.flatten(), found.flatten(0, -2).to(self.table.dtype))
        return nothing

    def together(self, net: Any, *parts: Any) -> tree.Tree:
        """For several clients, stacked."""
        return Filling(_lifted(self.fn, net), self.table)(net, *parts)


def _lifted(fn: Callable[..., Any], net: Any) -> Callable[..., Any]:
    """fn(net, *values) for stacked clients."""
    if net.dense is not None and getattr(fn, "of_passes", False):
        return fn  # as it is
    return lambda net, *values: torch.vmap(partial(fn, net))(*values)


@dataclass(frozen=True)
class Patience:
    """When `descend` ends early; it keeps the model with the least score then.

    Better is lower by more than MARGIN: on a plateau the last digits, in which executors and devices differ, must not
    decide when training ends and which model stays.
    """

    score: Callable[[Params], Tensor]
    steps: int  # in a row without a better score that end it
    every: int  # steps from one score to the next


class Descended(NamedTuple):
    model: Params
    steps: int  # that led to it


@torch.no_grad()
def descend(
    loss: Loss,
    net: Any,
    start: Params,
    *values: Any,
    batch: Callable[[int], Any],
    steps: int,
    optimizer: Callable[[int], Optimizer],
    patience: Patience | None = None,
) -> Descended:
    """Training at the server: `steps` gradient steps on loss(net, model, batch, *values).

    Step t = 0, 1, ... takes batch(t) and optimizer(t): functions of the step, so that nothing is carried from round to
    round. On fake tensors one step stands for all.
    """
    model, state = _copy(start), optimizer(0).init(start.weights)
    best, last = Descended(start, 0), 0
    fake = any(map(tree.is_fake, start.weights.values()))
    least = patience.score(start) if patience else torch.zeros(())
    for t in range(min(steps, 1) if fake else steps):
        with drawing(t):
            found, stats = slope(loss, net, model, batch(t), *values)
        weights, state = optimizer(t).update(model.weights, _without_rounding(found), state)
        model, last = Params(weights, stats), t + 1
        if fake or patience is None or (last % patience.every and last < steps):
            continue
        score = patience.score(model)
        if score < least - MARGIN:
            least, best = score, Descended(_copy(model), last)
        elif last - best.steps >= patience.steps:
            break
    if not fake and not all(bool(leaf.isfinite().all()) for leaf in tree.leaves(model)):
        raise FedkdError(
            f"training at the server diverged (NaN or infinity) within {last} steps.\n"
            "The likely cause is its learning rate: try a smaller algorithm.server_lr. What was logged so far is kept."
        )
    return Descended(model, last) if fake or patience is None else best


def _without_rounding(gradient: Weights) -> Weights:
    """Zero where a gradient may be rounding alone, as that of a bias before batch normalisation is.

    Adam divides by the gradient's own size: it would take whole steps along it, other ones on every device.
    """
    floor = ROUNDING * torch.stack([g.abs().max() for g in gradient.values()]).max()
    return tree.map(lambda g: torch.where(g.abs() <= floor, 0.0, g), gradient)


def _copy(model: Params) -> Params:
    return tree.map(torch.clone, model)
