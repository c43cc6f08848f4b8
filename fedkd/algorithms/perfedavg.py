"""Per-FedAvg: a shared model from which one gradient step on its own data takes each client far.

Fallah et al., NeurIPS 2020, Algorithm 1.

    paper       here        meaning
    w_k         server.w    the meta-model after k rounds
    A_k         fed.cohort  clients of a round
    τ           fed.local   local steps (`local.steps`, or as many as `local.epochs` has)
    α           alpha       learning rate of the adaptation
    β           fed.lr      learning rate of the meta-model
    D, D', D''  d, d1, d2   a step's three batches: for the adaptation, its outcome, the Hessian
    δ           delta       the distance at which gradients are taken for the Hessian (HF)

Departures
    D1  the three batches are independent of each other, but within an epoch (or τ steps) each is drawn without
        replacement, as everywhere here.
    D2  running statistics of the meta-model are those of its own passes, on D.
    D3  δ is "small" in the text.
"""

from dataclasses import dataclass
from typing import Any

from fedkd.algorithms.base import OneModel, Setting, SharedModel, plain_sgd, register
from fedkd.algorithms.steps import supervised
from fedkd.core.errors import unknown
from fedkd.core.factors import Beside
from fedkd.core.fit import Factored, LeafByLeaf
from fedkd.core.losses import Batch
from fedkd.core.optim import Weights
from fedkd.core.tree import Params, add, scale, sub
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

VARIANTS = ("fo", "hf")


@register("perfedavg")
@dataclass(frozen=True)
class PerFedAvg(OneModel):
    """Federated MAML. The personal model is the meta-model after a step on a batch of the client's training data.

    Parameters
    ----------
    alpha : α ≥ 0. `alpha=0` is FedAvg whose clients count the same.
    variant : `fo` leaves the Hessian out; `hf` has its product with the gradient from two more gradients.
    delta : δ > 0.
    """

    alpha: float = 0.01
    variant: str = "hf"
    delta: float = 0.001

    def problems(self, setting: Setting) -> list[str]:
        found = [] if self.variant in VARIANTS else [unknown("algorithm.variant", self.variant, VARIANTS)]
        if not self.alpha >= 0:
            found.append(f"algorithm.alpha={self.alpha:g} must be at least 0.")
        if not self.delta > 0:
            found.append(f"algorithm.delta={self.delta:g} must be positive; 0.001 is the default.")
        return found + plain_sgd(self.name, setting.local)

    def round(self, server: SharedModel, own: Placed[Any], fed: Federation) -> tuple[SharedModel, Placed[Any]]:
        w_k, draws = fed.down(server.w, "model"), 2 if self.variant == "fo" else 3
        w = fed.train(LeafByLeaf(lambda *parts: self.step(fed.lr, *parts)), w_k, draws=draws)
        return SharedModel(fed.up(w, "model").mean()), own  # w_{k+1} = Σ_i w^i_{k+1,τ} / rn

    def step(self, beta: float, gradient: Factored, net: Net, w: Params, d1: Batch, d: Batch, *d2: Batch) -> Params:
        """w ← w − β (I − α ∇²f(w, D'')) ∇f(w̃, D'), where w̃ = w − α ∇f(w, D)."""
        adapted = self.adapt(gradient, net, w, d)
        v, _ = gradient(supervised, net, adapted, d1)
        if self.variant == "hf":
            v.add(Beside(shift=scale(-self.alpha, self.curvature(gradient, net, w, v.taken(w.weights), *d2))))
        v.follow(w.weights, beta)
        return Params(w.weights, adapted.stats)

    def adapt(self, gradient: Factored, net: Net, w: Params, d: Batch) -> Params:
        """w̃ = w − α ∇f(w, D)."""
        g, stats = gradient(supervised, net, w, d)
        return Params(g.followed(w.weights, self.alpha), stats)

    def curvature(self, gradient: Factored, net: Net, w: Params, v: Weights, d2: Batch) -> Weights:
        """∇²f(w, D'') v ≈ (∇f(w + δv, D'') − ∇f(w − δv, D'')) / 2δ."""
        ahead, _ = gradient(supervised, net, Params(add(w.weights, v, self.delta), w.stats), d2)
        behind, _ = gradient(supervised, net, Params(sub(w.weights, v, self.delta), w.stats), d2)
        return scale(1 / (2 * self.delta), sub(ahead.taken(v), behind.taken(v)))

    def personal(self, server: SharedModel, own: Placed[Any], fed: Federation) -> Placed[Params]:
        return fed.train(LeafByLeaf(self.adapt), fed.down(server.w, "model"), steps=1)  # never on test data
