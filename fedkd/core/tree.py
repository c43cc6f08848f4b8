"""Trees of tensors: nested dicts, tuples, NamedTuples, lists and None, handled as values."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Tree = Any  # a tensor, None, a Python number, or a dict / tuple / NamedTuple / list of trees
T = TypeVar("T", bound=Tree)
PIECE = 2**13  # columns of a stacked tree that are compared at once: in double precision, few enough for the cache


class Params(NamedTuple):
    """One model: what is trained, and the running statistics of its normalisation layers."""

    weights: dict[str, Tensor]
    stats: dict[str, Tensor]


class Rows(NamedTuple):
    """A table of which only some rows are sent: the ledger counts the present ones."""

    values: Tensor  # [rows, ...]
    present: Tensor  # bool [rows]


class Index(NamedTuple):
    """Which of several things that both sides know: the ledger counts its bytes, but no parameter."""

    number: Tensor


def map(fn: Callable[..., Any], tree: T, *rest: Tree) -> T:  # noqa: A001 - tree.map is its name everywhere
    """Apply `fn` leaf by leaf to trees of one structure."""
    if isinstance(tree, dict):
        return {key: map(fn, value, *(r[key] for r in rest)) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, tuple):
        parts = [map(fn, *values) for values in zip(tree, *rest, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)  # type: ignore[return-value]
    if isinstance(tree, list):
        return [map(fn, *values) for values in zip(tree, *rest, strict=True)]  # type: ignore[return-value]
    return None if tree is None else fn(tree, *rest)  # type: ignore[return-value]


def leaves(tree: Tree) -> Iterator[Any]:
    """The tree's leaves, in order."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        if tree is not None:
            yield tree
        return
    for part in tree:
        yield from leaves(part)


def add(a: T, b: T, alpha: float = 1) -> T:
    """a + alpha · b."""
    return map(lambda x, y: torch.add(x, y, alpha=alpha), a, b)


def sub(a: T, b: T, alpha: float = 1) -> T:
    """a − alpha · b."""
    return map(lambda x, y: torch.sub(x, y, alpha=alpha), a, b)


def scale(factor: float | Tensor, tree: T) -> T:
    return map(lambda leaf: leaf * factor, tree)


def lerp(a: T, b: T, part: float | Tensor) -> T:
    """a + part · (b − a), exact at both ends."""
    return map(lambda x, y: torch.lerp(x, y, part), a, b)


def zeros_like(tree: T) -> T:
    return map(torch.zeros_like, tree)


def dot(a: Tree, b: Tree) -> Tensor:
    """Σ over all leaves of ⟨a, b⟩."""
    return _total((x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True))


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """‖a − b‖² over all leaves."""
    return _total((x - y).square().sum() for x, y in zip(leaves(a), leaves(b), strict=True))


def squared_distances(rows: Tree) -> Tensor:
    """‖row i − row j‖² of a stacked tree, [rows, rows]."""
    parts = (part for leaf in leaves(rows) for part in leaf.reshape(len(leaf), -1).split(PIECE, 1))
    products = _total(_products(part.double()) for part in parts)
    return (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp(min=0).float()


def _products(columns: Tensor) -> Tensor:
    """Of rows to one another, about their mean; near rows are told apart by the last digits of these."""
    columns = columns - columns.mean(0)
    return columns @ columns.T


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def stack(trees: Sequence[T]) -> T:
    """Trees of equal shapes as one tree with a new first axis."""
    return map(lambda *values: torch.stack(values), *trees)


def take(tree: T, index: int | slice | Tensor) -> T:
    """Rows of a stacked tree."""
    return map(lambda leaf: leaf[index], tree)


def adjoining(places: np.ndarray) -> bool:
    """Whether they lie side by side, in order."""
    return bool((places == np.arange(places[0], places[0] + len(places))).all())


def rows(tree: T, places: np.ndarray) -> T:
    """The rows of a stacked tree at some places; nothing is copied where they lie side by side, or are all the same."""
    if adjoining(places):
        return take(tree, slice(int(places[0]), int(places[0]) + len(places)))
    at = torch.from_numpy(places)

    def chosen(leaf: Tensor) -> Tensor:
        return leaf[: len(places)] if expanded(leaf) else leaf.index_select(0, at.to(leaf.device))

    return map(chosen, tree)


def put_rows(tree: Tree, places: np.ndarray, part: Tree) -> None:
    """Write `part` over the rows of a stacked tree at some places; nothing is copied where it lies there already."""
    if adjoining(places):
        map(lambda old, new: old if old.is_set_to(new) else old.copy_(new), rows(tree, places), part)
        return
    at = torch.from_numpy(places)
    map(lambda leaf, new: leaf.index_copy_(0, at.to(leaf.device), new), tree, part)


def pick(tree: T, at: Tensor) -> T:
    """The row of a stacked tree that a tensor names; under vmap, too."""
    return map(lambda leaf: leaf.index_select(0, at.view(1)).squeeze(0), tree)


def average(rows: T, share: Tensor) -> T:
    """Σ_i share_i · row i of a stacked tree."""
    return map(lambda leaf: (share.to(leaf.device) @ leaf.reshape(len(share), -1)).view(leaf.shape[1:]), rows)


def averages(rows: T, weight: Tensor, old: T) -> T:
    """For each group of `weight`, [groups, rows], the rows' average; a group without weight keeps its old value."""
    total = weight.sum(1)
    share = weight / torch.where(total > 0, total, 1)[:, None]
    found = stack([average(rows, one) for one in share])
    return map(lambda new, was: torch.where((total > 0).view(-1, *[1] * (new.dim() - 1)), new, was), found, old)


def mean_rows(tables: Rows, weight: Tensor, old: Rows | None = None) -> Rows:
    """Row by row, the average of stacked tables by `weight`, [tables, rows], over those that have the row.

    A row that none has is that of `old`, or absent.
    """
    weight = weight * tables.present
    total = weight.sum(0)
    share, present = weight / torch.where(total > 0, total, 1), total > 0
    means = torch.einsum("ij,ijk->jk", share, tables.values)
    if old is None:
        return Rows(means, present)
    return Rows(torch.where(present.unsqueeze(-1), means, old.values), present | old.present)


def concatenate(trees: Sequence[T]) -> T:
    return trees[0] if len(trees) == 1 else map(lambda *values: torch.cat(values), *trees)


def expand(tree: T, count: int) -> T:
    """A stacked tree whose rows are all `tree`, without copying it."""
    return map(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def expanded(leaf: Tensor) -> bool:
    """Whether its rows are all the same, by `expand`."""
    return leaf.dim() > 0 and leaf.stride(0) == 0


def to(tree: T, device: torch.device | str) -> T:
    return map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def is_fake(tensor: Tensor) -> bool:
    """Whether it has a shape but no values, as in a dry run."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
