"""The federation of one round: an algorithm's only window on the world."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fedkd.core import tree
from fedkd.core.errors import Diverged
from fedkd.core.fit import Adding, Descent, Filling, Fit, Loss
from fedkd.core.losses import Batch
from fedkd.core.optim import Clipped, Local
from fedkd.core.seeds import derive, numpy_rng
from fedkd.core.tree import Params, Tree
from fedkd.data import batches
from fedkd.data.batches import Stream
from fedkd.data.datasets import Images
from fedkd.data.public import Public
from fedkd.federation.executors import Executor
from fedkd.federation.ledger import Ledger, Row
from fedkd.federation.placed import Placed, Received
from fedkd.federation.population import Population, Shards
from fedkd.federation.workers import Gathered, Workers, deal
from fedkd.models.net import Net

Run = Callable[[Executor, Net, np.ndarray, Sequence[Tree]], Tree]  # at some clients of one architecture
SUM_BATCH = 512  # samples a step when sums are taken over a client's data


@dataclass(frozen=True)
class World:
    """What stays the same all through a run."""

    population: Population
    executors: dict[str, Executor]  # by architecture
    local: Local
    rounds: int
    seed: int
    public: Public
    workers: Workers = field(default_factory=lambda: Workers(1))


class Federation:
    """The server's view of one round with one cohort."""

    def __init__(self, world: World, round: int, cohort: np.ndarray, ledger: Ledger) -> None:
        self._world, self._ledger = world, ledger
        self._groups = world.population.by_architecture(cohort)
        self.round, self.rounds = round, world.rounds  # t, and the last one
        self.cohort = cohort
        self.population = len(world.population)
        self.sizes = world.population.train.sizes[cohort]  # |D_i|
        self.local = world.local
        self.lr = world.local.lr_at(round, world.rounds)
        self.notes: dict[str, Placed[Any]] = {}  # what `personal` leaves for `observe` of the same evaluation
        self.sent: Placed[Params] | None = None  # the models that the cohort last sent up, if it did

    @property
    def archs(self) -> list[str]:
        """The cohort's architectures, client by client."""
        names = list(self._world.population.nets)
        return [names[i] for i in self._world.population.member[self.cohort]]

    @property
    def nets(self) -> dict[str, Net]:
        return self._world.population.nets

    @cached_property
    def class_sizes(self) -> torch.Tensor:
        """N_i^j, client i's training samples of class j, [cohort, classes]; known to the server as `sizes` are."""
        images, classes = self._world.population.images, self._world.population.images.classes
        device = images.labels.device
        rows = np.concatenate(self._world.population.train.of(self.cohort))
        places = torch.from_numpy(np.repeat(np.arange(len(self.cohort)), self.sizes)).to(device)
        cells = places * classes + images.labels[torch.from_numpy(rows).to(device)]
        counts = torch.zeros(len(self.cohort) * classes, device=device)
        return counts.index_add(0, cells, torch.ones(len(rows), device=device)).view(-1, classes)

    # what crosses the network

    def down(self, value: Tree, what: str) -> Placed[Any]:
        """One value to every client of the cohort."""
        self._ledger.down(self.round, what, len(self.cohort), value)
        return Placed({arch: tree.expand(value, len(places)) for arch, places in self._groups.items()})

    def down_each(self, values: Sequence[Tree], what: str) -> Placed[Any]:
        """To client i of the cohort, values[i]."""
        self._ledger.down_each(self.round, what, values)
        return Placed({arch: tree.stack([values[i] for i in places]) for arch, places in self._groups.items()})

    def down_by_architecture(self, values: Mapping[str, Tree], what: str) -> Placed[Any]:
        """To every client the value of its architecture."""
        self._ledger.down_each(self.round, what, [values[arch] for arch in self.archs])
        return Placed({arch: tree.expand(values[arch], len(places)) for arch, places in self._groups.items()})

    def up(self, placed: Placed[Any], what: str) -> Received[Any]:
        """Clients to server."""
        stacks = [(places, placed._stacks[arch]) for arch, places in self._groups.items()]
        self._ledger.up(self.round, what, len(self.cohort), [stack for _, stack in stacks])
        if all(isinstance(stack, Params) for _, stack in stacks):
            self.sent = placed
        return Received(stacks)

    @property
    def crossed(self) -> list[Row]:
        """What has crossed so far."""
        return self._ledger.rows

    # what the clients compute

    def each(self, fn: Callable[..., Any], *values: Placed[Any]) -> Placed[Any]:
        """fn(net, *values) at every client."""
        return self._lift(lambda executor, net, who, own: executor.each(net, fn, own, len(who)), values)

    def sum(self, fn: Callable[..., Any], *values: Placed[Any], over: str = "train") -> Placed[Any]:
        """Σ over batches of fn(net, batch, *values); over "train" or "validation", where a batch's weights are 1."""
        shards = {"train": self._world.population.train, "validation": self._world.population.validation}[over]
        return self.sum_over(shards, fn, *values)

    def sum_over(self, shards: Shards, fn: Callable[..., Any], *values: Placed[Any]) -> Placed[Any]:
        def fold(executor: Executor, net: Net, who: np.ndarray, own: Sequence[Tree]) -> Tree:
            walk = batches.in_order(shards.of(who), SUM_BATCH)
            stream = Stream(self._world.population.images, walk, mean=False)
            return executor.scan(net, Adding(fn), (), [stream], own)

        return self._lift(fold, values)

    def table(self, fn: Callable[..., torch.Tensor], width: int, *values: Placed[Any]) -> Placed[torch.Tensor]:
        """fn(net, batch, *values) of each training sample, [b, width], in the rows that `batch.row` names in training.

        What does not change while a client trains is taken once a round so, not at every step. All clients have one
        table, with a row for each sample of the dataset, of which they fill, and read, their own.
        """
        images = self._world.population.images
        table = images.mean.new_empty(len(images.labels) + 1, width)  # one for padding

        def fill(executor: Executor, net: Net, who: np.ndarray, own: Sequence[Tree]) -> Tree:
            stream = Stream(images, batches.in_order(self._world.population.train.of(who), SUM_BATCH), mean=False)
            return executor.scan(net, Filling(fn, table), (), [stream], own)

        self._lift(fill, values)
        return Placed({arch: tree.expand(table, len(places)) for arch, places in self._groups.items()})

    def train(
        self,
        step: Callable[..., Any],
        carry: Placed[Any],
        *values: Placed[Any],
        over: str = "train",
        draws: int = 1,
        beside: int | None = None,
        **pace: int | None,
    ) -> Placed[Any]:
        """carry <- step(net, carry, batch, *values) over local batches; the only definition of an epoch.

        Parameters
        ----------
        over : "train", the client's own data, or "public", the round's public batch (whose rows `batch.row` names).
        draws : batches of a step, each from its own shuffles: step(net, carry, batch, another, *values) if 2.
        beside : draw that many public samples at every step too: step(net, carry, batch, public_batch, *values).
        pace : `epochs`, `steps`, `batch_size` where they differ from `local`'s.
        """
        local, bad = replace(self.local, **_pace(pace)), list[int]()  # type: ignore[arg-type]

        def scan(executor: Executor, net: Net, who: np.ndarray, own: Sequence[Tree]) -> Tree:
            trained = executor.scan(net, step, own[0], self._streams(who, local, over, draws, beside), own[1:])
            bad.extend(who[_not_finite(trained)].tolist())  # here, where the cache still has it
            return trained

        trained = self._lift(scan, (carry, *values), in_place=getattr(step, "in_place", False))
        if bad:
            raise Diverged(sorted(bad), self.round, self.lr)
        return trained

    def fit(
        self,
        loss: Loss,
        model: Placed[Params],
        *values: Placed[Any],
        lr: float | None = None,
        clip: float | None = None,
        **how: Any,
    ) -> Placed[Params]:
        """The model trained on `loss` by the local optimiser, which starts afresh; `how` as in `train`.

        `lr` is the learning rate before `local`'s schedule, where it differs from `local.lr`; `clip` bounds the length
        of a step's gradient.
        """
        optimizer = self.local.optimizer_at(self.lr if lr is None else lr * self.lr / self.local.lr)
        if clip is not None:
            optimizer = Clipped(optimizer, clip)
        init = optimizer.init if optimizer.stacks else torch.vmap(optimizer.init)
        start: Placed[Fit] = Placed({arch: Fit(w, init(w.weights)) for arch, w in model._stacks.items()})
        trained, _ = self.train(Descent(loss, optimizer), start, *values, **how)
        return trained

    @property
    def local_steps(self) -> Placed[torch.Tensor]:
        """K_i, the steps `train` takes at each client."""
        steps = [self._steps(int(size), self.local) for size in self.sizes]
        counts = torch.tensor(steps, dtype=torch.float32).to(self._world.population.images.pixels.device)
        return Placed({arch: counts[torch.from_numpy(places)] for arch, places in self._groups.items()})

    def noise(self, purpose: str, *shape: int) -> Placed[torch.Tensor]:
        """Standard normal numbers at every client, by (seed, round, client, purpose); drawn on the host, so that every
        device and executor sees the same.
        """
        seed, device = self._world.seed, self._world.population.images.pixels.device
        rngs = [numpy_rng(seed, "noise", purpose, self.round, int(client)) for client in self.cohort]
        jobs = [partial(rng.standard_normal, shape, np.float32) for rng in rngs]
        drawn = torch.from_numpy(np.stack(self._world.workers.run(jobs))).to(device)
        return Placed({arch: drawn[torch.from_numpy(places).to(device)] for arch, places in self._groups.items()})

    # what everyone sees

    @cached_property
    def public(self) -> torch.Tensor:
        """The public samples of this round, unlabelled and normalised."""
        public = self._public
        return public.batch(torch.arange(len(public.labels), device=public.labels.device))

    def predict_public(self, model: Placed[Params]) -> Placed[torch.Tensor]:
        """Every client's logits on the public samples."""
        return self.each(lambda net, w: net.predict(w, self.public), model)

    def public_batches(self, rows: np.ndarray, steps: int, batch_size: int) -> Callable[[int], Batch]:
        """Batch t = 0, 1, ... of `steps` through shuffled `rows` of the public samples, for what the server trains."""
        rng = numpy_rng(self.seed("server"))
        walk = batches.steps([rows], [steps], batch_size, lambda _, count: rng.permutation(count))
        stream = Stream(self._public, walk, mean=True)
        return lambda t: stream.one(t, 0)

    def seed(self, purpose: str) -> int:
        """A seed for what the server does at random in this round."""
        return derive(self._world.seed, purpose, self.round)

    def coin(self, probability: float) -> bool:
        """The round's shared randomness."""
        return bool(numpy_rng(self._world.seed, "coin", self.round).random() < probability)

    # how it is done

    @cached_property
    def _public(self) -> Images:
        public = self._world.population.public
        if public is None:
            raise RuntimeError("this run has no public data; an algorithm that needs it sets public_data = True")
        rows = self._world.public.rows(len(public.labels), self._world.seed, self.round)
        if rows is None:
            return public
        at = torch.from_numpy(rows).to(public.labels.device)
        return replace(public, pixels=public.pixels[at], labels=public.labels[at])

    def _lift(self, run: Run, values: Sequence[Placed[Any]], in_place: bool = False) -> Placed[Any]:
        """Run at the clients of each architecture: some together, as its executor likes, and these side by side.

        With `in_place`, what comes out has the shapes of the first value, and `run` may write over its copy of that.
        """
        device = self._world.population.images.pixels.device
        workers = self._world.workers if len(self.cohort) > 1 else Workers(1)
        jobs, done = [], {}
        for arch, places in self._groups.items():
            executor, net = self._world.executors[arch], self.nets[arch]
            own = [value._stacks[arch] for value in values]
            size = max(4 * net.params, _bytes(own) // len(places))
            count = executor.shares(len(places), size, device, workers.count)
            done[arch] = Gathered(len(places), own[0] if in_place else None)
            for share in deal(self.sizes[places], count):
                work = partial(run, executor, net, self.cohort[places[share]])
                jobs.append(partial(_run, work, own, share, done[arch], in_place))
        workers.run(jobs)
        return Placed({arch: gathered.whole for arch, gathered in done.items()})

    def _steps(self, size: int, local: Local) -> int:
        if local.steps is not None:
            return local.steps
        return (local.epochs or 1) * -(-size // (local.batch_size or size))

    def _streams(self, clients: np.ndarray, local: Local, over: str, draws: int, beside: int | None) -> list[Stream]:
        population = self._world.population
        if over == "train":
            images, shards = population.images, population.train.of(clients)
        else:
            images, shards = self._public, [np.arange(len(self._public.labels))] * len(clients)
        streams = []
        for purpose in (over, *(f"{over} {draw}" for draw in range(2, draws + 1))):
            order = self._order(clients, purpose)
            if local.steps is not None:
                walk = batches.steps(shards, [local.steps] * len(clients), local.batch_size, order)
            else:
                walk = batches.epochs(shards, local.epochs or 1, local.batch_size, order)
            streams.append(Stream(images, walk, mean=True, seed=self._seed_of(clients, purpose)))
        if beside is not None:
            public = [np.arange(len(self._public.labels))] * len(clients)
            counts = [self._steps(len(shard), local) for shard in shards]
            walk = batches.steps(public, counts, beside, self._order(clients, "beside"))
            streams.append(Stream(self._public, walk, mean=True))
        return streams

    def _order(self, clients: np.ndarray, purpose: str) -> batches.Order:
        """Shuffles by (seed, round, client, purpose)."""
        rngs = [numpy_rng(self._world.seed, purpose, self.round, int(client)) for client in clients]
        return lambda place, count: rngs[place].permutation(count)

    def _seed_of(self, clients: np.ndarray, purpose: str) -> Callable[[int], int]:
        """Of what a client draws beside its batches, by its place."""
        return lambda place: derive(self._world.seed, "draws", purpose, self.round, int(clients[place]))


def _not_finite(trained: Tree) -> np.ndarray:
    """The places of the clients whose values are not all finite; a sum is not, either, if one of them is not."""
    numbers = [leaf for leaf in tree.leaves(trained) if leaf.is_floating_point() and leaf.numel()]
    if not numbers or tree.is_fake(numbers[0]) or torch.stack([leaf.sum() for leaf in numbers]).sum().isfinite():
        return np.arange(0)
    totals = torch.stack([leaf.flatten(1).sum(1) if leaf.dim() > 1 else leaf for leaf in numbers]).sum(0)
    return np.flatnonzero(~totals.isfinite().cpu().numpy())


def _pace(pace: dict[str, int | None]) -> dict[str, int | None]:
    """What is given; asking for epochs overrules the config's steps."""
    given = {key: value for key, value in pace.items() if value is not None or key == "batch_size"}
    return {"steps": None, **given} if "epochs" in given else given


def _run(work: Callable[..., Tree], own: list[Tree], share: np.ndarray, done: Gathered, in_place: bool) -> None:
    """One job of a worker: the share's part of `own`, worked on and put in its place."""
    first = [done.own(share, own[0])] if in_place else []
    done.put(share, work([*first, *tree.rows(own[len(first) :], share)]))


def _bytes(own: Sequence[Tree]) -> int:
    """What the clients work on, the first of their values, such as the carry of `train`, and what else is their own."""
    others = (leaf for leaf in tree.leaves(list(own[1:])) if not tree.expanded(leaf))
    return sum(leaf.numel() * leaf.element_size() for leaf in (*tree.leaves(list(own[:1])), *others))
