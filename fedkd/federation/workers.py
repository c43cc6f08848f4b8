"""Threads that run clients side by side.

Torch lets go of Python's lock while it computes, so threads share the cohort's values and the dataset as they are.
Each computes with one core: that wastes less than all cores on one small matrix after another, and a client's numbers
do not depend on how many workers there are.
"""

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TypeVar

import numpy as np
import torch

from fedkd.core import tree
from fedkd.core.tree import Tree

T = TypeVar("T")
HEAP = 2**26  # bytes of glibc's largest heap of a thread
MOST = 8  # by default; Python's lock keeps more of them from gaining much


class Workers:
    """`count` threads; None: one for every core that torch uses."""

    def __init__(self, count: int | None = None) -> None:
        self.count = min(torch.get_num_threads(), MOST) if count is None else count
        _keep_freed_memory()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the jobs return, in their order; they are begun in it, too. A single worker has all cores.

        The calling thread is one of the workers: were it to wait for all of them, the system would often begin with
        two on one core, and need some milliseconds to see it.
        """
        if self.count == 1:
            return [job() for job in jobs]
        todo, done = deque(enumerate(jobs)), dict[int, T]()

        def work() -> None:
            try:
                for place, job in _taken(todo):
                    done[place] = job()
            finally:
                todo.clear()  # of what is not begun, if a job failed or the run was stopped

        with _one_core_each():
            others = [self._pool.submit(work) for _ in range(min(self.count, len(jobs)) - 1)]
            work()
            for other in others:
                other.result()
        return [done[place] for place in range(len(jobs))]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.count - 1, "fedkd", torch.set_num_threads, (1,))


def _taken(todo: "deque[T]") -> Iterator[T]:
    """What is left, for whoever asks first."""
    while todo:
        try:
            yield todo.popleft()
        except IndexError:  # another was quicker
            return


@cache
def _keep_freed_memory() -> None:
    """Let the C library use freed memory again instead of giving it back.

    By default every large tensor is mapped and unmapped, and its pages are cleared one by one, while the other threads
    wait: a fifth of the time of two workers with a model of 6 MB. A thread's memory lies in heaps of a limited size,
    the last of which goes back when it is empty, unless more than that is to be kept: a twentieth of SCAFFOLD's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc has it
        trim_threshold, top_pad, mmap_threshold, most = -1, -2, -3, 2**31 - 1
        mallopt(trim_threshold, most)
        mallopt(mmap_threshold, most)
        mallopt(top_pad, HEAP)


@contextmanager
def _one_core_each() -> Iterator[None]:
    """A part of torch's setting is each thread's own, a part is common to all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def deal(sizes: np.ndarray, count: int) -> list[np.ndarray]:
    """The places of the clients in `count` shares of about the same number of samples, larger clients first."""
    if (sizes == sizes[0]).all():  # neighbours, whose values need not be copied
        return np.array_split(np.arange(len(sizes)), count)
    shares: list[list[int]] = [[] for _ in range(count)]
    load = np.zeros(count)
    for place in np.argsort(-sizes, kind="stable"):
        least = int(load.argmin())
        shares[least].append(int(place))
        load[least] += max(int(sizes[place]), 1)  # no share stays empty
    return [np.array(share) for share in shares]


class Gathered:
    """What the shares come to, put in the clients' order by the workers themselves.

    Parameters
    ----------
    clients : how many there are in all.
    like : what has the shapes of what they come to, where that is known. Memory is then set aside at once, by the main
        thread: where workers set much of it aside, it is not used again.
    """

    def __init__(self, clients: int, like: Tree = None) -> None:
        self.clients = clients
        self.whole = tree.map(_empty, like)
        self._lock = threading.Lock()

    def own(self, share: np.ndarray, value: Tree) -> Tree:
        """The rows of `value` for a share, to write over: in their last place already, if they lie side by side."""
        if not tree.adjoining(share):
            return tree.take(value, torch.from_numpy(share))  # a copy
        # .data: autograd, which watches over memory it may need, would take one worker's writing for another's
        places = tree.rows(self.whole, share), tree.rows(value, share)
        return tree.map(lambda room, row: room.data.copy_(row), *places)

    def put(self, share: np.ndarray, part: Tree) -> None:
        if len(share) == self.clients and self.whole is None:
            self.whole = tree.rows(part, np.argsort(share))
            return
        with self._lock:
            if self.whole is None:
                self.whole = tree.map(lambda leaf: leaf.new_empty(self.clients, *leaf.shape[1:]), part)
        tree.put_rows(self.whole, share, part)


def _empty(leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(leaf, memory_format=torch.contiguous_format)
