"""Which model is judged on which data; outside the ledger, and without a trace in any state."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, View
from fedkd.core import tree
from fedkd.core.losses import Batch, correct, per_sample_cross_entropy
from fedkd.core.seeds import numpy_rng
from fedkd.core.tree import Params, Tree
from fedkd.federation.fed import Federation, World
from fedkd.federation.ledger import Ledger
from fedkd.federation.placed import Placed
from fedkd.federation.population import Shards
from fedkd.federation.store import Store
from fedkd.models.net import CHUNK, Net

TOGETHER, BYTES = 128, 2**29  # clients whose personal models are in memory at once, and what these may take


class Scores(NamedTuple):
    """Of some clients, on their own samples; NaN where a client has none."""

    accuracy: np.ndarray
    loss: np.ndarray
    samples: np.ndarray

    def metrics(self, whose: str) -> dict[str, float]:
        judged = self.samples > 0
        accuracy, samples = self.accuracy[judged], self.samples[judged]
        if not len(accuracy):
            return {}
        return {
            f"acc/{whose}/mean": float(accuracy.mean()),
            f"acc/{whose}/std": float(accuracy.std()),
            f"acc/{whose}/weighted": float(np.average(accuracy, weights=samples)),
            f"acc/{whose}/worst": float(accuracy.min()),
            f"loss/{whose}/mean": float(self.loss[judged].mean()),
        }


class Sent(NamedTuple):
    """The models that a round's clients sent up, by architecture."""

    clients: Tensor
    models: dict[str, Tree]


class Evaluation(NamedTuple):
    """One round's verdict."""

    clients: np.ndarray
    personal: Scores
    shared: Scores | None
    metrics: dict[str, float]
    views: dict[str, View]


def evaluate(
    algorithm: Algorithm,
    server: Any,
    store: Store,
    world: World,
    round: int,
    clients: np.ndarray,
    sent: Sent | None = None,
) -> Evaluation:
    """Judge the personal models of `clients`, the server's model where there is one, and what was `sent`."""
    population = world.population
    shared = algorithm.shared(server)
    metrics: dict[str, float] = {}
    of_shared = None
    if shared is not None:
        (arch,) = population.nets
        of_shared = _one_model(world, arch, shared, population.test, clients)
        metrics |= of_shared.metrics("shared")
        if len(population.global_test):
            hits, losses = _samples(world, arch, shared, population.global_test)
            metrics |= {"acc/shared/global": float(hits.mean()), "loss/shared/global": float(losses.mean())}
    personal, validation = [], []
    together = max(1, min(TOGETHER, BYTES // max(4 * net.params for net in population.nets.values())))
    for start in range(0, len(clients), together):
        some = clients[start : start + together]
        fed = Federation(world, round, some, Ledger())
        models = algorithm.personal(server, store.gather(some), fed)
        if of_shared is not None and _is(models, shared):
            personal.append(Scores(*(values[start : start + together] for values in of_shared)))
        else:
            personal.append(_own_models(fed, models, population.test, some))
        if population.validation.sizes.any():
            validation.append(_own_models(fed, models, population.validation, some))
        del models  # or they would be in memory beside the next
    of_personal = _join(personal)
    metrics |= of_personal.metrics("personal")
    if validation:
        metrics |= _join(validation).metrics("validation")
    if sent is not None:
        senders = sent.clients.cpu().numpy()
        models, apart = Placed(sent.models), Federation(world, round, senders, Ledger())
        metrics |= _own_models(apart, models, population.test, senders).metrics("sent")
    views: dict[str, View] = {}
    watched = fed if len(clients) <= together else Federation(world, round, clients, Ledger())
    for name, seen in _observed(algorithm, server, store, watched).items():
        (views if isinstance(seen, View) else metrics)[name] = seen  # type: ignore[assignment]
    return Evaluation(clients, of_personal, of_shared, metrics, views)


def _observed(algorithm: Algorithm, server: Any, store: Store, fed: Federation) -> dict[str, float | View]:
    """What the method itself has to show; most have nothing, and their clients' states are not fetched for it."""
    if type(algorithm).observe is Algorithm.observe:
        return {}
    return algorithm.observe(server, store.gather(fed.cohort), fed)


def judged_clients(count: int | None, population: int, seed: int) -> np.ndarray:
    """All clients, or a fixed draw of `count` of them."""
    if count is None or count >= population:
        return np.arange(population)
    return np.sort(numpy_rng(seed, "judged").choice(population, count, replace=False))


def _own_models(fed: Federation, models: Placed[Params], shards: Shards, clients: np.ndarray) -> Scores:
    def score(net: Net, batch: Batch, model: Params) -> tuple[Tensor, Tensor]:
        logits = net.predict(model, batch.x).float()
        hits, losses = correct(logits, batch.y), per_sample_cross_entropy(logits, batch.y)
        return (batch.weight * hits).sum(), (batch.weight * losses).sum()

    sums = fed.sum_over(shards, score, models)
    hits, losses = (values.double().cpu().numpy() for values in fed.up(sums, "scores").stack())
    return _scores(hits, losses, shards.sizes[clients])


def _one_model(world: World, arch: str, model: Params, shards: Shards, clients: np.ndarray) -> Scores:
    """One model on many clients' samples: one long pass instead of one a client."""
    sizes = shards.sizes[clients]
    hits, losses = _samples(world, arch, model, np.concatenate(shards.of(clients)))
    owner = np.repeat(np.arange(len(clients)), sizes)
    hits, losses = (np.bincount(owner, values, len(clients)) for values in (hits, losses))
    return _scores(hits, losses, sizes)


@torch.no_grad()
def _samples(world: World, arch: str, model: Params, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hit and loss of every sample."""
    images, net = world.population.images, world.population.nets[arch]
    at = torch.from_numpy(rows).to(images.labels.device)
    found = []
    for part in torch.split(at, CHUNK):
        with world.executors[arch].precision(at.device):
            logits = net.predict(model, images.batch(part)).float()
        y = images.labels[part]
        found.append(torch.stack([correct(logits, y), per_sample_cross_entropy(logits, y)]))
    hits, losses = torch.cat(found, 1).double().cpu().numpy() if found else np.zeros((2, 0))
    return hits, losses


def _scores(hits: np.ndarray, losses: np.ndarray, sizes: np.ndarray) -> Scores:
    count = np.where(sizes > 0, sizes, np.nan)
    return Scores(hits / count, losses / count, sizes)


def _join(parts: list[Scores]) -> Scores:
    return Scores(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _is(models: Placed[Params], shared: Tree) -> bool:
    """Whether every client's model is the shared one: rows that all lie in the shared tensor's memory."""
    return all(
        row.stride(0) == 0 and row.data_ptr() == one.data_ptr()
        for stack in models._stacks.values()
        for row, one in zip(tree.leaves(stack), tree.leaves(shared), strict=True)
    )
