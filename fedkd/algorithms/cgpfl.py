"""CGPFL: several generalised models; each client is pulled towards that of its cluster.

Personalized FL with Clustered Generalization, ICLR 2022 submission (dJk1vpEFYF0), Algorithm 1. "l. n" is its line n.

    paper        here             meaning
    θ_i          own.theta        client i's personal model, warm-started and kept
    Ω_K          server.omega     the K generalised models, stacked; one stands for all before the first clustering
    P^t, J^t     server.cluster   the cluster of each client; −1 before its first round
    ω_i,r        omega            client i's copy of its cluster's model
    η            fed.lr           learning rate of θ_i
    d, m         d, m             numbers in a model, samples of all clients (Eq. 12)

Departures
    D1  l. 8 uses one batch in all S steps of a local round, as pFedMe does; the factor 2/N of l. 10's gradient is in β.
    D2  l. 14 pairs cluster k with model k, and the proof supposes that clusters keep their numbers; k-means does not.
        New clusters go on the models they lie nearest to (least sum of squared distances); with α=1 only the numbers
        depend on it. A model nobody is next to stays what it is.
    D3  with a partial cohort its models alone are clustered; the absent keep their clusters' numbers. Who has never
        been clustered receives the mean of the K models, which leaves its cluster open: B = (K + 1)·P then (K > 1).
    D4  running statistics stay with θ_i: ω is pulled to and never run, so that none are needed.
    D5  Eq. 12 wants Θ*, which never leaves the clients: the cost is that of the uploaded ω_i, N and m are the cohort's.
    D6  Eq. 12's logarithm, negative where d > e·m, comes from Sauer's lemma, which needs d ≤ m: a larger d counts as m.
    D7  the paper's μ is "appropriate", no number. Whatever the models' scale, the default weighs the whole spread as
        much as the most clusters; it finds the groups there are, but splits a single one too if its spread has few
        directions. A given μ tells these apart.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, only, plain_sgd, register
from fedkd.algorithms.steps import Envelope, Pair
from fedkd.core import tree
from fedkd.core.kmeans import kmeans, match
from fedkd.core.optim import Weights
from fedkd.core.tree import Params, is_fake
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Server(NamedTuple):
    omega: Weights
    cluster: Tensor  # [N]; empty before the first round

    @property
    def clusters(self) -> int:
        return len(next(iter(self.omega.values())))


class Client(NamedTuple):
    theta: Params


@dataclass(frozen=True)
class Clustered(Algorithm):
    """What CGPFL and CGPFL-Heur share: all but the number of clusters.

    Parameters
    ----------
    alpha : α in (0, 1], the server's step from the old models to the clusters' means.
    lambda_ : λ ≥ 0, the pull of θ_i towards ω.
    beta : β > 0, the step of ω towards θ_i; None is pFedMe's η·λ.
    R, S : local rounds, and steps of θ_i in each.
    """

    alpha: float = 1.0
    lambda_: float = 12.0
    beta: float | None = None
    R: int = 10
    S: int = 5

    @abstractmethod
    def number(self, omega: Tensor, fed: Federation) -> int:
        """K, asked for in the first round."""

    def problems(self, setting: Setting) -> list[str]:
        found = [f"algorithm.{k}={getattr(self, k)} must be at least 1." for k in "RS" if getattr(self, k) < 1]
        return found + plain_sgd(self.name, setting.local)

    def init_server(self, nets: Nets, seed: int) -> Server:
        w = only(nets).init(seed).weights
        return Server({name: leaf[None] for name, leaf in w.items()}, torch.zeros(0, dtype=torch.int64))

    def init_client(self, net: Net, server: Server, seed: int) -> Client:
        return Client(net.init(seed)._replace(weights=tree.take(server.omega, 0)))  # Θ^0 = Ω^0

    def round(self, server: Server, own: Placed[Client], fed: Federation) -> tuple[Server, Placed[Client]]:
        omega = fed.down_each(self.models(server, fed), "model")  # l. 2, 4
        (theta,) = own
        pull = fed.lr * self.lambda_ if self.beta is None else self.beta
        local = Envelope(fed.lr, self.lambda_, self.S, pull)  # l. 8, l. 10
        theta, omega = fed.train(local, Placed.pack(Pair, theta, omega), steps=self.R)  # l. 6-11
        return self.aggregate(server, fed.up(omega, "model").stack(), fed), Placed.pack(Client, theta)

    def models(self, server: Server, fed: Federation) -> list[Weights]:
        """Ω_K J^t: to each client the model of its cluster; to one without, the mean."""
        of_cluster = [tree.take(server.omega, k) for k in range(server.clusters)]
        mean = tree.map(lambda w: w.mean(0), server.omega) if server.clusters > 1 else of_cluster[0]
        return [mean if k < 0 else of_cluster[k] for k in clusters_of(fed, server)]

    def aggregate(self, server: Server, omega: Weights, fed: Federation) -> Server:
        """l. 13-14."""
        points, cluster, count = flat(omega), server.cluster, server.clusters
        if first := not len(cluster):
            cluster, count = cluster.new_full((fed.population,), -1), self.number(points, fed)
        old = tree.map(lambda w: w.expand(count, *w.shape[1:]), server.omega)
        centroids, label = kmeans(points, min(count, len(points)), fed.seed("clusters"))
        if not first:
            label = match(flat(old), centroids)[label]
        member = label == torch.arange(count, device=label.device)[:, None]  # P^{t+1}, transposed
        means = tree.averages(omega, member.float(), old)  # a cluster without clients stays
        at = torch.from_numpy(fed.cohort).to(cluster.device)
        return Server(tree.lerp(old, means, self.alpha), cluster.index_copy(0, at, label))

    def personal(self, server: Server, own: Placed[Client], fed: Federation) -> Placed[Params]:
        (theta,) = own
        return theta

    def observe(self, server: Server, own: Placed[Client], fed: Federation) -> dict[str, float | View]:
        clusters = View("clusters", np.array(clusters_of(fed, server)))
        return {"clusters": clusters, "clusters/K": float(server.clusters)}


@register("cgpfl")
@dataclass(frozen=True)
class CGPFL(Clustered):
    """A given number of clusters.

    Parameters
    ----------
    K : clusters, from 1 to the cohort's size; the paper shows 2 and 4. `K=1` is pFedMe.
    """

    K: int = 4

    def problems(self, setting: Setting) -> list[str]:
        found = super().problems(setting)
        if not 1 <= self.K <= setting.cohort:
            found.append(
                f"algorithm.K={self.K} must lie between 1 and the cohort's size, which is {setting.cohort}. "
                "Choose fewer clusters, or a larger participation."
            )
        return found

    def number(self, omega: Tensor, fed: Federation) -> int:
        return self.K


@register("cgpfl_heur")
@dataclass(frozen=True)
class CGPFLHeur(Clustered):
    """The number of clusters that minimises the generalisation bound in the first round.

    Parameters
    ----------
    mu : μ ≥ 0, the weight of the clusters' spread against their number; None: their maxima weigh the same.
    """

    sent_by_data: ClassVar[bool] = True  # K is chosen

    mu: float | None = None

    def number(self, omega: Tensor, fed: Federation) -> int:
        """argmin e(K) over 1 ≤ K ≤ N/2 (Eq. 12)."""
        most = max(1, len(omega) // 2)
        if is_fake(omega):
            return most
        d, m = omega.shape[1], int(fed.sizes.sum())
        costs = [cost(omega, fed.sizes / m, K, fed.seed("clusters")) for K in range(1, most + 1)]
        mu = complexity(d, m, most) / (costs[0] or 1) if self.mu is None else self.mu
        e = [complexity(d, m, K) + mu * costs[K - 1] for K in range(1, most + 1)]
        return 1 + e.index(min(e))


def flat(models: Weights) -> Tensor:
    """Stacked models as rows of numbers."""
    return torch.cat([w.reshape(len(w), -1) for w in models.values()], 1)


def clusters_of(fed: Federation, server: Server) -> list[int]:
    """The cohort's clusters; a dry run, which does not know them, takes them in turn."""
    if not len(server.cluster):
        return [-1] * len(fed.cohort)
    if is_fake(server.cluster):
        return [i % server.clusters for i in range(len(fed.cohort))]
    return server.cluster[torch.from_numpy(fed.cohort).to(server.cluster.device)].tolist()


def cost(omega: Tensor, share: np.ndarray, K: int, seed: int) -> float:  # noqa: N803 - the paper's letter
    """Σ_i m_i/m min_k ‖ω_i − ω_k‖² (Theorem 2)."""
    centroids, label = kmeans(omega, K, seed)
    return float(share @ (omega - centroids[label]).square().sum(1).cpu().numpy())


def complexity(d: int, m: int, K: int) -> float:  # noqa: N803
    """√(dK/m · log(em/d)), d ≤ m (Eq. 12)."""
    d = min(d, m)
    return math.sqrt(d * K / m * math.log(math.e * m / d))
