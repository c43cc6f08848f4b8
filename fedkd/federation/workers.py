"""Threads that run clients side by side.

Torch lets go of Python's lock while it computes, so threads share the cohort's values and the dataset as they are.
Each computes with one core: that wastes less than all cores on one small matrix after another, and a client's numbers
do not depend on how many workers there are.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")
MOST = 8  # by default; Python's lock keeps more of them from gaining much


class Workers:
    """`count` threads; None: one for every core that torch uses."""

    def __init__(self, count: int | None = None) -> None:
        self.count = min(torch.get_num_threads(), MOST) if count is None else count

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the jobs return, in their order; they are begun in it, too. A single worker has all cores."""
        if self.count == 1:
            return [job() for job in jobs]
        with _one_core_each():
            if len(jobs) == 1:
                return [jobs[0]()]
            begun = [self._pool.submit(job) for job in jobs]
            try:
                return [job.result() for job in begun]
            finally:
                for job in begun:  # of those not begun, if one failed or the run was stopped
                    job.cancel()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.count, "fedkd", torch.set_num_threads, (1,))


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
    largest_first = np.argsort(-sizes, kind="stable")
    return [largest_first[start::count] for start in range(count)]
