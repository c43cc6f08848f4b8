"""One client after another."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from fedkd.core import tree
from fedkd.core.draws import drawing
from fedkd.core.tree import Tree
from fedkd.data.batches import Stream
from fedkd.federation.executors.base import Executor
from fedkd.models.net import Net


class Serial(Executor):
    """The plain loop; the fastest way to train convolutions on a CPU, where their weights lie channels last."""

    def shares(self, clients: int, size: int, device: torch.device, workers: int) -> int:
        return clients if workers > 1 else 1

    @torch.no_grad()
    def each(self, net: Net, fn: Callable[..., Tree], values: Sequence[Tree], clients: int) -> Tree:
        return _stacked([fn(net, *tree.take(tuple(values), i)) for i in range(clients)])

    @torch.no_grad()
    def scan(
        self, net: Net, step: Callable[..., Tree], carry: Tree, streams: Sequence[Stream], values: Sequence[Tree]
    ) -> Tree:
        walk, device = streams[0].walk, streams[0].images.pixels.device
        done: list[Tree] = [None] * len(walk.order)
        for rank, client in enumerate(walk.order.tolist()):
            own, value = tree.map(_channels_last, tree.take((carry, tuple(values)), client))
            with drawing(streams[0].seed(client)) if net.draws else nullcontext():
                if not self.walked(net, step, own, [stream.alone(rank) for stream in streams], value):
                    for t in range(int((walk.alive > rank).sum())):
                        with self.precision(device):
                            own = step(net, own, *(stream.one(t, rank) for stream in streams), *value)
            done[client] = own
        return _stacked(done)


def _stacked(done: list[Tree]) -> Tree:
    return tree.stack(done) if len(done) > 1 else tree.map(lambda leaf: leaf.unsqueeze(0), done[0])  # not copied


def _channels_last(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf
