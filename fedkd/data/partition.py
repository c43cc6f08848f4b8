"""Splits: which client holds which samples, and which of them it trains, validates and tests on.

Most entries say how many samples of each class a client shall have, as a matrix `counts[client, class]`; `deal` then
hands out the samples themselves. No sample goes to two clients and no client stays empty.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.random import Generator

from fedkd.core.errors import ConfigError, DataError
from fedkd.core.registry import Registry
from fedkd.core.seeds import numpy_rng
from fedkd.data.datasets import read_npz, write_npz

TRAIN, VALIDATION, TEST, UNUSED = range(4)  # roles; what is unused is in no assignment


class Assignment(NamedTuple):
    """Who holds what: the content of partition.npz."""

    # int64 sample numbers, counted through the dataset's training images, then its test images
    index: np.ndarray  # type: ignore[assignment]  # tuple.index gives way to the name in the file
    client: np.ndarray  # int32, who holds the sample
    role: np.ndarray  # uint8: TRAIN, VALIDATION or TEST
    public: np.ndarray  # int64 sample numbers of the held-out public set; may be empty

    def save(self, path: Path | str) -> None:
        write_npz(Path(path), self._asdict())

    @classmethod
    def load(cls, path: Path | str, clients: int, samples: int) -> "Assignment":
        """Read a split of `samples` samples over `clients` clients; `public` may be missing from the file."""
        file = Path(path).expanduser()
        arrays = {"public": np.empty(0, np.int64), **read_npz(file, cls._fields)}
        faults = _form_faults(arrays) or _content_faults(cls(**arrays), clients, samples)
        if faults:
            raise DataError("\n".join([f"{file} cannot be used as a split:", *faults]))
        kinds = {"client": np.int32, "role": np.uint8}
        return cls(**{name: arrays[name].astype(kinds.get(name, np.int64)) for name in cls._fields})


@dataclass(frozen=True, kw_only=True)
class Partition(ABC):
    """A way to share out samples; its fields are its config.

    Parameters
    ----------
    train : the fraction of its samples a client trains on, or a list from which each client draws its own.
    validation, test : further fractions; what then remains of 1 is left unused. Rounding leaves every client a
        training sample, then a test sample, then one for validation, as far as its samples go.
    """

    name: ClassVar[str]
    train: Any = 0.75  # no config schema knows "a number or a list"
    validation: float = 0.0
    test: float = 0.25

    @abstractmethod
    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        """For each client, the positions in `labels` of the samples it holds."""

    def assign(self, labels: np.ndarray, pool: np.ndarray, clients: int, seed: int) -> Assignment:
        """Share out the samples numbered `pool` of a dataset with these labels, and split them within each client."""
        if clients > len(pool):
            raise ConfigError(
                f"clients={clients}, but there are only {len(pool)} samples to share out. Choose clients={len(pool)} "
                "or fewer, dataset.pool=all, or a larger dataset."
            )
        rng = numpy_rng(seed, "partition")
        shares = self.shares(labels[pool], clients, rng)
        sizes = np.array([len(share) for share in shares])
        client = np.repeat(np.arange(clients, dtype=np.int32), sizes)
        shuffled = pool[np.concatenate(shares)[shuffled_by(client, rng)]]
        role = self._roles(sizes, rng)
        used = role != UNUSED
        return Assignment(shuffled[used].astype(np.int64), client[used], role[used], np.empty(0, np.int64))

    def _roles(self, sizes: np.ndarray, rng: Generator) -> np.ndarray:
        """The role of each client's first, second, ... sample, client by client."""
        train = rng.choice(_fractions(self.train), len(sizes))
        tests = (sizes >= 2) & (self.test > 0)
        validates = (sizes >= 3) & (self.validation > 0)
        end = np.maximum(np.rint((train + self.validation + self.test) * sizes), 1 + tests + validates)
        trained = np.clip(np.rint(train * sizes), 1, end - tests - validates)
        validated = np.clip(np.rint((train + self.validation) * sizes), trained + validates, end - tests)
        bounds = np.stack([trained, validated, end])
        role: np.ndarray = (ranks(sizes) >= np.repeat(bounds, sizes, axis=1)).sum(0, dtype=np.uint8)
        return role

    def problems(self) -> list[str]:
        """What is wrong with these settings, if anything."""
        try:
            train = _fractions(self.train)
        except (TypeError, ValueError):
            train = np.empty(0)
        if not len(train) or not ((train > 0) & (train <= 1)).all():
            return [
                f"partition.train={self.train} must be a fraction above 0 and up to 1, "
                "or a list of such: partition.train=[0.1,0.3,0.4]."
            ]
        found = [
            f"partition.{name}={value} must lie in [0, 1)."
            for name, value in (("validation", self.validation), ("test", self.test))
            if not 0 <= value < 1
        ]
        if not train.max() + self.validation + self.test <= 1 + 1e-9:
            found.append(
                f"partition.train={self.train}, validation={self.validation} and test={self.test} add up to over 1."
            )
        return found

    def _below(self, least: int, *fields: str) -> list[str]:
        return [
            f"partition.{name}={value} must be at least {least}."
            for name in fields
            if (value := getattr(self, name)) is not None and not value >= least
        ]

    def _not_positive(self, name: str) -> list[str]:
        value = getattr(self, name)
        return [] if 0 < value < math.inf else [f"partition.{name}={value} must be a positive number."]


register = PARTITIONS = Registry[Partition]("partition", "fedkd.data")


@register("iid")
@dataclass(frozen=True, kw_only=True)
class IID(Partition):
    """Every client the same number of samples (±1), drawn from all; each sample is used."""

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), clients)


@register("dirichlet")
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Each class is shared out over the clients by a draw from Dir(α); each sample is used (PerFed-CKT, PersFL's DS-2).

    Parameters
    ----------
    alpha : α > 0; small: few clients hold a class; large: `iid`.
    min_samples : what every client holds at the least, but no more than half an equal share of the data. Clients below
        it are filled up from those above, each from few of them, so that its mix of classes is as skewed as theirs.
    """

    alpha: float = 0.1
    min_samples: int = 10

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        supply = np.bincount(labels)
        over_clients = rng.dirichlet(np.full(clients, self.alpha), len(supply))
        counts = rng.multinomial(supply, over_clients).T
        return deal(labels, counts, rng, least=max(1, min(self.min_samples, len(labels) // clients // 2)))

    def problems(self) -> list[str]:
        return super().problems() + self._not_positive("alpha") + self._below(1, "min_samples")


@register("dirichlet_equal")
@dataclass(frozen=True, kw_only=True)
class DirichletEqual(Partition):
    """Each client's mix of classes is a draw from Dir(β), and all clients have the same size (FedHKD).

    Where a class runs out, those who want more of it take more of their other classes.

    Parameters
    ----------
    beta : β > 0; small: a client has few classes; large: `iid`.
    fraction : of the samples that are used at all.
    """

    beta: float = 0.5
    fraction: float = 1.0

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        size = int(self.fraction * len(labels) + 1e-9) // clients
        if size < 1:
            enough = math.ceil(1000 * clients / len(labels)) / 1000
            raise ConfigError(
                f"partition.fraction={self.fraction} of {len(labels)} samples is less than one for each of "
                f"clients={clients}. Choose partition.fraction={enough:g} or more."
            )
        supply = np.bincount(labels)
        mix = rng.dirichlet(np.full(len(supply), self.beta), clients)
        # a trace of every class, so that nobody is stuck when all of its own have run out
        return deal(labels, draw(mix + 1e-9, size, supply, rng), rng)

    def problems(self) -> list[str]:
        found = super().problems() + self._not_positive("beta")
        if not 0 < self.fraction <= 1:
            found.append(f"partition.fraction={self.fraction} must be above 0 and at most 1.")
        return found


@register("pathological")
@dataclass(frozen=True, kw_only=True)
class Pathological(Partition):
    """Each client has few classes (KT-pFL's case 2: 2 classes, 300 samples of each).

    A class that cannot serve all who hold it is shared out evenly among them.

    Parameters
    ----------
    classes_per_client : c; all classes are held equally often (±1).
    samples_per_class : s, what a client has of each of its classes; None: all there are, shared out evenly.
    """

    classes_per_client: int = 2
    samples_per_class: int | None = None

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        labels, supply = compact(labels)
        held = hold_classes(clients, self.classes_per_client, len(supply), rng)
        counts = evenly(held, supply)
        return deal(labels, np.minimum(counts, self.samples_per_class or len(labels)), rng)

    def problems(self) -> list[str]:
        return super().problems() + self._below(1, "classes_per_client", "samples_per_class")


@register("grouped")
@dataclass(frozen=True, kw_only=True)
class Grouped(Partition):
    """Groups of clients with all classes, but different ones in plenty (KT-pFL's case 1, by its Appendix B).

    With `counts` [450, 150], the first half of the clients has 450 samples of each class of the first half and 150 of
    the others; the second half of the clients mirrors it. Numbers the data cannot serve are all scaled down alike.

    Parameters
    ----------
    counts : samples of a class, one number for each part of the classes; there are as many groups as numbers, and
        each group has them moved on by one part.
    """

    counts: list[int] = field(default_factory=lambda: [450, 150])

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        labels, supply = compact(labels)
        groups, classes = len(self.counts), len(supply)
        group = np.arange(clients) * groups // clients
        part = np.arange(classes) * groups // classes
        wish = np.asarray(self.counts)[(part - group[:, None]) % groups]
        return deal(labels, scaled_down(wish, supply), rng)

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.counts or min(self.counts) < 0 or max(self.counts) == 0:
            found.append(f"partition.counts={list(self.counts)} must be numbers of samples, e.g. [450,150].")
        return found


@register("sized_classes")
@dataclass(frozen=True, kw_only=True)
class SizedClasses(Partition):
    """Few classes for each client, and sizes drawn uniformly (CGPFL).

    A client has equally many samples of each of its classes. 40 clients in [400, 5000] want 108,000 of CGPFL's 60,000
    images, so sizes the data cannot serve are all scaled down alike.

    Parameters
    ----------
    classes_per_client : all classes are held equally often (±1).
    smallest, largest : the range of a client's number of samples.
    """

    classes_per_client: int = 2
    smallest: int = 400
    largest: int = 5000

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        labels, supply = compact(labels)
        held = hold_classes(clients, self.classes_per_client, len(supply), rng)
        sizes = rng.integers(self.smallest, self.largest, clients, endpoint=True)
        wish = held * (sizes // self.classes_per_client)[:, None]
        return deal(labels, scaled_down(wish, supply), rng)

    def problems(self) -> list[str]:
        found = super().problems() + self._below(1, "classes_per_client", "smallest")
        if self.largest < self.smallest:
            found.append(f"partition.largest={self.largest} is below partition.smallest={self.smallest}.")
        return found


@register("ds1")
@dataclass(frozen=True, kw_only=True)
class DS1(Partition):
    """PersFL's DS-1: clients of equal size with k classes each, of which they have different numbers of samples.

    The size is the largest that serves everyone, usually over 95 % of an equal share of the data.

    Parameters
    ----------
    classes_per_client : k; all classes are held equally often (±1).
    """

    classes_per_client: int = 4

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        labels, supply = compact(labels)
        size = len(labels) // clients
        held = hold_classes(clients, self.classes_per_client, len(supply), rng)
        mix = relieved(held * rng.exponential(size=held.shape), size, supply)
        shares = deal(labels, draw(mix, size, supply, rng), rng)
        smallest = min(map(len, shares))
        return [rng.permutation(share)[:smallest] for share in shares]

    def problems(self) -> list[str]:
        return super().problems() + self._below(1, "classes_per_client")


@register("ds3")
@dataclass(frozen=True, kw_only=True)
class DS3(Partition):
    """PersFL's DS-3: few classes for each client, and sizes in the ratios of draws from a log-normal distribution.

    The sizes are as large as the data allow without two clients sharing a sample. PersFL's μ = 0 only scales them all.

    Parameters
    ----------
    classes_per_client : all classes are held equally often (±1); a client has equally many samples of each of its own.
    sigma : σ ≥ 0 of the logarithm; 0 makes all sizes equal.
    min_samples : what every client has before the rest is shared out, but no more than half of what an equal share
        would be.
    """

    classes_per_client: int = 2
    sigma: float = 2.0
    min_samples: int = 10

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        labels, supply = compact(labels)
        held = hold_classes(clients, self.classes_per_client, len(supply), rng)
        holders = np.maximum(held.sum(0), 1)
        least = min(self.min_samples // self.classes_per_client, (supply // holders).min() // 2)
        spare = supply - least * held.sum(0)
        logarithms = rng.normal(scale=self.sigma, size=clients)
        wish = held * np.exp(logarithms - logarithms.max())[:, None]
        counts = least * held + scaled_down(wish / wish.sum() * len(labels), spare)
        return deal(labels, counts, rng)

    def problems(self) -> list[str]:
        return super().problems() + self._below(1, "classes_per_client") + self._below(0, "sigma", "min_samples")


@register("file")
@dataclass(frozen=True, kw_only=True)
class File(Partition):
    """A split made before: the partition.npz of another run, or of another tool.

    It says all, also the roles, and may use any sample of the dataset, whatever `dataset.pool` is.

    Parameters
    ----------
    path : of an npz file with the arrays `index`, `client`, `role` (see `Assignment`), and perhaps `public`.
    """

    path: str | None = None

    def shares(self, labels: np.ndarray, clients: int, rng: Generator) -> list[np.ndarray]:
        split = self._load(labels, clients)
        owner = np.full(len(labels), clients)
        owner[split.index] = split.client
        return by_client(owner, clients)

    def assign(self, labels: np.ndarray, pool: np.ndarray, clients: int, seed: int) -> Assignment:
        return self._load(labels, clients)

    def _load(self, labels: np.ndarray, clients: int) -> Assignment:
        return Assignment.load(self.path or "", clients, len(labels))

    def problems(self) -> list[str]:
        return [] if self.path else ["partition=file needs the file: partition.path=partition.npz."]


def compact(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The labels renumbered so that every class occurs, and how many samples each has."""
    _, renumbered, supply = np.unique(labels, return_inverse=True, return_counts=True)
    return renumbered, supply


def hold_classes(clients: int, each: int, classes: int, rng: Generator) -> np.ndarray:
    """Which of the classes a client holds, bool [client, class]: `each` of them, and every class equally often (±1).

    Classes are dealt like cards from shuffled decks. A deck is dealt as often as it takes to end with a whole hand,
    always in the same order, so no hand has a card twice.
    """
    if each > classes:
        raise ConfigError(
            f"partition.classes_per_client={each}, but the data have {classes} classes. "
            f"Choose partition.classes_per_client={classes} or fewer."
        )
    hands = classes // math.gcd(classes, each)
    decks = rng.permuted(np.tile(np.arange(classes), (math.ceil(clients / hands), 1)), axis=1)
    dealt = decks[:, np.arange(hands * each) % classes].reshape(-1, each)[:clients]
    held = np.zeros((clients, classes), bool)
    np.put_along_axis(held, dealt, True, axis=1)
    return held


def evenly(held: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """Counts [client, class] that give all of a class to those who hold it, the same number to each (±1)."""
    share, over = np.divmod(supply, np.maximum(held.sum(0), 1))
    turn = held.cumsum(0)
    counts: np.ndarray = held * (share + (turn <= over))
    return counts


def scaled_down(wish: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """Counts [client, class] as wished; if a class cannot serve its wishes, all wishes are scaled down alike."""
    asked = wish.sum(0)
    scarce = asked > supply
    factor = (supply[scarce] / asked[scarce]).min(initial=1.0)
    # what should be a whole number may lie a rounding error below it
    counts: np.ndarray = np.floor(wish * factor + 1e-9).astype(np.int64)
    return counts


def draw(mix: np.ndarray, size: int, supply: np.ndarray, rng: Generator) -> np.ndarray:
    """Counts [client, class] of `size` samples for each client, drawn by its `mix` of classes, as far as these reach.

    All clients draw at once, and chance decides who gets the last of a class. Then it drops out of the mixes, and who
    lacks samples draws again: one pass more for each class that runs out.
    """
    counts, left = np.zeros(mix.shape, np.int64), supply.copy()
    while True:
        weights = mix * (left > 0)
        total = weights.sum(1)
        lacking = np.where(total > 0, size - counts.sum(1), 0)
        if not lacking.any():
            return counts
        asked = rng.multinomial(lacking, weights / np.where(total > 0, total, 1)[:, None])
        for scarce in np.flatnonzero(asked.sum(0) > left):
            asked[:, scarce] = rng.multivariate_hypergeometric(asked[:, scarce], left[scarce])
        counts += asked
        left -= asked.sum(0)


def relieved(mix: np.ndarray, size: int, supply: np.ndarray, sweeps: int = 100) -> np.ndarray:
    """Mixes of the same classes, brought near to what `supply` can serve when each client draws `size` samples.

    Classes in too great demand are damped in turn with scaling every mix to 1 (Sinkhorn's iteration, one-sided).
    """
    for _ in range(sweeps):
        asked = size * mix.sum(0)
        mix = mix * (supply / np.maximum(asked, supply))
        mix = mix / mix.sum(1, keepdims=True)
    return mix


def deal(labels: np.ndarray, counts: np.ndarray, rng: Generator, least: int = 1) -> list[np.ndarray]:
    """For each client, the positions of `counts[client, class]` random samples; who has below `least` is filled up."""
    clients, classes = counts.shape
    nobody = np.bincount(labels, minlength=classes) - counts.sum(0)
    held = np.vstack([counts, nobody])
    owner = np.empty(len(labels), np.int64)
    owner[shuffled_by(labels, rng)] = np.repeat(np.tile(np.arange(clients + 1), classes), held.T.ravel())
    return by_client(filled_up(owner, clients, least, rng), clients)


def filled_up(owner: np.ndarray, clients: int, least: int, rng: Generator) -> np.ndarray:
    """The owner of each sample, after clients with less than `least` took from those with more, and from nobody.

    Owner number `clients` stands for nobody. Givers give in proportion to what they have to spare.
    """
    sizes = np.bincount(owner, minlength=clients + 1)
    over = sizes - np.append(np.full(clients, least), 0)
    spare, lacking = np.maximum(over, 0), np.maximum(-over, 0)
    if not lacking.any():
        return owner
    given = np.diff(spare.cumsum() * lacking.sum() // spare.sum(), prepend=0)
    moved = shuffled_by(owner, rng)[ranks(sizes) < np.repeat(given, sizes)]
    owner = owner.copy()
    owner[moved] = np.repeat(np.arange(clients + 1), lacking)
    return owner


def by_client(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """For each client, the positions it owns."""
    ends = np.bincount(owner, minlength=clients + 1).cumsum()
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])[:clients]


def shuffled_by(key: np.ndarray, rng: Generator) -> np.ndarray:
    """All positions, ordered by their key, and at random where keys are equal."""
    shuffled = rng.permutation(len(key))
    return shuffled[np.argsort(key[shuffled], kind="stable")]


def ranks(sizes: np.ndarray) -> np.ndarray:
    """0, 1, ..., size - 1 for each of the sizes, one after another."""
    starts = sizes.cumsum() - sizes
    numbers: np.ndarray = np.arange(sizes.sum()) - np.repeat(starts, sizes)
    return numbers


def _fractions(train: Any) -> np.ndarray:
    values: list[Any] = list(train) if isinstance(train, Sequence) else [train]
    return np.array(values, dtype=np.float64)


def _form_faults(arrays: dict[str, np.ndarray]) -> list[str]:
    """What keeps these arrays from being read as an assignment."""
    if missing := [name for name in Assignment._fields if name not in arrays]:
        return [f"it has no {', '.join(missing)}; needed are the arrays index, client and role."]
    found = [
        f"{name} is {array.dtype} of shape {array.shape}; it must be integers in one dimension."
        for name, array in arrays.items()
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size)
    ]
    lengths = {name: arrays[name].shape for name in ("index", "client", "role")}
    if not found and len(set(lengths.values())) > 1:
        found.append("its arrays differ in length: " + ", ".join(f"{k} {v[0]}" for k, v in lengths.items()) + ".")
    return found


def _content_faults(split: Assignment, clients: int, samples: int) -> list[str]:
    """What is wrong with a split of `samples` samples over `clients` clients."""
    found = []
    numbers = np.concatenate([split.index, split.public])
    if outside := np.count_nonzero((numbers < 0) | (numbers >= samples)):
        found.append(f"{outside} of its sample numbers are not in this dataset, which has 0 to {samples - 1}.")
    if twice := len(numbers) - len(np.unique(numbers)):
        found.append(f"it names {twice} samples more than once; a sample goes to one client, or to the public set.")
    if (odd := np.setdiff1d(split.role, (TRAIN, VALIDATION, TEST))).size:
        found.append(f"role {odd[0]} is unknown; there are 0 (train), 1 (validation) and 2 (test).")
    if ((split.client < 0) | (split.client >= clients)).any():
        low, high = split.client.min(), split.client.max()
        found.append(f"its client numbers run from {low} to {high}; clients={clients} needs 0 to {clients - 1}.")
    elif (idle := np.setdiff1d(np.arange(clients), split.client[split.role == TRAIN])).size:
        found.append(f"client {idle[0]} has no training sample ({idle.size} of clients={clients} have none).")
    return found
