"""Randomness as a function of (seed, purpose): never carried, so a resumed run draws what the first one drew."""

from hashlib import blake2b

import numpy as np
import torch


def derive(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(seed, "batches", round, client)``."""
    digest = blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def numpy_rng(seed: int, *purpose: int | str) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *purpose))


def torch_rng(seed: int, *purpose: int | str) -> torch.Generator:
    """A generator on the host, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
