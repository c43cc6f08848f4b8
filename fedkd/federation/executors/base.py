"""What an executor does."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fedkd.core.losses import Piece
from fedkd.core.tree import Tree
from fedkd.data.batches import Stream
from fedkd.models.net import Net


class Executor(ABC):
    """Runs a client's function at several clients; trees go in and come out with a first axis over clients."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype  # the lower precision of matrix products, or None

    @abstractmethod
    def each(self, net: Net, fn: Callable[..., Tree], values: Sequence[Tree], clients: int) -> Tree:
        """fn(net, *values) at every client."""

    @abstractmethod
    def scan(
        self, net: Net, step: Callable[..., Tree], carry: Tree, streams: Sequence[Stream], values: Sequence[Tree]
    ) -> Tree:
        """carry <- step(net, carry, *batches, *values) along every client's walk; the streams walk in step."""

    @abstractmethod
    def shares(self, clients: int, size: int, device: torch.device, workers: int) -> int:
        """Into how many shares to deal clients with `size` bytes each to work on; a share is run at once."""

    def walked(
        self, net: Net, step: Any, carry: Tree, pieces: Sequence[Iterable[Piece]], values: Sequence[Tree]
    ) -> bool:
        """Whether the step has gone all the way along its stream, if that is the only one, in place."""
        possible = len(pieces) == 1 and self.dtype is None and hasattr(step, "walk")
        return possible and step.walk(net, carry, *pieces, *values)

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Entered anew for every step: autocast keeps a copy of each weight until it is left."""
        return nullcontext() if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)
