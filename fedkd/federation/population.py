"""Everyone who could take part: data, shards and architectures, fixed for the run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkd.data.datasets import Images
from fedkd.data.partition import TEST, TRAIN, VALIDATION, Assignment
from fedkd.models.net import Net


class Shards:
    """The clients' samples of one role, end to end, so that 100,000 clients are two arrays."""

    def __init__(self, assignment: Assignment, role: int, clients: int) -> None:
        chosen = np.flatnonzero(assignment.role == role)
        owner = assignment.client[chosen]
        self.index = assignment.index[chosen[np.argsort(owner, kind="stable")]].astype(np.int64)
        self.sizes = np.bincount(owner, minlength=clients)
        self._end = np.cumsum(self.sizes)

    def __getitem__(self, client: int) -> np.ndarray:
        return self.index[self._end[client] - self.sizes[client] : self._end[client]]

    def of(self, clients: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        return [self[int(client)] for client in clients]


@dataclass(frozen=True)
class Population:
    """The clients. `member[k]` is the number of client k's architecture in `nets`."""

    images: Images
    public: Images | None  # unlabelled
    nets: dict[str, Net]
    member: np.ndarray
    train: Shards
    validation: Shards
    test: Shards
    global_test: np.ndarray  # sample numbers no client holds, on which the server's model is judged

    @classmethod
    def of(
        cls,
        images: Images,
        public: Images | None,
        nets: dict[str, Net],
        member: np.ndarray,
        assignment: Assignment,
    ) -> "Population":
        train, validation, test = (Shards(assignment, role, len(member)) for role in (TRAIN, VALIDATION, TEST))
        held = np.union1d(assignment.index, assignment.public)
        tests = np.arange(images.train, len(images.labels))
        return cls(images, public, nets, member, train, validation, test, np.setdiff1d(tests, held))

    def __len__(self) -> int:
        return len(self.member)

    def by_architecture(self, clients: np.ndarray) -> dict[str, np.ndarray]:
        """The places in `clients` of each architecture's clients."""
        groups = {arch: np.flatnonzero(self.member[clients] == i) for i, arch in enumerate(self.nets)}
        return {arch: places for arch, places in groups.items() if len(places)}
