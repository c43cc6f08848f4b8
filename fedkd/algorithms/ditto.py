"""Ditto: FedAvg, and beside it a personal model at every client, pulled towards the shared one.

Li et al., ICML 2021, Algorithm 1, with FedAvg as its solver of the global problem.

    paper   here              meaning
    w^t     server.w          the shared model
    v_k     own.v             client k's personal model, kept between rounds; never sent
    h_k     loss              its objective, F_k(v_k) + λ/2 ‖v_k − w^t‖²
    s       personal_epochs   how long v_k trains in a round

Departures
    D1  the shared model is averaged by n_k, as in FedAvg, so that it is FedAvg's whatever λ is.
    D2  s counts epochs, not iterations, as r does for w.
    D3  v_k^0 is left open: every client draws its own, so that λ=0 is local training.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedkd.algorithms.base import OneModel, Setting, SharedModel, register
from fedkd.algorithms.steps import proximal, supervised
from fedkd.core.fit import stacks
from fedkd.core.losses import Batch
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Client(NamedTuple):
    v: Params


@register("ditto")
@dataclass(frozen=True)
class Ditto(OneModel):
    """A shared model, and personal ones near it.

    Parameters
    ----------
    lambda_ : λ ≥ 0, the pull of v_k towards w; the paper has 1 where it does not choose by validation, among 0.1, 1 and
        2. `lambda_=0` is local training.
    personal_epochs : s ≥ 1, epochs of v_k in a round; null: as long as w trains.
    """

    models_held: ClassVar[int] = 2  # v_k and w^t

    lambda_: float = 1.0
    personal_epochs: int | None = None

    def problems(self, setting: Setting) -> list[str]:
        found = []
        if not self.lambda_ >= 0:
            found.append(
                f"algorithm.lambda_={self.lambda_:g} must not be negative; 0 is local training, 1 the paper's."
            )
        if self.personal_epochs is not None and self.personal_epochs < 1:
            found.append(
                f"algorithm.personal_epochs={self.personal_epochs} must be at least 1; null is as many as local has."
            )
        return found

    def init_client(self, net: Net, server: SharedModel, seed: int) -> Client:
        return Client(net.init(seed))

    def round(self, server: SharedModel, own: Placed[Client], fed: Federation) -> tuple[SharedModel, Placed[Client]]:
        w_t, (v,) = fed.down(server.w, "model"), own
        w = fed.fit(supervised, w_t)  # UPDATE_GLOBAL: w_k^t, from w^t
        v = fed.fit(self.loss, v, w_t, epochs=self.personal_epochs)  # min h_k(v_k; w^t), from v_k
        return SharedModel(fed.up(w, "model").mean(fed.sizes)), Placed.pack(Client, v)  # AGGREGATE

    @stacks
    def loss(self, net: Net, v: Params, batch: Batch, w_t: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """h_k(v_k; w^t); its gradient is ∇F_k(v_k) + λ (v_k − w^t)."""
        return proximal(net, v, batch, w_t.weights, self.lambda_)

    def personal(self, server: SharedModel, own: Placed[Client], fed: Federation) -> Placed[Params]:
        (v,) = own
        return v
