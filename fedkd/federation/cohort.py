"""Who takes part in a round: a function of (seed, round)."""

import numpy as np

from fedkd.core.seeds import numpy_rng

SAMPLINGS = ("uniform", "by_size")


def cohort_size(participation: float, clients: int) -> int:
    """m = max(1, round(C·N))."""
    return max(1, round(participation * clients))


def draw(
    sizes: np.ndarray, participation: float, sampling: str, seed: int, round: int, without: frozenset[int] = frozenset()
) -> np.ndarray:
    """The cohort, in ascending order: without replacement, uniformly or with probability p_k = n_k/n."""
    count = cohort_size(participation, len(sizes))
    # one exponential a client, divided by its weight: the smallest are a draw without replacement
    clock = numpy_rng(seed, "cohort", round).exponential(size=len(sizes))
    if sampling == "by_size":
        clock /= sizes
    clock[list(without)] = np.inf
    count = min(count, len(sizes) - len(without))
    return np.sort(np.argpartition(clock, count - 1)[:count])
