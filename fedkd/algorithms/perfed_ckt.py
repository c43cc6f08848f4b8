"""PerFed-CKT: clients of any architecture learn from the cluster of predictions nearest to their own.

Cho et al., arXiv:2109.08119, Algorithm 1. "l. n" below is its line n.

    paper    here               meaning
    w_k      own.w              client k's model, kept between rounds
    s(w,x)   predictions        its class probabilities on the public samples P, [Q, L]
    c_i      server.centroids   centroids of the last cohort's predictions, [c, Q, L]
    s̄_k      nearest            the centroid that client k learns from
    c        clusters           number of clusters
    λ        lambda_            weight of the knowledge term
    b'       public_batch_size  public samples of an iteration
    η, b, τ  fed.local          learning rate, private samples of an iteration, iterations (paper: 0.001, 64, 50)

Departures
    D1  S^(-1), whose initial predictions give the first centroids, is the first cohort itself; its upload is counted.
    D2  before their first round, clients show no cluster: −1.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, register
from fedkd.algorithms.steps import supervised
from fedkd.core.fit import of_passes
from fedkd.core.kmeans import kmeans, match
from fedkd.core.losses import Batch, looked_up
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Server(NamedTuple):
    centroids: Tensor | None  # none before the first round


class Client(NamedTuple):
    w: Params
    cluster: Tensor  # the centroid it chose last, for those who watch


@register("perfed_ckt")
@dataclass(frozen=True)
class PerFedCKT(Algorithm):
    """Clustered co-distillation.

    Parameters
    ----------
    clusters : c, from 1 to the cohort's size m. `clusters=1` is co-distillation without clustering.
    lambda_ : λ ≥ 0. `lambda_=0` is local training.
    public_batch_size : b' ≥ 1.
    """

    one_architecture: ClassVar[bool] = False
    public_data: ClassVar[bool] = True

    clusters: int = 2
    lambda_: float = 2.0
    public_batch_size: int = 128

    def problems(self, setting: Setting) -> list[str]:
        found = []
        if not 1 <= self.clusters <= setting.cohort:
            found.append(
                f"algorithm.clusters={self.clusters} must lie between 1 and the cohort's size, which is "
                f"{setting.cohort}. Choose fewer clusters, or a larger participation."
            )
        if setting.public_per_round is not None:
            found.append(
                "algorithm=perfed_ckt compares predictions of one round with those of the next, on the same public "
                f"samples, but public.per_round={setting.public_per_round}. Type public.per_round=null."
            )
        return found

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server(None)

    def init_client(self, net: Net, server: Server, seed: int) -> Client:
        return Client(net.init(seed), torch.tensor(-1))

    def round(self, server: Server, own: Placed[Client], fed: Federation) -> tuple[Server, Placed[Client]]:
        w, _ = own
        s = self.predictions(w, fed)  # l. 11
        centroids = server.centroids
        if centroids is None:
            centroids = self.cluster(s, None, fed)  # l. 3
        known = fed.down(centroids, "centroids")  # l. 9
        target, chosen = fed.each(nearest, known, s)  # l. 11
        w = fed.fit(self.loss, w, target, beside=self.public_batch_size)  # l. 12-14
        centroids = self.cluster(self.predictions(w, fed), centroids, fed)  # l. 15, then l. 6-7 of the next round
        return Server(centroids), Placed.pack(Client, w, chosen)

    def predictions(self, w: Placed[Params], fed: Federation) -> Placed[Tensor]:
        return fed.each(lambda net, w: torch.softmax(net.predict(w, fed.public), -1), w)

    def cluster(self, s: Placed[Tensor], before: Tensor | None, fed: Federation) -> Tensor:
        """Centroids of what the cohort sends, numbered as those before them."""
        centroids, _ = kmeans(fed.up(s, "predictions").stack(), self.clusters, fed.seed("clusters"))
        return centroids if before is None else centroids[match(before, centroids).argsort()]

    @of_passes
    def loss(
        self, net: Net, w: Params, batch: Batch, public: Batch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Φ_k: cross-entropy + λ · mean over public samples of ‖s̄(x) − s(w, x)‖² (Eq. 1, 2; l. 13-14)."""
        f, stats = supervised(net, w, batch)
        s = torch.softmax(net.forward(w, public.x).logits, -1)
        apart = (s - looked_up(target, public.row)).square().sum(-1)
        return f + self.lambda_ * (public.weight * apart).sum(-1), stats

    def personal(self, server: Server, own: Placed[Client], fed: Federation) -> Placed[Params]:
        w, _ = own
        return w

    def observe(self, server: Server, own: Placed[Client], fed: Federation) -> dict[str, float | View]:
        _, chosen = own
        clusters = fed.up(chosen, "cluster").stack().cpu().numpy()
        return {"clusters": View("clusters", clusters), "clusters/used": float(len(np.unique(clusters[clusters >= 0])))}


def nearest(net: Net, centroids: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """argmin_i ‖c_i − s‖² (Eq. 4)."""
    chosen = (centroids - s).square().sum((-2, -1)).argmin()
    return torch.index_select(centroids, 0, chosen.view(1)).squeeze(0), chosen
