"""FedFomo: every client mixes its own and other clients' models, by how much each lowers its validation loss.

Zhang et al., ICLR 2021 (arXiv:2012.08565), Section 3.

    paper         here         meaning
    θ_i^{l(t-1)}  base         client i's model when the round begins
    θ_n^{l(t)}    theta, peer  models after the round's local training: the client's own, and others'
    L_i           losses       mean loss on client i's validation split
    w_n           weights      the weights of the mixture
    P             server.P     affinities: the sums of the weights that the clients have given each other
    M, ε          M, epsilon   models a client downloads, and its chance to take any other than the best

Departures
    D1  models are uploaded, chosen, downloaded and mixed in one round; the released code downloads when the next one
        begins. The client's own model is a candidate, too, which nobody need send.
    D2  the weights that go up for P are in the ledger's bytes, not in its params: no paper counts them.
    D3  where nothing is better than the base it stays, as w = 0 says; a client without validation samples cannot judge
        and keeps its own model.
    D4  running statistics are mixed as the weights are; distances do not look at them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import CommonStart, Nets, OwnModel, Setting, View, only, register, who_from_whom
from fedkd.algorithms.steps import supervised
from fedkd.core import tree
from fedkd.core.losses import Batch, cross_entropy
from fedkd.core.seeds import numpy_rng
from fedkd.core.tree import Params, is_fake, scale, squared_distance
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

TINY = 1e-30  # keeps 0/0 at 0


class Server(NamedTuple):
    w: Params  # everyone's first model
    P: Tensor  # [N, N]; [0, 0] before the first round, when N is not known


@register("fedfomo")
@dataclass(frozen=True)
class FedFomo(CommonStart):
    """First order model optimisation; needs a validation split, and memory for the M models of every client.

    Parameters
    ----------
    M : M ≥ 0, models a client downloads, of the others in the cohort; more than there are means all of them.
        `M=0` is local training that goes back where it does not help.
    epsilon : ε in [0, 1], the chance of each of the M to be any other client instead of the one with most affinity.
    epsilon_decay : what ε loses every round, down to 0.
    """

    M: int = 5
    epsilon: float = 0.3
    epsilon_decay: float = 0.05

    def problems(self, setting: Setting) -> list[str]:
        found = [] if self.M >= 0 else [f"algorithm.M={self.M} must not be negative."]
        if not 0 <= self.epsilon <= 1:
            found.append(f"algorithm.epsilon={self.epsilon:g} must lie between 0 and 1.")
        if self.epsilon_decay < 0:
            found.append(f"algorithm.epsilon_decay={self.epsilon_decay:g} must not be negative.")
        if not setting.validation:
            found.append(
                "algorithm=fedfomo weighs models by their loss on a validation split, but partition.validation=0.\n"
                "Type partition.train=0.6 partition.validation=0.15 partition.test=0.25, or other shares."
            )
        return found

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server(only(nets).init(seed), torch.zeros(0, 0))

    def round(self, server: Server, own: Placed[OwnModel], fed: Federation) -> tuple[Server, Placed[OwnModel]]:
        (base,) = own
        theta = fed.fit(supervised, base)
        uploaded = fed.up(theta, "model")
        affinity = server.P if len(server.P) else server.P.new_zeros(fed.population, fed.population)
        chosen = self.choose(affinity, fed)
        peers = fed.down_each([tuple(uploaded[n] for n in row) for row in chosen], "peers' models")
        losses = fed.sum(validate, base, theta, *peers, over="validation")
        w, weights = fed.each(self.combine, losses, base, theta, *peers)
        sent = fed.up(Placed.pack(aside, weights), "weights")
        rows, columns = fed.cohort[:, None], np.column_stack([fed.cohort, fed.cohort[chosen]])
        at = tuple(torch.from_numpy(place).to(affinity.device) for place in (rows, columns))
        affinity = affinity.index_put(at, sent.stack().stats["w"], accumulate=True)  # p_i <- p_i + w
        return Server(server.w, affinity), Placed.pack(OwnModel, w)

    def choose(self, affinity: Tensor, fed: Federation) -> np.ndarray:
        """The places in the cohort of the M clients whose models each client downloads, [m, M], by ε-greedy."""
        m = len(fed.cohort)
        count = min(self.M, m - 1)
        if is_fake(affinity):
            return (np.arange(m)[:, None] + np.arange(1, count + 1)) % m
        epsilon = max(self.epsilon - self.epsilon_decay * (fed.round - 1), 0.0)
        rng, p = numpy_rng(fed.seed("peers")), affinity.cpu().numpy()[np.ix_(fed.cohort, fed.cohort)]
        chosen = np.zeros((m, count), np.int64)
        for i in range(m):
            others = rng.permutation(np.delete(np.arange(m), i))  # those never met, who tie, come in any order
            ranked = others[np.argsort(-p[i, others], kind="stable")].tolist()
            for k in range(count):
                chosen[i, k] = ranked.pop(rng.integers(len(ranked)) if rng.random() < epsilon else 0)
        return chosen

    def combine(self, net: Net, losses: Tensor, base: Params, *models: Params) -> tuple[Params, Tensor]:
        """θ_i = θ_i^{l(t-1)} + Σ_n w_n (θ_n^{l(t)} − θ_i^{l(t-1)}) (Eq. 2), and w."""
        (of_base, *of_models), samples = losses[:-1] / losses[-1].clamp(min=1), losses[-1]
        gains = torch.stack([of_base - loss for loss in of_models])
        distances = torch.stack([squared_distance(theta.weights, base.weights).sqrt() for theta in models])
        w = (gains / distances.clamp(min=TINY)).clamp(min=0)  # (Eq. 3)
        w = torch.where(samples > 0, w, (torch.arange(len(models), device=w.device) == 0).to(w))
        w = w / w.sum().clamp(min=TINY)
        mixture = scale(1 - w.sum(), base)  # what is left of it when (θ_n − base) is taken apart
        for w_n, theta in zip(w, models, strict=True):
            mixture = tree.map(lambda total, leaf, w_n=w_n: torch.addcmul(total, w_n, leaf), mixture, theta)
        return mixture, w

    def observe(self, server: Server, own: Placed[OwnModel], fed: Federation) -> dict[str, float | View]:
        """Of the weights that each client has given so far, the shares."""
        return who_from_whom("weights", server.P / server.P.sum(1, keepdim=True).clamp(min=TINY))


def validate(net: Net, batch: Batch, *models: Params) -> Tensor:
    """The sums of the models' losses over the batch, and its samples."""
    return torch.stack([*(cross_entropy(net.predict(w, batch.x).float(), batch) for w in models), batch.weight.sum()])


def aside(weights: Tensor) -> Params:
    """As something beside parameters."""
    return Params({}, {"w": weights})
