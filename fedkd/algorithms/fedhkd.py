"""FedHKD: FedAvg whose clients also share, by class, their mean representation and mean soft prediction.

Chen et al., ICLR 2023, Algorithm 1. "l. n" below is its line n. FedHKD* is `gamma=0`.

    paper              here                meaning
    φ, ω               server.w            extractor R and classifier G of the global model
    φ_i, ω_i           own.w               client i's, right after its local training
    K^j = (H^j, Q^j)   server.knowledge    row j: global hyper-knowledge of class j; ∅ is an absent row
    h̄_i^j, q̄_i^j       hyper_knowledge     client i's mean representation (noisy: h̃_i^j) and mean soft prediction
    N_i^j              fed.class_sizes     samples of class j at client i
    χ_i^j              chi                 noise of the Gaussian mechanism

Departures
    D1  |h(l)| ≤ ζ, which the paper infers from batch normalisation, is enforced: shared representations are clipped.
    D2  in Eq. 11, n and B_i still count the classes and samples whose K^j is ∅; they only add nothing.
    D3  N^j of Eq. 9 counts the clients that share class j, so that the weights sum to one. The server knows N_i^j, as
        FedAvg's knows |D_i|: it is not sent every round.
    D4  l. 10 does not say how: as Eq. 1, by |D_i| over the cohort.
    D5  a client that has not taken part yet is judged by the initial model.

The ε shown is that of the shared representations; soft predictions and models are sent without noise, as in the paper.
"""

import logging
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, only, register
from fedkd.algorithms.steps import class_sums, supervised
from fedkd.core.fit import of_passes
from fedkd.core.losses import Batch, cross_entropy, length, looked_up
from fedkd.core.privacy import accountant_problems, spent_epsilon
from fedkd.core.tree import Params, Rows, is_fake, mean_rows
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

log = logging.getLogger("fedkd")


class Server(NamedTuple):
    w: Params
    knowledge: Rows | None  # none before the first round
    pairs: Tensor  # (client, class) pairs shared in the last round


class Client(NamedTuple):
    w: Params
    releases: Tensor  # how often it has shared each class


@register("fedhkd")
@dataclass(frozen=True)
class FedHKD(Algorithm):
    """Hyper-knowledge distillation; `lambda_=0 gamma=0` is FedAvg.

    Parameters
    ----------
    lambda_ : λ ≥ 0, the weight of the classifier's distance to Q^j at H^j.
    gamma : γ ≥ 0, the weight of the representations' distance to H^y. `gamma=0` is FedHKD*.
    temperature : T > 0 of the soft predictions.
    nu : ν ≥ 0, the fraction of its samples below which a client does not share a class.
    sigma : σ ≥ 0, the noise multiplier; `sigma=0` is no noise, no privacy.
    zeta : ζ > 0, the bound on the elements of a shared representation.
    delta : δ in (0, 1), at which ε is reported.
    accountant : `exact`, or `dp_accounting` (pip install 'fedkd[privacy]').
    """

    sent_by_data: ClassVar[bool] = True  # L_k classes of a client reach ν

    lambda_: float = 0.05
    gamma: float = 0.05
    temperature: float = 0.5
    nu: float = 0.25
    sigma: float = 7.0
    zeta: float = 3.0
    delta: float = 0.01
    accountant: str = "exact"

    def problems(self, setting: Setting) -> list[str]:
        zero_or_more = {name: getattr(self, name) for name in ("lambda_", "gamma", "nu", "sigma")}
        positive = {name: getattr(self, name) for name in ("temperature", "zeta", "delta")}
        wrong = [f"algorithm.{k}={v:g} must be at least 0." for k, v in zero_or_more.items() if not v >= 0]
        wrong += [
            f"algorithm.{k}={v:g} must be positive and finite." for k, v in positive.items() if not 0 < v < math.inf
        ]
        wrong += [f"algorithm.delta={self.delta:g} must be below 1; the paper has 0.01."] if self.delta >= 1 else []
        return wrong + accountant_problems(self.accountant)

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server(only(nets).init(seed), None, torch.tensor(0))  # l. 2

    def init_client(self, net: Net, server: Server, seed: int) -> Client:
        return Client(server.w, torch.zeros(net.classes, dtype=torch.int64))

    def round(self, server: Server, own: Placed[Client], fed: Federation) -> tuple[Server, Placed[Client]]:
        w_t, net, (_, releases) = fed.down(server.w, "model"), only(fed.nets), own  # l. 5
        if server.knowledge is None:
            w = fed.fit(supervised, w_t)
        else:
            w = fed.fit(self.loss, w_t, fed.down(server.knowledge, "hyper-knowledge"))  # l. 15-18
        chi = fed.noise("representations", net.classes, net.feature_size)
        mine, releases = fed.each(self.hyper_knowledge, fed.sum(self.sums, w), chi, releases)  # l. 19
        received: Rows = fed.up(mine, "hyper-knowledge").stack()  # l. 20
        pairs = received.present.sum()
        if not is_fake(pairs) and not pairs and (fed.round == 1 or server.pairs):
            log.warning("round %d: no class is nu=%g of any client's data, so none is shared: this is FedAvg. "
                        "Try a smaller algorithm.nu.", fed.round, self.nu)  # fmt: skip
        w_next = fed.up(w, "model").mean(fed.sizes)  # l. 10
        knowledge = mean_rows(received, fed.class_sizes)  # K^j = Σ_i N_i^j/N^j K_i^j (Eq. 9; l. 9)
        return Server(w_next, knowledge, pairs), Placed.pack(Client, w, releases)

    @of_passes
    def loss(self, net: Net, w: Params, batch: Batch, knowledge: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """CE + λ/n Σ_j ‖Q(G(H^j), T) − Q^j‖ + γ/B Σ_k ‖R(x_k) − H^{y_k}‖ (Eq. 11)."""
        out = net.forward(w, batch.x)
        value, known = cross_entropy(out.logits, batch), knowledge.present.to(batch.weight.dtype)
        h, q = torch.split(knowledge.values, [net.feature_size, net.classes], -1)
        if self.lambda_:
            value = value + self.lambda_ * (known * length(self.soft(net.head(w, h)) - q)).mean(-1)
        if self.gamma:
            apart = length(out.features - looked_up(h, batch.y))
            value = value + self.gamma * (batch.weight * known.gather(-1, batch.y) * apart).sum(-1)
        return value, out.stats

    def soft(self, z: Tensor) -> Tensor:
        """Q(z, T) (Eq. 2)."""
        return torch.softmax(z / self.temperature, -1)

    @of_passes
    def sums(self, net: Net, batch: Batch, w: Params) -> tuple[Tensor, Tensor]:
        """By class, the sum of (h, q) over samples, and their number."""
        h = net.features(w, batch.x)
        both = torch.cat([h.clamp(-self.zeta, self.zeta).float(), self.soft(net.head(w, h)).float()], -1)
        return class_sums(both, batch, net.classes)

    def hyper_knowledge(
        self, net: Net, sums: tuple[Tensor, Tensor], chi: Tensor, releases: Tensor
    ) -> tuple[Rows, Tensor]:
        total, count = sums
        size = count.clamp(min=1).unsqueeze(-1)
        h, q = torch.split(total / size, [net.feature_size, net.classes], -1)  # Eq. 4
        h = h + 2 * self.zeta / size * self.sigma * chi  # Eq. 7, 8
        shared = (count > 0) & (count / count.sum() >= self.nu)
        values = torch.where(shared.unsqueeze(-1), torch.cat([h, q], -1), 0.0)
        return Rows(values, shared), releases + shared

    def personal(self, server: Server, own: Placed[Client], fed: Federation) -> Placed[Params]:
        w, _ = own
        return w

    def shared(self, server: Server) -> Params:
        return server.w

    def observe(self, server: Server, own: Placed[Client], fed: Federation) -> dict[str, float | View]:
        """ε of an element of a mean representation, as in the paper, and of all its d elements together."""
        _, releases = own
        counts = fed.up(releases, "releases").stack().cpu().numpy()
        most, sigma_d = int(counts.max()), self.sigma / math.sqrt(only(fed.nets).feature_size)
        spent = {n: spent_epsilon(self.sigma, self.delta, n) for n in np.unique(counts).tolist()}
        view = {"epsilon_spent": View("matrix", np.vectorize(spent.get)(counts), "client", "class")}
        return {
            "privacy/epsilon": spent_epsilon(self.sigma, self.delta, most, self.accountant),
            "privacy/epsilon_vector": spent_epsilon(sigma_d, self.delta, most, self.accountant),
            "hyper_knowledge/pairs": float(server.pairs),
            **(view if self.sigma else {}),
        }
