"""Where the clients' states lie between rounds: in memory, or on disk for populations that do not fit.

A client's first state is a function of the seed, so it is made when first asked for and absent clients cost nothing.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkd.core import tree
from fedkd.core.tree import Tree
from fedkd.federation.placed import Placed
from fedkd.federation.population import Population

STORES = ("memory", "disk")
FRESH = 2**26  # bytes of models whose first states are made at once, beside those of the cohort
First = Callable[[int], Tree]  # a client's first state


class Store(ABC):
    """The states of all clients, read and written a cohort at a time."""

    def __init__(self, population: Population, first: First) -> None:
        self.population, self.first = population, first
        self.present = np.zeros(len(population), bool)

    def gather(self, clients: np.ndarray, keep: bool = True) -> Placed[Any]:
        """The clients' states, as a placed value. First states are made for it, and kept unless `scatter` follows."""
        stacks = {}
        for arch, places in self.population.by_architecture(clients).items():
            members = clients[places]
            fresh = ~self.present[members]
            if keep:
                for some, made in self._first(arch, members, fresh):
                    self._write(arch, members[some], made)
                    self.present[members[some]] = True
            whole = keep or not fresh.any()
            stacks[arch] = self._read(arch, members) if whole else self._read_and_made(arch, members, fresh)
        return Placed(stacks)

    def _first(self, arch: str, clients: np.ndarray, fresh: np.ndarray) -> Iterator[tuple[np.ndarray, Tree]]:
        """The places of some that are fresh, and their first states, until all are made."""
        places, together = np.flatnonzero(fresh), max(1, FRESH // (4 * self.population.nets[arch].params))
        for some in (places[at : at + together] for at in range(0, len(places), together)):
            made = tree.stack([self.first(int(client)) for client in clients[some]])
            yield some, tree.to(made, self.population.images.pixels.device)

    def _read_and_made(self, arch: str, clients: np.ndarray, fresh: np.ndarray) -> Tree:
        states: Tree = None
        for some, made in self._first(arch, clients, fresh):
            if len(some) == len(clients):
                return made
            if states is None:
                states = tree.map(lambda leaf: leaf.new_empty(len(clients), *leaf.shape[1:]), made)
            tree.put_rows(states, some, made)
        if not fresh.all():
            tree.put_rows(states, np.flatnonzero(~fresh), self._read(arch, clients[~fresh]))
        return states

    def scatter(self, clients: np.ndarray, states: Placed[Any]) -> None:
        """Keep the clients' new states."""
        for arch, places in self.population.by_architecture(clients).items():
            self._write(arch, clients[places], states._stacks[arch])
        self.present[clients] = True

    @abstractmethod
    def _read(self, arch: str, clients: np.ndarray) -> Tree: ...

    @abstractmethod
    def _write(self, arch: str, clients: np.ndarray, states: Tree) -> None: ...

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    @abstractmethod
    def restore(self, saved: dict[str, Any]) -> None: ...

    def saved(self) -> None:  # noqa: B027 - only the disk store needs to know
        """Called when the checkpoint that holds the last snapshot is safely on disk."""


class Memory(Store):
    """One table an architecture, a row a client."""

    def __init__(self, population: Population, first: First) -> None:
        super().__init__(population, first)
        self._tables: dict[str, Tree] = {}
        self._row = np.zeros(len(population), np.int64)  # a client's row in its architecture's table
        for members in population.by_architecture(np.arange(len(population))).values():
            self._row[members] = np.arange(len(members))

    def _rows(self, clients: np.ndarray, leaf: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._row[clients]).to(leaf.device)

    def _read(self, arch: str, clients: np.ndarray) -> Tree:
        return tree.map(lambda leaf: leaf[self._rows(clients, leaf)], self._tables[arch])

    def _write(self, arch: str, clients: np.ndarray, states: Tree) -> None:
        if arch not in self._tables:
            count = int((self.population.member == list(self.population.nets).index(arch)).sum())
            self._tables[arch] = tree.map(lambda leaf: leaf.new_empty(count, *leaf.shape[1:]), states)
        tree.map(lambda table, leaf: table.index_copy_(0, self._rows(clients, leaf), leaf), self._tables[arch], states)

    def snapshot(self) -> dict[str, Any]:
        kept = np.flatnonzero(self.present)
        groups = self.population.by_architecture(kept)
        return {
            "clients": torch.from_numpy(kept),
            "states": {arch: tree.to(self._read(arch, kept[places]), "cpu") for arch, places in groups.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        kept = saved["clients"].numpy()
        for arch, places in self.population.by_architecture(kept).items():
            states = tree.to(saved["states"][arch], self.population.images.pixels.device)
            self._write(arch, kept[places], states)
        self.present[kept] = True


class Disk(Store):
    """One sparse file an architecture, two slots a client.

    A write goes to the slot that the last checkpoint does not refer to, so a run killed at any moment finds the states
    of its checkpoint untouched, and a checkpoint is one small array whatever the number of clients.
    """

    def __init__(self, population: Population, first: First, folder: Path) -> None:
        super().__init__(population, first)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {arch: os.open(folder / f"{arch}.bin", os.O_RDWR | os.O_CREAT) for arch in population.nets}
        self._layouts: dict[str, Tree] = {}  # per architecture, the shapes of one client's state
        self._slot = np.full(len(population), -1, np.int8)  # where each client's state lies; -1 nowhere
        self._safe = self._slot.copy()  # the same, at the last checkpoint

    def _read(self, arch: str, clients: np.ndarray) -> Tree:
        if arch not in self._layouts:
            self._layouts[arch] = tree.to(self.first(int(clients[0])), "meta")
        states = tree.map(lambda leaf: torch.empty(len(clients), *leaf.shape, dtype=leaf.dtype), self._layouts[arch])
        for row, at in _rows(states, clients, self._slot[clients]):
            if os.preadv(self._files[arch], [row], at) != len(row):
                raise OSError(f"{self.folder / arch}.bin is cut off: it ends before byte {at + len(row)}")
        return tree.to(states, self.population.images.pixels.device)

    def _write(self, arch: str, clients: np.ndarray, states: Tree) -> None:
        slots = np.where(self._safe[clients] == 0, 1, 0)
        for row, at in _rows(states, clients, slots):
            if os.pwrite(self._files[arch], row, at) != len(row):
                raise OSError(f"{self.folder / arch}.bin could not be written: the disk is full")
        self._slot[clients] = slots

    def snapshot(self) -> dict[str, Any]:
        for file in self._files.values():
            os.fsync(file)
        return {"slot": torch.from_numpy(self._slot.copy())}

    def saved(self) -> None:
        self._safe = self._slot.copy()

    def restore(self, saved: dict[str, Any]) -> None:
        self._slot = saved["slot"].numpy().copy()
        self._safe = self._slot.copy()
        self.present = self._slot >= 0


def _rows(states: Tree, clients: np.ndarray, slots: np.ndarray) -> Iterator[tuple[memoryview, int]]:
    """The bytes of each client's part of each leaf, and their place in the file, where a state's leaves lie in a row.

    Of states in contiguous memory nothing is copied, of others one leaf at a time.
    """
    leaves = list(tree.leaves(states))
    sizes = [leaf[0].numel() * leaf.element_size() for leaf in leaves]
    place = (2 * clients.astype(np.int64) + slots) * sum(sizes)
    for leaf, size in zip(leaves, sizes, strict=True):
        flat = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)
        rows = flat.numpy().reshape(len(clients), size)
        yield from zip((row.data for row in rows), place.tolist(), strict=True)
        place += size
