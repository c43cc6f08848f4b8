"""Layers that keep no parameters: whoever runs them lends them some."""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class Lent(Generic[M]):
    """A module that runs with lent parameters and keeps none; torch.func.functional_call, without its overhead."""

    def __init__(self, module: M) -> None:
        self.module = module
        self.slots = [
            (holder, key, f"{path}.{key}".lstrip("."), empty)
            for path, part in module.named_modules()
            for holder in (part._parameters, part._buffers)
            for key, empty in holder.items()
            if empty is not None
        ]

    @contextmanager
    def having(self, state: Mapping[str, Tensor]) -> Iterator[M]:
        """The module with parameters and statistics by their names; those not given are not there."""
        try:
            for holder, key, name, _ in self.slots:
                if name in state:
                    holder[key] = state[name]
            yield self.module
        finally:
            for holder, key, _, empty in self.slots:
                holder[key] = empty


class Layers(threading.local, Generic[M]):
    """A network's layers without parameters, a set for every thread: whoever runs them lends them parameters."""

    def __init__(self, module: M) -> None:
        empty = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}  # not copied
        modules = [copy.deepcopy(module, dict(empty)) for _ in range(2)]
        self.training, self.predicting = Lent(modules[0].train()), Lent(modules[1].eval())
