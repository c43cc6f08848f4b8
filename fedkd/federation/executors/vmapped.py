"""All clients of one architecture at once, by torch.func.vmap."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from fedkd.core import tree
from fedkd.core.losses import Batch
from fedkd.core.tree import Tree
from fedkd.data.batches import Stream
from fedkd.federation.executors.base import Executor
from fedkd.models.net import Net

CACHE = 8 * 2**20  # bytes of models that a worker steps together on a CPU
FEW = 5  # clients that it steps together however large they are: one by one they would wait for Python
ALONE = 1 * 2**20  # bytes of models that are worth a worker of their own


class Vmapped(Executor):
    """One batched step for every client that still has a batch; at most `chunk` clients together.

    On a CPU a chunk is by default as many clients as keep their models in the cache from step to step.
    """

    def __init__(self, dtype: torch.dtype | None = None, chunk: int | None = None) -> None:
        super().__init__(dtype)
        self.chunk = chunk

    def shares(self, clients: int, size: int, device: torch.device, workers: int) -> int:
        if self.chunk is not None or device.type != "cpu":
            return -(-clients // (self.chunk or clients))
        busy = max(1, min(workers, clients, clients * size // ALONE))
        rounds = -(-clients // (busy * max(FEW, CACHE // size)))  # in which all workers are busy
        return min(clients, busy * rounds)

    @torch.no_grad()
    def each(self, net: Net, fn: Callable[..., Tree], values: Sequence[Tree], clients: int) -> Tree:
        if not any(True for _ in tree.leaves(tuple(values))):  # nothing to batch over: the same at every client
            return tree.expand(fn(net, *values), clients)
        return torch.vmap(partial(fn, net))(*values)

    @torch.no_grad()
    def scan(
        self, net: Net, step: Callable[..., Tree], carry: Tree, streams: Sequence[Stream], values: Sequence[Tree]
    ) -> Tree:
        walk = streams[0].walk
        lifted = partial(step.together, net) if hasattr(step, "together") else torch.vmap(partial(step, net))
        # running statistics must not see padding: there, batches of unequal sizes are stepped separately
        apart = net.batch_statistics and streams[0].mean
        device = streams[0].images.pixels.device
        carry, value = tree.rows((carry, tuple(values)), walk.order)
        if self.walked(net, step, carry, [stream.together() for stream in streams], value):
            return tree.rows(carry, np.argsort(walk.order))
        finished: list[Tree] = []
        busy = len(walk.order)
        for t, alive in enumerate(walk.alive.tolist()):
            if alive < busy:
                finished.append(tree.take(carry, slice(alive, busy)))
                carry, value = tree.take((carry, value), slice(alive))
                busy = alive
            with self.precision(device):
                batches = [stream.step(t) for stream in streams]
                if apart:
                    carry = _by_size(lifted, carry, batches, value, [_sizes(stream, t) for stream in streams])
                else:
                    carry = lifted(carry, *batches, *value)
        carry = tree.concatenate([carry, *reversed(finished)])
        return tree.rows(carry, np.argsort(walk.order))


def _sizes(stream: Stream, t: int) -> np.ndarray:
    return stream.walk.sizes[stream.walk.start[t] : stream.walk.start[t + 1]]


def _by_size(
    lifted: Callable[..., Tree], carry: Tree, batches: Sequence[Batch], value: Tree, sizes: Sequence[np.ndarray]
) -> Tree:
    """The same step, for the clients of each batch size apart and without padding."""
    kinds, kind = np.unique(np.stack(sizes, 1), axis=0, return_inverse=True)
    device = batches[0].x.device
    parts, places = [], []
    for i, widths in enumerate(kinds.tolist()):
        rows = torch.from_numpy(np.flatnonzero(kind.ravel() == i)).to(device)
        cut = [tree.map(lambda leaf, r=rows, w=width: leaf[r, :w], b) for b, width in zip(batches, widths, strict=True)]
        parts.append(lifted(tree.take(carry, rows), *cut, *tree.take(value, rows)))
        places.append(rows)
    return tree.take(tree.concatenate(parts), torch.argsort(torch.cat(places)))
