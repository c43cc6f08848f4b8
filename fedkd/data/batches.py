"""Which samples each client sees at each step, planned on the host before the loop starts.

A walk lies step after step: the rows of step t are those of the clients still busy then, longest walk first. So a
step of all clients is one slice, and a client that has finished costs nothing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.core.losses import Batch, Piece
from fedkd.data.datasets import Images

FETCHED = 4 * 2**20  # bytes of images that are fetched at once, unless one step needs more
Order = Callable[[int, int], np.ndarray]  # (client's place, number of its samples) -> one shuffled pass over them


class Walk(NamedTuple):
    """The batches of several clients, flat."""

    rows: np.ndarray  # int64 [batches, width]: sample numbers; padding repeats the batch's first
    sizes: np.ndarray  # int64 [batches]: real samples of each batch
    start: np.ndarray  # int64 [steps + 1]: the batches of step t are start[t]:start[t + 1]
    order: np.ndarray  # int64 [clients]: the client of each rank; rank r owns batch start[t] + r of step t

    @property
    def alive(self) -> np.ndarray:
        """How many clients are busy at each step."""
        return np.diff(self.start)


class Stream:
    """A walk through images, on their device; the images of several small steps are fetched at once.

    `seed` gives that of whatever else a client draws along its walk, by the client's place.
    """

    def __init__(self, images: Images, walk: Walk, *, mean: bool, seed: Callable[[int], int] = int) -> None:
        self.images, self.walk, self.mean, self.seed = images, walk, mean, seed
        self._start = walk.start.tolist()
        self._held, self._batches = range(0), Batch(*[torch.empty(0)] * 4)  # which of all batches are fetched
        self._fetched: dict[tuple[int, int], Batch] = {}  # by step and rank
        device = images.pixels.device
        real = np.arange(walk.rows.shape[1]) < walk.sizes[:, None]
        weight = real / np.maximum(walk.sizes, 1)[:, None] if mean else real
        self._rows = torch.from_numpy(walk.rows).to(device)
        self._weight = torch.from_numpy(weight.astype(np.float32)).to(device)
        self._some = max(1, FETCHED // (walk.rows.shape[1] * images.pixels[0].numel() * 4))  # batches

    def step(self, t: int) -> Batch:
        """The batches of every busy client at step t, stacked."""
        first, end = self._start[t], self._start[t + 1]
        if first not in self._held:
            self._held = range(first, self._start[self._until(t)])
            self._batches = self._batch(slice(first, self._held.stop))
        at = slice(first - self._held.start, end - self._held.start)
        return Batch(*(part[at] for part in self._batches))

    def together(self) -> Iterator[Piece]:
        """The batches of all clients, several steps at a time."""
        alive, t = self.walk.alive.tolist(), 0
        while t < len(alive):
            end = self._until(t)
            yield Piece(self._batch(slice(self._start[t], self._start[end])), alive[t:end])
            t = end

    def alone(self, rank: int, t: int = 0) -> Iterator[Piece]:
        """Those of one client, from step t on, several at a time."""
        at = self.walk.start[:-1][self.walk.alive > rank] + rank
        for some in (at[i : i + self._some] for i in range(t, len(at), self._some)):
            sizes = np.maximum(self.walk.sizes[some], 1).tolist()
            yield Piece(self._batch(torch.from_numpy(some).to(self._rows.device)), sizes)

    def _until(self, t: int) -> int:
        """The step behind those that are fetched together from t on."""
        return max(t + 1, bisect_right(self._start, self._start[t] + self._some) - 1)

    def one(self, t: int, rank: int) -> Batch:
        """The batch of one client at step t, without padding."""
        if (t, rank) not in self._fetched:
            batches, sizes = next(self.alone(rank, t))
            several = [Batch(*(part[i, :size] for part in batches)) for i, size in enumerate(sizes)]
            self._fetched = {(t + i, rank): batch for i, batch in enumerate(several)}
        return self._fetched[t, rank]

    def first(self) -> "Stream":
        """The same stream, ending after its first step."""
        walk, count = self.walk, int(self.walk.start[1])
        return Stream(
            self.images, Walk(walk.rows[:count], walk.sizes[:count], walk.start[:2], walk.order), mean=self.mean
        )

    def _batch(self, at: slice | Tensor) -> Batch:
        rows = self._rows[at]
        return Batch(*self.images.labelled(rows), self._weight[at], rows)


def epochs(shards: Sequence[np.ndarray], count: int, batch_size: int | None, order: Order) -> Walk:
    """`count` passes over each shard, shuffled anew, in batches of `batch_size`; the last of a pass may be smaller."""
    passes = []
    for place, shard in enumerate(shards):
        width = min(batch_size or len(shard), len(shard))
        for _ in range(count):
            passes.append((place, shard[order(place, len(shard))], width))
    return _lay(passes, len(shards))


def steps(shards: Sequence[np.ndarray], counts: Sequence[int], batch_size: int | None, order: Order) -> Walk:
    """`counts` batches of each shard: its shuffled passes laid end to end, cut into equal pieces."""
    passes = []
    for place, (shard, count) in enumerate(zip(shards, counts, strict=True)):
        width = min(batch_size or len(shard), len(shard))
        needed = -(-count * width // len(shard))
        laid = np.concatenate([shard[order(place, len(shard))] for _ in range(needed)])
        passes.append((place, laid[: count * width], width))
    return _lay(passes, len(shards))


def in_order(shards: Sequence[np.ndarray], batch_size: int) -> Walk:
    """One unshuffled pass, for sums over samples; an empty shard takes one step that weighs nothing."""
    width = min(batch_size, max(1, *map(len, shards)))
    return _lay([(place, shard, width) for place, shard in enumerate(shards)], len(shards))


def _lay(passes: Sequence[tuple[int, np.ndarray, int]], clients: int) -> Walk:
    """Cut each (client, samples, batch size) into batches and lay them step after step."""
    lengths = np.zeros(clients, np.int64)
    for place, samples, size in passes:
        lengths[place] += max(-(-len(samples) // size), 1)
    ranks_of = np.argsort(-lengths, kind="stable")
    rank = np.empty(clients, np.int64)
    rank[ranks_of] = np.arange(clients)
    alive = np.searchsorted(-lengths[ranks_of], -np.arange(lengths.max()), side="left")
    start = np.concatenate([[0], np.cumsum(alive)])
    width = max(size for _, _, size in passes)
    rows = np.zeros((start[-1], width), np.int64)
    sizes = np.zeros(start[-1], np.int64)
    done = np.zeros(clients, np.int64)
    for place, samples, size in passes:
        count = max(-(-len(samples) // size), 1)
        at = start[done[place] : done[place] + count] + rank[place]
        done[place] += count
        full = len(samples) // size
        rows[at[:full], :size] = samples[: full * size].reshape(full, size)
        sizes[at[:full]] = size
        if rest := len(samples) - full * size:
            rows[at[full], :rest] = samples[full * size :]
            sizes[at[full]] = rest
    # padding shows a sample the batch has already, so that it is never out of range
    padding = np.arange(width) >= sizes[:, None]
    return Walk(np.where(padding, rows[:, :1], rows), sizes, start, ranks_of)
