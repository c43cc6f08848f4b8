"""FedAMP: each client is pulled towards a mixture of all models in which those near its own weigh most.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm 1.

    paper   here        meaning
    w_i     own.w       client i's model
    u_i     u           the model the server makes for client i, Σ_j ξ_ij w_j
    ξ_ij    attention   what w_j weighs in u_i: α A'(‖w_i − w_j‖²); ξ_ii is the rest, 1 − Σ_{j≠i} ξ_ij
    A(x)                1 − e^(−x/σ), so that A'(x) = e^(−x/σ)/σ

Departures
    D1  α_k is the same in every round. The defaults are ours, for small networks some 10 apart by squared distance;
        they were found by trying on Fashion-MNIST with its test samples in view, so results there prove nothing.
    D2  a client sends w_i^{k−1} at the beginning of round k, not at the end of round k−1: the server keeps no models.
    D3  argmin F_i(w) + λ/(2α) ‖w − u_i‖² is `local`'s epochs or steps, from u_i.
    D4  with a partial cohort its members alone are mixed.
    D5  running statistics have no gradient: they are mixed by the same ξ, in which they have no say.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkd.algorithms.base import CommonStart, OwnModel, Setting, SharedModel, View, register, who_from_whom
from fedkd.algorithms.steps import Proximal
from fedkd.core import coefficients, tree
from fedkd.core.optim import Weights
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed


@register("fedamp")
@dataclass(frozen=True)
class FedAMP(CommonStart):
    """Attentive message passing.

    Parameters
    ----------
    alpha : α in (0, σ/(m − 1)] for a cohort of m, the step towards other models; null: σ/m, so that equal models are
        averaged.
    lambda_ : λ ≥ 0, what it costs to be far from another client; the pull is λ/α. `lambda_=0` only starts at u_i.
    sigma : σ > 0, the squared distance at which attention has fallen to 1/e.
    """

    models_held: ClassVar[int] = 2  # w_i and u_i

    alpha: float | None = None
    lambda_: float = 0.01
    sigma: float = 10.0

    def problems(self, setting: Setting) -> list[str]:
        m, alpha = setting.cohort, self.step(setting.cohort)
        wanted = {
            "alpha": self.alpha is None or alpha > 0,
            "lambda_": self.lambda_ >= 0,
            "sigma": 0 < self.sigma < math.inf,
        }
        kinds = {"alpha": "positive", "lambda_": "at least 0", "sigma": "positive and finite"}
        found = [f"algorithm.{k}={getattr(self, k)} must be {kinds[k]}." for k, right in wanted.items() if not right]
        if not found and (others := alpha * (m - 1) / self.sigma) > 1:
            found.append(
                f"algorithm=fedamp can give the {m - 1} other models of a round a weight of alpha·{m - 1}/sigma = "
                f"{others:g}, which leaves less than nothing for a client's own.\n"
                f"Type algorithm.alpha=null, which is {self.sigma / m:g} here, or a larger algorithm.sigma."
            )
        return found

    def step(self, m: int) -> float:
        """α for m clients."""
        return self.sigma / m if self.alpha is None else self.alpha

    def round(
        self, server: SharedModel, own: Placed[OwnModel], fed: Federation
    ) -> tuple[SharedModel, Placed[OwnModel]]:
        (w,), m = own, len(fed.cohort)
        models: Params = fed.up(w, "model").stack()
        mixtures = coefficients.mix(self.attention(models.weights), models)  # U^k = W^{k−1} − α ∇A(W^{k−1})
        u = fed.down_each([tree.take(mixtures, i) for i in range(m)], "cloud model")
        return server, Placed.pack(OwnModel, fed.fit(self.objective(m), u, u))

    def attention(self, models: Weights) -> Tensor:
        """ξ of these models."""
        apart = tree.squared_distances(models)
        xi = self.step(len(apart)) / self.sigma * torch.exp(-apart / self.sigma)
        xi = xi - torch.diag(xi.diagonal())
        return xi + torch.diag(1 - xi.sum(1))

    def objective(self, m: int) -> Proximal:
        """F_i(w) + λ/(2α) ‖w − u_i‖²."""
        return Proximal(self.lambda_ / self.step(m))

    def observe(self, server: SharedModel, own: Placed[OwnModel], fed: Federation) -> dict[str, float | View]:
        """The attention that these clients' models would pay to one another in the next round."""
        (w,) = own
        return who_from_whom("attention", self.attention(fed.up(w, "model").stack().weights))
