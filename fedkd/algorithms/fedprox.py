"""FedProx: FedAvg whose clients are pulled back towards the model they received.

Li et al., MLSys 2020, Algorithm 2.

    paper   here       meaning
    w^t     server.w   the shared model
    h_k     loss       client k's objective, F_k(w) + μ/2 ‖w − w^t‖²

Departures
    D1  clients are drawn and weighted as in FedAvg (the paper draws by p_k and averages evenly), so that μ=0 is FedAvg.
    D2  every client does the same number of epochs; the paper's γ-inexactness measures unequal ones.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkd.algorithms.base import OneModel, SharedModel, register
from fedkd.algorithms.steps import proximal
from fedkd.core.fit import stacks
from fedkd.core.losses import Batch
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


@register("fedprox")
@dataclass(frozen=True)
class FedProx(OneModel):
    """FedAvg with a proximal term.

    Parameters
    ----------
    mu : μ ≥ 0, the weight of the pull; the paper tries 0.001, 0.01, 0.1, 1. `mu=0` is FedAvg.
    """

    models_held: ClassVar[int] = 2  # w and w^t

    mu: float = 0.01

    def round(self, server: SharedModel, own: Placed[Any], fed: Federation) -> tuple[SharedModel, Placed[Any]]:
        w_t = fed.down(server.w, "model")
        w = fed.fit(self.loss, w_t, w_t)  # w_k^{t+1} ≈ argmin h_k(w; w^t)
        return SharedModel(fed.up(w, "model").mean(fed.sizes)), own

    @stacks
    def loss(self, net: Net, w: Params, batch: Batch, w_t: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """h_k(w; w^t) = F_k(w) + μ/2 ‖w − w^t‖² (Eq. 2)."""
        return proximal(net, w, batch, w_t.weights, self.mu)
