"""HypCluster and IFCA: the server keeps several models; every client trains the one that fits its data best.

HypCluster: Mansour et al., arXiv:2002.10619, Section 3. IFCA: Ghosh et al., NeurIPS 2020, Algorithm 1.

    HypCluster   IFCA             here            meaning
    q            k                clusters        number of models
    h_i          θ_j              server.models   the models, stacked
    f(k)         ĵ (one-hot s_i)  cluster         the model of least loss on a client's training data
    -            γ, τ             fed.local       learning rate, local steps
    P            M_t              fed.cohort      clients of a round
    m_k          n                fed.sizes       samples of a client; the same everywhere in IFCA

Departures
    D1  both start from models drawn at random; HypCluster's text suggests to train its first ones on a few clients,
        IFCA's experiments restart and keep the best run (a sweep over `seed` does that).
    D2  clients count by their samples, as in FedAvg; IFCA writes equal shares of equal shards.
    D3  gradient averaging (IFCA's option I): what is sent is θ_j − γ g_i, as many numbers as g_i.
    D4  a model that nobody chose stays what it is; IFCA's option II would divide by zero.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, only, plain_sgd, register
from fedkd.algorithms.steps import supervised
from fedkd.core import tree
from fedkd.core.errors import unknown
from fedkd.core.losses import Batch, cross_entropy
from fedkd.core.seeds import derive
from fedkd.core.tree import Index, Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

AVERAGING = ("model", "gradient")


class Server(NamedTuple):
    models: Params  # [clusters, ...]


class Update(NamedTuple):
    model: Params
    cluster: Index


@dataclass(frozen=True)
class Hypotheses(Algorithm):
    """What HypCluster and IFCA share: all but how the server averages.

    Parameters
    ----------
    clusters : at least 1. `clusters=1` is FedAvg.
    """

    clusters: int = 4

    def problems(self, setting: Setting) -> list[str]:
        return [] if self.clusters >= 1 else [f"algorithm.clusters={self.clusters} must be at least 1."]

    def init_server(self, nets: Nets, seed: int) -> Server:
        seeds = [seed, *(derive(seed, "cluster", j) for j in range(1, self.clusters))]
        return Server(tree.stack([only(nets).init(s) for s in seeds]))

    def round(self, server: Server, own: Placed[Any], fed: Federation) -> tuple[Server, Placed[Any]]:
        start, cluster = self.choose(server, fed)
        w = self.train(start, fed)
        update = fed.each(lambda net, w, cluster: Update(w, Index(cluster)), w, cluster)
        models, (chosen,) = fed.up(update, "model").stack()
        member = chosen == torch.arange(self.clusters, device=chosen.device)[:, None]
        weight = member * torch.from_numpy(fed.sizes).to(chosen.device)
        return Server(self.move(server.models, tree.averages(models, weight, server.models), weight)), own

    def choose(self, server: Server, fed: Federation) -> tuple[Placed[Params], Placed[Tensor]]:
        """Each client's best model, argmin_j F_i(θ_j) over its training data, and its number."""
        models = fed.down(server.models, "models")
        w, cluster = fed.each(best, models, fed.sum(losses, models))
        return w, cluster

    def train(self, w: Placed[Params], fed: Federation) -> Placed[Params]:
        return fed.fit(supervised, w)

    def move(self, models: Params, means: Params, weight: Tensor) -> Params:
        """The server's next models, from the means over the clients of each; weight: samples, [clusters, cohort]."""
        return means

    def personal(self, server: Server, own: Placed[Any], fed: Federation) -> Placed[Params]:
        w, fed.notes["cluster"] = self.choose(server, fed)
        return w

    def observe(self, server: Server, own: Placed[Any], fed: Federation) -> dict[str, float | View]:
        cluster = fed.notes["cluster"] if "cluster" in fed.notes else self.choose(server, fed)[1]
        chosen = fed.up(cluster, "cluster").stack().cpu().numpy()
        return {"clusters": View("clusters", chosen), "clusters/used": float(len(np.unique(chosen)))}


@register("hypcluster")
@dataclass(frozen=True)
class HypCluster(Hypotheses):
    """FedAvg within each cluster."""


@register("ifca")
@dataclass(frozen=True)
class IFCA(Hypotheses):
    """The same, or a gradient step of each model a round.

    Parameters
    ----------
    averaging : `model` (option II, HypCluster's) or `gradient` (option I): one step, of which each model gets what its
        clients are of the cohort.
    """

    averaging: str = "model"

    def problems(self, setting: Setting) -> list[str]:
        if self.averaging not in AVERAGING:
            return [*super().problems(setting), unknown("algorithm.averaging", self.averaging, AVERAGING)]
        return super().problems(setting) + (plain_sgd(self.name, setting.local) if self.averaging == "gradient" else [])

    def train(self, w: Placed[Params], fed: Federation) -> Placed[Params]:
        return fed.fit(supervised, w, steps=1) if self.averaging == "gradient" else super().train(w, fed)

    def move(self, models: Params, means: Params, weight: Tensor) -> Params:
        """Option I: θ_j ← θ_j − γ Σ_i n_i/n s_ij g_i: so far towards the mean as the cluster is of the cohort."""
        if self.averaging == "model":
            return means
        share = weight.sum(1) / weight.sum()
        return tree.map(lambda w, mean: torch.lerp(w, mean, share.view(-1, *[1] * (w.dim() - 1))), models, means)


def losses(net: Net, batch: Batch, models: Params) -> Tensor:
    """The loss of each model on some samples of a client."""
    count = len(next(iter(models.weights.values())))
    logits = [net.predict(tree.take(models, j), batch.x).float() for j in range(count)]
    return torch.stack([cross_entropy(z, batch) for z in logits])


def best(net: Net, models: Params, loss: Tensor) -> tuple[Params, Tensor]:
    cluster = loss.argmin()
    return tree.pick(models, cluster), cluster
