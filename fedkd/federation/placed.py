"""Values that lie at the clients: the server can move them and compute with them, but not look inside."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fedkd.core import tree
from fedkd.core.tree import Tree

T = TypeVar("T")


class Placed(Generic[T]):
    """One value at every client of the cohort, stacked by architecture.

    Only `Federation.up` opens it, and writes down what crossed. Taking a tuple apart (``w, head = own``) and putting
    one together (``Placed.pack(Client, w, head)``) move nothing.
    """

    def __init__(self, stacks: dict[str, Tree]) -> None:
        self._stacks = stacks

    def __iter__(self) -> Iterator["Placed[Any]"]:
        first = next(iter(self._stacks.values()))
        if not isinstance(first, tuple):
            raise TypeError("only a placed tuple can be taken apart; use Federation.up to receive values")
        return iter([Placed({arch: stack[i] for arch, stack in self._stacks.items()}) for i in range(len(first))])

    @staticmethod
    def pack(make: Callable[..., T], *parts: "Placed[Any]") -> "Placed[T]":
        """A tuple of placed values as one placed tuple."""
        return Placed({arch: make(*(p._stacks[arch] for p in parts)) for arch in parts[0]._stacks})


class Received(Sequence[T]):
    """What the cohort sent up, client by client in the cohort's order."""

    def __init__(self, parts: Sequence[tuple[np.ndarray, Tree]]) -> None:
        self._parts = parts
        found = sorted((int(place), i, row) for i, (places, _) in enumerate(parts) for row, place in enumerate(places))
        self._where = [(part, row) for _, part, row in found]

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, place: int) -> T:  # type: ignore[override]
        part, row = self._where[place]
        return tree.take(self._parts[part][1], row)  # type: ignore[no-any-return]

    def stack(self) -> T:
        """All of it as one tree with a first axis over the cohort; the clients' shapes must agree."""
        if len(self._parts) == 1:
            return self._parts[0][1]  # type: ignore[no-any-return]
        places = np.concatenate([places for places, _ in self._parts])
        joined = tree.concatenate([stack for _, stack in self._parts])
        back = np.argsort(places)
        return tree.map(lambda leaf: leaf[torch.from_numpy(back).to(leaf.device)], joined)  # type: ignore[no-any-return]

    def among(self, places: Sequence[int] | np.ndarray) -> "Received[T]":
        """What some of the cohort sent, e.g. the clients of one architecture."""
        return Received([(np.arange(len(places)), tree.stack([self[int(place)] for place in places]))])

    def mean(self, weights: Sequence[float] | np.ndarray | None = None) -> T:
        """The average, by `weights` (which need not sum to one)."""
        share = np.ones(len(self)) if weights is None else np.asarray(weights, float)
        return tree.average(self.stack(), torch.from_numpy((share / share.sum()).astype(np.float32)))
