"""MOON: FedAvg whose clients keep their representations near the global model's and away from their own last ones.

Li et al., CVPR 2021, Algorithm 1.

    paper       here       meaning
    w^t         server.w   the global model
    w_i^{t-1}   own.w      the model client i sent when it last took part
    z           features   the local model's representation of x, after the projection head
    z_glob      z_glob     the global model's
    z_prev      z_prev     that of client i's previous model
    τ           temperature

z_glob and z_prev do not change while a client trains, so that they are taken once a round, not at every step.

The projection head is part of the model, `model.projection=256`, for every method alike: the paper gives it to the
baselines too. Without it the features themselves are contrasted.

Departures
    D1  a client that takes part for the first time has no previous model: it trains without the contrast.
    D2  z_glob and z_prev are taken by the running statistics of those models' normalisation layers.
    D3  models are averaged by |D_i| over the cohort, as in FedAvg, so that μ=0 is FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from fedkd.algorithms.base import OneModel, Setting, SharedModel, only, register
from fedkd.algorithms.steps import supervised
from fedkd.core.fit import of_passes
from fedkd.core.losses import Batch, cross_entropy, length, looked_up
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Client(NamedTuple):
    w: Params  # survives the rounds client i sits out
    trained: Tensor  # whether it has taken part, so that w is its own


@register("moon")
@dataclass(frozen=True)
class Moon(OneModel):
    """Model-contrastive learning: two forward passes over a client's data more than FedAvg.

    Parameters
    ----------
    mu : μ ≥ 0, the weight of the contrast; the paper's best is 5 on CIFAR-10, else 1. `mu=0` is FedAvg.
    temperature : τ > 0, of the contrast.
    """

    models_held: ClassVar[int] = 3  # w, w^t and w_i^{t-1}

    mu: float = 1.0
    temperature: float = 0.5

    def problems(self, setting: Setting) -> list[str]:
        found = [] if self.mu >= 0 else [f"algorithm.mu={self.mu:g} must be at least 0; 0 is FedAvg."]
        if not self.temperature > 0:
            found.append(f"algorithm.temperature={self.temperature:g} must be positive; the paper has 0.5.")
        return found

    def init_client(self, net: Net, server: SharedModel, seed: int) -> Client:
        return Client(server.w, torch.tensor(False))

    def round(self, server: SharedModel, own: Placed[Client], fed: Federation) -> tuple[SharedModel, Placed[Client]]:
        w_t, (previous, trained) = fed.down(server.w, "model"), own
        if self.mu:
            away = fed.table(self.away, only(fed.nets).feature_size, w_t, previous)
            w = fed.fit(self.loss, w_t, away, trained)  # PartyLocalTraining(i, w^t)
        else:
            w = fed.fit(supervised, w_t)
        own = Placed.pack(Client, w, fed.each(lambda net, trained: torch.ones_like(trained), trained))
        return SharedModel(fed.up(w, "model").mean(fed.sizes)), own  # w^{t+1} ← Σ |D_i|/|D| w_i^t

    @of_passes
    def away(self, net: Net, batch: Batch, w_t: Params, previous: Params) -> Tensor:
        """z_prev/‖z_prev‖ − z_glob/‖z_glob‖: sim being the cosine, sim(z, z_prev) − sim(z, z_glob) is ⟨z, away⟩/‖z‖."""
        z_glob, z_prev = net.features(w_t, batch.x), net.features(previous, batch.x)
        return normalize(z_prev.float(), dim=-1) - normalize(z_glob.float(), dim=-1)

    @of_passes
    def loss(
        self, net: Net, w: Params, batch: Batch, away: Tensor, trained: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """ℓ = ℓ_sup + μ ℓ_con (Eq. 4)."""
        out = net.forward(w, batch.x)
        contrast = self.contrast(out.features.float(), looked_up(away, batch.row))
        value = cross_entropy(out.logits, batch) + self.mu * trained * (batch.weight * contrast).sum(-1)
        return value, out.stats

    def contrast(self, z: Tensor, away: Tensor) -> Tensor:
        """ℓ_con = −log(e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ})), by sample (Eq. 3)."""
        return softplus((z * away).sum(-1) / (self.temperature * length(z).clamp(min=1e-8)))
