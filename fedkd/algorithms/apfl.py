"""APFL: each client is judged by a mixture of its own model and the shared one, and learns how much of each.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, Algorithm 1.

    paper   here        meaning
    w       server.w    the shared model; w_i: client i's version of it during the round
    v_i     own.v       client i's own model, kept between rounds; never sent
    v̄_i     v_bar       its personal model, α_i v_i + (1 − α_i) w_i
    α_i     own.alpha   client i's share of its own model
    η_t     fed.lr      learning rate, of the models and of α_i
    τ       local       steps between two exchanges: `local`'s epochs or steps

Departures
    D1  the shared model is averaged by n_k, as in FedAvg, so that it is FedAvg's whatever α is. Models are not
        projected on a ball.
    D2  α_i takes one plain step a round, on the first batch, before the models move, and is clipped to [0, 1].
    D3  a client is judged by α_i v_i + (1 − α_i) w with the newest shared w, so that α=0 is judged as the shared model.
    D4  v_i is never run alone: the running statistics kept with it are those of v̄_i, and are mixed as parameters are.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedkd.algorithms.base import OneModel, Setting, SharedModel, View, register
from fedkd.algorithms.steps import supervised
from fedkd.core import tree
from fedkd.core.factors import Factors
from fedkd.core.fit import Factored, LeafByLeaf, written_out
from fedkd.core.losses import Batch
from fedkd.core.tree import Params, lerp
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Client(NamedTuple):
    v: Params
    alpha: Tensor


@register("apfl")
@dataclass(frozen=True)
class APFL(OneModel):
    """Mixtures of a shared and an own model.

    Parameters
    ----------
    alpha : α in [0, 1], every client's at first. With `adaptive=false`, `alpha=0` is FedAvg and `alpha=1`
        local training from a common start.
    adaptive : whether the clients learn their α_i.
    """

    models_held: ClassVar[int] = 2  # w_i and v_i

    alpha: float = 0.5
    adaptive: bool = True

    def problems(self, setting: Setting) -> list[str]:
        if 0 <= self.alpha <= 1:
            return []
        return [f"algorithm.alpha={self.alpha:g} must lie between 0 (the shared model) and 1 (the client's own)."]

    def init_client(self, net: Net, server: SharedModel, seed: int) -> Client:
        return Client(server.w, torch.tensor(self.alpha))

    def round(self, server: SharedModel, own: Placed[Client], fed: Federation) -> tuple[SharedModel, Placed[Client]]:
        w_t, (v, alpha) = fed.down(server.w, "model"), own
        if self.adaptive:
            alpha = fed.train(LeafByLeaf(partial(self.adapt, fed.lr)), alpha, v, w_t, steps=1)
        w, v = Placed.pack(parted, fed.fit(mixture, Placed.pack(joined, w_t, v), alpha))
        return SharedModel(fed.up(w, "model").mean(fed.sizes)), Placed.pack(Client, v, alpha)

    def adapt(
        self, lr: float, gradient: Factored, net: Net, alpha: Tensor, batch: Batch, v: Params, w: Params
    ) -> Tensor:
        """α_i ← α_i − η_t ⟨v_i − w_i, ∇f_i(v̄_i)⟩, which is the derivative of f_i(v̄_i) by α_i."""
        share = {"alpha": alpha}
        g, _ = gradient(self.loss_of_share, net, Params(share, {}), batch, v, w)
        return g.followed(share, lr)["alpha"].clamp(0, 1)

    def loss_of_share(
        self, net: Net, share: Params, batch: Batch, v: Params, w: Params
    ) -> tuple[Tensor, dict[str, Tensor]]:
        v_bar = lerp(w.weights, v.weights, share.weights["alpha"])
        return supervised(net, Params(v_bar, v.stats), batch)

    def personal(self, server: SharedModel, own: Placed[Client], fed: Federation) -> Placed[Params]:
        v, alpha = own
        return fed.each(lambda net, alpha, v, w: lerp(w, v, alpha), alpha, v, fed.down(server.w, "model"))

    def observe(self, server: SharedModel, own: Placed[Client], fed: Federation) -> dict[str, float | View]:
        _, alpha = own
        seen = fed.up(alpha, "alpha").stack()
        return {"alpha/mean": float(seen.mean()), "alpha/min": float(seen.min()), "alpha/max": float(seen.max())}


def hand_mixture(net: Net, pair: Params, batch: Batch, alpha: Tensor) -> Factors | None:
    w, v = parted(pair)
    v_bar, weighted = at_mixture(w, v, batch, alpha)
    for_w, for_v = net.cross_entropy(w.weights, batch), net.cross_entropy(v_bar.weights, weighted)
    return None if for_w is None or for_v is None else Factors(**for_w.named("w."), **for_v.named("v."))


def at_mixture(w: Params, v: Params, batch: Batch, alpha: Tensor) -> tuple[Params, Batch]:
    """v̄_i, and the batch whose samples weigh α_i times as much: the gradient there is α_i ∇f_i(v̄_i)."""
    share = [alpha.view(-1, *[1] * (leaf.dim() - 1)) for leaf in w.weights.values()]
    v_bar = tree.map(torch.lerp, w.weights, v.weights, dict(zip(w.weights, share, strict=True)))
    return v._replace(weights=v_bar), batch._replace(weight=alpha.unsqueeze(-1) * batch.weight)


@written_out(hand_mixture)
def mixture(net: Net, pair: Params, batch: Batch, alpha: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """f_i(w_i) + f_i(v̄_i) with w_i fixed in the latter: the gradients ∇f_i(w_i) for w_i, α_i ∇f_i(v̄_i) for v_i."""
    w, v = parted(pair)
    f_w, w_stats = supervised(net, w, batch)
    v_bar = lerp(tree.map(torch.Tensor.detach, w.weights), v.weights, alpha)
    f_v, v_stats = supervised(net, Params(v_bar, v.stats), batch)
    return f_w + f_v, joined(w._replace(stats=w_stats), v._replace(stats=v_stats)).stats


def joined(w: Params, v: Params) -> Params:
    """Two models as one, to be trained together."""
    return Params(*({**label("w.", a), **label("v.", b)} for a, b in zip(w, v, strict=True)))


def parted(pair: Params) -> tuple[Params, Params]:
    """The inverse of `joined`."""
    w, v = (Params(*({k[2:]: x for k, x in part.items() if k[0] == whose} for part in pair)) for whose in "wv")
    return w, v


def label(prefix: str, part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in part.items()}
