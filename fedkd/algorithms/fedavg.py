"""FedAvg: average what the clients train from a common start.

McMahan et al., AISTATS 2017, Algorithm 1.

    paper   here        meaning
    w_t     server.w    the shared model
    S_t     fed.cohort  clients of round t
    n_k     fed.sizes   samples of client k

Departures
    D1  the weights n_k are normalised over the cohort, not over all clients.
"""

from dataclasses import dataclass
from typing import Any

from fedkd.algorithms.base import OneModel, SharedModel, register
from fedkd.algorithms.steps import supervised
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(OneModel):
    """E and B are `local.epochs` and `local.batch_size`; C is `participation`."""

    def round(self, server: SharedModel, own: Placed[Any], fed: Federation) -> tuple[SharedModel, Placed[Any]]:
        w_t = fed.down(server.w, "model")
        w = fed.fit(supervised, w_t)  # ClientUpdate(k, w_t)
        return SharedModel(fed.up(w, "model").mean(fed.sizes)), own  # w_{t+1} <- Σ n_k/n w^k_{t+1}
